package wire

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/snapshot"
	"github.com/dormouse-run/dormouse/pkg/volume"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// random fills every exported field of a value, except what the mapping leaves out on purpose.
func random(r *rand.Rand, v reflect.Value) {
	switch x := v.Addr().Interface().(type) {
	case *time.Time:
		*x = time.Unix(r.Int64N(4e9), r.Int64N(1e9)).UTC()
		return
	case *sandbox.Phase:
		*x = pick(r, append(sandbox.Phases(), sandbox.Gone))
		return
	case *snapshot.Phase:
		*x = pick(r, append(snapshot.Phases(), snapshot.Gone))
		return
	case *volume.Phase:
		*x = pick(r, append(volume.Phases(), volume.Gone))
		return
	case *volume.Access:
		*x = pick(r, []volume.Access{volume.Exclusive, volume.SharedReadOnly})
		return
	case *sandbox.NetworkMode:
		*x = pick(r, []sandbox.NetworkMode{"", sandbox.NetworkNone, sandbox.NetworkOutbound})
		return
	case *sandbox.IdleAction:
		*x = pick(r, []sandbox.IdleAction{"", sandbox.IdlePause, sandbox.IdleHibernate, sandbox.IdleDelete})
		return
	case *sandbox.EgressAction:
		*x = pick(r, []sandbox.EgressAction{"", sandbox.EgressAllow, sandbox.EgressDeny})
		return
	case *sandbox.Protocol:
		*x = pick(r, []sandbox.Protocol{"", sandbox.TCP, sandbox.UDP, sandbox.ICMP})
		return
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString(fmt.Sprintf("t\u00e9xt-%d", r.IntN(1000)))
	case reflect.Bool:
		v.SetBool(r.IntN(2) == 0)
	case reflect.Int32, reflect.Int64:
		v.SetInt(r.Int64N(1 << 30))
	case reflect.Uint16, reflect.Uint32:
		v.SetUint(uint64(r.IntN(1 << 16)))
	case reflect.Uint64:
		v.SetUint(r.Uint64())
	case reflect.Struct:
		for i := range v.NumField() {
			random(r, v.Field(i))
		}
	case reflect.Pointer:
		if r.IntN(3) > 0 {
			v.Set(reflect.New(v.Type().Elem()))
			random(r, v.Elem())
		}
	case reflect.Slice:
		if n := r.IntN(4); n > 0 {
			v.Set(reflect.MakeSlice(v.Type(), n, n))
			for i := range n {
				random(r, v.Index(i))
			}
		}
	case reflect.Map:
		if n := r.IntN(4); n > 0 {
			v.Set(reflect.MakeMap(v.Type()))
			for range n {
				k, e := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
				random(r, k)
				random(r, e)
				v.SetMapIndex(k, e)
			}
		}
	default:
		panic(v.Type())
	}
}

func pick[T any](r *rand.Rand, from []T) T { return from[r.IntN(len(from))] }

func made[T any](r *rand.Rand) T {
	var v T
	random(r, reflect.ValueOf(&v).Elem())
	return v
}

// over sends a message through its bytes.
func over[M proto.Message](t *testing.T, m M, fresh M) M {
	t.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	if err := proto.Unmarshal(b, fresh); err != nil {
		t.Fatal(err)
	}
	return fresh
}

func check(t *testing.T, what string, want, got any) {
	t.Helper()
	if d := cmp.Diff(want, got); d != "" {
		t.Fatalf("%s (-want +got):\n%s", what, d)
	}
}

func TestObjectsRoundTrip(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 1))
		rec := made[Record](r)

		s := made[sandbox.Sandbox](r)
		s.OperationID, s.Status.Observation = "", 0 // not public
		gotS, gotRec, err := SandboxFromProto(over(t, SandboxToProto(s, rec), &dormousev1.Sandbox{}))
		if err != nil {
			t.Fatal(err)
		}
		check(t, "sandbox", s, gotS)
		check(t, "record", rec, gotRec)

		st := made[sandbox.Status](r)
		st.Conditions, st.Node, st.LastFreeze = nil, "", 0 // not the node's to tell
		uid, tenant, gotSt, err := SandboxObservationFromProto(over(t, SandboxObservationToProto("u", "t", st), &nodev1.SandboxObservation{}))
		if err != nil || uid != "u" || tenant != "t" {
			t.Fatal(uid, tenant, err)
		}
		check(t, "observation", st, gotSt)

		n := made[snapshot.Snapshot](r)
		n.OperationID, n.Status.FreezeTime = "", time.Time{} // not public
		gotN, gotRec, err := SnapshotFromProto(over(t, SnapshotToProto(n, rec), &dormousev1.Snapshot{}))
		if err != nil {
			t.Fatal(err)
		}
		check(t, "snapshot", n, gotN)
		check(t, "record", rec, gotRec)

		full := made[snapshot.Snapshot](r)
		o := snapshot.Snapshot{UID: full.UID, Tenant: full.Tenant, SourceSandboxUID: full.SourceSandboxUID, Status: full.Status}
		o.Status.Phase, o.Status.Nodes, o.Status.Reason, o.Status.Message, o.Status.ReadyTime = "", nil, "", "", time.Time{}
		check(t, "artefact", o, SnapshotObservationFromProto(over(t, SnapshotObservationToProto(full), &nodev1.SnapshotObservation{})))

		v, use := made[volume.Volume](r), made[VolumeUse](r)
		v.OperationID = "" // not public
		gotV, gotUse, gotRec, err := VolumeFromProto(over(t, VolumeToProto(v, use, rec), &dormousev1.Volume{}))
		if err != nil {
			t.Fatal(err)
		}
		check(t, "volume", v, gotV)
		check(t, "use", use, gotUse)
		check(t, "record", rec, gotRec)

		ov := VolumeObservationFromProto(over(t, VolumeObservationToProto(v), &nodev1.VolumeObservation{}))
		check(t, "volume observation", [4]any{v.UID, v.Tenant, v.Spec.SizeLimitBytes, v.Status.UsageBytes}, [4]any{ov.UID, ov.Tenant, ov.Spec.SizeLimitBytes, ov.Status.UsageBytes})
	}
}

func TestEnumsAreClosed(t *testing.T) {
	for e := range dormousev1.SandboxPhase_name {
		if p, err := SandboxPhaseFromProto(dormousev1.SandboxPhase(e)); err != nil || SandboxPhaseToProto(p) != dormousev1.SandboxPhase(e) {
			t.Errorf("sandbox phase %d: %q, %v", e, p, err)
		}
	}
	for e := range dormousev1.SnapshotPhase_name {
		if p, err := SnapshotPhaseFromProto(dormousev1.SnapshotPhase(e)); err != nil || SnapshotPhaseToProto(p) != dormousev1.SnapshotPhase(e) {
			t.Errorf("snapshot phase %d: %q, %v", e, p, err)
		}
	}
	for e := range dormousev1.VolumePhase_name {
		if p, err := VolumePhaseFromProto(dormousev1.VolumePhase(e)); err != nil || VolumePhaseToProto(p) != dormousev1.VolumePhase(e) {
			t.Errorf("volume phase %d: %q, %v", e, p, err)
		}
	}
	if _, err := SpecFromProto(&dormousev1.SandboxSpec{Network: 99}); !errs.Has(err, errs.InvalidField) {
		t.Errorf("network 99: %v", err)
	}
	if _, err := SandboxPhaseFromProto(99); !errs.Has(err, errs.InvalidField) {
		t.Errorf("phase 99: %v", err)
	}
	if s, err := VolumeSpecFromProto(nil); err != nil || s.Access != volume.Exclusive {
		t.Errorf("no spec: %+v %v", s, err)
	}
	if s, err := SpecFromProto(nil); err != nil || s.Image != "" {
		t.Errorf("no spec: %+v %v", s, err)
	}
	if got := SpecToProto(sandbox.Spec{Env: map[string]string{"A": "\xff"}, Command: []string{"\xff"}}); !valid(t, got) {
		t.Error("invalid UTF-8 went through")
	}
}

func valid(t *testing.T, m proto.Message) bool {
	t.Helper()
	_, err := proto.Marshal(m)
	return err == nil
}
