// Command snapshots shows a checkpoint, a restore of it and forks: the same processes, several times.
//
//	DORMOUSE_ADDR=... DORMOUSE_API_KEY=... go run ./examples/snapshots IMAGE
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: snapshots IMAGE")
		os.Exit(2)
	}
	// The deadline holds for all calls, with what they try again.
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	if err := show(ctx, os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "snapshots:", err)
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

	sandbox, err := c.CreateSandbox(ctx, &dormousev1.CreateSandboxRequest{Spec: &dormousev1.SandboxSpec{Image: image}})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sandbox.Delete(context.WithoutCancel(ctx), "")) }()
	// A process with something in its memory: it says what it was told, for ever.
	p, err := sandbox.Start(ctx, &dormousev1.ProcessSpec{Stdin: true, Shell: "read secret; while read x; do echo $secret; done"}, "")
	if err != nil {
		return err
	}
	if err := p.Write(ctx, []byte("treacle\n"), false); err != nil {
		return err
	}

	// When this returns, the snapshot is on a disk and in the catalog. The sandbox goes on.
	snapshot, err := sandbox.Checkpoint(ctx, &dormousev1.CheckpointSandboxRequest{Labels: map[string]string{"step": "1"}})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, snapshot.Delete(context.WithoutCancel(ctx), "")) }()

	restored, err := snapshot.Restore(ctx, &dormousev1.RestoreSandboxRequest{})
	if err != nil {
		return err
	}
	forks, _, err := c.Fork(ctx, &dormousev1.ForkSandboxRequest{SnapshotUid: snapshot.UID, Count: 2})
	copies := append(forks, restored)
	defer func() {
		for _, s := range copies {
			err = errors.Join(err, s.Delete(context.WithoutCancel(ctx), ""))
		}
	}()
	if err != nil {
		return err
	}
	for _, s := range copies {
		// The process has the same id in each of them; its input and output go on.
		p := s.Process(p.ID)
		if err := p.Write(ctx, []byte("tell\n"), true); err != nil {
			return err
		}
		if _, err := p.Follow(ctx, &client.Output{Stdout: os.Stdout}, true); err != nil {
			return err
		}
	}

	// What is gone is told apart from what cannot be reached.
	_, err = c.Snapshot(sandbox.UID).Restore(ctx, &dormousev1.RestoreSandboxRequest{})
	var e *errs.Error
	if !errors.As(err, &e) || e.Code != errs.NotFound {
		return fmt.Errorf("a sandbox is no snapshot: %w", err)
	}
	fmt.Println("no such snapshot:", e.Code, "retry", e.Retry)
	return nil
}
