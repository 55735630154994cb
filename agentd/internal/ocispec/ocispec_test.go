package ocispec

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

func describe() Sandbox {
	return Sandbox{
		Hostname: "box", Rootfs: "/images/a.erofs", Init: "/bundle/guestinit.erofs", InitArgs: []string{"serve"}, NetNS: "/proc/1/fd/7",
		MemoryBytes: 256 << 20, MemoryRequest: 16 << 20, LayerBytes: 32 << 20, CPUMillis: 1500, CPURequest: 500, HostThreads: 300,
		Volumes: []Volume{{Source: "/v/2", Path: "/data/inner", ReadOnly: true}, {Source: "/v/1", Path: "/data"}},
	}
}

func build(t *testing.T, s Sandbox) *specs.Spec {
	t.Helper()
	spec, err := New(s)
	if err != nil {
		t.Fatal(err)
	}
	return spec
}

func TestNew(t *testing.T) {
	spec := build(t, describe())
	if got, want := spec.Process.Args, []string{"/.dormouse/guestinit", "serve"}; !cmp.Equal(got, want) {
		t.Errorf("args %v", got)
	}
	r := spec.Linux.Resources
	if got, want := *r.Memory.Limit, int64(256<<20+32<<20+SentryMemory); got != want {
		t.Errorf("memory limit %d, want %d", got, want)
	}
	if got := *r.Memory.Reservation; got != 16<<20 {
		t.Errorf("memory reserved %d", got)
	}
	if *r.CPU.Quota != 150_000 || *r.CPU.Period != 100_000 || *r.CPU.Shares != 512 || *r.Pids.Limit != 300 {
		t.Errorf("resources %+v", r)
	}
	if got := spec.Annotations[annRootOptions]; got != "size=33554432" {
		t.Errorf("layer %q", got)
	}
	want := []Volume{{Source: "/v/1", Path: "/data"}, {Source: "/v/2", Path: "/data/inner", ReadOnly: true}}
	if diff := cmp.Diff(want, Volumes(spec)); diff != "" {
		t.Errorf("volumes: %s", diff)
	}
	if Image(spec) != "/images/a.erofs" {
		t.Errorf("image %q", Image(spec))
	}
	a, _ := json.Marshal(spec)
	b, _ := json.Marshal(build(t, describe()))
	if string(a) != string(b) {
		t.Error("the same description gave two specs")
	}
}

func TestTmpIsGuardedUnlessAVolumeIsThere(t *testing.T) {
	has := func(s Sandbox) bool {
		for _, m := range build(t, s).Mounts {
			if m.Destination == tmpGuard {
				return true
			}
		}
		return false
	}
	s := describe()
	if !has(s) {
		t.Error("/tmp is not guarded")
	}
	s.Volumes = []Volume{{Source: "/v", Path: "/tmp"}}
	if has(s) {
		t.Error("the guard would hide in a volume")
	}
}

func TestBadInput(t *testing.T) {
	cases := map[string]struct {
		change func(*Sandbox)
		want   errs.Reason
	}{
		"two on one path": {func(s *Sandbox) { s.Volumes[0].Path = "/data" }, errs.DuplicatePath},
		"dots":            {func(s *Sandbox) { s.Volumes[0].Path = "/data/../etc" }, errs.UnsafePath},
		"relative":        {func(s *Sandbox) { s.Volumes[0].Path = "data" }, errs.UnsafePath},
		"root":            {func(s *Sandbox) { s.Volumes[0].Path = "/" }, errs.UnsafePath},
		"over init":       {func(s *Sandbox) { s.Volumes[0].Path = "/.dormouse" }, errs.UnsafePath},
		"in proc":         {func(s *Sandbox) { s.Volumes[0].Path = "/proc/x" }, errs.UnsafePath},
		"little memory":   {func(s *Sandbox) { s.MemoryBytes = 1 << 20 }, errs.BelowFloor},
		"little disk":     {func(s *Sandbox) { s.LayerBytes = 0 }, errs.BelowFloor},
		"no image":        {func(s *Sandbox) { s.Rootfs = "" }, errs.InvalidField},
		"no namespace":    {func(s *Sandbox) { s.NetNS = "" }, errs.InvalidField},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			s := describe()
			c.change(&s)
			if _, err := New(s); !errs.Has(err, c.want) {
				t.Fatalf("got %v, want %s", err, c.want)
			}
		})
	}
}

func TestForRestore(t *testing.T) {
	saved := build(t, describe())
	before, _ := json.Marshal(saved)
	b := Bindings{Hostname: "fork", NetNS: "/proc/1/fd/9", Init: "/other/guestinit.erofs", Volumes: map[string]string{"/data": "/c/1", "/data/inner": "/c/2"}}
	spec, err := ForRestore(saved, b)
	if err != nil {
		t.Fatal(err)
	}
	if after, _ := json.Marshal(saved); string(before) != string(after) {
		t.Error("the saved spec was changed")
	}
	// It is the spec of a new sandbox with these bindings: nothing else differs.
	s := describe()
	s.Hostname, s.NetNS, s.Init = b.Hostname, b.NetNS, b.Init
	s.Volumes[0].Source, s.Volumes[1].Source = "/c/2", "/c/1"
	if diff := cmp.Diff(build(t, s), spec); diff != "" {
		t.Errorf("spec: %s", diff)
	}
	for name, volumes := range map[string]map[string]string{
		"one left out": {"/data": "/c/1"},
		"one too many": {"/data": "/c/1", "/data/inner": "/c/2", "/more": "/c/3"},
		"one unnamed":  {"/data": "/c/1", "/data/inner": ""},
	} {
		b.Volumes = volumes
		if _, err := ForRestore(saved, b); !errs.Has(err, errs.InvalidField) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := ForRestore(&specs.Spec{}, b); !errs.Has(err, errs.ArtefactDamaged) {
		t.Errorf("an empty spec: %v", err)
	}
}
