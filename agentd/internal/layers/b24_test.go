// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package layers

import (
	"context"
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestB24_HundredLayers(t *testing.T) {
	began := time.Now()
	var all [][]byte
	for i := range 100 {
		entries := []entry{dir("d", 0o755), file(fmt.Sprintf("d/f%d", i), fmt.Sprint("layer ", i)), file("d/always", fmt.Sprint("layer ", i)),
			withXattr(dir("attrs", 0o700+int64(i%8)), "user.layer", fmt.Sprint(i))}
		if i%3 == 2 {
			entries = append(entries, whiteout(fmt.Sprintf("d/.wh.f%d", i-1)))
		}
		if i%10 == 9 {
			entries = append(entries, dir("opaque", 0o755), whiteout("opaque/.wh..wh..opq"))
		}
		entries = append(entries, file(fmt.Sprintf("opaque/o%d", i), "o"))
		all = append(all, archive(t, entries...))
	}
	ref := push(t, env.plain, "b24", imageOf(t, all...))
	s := openStore(t, testConfig(t))
	img, err := s.Ensure(context.Background(), ref, EnsureOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if img.Layers != 100 {
		t.Errorf("%d layers", img.Layers)
	}
	mustMatch(t, s, img, began, "opaque")
	tree := look(t, mountErofs(t, img.ErofsPath))
	if _, there := tree["d/f1"]; there || tree["opaque/o99"].Mode == 0 || tree["opaque/o98"].Mode != 0 || tree["attrs"].Xattrs["user.layer"] != "99" {
		t.Errorf("wrong tree")
	}
}

// containerd cannot unpack a hard link to a file of a lower layer; what it should show is what ln makes on an overlay.
func TestB24_HardLinkAcrossLayers(t *testing.T) {
	ref := push(t, env.plain, "b24-link", imageOf(t,
		archive(t, withXattr(file("a", "shared"), "user.k", "v"), link("b", "a"), symlinkTo("s", "a"), dir("real", 0o755), file("real/x", "x"), symlinkTo("via", "real")),
		archive(t, mode(link("c", "a"), 0o600), mode(link("d", "c"), 0o600), mode(link("e", "/a"), 0o640), link("t", "s"), link("y", "via/x")),
		archive(t, whiteout(".wh.a"), file("new", "n"))))
	s := openStore(t, testConfig(t))
	img, err := s.Ensure(context.Background(), ref, EnsureOptions{})
	if err != nil {
		t.Fatal(err)
	}
	tree := look(t, mountErofs(t, img.ErofsPath))
	for _, n := range []string{"c", "d", "e"} {
		f := tree[n]
		if f.SameAs != "c" || f.Content != tree["b"].Content || f.Mode&0o777 != 0o640 || f.Xattrs["user.k"] != "v" {
			t.Errorf("%s: %+v", n, f)
		}
	}
	if b := tree["b"]; b.SameAs != "b" || b.Mode&0o777 != 0o644 {
		t.Errorf("b: %+v", b)
	}
	if tree["t"].Content != "a" || tree["t"].SameAs != "s" || tree["t"].Mode != unix.S_IFLNK|0o777 || tree["y"].SameAs != "real/x" {
		t.Errorf("%+v %+v", tree["t"], tree["y"])
	}
	if _, there := tree["a"]; there {
		t.Error("a was removed")
	}
}
