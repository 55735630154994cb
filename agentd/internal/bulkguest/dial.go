package bulkguest

import (
	"errors"
	"io"
	"net"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// dialTime bounds connecting, which on the loopback is answered at once or never.
const dialTime = 10 * time.Second

// duplex is a connection with a half-close.
type duplex interface {
	net.Conn
	CloseWrite() error
}

// connect dials the port on both loopback addresses, or a socket's path.
func (h *helper) connect() (duplex, error) {
	if h.order.Port == 0 {
		conn, err := net.DialTimeout("unix", h.order.Path, dialTime)
		if err != nil {
			return nil, dialFailed(err, h.order.Path)
		}
		return conn.(*net.UnixConn), nil
	}
	var first error
	for _, host := range []string{"127.0.0.1", "::1"} {
		conn, err := net.DialTimeout("tcp", net.JoinHostPort(host, strconv.Itoa(h.order.Port)), dialTime)
		if err == nil {
			return conn.(*net.TCPConn), nil
		}
		if first == nil {
			first = err
		}
	}
	return nil, dialFailed(first, strconv.Itoa(h.order.Port))
}

func dialFailed(err error, target string) error {
	var timeout net.Error
	switch {
	case errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.EADDRNOTAVAIL), errors.Is(err, unix.ENETUNREACH):
		return refuse("PORT_CLOSED", "nothing listens on %s in the sandbox; start the server, or wait until it listens", target).with("port", target)
	case errors.As(err, &timeout) && timeout.Timeout(), errors.Is(err, unix.EAGAIN):
		return refuse("PORT_CLOSED", "what listens on %s in the sandbox takes no connections; it may be overloaded", target).with("port", target)
	}
	return err
}

// dial connects and passes bytes on, each direction up to its end.
func (h *helper) dial() error {
	conn, err := h.connect()
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := h.answer(nil); err != nil {
		return err
	}
	inward := make(chan error, 1)
	go func() { inward <- h.toServer(conn) }()
	for {
		n, err := conn.Read(h.out.Room())
		if n > 0 {
			if err := h.out.WriteRoom(n); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return refuse("PORT_CLOSED", "the server in the sandbox broke the connection off: %v", err)
		}
	}
	if err := h.done(nil); err != nil {
		return err
	}
	return <-inward
}

// toServer passes on what the host sends. A server that takes no more has said so by its own end, or
// will; what comes for it then is dropped, so that the host is not held up.
func (h *helper) toServer(conn duplex) error {
	in := &input{in: h.in}
	for taken := true; ; {
		data, err := in.Next()
		if errors.Is(err, io.EOF) {
			_ = conn.CloseWrite()
			return nil
		}
		if err != nil {
			return err
		}
		if taken {
			_, err = conn.Write(data)
			taken = err == nil
		}
	}
}
