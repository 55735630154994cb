// Package client is the Go SDK of Dormouse: handles for sandboxes, processes, snapshots, volumes,
// images and nodes.
//
// Every error is an *errs.Error. Calls are tried again only where the error says that this is safe:
// mutations always carry an operation id (the caller's, or one made here), so that the server
// recognises the second attempt. The deadline of the context covers all attempts.
package client

import (
	"context"
	"crypto/tls"
	"errors"
	"math/rand/v2"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/pki"
	"github.com/dormouse-run/dormouse/pkg/wait"
	"github.com/dormouse-run/dormouse/pkg/wire"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// Bounds of trying again.
const (
	maxAttempts = 4
	maxMessage  = 64 << 20
)

// firstBackoff is shorter in tests.
var firstBackoff = 100 * time.Millisecond

// Client talks to a coordinator. It is safe for concurrent use.
type Client struct {
	cc    *grpc.ClientConn
	plane *plane

	sandboxes  dormousev1.SandboxServiceClient
	processes  dormousev1.ProcessServiceClient
	files      dormousev1.FileServiceClient
	ports      dormousev1.PortServiceClient
	snapshots  dormousev1.SnapshotServiceClient
	volumes    dormousev1.VolumeServiceClient
	nodes      dormousev1.NodeServiceClient
	images     dormousev1.ImageServiceClient
	operations dormousev1.OperationServiceClient
	events     dormousev1.EventServiceClient
	catalog    dormousev1.CatalogServiceClient
	templates  dormousev1.TemplateServiceClient
	pools      dormousev1.PoolServiceClient
}

// Dial makes a client. It does not connect: the first call does.
func Dial(cfg Config, opts ...grpc.DialOption) (*Client, error) {
	to, err := cfg.coordinators()
	if err != nil {
		return nil, err
	}
	key, err := cfg.key()
	if err != nil {
		return nil, err
	}
	transport, err := cfg.transport(to.local)
	if err != nil {
		return nil, err
	}
	all := append(wire.DialOptions(), grpc.WithTransportCredentials(transport),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)), grpc.WithDisableServiceConfig())
	if key != "" {
		all = append(all, grpc.WithPerRPCCredentials(bearer{key: key, local: to.local}))
	}
	cc, err := grpc.NewClient(to.target, append(append(all, to.opts...), opts...)...)
	if err != nil {
		return nil, errs.Wrap(err, errs.InvalidField, "the coordinator's address %q cannot be used", cfg.Addr).With("field", "addr")
	}
	c := New(cc)
	c.plane.direct = !cfg.Through && (!to.local || cfg.DialNode != nil)
	c.plane.dialNode = cfg.DialNode
	return c, nil
}

// New makes a client over a connection that has wire's interceptors.
func New(cc *grpc.ClientConn) *Client {
	p := newPlane(cc)
	return &Client{
		cc: cc, plane: p, sandboxes: dormousev1.NewSandboxServiceClient(cc), processes: dormousev1.NewProcessServiceClient(p),
		files: dormousev1.NewFileServiceClient(p), ports: dormousev1.NewPortServiceClient(p),
		snapshots: dormousev1.NewSnapshotServiceClient(cc), volumes: dormousev1.NewVolumeServiceClient(cc),
		nodes: dormousev1.NewNodeServiceClient(cc), images: dormousev1.NewImageServiceClient(cc),
		operations: dormousev1.NewOperationServiceClient(cc), events: dormousev1.NewEventServiceClient(cc),
		catalog: dormousev1.NewCatalogServiceClient(cc), templates: dormousev1.NewTemplateServiceClient(cc), pools: dormousev1.NewPoolServiceClient(cc),
	}
}

// Close ends the connections and what runs over them.
func (c *Client) Close() error {
	c.plane.close()
	return c.cc.Close()
}

func (c Config) transport(local bool) (credentials.TransportCredentials, error) {
	if local && c.CA == "" {
		return insecure.NewCredentials(), nil // the socket's file mode guards it
	}
	if c.CA == "" {
		return wire.TLS(&tls.Config{MinVersion: tls.VersionTLS13}), nil
	}
	t, err := pki.ClientTLS(pki.Files{CA: c.CA, Cert: c.Cert, Key: c.Key}, nil, pki.RoleCoordinator, "")
	if err != nil {
		return nil, errs.Wrap(err, errs.InvalidField, "the TLS files cannot be used: %s", err).With("field", "ca")
	}
	return wire.TLS(t), nil
}

// bearer sends the API key, over TLS or a socket of this machine only.
type bearer struct {
	key   string
	local bool
}

func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + b.key}, nil
}

func (b bearer) RequireTransportSecurity() bool { return !b.local }

// retry calls until it succeeds, or the error does not allow another attempt, or there were enough.
// Each fn is a read or carries an operation id. An attempt whose outcome is unknown is not undone by a later one that was not
// started: the outcome of all together is unknown.
func retry[T any](ctx context.Context, fn func(context.Context) (T, error)) (T, error) {
	backoff, unknown := firstBackoff, false
	for attempt := 1; ; attempt++ {
		v, err := fn(ctx)
		if err == nil || attempt == maxAttempts || !again(ctx, err) {
			return v, errs.OfAll(err, unknown)
		}
		unknown = unknown || !errs.NotStartedFor(err)
		if wait.For(ctx, backoff/2+rand.N(backoff)) != nil {
			return v, errs.OfAll(err, unknown)
		}
		backoff *= 3
	}
}

// again tells whether the same call may be made again, and whether that makes sense within moments:
// what is exhausted does not come back so soon, except a queue.
func again(ctx context.Context, err error) bool {
	var e *errs.Error
	switch {
	case !errors.As(err, &e): // not of a call: the caller's writer failed
		return false
	case ctx.Err() != nil || e.Retry == errs.Never || e.Retry == "":
		return false
	case e.IsAnswer(): // the same operation id gives it for ever; a new one is the caller's to make
		return false
	case e.Code == errs.ResourceExhausted:
		return e.Reason == errs.QueueFull
	}
	return true
}
