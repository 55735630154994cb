package main

import (
	"fmt"
	"iter"
	"strings"

	"github.com/urfave/cli/v2"
	"google.golang.org/protobuf/proto"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/command"
)

// kind is what the commands that each kind of objects has need to know of it. P is its message.
type kind[P proto.Message] struct {
	name    string // of one; more of them have an s
	id      func(P) string
	columns func() []command.Column[P]
	find    func(c call, ref string) (found[P], error)
}

// found is an object that was named on the command line.
type found[P proto.Message] struct {
	remover
	uid  string
	last P
}

func (k kind[P]) argument() string { return strings.ToUpper(k.name) }

// ls is the command that lists them, with flags that select.
func (k kind[P]) ls(list func(c call) iter.Seq2[P, error], flags ...cli.Flag) *cli.Command {
	return &cli.Command{
		Name: "ls", Usage: "list " + k.name + "s", Flags: callFlags(false, flags...),
		Action: action(0, 0, func(c call) error {
			all, err := client.Collect(list(c))
			if err != nil {
				return err
			}
			return command.List(c.print, all, k.id, k.columns())
		}),
	}
}

// get is the command that shows one.
func (k kind[P]) get() *cli.Command {
	return &cli.Command{
		Name: "get", Usage: "show a " + k.name, ArgsUsage: k.argument(), Flags: callFlags(false),
		Action: action(1, 1, func(c call) error {
			o, err := k.find(c, c.Args().First())
			if err != nil {
				return err
			}
			return command.One(c.print, o.last, k.id, k.columns())
		}),
	}
}

// rm is the command that deletes those that are named.
func (k kind[P]) rm(usage string) *cli.Command {
	return &cli.Command{
		Name: "rm", Usage: usage, ArgsUsage: k.argument() + "...", Flags: callFlags(true, forceFlag()),
		Action: action(1, -1, func(c call) error {
			return removeEach(c, func(ref string) (remover, string, error) {
				o, err := k.find(c, ref)
				return o.remover, o.uid, err
			})
		}),
	}
}

// made shows what was made or changed: its uid alone, where a table is asked for.
func (k kind[P]) made(c call, last P) error {
	if !c.print.Table() {
		return command.One(c.print, last, k.id, k.columns())
	}
	_, err := fmt.Fprintln(c.App.Writer, k.id(last))
	return err
}
