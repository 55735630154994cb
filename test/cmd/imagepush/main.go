// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

// Command imagepush uploads an image to a registry and prints its digest.
//
//	imagepush [flags] LAYOUT-or-TAR HOST:PORT/REPOSITORY[:TAG]
//
// A folder is read as an OCI layout with one image, a file as the tar of a root
// filesystem that becomes an image of one layer.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/dormouse-run/dormouse/test/fabric"
	"github.com/dormouse-run/dormouse/test/images"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "imagepush:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("imagepush", flag.ExitOnError)
	ca := flags.String("ca", "", "PEM `file` with the certificate that signs the registry's")
	user := flags.String("user", "", "user `name` for basic authentication")
	passwordFile := flags.String("password-file", "", "`file` with the password; never on the command line, where every user sees it")
	netns := flags.String("netns", "", "`path` of the network namespace to push from")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() != 2 {
		return fmt.Errorf("want two arguments, LAYOUT-or-TAR and HOST:PORT/REPOSITORY[:TAG]; got %d", flags.NArg())
	}
	host, repository, ok := strings.Cut(flags.Arg(1), "/")
	if !ok {
		return fmt.Errorf("%q names no registry: want HOST:PORT/REPOSITORY[:TAG]", flags.Arg(1))
	}
	to := images.Registry{Host: host, User: *user}
	if *ca != "" {
		pem, err := os.ReadFile(*ca)
		if err != nil {
			return err
		}
		to.CA = pem
	}
	if *passwordFile != "" {
		secret, err := os.ReadFile(*passwordFile)
		if err != nil {
			return err
		}
		to.Password = strings.TrimRight(string(secret), "\n")
	}
	if *netns != "" {
		to.Dial = fabric.Dialer(*netns)
	}
	image, err := read(flags.Arg(0))
	if err != nil {
		return err
	}
	digest, err := to.Push(ctx, repository, image)
	if err != nil {
		return err
	}
	fmt.Println(digest)
	return nil
}

func read(path string) (v1.Image, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if info.IsDir() {
		return images.ReadLayout(path)
	}
	layer, err := images.LayerFromFile(path)
	if err != nil {
		return nil, err
	}
	return images.Build(images.Config{}, layer)
}
