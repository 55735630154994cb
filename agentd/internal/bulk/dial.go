package bulk

import (
	"context"
	"errors"
	"io"
	"strconv"

	"github.com/dormouse-run/dormouse/agentd/internal/bulkwire"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// Conn is a connection to a server inside, with a half-close. Close ends both directions.
type Conn interface {
	io.ReadWriteCloser
	CloseWrite() error
}

// Dial connects to a TCP port of the sandbox's loopback addresses, without its network. It gives up with
// ctx; the connection lasts until Close, or until the sandbox ends. It goes on through a pause. PORT_CLOSED
// when nothing listens there.
func (m *Manager) Dial(ctx context.Context, uid string, port int) (Conn, error) {
	if port < 1 || port > 65535 {
		return nil, errs.New(errs.InvalidField, "port: %d is no port; use 1 to 65535", port).With("field", "port").With("got", strconv.Itoa(port))
	}
	return m.dial(ctx, uid, bulkwire.Order{Op: bulkwire.Dial, Port: port})
}

// DialSocket is Dial for the path of a unix socket inside.
func (m *Manager) DialSocket(ctx context.Context, uid, path string) (Conn, error) {
	return m.dial(ctx, uid, bulkwire.Order{Op: bulkwire.Dial, Path: path})
}

func (m *Manager) dial(ctx context.Context, uid string, order bulkwire.Order) (Conn, error) {
	t, err := m.begin(ctx, context.WithoutCancel(ctx), uid, order)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { t.cut(errs.From(context.Cause(ctx))) })
	err = t.Answer(nil)
	if !stop() && err == nil {
		err = errs.From(context.Cause(ctx))
	}
	if errors.Is(err, io.EOF) {
		err = t.broken(bulkwire.ErrGarbage)
	}
	if err != nil {
		_ = t.Close()
		return nil, err
	}
	return t, nil
}
