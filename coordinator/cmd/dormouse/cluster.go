package main

import (
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/command"
	"github.com/dormouse-run/dormouse/pkg/config"
	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

func imageID(i *dormousev1.Image) string { return i.GetDigest() }

func imageColumns() []command.Column[*dormousev1.Image] {
	type col = command.Column[*dormousev1.Image]
	return []col{
		{Name: "REFERENCE", Show: func(i *dormousev1.Image) string { return shortReference(i.GetReference()) }},
		{Name: "DIGEST", Show: func(i *dormousev1.Image) string { return shortDigest(i.GetDigest()) }},
		{Name: "SIZE", Show: func(i *dormousev1.Image) string { return config.FormatBytes(i.GetSizeBytes()) }},
		{Name: "NODES", Show: func(i *dormousev1.Image) string { return strings.Join(i.GetNodes(), ",") }},
		{Name: "AGE", Show: func(i *dormousev1.Image) string { return ageOf(i.GetPullTime()) }},
		{Name: "FULL-DIGEST", Wide: true, Show: imageID},
		{Name: "EROFS", Wide: true, Show: func(i *dormousev1.Image) string { return i.GetErofsDigest() }},
		{Name: "LAYERS", Wide: true, Show: func(i *dormousev1.Image) string { return strconv.Itoa(int(i.GetLayers())) }},
		{Name: "ARCH", Wide: true, Show: func(i *dormousev1.Image) string { return i.GetArchitecture() }},
	}
}

func shortDigest(d string) string {
	if i := strings.IndexByte(d, ':'); i >= 0 && len(d) > i+13 {
		return d[:i+13]
	}
	return d
}

// shortReference shortens the digest in a reference; -o json has it whole.
func shortReference(ref string) string {
	name, digest, ok := strings.Cut(ref, "@")
	if !ok {
		return ref
	}
	return name + "@" + shortDigest(digest)
}

func imageCommands() *cli.Command {
	return &cli.Command{Name: "image", Usage: "pull, list and delete images", Subcommands: []*cli.Command{
		{
			Name: "pull", Usage: "bring an image to nodes and print its digest", ArgsUsage: "REFERENCE",
			Flags:  callFlags(false, &cli.StringFlag{Name: "node", Usage: "only to this node; every online one without it"}),
			Action: action(1, 1, pullImage),
		},
		{
			Name: "ls", Usage: "list images", Flags: callFlags(false),
			Action: action(0, 0, func(c call) error {
				all, err := client.Collect(c.client.ListImages(c.ctx))
				if err != nil {
					return err
				}
				return command.List(c.print, all, imageID, imageColumns())
			}),
		},
		{
			Name: "rm", Usage: "delete images from the nodes", ArgsUsage: "DIGEST|REFERENCE...", Flags: callFlags(false, forceFlag()),
			Action: action(1, -1, func(c call) error {
				return each(c, func(ref string) error {
					image, err := c.client.FindImage(c.ctx, ref)
					if err == nil {
						err = image.Delete(c.ctx)
					}
					if err != nil {
						if c.Bool("force") && notThere(err) {
							return nil
						}
						return err
					}
					_, err = fmt.Fprintln(c.App.Writer, image.Digest)
					return err
				})
			}),
		},
	}}
}

func pullImage(c call) error {
	show := &pullProgress{w: c.App.ErrWriter, live: terminal(c.App.ErrWriter), last: make(map[string]string)}
	image, err := c.client.PullImage(c.ctx, c.Args().First(), c.String("node"), show.update)
	show.end()
	if err != nil {
		return err
	}
	if !c.print.Table() {
		return command.One(c.print, image.Last, imageID, imageColumns())
	}
	_, err = fmt.Fprintln(c.App.Writer, image.Digest)
	return err
}

// pullProgress shows a pull: one line that is rewritten on a terminal, otherwise a line for each
// step of each node.
type pullProgress struct {
	w     io.Writer
	live  bool
	nodes []string
	last  map[string]string
	shown bool
}

func (p *pullProgress) update(u *dormousev1.PullProgress) {
	node := u.GetNode()
	before, known := p.last[node]
	if !known {
		p.nodes = append(p.nodes, node)
	}
	if !p.live {
		if before != u.GetStep() {
			fmt.Fprintf(p.w, "%s: %s\n", node, u.GetStep())
		}
		p.last[node] = u.GetStep()
		return
	}
	text := u.GetStep()
	if total := u.GetBytesTotal(); total > 0 {
		text = fmt.Sprintf("%s %d%% of %s", text, min(100*u.GetBytesDone()/total, 100), config.FormatBytes(total))
	} else if done := u.GetBytesDone(); done > 0 {
		text += " " + config.FormatBytes(done)
	}
	p.last[node] = text
	var parts []string
	for _, n := range p.nodes {
		parts = append(parts, n+": "+p.last[n])
	}
	fmt.Fprintf(p.w, "\r\x1b[K%s", strings.Join(parts, "  "))
	p.shown = true
}

func (p *pullProgress) end() {
	if p.shown {
		fmt.Fprintln(p.w)
	}
}

func nodeID(n *dormousev1.Node) string { return n.GetName() }

func nodeColumns() []command.Column[*dormousev1.Node] {
	type col = command.Column[*dormousev1.Node]
	used := func(of func(*dormousev1.NodeResources) int64, show func(int64) string) func(*dormousev1.Node) string {
		return func(n *dormousev1.Node) string {
			return show(of(n.GetRequested())) + "/" + show(of(n.GetAllocatable()))
		}
	}
	millis := func(n int64) string { return strconv.FormatFloat(float64(n)/1000, 'f', -1, 64) }
	count := func(n int64) string { return strconv.FormatInt(n, 10) }
	return []col{
		{Name: "NAME", Show: nodeID},
		{Name: "STATE", Show: nodeState},
		{Name: "SANDBOXES", Show: used((*dormousev1.NodeResources).GetSandboxes, count)},
		{Name: "CPU", Show: used((*dormousev1.NodeResources).GetCpuMillis, millis)},
		{Name: "MEMORY", Show: used((*dormousev1.NodeResources).GetMemoryBytes, config.FormatBytes)},
		{Name: "PRESSURE", Wide: true, Show: nodePressure},
		{Name: "HEARTBEAT", Show: func(n *dormousev1.Node) string { return ageOf(n.GetLastHeartbeat()) }},
		{Name: "DISK", Wide: true, Show: used((*dormousev1.NodeResources).GetDiskBytes, config.FormatBytes)},
		{Name: "SESSION", Wide: true, Show: func(n *dormousev1.Node) string { return strconv.FormatUint(n.GetSessionEpoch(), 10) }},
		{Name: "ADDRESS", Wide: true, Show: func(n *dormousev1.Node) string { return n.GetAddress() }},
		{Name: "VERSION", Wide: true, Show: func(n *dormousev1.Node) string { return n.GetVersion() }},
		{Name: "NETWORKS", Wide: true, Show: nodeNetworks},
	}
}

// nodePressure is how short the node's memory is; empty where it does not say.
func nodePressure(n *dormousev1.Node) string {
	if n.GetMemory() == nil {
		return ""
	}
	return strings.ToLower(strings.TrimPrefix(n.GetMemory().GetPressure().String(), "MEMORY_PRESSURE_"))
}

func nodeNetworks(n *dormousev1.Node) string {
	var modes []string
	for _, m := range n.GetNetworkModes() {
		modes = append(modes, modeOf(m))
	}
	return strings.Join(modes, ",")
}

func nodeState(n *dormousev1.Node) string {
	state := "away"
	if n.GetOnline() {
		state = "online"
	}
	if n.GetCordoned() {
		state += ",cordoned"
	}
	return state
}

func nodeCommands() *cli.Command {
	return &cli.Command{Name: "node", Usage: "list and show nodes, and say which take new work", Subcommands: []*cli.Command{
		{
			Name: "ls", Usage: "list nodes", Flags: callFlags(false),
			Action: action(0, 0, func(c call) error {
				all, err := client.Collect(c.client.ListNodes(c.ctx))
				if err != nil {
					return err
				}
				return command.List(c.print, all, nodeID, nodeColumns())
			}),
		},
		{
			Name: "get", Usage: "show a node", ArgsUsage: "NODE", Flags: callFlags(false),
			Action: action(1, 1, func(c call) error {
				n, err := c.client.GetNode(c.ctx, c.Args().First())
				if err != nil {
					return err
				}
				return command.One(c.print, n, nodeID, nodeColumns())
			}),
		},
		cordonCommand("cordon", "keep new work away from nodes", true),
		cordonCommand("uncordon", "let new work come to nodes again", false),
	}}
}

func cordonCommand(name, usage string, cordoned bool) *cli.Command {
	return &cli.Command{
		Name: name, Usage: usage, ArgsUsage: "NODE...", Flags: callFlags(true),
		Action: action(1, -1, func(c call) error {
			op, err := operationOf(c.Context)
			if err != nil {
				return err
			}
			if c.IsSet("operation-id") && c.Args().Len() > 1 {
				return command.Usage(c.Context, "--operation-id is for one node")
			}
			return each(c, func(name string) error {
				id := op
				if c.Args().Len() > 1 {
					id = ""
				}
				if _, err := c.client.Cordon(c.ctx, name, cordoned, id); err != nil {
					return err
				}
				_, err := fmt.Fprintln(c.App.Writer, name)
				return err
			})
		}),
	}
}

func operationCommands() *cli.Command {
	type col = command.Column[*dormousev1.Operation]
	id := func(o *dormousev1.Operation) string { return o.GetOperationId() }
	columns := []col{
		{Name: "OPERATION", Show: id},
		{Name: "KIND", Show: func(o *dormousev1.Operation) string { return o.GetKind() }},
		{Name: "STATE", Show: func(o *dormousev1.Operation) string { return command.Enum(o.GetState(), "OPERATION_STATE_") }},
		{Name: "OBJECTS", Show: func(o *dormousev1.Operation) string { return strings.Join(o.GetUids(), ",") }},
		{Name: "ERROR", Show: func(o *dormousev1.Operation) string { return o.GetErrorReason() }},
		{Name: "AGE", Show: func(o *dormousev1.Operation) string { return ageOf(o.GetCreateTime()) }},
		{Name: "MESSAGE", Wide: true, Show: func(o *dormousev1.Operation) string { return o.GetErrorMessage() }},
	}
	return &cli.Command{Name: "operation", Usage: "tell what became of an operation", Subcommands: []*cli.Command{{
		Name: "get", Usage: "show an operation", ArgsUsage: "OPERATION-ID", Flags: callFlags(false),
		Action: action(1, 1, func(c call) error {
			o, err := c.client.GetOperation(c.ctx, c.Args().First())
			if err != nil {
				return err
			}
			return command.One(c.print, o, id, columns)
		}),
	}}}
}

func eventCommands() *cli.Command {
	type col = command.Column[*dormousev1.Event]
	columns := []col{
		{Name: "AGE", Show: func(e *dormousev1.Event) string { return ageOf(e.GetTime()) }},
		{Name: "TYPE", Show: func(e *dormousev1.Event) string {
			if e.GetWarning() {
				return "warning"
			}
			return "normal"
		}},
		{Name: "REASON", Show: func(e *dormousev1.Event) string { return e.GetReason() }},
		{Name: "OBJECT", Show: func(e *dormousev1.Event) string { return e.GetObjectKind() + "/" + e.GetObjectUid() }},
		{Name: "MESSAGE", Show: func(e *dormousev1.Event) string { return e.GetMessage() }},
	}
	return &cli.Command{Name: "event", Usage: "tell what happened and why", Subcommands: []*cli.Command{{
		Name: "ls", Usage: "list events", Flags: callFlags(false, &cli.StringFlag{Name: "object", Usage: "only those of an object: a uid, or a sandbox's name"}),
		Action: action(0, 0, func(c call) error {
			object, err := objectUID(c, c.String("object"))
			if err != nil {
				return err
			}
			all, err := client.Collect(c.client.ListEvents(c.ctx, &dormousev1.ListEventsRequest{ObjectUid: object, PageSize: 500}))
			if err != nil {
				return err
			}
			return command.List(c.print, all, func(e *dormousev1.Event) string { return e.GetUid() }, columns)
		}),
	}}}
}

// objectUID looks a sandbox's name up; everything that has the form of a uid is one, also of what is gone.
func objectUID(c call, ref string) (string, error) {
	if ref == "" || isUID(ref) {
		return ref, nil
	}
	s, err := c.client.FindSandbox(c.ctx, ref)
	if errs.Has(err, errs.ObjectNotFound) {
		return "", errs.New(errs.ObjectNotFound, "there is no sandbox named %q; for other objects give the uid", ref).With("name", ref)
	}
	if err != nil {
		return "", err
	}
	return s.UID, nil
}
