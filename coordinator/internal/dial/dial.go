// Package dial opens connections on which a peer that vanished is noticed: by TCP, which probes what is silent
// and gives up on what is not acknowledged. gRPC's own pings read the wall clock, and take every peer for dead when
// that is set back.
package dial

import (
	"context"
	"errors"
	"net"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
)

const (
	silent   = 10 * time.Second // then it is probed
	vanished = 15 * time.Second // without an acknowledgement it is given up
)

// Target gives gRPC's form of an address, host:port or unix:/path, for Option.
func Target(address string) string { return "passthrough:///" + address }

// Option lets gRPC dial in this way.
func Option() grpc.DialOption {
	return grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
		d := net.Dialer{KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: silent, Interval: vanished / 3, Count: 3}}
		if path, ok := strings.CutPrefix(address, "unix:"); ok {
			return d.DialContext(ctx, "unix", path)
		}
		d.Control = func(_, _ string, conn syscall.RawConn) error {
			var failed error
			err := conn.Control(func(fd uintptr) {
				failed = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(vanished.Milliseconds()))
			})
			return errors.Join(err, failed)
		}
		return d.DialContext(ctx, "tcp", address)
	})
}
