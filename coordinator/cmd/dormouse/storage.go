package main

import (
	"iter"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v2"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/dormouse-run/dormouse/pkg/command"
	"github.com/dormouse-run/dormouse/pkg/config"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

func ageOf(t *timestamppb.Timestamp) string {
	if t == nil {
		return ""
	}
	return command.Age(now(), t.AsTime())
}

func snapshotID(s *dormousev1.Snapshot) string { return s.GetMeta().GetUid() }

func snapshotColumns() []command.Column[*dormousev1.Snapshot] {
	type col = command.Column[*dormousev1.Snapshot]
	return []col{
		{Name: "UID", Show: snapshotID},
		{Name: "NAME", Show: func(s *dormousev1.Snapshot) string { return s.GetMeta().GetName() }},
		{Name: "PHASE", Show: func(s *dormousev1.Snapshot) string { return command.Enum(s.GetStatus().GetPhase(), "SNAPSHOT_PHASE_") }},
		{Name: "SOURCE", Show: func(s *dormousev1.Snapshot) string { return s.GetSourceSandboxUid() }},
		{Name: "SIZE", Show: func(s *dormousev1.Snapshot) string { return config.FormatBytes(s.GetStatus().GetSizeBytes()) }},
		{Name: "AGE", Show: func(s *dormousev1.Snapshot) string { return ageOf(s.GetMeta().GetCreateTime()) }},
		{Name: "NODES", Wide: true, Show: func(s *dormousev1.Snapshot) string { return strings.Join(s.GetStatus().GetNodes(), ",") }},
		{Name: "FREEZE", Wide: true, Show: func(s *dormousev1.Snapshot) string {
			return s.GetStatus().GetFreeze().AsDuration().Round(time.Millisecond).String()
		}},
		{Name: "IMAGE", Wide: true, Show: func(s *dormousev1.Snapshot) string { return s.GetStatus().GetImage() }},
		{Name: "RUNTIME", Wide: true, Show: func(s *dormousev1.Snapshot) string { return s.GetStatus().GetRuntimeVersion() }},
	}
}

var snapshots = kind[*dormousev1.Snapshot]{name: "snapshot", id: snapshotID, columns: snapshotColumns,
	find: func(c call, ref string) (found[*dormousev1.Snapshot], error) {
		s, err := c.client.FindSnapshot(c.ctx, ref)
		if err != nil {
			return found[*dormousev1.Snapshot]{}, err
		}
		return found[*dormousev1.Snapshot]{s, s.UID, s.Last}, nil
	}}

func snapshotCommands() *cli.Command {
	return &cli.Command{Name: "snapshot", Usage: "list, show and delete snapshots", Subcommands: []*cli.Command{
		snapshots.ls(func(c call) iter.Seq2[*dormousev1.Snapshot, error] {
			return c.client.ListSnapshots(c.ctx, &dormousev1.ListSnapshotsRequest{SourceSandboxUid: c.String("source"), IncludeDeleted: c.Bool("all"), PageSize: 500})
		},
			&cli.StringFlag{Name: "source", Usage: "only those of a sandbox, by uid (it may be gone)"},
			&cli.BoolFlag{Name: "all", Aliases: []string{"a"}, Usage: "deleted ones too"}),
		snapshots.get(),
		{
			Name: "rm", Usage: "delete snapshots, by name or uid, or those that flags select", ArgsUsage: "[SNAPSHOT...]",
			Description: "Several are deleted at a time. A node removes a few at a time, and those of other tenants in between: ten thousand take a while.\n" +
				"Interrupted, what was begun goes on; the same command deletes the rest. \"dormouse admin catalog status\" shows how it goes on.",
			Flags: callFlags(true, forceFlag(),
				&cli.BoolFlag{Name: "all", Usage: "every snapshot of the tenant that nothing is made from now"},
				&cli.StringFlag{Name: "source", Usage: "those of a sandbox, by uid (it may be gone)"},
				&cli.DurationFlag{Name: "older-than", Usage: "those made longer ago, e.g. 72h"},
				&cli.IntFlag{Name: "parallel", Usage: "how many at a time, 1 to 64", Value: 16}),
			Action: action(0, -1, removeSnapshots),
		},
	}}
}

func forceFlag() cli.Flag {
	return &cli.BoolFlag{Name: "force", Aliases: []string{"f"}, Usage: "those that are not there are no error"}
}

func volumeID(v *dormousev1.Volume) string { return v.GetMeta().GetUid() }

func volumeColumns() []command.Column[*dormousev1.Volume] {
	type col = command.Column[*dormousev1.Volume]
	return []col{
		{Name: "UID", Show: volumeID},
		{Name: "NAME", Show: func(v *dormousev1.Volume) string { return v.GetMeta().GetName() }},
		{Name: "PHASE", Show: func(v *dormousev1.Volume) string { return command.Enum(v.GetStatus().GetPhase(), "VOLUME_PHASE_") }},
		{Name: "NODE", Show: func(v *dormousev1.Volume) string { return v.GetStatus().GetNode() }},
		{Name: "ACCESS", Show: func(v *dormousev1.Volume) string { return command.Enum(v.GetSpec().GetAccess(), "VOLUME_ACCESS_") }},
		{Name: "ATTACHED-TO", Show: attachedTo},
		{Name: "AGE", Show: func(v *dormousev1.Volume) string { return ageOf(v.GetMeta().GetCreateTime()) }},
		{Name: "LIMIT", Wide: true, Show: limitOf},
		{Name: "USED", Wide: true, Show: func(v *dormousev1.Volume) string { return config.FormatBytes(v.GetStatus().GetUsageBytes()) }},
		{Name: "SNAPSHOTS", Wide: true, Show: func(v *dormousev1.Volume) string { return strconv.FormatInt(v.GetStatus().GetSnapshotCount(), 10) }},
	}
}

var volumes = kind[*dormousev1.Volume]{name: "volume", id: volumeID, columns: volumeColumns,
	find: func(c call, ref string) (found[*dormousev1.Volume], error) {
		v, err := c.client.FindVolume(c.ctx, ref)
		if err != nil {
			return found[*dormousev1.Volume]{}, err
		}
		return found[*dormousev1.Volume]{v, v.UID, v.Last}, nil
	}}

func limitOf(v *dormousev1.Volume) string {
	if v.GetSpec().GetSizeLimitBytes() == 0 {
		return "none"
	}
	return config.FormatBytes(v.GetSpec().GetSizeLimitBytes())
}

func attachedTo(v *dormousev1.Volume) string {
	var uids []string
	for _, a := range v.GetStatus().GetAttachments() {
		uids = append(uids, a.GetSandboxUid())
	}
	return strings.Join(uids, ",")
}

func volumeCommands() *cli.Command {
	return &cli.Command{Name: "volume", Usage: "create, list, show and delete volumes", Subcommands: []*cli.Command{
		{
			Name: "create", Usage: "create a volume and print its uid",
			Flags: callFlags(true, append(metaFlags(),
				&cli.StringFlag{Name: "size", Usage: "limit, e.g. 10Gi; none without it"},
				&cli.StringFlag{Name: "node", Usage: "where; any without it"},
				&cli.StringFlag{Name: "access", Usage: "exclusive or shared-read-only", Value: "exclusive"},
				&cli.StringFlag{Name: "from", Usage: "copy this volume"})...),
			Action: action(0, 0, createVolume),
		},
		volumes.ls(func(c call) iter.Seq2[*dormousev1.Volume, error] {
			return c.client.ListVolumes(c.ctx, &dormousev1.ListVolumesRequest{Node: c.String("node"), PageSize: 500})
		}, &cli.StringFlag{Name: "node", Usage: "only those of a node"}),
		volumes.get(),
		volumes.rm("delete volumes"),
	}}
}

func createVolume(c call) error {
	op, err := operationOf(c.Context)
	if err != nil {
		return err
	}
	labels, err := pairs(c.Context, "label", false)
	if err != nil {
		return err
	}
	access, ok := dormousev1.VolumeAccess_value["VOLUME_ACCESS_"+strings.ToUpper(strings.ReplaceAll(c.String("access"), "-", "_"))]
	if !ok || access == 0 {
		return command.Usage(c.Context, "--access %q: exclusive or shared-read-only", c.String("access"))
	}
	spec := &dormousev1.VolumeSpec{Node: c.String("node"), Access: dormousev1.VolumeAccess(access)}
	if size := c.String("size"); size != "" {
		if spec.SizeLimitBytes, err = config.ParseBytes(size); err != nil {
			return command.Usage(c.Context, "--size: %s", err)
		}
	}
	if from := c.String("from"); from != "" {
		source, err := c.client.FindVolume(c.ctx, from)
		if err != nil {
			return err
		}
		spec.SourceVolumeUid = source.UID
	}
	v, err := c.client.CreateVolume(c.ctx, &dormousev1.CreateVolumeRequest{OperationId: op, Name: c.String("name"), Labels: labels, Spec: spec})
	if err != nil {
		return withOperation(err, op)
	}
	return volumes.made(c, v.Last)
}
