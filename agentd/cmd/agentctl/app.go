package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/dormouse-run/dormouse/pkg/command"
	"github.com/dormouse-run/dormouse/pkg/version"
	"github.com/dormouse-run/dormouse/pkg/wire"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// defaultSocket is where agentd serves, unless it is told otherwise.
const defaultSocket = "/run/dormouse/agentd.sock"

// now is the clock of the AGE column.
var now = time.Now

func newApp(out, err io.Writer) *cli.App {
	return &cli.App{
		Name: "agentctl", Usage: "look at this node's sandboxes, and find what should not be there", Version: version.Get().String(),
		Writer: out, ErrWriter: err,
		Flags: []cli.Flag{&cli.StringFlag{Name: "socket", Usage: "agentd's socket, for root only", EnvVars: []string{"AGENTCTL_SOCKET"}, Value: defaultSocket}},
		Commands: []*cli.Command{
			listCommand("ls", "list sandboxes", nodev1.DebugKind_DEBUG_KIND_SANDBOX),
			{
				Name: "inspect", Usage: "show the record and the observed state of an object, as JSON", ArgsUsage: "UID",
				Flags:  flags(&cli.StringFlag{Name: "kind", Usage: "sandbox, snapshot, volume, image or network", Value: "sandbox"}),
				Action: action(1, 1, inspect),
			},
			{Name: "ps", Usage: "list the processes of a sandbox", ArgsUsage: "UID", Flags: flags(), Action: action(1, 1, ps)},
			{
				Name: "logs", Usage: "show the output of a process, by default of the sandbox's own command", ArgsUsage: "UID [PROCESS]",
				Flags: []cli.Flag{
					&cli.BoolFlag{Name: "follow", Aliases: []string{"f"}, Usage: "go on until the process ends"},
					&cli.DurationFlag{Name: "timeout", Usage: "stop after this time"},
				},
				Action: action(1, 2, logs),
			},
			listCommand("layers", "list images and their EROFS files", nodev1.DebugKind_DEBUG_KIND_IMAGE),
			listCommand("snapshots", "list snapshots", nodev1.DebugKind_DEBUG_KIND_SNAPSHOT),
			listCommand("volumes", "list volumes", nodev1.DebugKind_DEBUG_KIND_VOLUME),
			listCommand("network", "list the sandboxes with an outbound network: addresses, bytes, and packets that the policy refused", nodev1.DebugKind_DEBUG_KIND_NETWORK),
			{
				Name: "doctor", Usage: "compare the records with the node; exit code 1 when something remains",
				Flags:  flags(&cli.BoolFlag{Name: "fix", Usage: "remove what is proven to be agentd's own and unowned"}),
				Action: action(0, 0, doctor),
			},
			preflightCommand(),
			{Name: "overview", Usage: "show the node, its session and what it holds", Flags: flags(), Action: action(0, 0, overview)},
			{Name: "version", Usage: "show the version", Action: func(c *cli.Context) error {
				_, err := fmt.Fprintln(c.App.Writer, "agentctl "+version.Get().String())
				return err
			}},
		},
	}
}

func flags(more ...cli.Flag) []cli.Flag {
	return append(append(more, command.OutputFlags()...), &cli.DurationFlag{Name: "timeout", Usage: "give up after this time"})
}

// call is one action: a context with the caller's deadline, the node, the printer.
type call struct {
	*cli.Context
	ctx   context.Context //nolint:containedctx // lives as long as one action
	node  nodev1.DebugServiceClient
	print command.Printer
}

func action(least, most int, do func(call) error) cli.ActionFunc {
	return func(c *cli.Context) error {
		if n := c.Args().Len(); n < least {
			return command.Usage(c, "an argument is missing")
		} else if n > most {
			return command.Usage(c, "too many arguments: %q", c.Args().Get(most))
		}
		p, err := command.NewPrinter(c)
		if err != nil {
			return err
		}
		// Whether this user may is decided by the socket: its mode, and agentd's look at the peer.
		cc, err := grpc.NewClient("unix:"+c.String("socket"), append(wire.DialOptions(), grpc.WithTransportCredentials(insecure.NewCredentials()))...)
		if err != nil {
			return command.Usage(c, "--socket %q: %s", c.String("socket"), err)
		}
		defer cc.Close()
		ctx := c.Context
		if d := c.Duration("timeout"); d > 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, d)
			defer cancel()
		}
		return do(call{Context: c, ctx: ctx, node: nodev1.NewDebugServiceClient(cc), print: p})
	}
}

func listCommand(name, usage string, kind nodev1.DebugKind) *cli.Command {
	return &cli.Command{Name: name, Usage: usage, Flags: flags(), Action: action(0, 0, func(c call) error {
		var objects []*nodev1.DebugObject
		for req := (&nodev1.ListDebugObjectsRequest{Kind: kind}); ; {
			resp, err := c.node.ListDebugObjects(c.ctx, req)
			if err != nil {
				return err
			}
			objects = append(objects, resp.GetObjects()...)
			if req.After = resp.GetNext(); req.GetAfter() == "" {
				break
			}
		}
		return command.List(c.print, objects, (*nodev1.DebugObject).GetUid, objectColumns(objects))
	})}
}

// objectColumns are those that every object has, then those that agentd sent, by name.
func objectColumns(objects []*nodev1.DebugObject) []command.Column[*nodev1.DebugObject] {
	type col = command.Column[*nodev1.DebugObject]
	columns := []col{
		{Name: "UID", Show: (*nodev1.DebugObject).GetUid},
		{Name: "TENANT", Show: (*nodev1.DebugObject).GetTenant},
		{Name: "STATE", Show: (*nodev1.DebugObject).GetState},
	}
	names := make(map[string]bool)
	for _, o := range objects {
		for n := range o.GetColumns() {
			names[n] = true
		}
	}
	for _, n := range slices.Sorted(maps.Keys(names)) {
		columns = append(columns, col{Name: strings.ToUpper(n), Show: func(o *nodev1.DebugObject) string { return o.GetColumns()[n] }})
	}
	return columns
}

func inspect(c call) error {
	kind, ok := nodev1.DebugKind_value["DEBUG_KIND_"+strings.ToUpper(c.String("kind"))]
	if !ok || kind == 0 {
		return command.Usage(c.Context, "--kind %q: sandbox, snapshot, volume, image or network", c.String("kind"))
	}
	resp, err := c.node.Inspect(c.ctx, &nodev1.InspectRequest{Kind: nodev1.DebugKind(kind), Uid: c.Args().First()})
	if err != nil {
		return err
	}
	return c.print.Raw([]byte(resp.GetJson()))
}

func ps(c call) error {
	resp, err := c.node.ListSandboxProcesses(c.ctx, &nodev1.ListSandboxProcessesRequest{SandboxUid: c.Args().First()})
	if err != nil {
		return err
	}
	type col = command.Column[*dormousev1.Process]
	return command.List(c.print, resp.GetProcesses(), (*dormousev1.Process).GetProcessId, []col{
		{Name: "PROCESS", Show: (*dormousev1.Process).GetProcessId},
		{Name: "PID", Show: func(p *dormousev1.Process) string { return strconv.Itoa(int(p.GetPid())) }},
		{Name: "STATE", Show: func(p *dormousev1.Process) string {
			if p.GetExit() == nil {
				return "running"
			}
			return fmt.Sprintf("exited %d", p.GetExit().GetCode())
		}},
		{Name: "AGE", Show: func(p *dormousev1.Process) string {
			if p.GetStartTime() == nil {
				return ""
			}
			return command.Age(now(), p.GetStartTime().AsTime())
		}},
		{Name: "COMMAND", Show: func(p *dormousev1.Process) string { return strings.Join(p.GetSpec().GetArgv(), " ") }},
	})
}

func logs(c call) error {
	ctx, cancel := context.WithCancel(c.ctx)
	defer cancel()
	stream, err := c.node.TailOutput(ctx, &nodev1.TailOutputRequest{SandboxUid: c.Args().Get(0), ProcessId: c.Args().Get(1), Follow: c.Bool("follow")})
	if err != nil {
		return err
	}
	for {
		resp, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		w := c.App.Writer
		if resp.GetOutput().GetStream() == dormousev1.OutputStream_OUTPUT_STREAM_STDERR {
			w = c.App.ErrWriter
		}
		if gap := resp.GetOutput().GetGapBytes(); gap > 0 {
			fmt.Fprintf(c.App.ErrWriter, "\n(%d bytes of output were overwritten before they were read)\n", gap)
		}
		if _, err := w.Write(resp.GetOutput().GetData()); err != nil {
			return err
		}
	}
}

func overview(c call) error {
	o, err := c.node.Overview(c.ctx, &nodev1.OverviewRequest{})
	if err != nil {
		return err
	}
	if !c.print.Table() {
		return command.One(c.print, o, (*nodev1.OverviewResponse).GetNode, nil)
	}
	type row struct{ name, value string }
	connected := "no"
	if o.GetConnected() {
		connected = "yes"
	}
	type col = command.Column[row]
	return command.Table(c.print, []row{
		{"node", o.GetNode()}, {"version", o.GetVersion()}, {"runtime bundle", o.GetRuntimeBundle()},
		{"connected", connected}, {"session epoch", strconv.FormatUint(o.GetSessionEpoch(), 10)},
		{"coordinator epoch", strconv.FormatUint(o.GetCoordinatorEpoch(), 10)},
		{"sandboxes", strconv.Itoa(int(o.GetSandboxes()))}, {"snapshots", strconv.Itoa(int(o.GetSnapshots()))},
		{"volumes", strconv.Itoa(int(o.GetVolumes()))}, {"images", strconv.Itoa(int(o.GetImages()))},
	}, []col{{Name: "WHAT", Show: func(r row) string { return r.name }}, {Name: "VALUE", Show: func(r row) string { return r.value }}})
}

// doctor shows the differences between records and node. What was fixed does not count.
func doctor(c call) error {
	resp := &nodev1.DoctorResponse{}
	for req := (&nodev1.DoctorRequest{Fix: c.Bool("fix")}); ; {
		page, err := c.node.Doctor(c.ctx, req)
		if err != nil {
			return err
		}
		resp.Findings, resp.Checked = append(resp.GetFindings(), page.GetFindings()...), page.GetChecked()
		if req.After = page.GetNext(); req.GetAfter() == "" {
			break
		}
	}
	left := 0
	for _, f := range resp.GetFindings() {
		if !f.GetFixed() {
			left++
		}
	}
	if err := showFindings(c, resp); err != nil {
		return err
	}
	if left > 0 {
		fmt.Fprintf(c.App.ErrWriter, "%d remain\n", left)
		return command.Exit(command.ExitFailed)
	}
	return nil
}

func showFindings(c call, resp *nodev1.DoctorResponse) error {
	findings := resp.GetFindings()
	if c.print.Names() {
		return command.List(c.print, findings, func(f *nodev1.Finding) string { return f.GetKind() + "/" + f.GetName() }, nil)
	}
	if !c.print.Table() {
		return command.One(c.print, resp, nil, nil)
	}
	var looked []string
	for _, kind := range slices.Sorted(maps.Keys(resp.GetChecked())) {
		looked = append(looked, fmt.Sprintf("%d %s", resp.GetChecked()[kind], kind))
	}
	fmt.Fprintf(c.App.ErrWriter, "looked at: %s\n", strings.Join(looked, ", "))
	if len(findings) == 0 {
		_, err := fmt.Fprintln(c.App.Writer, "nothing is left behind, nothing is lost")
		return err
	}
	type col = command.Column[*nodev1.Finding]
	return command.Table(c.print, findings, []col{
		{Name: "KIND", Show: (*nodev1.Finding).GetKind},
		{Name: "NAME", Show: (*nodev1.Finding).GetName},
		{Name: "RECORDED", Show: (*nodev1.Finding).GetRecorded},
		{Name: "OBSERVED", Show: (*nodev1.Finding).GetObserved},
		{Name: "FIXED", Show: fixedOf},
		{Name: "REMEDY", Show: (*nodev1.Finding).GetRemedy},
	})
}

func fixedOf(f *nodev1.Finding) string {
	switch {
	case f.GetFixed():
		return "yes"
	case f.GetError() != "":
		return "failed: " + f.GetError()
	}
	return "no"
}
