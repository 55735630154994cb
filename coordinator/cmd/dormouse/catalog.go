package main

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/command"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// catalogCommands are an operator's.
func catalogCommands() *cli.Command {
	return &cli.Command{Name: "catalog", Usage: "look after the catalog", Subcommands: append([]*cli.Command{
		{
			Name: "status", Usage: "show whether the catalog takes writes, where it stands, and how far the nodes' journals reach",
			Flags: callFlags(false), Action: action(0, 0, catalogStatus),
		},
		{
			Name: "verify", Usage: "compare the catalog with the nodes' journals and artefacts; exit code 1 if they differ",
			Description: "Changes nothing. Nodes that are away are named as unknown.",
			Flags:       callFlags(false), Action: action(0, 0, verifyCatalog),
		},
		{
			Name: "repair", Usage: "put back what a suspended catalog lost, from the nodes' journals, and take it into service",
			Description: "A catalog is suspended when its store came back without something that it had acknowledged. The coordinator repairs it\n" +
				"by itself once every node is there and nothing else can be missing. Otherwise it says what may be lost for ever: look at it with\n" +
				"\"catalog status\" and \"catalog verify\" before you accept that.",
			Flags: callFlags(false, &cli.BoolFlag{Name: "accept-loss", Usage: "go on although something may be lost that nobody knows"},
				&cli.StringSliceFlag{Name: "without", Usage: "go on without what this node knows, which is away; may be repeated"}),
			Action: action(0, 0, repairCatalog),
		},
		{
			Name: "drop", Usage: "have a node remove what it holds without a record", ArgsUsage: "UID...",
			Description: "For what \"catalog verify\" calls unrecorded. What was deleted, or given up by a repair that went on without its node, is dropped as such;\n" +
				"what nothing proves that of may be the last copy, and is dropped with --accept-loss only. What has a record is refused.",
			Flags:  callFlags(false, orphanNode(), &cli.BoolFlag{Name: "accept-loss", Usage: "drop it although it may be the last copy"}),
			Action: action(1, -1, dropOrphans),
		},
		{
			Name: "adopt", Usage: "take back what a repair gave up and a node still holds", ArgsUsage: "UID...",
			Description: "It gets the record again that the node's journal has of it, without its name if another has that by now. What it refers to has to be there:\n" +
				"adopt volumes first, then snapshots, then sandboxes. The coordinator begins to lead anew after each, which calls in progress notice for a moment.",
			Flags: callFlags(false, orphanNode()), Action: action(1, -1, adoptOrphans),
		},
		{
			Name: "compact", Usage: "forget the traces of what was deleted long ago; the coordinator does so by itself now and then",
			Flags: callFlags(false), Action: action(0, 0, func(c call) error {
				n, err := c.client.CompactCatalog(c.ctx)
				if err != nil {
					return err
				}
				_, err = fmt.Fprintln(c.App.Writer, n)
				return err
			}),
		},
	}, backupCommands()...)}
}

func orphanNode() cli.Flag {
	return &cli.StringFlag{Name: "node", Required: true, Usage: "the node that holds it"}
}

func dropOrphans(c call) error {
	for _, uid := range c.Args().Slice() {
		resp, err := c.client.DropOrphan(c.ctx, c.String("node"), uid, c.Bool("accept-loss"))
		if err != nil {
			return err
		}
		text := fmt.Sprintf("dropped %s %s of %s", resp.GetKind(), uid, resp.GetTenant())
		if resp.GetAbsent() {
			text = fmt.Sprintf("node %s has no %s", c.String("node"), uid)
		}
		if _, err := fmt.Fprintln(c.App.Writer, text); err != nil {
			return err
		}
	}
	return nil
}

func adoptOrphans(c call) error {
	for _, uid := range c.Args().Slice() {
		resp, err := c.client.AdoptOrphan(c.ctx, c.String("node"), uid)
		if err != nil {
			return err
		}
		if _, err := fmt.Fprintf(c.App.Writer, "adopted %s %s of %s as %q\n", resp.GetKind(), uid, resp.GetTenant(), resp.GetName()); err != nil {
			return err
		}
	}
	return nil
}

func pointText(p *dormousev1.HistoryPoint) string {
	if p.GetSeq() == 0 {
		return "-"
	}
	inc := p.GetIncarnation()
	return fmt.Sprintf("%d of %s", p.GetSeq(), inc[:min(len(inc), 8)])
}

func orphansText(o *dormousev1.OrphanProgress) string {
	text := fmt.Sprintf("%d removed, %d left alone", o.GetRemoved(), o.GetHeld())
	if n := o.GetUnreadNodes(); n > 0 {
		text += fmt.Sprintf(", unknown on %d nodes", n)
	}
	return text
}

func deletionText(d *dormousev1.DeletionProgress) string {
	text := fmt.Sprintf("%d %ss, %d of them now, %d ended in the last minute", d.GetPending(), d.GetKind(), d.GetActive(), d.GetEndedLastMinute())
	if d.GetOldestTime() != nil {
		text += ", the oldest since " + ageOf(d.GetOldestTime())
	}
	return text
}

func catalogStatus(c call) error {
	st, err := c.client.CatalogStatus(c.ctx)
	if err != nil {
		return err
	}
	if !c.print.Table() {
		return command.One(c.print, st, func(s *dormousev1.CatalogStatus) string { return s.GetHead().GetIncarnation() }, nil)
	}
	state := "in service"
	if why := st.GetSuspended(); why != nil {
		state = fmt.Sprintf("SUSPENDED for %s: %s knew of commit %s; see \"dormouse admin catalog repair --help\"",
			ageOf(why.GetSince()), why.GetFoundBy(), pointText(why.GetWitness()))
		if id := why.GetRestoring(); id != "" {
			state = fmt.Sprintf("SUSPENDED for %s: backup %s is being restored; see \"dormouse admin catalog restore --help\"", ageOf(why.GetSince()), id)
		}
	}
	lines := [][2]string{
		{"State", state},
		{"Server", st.GetServer() + ", " + st.GetDurability()},
		{"Commits", pointText(st.GetHead())},
		{"Epoch", strconv.FormatUint(st.GetCoordinatorEpoch(), 10)},
		{"Tombstones", strconv.FormatInt(st.GetTombstones(), 10)},
		{"Queue", fmt.Sprintf("%d waiting, %d built, %d of unknown outcome", st.GetWaiting(), st.GetQueued(), st.GetUnknown())},
		{"Orphans", orphansText(st.GetOrphans())},
	}
	for _, d := range st.GetDeletions() {
		lines = append(lines, [2]string{"Deleting", deletionText(d)})
	}
	for _, line := range lines {
		if _, err := fmt.Fprintf(c.App.Writer, "%-11s %s\n", line[0]+":", line[1]); err != nil {
			return err
		}
	}
	type col = command.Column[*dormousev1.NodeJournal]
	return command.List(c.print, st.GetJournals(), (*dormousev1.NodeJournal).GetNode, []col{
		{Name: "NODE", Show: (*dormousev1.NodeJournal).GetNode},
		{Name: "STATE", Show: func(n *dormousev1.NodeJournal) string {
			if n.GetOnline() {
				return "online"
			}
			return "away"
		}},
		{Name: "JOURNAL", Show: func(n *dormousev1.NodeJournal) string { return pointText(n.GetPoint()) }},
	})
}

func findingColumns() []command.Column[*dormousev1.CatalogFinding] {
	type col = command.Column[*dormousev1.CatalogFinding]
	return []col{
		{Name: "DIFFERENCE", Show: func(f *dormousev1.CatalogFinding) string {
			return strings.ToLower(strings.TrimPrefix(f.GetDifference().String(), "CATALOG_DIFFERENCE_"))
		}},
		{Name: "KIND", Show: (*dormousev1.CatalogFinding).GetKind},
		{Name: "UID", Show: (*dormousev1.CatalogFinding).GetUid},
		{Name: "NAME", Show: (*dormousev1.CatalogFinding).GetName},
		{Name: "TENANT", Show: (*dormousev1.CatalogFinding).GetTenant},
		{Name: "NODE", Show: (*dormousev1.CatalogFinding).GetNode},
		{Name: "REPAIRED", Wide: true, Show: func(f *dormousev1.CatalogFinding) string { return strconv.FormatBool(f.GetRepaired()) }},
		{Name: "MESSAGE", Show: (*dormousev1.CatalogFinding).GetMessage},
	}
}

func verifyCatalog(c call) error {
	found, err := client.Collect(c.client.VerifyCatalog(c.ctx))
	if err != nil {
		return err
	}
	if err := command.List(c.print, found, (*dormousev1.CatalogFinding).GetUid, findingColumns()); err != nil {
		return err
	}
	if len(found) > 0 {
		return cli.Exit(fmt.Sprintf("%d differences", len(found)), 1)
	}
	return nil
}

func repairCatalog(c call) error {
	resp, err := c.client.RepairCatalog(c.ctx, c.Bool("accept-loss"), c.StringSlice("without")...)
	if err != nil {
		return err
	}
	if err := command.List(c.print, resp.GetFindings(), (*dormousev1.CatalogFinding).GetUid, findingColumns()); err != nil {
		return err
	}
	if c.print.Table() {
		at := ""
		if head := resp.GetCatalog().GetHead(); head != nil {
			at = " at commit " + pointText(head)
		}
		_, err = fmt.Fprintf(c.App.Writer, "in service%s; %d differences\n", at, resp.GetTotal())
	}
	return err
}
