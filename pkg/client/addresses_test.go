package client

import (
	"context"
	"path/filepath"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

func TestAddresses(t *testing.T) {
	for addr, want := range map[string]string{
		"https://a:1": "dns:///a:1", "https://a": "dns:///a:443", "unix:///run/a": "unix:/run/a",
		"https://a:1,https://b": "dormouse:///coordinators", "unix:///a, unix:///b": "dormouse:///coordinators",
		"": "", "a:1": "", "http://a": "", "https://a,unix:///b": "", "https://a/path": "", "https://a,b": "", ",": "",
	} {
		got, err := Config{Addr: addr}.coordinators()
		if want == "" && !errs.Has(err, errs.InvalidField) || want != "" && (err != nil || got.target != want) {
			t.Errorf("%q: %q, %v", addr, got.target, err)
		}
	}
}

// TestSeveralCoordinators: what answers will do, whichever was named first.
func TestSeveralCoordinators(t *testing.T) {
	dir := t.TempDir()
	first, second := filepath.Join(dir, "first.sock"), filepath.Join(dir, "second.sock")
	c, err := Dial(Config{Addr: "unix://" + first + ",unix://" + second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	b := &server{}
	listen(t, "unix", second, b)
	if err := c.Sandbox("u").Refresh(context.Background()); err != nil || b.count("Get") != 1 {
		t.Fatalf("the first is not there, the second is: %v", err)
	}
}
