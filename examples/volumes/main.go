// Command volumes shows data that outlives sandboxes: a volume that one sandbox writes, and a copy that many read.
//
//	DORMOUSE_ADDR=... DORMOUSE_API_KEY=... go run ./examples/volumes IMAGE
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
		fmt.Fprintln(os.Stderr, "usage: volumes IMAGE")
		os.Exit(2)
	}
	// The deadline holds for all calls, with what they try again.
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	if err := show(ctx, os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "volumes:", err)
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

	volume, err := c.CreateVolume(ctx, &dormousev1.CreateVolumeRequest{Name: "results"})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, volume.Delete(context.WithoutCancel(ctx), "")) }()
	mounted := func(v *client.Volume, readOnly bool) *dormousev1.CreateSandboxRequest {
		return &dormousev1.CreateSandboxRequest{Spec: &dormousev1.SandboxSpec{Image: image,
			Volumes: []*dormousev1.VolumeMount{{VolumeUid: v.UID, Path: "/data", ReadOnly: readOnly}}}}
	}
	writer, err := c.CreateSandbox(ctx, mounted(volume, false))
	if err != nil {
		return err
	}
	_, exit, err := writer.Run(ctx, &dormousev1.ProcessSpec{Shell: "echo 42 > /data/answer"}, nil, &client.Output{Stderr: os.Stderr}, nil)
	if err != nil {
		return errors.Join(err, writer.Delete(context.WithoutCancel(ctx), ""))
	}
	fmt.Println("the writer ended with", exit.GetCode())

	// A volume is attached for writing to one sandbox at a time. A conflict names who has it.
	_, err = c.CreateSandbox(ctx, mounted(volume, false))
	var e *errs.Error
	if !errors.As(err, &e) || e.Reason != errs.AlreadyAttached {
		return errors.Join(fmt.Errorf("a second writer: %w", err), writer.Delete(context.WithoutCancel(ctx), ""))
	}
	fmt.Println("a second writer:", e.Reason, "by the first:", e.Details["holder"] == writer.UID)
	if err := writer.Delete(ctx, ""); err != nil {
		return err
	}

	// A copy for many readers.
	shared, err := c.CreateVolume(ctx, &dormousev1.CreateVolumeRequest{Spec: &dormousev1.VolumeSpec{
		Access: dormousev1.VolumeAccess_VOLUME_ACCESS_SHARED_READ_ONLY, SourceVolumeUid: volume.UID,
	}})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, shared.Delete(context.WithoutCancel(ctx), "")) }()
	reader, err := c.CreateSandbox(ctx, mounted(shared, true))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, reader.Delete(context.WithoutCancel(ctx), "")) }()
	_, _, err = reader.Run(ctx, &dormousev1.ProcessSpec{Argv: []string{"cat", "/data/answer"}}, nil, &client.Output{Stdout: os.Stdout}, nil)
	return err
}
