package api

import (
	"context"
	"io"
)

// PortConn is a connection to a port inside a sandbox, with a half-close. Close ends both directions.
type PortConn interface {
	io.ReadWriteCloser
	CloseWrite() error
}

// Ports connects to what listens inside.
type Ports interface {
	// DialPort connects to a TCP port of the sandbox's loopback addresses, with or without a network. ctx
	// bounds connecting; the connection lasts until Close or the sandbox's end, and through pauses. PORT_CLOSED
	// when nothing listens, TOO_MANY when the sandbox has as many transfers as it may.
	DialPort(ctx context.Context, sandboxUID string, port int) (PortConn, error)
}
