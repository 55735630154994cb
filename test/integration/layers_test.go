package integration

import (
	"archive/tar"
	"fmt"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/dormouse-run/dormouse/test/images"
)

// A hundred layers arrive as one root, with everything that a layer can say about a file (B24). That the
// EROFS file is as an overlayfs mount is compared in the package layers; here it is what a guest sees.
func TestB24HundredLayers(t *testing.T) {
	w := enter(t)
	longName := strings.Repeat("n", 255)
	deep := "deep" + strings.Repeat("/"+strings.Repeat("d", 60), 30)
	old := time.Unix(1_234_567_890, 0)
	dated := func(e images.Entry) images.Entry {
		e.Header.ModTime = old
		return e
	}
	special := func(kind byte, name string, mode, major, minor int64) images.Entry {
		return images.Entry{Header: tar.Header{Typeflag: kind, Name: name, Mode: mode, Devmajor: major, Devminor: minor}}
	}
	layers := [][]images.Entry{
		{
			images.Dir("w", 0o755), images.File("w/gone", "gone", 0o644), images.File("w/kept", "kept", 0o644), images.Dir("w/dir", 0o755), images.File("w/dir/inside", "x", 0o644),
			images.Dir("o", 0o755), images.File("o/lower", "lower", 0o644), images.Dir("o/sub", 0o755), images.File("o/sub/lower", "lower", 0o644),
			images.File("turns", "a file", 0o644), images.Dir("folds", 0o755), images.File("folds/inside", "x", 0o644),
			images.Dir("h", 0o755), images.File("h/a", "one inode", 0o644), images.Hardlink("h/b", "h/a"), images.Hardlink("h/c", "h/a"),
			images.File("replaced", "lower", 0o600),
		},
		{
			images.Whiteout("w/gone"), images.Whiteout("w/dir"), images.Opaque("o"), images.File("o/upper", "upper", 0o644),
			images.Dir("turns", 0o700), images.File("turns/inside", "now a folder", 0o644), images.File("folds", "now a file", 0o644),
			images.File("replaced", "upper", 0o640).Owned(12, 34),
		},
		{
			images.File("suid", "s", 0o4755), images.File("sgid", "s", 0o2755).Owned(0, 50), images.Dir("sticky", 0o1777), images.Dir("empty", 0o711),
			dated(images.File("dated", "d", 0o644)), images.File("owned", "o", 0o604).Owned(1234, 5678), images.File("none", "", 0o644),
			images.Symlink("link", "w/kept"), images.Symlink("dangling", "/nowhere"), images.File("names-"+longName[6:], "long", 0o644),
			images.File(deep+"/bottom", "deep", 0o644), special(tar.TypeFifo, "fifo", 0o620, 0, 0), special(tar.TypeChar, "null", 0o666, 1, 3), special(tar.TypeBlock, "block", 0o660, 7, 0),
		},
	}
	base := len(layers) + 1 // and busybox's own
	for i := base; i < 100; i++ {
		entries := []images.Entry{images.File(fmt.Sprintf("many/%03d", i), fmt.Sprint(i), 0o644), images.File("many/last", fmt.Sprint(i), 0o644)}
		if i%10 == 0 {
			entries = append(entries, images.Whiteout(fmt.Sprintf("many/%03d", i-1)))
		}
		layers = append(layers, entries)
	}
	ref := w.image("test/b24", func() (v1.Image, error) {
		img, err := busyboxAnd(layers...)
		if err == nil {
			if all, lerr := img.Layers(); lerr != nil || len(all) != 100 {
				t.Errorf("the image has %d layers (%v)", len(all), lerr)
			}
		}
		return img, err
	})
	spec := w.spec()
	spec.Image = ref
	s := w.create(spec)

	kept := 0
	for i := base; i < 100; i++ {
		if i%10 != 9 || i == 99 {
			kept++
		}
	}
	for _, tc := range []struct{ what, script, want string }{
		{"a whiteout of a file", "ls /w", "kept"},
		{"an opaque folder", "find /o -type f", "/o/upper"},
		{"a file that became a folder", "stat -c '%a %F' /turns; cat /turns/inside", "700 directory\nnow a folder"},
		{"a folder that became a file", "cat /folds", "now a file"},
		{"hard links", "stat -c %h /h/a /h/b /h/c; stat -c %i /h/a /h/b /h/c | uniq | wc -l", "3\n3\n3\n1"},
		{"a file of two layers", "stat -c '%a %u %g' /replaced; cat /replaced", "640 12 34\nupper"},
		{"set-uid, set-gid, sticky", "stat -c '%a %g' /suid /sgid /sticky", "4755 0\n2755 50\n1777 0"},
		{"an empty folder", "stat -c '%a %F' /empty; ls -A /empty", "711 directory"},
		{"a time", "stat -c %Y /dated", "1234567890"},
		{"an owner", "stat -c '%a %u %g' /owned", "604 1234 5678"},
		{"an empty file", "stat -c '%s %F' /none", "0 regular empty file"},
		{"symbolic links", "cat /link; readlink /dangling", "kept/nowhere"},
		{"a name of 255 bytes", "cat /names-" + longName[6:], "long"},
		{"a deep path", "cat /" + deep + "/bottom", "deep"},
		{"a FIFO", "stat -c '%a %F' /fifo", "620 fifo"},
		// gVisor knows no numbers of an image's devices (see the package flatten), and has its own in /dev.
		{"device nodes", "stat -c '%a %F %t %T' /block /dev/null; ls -d /null 2>/dev/null", "660 block special file 0 0\n666 character special file 1 3"},
		{"many layers", "cat /many/last; ls /many | wc -l", fmt.Sprintf("99%d", kept+1)},
		{"no whiteout shows", "find / -xdev -name '.wh.*'", ""},
		{"it can be written over", "echo new > /w/kept; rm -r /turns; cat /link; ls -d /turns 2>/dev/null", "new"},
	} {
		t.Run(tc.what, func(t *testing.T) {
			if got := w.sub(t).sh(s, tc.script+"; true"); got != tc.want {
				t.Errorf("%s:\n%s\nwant\n%s", tc.script, got, tc.want)
			}
		})
	}
}
