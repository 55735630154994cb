// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package layers

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

const everything = 1 << 62 // more free room than any disk has: GC gives up all it may

func mustEnsure(t *testing.T, s *Store, repo string, opts EnsureOptions) Image {
	t.Helper()
	img, err := s.Ensure(context.Background(), push(t, env.plain, repo, smallImage(t, repo)), opts)
	if err != nil {
		t.Fatal(err)
	}
	return img
}

func exists(t *testing.T, path string) bool {
	t.Helper()
	_, err := os.Stat(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return err == nil
}

func TestI04_HeldImagesStay(t *testing.T) {
	ctx := context.Background()
	cfg := testConfig(t)
	s := openStore(t, cfg)
	held := mustEnsure(t, s, "i04-held", EnsureOptions{Holder: "sandbox-1"})
	loose := mustEnsure(t, s, "i04-loose", EnsureOptions{})
	for range 2 { // holding twice is holding once
		if err := s.Hold(ctx, held.ManifestDigest, "snapshot-1"); err != nil {
			t.Fatal(err)
		}
	}
	err := s.Remove(ctx, held.ErofsDigest)
	if !errs.Has(err, errs.StillReferenced) || errs.From(err).Details["references"] != "sandbox-1,snapshot-1" || errs.From(err).Details["count"] != "2" {
		t.Errorf("remove of a held image: %v %v", err, errs.From(err).Details)
	}
	removed, err := s.GC(ctx, everything)
	if err != nil || len(removed) != 1 || removed[0].Digest != loose.ErofsDigest || removed[0].Size != loose.Size {
		t.Errorf("removed %+v, %v", removed, err)
	}
	if exists(t, loose.ErofsPath) || !exists(t, held.ErofsPath) {
		t.Error("the wrong image is gone")
	}
	if _, err := s.Get(ctx, loose.Reference); !errs.Has(err, errs.ImageNotFound) {
		t.Errorf("get of a removed image: %v", err)
	}
	// Another process, after a restart, sees the same holds.
	again := openStore(t, cfg)
	if rep, err := again.Recover(ctx); err != nil || len(rep.Orphans)+len(rep.Dropped)+len(rep.Damaged) != 0 {
		t.Errorf("recover found %+v, %v", rep, err)
	}
	all, err := again.Holds(ctx)
	if err != nil || len(all) != 1 || len(all[held.ErofsDigest]) != 2 {
		t.Errorf("holds: %v %v", all, err)
	}
	for _, h := range []string{"sandbox-1", "snapshot-1", "snapshot-1", "never"} {
		if err := again.Release(ctx, held.ErofsDigest, h); err != nil {
			t.Fatal(err)
		}
	}
	if err := again.Remove(ctx, held.ErofsDigest); err != nil {
		t.Fatal(err)
	}
	if exists(t, held.ErofsPath) {
		t.Error("still there")
	}
	if err := again.Remove(ctx, held.ErofsDigest); !errs.Has(err, errs.ImageNotFound) {
		t.Errorf("second remove: %v", err)
	}
	if err := again.Hold(ctx, held.ErofsDigest, "sandbox-2"); !errs.Has(err, errs.ImageNotFound) {
		t.Errorf("hold of what is gone: %v", err)
	}
	if err := again.Release(ctx, held.ErofsDigest, "sandbox-1"); err != nil {
		t.Errorf("release of what is gone: %v", err)
	}
}

func TestI04_CollectionStopsWhenThereIsRoomAndTakesTheLongestUnusedFirst(t *testing.T) {
	ctx := context.Background()
	s := openStore(t, testConfig(t))
	old := mustEnsure(t, s, "i04-old", EnsureOptions{})
	young := mustEnsure(t, s, "i04-young", EnsureOptions{})
	before := time.Now().Add(-time.Hour)
	if err := os.Chtimes(filepath.Join(s.disk.records(), s.disk.recordName(old.ManifestDigest)), before, before); err != nil {
		t.Fatal(err)
	}
	order, err := s.byLastUse()
	if err != nil || len(order) != 2 || order[0] != old.ErofsDigest {
		t.Fatalf("%v %v", order, err)
	}
	// Asked for again, it is the younger one.
	if _, err := s.Ensure(ctx, old.Reference, EnsureOptions{}); err != nil {
		t.Fatal(err)
	}
	if order, err = s.byLastUse(); err != nil || order[0] != young.ErofsDigest {
		t.Fatalf("%v %v", order, err)
	}
	if removed, err := s.GC(ctx, 1); err != nil || removed != nil {
		t.Errorf("removed %v, %v though there is room", removed, err)
	}
}

// Each crash point leaves what the package comment says, and Recover puts it right.
func TestI04_CrashInTheMiddle(t *testing.T) {
	ctx := context.Background()
	type state struct {
		s   *Store
		img Image
	}
	drop := func(t *testing.T, st state) {
		t.Helper()
		if _, err := st.s.dropRecords(st.img.ErofsDigest); err != nil {
			t.Fatal(err)
		}
	}
	cases := []struct {
		name  string
		held  bool
		crash func(*testing.T, state)
		check func(*testing.T, state, Report)
	}{
		{"between the records' removal and the file's", false, drop, func(t *testing.T, st state, rep Report) {
			if len(rep.Orphans) != 1 || exists(t, st.img.ErofsPath) || rep.Contents != 1 {
				t.Errorf("%+v", rep)
			}
		}},
		{"between a file's rename and its record, held by a snapshot", true, drop, func(t *testing.T, st state, rep Report) {
			if len(rep.Orphans) != 0 || !exists(t, st.img.ErofsPath) || len(rep.Damaged) != 0 {
				t.Errorf("%+v", rep)
			}
			if err := st.s.Hold(ctx, st.img.ErofsDigest, "another"); err != nil {
				t.Errorf("a file without record can still be held: %v", err)
			}
			if err := st.s.Remove(ctx, st.img.ErofsDigest); !errs.Has(err, errs.StillReferenced) {
				t.Errorf("remove: %v", err)
			}
		}},
		{"a staging folder is left", false, func(t *testing.T, st state) {
			left := filepath.Join(st.s.disk.staging(), "123")
			if err := os.MkdirAll(left, 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(left, "image.erofs"), []byte("half"), 0o600); err != nil {
				t.Fatal(err)
			}
		}, func(t *testing.T, st state, rep Report) {
			if rep.Staging != 1 || exists(t, filepath.Join(st.s.disk.staging(), "123")) || !exists(t, st.img.ErofsPath) {
				t.Errorf("%+v", rep)
			}
		}},
		{"a record is torn", false, func(t *testing.T, st state) {
			p := filepath.Join(st.s.disk.records(), st.s.disk.recordName(st.img.ManifestDigest))
			if err := os.WriteFile(p, []byte(`{"version":1,"erofs`), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(st.s.disk.records(), ".new-1"), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}, func(t *testing.T, st state, rep Report) {
			if len(rep.Dropped) != 1 || len(rep.Orphans) != 1 || exists(t, filepath.Join(st.s.disk.records(), ".new-1")) {
				t.Errorf("%+v", rep)
			}
		}},
		{"a held file is cut short", true, func(t *testing.T, st state) {
			if err := os.Truncate(st.img.ErofsPath, 4096); err != nil {
				t.Fatal(err)
			}
		}, func(t *testing.T, st state, rep Report) {
			if len(rep.Damaged) != 1 || rep.Damaged[0] != st.img.ErofsDigest || len(rep.Dropped) != 1 {
				t.Errorf("%+v", rep)
			}
		}},
		{"a held file is gone", true, func(t *testing.T, st state) {
			if err := os.Remove(st.img.ErofsPath); err != nil {
				t.Fatal(err)
			}
		}, func(t *testing.T, st state, rep Report) {
			if len(rep.Damaged) != 1 {
				t.Errorf("%+v", rep)
			}
		}},
	}
	for i, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			s := openStore(t, testConfig(t))
			opts := EnsureOptions{}
			if c.held {
				opts.Holder = "snapshot-1"
			}
			st := state{s, mustEnsure(t, s, "i04-crash", opts)}
			c.crash(t, st)
			rep, err := s.Recover(ctx)
			if err != nil {
				t.Fatal(err)
			}
			c.check(t, st, rep)
			// Whatever it was, asking again makes the image whole, with the same digest at the same path.
			again, err := s.Ensure(ctx, st.img.Reference, EnsureOptions{})
			if err != nil || again.ErofsPath != st.img.ErofsPath {
				t.Fatalf("case %d: %+v, %v", i, again, err)
			}
			data, err := os.ReadFile(again.ErofsPath)
			if err != nil || digest.FromBytes(data) != again.ErofsDigest {
				t.Errorf("the file does not have its digest: %v", err)
			}
		})
	}
}

// A process that lives keeps its staging folder, whoever recovers.
func TestI04_RecoverLeavesOthersWorkAlone(t *testing.T) {
	s := openStore(t, testConfig(t))
	dir, done, err := s.stage()
	if err != nil {
		t.Fatal(err)
	}
	other := openStore(t, s.cfg)
	if rep, err := other.Recover(context.Background()); err != nil || rep.Staging != 0 || !exists(t, dir) {
		t.Errorf("%+v, %v", rep, err)
	}
	done()
	if exists(t, dir) {
		t.Error("still there")
	}
}

func TestI04_CollectionGivesUpLayersInContainerdFirst(t *testing.T) {
	ctx := context.Background()
	s := openStore(t, testConfig(t))
	img := mustEnsure(t, s, "i04-content", EnsureOptions{Holder: "sandbox-1"})
	images := func() int {
		list, err := s.client.ImageService().List(s.remote.in(ctx))
		if err != nil {
			t.Fatal(err)
		}
		return len(list)
	}
	if images() != 1 {
		t.Fatalf("%d images in containerd", images())
	}
	if _, err := s.GC(ctx, everything); err != nil {
		t.Fatal(err)
	}
	if images() != 0 || !exists(t, img.ErofsPath) {
		t.Error("the layers are still kept, or the held image is gone")
	}
	leases, err := s.client.LeasesService().List(s.remote.in(ctx))
	if err != nil || len(leases) != 0 {
		t.Errorf("leases left: %v %v", leases, err)
	}
}

func TestHolderNamesAreUids(t *testing.T) {
	s := openStore(t, testConfig(t))
	img := mustEnsure(t, s, "names", EnsureOptions{})
	for _, bad := range []string{"", "..", "../x", "a/b", ".hidden", strings.Repeat("x", 129), "a b"} {
		if err := s.Hold(context.Background(), img.Digest, bad); !errs.Has(err, errs.InvalidField) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}
