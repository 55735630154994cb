// Command bench measures Dormouse against bare runsc on real parts and writes the report.
//
//	bench [--out FOLDER] [--bin FOLDER] [--scale X] [--note TEXT] [--profile FOLDER] NAME...
//
// It ends with 0 when everything was measured, whether or not the targets are met.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/dormouse-run/dormouse/test/bench"
)

func main() {
	var opts bench.Options
	flag.StringVar(&opts.Out, "out", "bench", "folder of RESULTS.md")
	flag.StringVar(&opts.Bin, "bin", "", "folder of the daemons; this checkout's bin by default")
	flag.StringVar(&opts.Note, "note", "", "a remark for the report")
	flag.StringVar(&opts.Profile, "profile", "", "folder for the daemons' profiles; none by default")
	flag.Float64Var(&opts.Scale, "scale", 1, "how many repetitions, of the usual number")
	flag.Usage = func() {
		fmt.Fprintf(os.Stderr, "usage: bench [flags] NAME...   (%s)\n", strings.Join(bench.Names(), ", "))
		flag.PrintDefaults()
	}
	flag.Parse()
	if flag.NArg() == 0 {
		flag.Usage()
		os.Exit(2)
	}
	opts.Logf = func(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	for _, name := range flag.Args() {
		r, err := bench.Run(ctx, name, opts)
		if err != nil {
			fmt.Fprintf(os.Stderr, "bench: %v\n", err)
			stop()
			os.Exit(1)
		}
		fmt.Println(r)
	}
}
