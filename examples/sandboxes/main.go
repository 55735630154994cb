// Command sandboxes shows the life of a sandbox: made, found by its name, changed, put to sleep and woken.
//
//	DORMOUSE_ADDR=... DORMOUSE_API_KEY=... go run ./examples/sandboxes IMAGE
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/fieldmaskpb"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: sandboxes IMAGE")
		os.Exit(2)
	}
	// The deadline holds for all calls, with what they try again.
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	if err := show(ctx, os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "sandboxes:", err)
		os.Exit(1)
	}
}

func show(ctx context.Context, image string) (err error) {
	cfg, err := client.FromEnvironment("") // the context of the command line, or DORMOUSE_ADDR and its like
	if err != nil {
		return err
	}
	c, err := client.Dial(cfg)
	if err != nil {
		return err
	}
	defer c.Close()

	sandbox, err := c.CreateSandbox(ctx, &dormousev1.CreateSandboxRequest{
		Name: "example", Labels: map[string]string{"team": "blue"},
		Spec: &dormousev1.SandboxSpec{Image: image, Lifetime: durationpb.New(time.Hour)},
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sandbox.Delete(context.WithoutCancel(ctx), "")) }()
	server, err := sandbox.Start(ctx, &dormousev1.ProcessSpec{Argv: []string{"sleep", "3600"}}, "")
	if err != nil {
		return err
	}

	// A name is looked up once; the handle has the uid, which is never another sandbox's.
	found, err := c.FindSandbox(ctx, "example")
	if err != nil {
		return err
	}
	fmt.Println("found by its name:", found.UID == sandbox.UID)

	// A change of what was read. Whoever comes second with the same revision is told so.
	change := &dormousev1.UpdateSandboxRequest{IfRevision: found.Last.GetMeta().GetRevision(),
		UpdateMask: &fieldmaskpb.FieldMask{Paths: []string{"labels"}}, Labels: map[string]string{"team": "red"}}
	if err := found.Update(ctx, change); err != nil {
		return err
	}
	err = sandbox.Update(ctx, change)
	var e *errs.Error
	if !errors.As(err, &e) || e.Reason != errs.StaleRevision {
		return fmt.Errorf("a second change: %w", err)
	}
	fmt.Println("the second change:", e.Code, e.Reason)

	// Asleep on the disk it takes no memory; woken, its processes go on.
	if err := sandbox.Hibernate(ctx, ""); err != nil {
		return err
	}
	fmt.Println("hibernated:", sandbox.Last.GetStatus().GetPhase())
	if err := sandbox.Resume(ctx, ""); err != nil {
		return err
	}
	if err := server.Refresh(ctx); err != nil {
		return err
	}
	fmt.Println("still running:", server.Last.GetExit() == nil)

	// A deadline ends the call, not what was called for.
	short, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
	defer cancel()
	if _, err = server.Wait(short); !errors.As(err, &e) {
		return fmt.Errorf("waiting for a server: %w", err)
	}
	fmt.Println("not waited for:", e.Code)
	if err := server.Signal(ctx, 15, true); err != nil {
		return err
	}
	exit, err := server.Wait(ctx)
	if err != nil {
		return err
	}
	fmt.Println("ended by signal", exit.GetSignal())
	return nil
}
