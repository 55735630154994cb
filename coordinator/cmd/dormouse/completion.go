package main

import (
	"context"
	"io"
	"iter"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/command"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// completionTime is how long a person who pressed Tab waits for names.
const completionTime = 2 * time.Second

// names lists what an argument can be, for the shells: the names, and the uids of what has none. Where
// the server does not answer there are none.
func names(kind string) []string {
	cfg, err := client.FromEnvironment("")
	if err != nil {
		return nil
	}
	c, err := client.Dial(cfg)
	if err != nil {
		return nil
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(context.Background(), completionTime)
	defer cancel()
	switch kind {
	case "SANDBOX":
		return namesOf(c.ListSandboxes(ctx, &dormousev1.ListSandboxesRequest{}))
	case "SNAPSHOT":
		return namesOf(c.ListSnapshots(ctx, &dormousev1.ListSnapshotsRequest{}))
	case "VOLUME":
		return namesOf(c.ListVolumes(ctx, &dormousev1.ListVolumesRequest{}))
	case "TEMPLATE":
		return namesOf(c.ListTemplates(ctx, &dormousev1.ListTemplatesRequest{}))
	case "POOL":
		return namesOf(c.ListPools(ctx, &dormousev1.ListPoolsRequest{}))
	case "TEMPLATE|POOL":
		return append(namesOf(c.ListPools(ctx, &dormousev1.ListPoolsRequest{})), namesOf(c.ListTemplates(ctx, &dormousev1.ListTemplatesRequest{}))...)
	case "NODE":
		var out []string
		for n, err := range c.ListNodes(ctx) {
			if err == nil {
				out = append(out, n.GetName())
			}
		}
		return out
	}
	return nil
}

func namesOf[T interface{ GetMeta() *dormousev1.ObjectMeta }](objects iter.Seq2[T, error]) []string {
	var out []string
	for o, err := range objects {
		if err != nil {
			break
		}
		if name := o.GetMeta().GetName(); name != "" {
			out = append(out, name)
		} else {
			out = append(out, o.GetMeta().GetUid())
		}
	}
	return out
}

// completionScripts ask the program itself what may come next. Nothing is completed after "--":
// those words are the sandbox's.
var completionScripts = map[string]string{
	"bash": `_dormouse() {
    local word="${COMP_WORDS[COMP_CWORD]}" said=("${COMP_WORDS[@]:0:COMP_CWORD}")
    [[ $word == -* ]] && said+=("$word")
    mapfile -t COMPREPLY < <(compgen -W "$("${said[@]}" --complete-next 2>/dev/null)" -- "$word")
}
complete -o default -F _dormouse dormouse
`,
	"zsh": `#compdef dormouse
_dormouse() {
    local -a said answers
    said=("${(@)words[1,CURRENT-1]}")
    [[ ${words[CURRENT]} == -* ]] && said+=("${words[CURRENT]}")
    answers=("${(@f)$("${said[@]}" --complete-next 2>/dev/null)}")
    if [[ -n ${answers[1]} ]]; then
        compadd -- "${answers[@]}"
    else
        _files
    fi
}
compdef _dormouse dormouse
`,
	"fish": `function __dormouse_next
    set -l said (commandline -opc)
    set -l word (commandline -ct)
    string match -q -- '-*' $word; and set -a said $word
    command $said --complete-next 2>/dev/null
end
complete -c dormouse -f -a '(__dormouse_next)'
`,
}

func completionCommand() *cli.Command {
	return &cli.Command{
		Name: "completion", Usage: "print the completion script of a shell", ArgsUsage: "bash|zsh|fish",
		Description: "bash: source <(dormouse completion bash)\nzsh:  source <(dormouse completion zsh)\nfish: dormouse completion fish | source",
		Action: func(c *cli.Context) error {
			script, ok := completionScripts[c.Args().First()]
			if !ok || c.Args().Len() != 1 {
				return command.Usage(c, "name a shell: bash, zsh or fish")
			}
			_, err := io.WriteString(c.App.Writer, script)
			return err
		},
	}
}
