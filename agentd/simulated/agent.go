// Package simulated is an agentd whose machine is not there: for tests of what stands on nodes. Sessions, epochs, commands and
// their kept results, records, the journal of the catalog, volumes' folders, artefacts and the runner with all its steps
// are agentd's own code, on files of their own. Simulated are the runtime (package fake), guest init, images,
// networks and control groups: nothing is started, so that a hundred sandboxes a second come and go on a core.
//
// A Machine is what outlives an agentd: the sandboxes that run and what guest init knows. Agents come and go on it, one at a
// time; each opens a session of its own, finishes what the one before left, and goes on with its sandboxes.
//
// No program imports this package.
package simulated

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	goruntime "runtime"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	"github.com/dormouse-run/dormouse/agentd/internal/api"
	"github.com/dormouse-run/dormouse/agentd/internal/checkpoint"
	"github.com/dormouse-run/dormouse/agentd/internal/journal"
	"github.com/dormouse-run/dormouse/agentd/internal/nodestate"
	"github.com/dormouse-run/dormouse/agentd/internal/runner"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime/fake"
	"github.com/dormouse-run/dormouse/agentd/internal/session"
	"github.com/dormouse-run/dormouse/agentd/internal/volumes"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/pki"
	"github.com/dormouse-run/dormouse/pkg/ticket"
	"github.com/dormouse-run/dormouse/pkg/wire"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
)

// Options of a node.
type Options struct {
	// Name of the node; its certificate carries the same.
	Name string
	// Dir has the node's files; its path is short, since a unix socket is in it.
	Dir string
	// Coordinators are addresses that gRPC dials, as unix:/path.
	Coordinators []string
	TLS          pki.Files
	Log          *slog.Logger
	// Silence is how long a coordinator may be silent before another is tried.
	Silence time.Duration
	// Watch, if it is set, stands before the node API's calls.
	Watch grpc.UnaryServerInterceptor
	// Image, if it is not nil, is asked for each image that is to be there, and may refuse it.
	Image func(ctx context.Context, reference string) error
}

// Machine is what outlives agents.
type Machine struct {
	opts Options
	host *fake.Host

	mu     sync.Mutex
	guests map[string]*guest
	holds  map[string]string // holder to image
}

// NewMachine makes an empty machine.
func NewMachine(opts Options) *Machine {
	return &Machine{opts: opts, host: fake.NewHost(), guests: make(map[string]*guest), holds: make(map[string]string)}
}

// Sandboxes gives the uids of what runs.
func (m *Machine) Sandboxes() []string { return m.host.IDs() }

// Agent is one life of an agentd.
type Agent struct {
	machine *Machine
	log     *slog.Logger
	node    *node
	server  *grpc.Server
	session *session.Client
	cancel  context.CancelFunc
	owned   sync.WaitGroup
	closers []func() error
}

// Start opens the node's files, brings records and machine together, serves the node API, and keeps a session until Stop.
func (m *Machine) Start(ctx context.Context) (a *Agent, err error) {
	a = &Agent{machine: m, log: m.opts.Log.With("node", m.opts.Name)}
	defer func() {
		if err != nil {
			err = errors.Join(err, a.Stop())
			a = nil
		}
	}()
	if err := a.open(ctx); err != nil {
		return a, err
	}
	if err := a.node.recover(ctx); err != nil {
		return a, err
	}
	return a, a.serve()
}

// Stop ends the session and the agent. Its sandboxes go on.
func (a *Agent) Stop() error {
	if a.cancel != nil {
		a.cancel()
	}
	a.owned.Wait()
	var all []error
	for i := len(a.closers) - 1; i >= 0; i-- {
		all = append(all, a.closers[i]())
	}
	a.closers = nil
	return errors.Join(all...)
}

// Connected tells whether there is a session now.
func (a *Agent) Connected() bool { return a.session.Connected() }

func (a *Agent) onClose(fn func() error) { a.closers = append(a.closers, fn) }

func quiet(fn func()) func() error { return func() error { fn(); return nil } }

func (a *Agent) open(ctx context.Context) error {
	o := a.machine.opts
	state, err := nodestate.Open(nodestate.Options{Path: filepath.Join(o.Dir, "state.db"), Node: o.Name, LockTimeout: time.Minute})
	if err != nil {
		return err
	}
	a.onClose(state.Close)
	kept, err := journal.Open(o.Dir, o.Name, a.log)
	if err != nil {
		return err
	}
	a.onClose(kept.Close)
	vols, err := volumes.New(volumes.Config{Root: filepath.Join(o.Dir, "volumes"), Log: a.log})
	if err != nil {
		return err
	}
	a.onClose(quiet(vols.Close))
	if _, err := vols.Recover(ctx); err != nil {
		return err
	}
	snaps, err := checkpoint.OpenStore(checkpoint.StoreOptions{Root: filepath.Join(o.Dir, "snapshots")})
	if err != nil {
		return err
	}
	if err := snaps.Sweep(); err != nil {
		return err
	}
	driver := a.machine.host.Open()
	a.onClose(driver.Close)
	held := &nodeVolumes{store: vols, state: state}
	run, err := runner.New(runner.Options{
		Store: state, Driver: driver, Images: images{a.machine}, Volumes: held, Networks: networks{}, Bundles: bundles{}, Groups: groups{}, Specs: specBuilder{},
		Guests: guests{a.machine}, Snapshots: snaps, Capturer: checkpoint.NewCapturer(snaps, 4, false),
		Host: checkpoint.Host{Node: o.Name, Driver: driver.Name(), Architecture: goruntime.GOARCH}, Root: filepath.Join(o.Dir, "sandboxes"), Width: 8, Log: a.log,
	})
	if err != nil {
		return err
	}
	a.onClose(quiet(run.Close))
	a.node = &node{name: o.Name, address: "unix:" + a.socket(), run: run, state: state, journal: kept, volumes: held}
	return a.openSession(state, kept)
}

func (a *Agent) socket() string { return filepath.Join(a.machine.opts.Dir, "node.sock") }

func (a *Agent) openSession(state *nodestate.Store, kept *journal.Journal) error {
	o := a.machine.opts
	files, err := pki.Open(o.TLS, nil)
	if err != nil {
		return err
	}
	var conns []grpc.ClientConnInterface
	for _, address := range o.Coordinators {
		cc, err := grpc.NewClient(address, append(wire.DialOptions(), grpc.WithTransportCredentials(wire.TLS(files.Client(pki.RoleCoordinator, ""))))...)
		if err != nil {
			return fmt.Errorf("coordinator %s: %w", address, err)
		}
		a.onClose(cc.Close)
		conns = append(conns, cc)
	}
	a.session = session.New(session.Options{Conns: conns, Store: state, Node: a.node, Journal: kept, TicketKeys: func([]ticket.PublicKey) {}, Log: a.log,
		FirstPause: 50 * time.Millisecond, LongestPause: 500 * time.Millisecond, Silence: o.Silence})
	commands := runner.NewCommands(state, a.session.Epoch)
	a.onClose(quiet(commands.Close))
	around, err := wire.NewServer(a.log, nil)
	if err != nil {
		return err
	}
	served := around.Options()
	if o.Watch != nil {
		served = append(served, grpc.ChainUnaryInterceptor(o.Watch))
	}
	a.server = grpc.NewServer(append(served, grpc.Creds(wire.TLS(files.Server(pki.RoleCoordinator))),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: time.Second, PermitWithoutStream: true}))...)
	nodev1.RegisterAgentServiceServer(a.server, &api.Server{Commands: commands, Runner: a.node, Volumes: a.node.volumes, Images: a.node, Inventory: a.node, Networks: a.node})
	return nil
}

func (a *Agent) serve() error {
	l, err := net.Listen("unix", a.socket())
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	a.cancel = cancel
	a.owned.Go(func() {
		if err := a.server.Serve(l); err != nil && !strings.Contains(err.Error(), "closed") && ctx.Err() == nil {
			a.log.Error("the node API ended", "error", err)
		}
	})
	a.owned.Go(func() { a.session.Run(ctx) })
	a.owned.Go(func() {
		<-ctx.Done()
		a.server.Stop() // what was asked goes on in the runner, or is undone when that closes
	})
	return nil
}

// recover finishes what the agent before left.
func (n *node) recover(ctx context.Context) error {
	snaps, err := n.state.Snapshots()
	if err != nil {
		return err
	}
	for _, s := range snaps {
		if err := n.run.FinishSnapshot(ctx, s.UID); err != nil {
			return err
		}
	}
	all, err := n.state.Sandboxes()
	if err != nil {
		return err
	}
	for _, rec := range all {
		settle := n.run.Remove
		if rec.Intent == nodestate.IntentKeep {
			settle = n.run.Reattach
		}
		if err := settle(ctx, rec.UID); err != nil {
			return errs.Wrap(err, errs.InternalError, "bring sandbox %s to its record: %v", rec.UID, err)
		}
	}
	return nil
}
