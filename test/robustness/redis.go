package robustness

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/test/tools"
)

// diskSize is that of the file system that the server's data are on.
const diskSize = 64 << 20

// redisServer is a durable server whose data are on a disk of its own.
type redisServer struct {
	process
	socket string
	disk   string // a tmpfs
	client *goredis.Client
}

func newRedis(dir string) (*redisServer, error) {
	program, err := tools.Find("redis-server")
	if err != nil {
		return nil, err
	}
	s := &redisServer{socket: filepath.Join(dir, "r.sock"), disk: filepath.Join(dir, "disk")}
	if err := os.Mkdir(s.disk, 0o700); err != nil {
		return nil, err
	}
	if err := unix.Mount("tmpfs", s.disk, "tmpfs", 0, fmt.Sprintf("size=%d,mode=0700", diskSize)); err != nil {
		return nil, fmt.Errorf("mount the server's disk: %w", err)
	}
	s.process = process{path: program, log: filepath.Join(dir, "redis.log"), args: []string{
		"--port", "0", "--unixsocket", s.socket, "--unixsocketperm", "700", "--dir", s.disk, "--daemonize", "no",
		"--save", "", "--appendonly", "yes", "--appendfsync", "always", "--auto-aof-rewrite-percentage", "0",
	}}
	// It asks the server itself, past the links, and is patient with nothing.
	s.client = goredis.NewClient(&goredis.Options{Network: "unix", Addr: s.socket, MaxRetries: -1, DialTimeout: time.Second, ReadTimeout: time.Second})
	return s, nil
}

// up starts the server and waits until it has loaded its data. One that ends by itself is started once more, as a service manager does: a log that was
// cut off, whose rewrite was cut off too, is put right at the first start, which ends.
func (s *redisServer) up(ctx context.Context) error {
	err := s.upOnce(ctx)
	if !errors.Is(err, errEnded) {
		return err
	}
	return errors.Join(s.kill(), s.upOnce(ctx))
}

var errEnded = errors.New("the server has ended by itself")

func (s *redisServer) upOnce(ctx context.Context) error {
	if err := s.start(); err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	ended := s.ended()
	go func() { // ends with the wait
		select {
		case <-ended:
			cancel(errEnded)
		case <-ctx.Done():
		}
	}()
	if err := until(ctx, "the server answers", func() error { return s.client.Ping(ctx).Err() }); err != nil {
		return errors.Join(context.Cause(ctx), err)
	}
	return nil
}

func (s *redisServer) close() error {
	return errors.Join(s.client.Close(), s.kill(), unix.Unmount(s.disk, unix.MNT_DETACH))
}

func (s *redisServer) data() string { return filepath.Join(s.disk, "appendonlydir") }

// copy gives a folder with what the server has on its disk now. It is what a running server has written, so its end may
// be torn; but it is of one manifest, though the log may be written anew meanwhile.
func (s *redisServer) copy(to string) error {
	for {
		before, err := s.manifest()
		if err == nil {
			err = errors.Join(os.RemoveAll(to), os.CopyFS(to, os.DirFS(s.data())))
		}
		after, again := s.manifest()
		if err == nil && again == nil && before == after {
			return nil
		}
		if err = errors.Join(err, again); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
}

// manifest says which files the log is in.
func (s *redisServer) manifest() (string, error) {
	data, err := os.ReadFile(filepath.Join(s.data(), "appendonly.aof.manifest"))
	return string(data), err
}

// rewind gives a killed server the data of an earlier copy.
func (s *redisServer) rewind(from string) error {
	if err := os.RemoveAll(s.data()); err != nil {
		return err
	}
	return os.CopyFS(s.data(), os.DirFS(from))
}

// dump has the server write all that it has into one file, and keeps that.
func (s *redisServer) dump(ctx context.Context, to string) error {
	if err := s.client.Save(ctx).Err(); err != nil {
		return err
	}
	data, err := os.ReadFile(filepath.Join(s.disk, "dump.rdb"))
	if err != nil {
		return err
	}
	return os.WriteFile(to, data, 0o600)
}

// load gives a killed server an earlier dump, and nothing since.
func (s *redisServer) load(dump string) error {
	data, err := os.ReadFile(dump)
	if err != nil {
		return err
	}
	const base, incr = "appendonly.aof.1.base.rdb", "appendonly.aof.1.incr.aof"
	manifest := "file " + base + " seq 1 type b\nfile " + incr + " seq 1 type i\n"
	return errors.Join(os.RemoveAll(s.data()), os.Mkdir(s.data(), 0o700), os.WriteFile(filepath.Join(s.data(), base), data, 0o600),
		os.WriteFile(filepath.Join(s.data(), incr), nil, 0o600), os.WriteFile(filepath.Join(s.data(), "appendonly.aof.manifest"), []byte(manifest), 0o600))
}

// truncate takes so many bytes off the end of a killed server's log.
func (s *redisServer) truncate(bytes int64) error {
	return s.logs(func(path string, size int64) error { return os.Truncate(path, max(size-bytes, 0)) })
}

// logs calls do with each log of the server, and its size.
func (s *redisServer) logs(do func(path string, size int64) error) error {
	err := filepath.WalkDir(s.data(), func(path string, d fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".incr.aof") {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		return do(path, info.Size())
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil // a server that has no data yet
	}
	return err
}

// fill leaves no room on the server's disk; the function makes room again.
func (s *redisServer) fill() (free func() error, err error) {
	file := filepath.Join(s.disk, "full")
	f, err := os.Create(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	free = func() error { return os.Remove(file) }
	block := make([]byte, 1<<20)
	for err == nil {
		_, err = f.Write(block)
	}
	if !errors.Is(err, unix.ENOSPC) {
		return nil, errors.Join(err, free())
	}
	return free, nil
}

// until polls a condition; the context is the bound.
func until(ctx context.Context, what string, ok func() error) error {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		err := ok()
		if err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("never: %s: %w", what, errors.Join(err, context.Cause(ctx)))
		}
	}
}
