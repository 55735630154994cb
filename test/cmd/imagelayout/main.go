// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

// Command imagelayout makes an OCI layout with one image out of the tar of a
// root filesystem.
//
//	imagelayout [-env NAME=VALUE]... ROOT.tar DIR [COMMAND...]
package main

import (
	"flag"
	"fmt"
	"os"

	"github.com/dormouse-run/dormouse/test/images"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "imagelayout:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	var cfg images.Config
	flags := flag.NewFlagSet("imagelayout", flag.ExitOnError)
	flags.Func("env", "a variable of the image's environment, `NAME=VALUE`", func(v string) error {
		cfg.Env = append(cfg.Env, v)
		return nil
	})
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() < 2 {
		return fmt.Errorf("want ROOT.tar and DIR; got %d arguments", flags.NArg())
	}
	layer, err := images.LayerFromFile(flags.Arg(0))
	if err != nil {
		return err
	}
	cfg.Cmd = flags.Args()[2:]
	image, err := images.Build(cfg, layer)
	if err != nil {
		return err
	}
	return images.WriteLayout(flags.Arg(1), image)
}
