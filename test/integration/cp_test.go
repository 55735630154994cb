package integration

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// shell runs a line in a folder with dormouse on its path, as the tenant; it gives what it said and its exit code.
func (w *world) shell(dir, line string) (string, int) {
	w.Helper()
	cmd := exec.CommandContext(w.ctx, "sh", "-c", line)
	cmd.Dir = dir
	cmd.Env = []string{"DORMOUSE_ADDR=unix://" + w.GRPCSocket(), "DORMOUSE_API_KEY=" + w.key, "HOME=" + dir, "PATH=" + w.Bin + ":" + os.Getenv("PATH")}
	out, err := cmd.CombinedOutput()
	if err != nil && cmd.ProcessState == nil {
		w.Fatal(err)
	}
	return string(out), cmd.ProcessState.ExitCode()
}

// What docs/files.md shows works as it stands there, and says nothing where nothing is to be said.
func TestDormouseCp(t *testing.T) {
	w := enter(t)
	for _, name := range []string{"box", "other"} {
		_, err := w.api.CreateSandbox(w.ctx, &dormousev1.CreateSandboxRequest{Name: name, Spec: w.spec()})
		w.ok(err)
	}
	box, err := w.api.FindSandbox(w.ctx, "box")
	w.ok(err)
	other, err := w.api.FindSandbox(w.ctx, "other")
	w.ok(err)
	dir := t.TempDir()
	w.ok(os.MkdirAll(filepath.Join(dir, "src/deep"), 0o755))
	w.ok(os.WriteFile(filepath.Join(dir, "notes.txt"), []byte("a note\n"), 0o640))
	w.ok(os.WriteFile(filepath.Join(dir, "src/deep/file"), []byte("deep\n"), 0o755))
	w.ok(os.Symlink("deep/file", filepath.Join(dir, "src/link")))
	w.ok(errors.Join(os.Chmod(filepath.Join(dir, "notes.txt"), 0o640), os.Chmod(filepath.Join(dir, "src/deep/file"), 0o755))) // whatever the umask is

	page, err := os.ReadFile("../../docs/files.md")
	w.ok(err)
	_, block, _ := strings.Cut(string(page), "```\n")
	block, _, _ = strings.Cut(block, "```")
	for line := range strings.Lines(block) {
		line, _, _ = strings.Cut(line, "#")
		out, code := w.shell(dir, line)
		if strings.Contains(line, "tar -t") {
			if code != 0 || !strings.Contains(out, "work/deep/file") {
				t.Errorf("%s: %q, code %d", line, out, code)
			}
		} else if out != "" || code != 0 {
			t.Errorf("%s: %q, code %d", line, out, code)
		}
	}
	if got, err := os.ReadFile(filepath.Join(dir, "copy.txt")); err != nil || string(got) != "a note\n" {
		t.Errorf("the copy is %q, %v", got, err)
	}
	look := "stat -c '%a' /root/notes.txt; cd /work && find . | sort; cat deep/file link src/deep/file"
	if got := w.sh(box, look); got != "640\n.\n./deep\n./deep/file\n./link\n./src\n./src/deep\n./src/deep/file\n./src/link\ndeep\ndeep\ndeep" {
		t.Errorf("in the sandbox: %q", got)
	}
	if got := w.sh(other, "cd /work && cat link && stat -c %a deep/file"); got != "deep\n755" {
		t.Errorf("in the other: %q", got)
	}

	for line, want := range map[string]struct {
		code int
		says string
	}{
		"dormouse cp a b":                                                         {2, "SANDBOX:/PATH"},
		"dormouse cp box:relative b":                                              {2, "absolute"},
		"dormouse cp absent:/x b":                                                 {3, "absent"},
		"dormouse cp box:/absent b":                                               {3, "FILE_NOT_FOUND"},
		"dormouse cp notes.txt box:/absent/":                                      {3, "--parents"},
		"dormouse cp notes.txt box:/absent/dir/f":                                 {3, "FILE_NOT_FOUND"},
		"dormouse cp src box:/root/notes.txt":                                     {4, "NOT_A_DIRECTORY"},
		"dormouse cp -p notes.txt box:/made/dir/":                                 {0, ""},
		"dormouse cp -p src box:/made/tree/x":                                     {0, ""},
		"dormouse cp --owner 5:6 notes.txt box:/o":                                {0, ""},
		"dormouse cp -u 1000 notes.txt box:/root/x":                               {1, "FILE_DENIED"},
		"dormouse cp box:/work back && test back/src/link -ef back/src/deep/file": {0, ""},
	} {
		out, code := w.shell(dir, line)
		if code != want.code || !strings.Contains(out, want.says) || want.code == 0 && out != "" {
			t.Errorf("%s: %q, code %d; want %d and %q", line, out, code, want.code, want.says)
		}
	}
	if got := w.sh(box, "cat /made/dir/notes.txt /made/tree/x/deep/file; stat -c %u:%g /o"); got != "a note\ndeep\n5:6" {
		t.Errorf("in the sandbox: %q", got)
	}
}

// An archive of a sandbox is not trusted: no entry gets out of the folder that it is unpacked into, here or inside.
func TestHostileArchives(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec())
	outside := t.TempDir()
	for name, entries := range map[string][]entry{
		"up":             {{name: "../evil", data: "x"}},
		"through a link": {{name: "l", link: outside}, {name: "l/evil", data: "x"}},
		"through one up": {{name: "l", link: ".."}, {name: "l/evil", data: "x"}},
		"a hard link":    {{name: "h", hard: "../../../../../../etc/passwd"}},
	} {
		data := archiveOf(t, entries)
		dir := filepath.Join(t.TempDir(), "into")
		w.ok(os.Mkdir(dir, 0o755))
		if err := client.UnpackTree(dir, bytes.NewReader(data)); errs.ReasonOf(err) != errs.UnsafePath {
			t.Errorf("%s, here: %v", name, err)
		}
		_, err := s.Files().WriteArchive(w.ctx, "/into", bytes.NewReader(data), client.ArchiveOptions{Parents: true})
		if reason := errs.ReasonOf(err); reason != errs.UnsafePath && (name != "a hard link" || reason == "") {
			t.Errorf("%s, inside: %v", name, err)
		}
		for _, evil := range []string{filepath.Join(outside, "evil"), filepath.Join(filepath.Dir(dir), "evil")} {
			if _, err := os.Lstat(evil); err == nil {
				t.Errorf("%s: %s was made", name, evil)
			}
		}
	}
	if got := w.sh(s, "find / -xdev -name evil"); got != "" {
		t.Errorf("made inside: %s", got)
	}
}

type entry struct{ name, data, link, hard string }

func archiveOf(t *testing.T, entries []entry) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, e := range entries {
		head := &tar.Header{Name: e.name, Mode: 0o644, Size: int64(len(e.data)), Typeflag: tar.TypeReg}
		switch {
		case e.link != "":
			head.Typeflag, head.Linkname = tar.TypeSymlink, e.link
		case e.hard != "":
			head.Typeflag, head.Linkname = tar.TypeLink, e.hard
		}
		if err := w.WriteHeader(head); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(e.data)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

// A file's bytes go over REST as they are; what is wrong is the envelope of any other call.
func TestFileContentOverREST(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec())
	path := "/v1/sandboxes/" + s.UID + "/files/content?path=/root/a/file"
	content := strings.Repeat("bytes\x00\xff", 100_000)
	if a := w.rest(w.key, "PUT", path+"&parents=true&mode=0600", content); a.status != 200 || !strings.Contains(string(a.body), `"mode"`) {
		t.Fatalf("%d %s", a.status, a.body)
	}
	if got := w.sh(s, "stat -c '%a %s' /root/a/file"); got != fmt.Sprint("600 ", len(content)) {
		t.Errorf("inside: %s", got)
	}
	if a := w.rest(w.key, "GET", path, ""); a.status != 200 || string(a.body) != content || a.header.Get("Content-Type") != "application/octet-stream" {
		t.Errorf("%d, %d bytes, %v", a.status, len(a.body), a.header)
	}
	if a := w.rest(w.key, "GET", path+"&offset=7", ""); a.status != 200 || string(a.body) != content[7:] {
		t.Errorf("%d, %d bytes", a.status, len(a.body))
	}
	w.refusedREST(w.rest(w.key, "GET", path+"x", ""), errs.FileNotFound)
	w.refusedREST(w.rest(w.key, "GET", path+"&what=5", ""), errs.UnknownField)
	w.refusedREST(w.rest(w.key, "PUT", path+"&mode=rw", "x"), errs.InvalidField)
	w.refusedREST(w.rest(w.key, "PUT", path+"/x", "x"), errs.NotADirectory)
	w.refusedREST(w.rest("", "GET", path, ""), errs.CredentialsMissing)
	if a := w.rest(w.key, "GET", "/v1/sandboxes/"+s.UID+"/files?path=/root/a", ""); a.status != 200 || !strings.Contains(string(a.body), `"/root/a/file"`) {
		t.Errorf("%d %s", a.status, a.body)
	}
}
