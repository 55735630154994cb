package api

import "testing"

// FuzzPageToken: a token of any content is one of this server's for this list, or refused.
func FuzzPageToken(f *testing.F) {
	filter := filterID("sandboxes", "a=b")
	f.Add(token{Version: tokenVersion, Filter: filter, After: "x"}.encode())
	f.Add(token{Version: tokenVersion, Filter: "other", After: "x"}.encode())
	for _, text := range []string{"", "AAAA", "bnVsbA", "e30", "!!!!"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		tok, err := parseToken(text, filter)
		if err != nil {
			return
		}
		if tok.Filter != filter || tok.Version != tokenVersion {
			t.Fatalf("%q became %+v", text, tok)
		}
		if text != "" {
			if back, err := parseToken(tok.encode(), filter); err != nil || back != tok {
				t.Fatalf("%+v became %+v, %v", tok, back, err)
			}
		}
	})
}
