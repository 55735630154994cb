package config

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

// FuzzLoadFile: a configuration file of any content fills the struct or is refused.
func FuzzLoadFile(f *testing.F) {
	for _, text := range []string{
		"name: x\nsub: {size: 4Gi, wait: 3s, list: [a, b]}\n", "a: &a [*a]", "{}", "---\n---\n", "sub: null\nlabels: {a: b}", "sub: {size: -1Ei, millis: 1e999}", "? {a: b}\n: c",
		"<<: {name: x}", "name: !!binary AAAA", "sub: {list: {}}",
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		path := filepath.Join(t.TempDir(), "config.yaml")
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		var into struct {
			Name   string            `yaml:"name"`
			Labels map[string]string `yaml:"labels"`
			Sub    struct {
				Size   Bytes         `yaml:"size"`
				Wait   time.Duration `yaml:"wait"`
				List   []string      `yaml:"list"`
				Number int64         `yaml:"number"`
				On     bool          `yaml:"on"`
				Key    Secret        `yaml:"key"`
			} `yaml:"sub"`
		}
		if LoadFile(path, &into) != nil {
			return
		}
		if _, err := Dump(into); err != nil {
			t.Fatal(err)
		}
	})
}

// FuzzBytes: sizes are read, never as less than nothing, or refused.
func FuzzBytes(f *testing.F) {
	for _, text := range []string{"1", "4Gi", "1.5Mi", "9223372036854775807", "8Ei", "-1", "1e3", " 2 Ki", "0x10"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if n, err := ParseBytes(text); err == nil && (n < 0 || FormatBytes(n) == "") {
			t.Fatalf("%q is %d, which is written %q", text, n, FormatBytes(n))
		}
		_, _ = ParseMillis(text)
	})
}
