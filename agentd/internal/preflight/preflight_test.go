package preflight

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

const (
	all     = 1<<unix.CAP_SYS_ADMIN | 1<<unix.CAP_NET_ADMIN
	cgroups = "#subsys_name\thierarchy\tnum_cgroups\tenabled\ncpu\t1\t32\t1\nmemory\t4\t180\t1\n"
)

// plenty is a host that can carry a thousand.
func plenty() map[string]string {
	files := map[string]string{"cgroups": cgroups}
	for _, l := range limits {
		if l.name != nofile {
			files[(Host{}).file(l.name)] = "1000000\n"
		}
	}
	return files
}

// hostOf has the files, below a folder that stands for /proc.
func hostOf(t *testing.T, files map[string]string) Host {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	soft := int64(100_000)
	return Host{Proc: dir, UID: func() int { return 0 }, Capabilities: func() (uint64, error) { return all, nil },
		Descriptors:    func() (int64, int64, error) { return soft, 100_000, nil },
		SetDescriptors: func(n int64) error { soft = n; return nil }}
}

func verdicts(checks []Check) map[string]Verdict {
	got := make(map[string]Verdict)
	for _, c := range checks {
		if c.Verdict != OK {
			got[c.Name] = c.Verdict
		}
	}
	return got
}

func TestVerdicts(t *testing.T) {
	for name, tc := range map[string]struct {
		files map[string]string // in place of plenty's; "-" for none
		host  func(*Host)
		want  map[string]Verdict
		line  int64
	}{
		"plenty":         {line: 1000},
		"no such limits": {files: map[string]string{"sys/net/netfilter/nf_conntrack_max": "-", "sys/fs/mount-max": "-"}, line: 1000},
		"too few pids":   {files: map[string]string{"sys/kernel/pid_max": "32768\n"}, want: map[string]Verdict{"kernel.pid_max": Raise}, line: 512},
		"next to none":   {files: map[string]string{"sys/kernel/pid_max": "8000\n"}, want: map[string]Verdict{"kernel.pid_max": Raise}},
		"few maps":       {files: map[string]string{"sys/vm/max_map_count": "65529\n"}, want: map[string]Verdict{"vm.max_map_count": Raise}},
		"few descriptors": {host: func(h *Host) { h.Descriptors = func() (int64, int64, error) { return 5024, 5024, nil } },
			want: map[string]Verdict{nofile: Lower}, line: 500},
		"no descriptors": {host: func(h *Host) { h.Descriptors = func() (int64, int64, error) { return 1024, 1024, nil } },
			want: map[string]Verdict{nofile: Refuse}},
		"without bound": {files: map[string]string{"sys/fs/file-max": "9223372036854775807999\n"}, line: 1000},
		"no number":     {files: map[string]string{"sys/fs/file-max": "many\n"}, want: map[string]Verdict{"fs.file-max": Lower}, line: 1000},
		"not root":      {host: func(h *Host) { h.UID = func() int { return 1000 } }, want: map[string]Verdict{"rights": Refuse}, line: 1000},
		"no rights":     {host: func(h *Host) { h.Capabilities = func() (uint64, error) { return 1 << unix.CAP_NET_ADMIN, nil } }, want: map[string]Verdict{"rights": Refuse}, line: 1000},
		"no ptrace":     {files: map[string]string{"sys/kernel/yama/ptrace_scope": "3\n"}, want: map[string]Verdict{"kernel.yama.ptrace_scope": Refuse}, line: 1000},
		"some ptrace":   {files: map[string]string{"sys/kernel/yama/ptrace_scope": "1\n"}, line: 1000},
		"no memory groups": {files: map[string]string{"cgroups": strings.ReplaceAll(cgroups, "180\t1", "180\t0")},
			want: map[string]Verdict{"memory control groups": Refuse}, line: 1000},
		"v2 alone": {files: map[string]string{"cgroups": "#subsys_name\n", "1/root/sys/fs/cgroup/cgroup.controllers": "cpu memory pids\n"}, line: 1000},
	} {
		t.Run(name, func(t *testing.T) {
			files := plenty()
			for file, text := range tc.files {
				if files[file] = text; text == "-" {
					delete(files, file)
				}
			}
			h := hostOf(t, files)
			if tc.host != nil {
				tc.host(&h)
			}
			checks := Limits(h, Want{Sandboxes: 1000, Outbound: true})
			if got := verdicts(checks); !maps.Equal(got, tc.want) {
				t.Fatalf("%v, want %v", got, tc.want)
			}
			if line, by := Waterline(checks, 1000); line != tc.line || (by != nil) != (line < 1000) {
				t.Errorf("%d by %+v, want %d", line, by, tc.line)
			}
			for _, c := range checks {
				if c.Why == "" || c.Found == "" || c.Needed == "" || (c.Verdict != OK) != (c.Remedy != "") {
					t.Errorf("%+v does not say enough", c)
				}
			}
			err := Refusal(checks)
			if refused := slices.Contains(slices.Collect(maps.Values(tc.want)), Refuse); refused != errs.Has(err, errs.NotSupported) || refused != (err != nil) {
				t.Errorf("refused with %v", err)
			}
		})
	}
}

func TestRaising(t *testing.T) {
	files := plenty()
	files["sys/kernel/pid_max"], files["sys/fs/mount-max"], files["sys/vm/max_map_count"] = "32768\n", "100\n", "100\n"
	h := hostOf(t, files)
	// One of them cannot be written.
	mounts := filepath.Join(h.Proc, "sys/fs/mount-max")
	before := Limits(h, Want{Sandboxes: 1000})
	if err := errors.Join(os.Remove(mounts), os.Mkdir(mounts, 0o700)); err != nil {
		t.Fatal(err)
	}
	after, raised := RaiseAll(h, before)
	want := []Raised{{"kernel.pid_max", 32768, 56192}, {"vm.max_map_count", 100, 65530}}
	if !slices.Equal(raised, want) {
		t.Errorf("raised %+v, want %+v", raised, want)
	}
	if got := verdicts(after); !maps.Equal(got, map[string]Verdict{"fs.mount-max": Refuse}) {
		t.Errorf("%v", got)
	}
	data, err := os.ReadFile(filepath.Join(h.Proc, "sys/kernel/pid_max"))
	if err != nil || string(data) != "56192" {
		t.Errorf("%q, %v", data, err)
	}
	if got := verdicts(before); len(got) != 3 {
		t.Errorf("what was found before was changed: %v", got)
	}
	// Twice is once.
	if _, raised = RaiseAll(h, Limits(h, Want{Sandboxes: 1000})); len(raised) != 0 {
		t.Errorf("raised again: %+v", raised)
	}
	// Up to the kernel's own bound, and no further.
	checks, _ := RaiseAll(h, Limits(h, Want{Sandboxes: 99_000}))
	if line, by := Waterline(checks, 99_000); by == nil || by.Name == "" || line != (1_000_000-4096)/64 && line <= 0 {
		t.Errorf("%d by %+v", line, by)
	}
	for _, c := range checks {
		if c.Name == "kernel.pid_max" && (c.Found != strconv.Itoa(1<<22) || c.Verdict != Lower || c.Sandboxes != (1<<22-8192)/48) {
			t.Errorf("%+v", c)
		}
	}
}

// TestThisMachine: what is read is read from a real kernel too.
func TestThisMachine(t *testing.T) {
	for _, c := range Limits(Host{}, Want{Sandboxes: 1, Outbound: true}) {
		if c.Verdict == Refuse || c.Found == "" {
			t.Errorf("%+v", c)
		}
	}
}

func TestParts(t *testing.T) {
	dir := t.TempDir()
	program := filepath.Join(dir, "mkfs.erofs")
	write := func(version string) {
		t.Helper()
		if err := os.WriteFile(program, []byte("#!/bin/sh\necho 'mkfs.erofs (erofs-utils) "+version+"'\n"), 0o700); err != nil { //nolint:gosec // a program
			t.Fatal(err)
		}
	}
	write("1.8.6")
	p := Parts{StateDir: filepath.Join(dir, "not", "there", "yet"), LayersDir: dir, Mkfs: program, Containerd: filepath.Join(dir, "none.sock"), Memory: 1 << 30,
		Bundle: func() (string, error) { return "v1", nil }}
	check := func(want map[string]Verdict) {
		t.Helper()
		if got := verdicts(Examine(context.Background(), p, Want{Sandboxes: 10})); !maps.Equal(got, want) {
			t.Errorf("%v, want %v", got, want)
		}
	}
	check(map[string]Verdict{"containerd.socket": Lower})
	write("1.5")
	p.Memory, p.DiskReserve = 1<<20, 1<<60
	p.Bundle = func() (string, error) { return "", errs.New(errs.ArtefactDamaged, "it is damaged") }
	check(map[string]Verdict{"containerd.socket": Lower, "layers.mkfs": Refuse, "memory": Refuse, "bundle.dir": Refuse, "state_dir": Lower, "layers.root": Lower})
	p.Mkfs = filepath.Join(dir, "none")
	check(map[string]Verdict{"containerd.socket": Lower, "layers.mkfs": Refuse, "memory": Refuse, "bundle.dir": Refuse, "state_dir": Lower, "layers.root": Lower})
	p.Direct = true
	Examine(context.Background(), p, Want{})
	left, err := filepath.Glob(filepath.Join(dir, ".preflight-*"))
	if err != nil || len(left) != 0 {
		t.Errorf("left %v, %v", left, err)
	}
}
