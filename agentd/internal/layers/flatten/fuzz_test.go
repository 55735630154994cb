// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package flatten

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"path"
	"strings"
	"testing"
	"time"
)

// FuzzLayer feeds two layers of noise through all but mkfs.erofs: whatever they are, the outcome is an error
// of the image or an archive that a plain reader understands, with only clean paths in it, each link after
// its target.
func FuzzLayer(f *testing.F) {
	seed := func(hdrs ...tar.Header) []byte {
		var buf bytes.Buffer
		tw := tar.NewWriter(&buf)
		for _, h := range hdrs {
			h.ModTime = time.Unix(1, 100)
			h.Format = tar.FormatPAX
			if err := tw.WriteHeader(&h); err != nil {
				f.Fatal(err)
			}
			if _, err := tw.Write(make([]byte, h.Size)); err != nil {
				f.Fatal(err)
			}
		}
		if err := tw.Close(); err != nil {
			f.Fatal(err)
		}
		return buf.Bytes()
	}
	low := seed(tar.Header{Name: "a/b", Typeflag: tar.TypeReg, Size: 5}, tar.Header{Name: "l", Typeflag: tar.TypeLink, Linkname: "a/b"},
		tar.Header{Name: "s", Typeflag: tar.TypeSymlink, Linkname: "a/../a"}, tar.Header{Name: "s/in", Typeflag: tar.TypeReg, Size: 1},
		tar.Header{Name: strings.Repeat("d/", 30) + "x", Typeflag: tar.TypeReg})
	high := seed(tar.Header{Name: "a/.wh.b", Typeflag: tar.TypeReg}, tar.Header{Name: "m", Typeflag: tar.TypeLink, Linkname: "l"},
		tar.Header{Name: "n", Typeflag: tar.TypeLink, Linkname: "m"}, tar.Header{Name: "d/.wh..wh..opq", Typeflag: tar.TypeReg},
		tar.Header{Name: "c", Typeflag: tar.TypeChar}, tar.Header{Name: "x", Typeflag: tar.TypeFifo, PAXRecords: map[string]string{"SCHILY.xattr.user.a": "b"}})
	f.Add(low, high)
	f.Add(high, low)
	f.Add([]byte{}, []byte("noise"))
	f.Fuzz(func(t *testing.T, low, high []byte) {
		dir := t.TempDir()
		limits := Limits{Bytes: 1 << 20, Entries: 200, Depth: 64, Layers: 2}
		bud := &budget{limits: limits}
		trees, files, err := (&Builder{Parallel: 1}).read(context.Background(), dir, []Layer{bytesLayer("low", low), bytesLayer("high", high)}, bud)
		defer func() {
			for _, f := range files {
				f.Close()
			}
		}()
		if err == nil {
			var whole *tree
			if whole, _, err = combine(trees, limits); err == nil {
				readable(t, whole)
				return
			}
		}
		var bad *malformed
		if !errors.As(err, &bad) {
			t.Errorf("not an error of the image: %v", err)
		}
	})
}

func readable(t *testing.T, whole *tree) {
	var out bytes.Buffer
	if err := emit(context.Background(), &out, whole); err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	tr := tar.NewReader(&out)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		name := strings.TrimSuffix(h.Name, "/")
		if name != "." && (path.Clean("/"+name) != "/"+name || seen[name]) {
			t.Errorf("path %q", h.Name)
		}
		if h.Typeflag == tar.TypeLink && !seen[h.Linkname] {
			t.Errorf("%q links to %q, which did not come before", h.Name, h.Linkname)
		}
		seen[name] = true
		if _, err := io.Copy(io.Discard, tr); err != nil {
			t.Fatal(err)
		}
	}
}
