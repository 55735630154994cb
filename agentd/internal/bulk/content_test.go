package bulk

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/agentd/internal/bulkwire"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

func sum(data []byte) string {
	s := sha256.Sum256(data)
	return hex.EncodeToString(s[:])
}

// TestAWriteIsTakenUp: what arrived before a cut is kept beside the file, and the rest makes it whole; the old
// content stands until then.
func TestAWriteIsTakenUp(t *testing.T) {
	w := newWorld(t, Options{}, realHelper)
	file := filepath.Join(t.TempDir(), "file")
	must(t, os.WriteFile(file, []byte("old"), 0o640))
	must(t, os.Chmod(file, 0o640)) // whatever the umask is
	want := bytes.Repeat([]byte("0123456789abcdef"), 40_000)
	order := bulkwire.Order{Op: bulkwire.Write, Path: file, Upload: "an-id"}
	first, err := w.Start(within(t), w.uid, order)
	must(t, err)
	var opened bulkwire.Opened
	must(t, first.Answer(&opened))
	half := len(want) / 2
	_, err = first.Write(want[:half])
	must(t, err)
	eventually(t, "the half has arrived", func() bool {
		st, err := os.Stat(opened.Part)
		return err == nil && st.Size() == int64(half)
	})
	must(t, first.Close())
	eventually(t, "the helper is gone", func() bool { return w.Active(w.uid) == 0 })

	order.Resume, order.Digest = true, sum(want)
	second, err := w.Start(within(t), w.uid, order)
	must(t, err)
	defer second.Close()
	must(t, second.Answer(&opened))
	if opened.Offset != int64(half) {
		t.Fatalf("taken up at %d, want %d", opened.Offset, half)
	}
	if got, err := os.ReadFile(file); err != nil || string(got) != "old" {
		t.Fatalf("meanwhile the file is %q, %v", got, err)
	}
	_, err = second.Write(want[half:])
	must(t, err)
	must(t, second.CloseWrite())
	var done bulkwire.Done
	must(t, second.Result(&done))
	got, err := os.ReadFile(file)
	must(t, err)
	if !bytes.Equal(got, want) || done.Digest != sum(want) || done.Bytes != int64(len(want)) || done.Info == nil || done.Info.Mode != 0o640 {
		t.Fatalf("%d bytes, %+v", len(got), done)
	}
	if entries, err := os.ReadDir(filepath.Dir(file)); err != nil || len(entries) != 1 {
		t.Fatalf("left: %v, %v", entries, err)
	}
}

// TestAWriteThatIsCutLeavesNothing: without a name that it could be taken up by; and one with the wrong
// digest neither.
func TestAWriteThatIsCutLeavesNothing(t *testing.T) {
	w := newWorld(t, Options{}, realHelper)
	dir := t.TempDir()
	cut, err := w.Start(within(t), w.uid, bulkwire.Order{Op: bulkwire.Write, Path: filepath.Join(dir, "file")})
	must(t, err)
	must(t, cut.Answer(nil))
	_, err = cut.Write([]byte("half"))
	must(t, err)
	must(t, cut.Close())
	wrong, err := w.Start(within(t), w.uid, bulkwire.Order{Op: bulkwire.Write, Path: filepath.Join(dir, "file"), Digest: sum([]byte("other"))})
	must(t, err)
	must(t, wrong.Answer(nil))
	_, err = wrong.Write([]byte("this"))
	must(t, err)
	must(t, wrong.CloseWrite())
	if err := wrong.Result(nil); errs.ReasonOf(err) != errs.DigestMismatch {
		t.Fatalf("got %v, want %s", err, errs.DigestMismatch)
	}
	must(t, wrong.Close())
	eventually(t, "no helper is left", func() bool { return w.Active(w.uid) == 0 })
	if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
		t.Errorf("left: %v, %v", entries, err)
	}
}

// TestAWriteRemovesWhatNobodyTakesUp: of the unfinished writes in its folder, those that were left for more than a day; none that
// somebody is at, or has just been at.
func TestAWriteRemovesWhatNobodyTakesUp(t *testing.T) {
	w := newWorld(t, Options{}, realHelper)
	dir := t.TempDir()
	long := time.Now().Add(-25 * time.Hour)
	age := func(path string) {
		t.Helper()
		must(t, os.Chtimes(path, long, long))
	}
	left := func(name, content string) string {
		t.Helper()
		path := filepath.Join(dir, name)
		must(t, os.WriteFile(path, []byte(content), 0o600))
		return path
	}
	begin := func(order bulkwire.Order) (*Transfer, bulkwire.Opened) {
		t.Helper()
		order.Op = bulkwire.Write
		tr, err := w.Start(within(t), w.uid, order)
		must(t, err)
		t.Cleanup(func() { _ = tr.Close() })
		var opened bulkwire.Opened
		must(t, tr.Answer(&opened))
		return tr, opened
	}
	finish := func(tr *Transfer) {
		t.Helper()
		must(t, tr.CloseWrite())
		must(t, tr.Result(nil))
	}
	// A slow client's write: nothing has come for a day.
	slow, opened := begin(bulkwire.Order{Path: filepath.Join(dir, "slow"), Upload: "slow"})
	_, err := slow.Write([]byte("half, "))
	must(t, err)
	eventually(t, "the half has arrived", func() bool {
		got, err := os.ReadFile(opened.Part)
		return err == nil && string(got) == "half, "
	})
	age(opened.Part)
	age(left(".cut.an-id.dormouse-part", "half"))
	age(left(".taken.up.dormouse-part", "taken "))
	left(".cut.recently.dormouse-part", "half")
	age(left("no.dormouse-part", "a user's"))
	must(t, os.Mkdir(filepath.Join(dir, ".folder.dormouse-part"), 0o700))
	age(filepath.Join(dir, ".folder.dormouse-part"))
	outside := filepath.Join(t.TempDir(), "outside")
	must(t, os.WriteFile(outside, nil, 0o600))
	age(outside)
	must(t, os.Symlink(outside, filepath.Join(dir, ".link.dormouse-part")))

	// Taken up after a day, by who is first: it goes on, and counts as new.
	taken, opened := begin(bulkwire.Order{Path: filepath.Join(dir, "taken"), Upload: "up", Resume: true})
	if opened.Offset != int64(len("taken ")) {
		t.Fatalf("taken up at %d", opened.Offset)
	}
	if st, err := os.Stat(opened.Part); err != nil || time.Since(st.ModTime()) > 24*time.Hour {
		t.Fatalf("taken up it is of %v, %v", st.ModTime(), err)
	}
	other, _ := begin(bulkwire.Order{Path: filepath.Join(dir, "other")})
	finish(other)
	for tr, rest := range map[*Transfer]string{slow: "whole", taken: "up"} {
		_, err = tr.Write([]byte(rest))
		must(t, err)
		finish(tr)
	}
	want := map[string]string{"slow": "half, whole", "taken": "taken up", "other": "", ".cut.recently.dormouse-part": "half",
		"no.dormouse-part": "a user's", ".folder.dormouse-part": "", ".link.dormouse-part": ""}
	entries, err := os.ReadDir(dir)
	must(t, err)
	for _, e := range entries {
		content, known := want[e.Name()]
		if got, err := os.ReadFile(filepath.Join(dir, e.Name())); !known || e.Type() != os.ModeDir && (err != nil || string(got) != content) {
			t.Errorf("there is %s: %q, %v", e.Name(), got, err)
		}
	}
	if len(entries) != len(want) {
		t.Errorf("there are %v", entries)
	}
}

// TestAReadIsTakenUp: from its offset, with the digest of all; not when the file is another one.
func TestAReadIsTakenUp(t *testing.T) {
	w := newWorld(t, Options{}, realHelper)
	file := filepath.Join(t.TempDir(), "file")
	want := bytes.Repeat([]byte("0123456789abcdef"), 20_000)
	must(t, os.WriteFile(file, want, 0o600))
	read := func(order bulkwire.Order) ([]byte, bulkwire.Info, bulkwire.Done, error) {
		order.Op, order.Path = bulkwire.Read, file
		tr, err := w.Start(within(t), w.uid, order)
		must(t, err)
		defer tr.Close()
		var info bulkwire.Info
		if err := tr.Answer(&info); err != nil {
			return nil, info, bulkwire.Done{}, err
		}
		got, err := io.ReadAll(tr)
		must(t, err)
		var done bulkwire.Done
		must(t, tr.Result(&done))
		return got, info, done, nil
	}
	got, info, done, err := read(bulkwire.Order{})
	must(t, err)
	if !bytes.Equal(got, want) || done.Digest != sum(want) {
		t.Fatalf("%d bytes, %+v", len(got), done)
	}
	got, _, done, err = read(bulkwire.Order{Offset: 100_000, HashAll: true, Version: info.Version})
	must(t, err)
	if !bytes.Equal(got, want[100_000:]) || done.Digest != sum(want) {
		t.Fatalf("the rest: %d bytes, %+v", len(got), done)
	}
	got, _, done, err = read(bulkwire.Order{Offset: 10, Length: 7})
	must(t, err)
	if !bytes.Equal(got, want[10:17]) || done.Digest != sum(want[10:17]) {
		t.Fatalf("a part: %q, %+v", got, done)
	}
	must(t, os.WriteFile(file, want[1:], 0o600))
	if _, _, _, err := read(bulkwire.Order{Offset: 5, Version: info.Version}); errs.ReasonOf(err) != errs.FileChanged {
		t.Fatalf("got %v, want %s", err, errs.FileChanged)
	}
}

// peakMemory is the most memory that a process had resident since its exec, 0 if it cannot be told any more.
// Its resource usage would count the test's own memory too, which a child shares until its exec.
func peakMemory(pid int) int64 {
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for line := range strings.Lines(string(status)) {
		if v, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kib, _ := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(v), " kB"), 10, 64)
			return kib << 10
		}
	}
	return 0
}

// TestHelperMemoryIsFlat: a large file needs no more than a small one (B23).
func TestHelperMemoryIsFlat(t *testing.T) {
	peak := make(chan int64, 8)
	w := newWorld(t, Options{}, func(ctx context.Context, _ []string, in, out, stderr *os.File) int {
		cmd := exec.CommandContext(ctx, helperBin)
		cmd.Stdin, cmd.Stdout, cmd.Stderr = in, out, stderr
		if err := cmd.Start(); err != nil {
			return 127
		}
		_, _, _ = in.Close(), out.Close(), stderr.Close()
		over := make(chan struct{})
		go func() {
			defer close(over)
			_ = cmd.Wait()
		}()
		most := int64(-1)
		for ended := false; !ended; {
			most = max(most, peakMemory(cmd.Process.Pid))
			select {
			case <-over:
				ended = true
			case <-time.After(time.Millisecond):
			}
		}
		peak <- most
		return 0
	})
	file := filepath.Join(t.TempDir(), "file")
	zeroes := make([]byte, 1<<20)
	for _, mib := range []int{1, 256} {
		tr, err := w.Start(within(t), w.uid, bulkwire.Order{Op: bulkwire.Write, Path: file})
		must(t, err)
		must(t, tr.Answer(nil))
		for range mib {
			_, err := tr.Write(zeroes)
			must(t, err)
		}
		must(t, tr.CloseWrite())
		must(t, tr.Result(nil))
		must(t, tr.Close())
		rd, err := w.Start(within(t), w.uid, bulkwire.Order{Op: bulkwire.Read, Path: file})
		must(t, err)
		must(t, rd.Answer(nil))
		if n, err := io.Copy(io.Discard, rd); err != nil || n != int64(mib)<<20 {
			t.Fatal(n, err)
		}
		must(t, rd.Result(nil))
		must(t, rd.Close())
		for range 2 {
			// What takes no time may be over before it was looked at.
			if most := <-peak; most < 1<<20 && mib > 1 || most > 32<<20 {
				t.Errorf("%d MiB took %d bytes of memory", mib, most)
			}
		}
	}
	st, err := os.Stat(file)
	must(t, err)
	if blocks := st.Sys().(*syscall.Stat_t).Blocks; blocks > 64 {
		t.Errorf("256 MiB of zeroes took %d blocks", blocks)
	}
}
