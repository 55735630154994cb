package app

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dormouse-run/dormouse/agentd/internal/preflight"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// limitedHost is one on which pids are short.
func limitedHost(t *testing.T) preflight.Host {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{"cgroups": "memory\t4\t180\t1\n", "sys/kernel/pid_max": "32768\n"} {
		path := filepath.Join(dir, name)
		must(t, errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o600)))
	}
	return preflight.Host{Proc: dir, UID: func() int { return 0 }, Capabilities: func() (uint64, error) { return 1<<64 - 1, nil },
		Descriptors: func() (int64, int64, error) { return 1 << 20, 1 << 20, nil }}
}

// TestLimitsAreKnownAtTheStart: raised if they may be, with a line in the log; told of where they may not; and a host that can run nothing is refused.
func TestLimitsAreKnownAtTheStart(t *testing.T) {
	ctx := context.Background()
	cfg := Defaults()
	host := limitedHost(t)
	var log bytes.Buffer
	logger := slog.New(slog.NewTextHandler(&log, nil))

	cfg.RaiseLimits = false
	n, notice, err := ready(ctx, cfg, host, logger)
	if err != nil || n != 512 || !strings.Contains(notice, "kernel.pid_max is 32768: that is enough for 512 sandboxes, and the node is to take 1024") {
		t.Errorf("%d, %q, %v", n, notice, err)
	}
	log.Reset()
	cfg.RaiseLimits = true
	n, notice, err = ready(ctx, cfg, host, logger)
	if err != nil || n != 1024 || notice != "" {
		t.Errorf("%d, %q, %v", n, notice, err)
	}
	if !strings.Contains(log.String(), "limit=kernel.pid_max old=32768 new=57344") {
		t.Errorf("the log says %s", log.String())
	}
	host.UID = func() int { return 1000 }
	_, _, err = ready(ctx, cfg, host, logger)
	if e := errs.From(err); !errs.Has(err, errs.NotSupported) || e.Details["feature"] != "rights" || !strings.Contains(e.Message, "uid 1000") {
		t.Errorf("%v", err)
	}
}
