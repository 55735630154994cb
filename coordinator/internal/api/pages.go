package api

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"strings"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// token is where a list goes on. It is bound to the list's kind and filters.
type token struct {
	Version int    `json:"v"`
	Filter  string `json:"f"`
	After   string `json:"a,omitempty"`
	Stage   string `json:"s,omitempty"`
}

const tokenVersion = 1

// maxReads bounds the pages that one answer reads from the store. A filter that little
// passes gives short pages, never endless ones.
const maxReads = 20

// filterID is the digest of what a list selects.
func filterID(parts ...string) string {
	sum := sha256.Sum256([]byte(strings.Join(parts, "\x00")))
	return hex.EncodeToString(sum[:8])
}

func (t token) encode() string {
	b, err := json.Marshal(t)
	if err != nil {
		panic(err) // strings and an int cannot fail to encode
	}
	return base64.RawURLEncoding.EncodeToString(b)
}

func parseToken(s, filter string) (token, error) {
	if s == "" {
		return token{Version: tokenVersion, Filter: filter}, nil
	}
	var t token
	b, err := base64.RawURLEncoding.DecodeString(s)
	if err == nil {
		err = json.Unmarshal(b, &t)
	}
	if err != nil || t.Version != tokenVersion || t.After == "" && t.Stage == "" {
		return t, errs.New(errs.InvalidField, "page_token: not one of this server's; begin again without it").With("field", "page_token")
	}
	if t.Filter != filter {
		return t, errs.New(errs.InvalidField, "page_token: it belongs to a list with other filters; begin again without it").With("field", "page_token")
	}
	return t, nil
}

// selection is what a list asks for.
type selection struct {
	query  catalog.Query
	filter string
	size   int32
	token  string
}

// list gives a page of the objects that keep wants, as read gives them of their records, and the token of the next one.
func list[T any](ctx context.Context, s *Server, sel selection, read func(catalog.Record) (T, error), keep func(T) bool) ([]T, string, error) {
	size, err := catalog.PageSize(int(sel.size))
	if err != nil {
		return nil, "", err
	}
	t, err := parseToken(sel.token, sel.filter)
	if err != nil {
		return nil, "", err
	}
	var out []T
	sel.query.After = t.After
	for range maxReads {
		sel.query.PageSize = size - len(out)
		page, err := s.cfg.Store.List(ctx, sel.query)
		if err != nil {
			return nil, "", err
		}
		for _, rec := range page.Records {
			o, err := read(rec)
			if err != nil {
				return nil, "", err
			}
			if keep(o) {
				out = append(out, o)
			}
		}
		sel.query.After = page.Next
		if page.Next == "" {
			return out, "", nil
		}
		if len(out) == size {
			break
		}
	}
	t.After = sel.query.After
	return out, t.encode(), nil
}

// parseLabels reads "key=value" filters.
func parseLabels(in []string) (map[string]string, error) {
	if len(in) > 16 {
		return nil, errs.New(errs.LimitExceeded, "labels: at most 16 filters, got %d", len(in)).With("field", "labels")
	}
	want := make(map[string]string, len(in))
	for _, l := range in {
		k, v, ok := strings.Cut(l, "=")
		if !ok || k == "" {
			return nil, errs.New(errs.InvalidField, "labels: a filter is key=value, not %q", l).With("field", "labels")
		}
		if have, twice := want[k]; twice && have != v {
			return nil, errs.New(errs.InvalidField, "labels: %s cannot have two values", k).With("field", "labels")
		}
		want[k] = v
	}
	return want, nil
}

func hasLabels(have, want map[string]string) bool {
	for k, v := range want {
		if got, ok := have[k]; !ok || got != v {
			return false
		}
	}
	return true
}
