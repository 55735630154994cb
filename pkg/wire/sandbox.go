package wire

import (
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// Record is what the store knows of an object beside the object itself.
type Record struct {
	Revision uint64
	Updated  time.Time
}

// SandboxToProto gives the public form.
func SandboxToProto(s sandbox.Sandbox, r Record) *dormousev1.Sandbox {
	return &dormousev1.Sandbox{
		Meta:   meta(s.UID, s.Tenant, s.Name, s.Labels, s.Generation, s.Created, r),
		Spec:   SpecToProto(s.Spec),
		Status: StatusToProto(s.Status),
	}
}

// SandboxFromProto reads the public form. Enum values that this build does not know are INVALID_FIELD.
func SandboxFromProto(p *dormousev1.Sandbox) (sandbox.Sandbox, Record, error) {
	spec, err := SpecFromProto(p.GetSpec())
	if err != nil {
		return sandbox.Sandbox{}, Record{}, err
	}
	st, err := StatusFromProto(p.GetStatus())
	if err != nil {
		return sandbox.Sandbox{}, Record{}, err
	}
	m := p.GetMeta()
	return sandbox.Sandbox{
		UID: m.GetUid(), Tenant: m.GetTenant(), Name: m.GetName(), Labels: cloneMap(m.GetLabels()),
		Generation: m.GetGeneration(), Created: fromTime(m.GetCreateTime()), Spec: spec, Status: st,
	}, record(m), nil
}

// SpecToProto gives the public form of a spec.
func SpecToProto(s sandbox.Spec) *dormousev1.SandboxSpec {
	p := &dormousev1.SandboxSpec{
		Image: text(s.Image), Command: texts(s.Command), RunImageCommand: s.RunImageCommand, Env: cloneMap(s.Env),
		User: text(s.User), WorkingDir: text(s.WorkingDir), Network: networkToProto(s.Network), RuntimeClass: text(s.RuntimeClass),
		NodeSelector: cloneMap(s.NodeSelector), Hostname: text(s.Hostname), Resources: resourcesToProto(s.Resources), Egress: EgressToProto(s.Egress),
		IdleTimeout: toDuration(s.IdleTimeout), OnIdle: IdleActionToProto(s.OnIdle), Lifetime: toDuration(s.Lifetime), WakeOnUse: s.WakeOnUse,
		ExposedPorts: cloneSlice(s.ExposedPorts),
	}
	for _, v := range s.Volumes {
		p.Volumes = append(p.Volumes, &dormousev1.VolumeMount{VolumeUid: text(v.VolumeUID), Path: text(v.Path), ReadOnly: v.ReadOnly})
	}
	return p
}

// SpecFromProto reads the public form of a spec; nil is the empty spec. It does not validate.
func SpecFromProto(p *dormousev1.SandboxSpec) (sandbox.Spec, error) {
	network, err := networkFromProto(p.GetNetwork())
	if err != nil {
		return sandbox.Spec{}, err
	}
	egress, err := EgressFromProto(p.GetEgress())
	if err != nil {
		return sandbox.Spec{}, err
	}
	s := sandbox.Spec{
		Image: p.GetImage(), Command: cloneSlice(p.GetCommand()), RunImageCommand: p.GetRunImageCommand(), Env: cloneMap(p.GetEnv()),
		User: p.GetUser(), WorkingDir: p.GetWorkingDir(), Network: network, RuntimeClass: p.GetRuntimeClass(),
		NodeSelector: cloneMap(p.GetNodeSelector()), Hostname: p.GetHostname(), Resources: resourcesFromProto(p.GetResources()), Egress: egress,
		WakeOnUse: p.GetWakeOnUse(), ExposedPorts: cloneSlice(p.GetExposedPorts()),
	}
	if s.OnIdle, err = IdleActionFromProto(p.GetOnIdle()); err != nil {
		return sandbox.Spec{}, err
	}
	if s.IdleTimeout, err = TimerFromProto("spec.idle_timeout", p.GetIdleTimeout()); err != nil {
		return sandbox.Spec{}, err
	}
	if s.Lifetime, err = TimerFromProto("spec.lifetime", p.GetLifetime()); err != nil {
		return sandbox.Spec{}, err
	}
	for _, v := range p.GetVolumes() {
		s.Volumes = append(s.Volumes, sandbox.VolumeMount{VolumeUID: v.GetVolumeUid(), Path: v.GetPath(), ReadOnly: v.GetReadOnly()})
	}
	return s, nil
}

// IdleActionToProto gives the enum of an action.
func IdleActionToProto(a sandbox.IdleAction) dormousev1.IdleAction {
	return enumToProto[dormousev1.IdleAction](dormousev1.IdleAction_value, "IDLE_ACTION_", string(a))
}

// IdleActionFromProto gives the action of an enum.
func IdleActionFromProto(a dormousev1.IdleAction) (sandbox.IdleAction, error) {
	return enumFromProto(a, []sandbox.IdleAction{sandbox.IdlePause, sandbox.IdleHibernate, sandbox.IdleDelete}, IdleActionToProto, "on_idle")
}

// TimerFromProto reads a time that a sandbox is given.
func TimerFromProto(field string, d *durationpb.Duration) (time.Duration, error) {
	if d == nil {
		return 0, nil
	}
	if d.CheckValid() != nil || d.AsDuration() < 0 {
		return 0, errs.New(errs.InvalidField, "%s: no duration that can be", field).With("field", field)
	}
	return d.AsDuration(), nil
}

func resourcesToProto(r sandbox.Resources) *dormousev1.Resources {
	if r == (sandbox.Resources{}) {
		return nil
	}
	return &dormousev1.Resources{
		CpuRequestMillis: r.CPURequestMillis, CpuLimitMillis: r.CPULimitMillis,
		MemoryRequestBytes: r.MemoryRequestBytes, MemoryLimitBytes: r.MemoryLimitBytes, DiskLimitBytes: r.DiskLimitBytes,
	}
}

func resourcesFromProto(p *dormousev1.Resources) sandbox.Resources {
	return sandbox.Resources{
		CPURequestMillis: p.GetCpuRequestMillis(), CPULimitMillis: p.GetCpuLimitMillis(),
		MemoryRequestBytes: p.GetMemoryRequestBytes(), MemoryLimitBytes: p.GetMemoryLimitBytes(), DiskLimitBytes: p.GetDiskLimitBytes(),
	}
}

func conditionToProto(c sandbox.Condition) *dormousev1.Condition {
	return &dormousev1.Condition{
		Type: text(c.Type), Status: c.Status, Reason: text(c.Reason), Message: text(c.Message), LastTransitionTime: toTime(c.LastTransitionTime),
	}
}

// StatusToProto gives the public form of a status. The observation counter stays between node and coordinator.
func StatusToProto(s sandbox.Status) *dormousev1.SandboxStatus {
	p := &dormousev1.SandboxStatus{
		Phase: SandboxPhaseToProto(s.Phase), ObservedGeneration: s.ObservedGeneration, Node: text(s.Node),
		ImageDigest: text(s.ImageDigest), ErofsDigest: text(s.ErofsDigest), RuntimeBundle: text(s.RuntimeBundle),
		RestoredFrom: text(s.RestoredFrom), StartTime: toTime(s.StartTime), ExitCode: clonePtr(s.ExitCode),
		Reason: text(s.Reason), Message: text(s.Message), LastFreeze: toDuration(s.LastFreeze),
		StartQueued: toDuration(s.StartQueued), StartService: toDuration(s.StartService),
	}
	for _, c := range s.Conditions {
		p.Conditions = append(p.Conditions, conditionToProto(c))
	}
	return p
}

// StatusFromProto reads the public form of a status.
func StatusFromProto(p *dormousev1.SandboxStatus) (sandbox.Status, error) {
	phase, err := SandboxPhaseFromProto(p.GetPhase())
	if err != nil {
		return sandbox.Status{}, err
	}
	s := sandbox.Status{
		Phase: phase, ObservedGeneration: p.GetObservedGeneration(), Node: p.GetNode(),
		ImageDigest: p.GetImageDigest(), ErofsDigest: p.GetErofsDigest(), RuntimeBundle: p.GetRuntimeBundle(),
		RestoredFrom: p.GetRestoredFrom(), StartTime: fromTime(p.GetStartTime()),
		Reason: p.GetReason(), Message: p.GetMessage(), LastFreeze: p.GetLastFreeze().AsDuration(),
		StartQueued: p.GetStartQueued().AsDuration(), StartService: p.GetStartService().AsDuration(),
	}
	if p != nil {
		s.ExitCode = clonePtr(p.ExitCode)
	}
	for _, c := range p.GetConditions() {
		s.Conditions = append(s.Conditions, sandbox.Condition{
			Type: c.GetType(), Status: c.GetStatus(), Reason: c.GetReason(), Message: c.GetMessage(), LastTransitionTime: fromTime(c.GetLastTransitionTime()),
		})
	}
	return s, nil
}

// SandboxObservationToProto gives what a node tells of a sandbox.
func SandboxObservationToProto(uid, tenant string, s sandbox.Status) *nodev1.SandboxObservation {
	return &nodev1.SandboxObservation{
		Uid: text(uid), Tenant: text(tenant), Phase: SandboxPhaseToProto(s.Phase), ObservedGeneration: s.ObservedGeneration,
		ImageDigest: text(s.ImageDigest), ErofsDigest: text(s.ErofsDigest), RuntimeBundle: text(s.RuntimeBundle),
		RestoredFrom: text(s.RestoredFrom), StartTime: toTime(s.StartTime), ExitCode: clonePtr(s.ExitCode),
		Reason: text(s.Reason), Message: text(s.Message), Observation: s.Observation,
		StartQueued: toDuration(s.StartQueued), StartService: toDuration(s.StartService),
	}
}

// SandboxObservationFromProto reads what a node tells of a sandbox. Conditions, the node's name and
// the last freeze are not the node's to tell here.
func SandboxObservationFromProto(p *nodev1.SandboxObservation) (uid, tenant string, s sandbox.Status, err error) {
	phase, err := SandboxPhaseFromProto(p.GetPhase())
	if err != nil {
		return "", "", sandbox.Status{}, err
	}
	s = sandbox.Status{
		Phase: phase, ObservedGeneration: p.GetObservedGeneration(),
		ImageDigest: p.GetImageDigest(), ErofsDigest: p.GetErofsDigest(), RuntimeBundle: p.GetRuntimeBundle(),
		RestoredFrom: p.GetRestoredFrom(), StartTime: fromTime(p.GetStartTime()),
		Reason: p.GetReason(), Message: p.GetMessage(), Observation: p.GetObservation(),
		StartQueued: p.GetStartQueued().AsDuration(), StartService: p.GetStartService().AsDuration(),
	}
	if p != nil {
		s.ExitCode = clonePtr(p.ExitCode)
	}
	return p.GetUid(), p.GetTenant(), s, nil
}

// SandboxPhaseToProto gives the enum of a phase; Gone and what is unknown are UNSPECIFIED.
func SandboxPhaseToProto(p sandbox.Phase) dormousev1.SandboxPhase {
	return enumToProto[dormousev1.SandboxPhase](dormousev1.SandboxPhase_value, "SANDBOX_PHASE_", string(p))
}

// SandboxPhaseFromProto gives the phase of an enum; UNSPECIFIED is Gone.
func SandboxPhaseFromProto(p dormousev1.SandboxPhase) (sandbox.Phase, error) {
	return enumFromProto(p, sandbox.Phases(), SandboxPhaseToProto, "phase")
}

// NetworkModesToProto gives the public form of a node's modes.
func NetworkModesToProto(modes []sandbox.NetworkMode) []dormousev1.NetworkMode {
	var out []dormousev1.NetworkMode
	for _, m := range modes {
		out = append(out, networkToProto(m))
	}
	return out
}

// NetworkModesFromProto reads a node's modes; those that are not known here are left out.
func NetworkModesFromProto(modes []dormousev1.NetworkMode) []sandbox.NetworkMode {
	var out []sandbox.NetworkMode
	for _, m := range modes {
		if mode, err := networkFromProto(m); err == nil && mode != "" {
			out = append(out, mode)
		}
	}
	return out
}

func networkToProto(n sandbox.NetworkMode) dormousev1.NetworkMode {
	return enumToProto[dormousev1.NetworkMode](dormousev1.NetworkMode_value, "NETWORK_MODE_", string(n))
}

func networkFromProto(n dormousev1.NetworkMode) (sandbox.NetworkMode, error) {
	return enumFromProto(n, []sandbox.NetworkMode{sandbox.NetworkNone, sandbox.NetworkOutbound}, networkToProto, "spec.network")
}

// enumToProto finds the enum's value by the domain's text: "Running" is PREFIX_RUNNING.
func enumToProto[E ~int32](values map[string]int32, prefix, text string) E {
	return E(values[prefix+strings.ToUpper(text)])
}

// enumFromProto finds the domain's value that maps to the enum's; zero is the empty text.
func enumFromProto[D ~string, E interface {
	~int32
	protoreflect.Enum
}](e E, all []D, toProto func(D) E, field string) (D, error) {
	if e == 0 {
		return "", nil
	}
	for _, d := range all {
		if toProto(d) == e {
			return d, nil
		}
	}
	return "", errs.New(errs.InvalidField, "%s: there is no value %d of %s", field, e.Number(), e.Descriptor().Name()).With("field", field)
}

func meta(uid, tenant, name string, labels map[string]string, generation int64, created time.Time, r Record) *dormousev1.ObjectMeta {
	return &dormousev1.ObjectMeta{
		Uid: text(uid), Tenant: text(tenant), Name: text(name), Labels: cloneMap(labels), Generation: generation,
		Revision: r.Revision, CreateTime: toTime(created), UpdateTime: toTime(r.Updated),
	}
}

func record(m *dormousev1.ObjectMeta) Record {
	return Record{Revision: m.GetRevision(), Updated: fromTime(m.GetUpdateTime())}
}

// text makes what may come from a guest or an image valid for a proto string.
func text(s string) string { return strings.ToValidUTF8(s, "\ufffd") }

func texts(in []string) []string {
	if len(in) == 0 {
		return nil
	}
	out := make([]string, len(in))
	for i, s := range in {
		out[i] = text(s)
	}
	return out
}

// cloneMap copies a map; an empty one is nil, as it is after a round trip.
func cloneMap(m map[string]string) map[string]string {
	if len(m) == 0 {
		return nil
	}
	for k, v := range m {
		if text(k) != k || text(v) != v {
			out := make(map[string]string, len(m))
			for k, v := range m {
				out[text(k)] = text(v)
			}
			return out
		}
	}
	return maps.Clone(m)
}

func cloneSlice[T any](s []T) []T {
	if len(s) == 0 {
		return nil
	}
	return slices.Clone(s)
}

func clonePtr[T any](p *T) *T {
	if p == nil {
		return nil
	}
	c := *p
	return &c
}

func toTime(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

func fromTime(p *timestamppb.Timestamp) time.Time {
	if p == nil {
		return time.Time{}
	}
	return p.AsTime()
}

func toDuration(d time.Duration) *durationpb.Duration {
	if d == 0 {
		return nil
	}
	return durationpb.New(d)
}
