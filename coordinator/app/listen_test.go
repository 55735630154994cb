package app

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// held is an address that a process which is ending still has.
func held(t *testing.T, address string) (*net.UnixListener, string) {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: address, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false) // as one that was killed
	t.Cleanup(func() { _ = l.Close() })
	return l, "unix:" + address
}

type bound struct {
	l   net.Listener
	err error
}

func binding(ctx context.Context, address string) chan bound {
	done := make(chan bound, 1)
	go func() {
		l, err := bind(ctx, address)
		done <- bound{l, err}
	}()
	return done
}

// A socket that a killed process still holds is waited for, and taken over once it is free.
func TestBindWaitsForTheDead(t *testing.T) {
	dead, address := held(t, filepath.Join(t.TempDir(), "s"))
	done := binding(t.Context(), address)
	for range 2 { // it was asked for, and asked for again
		conn, err := dead.Accept()
		if err != nil {
			t.Fatal(err)
		}
		_ = conn.Close()
	}
	_ = dead.Close()
	b := <-done
	if b.err != nil {
		t.Fatal(b.err)
	}
	if err := b.l.Close(); err != nil {
		t.Fatal(err)
	}
}

// A TCP address likewise.
func TestBindWaitsForAnAddress(t *testing.T) {
	other, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := bindNow(t.Context(), other.Addr().String()); !errors.Is(err, syscall.EADDRINUSE) {
		t.Fatalf("an address in use: %v", err)
	}
	done := binding(t.Context(), other.Addr().String())
	_ = other.Close()
	b := <-done
	if b.err != nil {
		t.Fatal(b.err)
	}
	_ = b.l.Close()
}

// Somebody who stays is an error, at once when whoever starts gives up, and his socket is left alone.
func TestBindRefusesTheLiving(t *testing.T) {
	living, address := held(t, filepath.Join(t.TempDir(), "s"))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := binding(ctx, address)
	conn, err := living.Accept()
	if err != nil {
		t.Fatal(err)
	}
	_ = conn.Close()
	cancel()
	if b := <-done; b.err == nil || b.l != nil {
		t.Fatalf("bound beside the living: %v", b)
	}
	if c, err := net.Dial("unix", living.Addr().String()); err != nil {
		t.Fatalf("the socket of the living: %v", err)
	} else {
		_ = c.Close()
	}
	// Without anybody giving up, it ends by itself.
	if _, err := bind(t.Context(), address); !errors.Is(err, errTaken) {
		t.Fatalf("bound beside the living: %v", err)
	}
}

// One that is too busy to answer is not a dead one.
func TestBindRefusesTheBusy(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := errors.Join(unix.Bind(fd, &unix.SockaddrUnix{Name: path}), unix.Listen(fd, 0)); err != nil {
		t.Fatal(err)
	}
	for { // until no more fit in its queue
		c, err := net.Dial("unix", path)
		if err != nil {
			break
		}
		defer c.Close()
	}
	if _, err := bindNow(t.Context(), "unix:"+path); !errors.Is(err, errTaken) {
		t.Fatalf("bound beside the busy: %v", err)
	}
	if _, err := os.Lstat(path); err != nil {
		t.Fatal(err)
	}
}
