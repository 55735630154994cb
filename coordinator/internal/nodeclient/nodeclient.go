// Package nodeclient is how the coordinator asks nodes to do things: one gRPC connection to each
// agentd, over mTLS, where the server must be that very node.
//
// Commands go over a Pool, calls of the data plane over Streams. Every command carries the coordinator's epoch and the epoch of the node's session. A call lives no
// longer than the session that it was made under: when the session ends, the call ends with
// REPLY_LOST (outcome unknown), so that a node that is gone without closing its connection blocks
// nobody. A node without a session is NODE_AWAY, and nothing was sent.
package nodeclient

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/dormouse-run/dormouse/coordinator/internal/operations"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
	"github.com/dormouse-run/dormouse/pkg/snapshot"
	"github.com/dormouse-run/dormouse/pkg/wire"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// Session is a node's session in force.
type Session struct {
	Node        string
	Address     string // host:port, or unix:/path
	Epoch       fence.Epoch
	Coordinator fence.Epoch
	// Context ends with the session.
	Context context.Context //nolint:containedctx // the session's life, not a call's
}

// Directory knows the sessions in force.
type Directory interface {
	Session(node string) (Session, bool)
}

// TLS gives the client configuration that accepts only the node of that name.
type TLS func(node string) *tls.Config

// maxMessage bounds what a node may answer: an inventory of thousands of sandboxes.
const maxMessage = 64 << 20

// Pool keeps the connections. Close it.
type Pool struct {
	directory Directory
	tls       TLS

	mu     sync.Mutex
	closed bool
	conns  map[string]*conn
}

type conn struct {
	address string
	cc      *grpc.ClientConn
}

var _ operations.Agents = (*Pool)(nil)

// New makes an empty pool.
func New(d Directory, t TLS) *Pool { return &Pool{directory: d, tls: t, conns: make(map[string]*conn)} }

// Close ends all connections.
func (p *Pool) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	for _, c := range p.conns {
		_ = c.cc.Close() // its only error is that it was closed already
	}
	p.conns = nil
}

// away is NODE_AWAY.
func away(node string) error {
	return errs.New(errs.NodeAway, "node %s has no session with the coordinator; wait until it is back", node).With("node", node)
}

// dial gives the connection to the node of the session. Connections are made on first use, and
// made anew when the node has another address.
func (p *Pool) dial(s Session) (*grpc.ClientConn, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, errs.New(errs.ShuttingDown, "the coordinator is stopping")
	}
	if c := p.conns[s.Node]; c != nil {
		if c.address == s.Address {
			return c.cc, nil
		}
		_ = c.cc.Close() // its only error is that it was closed already
		delete(p.conns, s.Node)
	}
	target := s.Address
	if !strings.HasPrefix(target, "unix:") {
		target = "passthrough:///" + target
	}
	opts := append(wire.DialOptions(),
		grpc.WithTransportCredentials(wire.TLS(p.tls(s.Node))),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage), grpc.MaxCallSendMsgSize(maxMessage)),
		grpc.WithDisableRetry())
	cc, err := grpc.NewClient(target, opts...)
	if err != nil {
		return nil, errs.Wrap(err, errs.NodeAway, "node %s told an address that cannot be used", s.Node).With("node", s.Node)
	}
	p.conns[s.Node] = &conn{s.Address, cc}
	return cc, nil
}

// call runs f against the node, no longer than its session.
func (p *Pool) call(ctx context.Context, node string, f func(context.Context, Session, *grpc.ClientConn) error) (fence.Epoch, error) {
	s, ok := p.directory.Session(node)
	if !ok {
		return 0, away(node)
	}
	cc, err := p.dial(s)
	if err != nil {
		return 0, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.Context, cancel)()
	if err = f(ctx, s, cc); err != nil && s.Context.Err() != nil {
		err = errs.Wrap(err, errs.ReplyLost, "the session of node %s ended during the call", node).With("node", node)
	}
	return s.Epoch, err
}

func (s Session) command(c operations.Command) *nodev1.Command {
	return &nodev1.Command{CoordinatorEpoch: uint64(s.Coordinator), SessionEpoch: uint64(s.Epoch), CommandId: c.ID,
		Tenant: c.Tenant, OperationId: c.OperationID, RequestId: c.RequestID}
}

// observed is an answer that tells what the node knows of the sandbox.
type observed interface {
	GetSandbox() *nodev1.SandboxObservation
}

// observe makes a call with such an answer.
func (p *Pool) observe(ctx context.Context, node string, c operations.Command, call func(context.Context, nodev1.AgentServiceClient, *nodev1.Command) (observed, error)) (o operations.Observation, err error) {
	epoch, err := p.call(ctx, node, func(ctx context.Context, s Session, cc *grpc.ClientConn) error {
		resp, err := call(ctx, nodev1.NewAgentServiceClient(cc), s.command(c))
		if err != nil {
			return err
		}
		o, err = Observation(resp.GetSandbox())
		return err
	})
	o.Session = epoch
	return o, err
}

// StartSandbox implements operations.Agents, as the following do.
func (p *Pool) StartSandbox(ctx context.Context, node string, c operations.Command, sb *records.Sandbox, secretEnv map[string]string) (operations.Observation, error) {
	return p.observe(ctx, node, c, func(ctx context.Context, agent nodev1.AgentServiceClient, cmd *nodev1.Command) (observed, error) {
		return agent.StartSandbox(ctx, &nodev1.StartSandboxRequest{Command: cmd,
			Uid: sb.UID, Name: sb.Name, Generation: sb.Generation, Spec: wire.SpecToProto(sb.Spec), SecretEnv: secretEnv})
	})
}

// RestoreSandbox makes a sandbox from the snapshot in sb.SourceSnapshot. A member of a pool stands still from the beginning.
func (p *Pool) RestoreSandbox(ctx context.Context, node string, c operations.Command, sb *records.Sandbox) (operations.Observation, error) {
	req := &nodev1.RestoreSandboxRequest{Uid: sb.UID, Name: sb.Name, Generation: sb.Generation, SnapshotUid: sb.SourceSnapshot, Hostname: sb.Spec.Hostname, Parked: sb.Pool != "",
		Network: &nodev1.RestoreNetwork{Egress: wire.EgressToProto(sb.Spec.Egress)}}
	for _, m := range sb.Spec.Volumes {
		req.Volumes = append(req.Volumes, &nodev1.RestoreVolume{Path: m.Path, VolumeUid: m.VolumeUID, ReadOnly: m.ReadOnly})
	}
	return p.observe(ctx, node, c, func(ctx context.Context, agent nodev1.AgentServiceClient, cmd *nodev1.Command) (observed, error) {
		req.Command = cmd
		return agent.RestoreSandbox(ctx, req)
	})
}

// UpdateSandbox returns when what the record says of the sandbox's egress is in force.
func (p *Pool) UpdateSandbox(ctx context.Context, node string, c operations.Command, sb *records.Sandbox) (operations.Observation, error) {
	return p.observe(ctx, node, c, func(ctx context.Context, agent nodev1.AgentServiceClient, cmd *nodev1.Command) (observed, error) {
		return agent.UpdateSandbox(ctx, &nodev1.UpdateSandboxRequest{Command: cmd, Uid: sb.UID, Generation: sb.NodeGeneration, Egress: wire.EgressToProto(sb.Spec.Egress)})
	})
}

// DeleteSandbox returns when its absence was observed.
func (p *Pool) DeleteSandbox(ctx context.Context, node string, c operations.Command, uid string) (fence.Epoch, error) {
	return p.call(ctx, node, func(ctx context.Context, s Session, cc *grpc.ClientConn) error {
		_, err := nodev1.NewAgentServiceClient(cc).DeleteSandbox(ctx, &nodev1.DeleteSandboxRequest{Command: s.command(c), Uid: uid})
		return err
	})
}

// CheckpointSandbox returns when the artefact is in place.
func (p *Pool) CheckpointSandbox(ctx context.Context, node string, c operations.Command, uid, snapshotUID string) (st snapshot.Status, session fence.Epoch, err error) {
	session, err = p.call(ctx, node, func(ctx context.Context, s Session, cc *grpc.ClientConn) error {
		resp, err := nodev1.NewAgentServiceClient(cc).CheckpointSandbox(ctx, &nodev1.CheckpointSandboxRequest{Command: s.command(c), Uid: uid, SnapshotUid: snapshotUID})
		if err != nil {
			return err
		}
		if got := resp.GetSnapshot().GetUid(); got != snapshotUID {
			return errs.New(errs.InternalError, "node %s answered with snapshot %q instead of %s", node, got, snapshotUID)
		}
		st = wire.SnapshotObservationFromProto(resp.GetSnapshot()).Status
		return nil
	})
	return st, session, err
}

func unusedFor(d time.Duration) *durationpb.Duration {
	if d == 0 {
		return nil
	}
	return durationpb.New(d)
}

// PauseSandbox returns when the sandbox stands still.
func (p *Pool) PauseSandbox(ctx context.Context, node string, c operations.Command, uid string, ifUnusedFor time.Duration) (operations.Observation, error) {
	return p.observe(ctx, node, c, func(ctx context.Context, agent nodev1.AgentServiceClient, cmd *nodev1.Command) (observed, error) {
		return agent.PauseSandbox(ctx, &nodev1.PauseSandboxRequest{Command: cmd, Uid: uid, IfUnusedFor: unusedFor(ifUnusedFor)})
	})
}

// ResumeSandbox returns when the sandbox runs.
func (p *Pool) ResumeSandbox(ctx context.Context, node string, c operations.Command, uid string) (operations.Observation, error) {
	return p.observe(ctx, node, c, func(ctx context.Context, agent nodev1.AgentServiceClient, cmd *nodev1.Command) (observed, error) {
		return agent.ResumeSandbox(ctx, &nodev1.ResumeSandboxRequest{Command: cmd, Uid: uid})
	})
}

// ClaimSandbox returns when a member of a pool runs as the claimer's sandbox.
func (p *Pool) ClaimSandbox(ctx context.Context, node string, c operations.Command, sb *records.Sandbox, env map[string]string) (operations.Observation, error) {
	return p.observe(ctx, node, c, func(ctx context.Context, agent nodev1.AgentServiceClient, cmd *nodev1.Command) (observed, error) {
		return agent.ClaimSandbox(ctx, &nodev1.ClaimSandboxRequest{Command: cmd, Uid: sb.UID, Name: sb.Name, Generation: sb.Generation, Hostname: sb.Spec.Hostname, Env: env})
	})
}

// HibernateSandbox returns when the sandbox is on the node's disk alone.
func (p *Pool) HibernateSandbox(ctx context.Context, node string, c operations.Command, uid string, ifUnusedFor time.Duration) (operations.Observation, error) {
	return p.observe(ctx, node, c, func(ctx context.Context, agent nodev1.AgentServiceClient, cmd *nodev1.Command) (observed, error) {
		return agent.HibernateSandbox(ctx, &nodev1.HibernateSandboxRequest{Command: cmd, Uid: uid, IfUnusedFor: unusedFor(ifUnusedFor)})
	})
}

// DeleteSnapshot returns when the artefact's absence was observed.
func (p *Pool) DeleteSnapshot(ctx context.Context, node string, c operations.Command, uid string) (fence.Epoch, error) {
	return p.call(ctx, node, func(ctx context.Context, s Session, cc *grpc.ClientConn) error {
		_, err := nodev1.NewAgentServiceClient(cc).DeleteSnapshot(ctx, &nodev1.DeleteSnapshotRequest{Command: s.command(c), Uid: uid})
		return err
	})
}

// CreateVolume makes a volume, or copies one.
func (p *Pool) CreateVolume(ctx context.Context, node string, c operations.Command, uid string, sizeLimit int64, sourceUID, freezeSandboxUID string) (usage int64, session fence.Epoch, err error) {
	session, err = p.call(ctx, node, func(ctx context.Context, s Session, cc *grpc.ClientConn) error {
		resp, err := nodev1.NewAgentServiceClient(cc).CreateVolume(ctx, &nodev1.CreateVolumeRequest{Command: s.command(c), Uid: uid,
			SizeLimitBytes: sizeLimit, SourceUid: sourceUID, FreezeSandboxUid: freezeSandboxUID})
		usage = resp.GetVolume().GetUsageBytes()
		return err
	})
	return usage, session, err
}

// DeleteVolume returns when its absence was observed.
func (p *Pool) DeleteVolume(ctx context.Context, node string, c operations.Command, uid string) (fence.Epoch, error) {
	return p.call(ctx, node, func(ctx context.Context, s Session, cc *grpc.ClientConn) error {
		_, err := nodev1.NewAgentServiceClient(cc).DeleteVolume(ctx, &nodev1.DeleteVolumeRequest{Command: s.command(c), Uid: uid})
		return err
	})
}

// Inventory asks for a page of what the node holds, after the one whose Next is given.
func (p *Pool) Inventory(ctx context.Context, node, after string) (inv *nodev1.GetInventoryResponse, session fence.Epoch, err error) {
	session, err = p.call(ctx, node, func(ctx context.Context, _ Session, cc *grpc.ClientConn) error {
		inv, err = nodev1.NewAgentServiceClient(cc).GetInventory(ctx, &nodev1.GetInventoryRequest{After: after})
		return err
	})
	return inv, session, err
}

// Journal asks for a page of what the node keeps of the catalog.
func (p *Pool) Journal(ctx context.Context, node, after string) (page *nodev1.ReadJournalResponse, err error) {
	_, err = p.call(ctx, node, func(ctx context.Context, _ Session, cc *grpc.ClientConn) error {
		page, err = nodev1.NewAgentServiceClient(cc).ReadJournal(ctx, &nodev1.ReadJournalRequest{After: after})
		return err
	})
	return page, err
}

// Trace asks for what the node keeps of one record of the catalog; nil is nothing.
func (p *Pool) Trace(ctx context.Context, node, key string) (*nodev1.JournalEntry, error) {
	var page *nodev1.ReadJournalResponse
	_, err := p.call(ctx, node, func(ctx context.Context, _ Session, cc *grpc.ClientConn) (err error) {
		page, err = nodev1.NewAgentServiceClient(cc).ReadJournal(ctx, &nodev1.ReadJournalRequest{Key: key})
		return err
	})
	if err != nil || len(page.GetEntries()) == 0 {
		return nil, err
	}
	return page.GetEntries()[0], nil
}

// PullImage brings an image to the node and tells of the progress.
func (p *Pool) PullImage(ctx context.Context, node string, c operations.Command, reference string, progress func(*dormousev1.PullProgress) error) (img *dormousev1.Image, err error) {
	_, err = p.call(ctx, node, func(ctx context.Context, s Session, cc *grpc.ClientConn) error {
		stream, err := nodev1.NewAgentServiceClient(cc).PullImage(ctx, &nodev1.PullImageRequest{Command: s.command(c), Reference: reference})
		if err != nil {
			return err
		}
		for img == nil {
			msg, err := stream.Recv()
			if err != nil {
				if errors.Is(err, io.EOF) {
					err = errs.New(errs.ReplyLost, "node %s ended the pull without an image; pull again", node).With("node", node)
				}
				return err
			}
			if pr := msg.GetProgress(); pr != nil {
				pr.Node = node
				if err := progress(pr); err != nil {
					return err
				}
			}
			img = msg.GetImage()
		}
		return nil
	})
	return img, err
}

// RemoveImage removes an image that nothing on the node holds.
func (p *Pool) RemoveImage(ctx context.Context, node string, c operations.Command, digest string) error {
	_, err := p.call(ctx, node, func(ctx context.Context, s Session, cc *grpc.ClientConn) error {
		_, err := nodev1.NewAgentServiceClient(cc).RemoveImage(ctx, &nodev1.RemoveImageRequest{Command: s.command(c), Digest: digest})
		return err
	})
	return err
}

// Observation reads what a node tells of a sandbox.
func Observation(p *nodev1.SandboxObservation) (operations.Observation, error) {
	uid, tenant, st, err := wire.SandboxObservationFromProto(p)
	if err != nil {
		return operations.Observation{}, err
	}
	return operations.Observation{UID: uid, Tenant: tenant, Phase: st.Phase, ObservedGeneration: st.ObservedGeneration,
		ImageDigest: st.ImageDigest, ErofsDigest: st.ErofsDigest, RuntimeBundle: st.RuntimeBundle, RestoredFrom: st.RestoredFrom,
		StartTime: st.StartTime, ExitCode: st.ExitCode, Reason: st.Reason, Message: st.Message, Number: st.Observation,
		StartQueued: st.StartQueued, StartService: st.StartService}, nil
}
