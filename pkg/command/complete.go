package command

import (
	"regexp"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"
)

// CompletionFlag asks, as the last argument, what may come next. It is for the shells' scripts.
// (The completion of urfave/cli does not work together with combined short flags.)
const CompletionFlag = "--complete-next"

// choices is an ArgsUsage that lists all that an argument can be.
var choices = regexp.MustCompile(`^[a-z]+(\|[a-z]+)+$`)

// Complete gives what may follow the words: subcommands, the choices of an argument, or, when the
// last word begins with a dash, the flags that begin like it.
func Complete(app *cli.App, words []string) []string {
	flags, commands, args := app.Flags, app.Commands, ""
	for i := 0; i < len(words); i++ {
		w := words[i]
		if w == "--" && i < len(words)-1 {
			return nil // what follows is not this program's
		}
		if strings.HasPrefix(w, "-") {
			if i == len(words)-1 {
				return flagNames(flags, w)
			}
			if f := lookup(flags, strings.TrimLeft(w, "-")); f != nil && takesValue(f) {
				i++
			}
			continue
		}
		next := find(commands, w)
		if next == nil {
			return nil // an argument: the shell completes files
		}
		flags, commands, args = next.Flags, next.Subcommands, next.ArgsUsage
	}
	var out []string
	for _, c := range commands {
		if !c.Hidden {
			out = append(out, c.Name)
		}
	}
	if choices.MatchString(args) {
		out = strings.Split(args, "|")
	}
	return out
}

// flagNames gives the flags in the form that the word has begun, each once.
func flagNames(flags []cli.Flag, word string) []string {
	var out []string
	for _, f := range append(slices.Clone(flags), cli.HelpFlag) {
		for _, n := range f.Names() {
			dashed := "-" + n
			if len(n) > 1 {
				dashed = "--" + n
			}
			if strings.HasPrefix(dashed, word) && dashed != word {
				out = append(out, dashed)
			}
		}
	}
	return out
}
