package wire

import (
	"time"

	"github.com/dormouse-run/dormouse/pkg/warm"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// TemplatePhaseToProto gives the enum of a phase.
func TemplatePhaseToProto(p warm.TemplatePhase) dormousev1.TemplatePhase {
	return enumToProto[dormousev1.TemplatePhase](dormousev1.TemplatePhase_value, "TEMPLATE_PHASE_", string(p))
}

// TemplatePhaseFromProto gives the phase of an enum; UNSPECIFIED is Gone.
func TemplatePhaseFromProto(p dormousev1.TemplatePhase) (warm.TemplatePhase, error) {
	return enumFromProto(p, warm.TemplatePhases(), TemplatePhaseToProto, "phase")
}

// TemplateSpecFromProto reads the public form; nil is the empty spec. It does not validate.
func TemplateSpecFromProto(p *dormousev1.TemplateSpec) (warm.TemplateSpec, error) {
	box, err := SpecFromProto(p.GetSandbox())
	if err != nil {
		return warm.TemplateSpec{}, err
	}
	s := warm.TemplateSpec{Sandbox: box, Readiness: warm.Readiness{Argv: cloneSlice(p.GetReadiness().GetArgv())}}
	if s.Readiness.Timeout, err = TimerFromProto("spec.readiness.timeout", p.GetReadiness().GetTimeout()); err != nil {
		return s, err
	}
	for _, c := range p.GetSetup() {
		var limit time.Duration
		if limit, err = TimerFromProto("spec.setup.timeout", c.GetTimeout()); err != nil {
			return s, err
		}
		s.Setup = append(s.Setup, warm.Command{Argv: cloneSlice(c.GetArgv()), Env: cloneMap(c.GetEnv()), User: c.GetUser(), WorkingDir: c.GetWorkingDir(), Timeout: limit})
	}
	return s, nil
}

// TemplateSpecToProto gives the public form.
func TemplateSpecToProto(s warm.TemplateSpec) *dormousev1.TemplateSpec {
	p := &dormousev1.TemplateSpec{Sandbox: SpecToProto(s.Sandbox)}
	for _, c := range s.Setup {
		p.Setup = append(p.Setup, &dormousev1.SetupCommand{Argv: texts(c.Argv), Env: cloneMap(c.Env), User: text(c.User), WorkingDir: text(c.WorkingDir), Timeout: toDuration(c.Timeout)})
	}
	if len(s.Readiness.Argv) > 0 {
		p.Readiness = &dormousev1.ReadinessCheck{Argv: texts(s.Readiness.Argv), Timeout: toDuration(s.Readiness.Timeout)}
	}
	return p
}

// TemplateToProto gives the public form.
func TemplateToProto(t warm.Template, r Record) *dormousev1.Template {
	st := t.Status
	p := &dormousev1.Template{
		Meta: meta(t.UID, t.Tenant, t.Name, t.Labels, t.Generation, t.Created, r), Spec: TemplateSpecToProto(t.Spec),
		Status: &dormousev1.TemplateStatus{Phase: TemplatePhaseToProto(st.Phase), SnapshotUid: text(st.SnapshotUID), Node: text(st.Node),
			SetupDone: int32(st.SetupDone), Reason: text(st.Reason), Message: text(st.Message), ReadyTime: toTime(st.ReadyTime)}, //nolint:gosec // bounded by MaxSetup
	}
	if f := st.Failure; f != nil {
		p.Status.Failure = &dormousev1.CommandFailure{Step: text(f.Step), Index: int32(f.Index), ExitCode: int32(f.ExitCode), TimedOut: f.TimedOut, OutputTail: text(f.Tail)} //nolint:gosec // bounded
	}
	return p
}

// PoolMembers is what there is of a pool.
type PoolMembers struct {
	Ready, Filling, Draining int
	MemoryBytes              int64
}

// PoolSpecFromProto reads the public form. It does not validate.
func PoolSpecFromProto(p *dormousev1.PoolSpec) warm.PoolSpec {
	return warm.PoolSpec{TemplateUID: p.GetTemplateUid(), Size: int(p.GetSize()), MaxMembers: int(p.GetMaxMembers()), MaxMemoryBytes: p.GetMaxMemoryBytes()}
}

// PoolToProto gives the public form.
func PoolToProto(p warm.Pool, m PoolMembers, r Record) *dormousev1.Pool {
	st := p.Status
	out := &dormousev1.Pool{
		Meta: meta(p.UID, p.Tenant, p.Name, p.Labels, p.Generation, p.Created, r),
		Spec: &dormousev1.PoolSpec{TemplateUid: text(p.Spec.TemplateUID), Size: int32(p.Spec.Size), MaxMembers: int32(p.Spec.MaxMembers), MaxMemoryBytes: p.Spec.MaxMemoryBytes}, //nolint:gosec // bounded by MaxPool
		Status: &dormousev1.PoolStatus{
			Phase: enumToProto[dormousev1.PoolPhase](dormousev1.PoolPhase_value, "POOL_PHASE_", string(st.Phase)),
			Ready: int32(m.Ready), Filling: int32(m.Filling), Draining: int32(m.Draining), MemoryBytes: m.MemoryBytes, //nolint:gosec // bounded by MaxPool
			ClaimedCount: st.Claimed, Failures: int32(st.Failures), LastError: text(st.LastError), LastFailureTime: toTime(st.LastFailure)}, //nolint:gosec // of one pool
	}
	for _, c := range st.Conditions {
		out.Status.Conditions = append(out.Status.Conditions, conditionToProto(c))
	}
	return out
}
