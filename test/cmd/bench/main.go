// Command bench measures Dormouse against bare runsc on real parts and writes the report.
//
//	bench [--out FOLDER] [--bin FOLDER] [--scale X] [--note TEXT] [--profile FOLDER] NAME...
//	bench list
//	bench compare --ref COMMIT [--rounds N] [--scale X] NAME...
//
// It ends with 0 when everything was measured, whether or not the targets are met; compare ends with 1 where this checkout is worse than
// the commit, beyond noise.
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
	switch {
	case len(os.Args) > 1 && os.Args[1] == "compare":
		compare(os.Args[2:])
		return
	case len(os.Args) == 2 && os.Args[1] == "list":
		fmt.Println(strings.Join(bench.Names(), "\n"))
		return
	}
	var opts bench.Options
	flag.StringVar(&opts.Out, "out", "bench", "folder of RESULTS.md")
	flag.StringVar(&opts.Bin, "bin", "", "folder of the daemons; this checkout's bin by default")
	flag.StringVar(&opts.Note, "note", "", "a remark for the report")
	flag.StringVar(&opts.Profile, "profile", "", "folder for the daemons' profiles; none by default")
	flag.Float64Var(&opts.Scale, "scale", 1, "how many repetitions, of the usual number")
	flag.Usage = func() {
		fmt.Fprintf(os.Stderr, "usage: bench [flags] NAME...   (%s)\n       bench list\n       bench compare --ref COMMIT [flags] NAME...\n", strings.Join(bench.Names(), ", "))
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

// compare measures this checkout and a commit in turn.
func compare(args []string) {
	opts := bench.CompareOptions{Repo: ".", Logf: func(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }}
	flags := flag.NewFlagSet("bench compare", flag.ExitOnError)
	flags.StringVar(&opts.Ref, "ref", "", "the commit that this checkout is compared with")
	flags.IntVar(&opts.Rounds, "rounds", 3, "how often each of the two is measured")
	flags.Float64Var(&opts.Scale, "scale", 1, "how many repetitions, of the usual number")
	_ = flags.Parse(args) // it exits
	opts.Names = flags.Args()
	if opts.Ref == "" || len(opts.Names) == 0 {
		flags.Usage()
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	all, err := bench.Compare(ctx, opts)
	stop()
	if err != nil {
		fmt.Fprintf(os.Stderr, "bench: %v\n", err)
		os.Exit(1)
	}
	fmt.Print(bench.Comparison(all))
	for _, c := range all {
		if c.Verdict() == "regression" {
			os.Exit(1)
		}
	}
}
