package client

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// coordinators are where the API is served: one address or several, of which any that answers will do.
type coordinators struct {
	target string
	local  bool // unix sockets of this machine
	opts   []grpc.DialOption
}

func badAddress(format string, args ...any) error {
	return errs.New(errs.InvalidField, "the coordinator's address: "+format, args...).With("field", "addr")
}

// coordinators reads the addresses. With several a connection goes to the first that answers, and when it is
// lost to the next that does.
func (c Config) coordinators() (coordinators, error) {
	parts := strings.FieldsFunc(c.Addr, func(r rune) bool { return r == ',' || r == ' ' })
	if len(parts) == 0 {
		return coordinators{}, badAddress("none is given; set DORMOUSE_ADDR, --addr or a context, e.g. https://127.0.0.1:7443")
	}
	var out coordinators
	var state resolver.State
	for i, part := range parts {
		host, path, err := parseAddress(part)
		if err != nil {
			return out, err
		}
		if local := path != ""; i > 0 && local != out.local {
			return out, badAddress("%q: sockets of this machine and https addresses cannot be mixed", c.Addr)
		}
		if out.local = path != ""; out.local {
			out.target = "unix:" + path
			state.Addresses = append(state.Addresses, resolver.Address{Addr: path, ServerName: "localhost"})
			continue
		}
		out.target = "dns:///" + host
		name, _, err := net.SplitHostPort(host)
		if err != nil {
			return out, badAddress("%q: %s", part, err)
		}
		state.Addresses = append(state.Addresses, resolver.Address{Addr: host, ServerName: name})
	}
	if len(parts) == 1 {
		return out, nil
	}
	several := manual.NewBuilderWithScheme("dormouse")
	several.InitialState(state)
	out.target = several.Scheme() + ":///coordinators"
	out.opts = []grpc.DialOption{grpc.WithResolvers(several)}
	if out.local {
		out.opts = append(out.opts, grpc.WithContextDialer(func(ctx context.Context, path string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", path)
		}))
	}
	return out, nil
}

// parseAddress gives host:port, or the path of a socket.
func parseAddress(addr string) (host, path string, err error) {
	u, err := url.Parse(addr)
	if err != nil {
		return "", "", badAddress("%q is not a URL", addr)
	}
	switch {
	case u.Scheme == "unix" && u.Host == "" && u.Path != "":
		return "", u.Path, nil
	case u.Scheme == "https" && u.Host != "" && (u.Path == "" || u.Path == "/"):
		if u.Port() == "" {
			return fmt.Sprintf("%s:443", u.Host), "", nil
		}
		return u.Host, "", nil
	}
	return "", "", badAddress("%q: https://host:port or unix:///path, several separated by commas", addr)
}
