package app

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	"github.com/dormouse-run/dormouse/agentd/internal/access"
	"github.com/dormouse-run/dormouse/agentd/internal/api"
	"github.com/dormouse-run/dormouse/agentd/internal/debug"
	"github.com/dormouse-run/dormouse/agentd/internal/reconcile"
	"github.com/dormouse-run/dormouse/pkg/obs"
	"github.com/dormouse-run/dormouse/pkg/pki"
	"github.com/dormouse-run/dormouse/pkg/wire"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// drainTime bounds how long calls that are being answered are waited for when agentd stops.
const drainTime = 5 * time.Second

// maxMessage bounds what a peer may send in one message.
const maxMessage = 8 << 20

// Serve brings records and node together, then serves until ctx ends or a listener fails, then drains. It
// may be called once.
func (a *App) Serve(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	a.conditions()
	var group sync.WaitGroup
	defer group.Wait()
	failed := func(what string, err error) {
		if err != nil && ctx.Err() == nil {
			cancel(fmt.Errorf("%s: %w", what, err))
		}
	}
	adminCtx, endAdmin := context.WithCancel(context.WithoutCancel(ctx))
	defer endAdmin()
	group.Go(func() {
		failed("admin socket", obs.ServeAdmin(adminCtx, a.cfg.AdminSocket(), obs.AdminHandler(a.metrics, a.health, nil)))
	})
	if err := a.reconcile(ctx); err != nil {
		return err
	}
	servers, err := a.servers()
	if err != nil {
		return err
	}
	if err := a.open(ctx, servers); err != nil {
		return err
	}
	for _, s := range servers {
		group.Go(func() { failed(s.name, s.Serve(s.listener)) })
	}
	backgroundCtx, endBackground := context.WithCancel(ctx)
	var background sync.WaitGroup
	background.Go(func() { a.session.Run(backgroundCtx) })
	background.Go(func() { a.housekeep(backgroundCtx) })
	background.Go(func() { a.uses.Run(backgroundCtx) })
	background.Go(func() { a.room.Run(backgroundCtx) })
	a.log.InfoContext(ctx, "serving", "listen", a.cfg.Listen, "direct", a.cfg.Direct.Listen, "debug", a.cfg.DebugSocket(), "bundle", a.bundles.Current().Digest)

	<-ctx.Done()
	endBackground()
	background.Wait()
	drain(servers)
	if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) {
		return cause
	}
	return nil
}

// drain lets calls end for a bounded time and then cuts them: what they asked for goes on in the runner,
// or is undone when that closes.
func drain(servers []*server) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		var all sync.WaitGroup
		for _, s := range servers {
			all.Go(s.GracefulStop)
		}
		all.Wait()
	}()
	timer := time.NewTimer(drainTime)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
		for _, s := range servers {
			s.Stop()
		}
		<-done
	}
}

// server is one of agentd's, and where it listens.
type server struct {
	*grpc.Server
	name     string
	open     func(context.Context) (net.Listener, error)
	listener net.Listener
}

// open opens all listeners, or none.
func (a *App) open(ctx context.Context, servers []*server) error {
	for i, s := range servers {
		l, err := s.open(ctx)
		if err != nil {
			err = fmt.Errorf("%s: listen: %w", s.name, err)
			for _, before := range servers[:i] {
				err = errors.Join(err, before.listener.Close())
			}
			return err
		}
		s.listener = l
	}
	return nil
}

// What one client with tickets may have open at a time, and how large the headers of a call may be.
const (
	directStreams = 1024
	directHeaders = 16 << 10
)

func (a *App) servers() ([]*server, error) {
	around, err := wire.NewServer(a.log, a.metrics)
	if err != nil {
		return nil, err
	}
	base := append(around.Options(), grpc.MaxRecvMsgSize(maxMessage),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}))
	with := func(more ...grpc.ServerOption) *grpc.Server {
		return grpc.NewServer(append(slices.Clip(base), more...)...)
	}
	guarded := func(d *access.Door, more ...grpc.ServerOption) *grpc.Server {
		return with(append(more, grpc.ChainUnaryInterceptor(d.Unary(), a.uses.Unary), grpc.ChainStreamInterceptor(d.Stream(), a.uses.Stream))...)
	}
	processes := &api.Processes{Sandboxes: a.node}
	dataPlane := func(r grpc.ServiceRegistrar) {
		dormousev1.RegisterProcessServiceServer(r, processes)
		dormousev1.RegisterFileServiceServer(r, &api.Files{Sandboxes: a.node})
		dormousev1.RegisterPortServiceServer(r, &api.Forwards{Ports: a.node})
	}

	node := guarded(access.Coordinators(a.node), grpc.Creds(wire.TLS(a.tls.Server(pki.RoleCoordinator))))
	nodev1.RegisterAgentServiceServer(node, &api.Server{Commands: a.commands, Runner: a.node, Volumes: a.volumes, Images: a.node, Inventory: a.node, Networks: a.node})
	dataPlane(node)
	debugging := with()
	nodev1.RegisterDebugServiceServer(debugging, &debug.Server{
		Summary: a.overview, Objects: a.objects(), Processes: processes,
		Examine: func(ctx context.Context, req reconcile.Request) ([]reconcile.Result, map[string]int, string, error) {
			return reconcile.Examine(ctx, a.sources(), a.run, req)
		},
	})
	all := []*server{
		{Server: node, name: "node API", open: func(ctx context.Context) (net.Listener, error) { return listen(ctx, a.cfg.Listen) }},
		{Server: debugging, name: "debug socket", open: func(context.Context) (net.Listener, error) { return obs.ListenRootOnly(a.cfg.DebugSocket()) }},
	}
	if a.cfg.Direct.Listen == "" {
		return all, nil
	}
	direct := guarded(access.Clients(a.node, &a.tickets, a.cfg.Direct.Tenant), grpc.Creds(wire.TLS(a.tls.ServerAlone())),
		grpc.MaxConcurrentStreams(directStreams), grpc.MaxHeaderListSize(directHeaders), grpc.ConnectionTimeout(10*time.Second))
	dataPlane(direct)
	return append(all, &server{Server: direct, name: "direct listener", open: func(ctx context.Context) (net.Listener, error) {
		return listen(ctx, a.cfg.Direct.Listen)
	}}), nil
}

// conditions say what ready and alive mean: alive is that the records answer; ready is that the coordinator
// has us too.
func (a *App) conditions() {
	records := func(context.Context) error {
		_, err := a.state.Epochs()
		return err
	}
	a.health.Alive("records", records)
	a.health.Ready("records", records)
	a.health.Ready("session", func(context.Context) error {
		if !a.session.Connected() {
			return errors.New("no session with the coordinator")
		}
		return nil
	})
}

// listen opens a TCP or unix listener. A unix socket that a dead agentd left is replaced; it is for the
// owner alone, and TLS is spoken on it all the same.
func listen(ctx context.Context, address string) (net.Listener, error) {
	network, addr := listenOn(address)
	if network == "unix" {
		return obs.ListenRootOnly(addr)
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, network, addr)
	if err != nil && os.IsPermission(err) {
		return nil, fmt.Errorf("%w: use a port above 1023", err)
	}
	return l, err
}
