// Package dataplane says what the data plane is: the services whose calls act inside one sandbox and
// are answered by the node that it is on.
//
// Each request of these services, and the first message of each of their streams, names the sandbox in a
// field sandbox_uid, either at its top or in a message that it carries. That is all that whoever stands
// in between has to know of a method: the gateway of the coordinator, the guard of a node,
// the client that chooses a way.
package dataplane

import (
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
)

// Verb is what a service of the data plane does.
type Verb string

// The verbs.
const (
	Process Verb = "process"
	File    Verb = "file"
	Port    Verb = "port"
)

// services gives the verb of each service.
var services = map[string]Verb{
	"dormouse.v1.ProcessService": Process,
	"dormouse.v1.FileService":    File,
	"dormouse.v1.PortService":    Port,
}

// Verbs lists all verbs in a fixed order.
func Verbs() []Verb { return []Verb{Process, File, Port} }

// Valid tells whether the verb exists.
func (v Verb) Valid() bool { return slices.Contains(Verbs(), v) }

// Bulk tells whether the verb's streams carry bytes in bulk, which must not delay anybody's keystrokes.
func (v Verb) Bulk() bool { return v != Process }

// Services gives the services of the data plane that this program has protos of.
func Services() []protoreflect.ServiceDescriptor {
	var all []protoreflect.ServiceDescriptor
	for name := range services {
		d, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(name))
		if err != nil {
			continue
		}
		if sd, ok := d.(protoreflect.ServiceDescriptor); ok {
			all = append(all, sd)
		}
	}
	slices.SortFunc(all, func(a, b protoreflect.ServiceDescriptor) int {
		return strings.Compare(string(a.FullName()), string(b.FullName()))
	})
	return all
}

// VerbOf gives the verb of a method, as gRPC writes it ("/service/method"). It is false for a method
// that is not of the data plane.
func VerbOf(fullMethod string) (Verb, bool) {
	service, _, _ := strings.Cut(strings.TrimPrefix(fullMethod, "/"), "/")
	v, ok := services[service]
	return v, ok
}

// TenantKey is the metadata in which a coordinator tells a node whose sandbox it is that the call means.
// The node takes it from a coordinator's certificate only, and compares it with its own record.
const TenantKey = "dormouse-tenant"

// AdmittedKey is the header with which a node says that it has let a client's stream in. An error of a stream without it came before
// anything was done. (That there are headers says nothing: an answer that is an error may have some.)
const AdmittedKey = "dormouse-admitted"

const uidField = "sandbox_uid"

// SandboxUID gives the sandbox that a message names, or "".
func SandboxUID(m any) string {
	if r, ok := m.(interface{ GetSandboxUid() string }); ok {
		return r.GetSandboxUid()
	}
	msg, ok := m.(proto.Message)
	if !ok {
		return ""
	}
	found := ""
	msg.ProtoReflect().Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		if f.Message() == nil || f.IsList() || f.IsMap() {
			return true
		}
		inner := v.Message()
		if d := inner.Descriptor().Fields().ByName(uidField); d != nil && d.Kind() == protoreflect.StringKind {
			found = inner.Get(d).String()
		}
		return found == ""
	})
	return found
}
