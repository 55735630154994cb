// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package layers

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// bulk is content that does not compress.
func bulk(size int, seed uint64) string {
	r := rand.New(rand.NewPCG(seed, 7))
	b := make([]byte, size)
	for i := 0; i < size; i += 8 {
		v := r.Uint64()
		for j := range min(8, size-i) {
			b[i+j] = byte(v >> (8 * j))
		}
	}
	return string(b)
}

// slowMkfs is the real mkfs.erofs behind a script that counts its runs and waits until it may go on.
func slowMkfs(t *testing.T, real string) (mkfs, runs, gate string) {
	t.Helper()
	d := t.TempDir()
	mkfs, runs, gate = filepath.Join(d, "mkfs.erofs"), filepath.Join(d, "runs"), filepath.Join(d, "gate")
	script := "#!/bin/sh\necho run $$ >> " + runs + "\nwhile [ ! -e " + gate + " ]; do sleep 0.02; done\nexec " + real + " \"$@\"\n"
	if err := os.WriteFile(mkfs, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	return mkfs, runs, gate
}

func countRuns(t *testing.T, runs string) int {
	t.Helper()
	data, err := os.ReadFile(runs)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	return strings.Count(string(data), "run")
}

func open(t *testing.T, gate string) {
	t.Helper()
	if err := os.WriteFile(gate, nil, 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestI02_OneConversionForAllAndProgressForEach(t *testing.T) {
	ref := push(t, env.plain, "i02", imageOf(t, archive(t, file("big", bulk(3<<20, 1))), archive(t, file("small", "s"))))
	cfg := testConfig(t)
	var runs, gate string
	cfg.Mkfs, runs, gate = slowMkfs(t, cfg.Mkfs)
	s := openStore(t, cfg)

	var converting atomic.Int32
	seen := make([][]Progress, 4)
	var group errgroup.Group
	var once [4]sync.Once
	var images [4]Image
	for i := range seen {
		group.Go(func() (err error) {
			images[i], err = s.Ensure(context.Background(), ref, EnsureOptions{Progress: func(p Progress) {
				seen[i] = append(seen[i], p)
				if p.Phase == PhaseConverting {
					once[i].Do(func() {
						if converting.Add(1) == int32(len(seen)) {
							open(t, gate)
						}
					})
				}
			}})
			return err
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	if n := countRuns(t, runs); n != 1 {
		t.Errorf("%d conversions", n)
	}
	for i, ps := range seen {
		last := ps[len(ps)-2] // before PhaseDone
		if ps[0].Phase != PhaseResolving || ps[len(ps)-1].Phase != PhaseDone || last.Phase != PhaseConverting || last.Done != last.Total || last.Total < 3<<20 || len(last.Layers) != 2 {
			t.Errorf("waiter %d saw %+v", i, ps)
		}
		if !slices.IsSortedFunc(ps[:len(ps)-1], func(a, b Progress) int { return int(a.Done - b.Done) }) {
			t.Errorf("waiter %d saw progress go back: %+v", i, ps)
		}
		if images[i].ErofsDigest != images[0].ErofsDigest {
			t.Errorf("waiter %d has another image", i)
		}
	}
}

func TestI02_CancelledWaiterDoesNotCancelConversion(t *testing.T) {
	ref := push(t, env.plain, "i02-cancel", smallImage(t, "cancel"))
	cfg := testConfig(t)
	var runs, gate string
	cfg.Mkfs, runs, gate = slowMkfs(t, cfg.Mkfs)
	s := openStore(t, cfg)
	ctx, cancel := context.WithCancel(context.Background())
	_, err := s.Ensure(ctx, ref, EnsureOptions{Progress: func(p Progress) {
		if p.Phase == PhaseConverting {
			cancel() // the only waiter gives up
		}
	}})
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("the cancelled waiter got %v", err)
	}
	open(t, gate)
	img, err := s.Ensure(context.Background(), ref, EnsureOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if n := countRuns(t, runs); n != 1 {
		t.Errorf("%d conversions", n)
	}
	if _, err := os.Stat(img.ErofsPath); err != nil {
		t.Error(err)
	}
}

func TestI02_CloseEndsAConversionAndTheNextStartFinishesIt(t *testing.T) {
	ref := push(t, env.plain, "i02-close", smallImage(t, "close"))
	cfg := testConfig(t)
	realMkfs := cfg.Mkfs
	cfg.Mkfs, _, _ = slowMkfs(t, cfg.Mkfs) // its gate never opens
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	closed := make(chan error, 1)
	var once sync.Once
	_, err = s.Ensure(context.Background(), ref, EnsureOptions{Progress: func(p Progress) {
		if p.Phase == PhaseConverting {
			once.Do(func() { go func() { closed <- s.Close() }() })
		}
	}})
	if !errs.Has(err, errs.ShuttingDown) {
		t.Errorf("the waiter got %v", err)
	}
	if err := <-closed; err != nil {
		t.Fatal(err)
	}
	cfg.Mkfs = realMkfs
	if _, err := openStore(t, cfg).Ensure(context.Background(), ref, EnsureOptions{}); err != nil {
		t.Fatal(err)
	}
	left, err := os.ReadDir(filepath.Join(cfg.Root, "staging"))
	if err != nil || len(left) != 0 {
		t.Errorf("staging: %v %v", left, err)
	}
}

func TestI02_TwoAgentsShareOneRootAndOneConversion(t *testing.T) {
	ref := push(t, env.plain, "i02-two", smallImage(t, "two"))
	cfg := testConfig(t)
	var runs, gate string
	cfg.Mkfs, runs, gate = slowMkfs(t, cfg.Mkfs)
	a := openStore(t, cfg)
	other := cfg
	other.Node = "node-b"
	b := openStore(t, other)
	var group errgroup.Group
	var images [2]Image
	var converting atomic.Int32
	var once [2]sync.Once
	for i, s := range []*Store{a, b} {
		group.Go(func() (err error) {
			images[i], err = s.Ensure(context.Background(), ref, EnsureOptions{Holder: "sandbox-" + s.cfg.Node, Progress: func(p Progress) {
				if p.Phase == PhaseConverting {
					once[i].Do(func() {
						if converting.Add(1) == 2 {
							open(t, gate)
						}
					})
				}
			}})
			return err
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	if n := countRuns(t, runs); n != 1 {
		t.Errorf("%d conversions", n)
	}
	if images[0].ErofsPath != images[1].ErofsPath {
		t.Errorf("%s, %s", images[0].ErofsPath, images[1].ErofsPath)
	}
	held, err := a.Holders(context.Background(), images[0].Digest)
	if err != nil || len(held) != 2 || held[0].Node != "node-a" || held[1].Node != "node-b" {
		t.Errorf("%+v %v", held, err)
	}
}
