// Command warm shows warm starts: a template that is set up once, a pool that keeps copies ready, and claims that take them.
//
//	DORMOUSE_ADDR=... DORMOUSE_API_KEY=... go run ./examples/warm IMAGE
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
		fmt.Fprintln(os.Stderr, "usage: warm IMAGE")
		os.Exit(2)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	if err := show(ctx, os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "warm:", err)
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

	// What takes long is done once, here: installing, compiling, loading.
	template, err := c.CreateTemplate(ctx, &dormousev1.CreateTemplateRequest{Spec: &dormousev1.TemplateSpec{
		Sandbox:   &dormousev1.SandboxSpec{Image: image},
		Setup:     []*dormousev1.SetupCommand{{Argv: []string{"sh", "-c", "mkdir -p /work && echo treacle >/work/well"}}},
		Readiness: &dormousev1.ReadinessCheck{Argv: []string{"grep", "-q", "treacle", "/work/well"}},
	}})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, template.Delete(context.WithoutCancel(ctx), "")) }()
	fmt.Printf("set up: %d command\n", template.Last.GetStatus().GetSetupDone())

	pool, err := c.CreatePool(ctx, &dormousev1.CreatePoolRequest{Spec: &dormousev1.PoolSpec{TemplateUid: template.UID, Size: 2}})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, pool.Delete(context.WithoutCancel(ctx), "")) }()
	if err := full(ctx, pool); err != nil {
		return err
	}
	fmt.Println("ready:", pool.Last.GetStatus().GetReady())

	for _, name := range []string{"alice", "dormouse"} {
		box, err := pool.Claim(ctx, &dormousev1.ClaimSandboxRequest{Name: name, Fallback: dormousev1.ClaimFallback_CLAIM_FALLBACK_REFUSE})
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, box.Delete(context.WithoutCancel(ctx), "")) }()
		_, exit, err := box.Run(ctx, &dormousev1.ProcessSpec{Shell: `echo "$(cat /etc/hostname) has $(cat /work/well)"`}, nil, &client.Output{Stdout: os.Stdout, Stderr: os.Stderr}, nil)
		if err != nil {
			return err
		}
		if exit.GetCode() != 0 {
			return fmt.Errorf("it ended with %d", exit.GetCode())
		}
	}

	// A pool of none is always empty: such a claim is refused, or restores the golden snapshot.
	none, err := c.CreatePool(ctx, &dormousev1.CreatePoolRequest{Spec: &dormousev1.PoolSpec{TemplateUid: template.UID}})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, none.Delete(context.WithoutCancel(ctx), "")) }()
	_, refused := none.Claim(ctx, &dormousev1.ClaimSandboxRequest{Fallback: dormousev1.ClaimFallback_CLAIM_FALLBACK_REFUSE})
	var e *errs.Error
	if errors.As(refused, &e) {
		fmt.Println("an empty pool:", e.Code, e.Reason)
	}
	return nil
}

// full waits until the pool has what it is to have.
func full(ctx context.Context, pool *client.Pool) error {
	look := time.NewTicker(50 * time.Millisecond)
	defer look.Stop()
	for {
		if err := pool.Refresh(ctx); err != nil {
			return err
		}
		if pool.Last.GetStatus().GetReady() >= pool.Last.GetSpec().GetSize() {
			return nil
		}
		select {
		case <-look.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
