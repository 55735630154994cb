// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package layers

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/platforms"
	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/image-spec/identity"
	"golang.org/x/sys/unix"
)

// seen is everything that a file system shows of one name.
type seen struct {
	Mode     uint32
	UID, GID uint32
	Size     int64
	Rdev     uint64
	Mtime    int64
	Content  string // digest, or a link's target
	Xattrs   map[string]string
	SameAs   string // the first name of the same inode
}

// look reads a whole tree.
func look(t *testing.T, root string) map[string]seen {
	t.Helper()
	all := map[string]seen{}
	first := map[uint64]string{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		s := seen{Mode: st.Mode, UID: st.Uid, GID: st.Gid, Rdev: st.Rdev, Mtime: st.Mtim.Nano(), Xattrs: xattrsOf(t, path)}
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			data, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			s.Size, s.Content = st.Size, fmt.Sprintf("%x", sha256.Sum256(data))
		case unix.S_IFLNK:
			if s.Content, err = os.Readlink(path); err != nil {
				return err
			}
		}
		if st.Mode&unix.S_IFMT != unix.S_IFDIR {
			if _, ok := first[st.Ino]; !ok {
				first[st.Ino] = rel
			}
			s.SameAs = first[st.Ino]
		}
		all[rel] = s
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func xattrsOf(t *testing.T, path string) map[string]string {
	t.Helper()
	buf := make([]byte, 64<<10)
	n, err := unix.Llistxattr(path, buf)
	if err == unix.ENOTSUP || n == 0 && err == nil {
		return nil
	}
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	out := map[string]string{}
	for _, k := range strings.Split(strings.TrimSuffix(string(buf[:n]), "\x00"), "\x00") {
		val := make([]byte, 64<<10)
		n, err := unix.Lgetxattr(path, k, val)
		if err != nil {
			t.Fatalf("%s: %s: %v", path, k, err)
		}
		out[k] = string(val[:n])
	}
	return out
}

// mountErofs mounts an image's file as the kernel does.
func mountErofs(t *testing.T, path string) string {
	t.Helper()
	at := t.TempDir()
	if err := unix.Mount(path, at, "erofs", unix.MS_RDONLY, ""); err != nil {
		t.Fatalf("mount %s: %v", path, err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(at, 0); err != nil {
			t.Errorf("unmount: %v", err)
		}
	})
	return at
}

// mountOverlay has containerd unpack the same layers, and mounts them with overlayfs.
func mountOverlay(t *testing.T, s *Store, img Image) string {
	t.Helper()
	ctx := namespaces.WithNamespace(context.Background(), s.cfg.Namespace)
	ctx, release, err := s.client.WithLease(ctx) // else containerd's collector takes the view
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := release(ctx); err != nil {
			t.Errorf("release: %v", err)
		}
	})
	rec, err := s.client.ImageService().Get(ctx, s.remote.imageName(img.ManifestDigest))
	if err != nil {
		t.Fatal(err)
	}
	ci := containerd.NewImageWithPlatform(s.client, rec, platforms.Only(s.platform))
	if err := ci.Unpack(ctx, "overlayfs"); err != nil {
		t.Fatalf("unpack: %v", err)
	}
	ids, err := ci.RootFS(ctx)
	if err != nil {
		t.Fatal(err)
	}
	sn := s.client.SnapshotService("overlayfs")
	key := "view-" + filepath.Base(t.TempDir()) + fmt.Sprint(time.Now().UnixNano())
	mounts, err := sn.View(ctx, key, identity.ChainID(ids).String())
	if err != nil {
		t.Fatal(err)
	}
	at := t.TempDir()
	if err := mount.All(mounts, at); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := mount.UnmountAll(at, 0); err != nil {
			t.Errorf("unmount: %v", err)
		}
		if err := sn.Remove(ctx, key); err != nil {
			t.Errorf("remove view: %v", err)
		}
	})
	return at
}

// mustMatch compares the EROFS file with the overlay. Times that the overlay took from the clock when it
// was unpacked are those of directories that a layer changed without listing them: these are named in
// unlisted, and their times are not compared.
func mustMatch(t *testing.T, s *Store, img Image, began time.Time, unlisted ...string) {
	t.Helper()
	want, got := look(t, mountOverlay(t, s, img)), look(t, mountErofs(t, img.ErofsPath))
	unlisted = append(unlisted, ".")
	for name, w := range want {
		if w.Mtime >= began.UnixNano() && w.Mode&unix.S_IFMT == unix.S_IFDIR {
			if !slices.Contains(unlisted, name) && !strings.HasPrefix(name, "ddd") {
				t.Errorf("%s: the overlay has the time of its unpacking", name)
			}
			g := got[name]
			w.Mtime, g.Mtime = 0, 0
			want[name], got[name] = w, g
		}
	}
	names := maps.Clone(want)
	maps.Copy(names, got)
	for name := range names {
		w, inWant := want[name]
		g, inGot := got[name]
		if d := cmp.Diff(w, g); d != "" || inWant != inGot {
			t.Errorf("%.80q: overlayfs (-, there: %t) and EROFS (+, there: %t) differ:\n%.2000s", name, inWant, inGot, d)
		}
	}
	if len(want) < 2 {
		t.Errorf("only %v to compare", slices.Collect(maps.Keys(want)))
	}
}

func TestCompareSeesADifference(t *testing.T) {
	a, b := t.TempDir(), t.TempDir()
	for i, d := range []string{a, b} {
		if err := os.WriteFile(filepath.Join(d, "f"), bytes.Repeat([]byte{byte(i)}, 3), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if cmp.Equal(look(t, a)["f"].Content, look(t, b)["f"].Content) {
		t.Error("other content compares equal")
	}
}

func mountTmpfs(t *testing.T, at, options string) {
	t.Helper()
	if err := unix.Mount("tmpfs", at, "tmpfs", 0, options); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(at, 0); err != nil {
			t.Errorf("unmount: %v", err)
		}
	})
}
