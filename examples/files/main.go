// Command files shows how files get into a sandbox and out of it.
//
//	DORMOUSE_ADDR=... DORMOUSE_API_KEY=... go run ./examples/files IMAGE
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: files IMAGE")
		os.Exit(2)
	}
	// The deadline holds for all calls, with what they try again.
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	if err := show(ctx, os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "files:", err)
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
	files := sandbox.Files()

	// In: complete or not at all, its digest checked, over lost connections.
	done, err := files.Write(ctx, "/work/in/poem.txt", strings.NewReader("twinkle, twinkle, little bat\n"), client.WriteOptions{Parents: true})
	if err != nil {
		return err
	}
	fmt.Println("written:", done.GetInfo().GetSizeBytes(), "bytes")

	// Out: an io.Reader like others.
	r, err := files.Open(ctx, "/work/in/poem.txt")
	if err != nil {
		return err
	}
	defer r.Close()
	if _, err := io.Copy(os.Stdout, r); err != nil {
		return err
	}

	// Whole trees are tar archives.
	var tree bytes.Buffer
	if _, err := files.ReadArchive(ctx, "/work/in", ".", &tree); err != nil {
		return err
	}
	if _, err := files.WriteArchive(ctx, "/work/out", &tree, client.ArchiveOptions{Parents: true}); err != nil {
		return err
	}
	if err := files.Move(ctx, "/work/out/poem.txt", "/work/out/bat.txt", false); err != nil {
		return err
	}
	err = files.List(ctx, "/work/out", func(info *dormousev1.FileInfo) error {
		_, err := fmt.Println("there is", info.GetName())
		return err
	})
	if err != nil {
		return err
	}

	// What goes wrong inside is told by reason and path.
	_, err = files.Stat(ctx, "/work/out/poem.txt")
	var e *errs.Error
	if !errors.As(err, &e) || e.Reason != errs.FileNotFound {
		return fmt.Errorf("looking for what was moved: %w", err)
	}
	fmt.Println("moved away:", e.Reason, e.Details["path"])
	return nil
}
