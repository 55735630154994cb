// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

// Package bare calls runsc with nothing around it, with the bundle, flags and spec that agentd uses: the floor that benchmarks and
// load runs measure the product against.
package bare

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	"github.com/google/uuid"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Runsc is the runsc of a bundle.
type Runsc struct {
	Dir    string // everything of it is below: its state, boxes and images
	Path   string
	Flags  []string
	Cgroup string // the group that those of its sandboxes are below
	Env    []string
}

// record is the part of the runtime driver's record that tells how it calls runsc.
type record struct {
	BundleDir string   `json:"bundle_dir"`
	Flags     []string `json:"flags"`
}

// New takes bundle and flags from a sandbox that the agentd with that state folder runs. Processes carry the mark of the stack,
// which ends what a killed benchmark leaves.
func New(dir, state, uid, cgroup, stackID string) (*Runsc, error) {
	var rec record
	if err := readJSON(filepath.Join(state, "runsc", "launch", uid+".json"), &rec); err != nil {
		return nil, err
	}
	for _, d := range []string{filepath.Join(dir, "state"), filepath.Join(dir, "boxes"), filepath.Join(dir, "images")} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, err
		}
	}
	return &Runsc{
		Dir: dir, Path: filepath.Join(rec.BundleDir, "runsc"), Flags: rec.Flags, Cgroup: cgroup,
		Env: []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "DORMOUSE_STACK=" + stackID},
	}, nil
}

// Spec reads the OCI spec that an agentd made for one of its sandboxes.
func Spec(state, uid string) (*specs.Spec, error) {
	var spec specs.Spec
	err := readJSON(filepath.Join(state, "sandboxes", uid, "spec.json"), &spec)
	return &spec, err
}

func readJSON(path string, v any) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	return json.Unmarshal(data, v)
}

// Box is a bare sandbox, prepared before the clock starts.
type Box struct {
	*Runsc
	ID      string
	folder  string
	netns   int
	fifos   []int // for the sandbox alone
	in, out int   // this side's
}

// Prepare makes all that the product has ready or that is not runsc's work.
func (b *Runsc) Prepare(spec *specs.Spec) (_ *Box, err error) {
	x := &Box{Runsc: b, ID: uuid.NewString(), netns: -1, in: -1, out: -1}
	x.folder = filepath.Join(b.Dir, "boxes", x.ID)
	defer func() {
		if err != nil {
			err = errors.Join(err, x.close())
		}
	}()
	if err := os.Mkdir(x.folder, 0o700); err != nil {
		return nil, err
	}
	if x.netns, err = newNamespace(); err != nil {
		return nil, err
	}
	mine := *spec
	linux := *spec.Linux
	linux.CgroupsPath = filepath.Join(b.Cgroup, x.ID)
	linux.Namespaces = append([]specs.LinuxNamespace(nil), spec.Linux.Namespaces...)
	for i := range linux.Namespaces {
		if linux.Namespaces[i].Type == specs.NetworkNamespace {
			linux.Namespaces[i].Path = fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), x.netns)
		}
	}
	mine.Linux = &linux
	data, err := json.Marshal(&mine)
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(x.folder, "config.json"), data, 0o600); err != nil {
		return nil, err
	}
	for _, name := range []string{"in", "out", "err"} {
		path := filepath.Join(x.folder, name)
		if err := unix.Mkfifo(path, 0o600); err != nil {
			return nil, err
		}
		fd, err := openFIFO(path)
		if err != nil {
			return nil, err
		}
		x.fifos = append(x.fifos, fd)
	}
	if x.in, err = openFIFO(filepath.Join(x.folder, "in")); err != nil {
		return nil, err
	}
	if x.out, err = openFIFO(filepath.Join(x.folder, "out")); err != nil {
		return nil, err
	}
	return x, nil
}

func openFIFO(path string) (int, error) {
	return unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
}

func (x *Box) close() error {
	for _, fd := range append(x.fifos, x.netns, x.in, x.out) {
		if fd >= 0 {
			_ = unix.Close(fd) // only held
		}
	}
	return os.RemoveAll(x.folder)
}

// Start runs the sandbox and gives the time until runsc was done and until guest init had answered.
func (x *Box) Start(ctx context.Context) (started, answered time.Duration, err error) {
	return x.launch(ctx, 1, "run", "-detach")
}

// Restore is Start from an image.
func (x *Box) Restore(ctx context.Context, image string) (started, answered time.Duration, err error) {
	return x.launch(ctx, 1<<30, "restore", "-detach", "-image-path="+image)
}

func (x *Box) launch(ctx context.Context, generation uint64, args ...string) (started, answered time.Duration, err error) {
	began := time.Now()
	// A restore replays nothing from a FIFO that its sandbox never had, so the hello may wait in both cases.
	if _, err := unix.Write(x.in, hello(x.ID, generation)); err != nil {
		return 0, 0, fmt.Errorf("hello: %w", err)
	}
	if err := x.Run(ctx, true, args...); err != nil {
		return 0, 0, err
	}
	started = time.Since(began)
	fds := []unix.PollFd{{Fd: int32(x.out), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(fds, 30_000)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || n == 0 {
			return 0, 0, fmt.Errorf("guest init of the bare sandbox did not answer: %w", err)
		}
		return started, time.Since(began), nil
	}
}

// Ask writes a line to the sandbox's standard input and gives the next line of its output.
func (x *Box) Ask(ctx context.Context, line string) (string, error) {
	if _, err := unix.Write(x.in, []byte(line+"\n")); err != nil {
		return "", fmt.Errorf("ask the bare sandbox: %w", err)
	}
	var said []byte
	fds := []unix.PollFd{{Fd: int32(x.out), Events: unix.POLLIN}}
	for {
		if err := ctx.Err(); err != nil {
			return "", fmt.Errorf("the bare sandbox said only %.200q: %w", said, context.Cause(ctx))
		}
		n, err := unix.Poll(fds, 200)
		if errors.Is(err, unix.EINTR) || err == nil && n == 0 {
			continue
		}
		if err != nil {
			return "", err
		}
		var buf [1024]byte
		if n, err = unix.Read(x.out, buf[:]); err != nil && !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) {
			return "", err
		}
		said = append(said, buf[:max(n, 0)]...)
		if answer, _, whole := bytes.Cut(said, []byte("\n")); whole {
			return string(answer), nil
		}
	}
}

// Remove ends the sandbox and takes away what Prepare made.
func (x *Box) Remove(ctx context.Context) error {
	return errors.Join(x.call(ctx, nil, "delete", "-force", x.ID), x.close())
}

// Run calls "runsc args... id" for the sandbox of this box, with its FIFOs if it is to be made.
func (x *Box) Run(ctx context.Context, make bool, args ...string) error {
	if make {
		return x.call(ctx, x.fifos, append(args, "-bundle="+x.folder, x.ID)...)
	}
	return x.call(ctx, nil, append(args, x.ID)...)
}

func (b *Runsc) call(ctx context.Context, stdio []int, args ...string) error {
	return b.Call(ctx, filepath.Join(b.Dir, "state"), stdio, args...)
}

// Call runs runsc on a state folder. It takes the command's own output by a file: a sandbox would hold a pipe open.
func (b *Runsc) Call(ctx context.Context, root string, stdio []int, args ...string) error {
	log, err := os.CreateTemp("", "bare-runsc-")
	if err != nil {
		return err
	}
	defer func() { _, _ = log.Close(), os.Remove(log.Name()) }()
	all := append([]string{"--root=" + root, "--log-fd=3", "--gofer-network-namespace=new"}, b.Flags...)
	cmd := exec.CommandContext(ctx, b.Path, append(all, args...)...)
	cmd.Env, cmd.Dir = b.Env, "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.ExtraFiles = []*os.File{log}
	if stdio != nil {
		// By descriptor, in a process of its own: an os.File would make the FIFO blocking for the sentry too.
		return startRaw(cmd, stdio, log)
	}
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Run(); err != nil {
		return said(args[0], err, log)
	}
	return nil
}

// startRaw runs the command with raw descriptors as its stdio and waits for it.
func startRaw(cmd *exec.Cmd, stdio []int, log *os.File) error {
	files := make([]uintptr, 0, 4)
	for _, fd := range stdio {
		files = append(files, uintptr(fd))
	}
	raw, err := unix.Dup(int(log.Fd()))
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(raw) }()
	proc, err := forkExec(cmd, append(files, uintptr(raw)))
	if err != nil {
		return err
	}
	state, err := proc.Wait()
	if err == nil && !state.Success() {
		err = errors.New(state.String())
	}
	if err != nil {
		return said(cmd.Args[len(cmd.Args)-1], err, log)
	}
	return nil
}

func said(what string, err error, log *os.File) error {
	data, _ := os.ReadFile(log.Name())
	if len(data) > 2000 {
		data = data[len(data)-2000:]
	}
	return fmt.Errorf("bare runsc %s: %w: %s", what, err, bytes.TrimSpace(data))
}

// newNamespace makes a network namespace with loopback up, as agentd keeps them ready.
func newNamespace() (int, error) {
	type result struct {
		fd  int
		err error
	}
	done := make(chan result, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends here
		fd, err := namespaceOnThread()
		done <- result{fd, err}
	}()
	r := <-done
	return r.fd, r.err
}

func namespaceOnThread() (int, error) {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return -1, fmt.Errorf("unshare: %w", err)
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return -1, err
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return -1, err
	}
	return unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
}

// hello is the first frame of proto/dormouse/guest/v1: header, then min_version 1, max_version 1, the uid.
func hello(uid string, generation uint64) []byte {
	payload := append([]byte{1 << 3, 1, 2 << 3, 1, 3<<3 | 2, byte(len(uid))}, uid...)
	table := crc32.MakeTable(crc32.Castagnoli)
	h := make([]byte, 40, 40+len(payload))
	copy(h, []byte{0xD3, 'M', 0x9C, 's', 1, 0})
	le := binary.LittleEndian
	le.PutUint16(h[6:], 1)
	le.PutUint32(h[8:], uint32(len(payload)))
	le.PutUint32(h[12:], 1)
	le.PutUint64(h[16:], generation)
	le.PutUint64(h[24:], 1)
	le.PutUint32(h[32:], crc32.Checksum(h[:32], table))
	le.PutUint32(h[36:], crc32.Checksum(payload, table))
	return append(h, payload...)
}
