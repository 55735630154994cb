// Package api serves the public API: it decodes, asks the catalog or the operations engine, and
// encodes. It decides nothing about objects.
//
// A caller sees only its tenant: keys are made with the tenant of its credentials, so that what belongs to
// another is not found, in the same words as what never was. Reads come from records, whoever
// leads; mutations, and what only a leader knows (which nodes live), are answered by the leader or with
// NO_LEADER.
package api

import (
	"context"
	"log/slog"
	"time"

	"google.golang.org/grpc"

	"github.com/dormouse-run/dormouse/coordinator/internal/auth"
	"github.com/dormouse-run/dormouse/coordinator/internal/nodeclient"
	"github.com/dormouse-run/dormouse/coordinator/internal/operations"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/coordinator/internal/sessions"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
	"github.com/dormouse-run/dormouse/pkg/obs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// MaxMessage is the largest request that is read, in bytes.
const MaxMessage = 4 << 20

// Store is what is read.
type Store interface {
	catalog.Reader
	Tombstone(ctx context.Context, key catalog.Key) (catalog.Tombstone, error)
	ListTombstones(ctx context.Context, tenant string, kind catalog.Kind, after string, limit int) (catalog.Tombstones, error)
	Changes(ctx context.Context, after uint64, limit int, block time.Duration) ([]catalog.Change, error)
	Seq(ctx context.Context) (uint64, error)
}

// Nodes is what is known of nodes.
type Nodes interface {
	Views() []sessions.View
	Images() []*dormousev1.Image
	// LearnImage and ForgetImage tell of what changed on a node, ahead of its next heartbeat.
	LearnImage(node string, img *dormousev1.Image)
	ForgetImage(node, digest string)
}

// Agents is what is asked of nodes beside operations.
type Agents interface {
	PullImage(ctx context.Context, node string, c operations.Command, reference string, progress func(*dormousev1.PullProgress) error) (*dormousev1.Image, error)
	RemoveImage(ctx context.Context, node string, c operations.Command, digest string) error
	// Inventory gives a page of what a node holds, in order of kind/uid, after the given place.
	Inventory(ctx context.Context, node, after string) (*nodev1.GetInventoryResponse, fence.Epoch, error)
}

// Streams connects to nodes for the calls of the data plane.
type Streams interface {
	Conn(ctx context.Context, p nodeclient.Place, bulk bool) (*grpc.ClientConn, error)
}

// Leader makes a call of the public API in the caller's name where it can be answered: here, or at the leader where the answer here is
// NO_LEADER.
type Leader interface {
	Do(ctx context.Context, fullMethod string, req any, here func() (any, error)) (any, error)
}

// Config of a Server.
type Config struct {
	Catalog Catalog
	Store   Store
	Nodes   Nodes
	Agents  Agents
	// Streams of the data plane.
	Streams Streams
	// Tickets is nil where none are given.
	Tickets *Tickets
	// Engine of the term in force, or NO_LEADER.
	Engine func() (*operations.Engine, error)
	Leader Leader
	Log    *slog.Logger
}

// Server has all public services.
type Server struct {
	cfg       Config
	hub       *hub
	wakes     wakes
	lastNodes lastNodes
}

// New makes a server. Run it while it serves.
func New(cfg Config) *Server {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Server{cfg: cfg, hub: newHub(cfg.Store, cfg.Log)}
}

// Run follows the change log for watches until the context ends.
func (s *Server) Run(ctx context.Context) {
	s.hub.run(ctx)
	s.wakes.end()
}

// Register adds the services to a gRPC server.
func (s *Server) Register(r grpc.ServiceRegistrar) {
	dormousev1.RegisterSandboxServiceServer(r, sandboxService{Server: s})
	dormousev1.RegisterSnapshotServiceServer(r, snapshotService{Server: s})
	dormousev1.RegisterVolumeServiceServer(r, volumeService{Server: s})
	dormousev1.RegisterTemplateServiceServer(r, templateService{Server: s})
	dormousev1.RegisterPoolServiceServer(r, poolService{Server: s})
	dormousev1.RegisterNodeServiceServer(r, nodeService{Server: s})
	dormousev1.RegisterImageServiceServer(r, imageService{Server: s})
	dormousev1.RegisterOperationServiceServer(r, operationService{Server: s})
	dormousev1.RegisterEventServiceServer(r, eventService{Server: s})
	dormousev1.RegisterCatalogServiceServer(r, catalogService{Server: s})
	dormousev1.RegisterTicketServiceServer(r, ticketService{Server: s})
	gateway{s}.register(r)
}

// call says who asks, for an operation.
func call(ctx context.Context, id auth.Identity, operationID string) operations.Call {
	return operations.Call{Tenant: id.Tenant, OperationID: operationID, RequestID: obs.RequestID(ctx)}
}

// mutate gives what every mutation begins with.
func (s *Server) mutate(ctx context.Context, operationID string) (*operations.Engine, operations.Call, error) {
	id, err := auth.From(ctx)
	if err != nil {
		return nil, operations.Call{}, err
	}
	e, err := s.cfg.Engine()
	return e, call(ctx, id, operationID), err
}

// get reads one object of the caller's tenant.
func (s *Server) get(ctx context.Context, kind catalog.Kind, field, u string) (catalog.Record, error) {
	id, err := auth.From(ctx)
	if err != nil {
		return catalog.Record{}, err
	}
	if err := checkUID(field, u); err != nil {
		return catalog.Record{}, err
	}
	rec, err := s.cfg.Store.Get(ctx, catalog.Key{Tenant: id.Tenant, Kind: kind, UID: u})
	if errs.Has(err, errs.ObjectNotFound) {
		return rec, notFound(kind, u)
	}
	return rec, err
}

// sandbox reads a sandbox that is the caller's to use.
func (s *Server) sandbox(ctx context.Context, field, u string) (*records.Sandbox, error) {
	rec, err := s.get(ctx, catalog.KindSandbox, field, u)
	if err != nil {
		return nil, err
	}
	sb, err := records.SandboxOf(rec)
	if err == nil && sb.Hidden() {
		err = notFound(catalog.KindSandbox, u)
	}
	return sb, err
}

func checkUID(field, u string) error {
	if err := uid.Check(u); err != nil {
		return errs.New(errs.InvalidField, "%s: %v; look a name up with a list", field, err).With("field", field)
	}
	return nil
}

func notFound(kind catalog.Kind, u string) error {
	return errs.New(errs.ObjectNotFound, "there is no %s %s", kind, u).With("kind", string(kind)).With("uid", u)
}
