package warm

import (
	"strings"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/pkg/phase/phasetest"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

func TestTemplateIsCheckedAtTheDoor(t *testing.T) {
	good := func() TemplateSpec {
		return TemplateSpec{Sandbox: sandbox.Spec{Image: "reg.example/a:1"}, Setup: []Command{{Argv: []string{"true"}}}, Readiness: Readiness{Argv: []string{"true"}}}
	}
	if p := good().Validate(); p != nil {
		t.Fatal(p)
	}
	for field, spoil := range map[string]func(*TemplateSpec){
		"spec.sandbox.image":        func(s *TemplateSpec) { s.Sandbox.Image = "" },
		"spec.sandbox.volumes":      func(s *TemplateSpec) { s.Sandbox.Volumes = []sandbox.VolumeMount{{VolumeUID: "u", Path: "/data"}} },
		"spec.sandbox.hostname":     func(s *TemplateSpec) { s.Sandbox.Hostname = "me" },
		"spec.setup":                func(s *TemplateSpec) { s.Setup = make([]Command, MaxSetup+1) },
		"spec.setup[1].argv":        func(s *TemplateSpec) { s.Setup = append(s.Setup, Command{}) },
		"spec.setup[0].timeout":     func(s *TemplateSpec) { s.Setup[0].Timeout = time.Millisecond },
		"spec.setup[0].env":         func(s *TemplateSpec) { s.Setup[0].Env = map[string]string{"a b": ""} },
		"spec.readiness.timeout":    func(s *TemplateSpec) { s.Readiness.Timeout = MaxStepTime + 1 },
		"spec.setup[0].user":        func(s *TemplateSpec) { s.Setup[0].User = "no one" },
		"spec.setup[0].working_dir": func(s *TemplateSpec) { s.Setup[0].WorkingDir = "a" },
	} {
		s := good()
		spoil(&s)
		if p := s.Validate(); p == nil || p.Field != field {
			t.Errorf("%s: %+v", field, p)
		}
	}
	s := good()
	s.Setup[0].Argv = []string{"echo", strings.Repeat("x", MaxSetupBytes)}
	if p := s.Validate(); p == nil || p.Reason != "LIMIT_EXCEEDED" {
		t.Errorf("too much: %+v", p)
	}
	s = good()
	s.Readiness = Readiness{Timeout: time.Minute}
	if p := s.Validate(); p == nil || p.Field != "spec.readiness.timeout" {
		t.Errorf("a time without a command: %+v", p)
	}
	if d := good().WithDefaults(); d.Setup[0].Timeout != DefaultSetupTime || d.Readiness.Timeout != DefaultReadyTime || d.Sandbox.Resources.MemoryRequestBytes == 0 {
		t.Errorf("%+v", d)
	}
}

func TestEveryPairOfPhases(t *testing.T) {
	phasetest.Table(t, MoveTemplate, TemplatePhases(), map[TemplatePhase][]TemplatePhase{
		Gone: {Preparing}, Preparing: {Ready, Failed, Deleting}, Ready: {Deleting}, Failed: {Deleting}, Deleting: {Gone}})
	phasetest.Table(t, MovePool, PoolPhases(), map[PoolPhase][]PoolPhase{PoolGone: {PoolActive}, PoolActive: {PoolDeleting}, PoolDeleting: {PoolGone}})
}

func TestPoolsAreBounded(t *testing.T) {
	for _, c := range []struct {
		spec   PoolSpec
		memory int64
		want   int
	}{
		{PoolSpec{Size: 5}, 10, 7}, {PoolSpec{Size: 5, MaxMembers: 5}, 10, 5}, {PoolSpec{Size: 5, MaxMemoryBytes: 39}, 10, 3}, {PoolSpec{Size: 5, MaxMemoryBytes: 9}, 10, 0}, {PoolSpec{}, 10, 2},
	} {
		if got := c.spec.Bound(c.memory); got != c.want {
			t.Errorf("%+v: %d, want %d", c.spec, got, c.want)
		}
	}
	for _, s := range []PoolSpec{{Size: -1}, {Size: MaxPool + 1}, {MaxMembers: -1}, {MaxMembers: MaxPool + Beyond + 1}, {Size: 3, MaxMembers: 2}, {MaxMemoryBytes: -1}} {
		if p := s.Validate("spec."); p == nil || !strings.HasPrefix(p.Field, "spec.") {
			t.Errorf("%+v: %+v", s, p)
		}
	}
	last := time.Duration(0)
	for n := range 80 {
		p := Pause(n)
		if p < last || p > MaxPause || n == 0 && p != 0 || n == 1 && p != FirstPause {
			t.Fatalf("after %d failures %s", n, p)
		}
		last = p
	}
	if last != MaxPause {
		t.Errorf("the longest pause is %s", last)
	}
}
