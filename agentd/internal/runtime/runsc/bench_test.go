package runsc

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/agentd/internal/ocispec"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime/runtimetest"
)

// BenchmarkLifecycle tells the median of each step, one sandbox at a time:
//
//	go test -run '^$' -bench Lifecycle -benchtime 20x ./agentd/internal/runtime/runsc
func BenchmarkLifecycle(b *testing.B) {
	b.Run("plain", func(b *testing.B) { benchmarkLifecycle(b, nil) })
	b.Run("volume", func(b *testing.B) {
		dir := b.TempDir()
		benchmarkLifecycle(b, []ocispec.Volume{{Source: dir, Path: "/data"}})
	})
}

func benchmarkLifecycle(b *testing.B, volumes []ocispec.Volume) {
	e := newEnv(b)
	d := e.open(b)
	sources := make(map[string]string)
	for _, v := range volumes {
		sources[v.Path] = v.Source
	}
	took := make(map[string][]time.Duration)
	step := func(name string, fn func() error) {
		start := time.Now()
		must(b, fn())
		took[name] = append(took[name], time.Since(start))
	}
	ctx := context.Background()
	for range b.N {
		cfg := e.config(b, runtimetest.NewID(b), func(s *ocispec.Sandbox) { s.Volumes = volumes })
		step("start", func() error { _, err := d.Start(ctx, cfg); return err })
		e.count(b, cfg.ID)
		dir := b.TempDir()
		step("pause", func() error { return d.Pause(ctx, cfg.ID) })
		step("save", func() error { return d.Save(ctx, cfg.ID, runtime.SaveOptions{Dir: dir, Direct: true}) })
		step("resume", func() error { return d.Resume(ctx, cfg.ID) })
		fork := e.restoreConfig(b, runtimetest.NewID(b), cfg, sources)
		step("restore", func() error { _, err := d.Restore(ctx, fork, runtime.Image{Dir: dir, Direct: true}); return err })
		e.count(b, fork.ID)
		step("delete", func() error { return d.Delete(ctx, cfg.ID) })
		must(b, d.Delete(ctx, fork.ID))
	}
	for name, all := range took {
		slices.Sort(all)
		b.ReportMetric(float64(all[len(all)/2].Microseconds())/1000, "ms-"+name)
	}
	must(b, d.Close())
}
