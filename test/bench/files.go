package bench

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/dormouse-run/dormouse/pkg/client"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// bulkMiB is the size of the file that goes in and out.
const bulkMiB = 256

const bulkPath = "/root/bulk"

// benchFiles measures one stream of a file's bytes into a sandbox and out of it, beside what `cat` inside moves
// through the pipes of `runsc exec` without any digest.
func benchFiles(ctx context.Context, b *bench) ([]Row, error) {
	s, err := b.createBusybox(ctx, func(spec *dormousev1.SandboxSpec) {
		spec.Resources.MemoryLimitBytes, spec.Resources.DiskLimitBytes = 1024*mib, 700*mib
	})
	if err != nil {
		return nil, err
	}
	floor, err := b.newBare(s.UID)
	if err != nil {
		return nil, err
	}
	direct, err := b.onNode()
	if err != nil {
		return nil, err
	}
	defer func() { _ = direct.Close() }()
	far, near := s.Files(), direct.Sandbox(s.UID).Files()
	var in, out, hash [3]Sample // the node, through the coordinator, bare
	for i := range b.times(5) + 1 {
		if i == 1 { // what was before is for warming up
			in, out = [3]Sample{}, [3]Sample{}
		}
		for way, f := range []*client.Files{near, far} {
			if err := errors.Join(throughput(&in[way], func() error { return writeBulk(ctx, f) }),
				throughput(&out[way], func() error { return readBulk(ctx, f) })); err != nil {
				return nil, err
			}
		}
		state := filepath.Join(b.state(), "runsc", "state")
		if err := errors.Join(throughput(&in[2], func() error { return floor.catIn(ctx, state, s.UID) }),
			throughput(&out[2], func() error { return floor.catOut(ctx, state, s.UID) }),
			throughput(&hash[0], func() error { _, err := io.Copy(sha256.New(), &pattern{left: bulkMiB * mib}); return err })); err != nil {
			return nil, err
		}
	}
	row := func(what string, product, bare Sample, atLeast float64) Row {
		r := Row{What: what, Product: megabytes(product), Value: product.Median(), Unit: "MB/s", AtLeast: atLeast}
		if bare != nil {
			r.Bare = megabytes(bare)
		}
		return r
	}
	return []Row{
		row(fmt.Sprintf("write of %d MiB on the node, synced and digested; bare `runsc exec cat >file`", bulkMiB), in[0], in[2], 200),
		row("the same through the coordinator", in[1], in[2], 200),
		row(fmt.Sprintf("read of %d MiB on the node, digested; bare `runsc exec cat file`", bulkMiB), out[0], out[2], 200),
		row("the same through the coordinator", out[1], out[2], 200),
		row("SHA-256 of as much, one core", hash[0], nil, 0),
	}, s.Delete(ctx, "")
}

// throughput adds the megabytes a second of moving the file once.
func throughput(into *Sample, move func() error) error {
	began := time.Now()
	err := move()
	*into = append(*into, bulkMiB*mib/1e6/time.Since(began).Seconds())
	return err
}

// block is what the file is made of: random, so that no part of it is a hole.
var block = func() []byte {
	data := make([]byte, mib)
	_, _ = rand.Read(data) // never fails
	return data
}()

// pattern is a reader of the block, again and again.
type pattern struct{ left int }

func (p *pattern) Read(to []byte) (int, error) {
	if p.left == 0 {
		return 0, io.EOF
	}
	at := (mib - p.left%mib) % mib
	n := copy(to[:min(len(to), p.left)], block[at:])
	p.left -= n
	return n, nil
}

func writeBulk(ctx context.Context, f *client.Files) error {
	_, err := f.Write(ctx, bulkPath, &pattern{left: bulkMiB * mib}, client.WriteOptions{Size: bulkMiB * mib})
	return err
}

func readBulk(ctx context.Context, f *client.Files) error {
	r, err := f.Open(ctx, bulkPath)
	if err != nil {
		return err
	}
	n, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, r, make([]byte, mib))
	if err == nil && n != bulkMiB*mib {
		err = fmt.Errorf("%d bytes were read", n)
	}
	return errors.Join(err, r.Close())
}

func (b *bare) exec(ctx context.Context, root, uid string, argv ...string) *exec.Cmd {
	args := append([]string{"-root", root}, b.Flags...)
	cmd := exec.CommandContext(ctx, b.Path, append(append(args, "exec", uid), argv...)...)
	cmd.Env = b.Env
	return cmd
}

func (b *bare) catIn(ctx context.Context, root, uid string) error {
	cmd := b.exec(ctx, root, uid, "/bin/sh", "-c", "cat >"+bulkPath)
	cmd.Stdin = &pattern{left: bulkMiB * mib}
	return cmd.Run()
}

func (b *bare) catOut(ctx context.Context, root, uid string) error {
	cmd := b.exec(ctx, root, uid, "/bin/cat", bulkPath)
	cmd.Stdout = struct{ io.Writer }{io.Discard} // a pipe, not /dev/null
	return cmd.Run()
}
