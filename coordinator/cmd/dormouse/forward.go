package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"

	"github.com/urfave/cli/v2"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/command"
)

func forwardCommand() *cli.Command {
	return &cli.Command{
		Name: "forward", Usage: "make ports inside a sandbox reachable on this machine", ArgsUsage: "[ADDR:]LOCAL:REMOTE... SANDBOX",
		Description: "Each connection to LOCAL is one to REMOTE inside, on its loopback addresses, whatever the sandbox's network is. LOCAL is on\n" +
			"127.0.0.1 unless an address is named; 0 takes a free port. PORT alone is PORT:PORT. The addresses are printed once they are open;\n" +
			"it ends with Ctrl-C.",
		Flags: []cli.Flag{},
		Action: action(2, -1, func(c call) error {
			args := c.Args().Slice()
			rules, err := rulesOf(c.Context, args[:len(args)-1])
			if err != nil {
				return err
			}
			s, err := c.client.FindSandbox(c.ctx, args[len(args)-1])
			if err != nil {
				return err
			}
			return forward(c, s, rules)
		}),
	}
}

// rule is one port that is forwarded.
type rule struct {
	local  string
	remote int
}

func rulesOf(c *cli.Context, args []string) ([]rule, error) {
	var rules []rule
	for _, arg := range args {
		r, err := ruleOf(arg)
		if err != nil {
			return nil, command.Usage(c, "%q: %s; it is [ADDR:]LOCAL:REMOTE", arg, err)
		}
		rules = append(rules, r)
	}
	return rules, nil
}

func ruleOf(arg string) (rule, error) {
	local, remote := arg, arg
	if i := strings.LastIndexByte(arg, ':'); i >= 0 {
		local, remote = arg[:i], arg[i+1:]
	}
	port, err := strconv.Atoi(remote)
	if err != nil || port < 1 || port > 65535 {
		return rule{}, errors.New("a port inside is 1 to 65535")
	}
	host := "127.0.0.1"
	if h, p, err := net.SplitHostPort(local); err == nil {
		host, local = h, p
	}
	if n, err := strconv.Atoi(local); err != nil || n < 0 || n > 65535 {
		return rule{}, errors.New("a local port is 0 to 65535")
	}
	return rule{net.JoinHostPort(host, local), port}, nil
}

// forward listens until the context ends or a listener fails, and waits for its connections to be closed.
func forward(c call, s *client.Sandbox, rules []rule) error {
	ctx, cancel := context.WithCancelCause(c.ctx)
	defer cancel(nil)
	var listeners []net.Listener
	defer func() {
		for _, l := range listeners {
			_ = l.Close() // it may be closed already
		}
	}()
	for _, r := range rules {
		l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", r.local)
		if err != nil {
			return err
		}
		listeners = append(listeners, l)
	}
	var all sync.WaitGroup
	for i, r := range rules {
		l := listeners[i]
		if _, err := fmt.Fprintf(c.App.Writer, "%s -> %d\n", l.Addr(), r.remote); err != nil {
			return err
		}
		stop := context.AfterFunc(ctx, func() { _ = l.Close() }) // Accept says that it was closed
		defer stop()
		all.Go(func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					cancel(err)
					return
				}
				all.Go(func() {
					if err := join(ctx, s, r.remote, conn); err != nil && ctx.Err() == nil {
						_, _ = fmt.Fprintf(c.App.ErrWriter, "port %d: %s\n", r.remote, err) // nobody is there to be told
					}
				})
			}
		})
	}
	<-ctx.Done()
	all.Wait()
	if c.ctx.Err() != nil {
		return c.ctx.Err()
	}
	return context.Cause(ctx)
}

// join makes one connection of two, until both halves have ended or one breaks.
func join(ctx context.Context, s *client.Sandbox, port int, local net.Conn) error {
	defer func() { _ = local.Close() }() // both halves are over
	inside, err := s.Dial(ctx, port)
	if err != nil {
		return err
	}
	defer func() { _ = inside.Close() }() // it always succeeds
	stop := context.AfterFunc(ctx, func() { _, _ = local.Close(), inside.Close() })
	defer stop()
	up := make(chan error, 1)
	go func() {
		_, err := io.Copy(inside, local)
		up <- errors.Join(err, inside.CloseWrite())
	}()
	_, err = io.Copy(local, inside)
	if tcp, ok := local.(*net.TCPConn); ok && err == nil {
		err = tcp.CloseWrite()
	}
	if err != nil {
		_ = local.Close() // the other copy ends with it
	}
	return errors.Join(err, <-up)
}
