package crash

import (
	"context"
	"net"
	"strings"

	"google.golang.org/protobuf/types/known/fieldmaskpb"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/cluster"
	"github.com/dormouse-run/dormouse/test/fabric"
)

// outbound is the spec of a sandbox that has an address and listens on it.
func (w *world) outbound() *dormousev1.SandboxSpec {
	spec := w.spec()
	spec.Network = dormousev1.NetworkMode_NETWORK_MODE_OUTBOUND
	spec.Command = []string{"sh", "-c", "(while true; do nc -l -p 7 -e cat; done) & " + subject}
	return spec
}

// connects checks that a sandbox answers at its address, from the node's side.
func (w *world) connects(s *client.Sandbox) {
	w.Helper()
	out, err := cluster.Exec(w.ctx, s, "sh", "-c", `ip -4 -o addr show eth0 | sed 's/.* inet \([0-9.]*\).*/\1/'`)
	w.ok(err)
	address := strings.TrimSpace(string(out)) + ":7"
	w.await(address+" answers", func() error {
		c, err := fabric.Dialer(w.NodeNetns(1))(w.ctx, "tcp4", address)
		if err != nil {
			return err
		}
		return c.Close()
	})
}

func createOutbound(w *world) operation {
	var made *client.Sandbox
	req := &dormousev1.CreateSandboxRequest{OperationId: uid.New(), Spec: w.outbound()}
	return operation{
		id:    req.OperationId,
		run:   func(ctx context.Context) (err error) { made, err = w.api.CreateSandbox(ctx, req); return err },
		check: func() { w.answers(made); w.connects(made) },
		clean: func() { w.drop(made) },
	}
}

func restoreOutbound(w *world) operation {
	source, err := w.api.CreateSandbox(w.ctx, &dormousev1.CreateSandboxRequest{Spec: w.outbound()})
	w.ok(err)
	w.connects(source)
	snap, err := source.Checkpoint(w.ctx, &dormousev1.CheckpointSandboxRequest{})
	w.ok(err)
	var made *client.Sandbox
	req := &dormousev1.RestoreSandboxRequest{OperationId: uid.New()}
	return operation{
		id:    req.OperationId,
		run:   func(ctx context.Context) (err error) { made, err = snap.Restore(ctx, req); return err },
		check: func() { w.answers(made); w.connects(made); w.connects(source) },
		clean: func() {
			w.drop(source, made)
			w.ok(gone(snap.Delete(w.ctx, "")))
		},
	}
}

// visits tells whether a sandbox reaches the registry, which stands for the rest of the world.
func (w *world) visits(s *client.Sandbox) bool {
	w.Helper()
	host, port, err := net.SplitHostPort(w.RegistryHost())
	w.ok(err)
	out, err := cluster.Exec(w.ctx, s, "sh", "-c", `printf 'GET / HTTP/1.0\r\n\r\n' | nc -w 20 "$1" "$2" 2>&1 || true`, "sh", host, port)
	w.ok(err)
	return strings.Contains(string(out), "HTTP/1")
}

// updateEgress closes what a sandbox could reach.
func updateEgress(w *world) operation { return changeEgress(w, func(*client.Sandbox) {}) }

// updateEgressHibernated is one that is on the disk meanwhile.
func updateEgressHibernated(w *world) operation {
	return changeEgress(w, func(s *client.Sandbox) { w.ok(s.Hibernate(w.ctx, "")) })
}

func changeEgress(w *world, before func(*client.Sandbox)) operation {
	s, err := w.api.CreateSandbox(w.ctx, &dormousev1.CreateSandboxRequest{Spec: w.outbound()})
	w.ok(err)
	if !w.visits(s) {
		w.Fatal("it reaches nothing")
	}
	before(s)
	id := uid.New()
	return operation{
		id: id,
		run: func(ctx context.Context) error {
			return s.Update(ctx, &dormousev1.UpdateSandboxRequest{OperationId: id, UpdateMask: &fieldmaskpb.FieldMask{Paths: []string{"egress"}},
				Egress: &dormousev1.EgressPolicy{DefaultAction: dormousev1.EgressAction_EGRESS_ACTION_DENY}})
		},
		check: func() {
			w.ok(s.Resume(w.ctx, ""))
			if w.visits(s) {
				w.Fatal("it reaches what it is not to")
			}
			w.ok(s.Refresh(w.ctx))
			if has, saw := s.Last.GetMeta().GetGeneration(), s.Last.GetStatus().GetObservedGeneration(); has != 2 || saw != 2 {
				w.Fatalf("its generation is %d, observed is %d", has, saw)
			}
			w.connects(s)
		},
		clean: func() { w.drop(s) },
	}
}

func removeOutbound(w *world) operation {
	s, err := w.api.CreateSandbox(w.ctx, &dormousev1.CreateSandboxRequest{Spec: w.outbound()})
	w.ok(err)
	id := uid.New()
	return operation{id: id, run: func(ctx context.Context) error { return s.Delete(ctx, id) }, check: func() {}, clean: func() {}}
}
