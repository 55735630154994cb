package app

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestBadConfigurationsAreRefused(t *testing.T) {
	good := "coordinator: 127.0.0.1:1\ntls: {ca: a, cert: b, key: c}\n"
	for name, c := range map[string]struct{ yaml, want string }{
		"unknown key":    {good + "colour: blue\n", "colour"},
		"no coordinator": {"tls: {ca: a, cert: b, key: c}\n", "coordinator"},
		"no TLS":         {"coordinator: 127.0.0.1:1\n", "mTLS"},
		"relative path":  {good + "state_dir: here\n", "state_dir"},
		"node":           {good + "node: NOT A NAME\n", "node"},
		"width":          {good + "snapshot: {width: 0}\n", "at least one"},
		"starts":         {good + "limits: {starts: -1}\n", "negative"},
		"restores":       {good + "limits: {restores: -1}\n", "negative"},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "agentd.yaml")
			must(t, os.WriteFile(file, []byte(c.yaml), 0o600))
			var out, errOut bytes.Buffer
			if code := Main([]string{"agentd", "--config", file}, &out, &errOut); code != 1 || !strings.Contains(errOut.String(), c.want) {
				t.Fatalf("code %d, said %q", code, errOut.String())
			}
		})
	}
}

func TestVersionAndConfigArePrinted(t *testing.T) {
	var out, errOut bytes.Buffer
	if code := Main([]string{"agentd", "--version", "--bundle-dir", t.TempDir()}, &out, &errOut); code != 0 || !strings.Contains(out.String(), "commit") || !strings.Contains(out.String(), "bundle") {
		t.Fatalf("%d %q %q", code, out.String(), errOut.String())
	}
	out.Reset()
	t.Setenv("AGENTD_NODE", "from-env")
	if code := Main([]string{"agentd", "--print-config", "--labels", "zone=a"}, &out, &errOut); code != 0 || !strings.Contains(out.String(), "node: from-env") || !strings.Contains(out.String(), "zone: a") {
		t.Fatalf("%d %q %q", code, out.String(), errOut.String())
	}
}

func TestByDigest(t *testing.T) {
	for ref, want := range map[string]string{
		"host:5000/a/b:1":        "host:5000/a/b@sha256:x",
		"host:5000/a/b":          "host:5000/a/b@sha256:x",
		"host:5000/a:1@sha256:y": "host:5000/a@sha256:x",
		"name":                   "name@sha256:x",
	} {
		if got := byDigest(ref, "sha256:x"); got != want {
			t.Errorf("%s: %s, want %s", ref, got, want)
		}
	}
}
