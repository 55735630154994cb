package preflight

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/config"
)

// Parts are the programs and folders of a node.
type Parts struct {
	StateDir, LayersDir string
	// DiskReserve is left free. Direct: artefacts are written past the page cache.
	DiskReserve int64
	Direct      bool
	Mkfs        string
	Containerd  string // its socket
	// Bundle opens the runtime bundle, and says its version.
	Bundle func() (version string, err error)
	// Memory is what the node offers, after its reserve.
	Memory int64
}

const (
	// inodes of a sandbox's folder, its artefact, and what is kept ready.
	inodesEach, inodesBase = 32, 4096
	partTime               = 10 * time.Second
	// leastMemory is what one small sandbox needs.
	leastMemory = 64 << 20
)

// Examine looks at the parts. It changes nothing but for a file that it makes and removes where artefacts go.
func Examine(ctx context.Context, p Parts, w Want) []Check {
	ctx, cancel := context.WithTimeout(ctx, partTime)
	defer cancel()
	all := []Check{p.memory(w), p.disk("state_dir", p.StateDir, w), p.disk("layers.root", p.LayersDir, Want{})}
	if p.Direct {
		all = append(all, direct(p.StateDir))
	}
	return append(all, p.bundle(), mkfs(ctx, p.Mkfs), containerd(ctx, p.Containerd))
}

func broken(c Check, err error, remedy string) Check {
	c.Found, c.Verdict, c.Remedy = err.Error(), Refuse, remedy
	return c
}

func (p Parts) memory(w Want) Check {
	c := Check{Name: "memory", Found: config.FormatBytes(p.Memory) + " to offer", Needed: config.FormatBytes(leastMemory) + " at least", Verdict: OK, Sandboxes: -1,
		Why: fmt.Sprintf("each of %d sandboxes may request %s of it", w.Sandboxes, config.FormatBytes(p.Memory/max(w.Sandboxes, 1)))}
	if p.Memory < leastMemory {
		c.Verdict, c.Remedy = Refuse, "raise limits.memory, or lower reserve.memory"
	}
	return c
}

// existing is the folder, or the first above it that is there.
func existing(dir string) string {
	for {
		if _, err := os.Stat(dir); err == nil || dir == filepath.Dir(dir) {
			return dir
		}
		dir = filepath.Dir(dir)
	}
}

func (p Parts) disk(name, dir string, w Want) Check {
	need := inodesBase + inodesEach*w.Sandboxes
	c := Check{Name: name, Needed: fmt.Sprintf("%s and %d inodes free", config.FormatBytes(p.DiskReserve), need), Verdict: OK, Sandboxes: -1, Why: dir + " has the node's files"}
	var st unix.Statfs_t
	if err := unix.Statfs(existing(dir), &st); err != nil {
		return broken(c, fmt.Errorf("look at %s: %w", dir, err), "make the folder")
	}
	free := int64(st.Bavail) * st.Bsize
	c.Found = fmt.Sprintf("%s and %d inodes free", config.FormatBytes(free), st.Ffree)
	if free < p.DiskReserve {
		c.Verdict, c.Remedy = Lower, "make room: below reserve.disk the node takes nothing new"
	}
	// File systems without a table of inodes say that they have none.
	if st.Files > 0 && int64(st.Ffree) < need {
		c.Verdict, c.Sandboxes, c.Remedy = Lower, max((int64(st.Ffree)-inodesBase)/inodesEach, 0), "use a file system with more inodes"
	}
	return c
}

// direct tries what a capture does.
func direct(dir string) Check {
	c := Check{Name: "snapshot.direct", Found: "works", Needed: "O_DIRECT", Verdict: OK, Sandboxes: -1, Why: "artefacts are written past the page cache"}
	f, err := os.CreateTemp(existing(dir), ".preflight-")
	if err != nil {
		return broken(c, err, "make the folder writable for agentd")
	}
	name := f.Name()
	defer func() { _ = os.Remove(name) }() // an empty file
	_ = f.Close()
	fd, err := unix.Open(name, unix.O_RDWR|unix.O_DIRECT|unix.O_CLOEXEC, 0)
	if err != nil {
		c.Found, c.Verdict, c.Remedy = err.Error(), Refuse, "set snapshot.direct to false, or use a file system that has it, e.g. ext4 or xfs"
		return c
	}
	_ = unix.Close(fd)
	return c
}

func (p Parts) bundle() Check {
	c := Check{Name: "bundle.dir", Needed: "a runtime bundle", Verdict: OK, Sandboxes: -1, Why: "sandboxes are made by it"}
	version, err := p.Bundle()
	if err != nil {
		return broken(c, err, "make one with scripts/bundle.sh, and name it as bundle.dir")
	}
	c.Found = "runsc " + version
	return c
}

var mkfsVersion = regexp.MustCompile(`(\d+)\.(\d+)`)

func mkfs(ctx context.Context, path string) Check {
	c := Check{Name: "layers.mkfs", Needed: "1.8 or newer", Verdict: OK, Sandboxes: -1, Why: "images become EROFS files"}
	out, err := exec.CommandContext(ctx, path, "--version").CombinedOutput()
	m := mkfsVersion.FindSubmatch(out)
	if err != nil || m == nil {
		return broken(c, fmt.Errorf("ask %s for its version: %w", path, err), "install erofs-utils 1.8, and name mkfs.erofs as layers.mkfs")
	}
	c.Found = string(m[0])
	major, _ := strconv.Atoi(string(m[1]))
	minor, _ := strconv.Atoi(string(m[2]))
	if major < 1 || major == 1 && minor < 8 {
		c.Verdict, c.Remedy = Refuse, "install erofs-utils 1.8: with an older one programs of an image fail with \"bad address\""
	}
	return c
}

func containerd(ctx context.Context, socket string) Check {
	c := Check{Name: "containerd.socket", Found: "answers", Needed: "answers", Verdict: OK, Sandboxes: -1, Why: "images are pulled by it"}
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", socket)
	if err != nil {
		c.Found, c.Verdict, c.Remedy = err.Error(), Lower, "start containerd: images that are here already can be used without it"
		return c
	}
	_ = conn.Close()
	return c
}
