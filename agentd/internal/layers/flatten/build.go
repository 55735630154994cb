// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package flatten

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// Format names how layers become bytes. It changes whenever the same layers would give another digest.
const Format = "erofs-flat-v1"

const (
	erofsMagic  = 0xE0F5E1E2
	erofsSuper  = 1024
	erofsBlock  = 4096
	erofsSlot   = 32
	stderrLimit = 4 << 10
	leastRoom   = 1 << 20
)

// Builder makes EROFS files. It is safe for concurrent use.
type Builder struct {
	// Mkfs is the path of mkfs.erofs, 1.8 or later.
	Mkfs string
	// Limits bound an image; the zero value means DefaultLimits.
	Limits Limits
	// Parallel is how many layers are read at a time; 0 means one a core, 4 at most.
	Parallel int
	// Timeout bounds one run of mkfs.erofs; 0 means 10 minutes.
	Timeout time.Duration
}

// Result is a finished file, synced to disk.
type Result struct {
	Path    string
	Digest  digest.Digest
	Size    int64
	Entries int64
}

// Build flattens the layers into a file in dir, which must exist, be on the disk of the file's final place
// and be the caller's alone. On failure what it made is for the caller to remove with the folder. Faults
// of the image are IMAGE_MALFORMED, a full disk is DISK_FULL.
func (b *Builder) Build(ctx context.Context, dir string, layers []Layer) (Result, error) {
	res, err := b.build(ctx, dir, layers)
	return res, classify(err)
}

func (b *Builder) build(ctx context.Context, dir string, layers []Layer) (Result, error) {
	limits := b.Limits
	if limits == (Limits{}) {
		limits = DefaultLimits()
	}
	if len(layers) > limits.Layers {
		return Result{}, malformedf("the image has %d layers, %d are allowed", len(layers), limits.Layers)
	}
	bud := &budget{limits: limits}
	all, files, err := b.read(ctx, dir, layers, bud)
	defer func() {
		for _, f := range files {
			_ = f.Close() // nameless and only read from here on
		}
	}()
	if err != nil {
		return Result{}, err
	}
	whole, bytes, err := combine(all, limits)
	if err != nil {
		return Result{}, err
	}
	if err := room(dir, bytes); err != nil {
		return Result{}, err
	}
	out := filepath.Join(dir, "image.erofs")
	if err := b.mkfs(ctx, dir, out, whole); err != nil {
		return Result{}, err
	}
	res, err := seal(ctx, out, whole.root.ino)
	res.Entries = bud.entries.Load()
	return res, err
}

// read reads all layers, several at a time. The files are returned also on failure.
func (b *Builder) read(ctx context.Context, dir string, layers []Layer, bud *budget) ([]*tree, []*os.File, error) {
	parallel := b.Parallel
	if parallel <= 0 {
		parallel = min(4, runtime.NumCPU())
	}
	trees := make([]*tree, len(layers))
	opened := make([][]*os.File, len(layers))
	group, gctx := errgroup.WithContext(ctx)
	group.SetLimit(parallel)
	for i, l := range layers {
		group.Go(func() (err error) {
			trees[i], opened[i], err = readLayer(gctx, dir, l, bud)
			return err
		})
	}
	err := group.Wait()
	var files []*os.File
	for _, o := range opened {
		files = append(files, o...)
	}
	return trees, files, err
}

// combine merges the layers, counts the names of each inode, and adds up the contents.
func combine(all []*tree, limits Limits) (whole *tree, bytes int64, err error) {
	whole = newTree(limits.Depth)
	for _, t := range all {
		if err := whole.overlay(t); err != nil {
			return nil, 0, err
		}
	}
	err = whole.visit(func(name string, ino *inode) error {
		if len(name) > maxPath {
			return malformedf("%q is a path of %d bytes, %d are possible", shorten(name), len(name), maxPath)
		}
		if ino.names++; ino.names > maxLinks && ino.kind != directory {
			return malformedf("%q has more than %d hard links", shorten(name), maxLinks)
		}
		if ino.names == 1 {
			bytes += ino.size
		}
		if bytes > limits.Bytes {
			return malformedf("the image's files are larger than %d bytes", limits.Bytes)
		}
		return nil
	})
	return whole, bytes, err
}

// room refuses early what cannot fit: mkfs.erofs has each content on the disk twice for a while.
func room(dir string, bytes int64) error {
	left, err := free(dir)
	if err != nil {
		return &hostError{err}
	}
	if need := 2*bytes + leastRoom; left < need {
		return errs.New(errs.DiskFull, "preparing the image needs %d bytes on the disk of the layers folder and %d are free; free some room", need, left).
			With("asked", strconv.FormatInt(need, 10)).With("left", strconv.FormatInt(left, 10))
	}
	return nil
}

func free(dir string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, err
	}
	return int64(st.Bavail) * st.Bsize, nil
}

// mkfs streams the tree into mkfs.erofs.
func (b *Builder) mkfs(ctx context.Context, dir, out string, t *tree) error {
	timeout := b.Timeout
	if timeout <= 0 {
		timeout = 10 * time.Minute
	}
	outer := ctx
	ctx, cancel := context.WithTimeout(outer, timeout)
	defer cancel()
	// The parent-death signal is bound to the thread that starts the child. It is needed: mkfs.erofs does
	// not end by itself when its input is cut short.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	pr, pw, err := os.Pipe()
	if err != nil {
		return &hostError{err}
	}
	defer pr.Close()
	_, _ = unix.FcntlInt(pw.Fd(), unix.F_SETPIPE_SZ, 1<<20) // faster where the system allows it
	cmd := exec.CommandContext(ctx, b.Mkfs, "-b4096", "-U", "clear", "-Enoinline_data", "-T0", "--mkfs-time", "--quiet", "--tar=f", out)
	cmd.Stdin = pr
	cmd.Dir = dir
	cmd.Env = []string{"TMPDIR=" + dir, "LC_ALL=C", "PATH=/usr/bin:/bin"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	cmd.WaitDelay = 5 * time.Second
	stderr := &tail{limit: stderrLimit}
	cmd.Stdout, cmd.Stderr = stderr, stderr
	if err := cmd.Start(); err != nil {
		pw.Close()
		return &hostError{err}
	}
	pr.Close()

	sent := make(chan error, 1)
	go func() {
		err := emit(ctx, pw, t)
		if err != nil && !errors.Is(err, syscall.EPIPE) {
			cancel() // before the input ends, so that mkfs.erofs never takes a part for the whole
		}
		pw.Close()
		sent <- err
	}()
	waitErr := cmd.Wait()
	emitErr := <-sent // the only reader is gone: a write that waits ends in EPIPE
	switch {
	case outer.Err() != nil:
		return context.Cause(outer)
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return &hostError{fmt.Errorf("mkfs.erofs took longer than %v: %s", timeout, stderr)}
	case emitErr != nil && !errors.Is(emitErr, syscall.EPIPE):
		return &hostError{emitErr}
	case waitErr != nil || emitErr != nil:
		return &hostError{blame(dir, fmt.Errorf("mkfs.erofs: %w: %s", errors.Join(waitErr, emitErr), stderr))}
	}
	return nil
}

// blame adds a full disk to an error of mkfs.erofs, which calls it by other names.
func blame(dir string, err error) error {
	if left, ferr := free(dir); ferr == nil && left < leastRoom {
		return errors.Join(unix.ENOSPC, err)
	}
	return err
}

// checkRoot tells whether mkfs.erofs has read the archive to its end: see emit.
func checkRoot(f io.ReaderAt, want *inode) error {
	var sb [64]byte
	if _, err := f.ReadAt(sb[:], erofsSuper); err != nil || binary.LittleEndian.Uint32(sb[:]) != erofsMagic {
		return errors.New("mkfs.erofs left no file system behind")
	}
	nid := int64(binary.LittleEndian.Uint16(sb[14:]))
	meta := int64(binary.LittleEndian.Uint32(sb[40:]))
	var ino [64]byte
	if _, err := f.ReadAt(ino[:], meta*erofsBlock+nid*erofsSlot); err != nil {
		return fmt.Errorf("the root of the new file system: %w", err)
	}
	var sec, nsec int64 // those of a short inode, which has none of its own
	if ino[0]&1 == 1 {
		sec, nsec = int64(binary.LittleEndian.Uint64(ino[32:])), int64(binary.LittleEndian.Uint32(ino[40:]))
	}
	if sec != want.sec || nsec != int64(want.nsec) {
		return errors.New("mkfs.erofs did not read the archive to its end")
	}
	return nil
}

// seal syncs a file and takes its digest, at the same time.
func seal(ctx context.Context, path string, root *inode) (Result, error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return Result{}, &hostError{err}
	}
	defer f.Close()
	if err := f.Chmod(0o600); err != nil {
		return Result{}, &hostError{err}
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return f.Sync() })
	h := sha256.New()
	var size int64
	group.Go(func() error {
		if err := checkRoot(f, root); err != nil {
			return err
		}
		n, err := io.CopyBuffer(onlyWriter{h}, &ctxReader{ctx: ctx, r: io.NewSectionReader(f, 0, 1<<62)}, make([]byte, 1<<20))
		size = n
		return err
	})
	if err := group.Wait(); err != nil {
		return Result{}, &hostError{blame(filepath.Dir(path), err)}
	}
	return Result{Path: path, Digest: digest.NewDigest(digest.SHA256, h), Size: size}, nil
}

type ctxReader struct {
	ctx context.Context // of the one call that seals
	r   io.Reader
}

func (c *ctxReader) Read(p []byte) (int, error) {
	if c.ctx.Err() != nil {
		return 0, context.Cause(c.ctx)
	}
	return c.r.Read(p)
}

// tail keeps the end of what a program says.
type tail struct {
	limit int
	buf   []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.buf = append(t.buf, p...)
	if over := len(t.buf) - t.limit; over > 0 {
		t.buf = append(t.buf[:0], t.buf[over:]...)
	}
	return len(p), nil
}

func (t *tail) String() string { return string(bytes.TrimSpace(t.buf)) }

// classify gives an error its place in the envelope.
func classify(err error) error {
	var bad *malformed
	var known *errs.Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &known):
		return err
	case isFull(err):
		return errs.Wrap(err, errs.DiskFull, "the disk is full: the image could not be prepared; free some room under the layers folder")
	case errors.As(err, &bad):
		return errs.Wrap(err, errs.ImageMalformed, "the image cannot be used: %s", bad.what)
	}
	return err
}

// isFull recognises a full disk, also when mkfs.erofs is the one to say so.
func isFull(err error) bool {
	var host *hostError
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) ||
		errors.As(err, &host) && strings.Contains(host.Error(), unix.ENOSPC.Error())
}
