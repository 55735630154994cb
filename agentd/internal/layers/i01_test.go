// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package layers

import (
	"archive/tar"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// capNetRaw is the value of security.capability for cap_net_raw=ep.
const capNetRaw = "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"

func withXattr(e entry, kv ...string) entry {
	e.PAXRecords = map[string]string{}
	for i := 0; i < len(kv); i += 2 {
		e.PAXRecords["SCHILY.xattr."+kv[i]] = kv[i+1]
	}
	return e
}

func owned(e entry, uid, gid int) entry { e.Uid, e.Gid = uid, gid; return e }
func mode(e entry, m int64) entry       { e.Mode = m; return e }
func at(e entry, t time.Time) entry     { e.ModTime = t; return e }

func device(name string, kind byte, major, minor int64) entry {
	return entry{tar.Header{Name: name, Typeflag: kind, Mode: 0o660, Devmajor: major, Devminor: minor, ModTime: someTime}, ""}
}

func whiteout(name string) entry {
	return entry{tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o600, ModTime: time.Unix(0, 0)}, ""}
}

func lowest(t *testing.T) []byte {
	deep := strings.TrimSuffix(strings.Repeat(strings.Repeat("d", 60)+"/", 60), "/")
	return archive(t,
		mode(dir("./", 0), 0o700), // ignored by all unpackers: the root is 0755
		dir("bin/", 0o755), mode(file("bin/su", "setuid"), 0o4755), mode(file("bin/wall", "setgid"), 0o2755),
		dir("tmp", 0o1777), mode(dir("shared", 0), 0o2775), owned(dir("home", 0o750), 70000, 3_000_000),
		owned(mode(file("home/secret", "mine"), 0o600), 70000, 3_000_000), owned(file("home/huge", "ids"), 1<<31, 1<<31+1),
		file("one", "linked"), link("two", "one"), link("bin/three", "./one"), mode(link("bin/four", "/bin/three"), 0o604),
		symlinkTo("lib", "usr/lib"), symlinkTo("abs", "/bin/su"), symlinkTo("dangling", "../../../nowhere"),
		link("alsodangling", "dangling"), symlinkTo("long", strings.Repeat("x/", 120)+"end"),
		dir("dev", 0o755), device("dev/null", tar.TypeChar, 1, 3), device("dev/loop", tar.TypeBlock, 7, 130),
		device("dev/big", tar.TypeChar, 300, 70_000), device("pipe", tar.TypeFifo, 0, 0), mode(link("dev/null2", "dev/null"), 0o666),
		file("empty", ""), dir("emptydir", 0o711), file("exact", strings.Repeat("p", 4096)), file("more", strings.Repeat("q", 4097)),
		file(strings.Repeat("n", 255), "long name"), file("utf8-\u00e9\u4e16", "x"), file("new\nline and blank", "x"),
		dir(deep, 0o755), file(deep+"/bottom", "deep"),
		at(file("epoch", "0"), time.Unix(0, 0)), at(file("tenth", "t"), time.Unix(1_600_000_000, 100_000_000)),
		at(file("nano", "n"), time.Unix(1_600_000_000, 1)), at(file("far", "f"), time.Unix(5_000_000_000, 5)),
		withXattr(file("bin/ping", "caps"), "security.capability", capNetRaw),
		withXattr(file("attrs", "many"), "user.one", "1", "user.zero", "a\x00b", "user.empty", "", "trusted.gone", "x"),
		withXattr(dir("attrdir", 0o755), "user.dir", "yes"),
		dir("gone", 0o755), file("gone/a", "a"), file("gonefile", "g"), dir("hidden", 0o755), file("hidden/old", "o"), dir("hidden/sub", 0o755),
		file("hidden/sub/old", "o"), file("tobedir", "x"), dir("tobefile", 0o755), file("tobefile/x", "x"),
		dir("kept", 0o755), file("kept/changed", "before"), file("kept/stays", "same"),
		file("never/listed/parents", "x"), dir("usr", 0o755), dir("usr/lib", 0o755), file("usr/lib/libc", "c"),
		dir("again", 0o755), file("again/f", "first"),
		file("twice", "first"), mode(file("twice", "second time"), 0o640),
	)
}

func middle(t *testing.T) []byte {
	return archive(t,
		whiteout(".wh.gone"), whiteout(".wh.gonefile"), whiteout(".wh.neverthere"), whiteout("again/.wh.f"),
		dir("hidden", 0o700), file("hidden/new", "n"), whiteout("hidden/.wh..wh..opq"), dir("hidden/sub", 0o755), file("hidden/sub/new", "n"),
		dir("tobedir", 0o755), file("tobedir/in", "i"), file("tobefile", "now a file"),
		file("kept/changed", "after"), // its parent is not listed
		file("usr/lib/libd", "d"),
		withXattr(dir("attrdir", 0o700), "user.other", "2"), file("bin/ping", "no caps"),
		file("one", "replaced: two and three stay"), file("pair", "p"), link("pair2", "pair"),
		symlinkTo("lib", "usr/lib64"),
	)
}

func highest(t *testing.T) []byte {
	return archive(t,
		dir("gone", 0o500), file("gone/b", "b"), file("again/f", "third"), dir("hidden/sub", 0o711), file("hidden/sub/third", "3"),
		whiteout("hidden/.wh.new"), dir("lib", 0o755), file("lib/now-a-folder", "x"), whiteout("kept/.wh.stays"),
		dir("opq", 0o755), whiteout("opq/.wh..wh..opq"), device("dev/null", tar.TypeChar, 1, 5), whiteout("dev/.wh.loop"),
	)
}

func TestI01_SameAsOverlayfs(t *testing.T) {
	began := time.Now()
	ref := push(t, env.plain, "i01", imageOf(t, lowest(t), middle(t), highest(t), sparseLayer(t, "pax")))
	s := openStore(t, testConfig(t))
	img, err := s.Ensure(context.Background(), ref, EnsureOptions{})
	if err != nil {
		t.Fatal(err)
	}
	mustMatch(t, s, img, began, "never", "never/listed", "kept", "usr", "usr/lib", "again", "hidden", "dev", "bin")
	tree := look(t, mountErofs(t, img.ErofsPath))
	if got := tree["attrs"].Xattrs; got["user.zero"] != "a\x00b" || len(got) != 3 {
		t.Errorf("attributes: %q", got)
	}
	if tree["never"].Mode&0o7777 != 0o755 || tree["two"].Content == tree["one"].Content {
		t.Errorf("%+v, %+v", tree["never"], tree["two"])
	}
}

// containerd does not unpack tar's older form of sparse files; other tools write it, so it is read here.
func TestI01_OldSparseFormat(t *testing.T) {
	ref := push(t, env.plain, "i01-gnu", imageOf(t, sparseLayer(t, "gnu"), sparseLayer(t, "pax")))
	s := openStore(t, testConfig(t))
	img, err := s.Ensure(context.Background(), ref, EnsureOptions{})
	if err != nil {
		t.Fatal(err)
	}
	tree := look(t, mountErofs(t, img.ErofsPath))
	if a, b := tree["sparse-gnu"], tree["sparse-pax"]; a.Size != 4<<20+7 || a.Content != b.Content {
		t.Errorf("%+v, %+v", a, b)
	}
}

// sparseLayer has GNU tar write a sparse file in one of its formats.
func sparseLayer(t *testing.T, format string) []byte {
	t.Helper()
	src := t.TempDir()
	f, err := os.Create(filepath.Join(src, "sparse-"+format))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, off := range []int64{8192, 1 << 20, 3<<20 + 100} {
		if _, err := f.WriteAt([]byte("island"), off); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Truncate(4<<20 + 7); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("tar", "--sparse", "--format="+format, "--mtime=@1600000000", "-C", src, "-cf", "-", "sparse-"+format).Output()
	if err != nil {
		t.Fatal(err)
	}
	if len(out) > 1<<20 {
		t.Fatalf("tar wrote %d bytes: not sparse", len(out))
	}
	return out
}
