package integration

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

var bigFile = flag.Int64("files.big", 1024*mib, "how large the large file of B23 is")

// pattern is a reader of so many bytes that differ everywhere; most blocks are zeroes, so that a large file
// needs little room inside.
type pattern struct{ at, size int64 }

const patternBlock = 4096

func (p *pattern) Read(b []byte) (int, error) {
	if p.at >= p.size {
		return 0, io.EOF
	}
	n := int(min(int64(len(b)), p.size-p.at, patternBlock-p.at%patternBlock))
	clear(b[:n])
	if (p.at/patternBlock)%16 == 0 {
		for i := range b[:n] {
			x := uint64(p.at+int64(i)) * 0x9e3779b97f4a7c15
			b[i] = byte(x >> 56)
		}
	}
	p.at += int64(n)
	return n, nil
}

func sumOf(t *testing.T, r io.Reader) string {
	t.Helper()
	h := sha256.New()
	if _, err := io.Copy(h, r); err != nil {
		t.Fatal(err)
	}
	return "sha256:" + hex.EncodeToString(h.Sum(nil))
}

// rss is the most memory that a process had, in bytes.
func rss(pid int) (int64, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(data)) {
		var kb int64
		if _, err := fmt.Sscanf(line, "VmHWM: %d kB", &kb); err == nil {
			return kb << 10, nil
		}
	}
	return 0, errors.New("no VmHWM")
}

// Files of 18 KiB and of 1 GiB go both ways and are the same; agentd needs no more memory for the large one (B23). It is on a volume:
// a sandbox's own files are in its memory.
func TestB23FilesBothWays(t *testing.T) {
	w := enter(t)
	ctx, cancel := context.WithTimeout(t.Context(), 3*bound)
	defer cancel()
	w.ctx = ctx
	spec := w.spec()
	spec.Volumes = []*dormousev1.VolumeMount{mount(w.volume(""), "/data")}
	s := w.create(spec)
	files := s.Files()
	for _, size := range []int64{0, 1, 18 << 10, *bigFile} {
		before, err := rss(w.AgentdPID(w.nodeOf(s)))
		w.ok(err)
		path := fmt.Sprintf("/data/in/%d", size)
		sent := sha256.New()
		done, err := files.Write(w.ctx, path, io.TeeReader(&pattern{size: size}, sent), client.WriteOptions{Parents: true, Size: size})
		w.ok(err)
		want := "sha256:" + hex.EncodeToString(sent.Sum(nil))
		if done.GetDigest() != want || done.GetInfo().GetSizeBytes() != size || done.GetInfo().GetMode() != 0o644 {
			t.Errorf("%d bytes: wrote %v; want digest %s", size, done, want)
		}
		if size < mib { // the large one is read once, below
			if inside, _, _ := strings.Cut(w.sh(s, "sha256sum "+path), " "); "sha256:"+inside != want {
				t.Errorf("%d bytes: inside is %s, want %s", size, inside, want)
			}
		}
		r, err := files.Open(w.ctx, path)
		w.ok(err)
		if got := sumOf(t, r); got != want {
			t.Errorf("%d bytes: read %s, want %s", size, got, want)
		}
		w.ok(r.Close())
		after, err := rss(w.AgentdPID(w.nodeOf(s)))
		w.ok(err)
		if grew := after - before; grew > 48*mib {
			t.Errorf("%d bytes: agentd grew by %d", size, grew)
		}
	}
	if left := w.sh(s, "find / /data -xdev -name '*.dormouse-part'"); left != "" {
		t.Errorf("left: %s", left)
	}
}

// Whatever is wrong with a path is a typed error that names it, never an "ok", and the old content stays.
func TestB23FileErrors(t *testing.T) {
	w := enter(t)
	spec := w.spec()
	v := w.volume("")
	ro := mount(v, "/ro")
	ro.ReadOnly = true
	spec.Volumes = []*dormousev1.VolumeMount{ro}
	spec.Resources.DiskLimitBytes = 8 * mib
	s := w.create(spec)
	files, worker := s.Files(), s.Files()
	worker.User = "1000"
	w.sh(s, `mkdir -p /d/full /locked && chmod 700 /locked && echo old >/d/old && touch /d/full/x && mkfifo /d/fifo && ln -s /d/loop /d/loop && ln -s /d/old /d/link`)
	write := func(f *client.Files, path string) func() error {
		return func() error {
			_, err := f.Write(w.ctx, path, strings.NewReader("new"), client.WriteOptions{})
			return err
		}
	}
	read := func(f *client.Files, path string) func() error {
		return func() error {
			r, err := f.Open(w.ctx, path)
			if err == nil {
				_ = r.Close()
			}
			return err
		}
	}
	for name, c := range map[string]struct {
		call func() error
		want errs.Reason
	}{
		"write, read-only volume":  {write(files, "/ro/x"), errs.ReadOnlyPath},
		"write, init's own files":  {write(files, "/.dormouse/x"), errs.ReadOnlyPath},
		"write, missing folder":    {write(files, "/absent/x"), errs.FileNotFound},
		"write, folder in the way": {write(files, "/d"), errs.IsADirectory},
		"write, file as a folder":  {write(files, "/d/old/x"), errs.NotADirectory},
		"write, FIFO in the way":   {write(files, "/d/fifo"), errs.NotAFile},
		"write, loop of links":     {write(files, "/d/loop"), errs.InvalidField},
		"write, not allowed":       {write(worker, "/locked/x"), errs.FileDenied},
		"write, name too long":     {write(files, "/d/"+strings.Repeat("n", 300)), errs.InvalidField},
		"write, relative":          {write(files, "d/x"), errs.InvalidField},
		"write, no such user":      {write(&client.Files{}, ""), errs.InvalidField},
		"write, full disk": {func() error {
			_, err := files.Write(w.ctx, "/d/old", &noise{size: 32 * mib}, client.WriteOptions{})
			return err
		}, errs.SandboxDiskFull},
		"write, no room as said": {func() error {
			_, err := files.Write(w.ctx, "/d/old", &noise{size: 1}, client.WriteOptions{Size: 1 << 40})
			return err
		}, errs.SandboxDiskFull},
		"read, missing":             {read(files, "/absent"), errs.FileNotFound},
		"read, folder":              {read(files, "/d"), errs.IsADirectory},
		"read, FIFO":                {read(files, "/d/fifo"), errs.NotAFile},
		"read, device":              {read(files, "/dev/zero"), errs.NotAFile},
		"read, not allowed":         {read(worker, "/locked/x"), errs.FileDenied},
		"make, there already":       {func() error { return files.MakeDirectory(w.ctx, "/d", false) }, errs.FileExists},
		"make, no parent":           {func() error { return files.MakeDirectory(w.ctx, "/absent/x", false) }, errs.FileNotFound},
		"make, read-only":           {func() error { return files.MakeDirectory(w.ctx, "/ro/x", true) }, errs.ReadOnlyPath},
		"remove, not empty":         {func() error { return files.Remove(w.ctx, "/d/full", false) }, errs.DirectoryNotEmpty},
		"remove, missing":           {func() error { return files.Remove(w.ctx, "/absent", true) }, errs.FileNotFound},
		"remove, root":              {func() error { return files.Remove(w.ctx, "/", true) }, errs.UnsafePath},
		"remove, mount":             {func() error { return files.Remove(w.ctx, "/ro", true) }, errs.FileBusy},
		"move, missing":             {func() error { return files.Move(w.ctx, "/absent", "/d/x", false) }, errs.FileNotFound},
		"move, over a file":         {func() error { return files.Move(w.ctx, "/d/old", "/d/full/x", false) }, errs.FileExists},
		"move, over a folder":       {func() error { return files.Move(w.ctx, "/d/old", "/d/full", true) }, errs.IsADirectory},
		"move, into itself":         {func() error { return files.Move(w.ctx, "/d", "/d/full/d", false) }, errs.UnsafePath},
		"move, another file system": {func() error { return files.Move(w.ctx, "/d/old", "/dev/shm/old", false) }, errs.CrossDevice},
		"list, missing":             {func() error { return files.List(w.ctx, "/absent", nil) }, errs.FileNotFound},
		"list, file":                {func() error { return files.List(w.ctx, "/d/old", nil) }, errs.NotADirectory},
		"watch, missing":            {func() error { return files.Watch(w.ctx, "/absent", false, nil) }, errs.FileNotFound},
		"tar of nothing":            {func() error { _, err := files.ReadArchive(w.ctx, "/absent", "", io.Discard); return err }, errs.FileNotFound},
		"tar into nothing": {func() error {
			_, err := files.WriteArchive(w.ctx, "/absent", strings.NewReader(""), client.ArchiveOptions{})
			return err
		}, errs.FileNotFound},
		"no tar": {func() error {
			_, err := files.WriteArchive(w.ctx, "/d", &noise{size: 4096}, client.ArchiveOptions{})
			return err
		}, errs.InvalidField},
	} {
		if name == "write, no such user" {
			nobody := s.Files()
			nobody.User = "nobody-knows"
			c.call, c.want = write(nobody, "/d/x"), errs.UserNotFound
		}
		err := c.call()
		var e *errs.Error
		if !errors.As(err, &e) || e.Reason != c.want || e.Message == "" {
			t.Errorf("%s: got %v, want %s", name, err, c.want)
		}
	}
	if got := w.sh(s, "cat /d/old; find / -xdev -name '*.dormouse-part'"); got != "old" {
		t.Errorf("after the refusals: %q", got)
	}
	// A link at the path is followed, and what it leads to replaced as a whole, with its mode and owner.
	w.sh(s, "chown 7:8 /d/old && chmod 4711 /d/old")
	w.ok(write(files, "/d/link")())
	if got := w.sh(s, "cat /d/old; stat -c '%a %u:%g' /d/old; readlink /d/link"); got != "new4711 7:8\n/d/old" {
		t.Errorf("through the link: %q", got)
	}
}

// noise does not compress to holes.
type noise struct{ size, at int64 }

func (n *noise) Read(b []byte) (int, error) {
	if n.at >= n.size {
		return 0, io.EOF
	}
	k := int(min(int64(len(b)), n.size-n.at))
	for i := range b[:k] {
		b[i] = byte(n.at+int64(i))*7 + 1 | 1
	}
	n.at += int64(k)
	return k, nil
}

// No link that a sandbox makes leads to the host: paths are resolved inside.
func TestFileLinksStayInside(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec())
	marker := t.TempDir() + "/host-file"
	w.ok(os.WriteFile(marker, []byte("of the host"), 0o600))
	w.sh(s, "ln -s "+marker+" /tmp/out && ln -s / /tmp/root && ln -s ../../../../../../../.. /tmp/up")
	files := s.Files()
	for _, path := range []string{"/tmp/out", "/tmp/root" + marker, "/tmp/up" + marker, marker} {
		_, err := files.Open(w.ctx, path)
		w.refused(err, errs.FileNotFound)
	}
	if _, err := files.Open(w.ctx, "/proc/1/root"+marker); err == nil {
		t.Error("the way through init's root is open")
	}
	_, err := files.Write(w.ctx, "/tmp/out", strings.NewReader("x"), client.WriteOptions{Parents: true})
	w.ok(err)
	if got, err := os.ReadFile(marker); err != nil || string(got) != "of the host" {
		t.Fatalf("the host's file is %q, %v", got, err)
	}
	if got := w.sh(s, "cat "+marker); got != "x" {
		t.Errorf("inside is %q", got)
	}
}

// pausing is a reader that stops half way until it is told to go on.
type pausing struct {
	pattern
	reached chan struct{}
	resume  chan struct{}
}

func (p *pausing) Read(b []byte) (int, error) {
	if p.reached != nil && p.at >= p.size/2 {
		close(p.reached)
		<-p.resume
		p.reached = nil
	}
	return p.pattern.Read(b)
}

// A transfer goes on through a checkpoint, also one that is in the middle of it, and what is restored works (B23).
func TestFilesAcrossCheckpoint(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec())
	const size = 16 * mib
	want := sumOf(t, &pattern{size: size})
	src := &pausing{pattern: pattern{size: size}, reached: make(chan struct{}), resume: make(chan struct{})}
	wrote := make(chan error, 1)
	reached := src.reached
	go func() {
		done, err := s.Files().Write(w.ctx, "/root/file", src, client.WriteOptions{})
		if err == nil && done.GetDigest() != want {
			err = fmt.Errorf("digest %s, want %s", done.GetDigest(), want)
		}
		wrote <- err
	}()
	<-reached
	first := w.checkpoint(s)
	close(src.resume)
	second := w.checkpoint(s) // while bytes are on their way
	w.ok(<-wrote)
	r, err := s.Files().Open(w.ctx, "/root/file")
	w.ok(err)
	head := make([]byte, mib)
	_, err = io.ReadFull(r, head)
	w.ok(err)
	third := w.checkpoint(s) // while a reader waits
	rest := sumOf(t, io.MultiReader(bytes.NewReader(head), r))
	w.ok(r.Close())
	if rest != want {
		t.Errorf("read %s, want %s", rest, want)
	}
	for _, snap := range []*client.Snapshot{first, second, third} {
		fork, err := snap.Restore(w.ctx, &dormousev1.RestoreSandboxRequest{})
		w.ok(err)
		_, err = fork.Files().Write(w.ctx, "/root/other", &pattern{size: mib}, client.WriteOptions{})
		w.ok(err)
		w.ok(fork.Delete(w.ctx, ""))
	}
}

// An agentd that is killed in the middle of a transfer leaves no helper in the sandbox, and the client goes
// on with the next agentd from where it was (B23).
func TestFilesAcrossAgentdKill(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec())
	const size = 16 * mib
	want := sumOf(t, &pattern{size: size})
	src := &pausing{pattern: pattern{size: size}, reached: make(chan struct{}), resume: make(chan struct{})}
	reached := src.reached
	wrote := make(chan error, 1)
	go func() {
		done, err := s.Files().Write(w.ctx, "/root/file", src, client.WriteOptions{})
		if err == nil && done.GetDigest() != want {
			err = fmt.Errorf("digest %s, want %s", done.GetDigest(), want)
		}
		wrote <- err
	}()
	<-reached
	w.until("there is one helper during the transfer", s, "ps | grep -c '[g]uestbulk'", "1")
	w.ok(w.KillAgentd(w.ctx, w.nodeOf(s)))
	w.ok(w.StartAgentdReady(w.ctx, w.nodeOf(s)))
	w.until("no helper is left", s, "ps | grep -c '[g]uestbulk' || true", "0")
	close(src.resume)
	w.ok(<-wrote)
	if left := w.sh(s, "ls -A /root"); left != "file" {
		t.Errorf("in the folder: %s", left)
	}
	r, err := s.Files().Open(w.ctx, "/root/file")
	w.ok(err)
	defer r.Close()
	if got := sumOf(t, r); got != want {
		t.Errorf("read %s, want %s", got, want)
	}
}

// Directories go out and in as archives, with their links, modes and times.
func TestFileArchives(t *testing.T) {
	w := enter(t)
	s, other := w.create(w.spec()), w.create(w.spec())
	w.sh(s, `mkdir -p /src/a/b /src/empty && echo one >/src/a/one && ln /src/a/one /src/a/b/same && ln -s ../one /src/a/b/link && ln -s /etc/passwd /src/abs &&
		chmod 4750 /src/a/one && chmod 1777 /src/empty && touch -d '2020-01-02 03:04:05' /src/a /src/a/one && dd if=/dev/urandom of=/src/big bs=64k count=40 2>/dev/null`)
	look := `cd $1 && find . | sort && stat -c '%n %a %h %s %Y' a a/one a/b/same empty big && readlink a/b/link && readlink abs && sha256sum big a/one`
	pr, pw := io.Pipe()
	sent := make(chan error, 1)
	go func() {
		_, err := s.Files().ReadArchive(w.ctx, "/src", ".", pw)
		sent <- errors.Join(err, pw.CloseWithError(err))
	}()
	done, err := other.Files().WriteArchive(w.ctx, "/dst/x", pr, client.ArchiveOptions{Parents: true})
	w.ok(err)
	w.ok(<-sent)
	if done.GetEntries() != 8 {
		t.Errorf("%d entries", done.GetEntries())
	}
	if want, got := w.sh(s, "set -- /src; "+look), w.sh(other, "set -- /dst/x; "+look); want != got {
		t.Errorf("unpacked:\n%s\nwant:\n%s", got, want)
	}
	var names []string
	w.ok(other.Files().List(w.ctx, "/dst/x", func(i *dormousev1.FileInfo) error {
		names = append(names, fmt.Sprint(i.GetName(), " ", i.GetType()))
		return nil
	}))
	if got := strings.Join(names, ","); got != "a FILE_TYPE_DIRECTORY,abs FILE_TYPE_SYMLINK,big FILE_TYPE_FILE,empty FILE_TYPE_DIRECTORY" {
		t.Errorf("listed %s", got)
	}
}

// Changes are told, new directories are watched too.
func TestFileWatch(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec())
	w.sh(s, "mkdir /w")
	enough := errors.New("enough")
	seen := map[string]bool{}
	err := s.Files().Watch(w.ctx, "/w", true, func(r *dormousev1.WatchFilesResponse) error {
		if len(r.GetEvents()) == 0 && !r.GetOverflow() {
			w.sh(s, "mkdir /w/d && echo x >/w/f && mv /w/f /w/g && rm /w/g && echo y >/w/d/deep")
		}
		for _, e := range r.GetEvents() {
			seen[strings.TrimPrefix(e.GetChange().String(), "FILE_CHANGE_")+" "+e.GetPath()] = true
		}
		for _, want := range []string{"CREATED /w/d", "CREATED /w/f", "MODIFIED /w/f", "MOVED_FROM /w/f", "MOVED_TO /w/g", "REMOVED /w/g", "CREATED /w/d/deep"} {
			if !seen[want] {
				return nil
			}
		}
		return enough
	})
	if !errors.Is(err, enough) {
		t.Fatalf("%v, seen %v", err, seen)
	}
}

// A transfer stands still while its sandbox is paused, and goes on when that runs again (B23).
func TestFilesAcrossPause(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec())
	const size = 8 * mib
	want := sumOf(t, &pattern{size: size})
	src := &pausing{pattern: pattern{size: size}, reached: make(chan struct{}), resume: make(chan struct{})}
	reached := src.reached
	wrote := make(chan error, 1)
	go func() {
		done, err := s.Files().Write(w.ctx, "/root/file", src, client.WriteOptions{})
		if err == nil && done.GetDigest() != want {
			err = fmt.Errorf("digest %s, want %s", done.GetDigest(), want)
		}
		wrote <- err
	}()
	<-reached
	w.ok(s.Pause(w.ctx, ""))
	close(src.resume)
	_, err := s.Files().Stat(w.ctx, "/root")
	w.refused(err, errs.SandboxPaused)
	select {
	case err := <-wrote:
		t.Fatalf("the write ended in a sandbox that stands still: %v", err)
	default:
	}
	w.ok(s.Resume(w.ctx, ""))
	w.ok(<-wrote)
	r, err := s.Files().Open(w.ctx, "/root/file")
	w.ok(err)
	defer r.Close()
	if got := sumOf(t, r); got != want {
		t.Errorf("read %s, want %s", got, want)
	}
}

// What an upload left that nobody took up again is removed by a later write into its folder, a day after; what somebody is at is not, however
// old it seems.
func TestFilesLeftByUploads(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec())
	src := &pausing{pattern: pattern{size: mib}, reached: make(chan struct{}), resume: make(chan struct{})}
	wrote := make(chan error, 1)
	reached := src.reached
	go func() {
		_, err := s.Files().Write(w.ctx, "/root/slow", src, client.WriteOptions{})
		wrote <- err
	}()
	<-reached
	w.until("the upload has its hidden file", s, "ls -A /root | grep -c 'slow.*dormouse-part$'", "1")
	w.sh(s, `cd /root && echo half >.left.an-id.dormouse-part && echo half >.new.an-id.dormouse-part && touch -d '2001-01-01 00:00:00' .left* .slow*`)
	_, err := s.Files().Write(w.ctx, "/root/other", strings.NewReader("other"), client.WriteOptions{})
	w.ok(err)
	close(src.resume)
	w.ok(<-wrote)
	if got := w.sh(s, "ls -A /root"); got != ".new.an-id.dormouse-part\nother\nslow" {
		t.Errorf("in the folder: %s", got)
	}
}
