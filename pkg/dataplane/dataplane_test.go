package dataplane_test

import (
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/dormouse-run/dormouse/pkg/dataplane"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// TestEveryRequestNamesItsSandbox holds the protos to what the package says of them.
func TestEveryRequestNamesItsSandbox(t *testing.T) {
	if len(dataplane.Services()) == 0 {
		t.Fatal("no service is known")
	}
	for _, s := range dataplane.Services() {
		for i := range s.Methods().Len() {
			m := s.Methods().Get(i)
			if !names(m.Input(), true) {
				t.Errorf("%s: no sandbox_uid in %s", m.FullName(), m.Input().FullName())
			}
			verb, ok := dataplane.VerbOf("/" + string(s.FullName()) + "/" + string(m.Name()))
			if !ok || !verb.Valid() {
				t.Errorf("%s has verb %q", m.FullName(), verb)
			}
		}
	}
}

func names(d protoreflect.MessageDescriptor, deeper bool) bool {
	if f := d.Fields().ByName("sandbox_uid"); f != nil {
		return f.Kind() == protoreflect.StringKind
	}
	for i := range d.Fields().Len() {
		f := d.Fields().Get(i)
		if deeper && f.Message() != nil && !f.IsList() && !f.IsMap() && names(f.Message(), false) {
			return true
		}
	}
	return false
}

func TestSandboxUID(t *testing.T) {
	if got := dataplane.SandboxUID(&dormousev1.RunProcessRequest{SandboxUid: "u"}); got != "u" {
		t.Errorf("at the top: %q", got)
	}
	for _, m := range []any{&emptypb.Empty{}, &dormousev1.CreateSandboxRequest{Spec: &dormousev1.SandboxSpec{}}, 3, nil} {
		if got := dataplane.SandboxUID(m); got != "" {
			t.Errorf("%v: %q", m, got)
		}
	}
	for _, m := range []string{"/dormouse.v1.SandboxService/GetSandbox", "", "/", "ProcessService"} {
		if v, ok := dataplane.VerbOf(m); ok {
			t.Errorf("%q has verb %q", m, v)
		}
	}
}
