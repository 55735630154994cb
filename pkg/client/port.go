package client

import (
	"context"

	"github.com/dormouse-run/dormouse/pkg/portconn"
)

// PortConn is a connection to a port inside a sandbox. It is a net.Conn with a half-close.
type PortConn = portconn.Conn

// Dial connects to a TCP port inside, also to one that listens on loopback only. ctx bounds connecting; the
// connection lasts until Close. PORT_CLOSED when nothing listens there. Close it.
func (s *Sandbox) Dial(ctx context.Context, port int) (*PortConn, error) {
	return portconn.Open(ctx, s.c.ports, s.UID, port)
}
