package app

import (
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/dormouse-run/dormouse/coordinator/internal/publish"
	"github.com/dormouse-run/dormouse/coordinator/internal/sessions"
	"github.com/dormouse-run/dormouse/pkg/wire"
)

// Every metric of the coordinator is a row of the table in docs/operating.md, and every row is one.
func TestMetricsAreDocumented(t *testing.T) {
	r := prometheus.NewRegistry()
	m := newMetrics(r)
	publish.New(publish.Options{Metrics: r})
	m.nodes(r, sessions.New(sessions.Config{}))
	m.catalog(r, &App{})
	if _, err := wire.NewServer(slog.New(slog.DiscardHandler), r); err != nil {
		t.Fatal(err)
	}
	descs := make(chan *prometheus.Desc)
	go func() {
		defer close(descs)
		r.Describe(descs)
	}()
	registered := make(map[string]bool)
	name := regexp.MustCompile(`fqName: "([^"]+)"`)
	for d := range descs {
		registered[name.FindStringSubmatch(d.String())[1]] = true
	}
	page, err := os.ReadFile(filepath.Join("..", "..", "docs", "operating.md"))
	if err != nil {
		t.Fatal(err)
	}
	documented := make(map[string]bool)
	for _, row := range regexp.MustCompile("(?m)^\\| `(dormouse_[a-z0-9_]+)").FindAllSubmatch(page, -1) {
		documented[string(row[1])] = true
	}
	if len(registered) < 20 {
		t.Errorf("only %d metrics were found: %v", len(registered), registered)
	}
	for _, n := range slices.Sorted(maps.Keys(registered)) {
		if !documented[n] {
			t.Errorf("%s is in no row of docs/operating.md", n)
		}
	}
	for _, n := range slices.Sorted(maps.Keys(documented)) {
		if !registered[n] {
			t.Errorf("docs/operating.md has a row for %s, which there is not", n)
		}
	}
}
