// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package report

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestFigures(t *testing.T) {
	for _, tc := range []struct {
		figure  Figure
		verdict string
	}{
		{Figure{Value: 1.25, AtMost: 1.25}, "met"},
		{Figure{Value: 1.26, AtMost: 1.25}, "missed"},
		{Figure{Value: 0.85, AtLeast: 0.85}, "met"},
		{Figure{Value: 0.84, AtLeast: 0.85}, "missed"},
		{Figure{Value: 3}, ""},
	} {
		if got := tc.figure.Verdict(); got != tc.verdict {
			t.Errorf("%+v: %q, want %q", tc.figure, got, tc.verdict)
		}
	}
	f := Figure{What: "rate", Product: "3.0/s", Bare: "4.0/s", Value: 0.75, Unit: "x", AtLeast: 0.85}
	if got, want := f.String(), "rate: 3.0/s, bare 4.0/s: 0.75 x (at least 0.85 x: missed)"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if table := Table([]Figure{f}); !strings.Contains(table, "| rate | 3.0/s | 4.0/s | 0.75 x | at least 0.85 x | missed |") {
		t.Errorf("the table is\n%s", table)
	}
}

func TestPublishedTellsNothingOfTheMachine(t *testing.T) {
	host := hostname()
	v := map[string]any{
		"began": time.Date(2026, 11, 30, 16, 20, 1, 5, time.UTC), "addr": "unix:///var/lib/x/grpc.sock",
		"failures": []any{map[string]string{"error": `dial unix /var/lib/dormouse-dev/ab/grpc.sock: refused by 10.1.2.3:9443 at 12:13:14.5`}},
		"image":    "https://registry.example/x@sha256:00", "host": host, "rate": "12 MB/s", "count": 3,
	}
	dir := filepath.Join(t.TempDir(), "results")
	if err := Publish(dir, "l01", v, "# L01\n\nOf 2026-11-30 16:20 UTC, below /root/somewhere/else on "+host+". 40 MB/s, 3/4, p50/p99.\n"); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"l01.json", "l01.md"} {
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		text := string(data)
		for _, leak := range []string{"/var/lib", "/root", "grpc.sock", "10.1.2.3", "12:13", "16:20", "registry.example"} {
			if strings.Contains(text, leak) {
				t.Errorf("%s tells %q:\n%s", name, leak, text)
			}
		}
		if found := Leaks(text); len(found) > 0 || !strings.Contains(text, "2026-11-30") || !strings.Contains(text, "MB/s") {
			t.Errorf("%s: leaks %q in\n%s", name, found, text)
		}
		if host != "" && strings.Contains(text, host) {
			t.Errorf("%s tells the host's name", name)
		}
	}
	if text := "40 MB/s, 3/4 of p50/p99; agentd1/create/start.x; /dormouse.v1.SandboxService/GetSandbox"; len(Leaks(text)) > 0 || Clean(text) != text {
		t.Errorf("%q became %q", text, Clean(text))
	}
}

// What is kept in docs/results was published by this package.
func TestKeptResultsTellNothingOfAMachine(t *testing.T) {
	for _, pattern := range []string{"*.json", "*.md"} {
		files, err := filepath.Glob(filepath.Join("..", "..", "docs", "results", pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if found := Leaks(string(data)); len(found) > 0 {
				t.Errorf("%s tells of the machine it was made on: %q", file, found)
			}
		}
	}
}
