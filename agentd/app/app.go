// Package app is agentd as a library: its configuration, and its parts put together in a stated order,
// so that tests run all that the program runs.
//
// # Order of starting
//
//  1. The host's limits: raised if they may be. Then the records: the lock on them keeps a second agentd of this node out.
//  2. Bundles, launcher, control groups, driver; then images, volumes, snapshots, networks: what the
//     runner stands on. Each clears what a crash left in its own folder. Then the runner.
//  3. The admin socket: health can be asked (alive, not ready) while the rest starts.
//  4. Reconcile: records and node are brought together before anything new is asked.
//  5. The node API and agentctl's socket.
//  6. The session with the coordinator: only now is the node known to be there.
//
// # Order of stopping
//
// The other way round: the session ends, calls that are being answered are drained for a bounded time,
// what is still going on is cancelled and undone, then the stores close. Nothing that runs is stopped: sandboxes
// outlive agentd, whatever ends it.
//
// # Goroutines
//
// Serve owns one for each listener, one for the admin socket, one for the session, one that makes room on the
// images' disk and one that looks at memory, and waits for all of them.
// The parts own theirs, and end them in Close.
package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	goruntime "runtime"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"

	"github.com/dormouse-run/dormouse/agentd/internal/activity"
	"github.com/dormouse-run/dormouse/agentd/internal/bulk"
	"github.com/dormouse-run/dormouse/agentd/internal/cgroup"
	"github.com/dormouse-run/dormouse/agentd/internal/checkpoint"
	"github.com/dormouse-run/dormouse/agentd/internal/journal"
	"github.com/dormouse-run/dormouse/agentd/internal/launcher"
	"github.com/dormouse-run/dormouse/agentd/internal/layers"
	"github.com/dormouse-run/dormouse/agentd/internal/nodestate"
	"github.com/dormouse-run/dormouse/agentd/internal/ocispec"
	"github.com/dormouse-run/dormouse/agentd/internal/preflight"
	"github.com/dormouse-run/dormouse/agentd/internal/reconcile"
	"github.com/dormouse-run/dormouse/agentd/internal/room"
	"github.com/dormouse-run/dormouse/agentd/internal/runner"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime/runsc"
	"github.com/dormouse-run/dormouse/agentd/internal/session"
	"github.com/dormouse-run/dormouse/agentd/internal/volumes"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fault"
	"github.com/dormouse-run/dormouse/pkg/obs"
	"github.com/dormouse-run/dormouse/pkg/pki"
	"github.com/dormouse-run/dormouse/pkg/ticket"
	"github.com/dormouse-run/dormouse/pkg/uid"
	"github.com/dormouse-run/dormouse/pkg/wire"
)

// App is one agentd.
type App struct {
	cfg     Config
	log     *slog.Logger
	metrics *prometheus.Registry
	health  *obs.Health
	tls     *pki.Source

	state     *nodestate.Store
	journal   *journal.Journal
	bundles   *bundles
	groups    *cgroup.Manager
	driver    runtime.Driver
	bulk      *bulk.Manager
	uses      *activity.Tracker
	images    *layers.Store
	volumes   *volumeParts
	snapshots *checkpoint.Store
	networks  networks
	// sandboxes is how many the node takes, notice why that is less than it is configured to.
	sandboxes int64
	notice    string
	room      *room.Room
	run       *runner.Node
	commands  *runner.Commands
	node      *node
	session   *session.Client
	tickets   ticket.Verifier

	// fault is nil but in builds for tests.
	fault func(point string) error

	// closers run from the last to the first.
	closers []func() error
}

// New opens everything; nothing of the node is changed or served and nobody is told yet. Close takes it back.
func New(ctx context.Context, cfg Config, log *slog.Logger) (*App, error) {
	if err := cfg.check(); err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	a := &App{cfg: cfg, log: log.With("node", cfg.Node), metrics: obs.NewRegistry(), health: obs.NewHealth()}
	a.tickets.Node = cfg.Node
	var err error
	if a.sandboxes, a.notice, err = ready(ctx, cfg, preflight.Host{}, a.log); err != nil {
		return nil, err
	}
	for _, open := range []func(context.Context) error{a.openState, a.openRuntime, a.openStores, a.openRunner, a.openSession, a.measure} {
		if err := open(ctx); err != nil {
			return nil, errors.Join(err, a.Close())
		}
	}
	return a, nil
}

// Close lets go of everything, in the reverse order of opening. Sandboxes go on.
func (a *App) Close() error {
	var all []error
	for i := len(a.closers) - 1; i >= 0; i-- {
		all = append(all, a.closers[i]())
	}
	a.closers = nil
	return errors.Join(all...)
}

func (a *App) onClose(fn func() error) { a.closers = append(a.closers, fn) }

func quiet(fn func()) func() error { return func() error { fn(); return nil } }

func (a *App) dir(name string) string { return filepath.Join(a.cfg.StateDir, name) }

func (a *App) openState(context.Context) error {
	err := os.MkdirAll(a.cfg.StateDir, 0o700)
	if err == nil {
		err = os.Chmod(a.cfg.StateDir, 0o700)
	}
	if err != nil {
		return errs.Wrap(err, errs.InternalError, "the state folder: %v", err)
	}
	a.fault = faults(a.cfg.StateDir)
	state, err := nodestate.Open(nodestate.Options{Path: a.dir("state.db"), Node: a.cfg.Node, Commands: a.cfg.Limits.Commands})
	if err != nil {
		return err
	}
	a.state = state
	a.onClose(state.Close)
	if a.journal, err = journal.Open(a.cfg.StateDir, a.cfg.Node, a.log); err != nil {
		return errs.Wrap(err, errs.InternalError, "the journal: %v", err)
	}
	a.onClose(a.journal.Close)
	a.tls, err = pki.Open(a.cfg.TLS, func(err error) {
		if err != nil {
			a.log.Error("the TLS files changed and do not fit together; the old ones stay in use", "error", err)
		}
	})
	return err
}

func (a *App) openRuntime(context.Context) error {
	var err error
	a.bundles, err = openBundles(a.cfg.Bundle.Dir, a.cfg.Bundle.Root, func(d string, err error) {
		a.log.Error("an installed runtime bundle cannot be used", "bundle", d, "error", err)
	})
	if err != nil {
		return err
	}
	launch, err := launcher.New(launcher.Options{MountNS: a.cfg.MountNS})
	if err != nil {
		return err
	}
	a.onClose(launch.Close)
	if a.groups, err = cgroup.Open(cgroup.Options{Parent: a.cfg.Cgroup}); err != nil {
		return err
	}
	// The groups' parent goes with the last sandbox; while there are any it stays.
	a.onClose(func() error { _ = a.groups.RemoveParent(); return nil })
	driver, err := runsc.New(runsc.Options{Root: a.dir("runsc"), Launcher: launch, Cgroups: a.groups, Log: a.log})
	if err != nil {
		return err
	}
	a.driver = driver
	a.onClose(driver.Close)
	a.bulk = bulk.New(bulk.Options{Driver: driver, Helper: ocispec.BulkPath, Capabilities: ocispec.Capabilities(), Log: a.log})
	a.onClose(quiet(a.bulk.Close))
	return nil
}

// required are the files that every artefact of runsc has.
var required = []string{"checkpoint.img", "pages.img", "pages_meta.img"}

func (a *App) openStores(ctx context.Context) error {
	mkfs, err := exec.LookPath(a.cfg.Layers.Mkfs)
	if err != nil {
		return fmt.Errorf("layers.mkfs: %w", err)
	}
	a.images, err = layers.New(layers.Config{
		Root: a.cfg.Layers.Root, Node: a.cfg.Node, ContainerdSocket: a.cfg.Containerd.Socket, Namespace: a.cfg.Containerd.Namespace, Mkfs: mkfs,
		HostsDir: a.cfg.Registry.HostsDir, CAFiles: a.cfg.Registry.CAFiles, PlainHTTP: a.cfg.Registry.PlainHTTP, DockerConfig: a.cfg.Registry.DockerConfig,
		Conversions: a.cfg.Layers.Conversions, Log: a.log,
	})
	if err != nil {
		return err
	}
	a.onClose(a.images.Close)
	fault.At("recover.images.before")
	if report, err := a.images.Recover(ctx); err != nil {
		// containerd may still be starting: what could not be cleared is cleared at the next start.
		a.log.WarnContext(ctx, "images were not wholly recovered", "error", err)
	} else {
		a.log.InfoContext(ctx, "images recovered", "staging", report.Staging, "orphans", len(report.Orphans), "dropped", len(report.Dropped), "damaged", len(report.Damaged))
	}
	fault.At("recover.images.after")
	vols, err := volumes.New(volumes.Config{Root: a.dir("volumes"), Log: a.log})
	if err != nil {
		return err
	}
	a.onClose(quiet(vols.Close))
	fault.At("recover.volumes.before")
	report, err := vols.Recover(ctx)
	if err != nil {
		return err
	}
	fault.At("recover.volumes.after")
	for _, id := range report.Damaged {
		a.log.ErrorContext(ctx, "a volume's own record is damaged; it is left alone", "volume", id)
	}
	a.volumes = &volumeParts{store: vols, state: a.state}
	a.snapshots, err = checkpoint.OpenStore(checkpoint.StoreOptions{Root: a.dir("snapshots"), Require: required, Reserve: int64(a.cfg.Reserve.Disk), Direct: a.cfg.Snapshot.Direct})
	if err != nil {
		return err
	}
	fault.At("recover.artefacts.before")
	if err := a.snapshots.Sweep(); err != nil {
		return err
	}
	fault.At("recover.artefacts.after")
	return nil
}

func (a *App) openRunner(context.Context) error {
	cpu, err := checkpoint.CPUFeatures()
	if err != nil {
		return err
	}
	if a.networks, err = a.openNetworks(); err != nil {
		return err
	}
	if err := a.openRoom(); err != nil {
		return err
	}
	a.run, err = runner.New(runner.Options{
		Store: a.state, Driver: a.driver, Images: images{a.images, a.cfg.Node}, Volumes: a.volumes, Networks: a.networks, Bundles: a.bundles,
		Groups: groups{a.groups}, Specs: specBuilder{}, Guests: guests{a.log, a.bulk}, Room: doorway{a.room}, Snapshots: a.snapshots,
		Capturer: checkpoint.NewCapturer(a.snapshots, a.cfg.Snapshot.Width, a.cfg.Snapshot.Direct),
		Host:     checkpoint.Host{Node: a.cfg.Node, Driver: a.driver.Name(), Architecture: goruntime.GOARCH, CPUFeatures: cpu},
		Root:     a.dir("sandboxes"), ReadyRoot: a.dir("prepared"), Ready: a.cfg.Limits.Networks, Flags: runsc.DefaultFlags(), Width: a.cfg.Limits.Starts, Restores: a.cfg.Limits.Restores, Log: a.log, Measure: a.stepTimes(), Fault: a.fault,
	})
	if err != nil {
		return err
	}
	a.onClose(quiet(a.run.Close))
	a.volumes.freeze = a.run.Freeze
	a.uses = activity.Open(activity.Options{Path: a.dir("uses.json"), Boxes: a.boxes, Box: a.box, CPU: a.cpuOf, Log: a.log})
	a.node = &node{cfg: a.cfg, run: a.run, uses: a.uses, state: a.state, journal: a.journal, bulk: a.bulk, images: a.images, volumes: a.volumes, networks: a.networks, bundles: a.bundles, room: a.room, sandboxes: a.sandboxes, notice: a.notice, cpu: cpu, bootID: uid.New()}
	return nil
}

// boxes lists the sandboxes for who watches their use.
func (a *App) boxes() ([]activity.Box, error) {
	all, err := a.state.Sandboxes()
	out := make([]activity.Box, 0, len(all))
	for _, rec := range all {
		out = append(out, activity.Box{UID: rec.UID, Phase: rec.Phase})
	}
	return out, err
}

func (a *App) box(uid string) (activity.Box, error) {
	rec, err := a.state.Sandbox(uid)
	return activity.Box{UID: rec.UID, Phase: rec.Phase}, err
}

func (a *App) cpuOf(_ context.Context, uid string) (time.Duration, error) {
	return a.groups.Group(uid).CPU()
}

func (a *App) openSession(context.Context) error {
	var conns []grpc.ClientConnInterface
	for _, address := range a.cfg.coordinators() {
		network, addr := listenOn(address)
		target := "passthrough:///" + addr
		if network == "unix" {
			target = "unix:" + addr
		}
		opts := append(wire.DialOptions(), grpc.WithTransportCredentials(wire.TLS(a.tls.Client(pki.RoleCoordinator, ""))))
		conn, err := grpc.NewClient(target, opts...)
		if err != nil {
			return fmt.Errorf("coordinator %s: %w", address, err)
		}
		a.onClose(conn.Close)
		conns = append(conns, conn)
	}
	a.session = session.New(session.Options{Conns: conns, Store: a.state, Node: a.node, Journal: a.journal, TicketKeys: a.tickets.SetKeys, Log: a.log})
	a.commands = runner.NewCommands(a.state, a.session.Epoch)
	a.onClose(quiet(a.commands.Close))
	return nil
}

// reconcileTime bounds the start: what is not done then is tried again by the sandboxes' owners.
const reconcileTime = 5 * time.Minute

func (a *App) reconcile(ctx context.Context) error {
	rec, err := a.sources().Records()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, reconcileTime)
	defer cancel()
	fault.At("recover.reconcile.before")
	if err := reconcile.Apply(ctx, a.run, reconcile.Plan(rec), a.log); err != nil {
		a.log.ErrorContext(ctx, "not everything could be reconciled; `agentctl doctor` names what is left", "error", err)
	}
	fault.At("recover.reconcile.after")
	return ctx.Err()
}

func (a *App) sources() reconcile.Sources {
	return reconcile.Sources{
		Store: a.state, Driver: a.driver, Groups: a.groups, Artefacts: a.snapshots,
		ImageHolds: images{a.images, a.cfg.Node}.holds, VolumeHolds: a.volumes.holds, Networks: a.networks,
		Aside:       func() ([]string, error) { return journal.Aside(a.cfg.StateDir) },
		SandboxRoot: a.dir("sandboxes"), SnapshotRoot: a.dir("snapshots"), Mountinfo: "/proc/self/mountinfo",
	}
}
