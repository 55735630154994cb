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
	erofsMagic   = 0xE0F5E1E2
	erofsMagicAt = 1024
	stderrLimit  = 4 << 10
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
	whole, err := combine(all, limits)
	if err != nil {
		return Result{}, err
	}
	out := filepath.Join(dir, "image.erofs")
	if err := b.mkfs(ctx, dir, out, whole); err != nil {
		return Result{}, err
	}
	res, err := seal(ctx, out)
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

// combine merges the layers and counts the names of each inode.
func combine(all []*tree, limits Limits) (*tree, error) {
	whole := newTree(limits.Depth)
	for _, t := range all {
		if err := whole.overlay(t); err != nil {
			return nil, err
		}
	}
	var bytes int64
	err := whole.visit(func(name string, ino *inode) error {
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
	return whole, err
}

// mkfs streams the tree into mkfs.erofs.
func (b *Builder) mkfs(ctx context.Context, dir, out string, t *tree) error {
	timeout := b.Timeout
	if timeout <= 0 {
		timeout = 10 * time.Minute
	}
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, errors.New("mkfs.erofs took too long"))
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
		if err != nil {
			cancel() // before the input ends, so that mkfs.erofs never takes a part for the whole
		}
		pw.Close()
		sent <- err
	}()
	waitErr := cmd.Wait()
	emitErr := <-sent // the only reader is gone: a write that waits ends in EPIPE
	switch {
	case emitErr != nil && !errors.Is(emitErr, syscall.EPIPE):
		return emitErr
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case waitErr != nil || emitErr != nil:
		return &hostError{fmt.Errorf("mkfs.erofs: %w: %s", errors.Join(waitErr, emitErr), stderr)}
	}
	return nil
}

// seal syncs a file and takes its digest, at the same time.
func seal(ctx context.Context, path string) (Result, error) {
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
		var magic [4]byte
		if _, err := f.ReadAt(magic[:], erofsMagicAt); err != nil || binary.LittleEndian.Uint32(magic[:]) != erofsMagic {
			return errors.New("mkfs.erofs left no file system behind")
		}
		n, err := io.CopyBuffer(onlyWriter{h}, &ctxReader{ctx: ctx, r: io.NewSectionReader(f, 0, 1<<62)}, make([]byte, 1<<20))
		size = n
		return err
	})
	if err := group.Wait(); err != nil {
		return Result{}, &hostError{err}
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
