package command

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/urfave/cli/v2"
	"google.golang.org/protobuf/proto"
	"sigs.k8s.io/yaml"

	"github.com/dormouse-run/dormouse/pkg/wire"
)

// OutputFlags are -o and -q.
func OutputFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringFlag{Name: "output", Aliases: []string{"o"}, Usage: "table, wide, json, yaml or name", Value: "table"},
		&cli.BoolFlag{Name: "quiet", Aliases: []string{"q"}, Usage: "show only what identifies"},
	}
}

// Column is one column of a table; wide ones are shown with -o wide only.
type Column[T any] struct {
	Name string
	Wide bool
	Show func(T) string
}

// Printer shows objects in the form that the flags ask for.
type Printer struct {
	w      io.Writer
	format string
}

// NewPrinter reads the flags.
func NewPrinter(c *cli.Context) (Printer, error) {
	format := c.String("output")
	if c.Bool("quiet") {
		format = "name"
	}
	if format == "" {
		format = "table" // a command without the flag
	}
	switch format {
	case "table", "wide", "json", "yaml", "name":
		return Printer{w: c.App.Writer, format: format}, nil
	}
	return Printer{}, Usage(c, "--output %q: table, wide, json, yaml or name", format)
}

// Table tells whether the form is for people.
func (p Printer) Table() bool { return p.format == "table" || p.format == "wide" }

// Names tells whether only what identifies is shown.
func (p Printer) Names() bool { return p.format == "name" }

// List shows objects: as a table, as {"items": [...]}, or by what identifies them.
func List[T proto.Message](p Printer, items []T, id func(T) string, columns []Column[T]) error {
	switch p.format {
	case "json", "yaml":
		all := make([]json.RawMessage, 0, len(items))
		for _, item := range items {
			b, err := wire.MarshalJSON(item)
			if err != nil {
				return err
			}
			all = append(all, b)
		}
		return p.Value(map[string]any{"items": all})
	case "name":
		for _, item := range items {
			fmt.Fprintln(p.w, id(item))
		}
		return nil
	}
	return Table(p, items, columns)
}

// One shows one object: a table of one row, itself, or what identifies it.
func One[T proto.Message](p Printer, item T, id func(T) string, columns []Column[T]) error {
	if p.format == "json" || p.format == "yaml" {
		b, err := wire.MarshalJSON(item)
		if err != nil {
			return err
		}
		return p.Value(json.RawMessage(b))
	}
	return List(p, []T{item}, id, columns)
}

// Table shows rows for people.
func Table[T any](p Printer, items []T, columns []Column[T]) error {
	tw := tabwriter.NewWriter(p.w, 0, 4, 2, ' ', 0)
	row := func(cell func(Column[T]) string) {
		var cells []string
		for _, c := range columns {
			if !c.Wide || p.format == "wide" {
				cells = append(cells, cell(c))
			}
		}
		fmt.Fprintln(tw, strings.Join(cells, "\t"))
	}
	row(func(c Column[T]) string { return c.Name })
	for _, item := range items {
		row(func(c Column[T]) string { return clean(c.Show(item)) })
	}
	return tw.Flush()
}

// clean keeps what comes from a sandbox from steering the terminal.
func clean(s string) string {
	if s == "" {
		return "-"
	}
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 {
			return '?'
		}
		return r
	}, s)
}

// Value shows anything as indented JSON or as YAML.
func (p Printer) Value(v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if p.format == "yaml" {
		out, err := yaml.JSONToYAML(raw)
		if err != nil {
			return err
		}
		_, err = p.w.Write(out)
		return err
	}
	var out bytes.Buffer
	if err := json.Indent(&out, raw, "", "  "); err != nil {
		return err
	}
	out.WriteByte('\n')
	_, err = p.w.Write(out.Bytes())
	return err
}

// Age shows how long ago a time was, in its largest unit.
func Age(now, t time.Time) string {
	if t.IsZero() {
		return ""
	}
	d := max(now.Sub(t), 0)
	switch {
	case d < 2*time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < 2*time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}

// Enum shows an enum value without its prefix: SANDBOX_PHASE_RUNNING as Running.
func Enum(value interface{ String() string }, prefix string) string {
	s := strings.TrimPrefix(value.String(), prefix)
	if s == "UNSPECIFIED" || s == "" {
		return ""
	}
	return s[:1] + strings.ReplaceAll(strings.ToLower(s[1:]), "_", " ")
}

// Raw shows JSON that was made elsewhere; tables do not apply to it.
func (p Printer) Raw(data []byte) error {
	if !json.Valid(data) {
		return fmt.Errorf("the answer is not JSON")
	}
	return p.Value(json.RawMessage(data))
}
