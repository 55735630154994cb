package wire

import (
	"github.com/dormouse-run/dormouse/pkg/snapshot"
	"github.com/dormouse-run/dormouse/pkg/volume"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// SnapshotToProto gives the public form.
func SnapshotToProto(s snapshot.Snapshot, r Record) *dormousev1.Snapshot {
	st := s.Status
	return &dormousev1.Snapshot{
		Meta:             meta(s.UID, s.Tenant, s.Name, s.Labels, s.Generation, s.Created, r),
		SourceSandboxUid: text(s.SourceSandboxUID),
		Status: &dormousev1.SnapshotStatus{
			Phase: SnapshotPhaseToProto(st.Phase), SizeBytes: st.SizeBytes, Image: text(st.Image),
			ImageDigest: text(st.ImageDigest), ErofsDigest: text(st.ErofsDigest), RuntimeBundle: text(st.RuntimeBundle),
			RuntimeVersion: text(st.RuntimeVersion), CpuFeatures: texts(st.CPUFeatures), Volumes: volumeRefsToProto(st.Volumes),
			Nodes: texts(st.Nodes), Freeze: toDuration(st.Freeze), Queued: toDuration(st.Queued), Service: toDuration(st.Service), Files: filesToProto(st.Files),
			Reason: text(st.Reason), Message: text(st.Message), ReadyTime: toTime(st.ReadyTime),
		},
	}
}

// SnapshotFromProto reads the public form. When it was frozen is not in it.
func SnapshotFromProto(p *dormousev1.Snapshot) (snapshot.Snapshot, Record, error) {
	m, st := p.GetMeta(), p.GetStatus()
	phase, err := SnapshotPhaseFromProto(st.GetPhase())
	if err != nil {
		return snapshot.Snapshot{}, Record{}, err
	}
	return snapshot.Snapshot{
		UID: m.GetUid(), Tenant: m.GetTenant(), Name: m.GetName(), Labels: cloneMap(m.GetLabels()),
		Generation: m.GetGeneration(), Created: fromTime(m.GetCreateTime()), SourceSandboxUID: p.GetSourceSandboxUid(),
		Status: snapshot.Status{
			Phase: phase, SizeBytes: st.GetSizeBytes(), Image: st.GetImage(), ImageDigest: st.GetImageDigest(),
			ErofsDigest: st.GetErofsDigest(), RuntimeBundle: st.GetRuntimeBundle(), RuntimeVersion: st.GetRuntimeVersion(),
			CPUFeatures: cloneSlice(st.GetCpuFeatures()), Volumes: volumeRefsFromProto(st.GetVolumes()), Nodes: cloneSlice(st.GetNodes()),
			Freeze: st.GetFreeze().AsDuration(), Queued: st.GetQueued().AsDuration(), Service: st.GetService().AsDuration(), Files: filesFromProto(st.GetFiles()),
			Reason: st.GetReason(), Message: st.GetMessage(), ReadyTime: fromTime(st.GetReadyTime()),
		},
	}, record(m), nil
}

// SnapshotObservationToProto gives what a node tells of an artefact that it holds.
func SnapshotObservationToProto(s snapshot.Snapshot) *nodev1.SnapshotObservation {
	st := s.Status
	return &nodev1.SnapshotObservation{
		Uid: text(s.UID), Tenant: text(s.Tenant), SourceSandboxUid: text(s.SourceSandboxUID), SizeBytes: st.SizeBytes,
		Image: text(st.Image), ImageDigest: text(st.ImageDigest), ErofsDigest: text(st.ErofsDigest),
		RuntimeBundle: text(st.RuntimeBundle), RuntimeVersion: text(st.RuntimeVersion), CpuFeatures: texts(st.CPUFeatures),
		Volumes: volumeRefsToProto(st.Volumes), Freeze: toDuration(st.Freeze), Files: filesToProto(st.Files), FreezeTime: toTime(st.FreezeTime),
		Queued: toDuration(st.Queued), Service: toDuration(st.Service),
	}
}

// SnapshotObservationFromProto reads what a node tells of an artefact. The phase is the
// coordinator's to say, and so are names, labels and the nodes that hold it.
func SnapshotObservationFromProto(p *nodev1.SnapshotObservation) snapshot.Snapshot {
	return snapshot.Snapshot{
		UID: p.GetUid(), Tenant: p.GetTenant(), SourceSandboxUID: p.GetSourceSandboxUid(),
		Status: snapshot.Status{
			SizeBytes: p.GetSizeBytes(), Image: p.GetImage(), ImageDigest: p.GetImageDigest(), ErofsDigest: p.GetErofsDigest(),
			RuntimeBundle: p.GetRuntimeBundle(), RuntimeVersion: p.GetRuntimeVersion(), CPUFeatures: cloneSlice(p.GetCpuFeatures()),
			Volumes: volumeRefsFromProto(p.GetVolumes()), Freeze: p.GetFreeze().AsDuration(), Files: filesFromProto(p.GetFiles()),
			FreezeTime: fromTime(p.GetFreezeTime()), Queued: p.GetQueued().AsDuration(), Service: p.GetService().AsDuration(),
		},
	}
}

func volumeRefsToProto(refs []snapshot.VolumeReference) []*dormousev1.VolumeReference {
	var out []*dormousev1.VolumeReference
	for _, v := range refs {
		out = append(out, &dormousev1.VolumeReference{VolumeUid: text(v.VolumeUID), Path: text(v.Path), ReadOnly: v.ReadOnly})
	}
	return out
}

func volumeRefsFromProto(refs []*dormousev1.VolumeReference) []snapshot.VolumeReference {
	var out []snapshot.VolumeReference
	for _, v := range refs {
		out = append(out, snapshot.VolumeReference{VolumeUID: v.GetVolumeUid(), Path: v.GetPath(), ReadOnly: v.GetReadOnly()})
	}
	return out
}

func filesToProto(files []snapshot.File) []*dormousev1.SnapshotFile {
	var out []*dormousev1.SnapshotFile
	for _, f := range files {
		out = append(out, &dormousev1.SnapshotFile{Name: text(f.Name), SizeBytes: f.SizeBytes, Digest: text(f.Digest)})
	}
	return out
}

func filesFromProto(files []*dormousev1.SnapshotFile) []snapshot.File {
	var out []snapshot.File
	for _, f := range files {
		out = append(out, snapshot.File{Name: f.GetName(), SizeBytes: f.GetSizeBytes(), Digest: f.GetDigest()})
	}
	return out
}

// SnapshotPhaseToProto gives the enum of a phase; Gone is UNSPECIFIED.
func SnapshotPhaseToProto(p snapshot.Phase) dormousev1.SnapshotPhase {
	return enumToProto[dormousev1.SnapshotPhase](dormousev1.SnapshotPhase_value, "SNAPSHOT_PHASE_", string(p))
}

// SnapshotPhaseFromProto gives the phase of an enum; UNSPECIFIED is Gone.
func SnapshotPhaseFromProto(p dormousev1.SnapshotPhase) (snapshot.Phase, error) {
	return enumFromProto(p, snapshot.Phases(), SnapshotPhaseToProto, "phase")
}

// VolumeUse is who uses a volume: the catalog's knowledge, shown with the volume.
type VolumeUse struct {
	Attachments   []VolumeAttachment
	SnapshotUIDs  []string
	SnapshotCount int64
}

// VolumeAttachment is one sandbox that has a volume.
type VolumeAttachment struct {
	SandboxUID string
	ReadOnly   bool
}

// VolumeToProto gives the public form.
func VolumeToProto(v volume.Volume, use VolumeUse, r Record) *dormousev1.Volume {
	p := &dormousev1.Volume{
		Meta: meta(v.UID, v.Tenant, v.Name, v.Labels, v.Generation, v.Created, r),
		Spec: VolumeSpecToProto(v.Spec),
		Status: &dormousev1.VolumeStatus{
			Phase: VolumePhaseToProto(v.Status.Phase), Node: text(v.Status.Node), UsageBytes: v.Status.UsageBytes,
			Reason: text(v.Status.Reason), Message: text(v.Status.Message),
			SnapshotUids: texts(use.SnapshotUIDs), SnapshotCount: use.SnapshotCount,
		},
	}
	for _, a := range use.Attachments {
		p.Status.Attachments = append(p.Status.Attachments, &dormousev1.VolumeAttachment{SandboxUid: text(a.SandboxUID), ReadOnly: a.ReadOnly})
	}
	return p
}

// VolumeFromProto reads the public form.
func VolumeFromProto(p *dormousev1.Volume) (volume.Volume, VolumeUse, Record, error) {
	m, st := p.GetMeta(), p.GetStatus()
	phase, err := VolumePhaseFromProto(st.GetPhase())
	if err != nil {
		return volume.Volume{}, VolumeUse{}, Record{}, err
	}
	spec, err := VolumeSpecFromProto(p.GetSpec())
	if err != nil {
		return volume.Volume{}, VolumeUse{}, Record{}, err
	}
	use := VolumeUse{SnapshotUIDs: cloneSlice(st.GetSnapshotUids()), SnapshotCount: st.GetSnapshotCount()}
	for _, a := range st.GetAttachments() {
		use.Attachments = append(use.Attachments, VolumeAttachment{SandboxUID: a.GetSandboxUid(), ReadOnly: a.GetReadOnly()})
	}
	return volume.Volume{
		UID: m.GetUid(), Tenant: m.GetTenant(), Name: m.GetName(), Labels: cloneMap(m.GetLabels()),
		Generation: m.GetGeneration(), Created: fromTime(m.GetCreateTime()), Spec: spec,
		Status: volume.Status{Phase: phase, Node: st.GetNode(), UsageBytes: st.GetUsageBytes(), Reason: st.GetReason(), Message: st.GetMessage()},
	}, use, record(m), nil
}

// VolumeSpecToProto gives the public form of a spec.
func VolumeSpecToProto(s volume.Spec) *dormousev1.VolumeSpec {
	return &dormousev1.VolumeSpec{
		SizeLimitBytes: s.SizeLimitBytes, Node: text(s.Node), Access: accessToProto(s.Access), SourceVolumeUid: text(s.SourceVolumeUID),
	}
}

// VolumeSpecFromProto reads the public form of a spec; an access that is not given is Exclusive.
func VolumeSpecFromProto(p *dormousev1.VolumeSpec) (volume.Spec, error) {
	access, err := enumFromProto(p.GetAccess(), []volume.Access{volume.Exclusive, volume.SharedReadOnly}, accessToProto, "spec.access")
	if err != nil {
		return volume.Spec{}, err
	}
	if access == "" {
		access = volume.Exclusive
	}
	return volume.Spec{SizeLimitBytes: p.GetSizeLimitBytes(), Node: p.GetNode(), Access: access, SourceVolumeUID: p.GetSourceVolumeUid()}, nil
}

func accessToProto(a volume.Access) dormousev1.VolumeAccess {
	return enumToProto[dormousev1.VolumeAccess](dormousev1.VolumeAccess_value, "VOLUME_ACCESS_", string(a))
}

// VolumeObservationToProto gives what a node tells of a volume.
func VolumeObservationToProto(v volume.Volume) *nodev1.VolumeObservation {
	return &nodev1.VolumeObservation{Uid: text(v.UID), Tenant: text(v.Tenant), SizeLimitBytes: v.Spec.SizeLimitBytes, UsageBytes: v.Status.UsageBytes}
}

// VolumeObservationFromProto reads what a node tells of a volume.
func VolumeObservationFromProto(p *nodev1.VolumeObservation) volume.Volume {
	return volume.Volume{
		UID: p.GetUid(), Tenant: p.GetTenant(),
		Spec:   volume.Spec{SizeLimitBytes: p.GetSizeLimitBytes()},
		Status: volume.Status{UsageBytes: p.GetUsageBytes()},
	}
}

// VolumePhaseToProto gives the enum of a phase; Gone is UNSPECIFIED.
func VolumePhaseToProto(p volume.Phase) dormousev1.VolumePhase {
	return enumToProto[dormousev1.VolumePhase](dormousev1.VolumePhase_value, "VOLUME_PHASE_", string(p))
}

// VolumePhaseFromProto gives the phase of an enum; UNSPECIFIED is Gone.
func VolumePhaseFromProto(p dormousev1.VolumePhase) (volume.Phase, error) {
	return enumFromProto(p, volume.Phases(), VolumePhaseToProto, "phase")
}
