package app

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"

	"github.com/dormouse-run/dormouse/coordinator/internal/api"
	"github.com/dormouse-run/dormouse/coordinator/internal/auth"
	"github.com/dormouse-run/dormouse/coordinator/internal/forward"
	"github.com/dormouse-run/dormouse/coordinator/internal/nodeclient"
	"github.com/dormouse-run/dormouse/coordinator/internal/operations"
	"github.com/dormouse-run/dormouse/coordinator/internal/publish"
	"github.com/dormouse-run/dormouse/coordinator/internal/rest"
	"github.com/dormouse-run/dormouse/coordinator/internal/sessions"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
	"github.com/dormouse-run/dormouse/pkg/obs"
	"github.com/dormouse-run/dormouse/pkg/pki"
	"github.com/dormouse-run/dormouse/pkg/ticket"
	"github.com/dormouse-run/dormouse/pkg/uid"
	"github.com/dormouse-run/dormouse/pkg/wire"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
)

// App is a running coordinator.
type App struct {
	cfg    Config
	log    *slog.Logger
	holder string

	store    catalog.Store
	queue    *publish.Queue
	registry *sessions.Registry
	pool     *nodeclient.Pool
	streams  *nodeclient.Streams
	forward  *forward.Forwarder
	tickets  *ticket.Keys // nil: none are given
	bridge   *rest.Bridge
	metrics  *metrics
	health   *obs.Health
	gatherer *prometheus.Registry
	grpcLife *health.Server

	engine  atomic.Pointer[operations.Engine]
	above   atomic.Uint64 // the highest coordinator epoch that a node has told of
	endTerm atomic.Pointer[context.CancelCauseFunc]

	inForce   atomic.Pointer[reign]
	suspended atomic.Pointer[catalog.Suspension] // while this coordinator leads a suspended catalog
	unproven  atomic.Bool
	repairing sync.Mutex
	orphans   chan struct{}                // a place for one: what no record names is dropped or adopted by one operator at a time
	served    atomic.Pointer[acquaintance] // nil before the first term that served ended

	servers   []*grpc.Server
	https     []*http.Server
	addresses map[string][]string
	failed    chan error // the first listener that failed
	serving   sync.WaitGroup

	cancel    context.CancelFunc // of the campaign and the hub
	owned     sync.WaitGroup
	stopAdmin context.CancelFunc
	admin     sync.WaitGroup
}

// Option changes how an App is made.
type Option func(*options)

type options struct {
	store catalog.Store
	log   io.Writer
}

// WithStore uses a catalog that is open already. The App closes it.
func WithStore(s catalog.Store) Option { return func(o *options) { o.store = s } }

// WithLog writes the log elsewhere than to standard error.
func WithLog(w io.Writer) Option { return func(o *options) { o.log = w } }

// Start makes and starts a coordinator. It returns once the listeners answer; leadership comes
// later, if it does. Stop it.
func Start(ctx context.Context, cfg Config, opts ...Option) (a *App, err error) {
	o := options{log: os.Stderr}
	for _, opt := range opts {
		opt(&o)
	}
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	a = &App{cfg: cfg, holder: cfg.Holder + "/" + uid.New(), failed: make(chan error, 1), addresses: make(map[string][]string), orphans: make(chan struct{}, 1), store: o.store}
	if a.log, err = obs.NewLogger(o.log, cfg.Log); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			a.Stop()
			a = nil
		}
	}()
	faults(cfg)
	tlsFiles, keys, err := a.files()
	if err != nil {
		return a, err
	}
	a.gatherer, a.health, a.grpcLife = obs.NewRegistry(), obs.NewHealth(), health.NewServer()
	a.metrics = newMetrics(a.gatherer)
	if err := a.open(ctx); err != nil {
		return a, err
	}
	a.queue = publish.New(publish.Options{Store: a.store, Logger: a.log, Metrics: a.gatherer})
	a.queue.Start()
	a.assemble(tlsFiles)
	life, cancel := context.WithCancel(context.Background())
	a.cancel = cancel
	if err := a.listen(ctx, life, tlsFiles, keys); err != nil {
		return a, err
	}
	if err := a.serveAdmin(); err != nil {
		return a, err
	}
	a.owned.Go(func() { a.campaign(life) })
	a.log.Info("coordinator started", "holder", a.holder, "grpc", a.addresses["grpc"], "rest", a.addresses["rest"], "node", a.addresses["node"])
	return a, nil
}

// files reads the TLS files and the keys, both of which are read again when they change.
func (a *App) files() (*pki.Source, *auth.Authenticator, error) {
	source, err := pki.Open(a.cfg.TLS, func(err error) {
		if err != nil {
			a.log.Error("the TLS files were not read again; those before stay in use", "error", err)
		} else {
			a.log.Info("the TLS files were read again")
		}
	})
	if err != nil {
		return nil, nil, err
	}
	if a.cfg.Tickets.Keys != "" {
		a.tickets, err = ticket.OpenKeys(a.cfg.Tickets.Keys, func(err error) {
			if err != nil {
				a.log.Error("the keys of tickets were not read again; those before stay in use", "error", err)
			} else {
				a.log.Info("the keys of tickets were read again")
			}
		})
		if err != nil {
			return nil, nil, err
		}
	}
	keys, err := auth.Open(a.cfg.Keys, a.log)
	return source, keys, err
}

// replyTime is how long the catalog's server may take to answer. One that is not heard any more must not keep a coordinator for long
// that is to step back.
const replyTime = 10 * time.Second

// open opens the catalog, which refuses a server that is not durable.
func (a *App) open(ctx context.Context) error {
	if a.store == nil {
		o := redis.Options{Address: a.cfg.Redis.Address, Username: a.cfg.Redis.Username, Password: a.cfg.Redis.Password.Reveal(),
			DB: a.cfg.Redis.DB, Catalog: a.cfg.Redis.Catalog, ReplyTimeout: replyTime, Retention: catalog.Retention{Receipts: a.cfg.Operations.Life}, Renewed: a.renewed}
		if a.cfg.Redis.CA != "" {
			pem, err := os.ReadFile(a.cfg.Redis.CA)
			if err != nil {
				return fmt.Errorf("redis.ca: %w", err)
			}
			o.TLS = &tls.Config{RootCAs: x509.NewCertPool(), MinVersion: tls.VersionTLS12}
			if !o.TLS.RootCAs.AppendCertsFromPEM(pem) {
				return fmt.Errorf("redis.ca: %s has no certificate", a.cfg.Redis.CA)
			}
		}
		store, err := redis.Open(ctx, o)
		if err != nil {
			return fmt.Errorf("the catalog at %s: %w", o.Address, err)
		}
		a.store = store
	}
	st, err := a.store.Status(ctx)
	if err != nil {
		return fmt.Errorf("the catalog at %s: %w", a.cfg.Redis.Address, err)
	}
	a.log.Info("catalog opened", "server", st.Server, "durability", st.Durability, "incarnation", st.Incarnation, "seq", st.Seq)
	a.health.Ready("catalog", func(ctx context.Context) error {
		_, err := a.store.Seq(ctx)
		return err
	})
	return nil
}

// renewed is told of a server that was started, and written to only once its log was written anew.
func (a *App) renewed(r redis.Renewal) {
	a.metrics.renewed(r.Err)
	if r.Err != nil {
		a.log.Warn("the catalog's server was started and has not written its log anew; nothing is written to it before", "server", r.Server, "run_id", r.RunID, "error", r.Err)
		return
	}
	a.log.Info("the catalog's server was started, and wrote its log anew before anything else is written to it", "server", r.Server, "run_id", r.RunID, "took", r.Took)
}

// assemble makes what the listeners serve.
func (a *App) assemble(files *pki.Source) {
	a.registry = sessions.New(sessions.Config{
		Store: a.store, Queue: publisher{a.queue, a.rewound}, Log: a.log, Heartbeat: a.cfg.Nodes.Heartbeat, Missed: a.cfg.Nodes.Missed,
		OnHigherEpoch: a.higherEpoch, Witness: a.witness, PeerNode: peerNode, TicketKeys: a.ticketKeys,
		Inventory: func(ctx context.Context, node, after string) (*nodev1.GetInventoryResponse, fence.Epoch, error) {
			return a.pool.Inventory(ctx, node, after)
		},
		Trace: func(ctx context.Context, node, key string) (*nodev1.JournalEntry, error) {
			return a.pool.Trace(ctx, node, key)
		},
		OrphansEvery: a.cfg.Nodes.OrphansEvery, OrphanGrace: a.cfg.Nodes.OrphanGrace,
	})
	node := func(name string) *tls.Config { return files.Client(pki.RoleNode, name) }
	a.pool, a.streams = nodeclient.New(sessions.Directory{Registry: a.registry}, node), nodeclient.NewStreams(node)
	a.metrics.nodes(a.gatherer, a.registry)
	a.metrics.catalog(a.gatherer, a)
}

// peerNode gives the node that a session's certificate was given to.
func peerNode(ctx context.Context) (string, error) {
	id, ok := pki.PeerIdentity(ctx)
	if !ok {
		return "", errs.New(errs.CredentialsMissing, "a node shows its certificate")
	}
	if id.Role != pki.RoleNode {
		return "", errs.New(errs.NotAllowed, "a certificate of role %s cannot open a node's session", id.Role)
	}
	return id.Name, nil
}

func (a *App) serveAdmin() error {
	if a.cfg.Admin == "" {
		return nil
	}
	ctx, cancel := context.WithCancel(context.Background())
	a.stopAdmin = cancel
	handler := obs.AdminHandler(a.gatherer, a.health, nil)
	l, err := obs.ListenRootOnly(a.cfg.Admin)
	if err != nil {
		return err
	}
	srv := &http.Server{Handler: handler, ReadHeaderTimeout: 5 * time.Second}
	a.admin.Go(func() { a.serveFailed("admin", srv.Serve(l)) })
	a.admin.Go(func() {
		<-ctx.Done()
		_ = srv.Close() // what is served there can be asked again
	})
	return nil
}

// serveFailed tells Wait of a listener that ended by itself.
func (a *App) serveFailed(what string, err error) {
	if err == nil || errors.Is(err, grpc.ErrServerStopped) || errors.Is(err, http.ErrServerClosed) {
		return
	}
	select {
	case a.failed <- fmt.Errorf("%s listener: %w", what, err):
	default:
	}
}

// Wait returns when the context ends, or a listener fails, with its error.
func (a *App) Wait(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case err := <-a.failed:
		return err
	}
}

// Addresses gives what a listener (grpc, rest, node) is bound to.
func (a *App) Addresses(listener string) []string { return a.addresses[listener] }

// Leading tells whether this coordinator leads now.
func (a *App) Leading() bool { return a.engine.Load() != nil }

// Stop ends everything in order and waits for it.
func (a *App) Stop() {
	if a.grpcLife != nil {
		a.grpcLife.Shutdown()
	}
	if a.cancel != nil {
		a.cancel()
	}
	a.owned.Wait() // the term has ended, and with it every operation's wait
	ctx, cancel := context.WithTimeout(context.Background(), a.cfg.Stop)
	defer cancel()
	a.drain(ctx)
	if a.bridge != nil {
		_ = a.bridge.Close() // its only error is that it was closed already
	}
	if a.queue != nil {
		a.queue.Close(ctx)
	}
	if a.forward != nil {
		a.forward.Close()
	}
	if a.pool != nil {
		a.pool.Close()
		a.streams.Close()
	}
	if a.store != nil {
		if err := a.store.Close(); err != nil {
			a.log.Warn("the catalog was not closed in order", "error", err)
		}
	}
	if a.stopAdmin != nil {
		a.stopAdmin()
	}
	a.admin.Wait()
	a.log.Info("coordinator stopped")
}

// Run starts a coordinator and stops it when the context ends.
func Run(ctx context.Context, cfg Config, opts ...Option) error {
	a, err := Start(ctx, cfg, opts...)
	if err != nil {
		return err
	}
	defer a.Stop()
	return a.Wait(ctx)
}

// publisher gives the commit queue the shape that its users declare.
type publisher struct {
	*publish.Queue
	rewound func() // told of each refusal for CATALOG_REWOUND
}

func (p publisher) Publish(ctx context.Context, build func(context.Context, catalog.Reader) (catalog.Commit, error)) (catalog.Result, error) {
	r, err := p.Queue.Publish(ctx, build)
	if errs.Has(err, errs.CatalogRewound) {
		p.rewound()
	}
	return r, err
}

// services makes the public API.
func (a *App) services() *api.Server {
	cfg := api.Config{Store: a.store, Nodes: a.registry, Agents: a.pool, Streams: a.streams, Engine: a.Engine, Leader: a.forward, Catalog: keeper{a}, Log: a.log}
	if a.tickets != nil {
		cfg.Tickets = &api.Tickets{Issuer: a.tickets, Life: a.cfg.Tickets.Life, CA: func() ([]byte, error) { return os.ReadFile(a.cfg.TLS.CA) }}
	}
	return api.New(cfg)
}

// ticketKeys are what nodes verify tickets with.
func (a *App) ticketKeys() []ticket.PublicKey {
	if a.tickets == nil {
		return nil
	}
	return a.tickets.Public()
}

// surround makes what is around every call of the listeners.
func (a *App) surround() (*wire.Server, error) { return wire.NewServer(a.log, a.gatherer) }
