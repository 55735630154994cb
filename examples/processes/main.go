// Command processes shows the life of processes in a sandbox: one that is run to its end, and one that
// somebody is at, over a checkpoint.
//
//	DORMOUSE_ADDR=... DORMOUSE_API_KEY=... go run ./examples/processes IMAGE
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/dormouse-run/dormouse/pkg/client"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: processes IMAGE")
		os.Exit(2)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	if err := show(ctx, os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "processes:", err)
		os.Exit(1)
	}
}

func show(ctx context.Context, image string) (err error) {
	cfg, err := client.FromEnvironment("")
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

	// To its end: its output, its exit code, at most ten seconds for it and all that it starts.
	_, exit, err := sandbox.Run(ctx, &dormousev1.ProcessSpec{Shell: "echo hello from $HOSTNAME; exit 3", Timeout: durationpb.New(10 * time.Second)},
		nil, &client.Output{Stdout: os.Stdout, Stderr: os.Stderr}, nil)
	if err != nil {
		return err
	}
	fmt.Println("it ended with", exit.GetCode())

	// Somebody at it: what is typed reaches it once, whatever happens to the connection, and the checkpoint
	// in between is no more than a moment.
	p, err := sandbox.Start(ctx, &dormousev1.ProcessSpec{Argv: []string{"cat"}, Stdin: true, Tags: map[string]string{"role": "echo"}}, "")
	if err != nil {
		return err
	}
	a, err := p.Attach(ctx, client.AttachOptions{Output: &client.Output{Stdout: os.Stdout}, Input: true, Hold: true})
	if err != nil {
		return err
	}
	defer a.Close()
	fmt.Fprintln(a, "before the checkpoint")
	snapshot, err := sandbox.Checkpoint(ctx, &dormousev1.CheckpointSandboxRequest{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, snapshot.Delete(context.WithoutCancel(ctx), "")) }()
	fmt.Fprintln(a, "after the checkpoint")
	a.CloseInput()
	if _, err := a.Wait(); err != nil {
		return err
	}
	all, err := sandbox.Processes(ctx, "role=echo")
	if err != nil {
		return err
	}
	fmt.Println(len(all), "process has the tag")
	return nil
}
