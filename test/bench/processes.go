package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"time"

	"google.golang.org/grpc"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/dataplane"
	"github.com/dormouse-run/dormouse/pkg/pki"
	"github.com/dormouse-run/dormouse/pkg/wire"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/fabric"
	"github.com/dormouse-run/dormouse/test/images"
	"github.com/dormouse-run/dormouse/test/stack"
)

// benchExec compares RunProcess with `runsc exec` in the same sandbox, and with what a shell in it needs to start
// the same program, and measures a keystroke's way there and back.
func benchExec(ctx context.Context, b *bench) ([]Row, error) {
	s, err := b.createBusybox(ctx, nil)
	if err != nil {
		return nil, err
	}
	floor, err := b.newBare(s.UID)
	if err != nil {
		return nil, err
	}
	var run, bareExec, inside Sample
	for i := range b.times(60) + 5 {
		if i == 5 { // what was before is for warming up
			run, bareExec, inside = nil, nil, nil
		}
		if err := b.runTrue(ctx, s, &run); err != nil {
			return nil, err
		}
		if err := floor.execTrue(ctx, filepath.Join(b.state(), "runsc", "state"), s.UID, &bareExec); err != nil {
			return nil, err
		}
		if i%10 == 9 {
			if err := b.forkTrue(ctx, s, &inside); err != nil {
				return nil, err
			}
		}
	}
	far, err := b.echo(ctx, s)
	if err != nil {
		return nil, fmt.Errorf("through the coordinator: %w", err)
	}
	direct, err := b.onNode()
	if err != nil {
		return nil, err
	}
	near, err := b.echo(ctx, direct.Sandbox(s.UID))
	if err = errors.Join(err, direct.Close()); err != nil {
		return nil, fmt.Errorf("on the node: %w", err)
	}
	over := run.Median() - inside.Median()
	return []Row{
		ratio("Run of /bin/true through the coordinator; bare `runsc exec`", run, bareExec, 1),
		{What: "the same; bare a shell's own fork and exec of it", Product: fine(run), Bare: fine(inside), Value: over, Unit: "ms", AtMost: 3},
		{What: "echo of a line through Attach on the node", Product: fine(near), Value: near.Median(), Unit: "ms", AtMost: 1},
		{What: "the same through the coordinator", Product: fine(far), Value: far.Median(), Unit: "ms", AtMost: 2},
	}, nil
}

func fine(s Sample) string { return fmt.Sprintf("%.2f / %.2f ms", s.Median(), s.at(0.95)) }

// createBusybox makes a sandbox with programs that start fast.
func (b *bench) createBusybox(ctx context.Context, change func(*dormousev1.SandboxSpec)) (*client.Sandbox, error) {
	image, err := images.ReadLayout(images.CachedDir("busybox"))
	if err != nil {
		return nil, err
	}
	registry, err := b.cluster.Registry()
	if err != nil {
		return nil, err
	}
	digest, err := registry.Push(ctx, "bench/busybox", image)
	if err != nil {
		return nil, err
	}
	return b.create(ctx, 64*mib, func(spec *dormousev1.SandboxSpec) {
		spec.Image = registry.Ref("bench/busybox") + "@" + digest
		if change != nil {
			change(spec)
		}
	})
}

func (b *bench) runTrue(ctx context.Context, s *client.Sandbox, into *Sample) error {
	began := time.Now()
	_, exit, err := s.Run(ctx, &dormousev1.ProcessSpec{Argv: []string{"/bin/true"}}, nil, &client.Output{}, nil)
	into.add(time.Since(began))
	if err == nil && exit.GetCode() != 0 {
		err = fmt.Errorf("exit %v", exit)
	}
	return err
}

// execTrue runs the runtime's own command against the product's sandbox.
func (b *bare) execTrue(ctx context.Context, root, uid string, into *Sample) error {
	cmd := b.exec(ctx, root, uid, "/bin/true")
	began := time.Now()
	out, err := cmd.CombinedOutput()
	into.add(time.Since(began))
	if err != nil {
		return fmt.Errorf("runsc exec: %w: %s", err, out)
	}
	return nil
}

// forkTrue adds what one of many starts by a shell takes.
func (b *bench) forkTrue(ctx context.Context, s *client.Sandbox, into *Sample) error {
	const n = 40
	took := [2]time.Duration{}
	for i, count := range []int{1, 1 + n} {
		began := time.Now()
		line := fmt.Sprintf("i=0; while [ $i -lt %d ]; do /bin/true; i=$((i+1)); done", count)
		if _, _, err := s.Run(ctx, &dormousev1.ProcessSpec{Shell: line}, nil, &client.Output{}, nil); err != nil {
			return err
		}
		took[i] = time.Since(began)
	}
	into.add((took[1] - took[0]) / n)
	return nil
}

// echo times lines to a process that says them again.
func (b *bench) echo(ctx context.Context, s *client.Sandbox) (Sample, error) {
	p, err := s.Start(ctx, &dormousev1.ProcessSpec{Argv: []string{"cat"}, Stdin: true}, "")
	if err != nil {
		return nil, err
	}
	r, w := io.Pipe()
	a, err := p.Attach(ctx, client.AttachOptions{Output: &client.Output{Stdout: w}, Input: true, Hold: true})
	if err != nil {
		return nil, err
	}
	defer a.Close()
	defer func() { _ = r.Close() }()
	var took Sample
	line := []byte("x\n")
	for i := range b.times(1000) + 20 {
		began := time.Now()
		if _, err := a.Write(line); err != nil {
			return nil, err
		}
		if _, err := io.ReadFull(r, line); err != nil {
			return nil, err
		}
		if i >= 20 {
			took.add(time.Since(began))
		}
	}
	if got := string(line); got != "x\n" {
		return nil, fmt.Errorf("cat said %q", got)
	}
	a.CloseInput()
	_, err = a.Wait()
	return took, err
}

// onNode talks to the node itself, as a coordinator would.
func (b *bench) onNode() (*client.Client, error) {
	files := b.cluster.CoordinatorTLS()
	cfg, err := pki.ClientTLS(files, nil, pki.RoleNode, stack.NodeName(1))
	if err != nil {
		return nil, err
	}
	dial := fabric.Dialer(b.cluster.HubNetns())
	cc, err := grpc.NewClient("passthrough:///"+b.cluster.AgentAddress(1), append(wire.DialOptions(),
		grpc.WithTransportCredentials(wire.TLS(cfg)), grpc.WithPerRPCCredentials(inNameOf(stack.Tenant)),
		grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) { return dial(ctx, "tcp", addr) }))...)
	if err != nil {
		return nil, err
	}
	return client.New(cc), nil
}

// inNameOf says whose sandboxes are meant, as a coordinator does.
type inNameOf string

func (t inNameOf) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{dataplane.TenantKey: string(t)}, nil
}
func (inNameOf) RequireTransportSecurity() bool { return true }
