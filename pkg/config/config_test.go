package config

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/urfave/cli/v2"
)

// Base is exported so that it can be inlined.
type Base struct {
	Name string `yaml:"name" usage:"name of the node"`
}

type group struct {
	Addr    string        `yaml:"addr" usage:"where"`
	Timeout time.Duration `yaml:"timeout"`
	Key     Secret        `yaml:"key"`
}

type sample struct {
	Base   `yaml:",inline"`
	Common Base              `yaml:"common"`
	Store  group             `yaml:"store"`
	Size   Bytes             `yaml:"size"`
	Width  int               `yaml:"width"`
	Share  float64           `yaml:"share"`
	On     bool              `yaml:"on"`
	Peers  []string          `yaml:"peers"`
	Labels map[string]string `yaml:"labels"`
	Epoch  uint32            `yaml:"epoch"`
}

func defaults() sample {
	return sample{Store: group{Addr: "default", Timeout: time.Second}, Width: 2, Peers: []string{"a"}, On: true}
}

// load runs an app with the arguments and gives what was loaded.
func load(t *testing.T, args ...string) (sample, error) {
	t.Helper()
	cfg := defaults()
	app := &cli.App{Name: "x", Flags: Flags(&cfg, "DORMOUSE_X"), Writer: new(strings.Builder), ErrWriter: new(strings.Builder),
		Action: func(c *cli.Context) error { return Load(c, &cfg, "DORMOUSE_X") }}
	err := app.Run(append([]string{"x"}, args...))
	return cfg, err
}

func file(t *testing.T, text string) string {
	t.Helper()
	p := filepath.Join(t.TempDir(), "c.yaml")
	if err := os.WriteFile(p, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return p
}

func TestPrecedence(t *testing.T) {
	f := file(t, "store:\n  addr: from-file\n  timeout: 5s\nwidth: 3\nsize: 512Mi\non: false\npeers: [b, c]\nlabels: {zone: x}\ncommon: {name: n}\n")
	got, err := load(t, "--config", f)
	want := sample{Common: Base{Name: "n"}, Store: group{Addr: "from-file", Timeout: 5 * time.Second}, Size: 512 << 20, Width: 3,
		Peers: []string{"b", "c"}, Labels: map[string]string{"zone": "x"}}
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("file over default (-want +got):\n%s", d)
	}
	t.Setenv("DORMOUSE_X_WIDTH", "4")
	t.Setenv("DORMOUSE_X_STORE_ADDR", "from-env")
	t.Setenv("DORMOUSE_X_LABELS", "a=1,b=2=3")
	t.Setenv("DORMOUSE_X_CONFIG", f)
	got, err = load(t)
	if err != nil || got.Width != 4 || got.Store.Addr != "from-env" || got.Store.Timeout != 5*time.Second || got.Labels["b"] != "2=3" || got.Labels["zone"] != "" {
		t.Errorf("environment over file: %+v %v", got, err)
	}
	got, err = load(t, "--width=5", "--store-addr", "from-flag", "--peers", "p, q", "--on")
	if err != nil || got.Width != 5 || got.Store.Addr != "from-flag" || len(got.Peers) != 2 || got.Peers[1] != "q" || !got.On {
		t.Errorf("flag over environment: %+v %v", got, err)
	}
	got, err = load(t, "--on=false", "--config", "")
	if err != nil || got.On || got.Store.Timeout != time.Second {
		t.Errorf("a flag that says false over a default: %+v %v", got, err)
	}
}

func TestRefusals(t *testing.T) {
	for name, c := range map[string]struct{ text, want string }{
		"unknown key":        {"width: 1\nwidht: 2\n", `c.yaml:2: unknown key "widht"; here are name, common, store, size`},
		"unknown nested key": {"store:\n  addr: a\n  adr: b\n", `c.yaml:3: unknown key "store.adr"; here are addr, timeout, key`},
		"given twice":        {"width: 1\nwidth: 2\n", `2: key "width" is there already, in line 1`},
		"wrong type":         {"width: many\n", `1: width: "many": an integer that fits is expected here`},
		"too large":          {"epoch: 5000000000\n", `1: epoch: "5000000000": an integer that fits`},
		"not a duration":     {"store: {timeout: 5}\n", "a duration like 1m30s"},
		"not a size":         {"size: big\n", "is not a size"},
		"a list for one":     {"width: [1]\n", "one value is expected"},
		"one for a group":    {"store: x\n", "a group of keys is expected"},
		"one for a list":     {"peers: x\n", "a list of texts is expected"},
		"secret not shown":   {"store: {key: [hunter2]}\n", "one value is expected"},
		"two documents":      {"width: 1\n---\nwidth: 2\n", "one document is expected"},
		"not YAML":           {"a: [\n", "c.yaml"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := load(t, "--config", file(t, c.text))
			if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "hunter2") {
				t.Errorf("got %v", err)
			}
		})
	}
	if _, err := load(t, "--width", "x"); err == nil || !strings.Contains(err.Error(), "--width (or DORMOUSE_X_WIDTH)") {
		t.Errorf("flag: %v", err)
	}
	if _, err := load(t, "--labels", "x"); err == nil {
		t.Error("a label without a value")
	}
	if _, err := load(t, "--store-key", "x"); err == nil {
		t.Error("a secret has a flag")
	}
	if _, err := load(t, "--config", "/nonexistent"); err == nil {
		t.Error("no such file")
	}
	if got, err := load(t, "--config", file(t, "# only a comment\n")); err != nil || got.Width != 2 {
		t.Errorf("an empty file: %+v %v", got, err)
	}
}

func TestSecrets(t *testing.T) {
	check := func(what string, want string, args ...string) {
		t.Helper()
		got, err := load(t, args...)
		if err != nil || got.Store.Key.Reveal() != want {
			t.Errorf("%s: %q %v", what, got.Store.Key.Reveal(), err)
		}
		dump, err := Dump(got)
		if err != nil {
			t.Fatal(err)
		}
		for _, shown := range []string{string(dump), fmt.Sprint(got), fmt.Sprintf("%+v %#v %s %q", got, got, got.Store.Key, got.Store.Key)} {
			if want != "" && strings.Contains(shown, want) {
				t.Errorf("%s: shown in %s", what, shown)
			}
		}
	}
	secret := file(t, "hunter2\n")
	check("in the file", "hunter3", "--config", file(t, "store: {key: hunter3}\n"))
	check("in a file that the file names", "hunter2", "--config", file(t, "store: {key_file: "+secret+"}\n"))
	t.Setenv("DORMOUSE_X_STORE_KEY_FILE", secret)
	check("in a file that the environment names", "hunter2")
	t.Setenv("DORMOUSE_X_STORE_KEY", "hunter4")
	check("in the environment", "hunter4", "--config", file(t, "store: {key: hunter3}\n"))
}

func TestSizes(t *testing.T) {
	for in, want := range map[string]int64{"512Mi": 512 << 20, "1.5Gi": 3 << 29, "100M": 1e8, "4096": 4096, "0": 0, "1Ki": 1024, "2KiB": 2048, "1k": 1000, "9223372036854775807": 1<<63 - 1} {
		if got, err := ParseBytes(in); err != nil || got != want {
			t.Errorf("%s: %d %v", in, got, err)
		}
	}
	for _, in := range []string{"", "x", "-1", "1.5", "0.3Ki", "9Ei", "99999999Ti", "NaN", "Mi", "1 000"} {
		if got, err := ParseBytes(in); err == nil {
			t.Errorf("%q: %d", in, got)
		}
	}
	for in, want := range map[string]int64{"500m": 500, "0.5": 500, "2": 2000, "0.001": 1, "0": 0} {
		if got, err := ParseMillis(in); err != nil || got != want {
			t.Errorf("%s: %d %v", in, got, err)
		}
	}
	for _, in := range []string{"", "m", "-1", "0.0001", "1.5m", "x", "NaN", "Inf"} {
		if got, err := ParseMillis(in); err == nil {
			t.Errorf("%q: %d", in, got)
		}
	}
	for n, want := range map[int64]string{0: "0", 1023: "1023", 1536: "1.5Ki", 512 << 20: "512Mi", 3 << 40: "3Ti"} {
		if got := FormatBytes(n); got != want {
			t.Errorf("%d: %s", n, got)
		}
	}
	for _, b := range []Bytes{1, 1 << 20, 1<<20 + 1, 3 << 29} {
		var back Bytes
		if text, err := b.MarshalText(); err != nil || back.UnmarshalText(text) != nil || back != b {
			t.Errorf("%d came back as %d", int64(b), int64(back))
		}
	}
}
