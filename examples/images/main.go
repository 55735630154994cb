// Command images brings an image to the nodes before sandboxes want it, and looks at what they have.
//
//	DORMOUSE_ADDR=... DORMOUSE_API_KEY=... go run ./examples/images IMAGE
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
		fmt.Fprintln(os.Stderr, "usage: images IMAGE")
		os.Exit(2)
	}
	// The deadline holds for all calls, with what they try again.
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	if err := show(ctx, os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "images:", err)
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

	// One conversion a node, however many ask; the progress says which node is how far.
	pulled, err := c.PullImage(ctx, image, "", func(p *dormousev1.PullProgress) {
		fmt.Fprintf(os.Stderr, "%s: %s\n", p.GetNode(), p.GetStep())
	})
	if err != nil {
		return err
	}
	fmt.Println("pulled", pulled.Last.GetLayers(), "layers as one file")

	// The digest is what counts from here on: a tag may be moved meanwhile.
	sandbox, err := c.CreateSandbox(ctx, &dormousev1.CreateSandboxRequest{Spec: &dormousev1.SandboxSpec{Image: image}})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sandbox.Delete(context.WithoutCancel(ctx), "")) }()
	fmt.Println("the sandbox has that image:", sandbox.Last.GetStatus().GetImageDigest() == pulled.Digest)

	// Every error has a reason to decide by, and facts for programs.
	_, err = c.PullImage(ctx, "127.0.0.1:1/no/registry:there", "", nil)
	var e *errs.Error
	if !errors.As(err, &e) {
		return fmt.Errorf("a pull from nowhere: %w", err)
	}
	fmt.Println("from nowhere:", e.Code, e.Reason)
	return nil
}
