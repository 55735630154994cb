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

// Names lists what an argument of a kind can be; the kinds are the capitals of ArgsUsage.
type Names func(kind string) []string

// NamesKey is where the Metadata of an app may have Names.
const NamesKey = "names"

// Complete gives what may follow the words: subcommands, the choices of an argument or of a flag's
// value, or, when the last word begins with a dash, the flags that begin like it.
func Complete(app *cli.App, words []string) []string {
	flags, commands, args, given := app.Flags, app.Commands, "", 0
	for i := 0; i < len(words); i++ {
		w := words[i]
		if w == "--" && i < len(words)-1 {
			return nil // what follows is not this program's
		}
		if strings.HasPrefix(w, "-") {
			if i == len(words)-1 {
				if f := lookup(flags, strings.TrimLeft(w, "-")); f != nil && takesValue(f) {
					return flagValues(f)
				}
				return flagNames(flags, w)
			}
			if f := lookup(flags, strings.TrimLeft(w, "-")); f != nil && takesValue(f) {
				i++
			}
			continue
		}
		next := find(commands, w)
		if next == nil {
			commands = nil
			given++
			continue
		}
		flags, commands, args = next.Flags, next.Subcommands, next.ArgsUsage
	}
	var out []string
	for _, c := range commands {
		if !c.Hidden {
			out = append(out, c.Name)
		}
	}
	names, ok := app.Metadata[NamesKey].(Names)
	if !ok || len(words) > 0 && strings.HasPrefix(words[0], "-") {
		names = func(string) []string { return nil } // they are asked for where the environment says, not the flags
	}
	return append(out, arguments(args, given, names)...)
}

// arguments gives what the next argument can be, after as many as were given.
func arguments(usage string, given int, names Names) []string {
	first, _, _ := strings.Cut(usage, " ")
	first, many := strings.CutSuffix(first, "...")
	if first == "" || given > 0 && !many {
		return nil
	}
	if choices.MatchString(first) {
		return strings.Split(first, "|")
	}
	var out []string
	for kind := range strings.SplitSeq(first, "|") {
		out = append(out, names(kind)...)
	}
	return out
}

// flagValues gives what a flag's value can be, where that is a closed set.
func flagValues(f cli.Flag) []string {
	if f.Names()[0] == "output" {
		return []string{"table", "wide", "json", "yaml", "name"}
	}
	return nil
}

// flagNames gives the flags in the form that the word has begun, each once.
func flagNames(flags []cli.Flag, word string) []string {
	var out []string
	for _, f := range append(slices.Clone(flags), cli.HelpFlag) {
		if v, ok := f.(cli.VisibleFlag); ok && !v.IsVisible() {
			continue
		}
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
