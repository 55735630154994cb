// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package flatten

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/klauspost/compress/zstd"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/test/tools"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func bytesLayer(name string, data []byte) Layer {
	return Layer{Name: name, Open: func(context.Context) (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil }}
}

func archiveOf(t *testing.T, names ...string) []byte {
	t.Helper()
	var buf bytes.Buffer
	tw := tar.NewWriter(&buf)
	for _, n := range names {
		if err := tw.WriteHeader(&tar.Header{Name: n, Mode: 0o644, Size: int64(len(n)), Typeflag: tar.TypeReg}); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(tw, n); err != nil {
			t.Fatal(err)
		}
	}
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func builder(t *testing.T) *Builder { return &Builder{Mkfs: tools.Path(t, "mkfs.erofs")} }

func TestI01_SameLayersSameBytes(t *testing.T) {
	a, b := archiveOf(t, "x", "dir/y", "z"), archiveOf(t, "z", "more")
	zw, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	packed := zw.EncodeAll(a, nil)
	if err := zw.Close(); err != nil {
		t.Fatal(err)
	}
	var first Result
	for i, layers := range [][]Layer{
		{bytesLayer("a", a), bytesLayer("b", b)},
		{bytesLayer("a", a), bytesLayer("b", b)},
		{bytesLayer("a", packed), bytesLayer("b", b)},
		{bytesLayer("a", a), bytesLayer("b", b), bytesLayer("nothing", archiveOf(t))},
	} {
		res, err := builder(t).Build(context.Background(), t.TempDir(), layers)
		if err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			first = res
		}
		if res.Digest != first.Digest || res.Size != first.Size {
			t.Errorf("%d: %+v, first %+v", i, res, first)
		}
		if out, err := exec.Command(tools.Path(t, "fsck.erofs"), res.Path).CombinedOutput(); err != nil {
			t.Errorf("fsck: %v: %s", err, out)
		}
	}
	empty, err := builder(t).Build(context.Background(), t.TempDir(), nil)
	if err != nil || empty.Size == 0 || empty.Digest == first.Digest {
		t.Errorf("an image without layers: %+v, %v", empty, err)
	}
}

// The disk gets full while mkfs.erofs runs. Zeros are the worst content: to a reader that has lost its
// place they look like the end of the archive.
func TestDiskFullInMkfsIsNeverAnImage(t *testing.T) {
	for what, content := range map[string]io.ReaderAt{
		"zeros": bytes.NewReader(make([]byte, 8<<20)),
		"noise": strings.NewReader(strings.Repeat("noise after noise. ", 500_000)),
	} {
		for _, size := range []int64{5<<20 + 4096*3, 8 << 20} {
			t.Run(fmt.Sprint(what, size), func(t *testing.T) {
				dir := t.TempDir()
				if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=5m"); err != nil {
					t.Fatal(err)
				}
				defer func() {
					if err := unix.Unmount(dir, 0); err != nil {
						t.Error(err)
					}
				}()
				tr := newTree(10)
				for _, name := range []string{"a", "b"} {
					ino := &inode{kind: regular, mode: 0o644, size: size / 2, content: content, names: 1}
					if err := tr.put([]string{name}, ino); err != nil {
						t.Fatal(err)
					}
				}
				out := filepath.Join(dir, "image")
				err := builder(t).mkfs(context.Background(), dir, out, tr)
				if err == nil {
					_, err = seal(context.Background(), out, tr.root.ino)
				}
				if !errs.Has(classify(err), errs.DiskFull) {
					t.Errorf("got %v", err)
				}
			})
		}
	}
}

func TestCancelledBuildEndsMkfs(t *testing.T) {
	dir := t.TempDir()
	fake := filepath.Join(dir, "mkfs")
	if err := os.WriteFile(fake, []byte("#!/bin/sh\nexec sleep 600\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	why := errors.New("nobody wants it")
	tr := newTree(10)
	ino := &inode{kind: regular, size: 4 << 20, content: &cancelling{cancel: func() { cancel(why) }}, names: 1}
	if err := tr.put([]string{"f"}, ino); err != nil {
		t.Fatal(err)
	}
	err := (&Builder{Mkfs: fake}).mkfs(ctx, dir, filepath.Join(dir, "out"), tr)
	if !errors.Is(err, why) {
		t.Errorf("got %v", err)
	}
}

// cancelling cancels when its content is read, as if the caller gave up just then.
type cancelling struct{ cancel func() }

func (c *cancelling) ReadAt(p []byte, _ int64) (int, error) {
	c.cancel()
	return len(p), nil
}

func TestMkfsFailureIsBoundedAndNotTheImagesFault(t *testing.T) {
	dir := t.TempDir()
	fake := filepath.Join(dir, "mkfs")
	if err := os.WriteFile(fake, []byte("#!/bin/sh\nyes complaint | head -c 100000 >&2\nexit 3\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	_, err := (&Builder{Mkfs: fake}).Build(context.Background(), dir, []Layer{bytesLayer("a", archiveOf(t, "x"))})
	if err == nil || errs.Has(err, errs.ImageMalformed) || len(err.Error()) > stderrLimit+200 || !strings.Contains(err.Error(), "complaint") {
		t.Errorf("got %.200v", err)
	}
}

func TestRecordLengthCountsItself(t *testing.T) {
	for n := range 1200 {
		rec := record(nil, "k", strings.Repeat("v", n))
		var size int
		if _, err := fmt.Sscanf(string(rec), "%d ", &size); err != nil || size != len(rec) {
			t.Fatalf("%d bytes call themselves %d", len(rec), size)
		}
	}
}

// A store that fails or is cut off while a layer is read says nothing of the image.
func TestUnreadableLayerIsNotTheImagesFault(t *testing.T) {
	broken := errors.New("the store went away")
	for _, kept := range []int{0, 2, 700} {
		data := archiveOf(t, "a", "b")
		l := Layer{Name: "cut", Open: func(context.Context) (io.ReadCloser, error) {
			return io.NopCloser(io.MultiReader(bytes.NewReader(data[:kept]), iotest.ErrReader(broken))), nil
		}}
		_, err := builder(t).Build(t.Context(), t.TempDir(), []Layer{l})
		if !errors.Is(err, broken) || errs.Has(err, errs.ImageMalformed) {
			t.Errorf("after %d bytes: %v", kept, err)
		}
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	l := Layer{Name: "ended", Open: func(ctx context.Context) (io.ReadCloser, error) {
		cancel(broken)
		return nil, ctx.Err()
	}}
	if _, err := builder(t).Build(ctx, t.TempDir(), []Layer{l}); !errors.Is(err, broken) {
		t.Errorf("ended: %v", err)
	}
}
