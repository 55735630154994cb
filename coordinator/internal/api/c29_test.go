package api_test

import (
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/dormouse-run/dormouse/coordinator/internal/auth"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	_ "github.com/dormouse-run/dormouse/proto/dormouse/node/v1" // of which all methods are looked at, too
)

// bounded says why a repeated field of messages in an answer needs no pages: what bounds it, by the message that has it.
var bounded = map[protoreflect.FullName]string{
	"dormouse.v1.Sandbox":                           "a record: catalog.MaxBody",
	"dormouse.v1.Snapshot":                          "a record: catalog.MaxBody",
	"dormouse.v1.Template":                          "a record: catalog.MaxBody",
	"dormouse.v1.Pool":                              "a record: catalog.MaxBody",
	"dormouse.v1.Volume":                            "a record, with as many attachments and references as a page of referrers",
	"dormouse.v1.Node":                              "a record, and one condition for each kind of problem",
	"dormouse.v1.Operation":                         "a record: catalog.MaxBody",
	"dormouse.v1.Process":                           "one process",
	"dormouse.v1.Image":                             "one image",
	"dormouse.v1.SandboxNetwork":                    "one sandbox's policy and counters",
	"dormouse.v1.ForkSandboxResponse":               "the request's count, at most 64",
	"dormouse.v1.ListProcessesResponse":             "the processes of one sandbox that guest init remembers",
	"dormouse.v1.RepairCatalogResponse":             "200 findings, and a total",
	"dormouse.node.v1.ListSandboxProcessesResponse": "as ListProcesses",
	"dormouse.node.v1.SandboxObservation":           "one sandbox",
	"dormouse.node.v1.SnapshotObservation":          "one snapshot",
	"dormouse.node.v1.JournalEntry":                 "one record",
}

// streamed says what bounds one message of a stream of answers that has a repeated field of messages.
var streamed = map[protoreflect.FullName]string{
	"dormouse.v1.VerifyCatalogResponse": "200 findings",
	"dormouse.v1.BackupCatalogResponse": "256 entries, 1 MiB and one record",
	"dormouse.v1.WatchFilesResponse":    "what fits into a frame of the guest",
	"dormouse.node.v1.SessionResponse":  "a message of the journal: 500 entries, 1 MiB",
}

// many finds the repeated fields of messages that an answer may have, up to messages that are bounded by themselves.
func many(m protoreflect.MessageDescriptor, seen map[protoreflect.FullName]bool) (found []protoreflect.FullName) {
	if _, ok := bounded[m.FullName()]; ok || seen[m.FullName()] || !strings.HasPrefix(string(m.FullName()), "dormouse.") {
		return nil
	}
	seen[m.FullName()] = true
	for i := range m.Fields().Len() {
		f := m.Fields().Get(i)
		if f.Message() == nil {
			continue
		}
		if f.IsList() {
			found = append(found, f.FullName())
		}
		if !f.IsMap() {
			found = append(found, many(f.Message(), seen)...)
		}
	}
	return found
}

func has(m protoreflect.MessageDescriptor, names ...protoreflect.Name) bool {
	return slices.ContainsFunc(names, func(n protoreflect.Name) bool { return m.Fields().ByName(n) != nil })
}

// C29: every method of the public and of the node API whose answer may hold many of something has pages of a bounded
// size, or is a stream of bounded messages. A new one that has neither fails here.
func TestC29EveryAnswerIsBounded(t *testing.T) {
	methods, used := 0, map[protoreflect.FullName]bool{}
	protoregistry.GlobalFiles.RangeFiles(func(file protoreflect.FileDescriptor) bool {
		if pkg := file.Package(); pkg != "dormouse.v1" && pkg != "dormouse.node.v1" {
			return true
		}
		for i := range file.Services().Len() {
			all := file.Services().Get(i).Methods()
			for j := range all.Len() {
				m := all.Get(j)
				methods++
				lists := many(m.Output(), map[protoreflect.FullName]bool{})
				if len(lists) == 0 {
					continue
				}
				if m.IsStreamingServer() {
					used[m.Output().FullName()] = true
					if streamed[m.Output().FullName()] == "" {
						t.Errorf("%s streams %v, and nothing is said to bound one message", m.FullName(), lists)
					}
					continue
				}
				if !has(m.Input(), "page_size") || !has(m.Input(), "page_token", "after") || !has(m.Output(), "next_page_token", "next") {
					t.Errorf("%s answers with %v, without pages", m.FullName(), lists)
				}
			}
		}
		return true
	})
	if methods < 60 {
		t.Errorf("only %d methods were found", methods)
	}
	for name := range streamed {
		if !used[name] {
			t.Errorf("%s is listed as a stream of many, and is none", name)
		}
	}
}

// C29: no public list gives more than its largest page, whatever is asked.
func TestC29PagesAreBounded(t *testing.T) {
	w := newWorld()
	defer w.close()
	pages := 0
	for _, m := range w.methods {
		in := m.input.New()
		field := in.Descriptor().Fields().ByName("page_size")
		if field == nil || m.unary == nil || in.Descriptor().Fields().ByName("sandbox_uid") != nil {
			continue // of a sandbox: the node answers
		}
		pages++
		for size, ok := range map[int32]bool{catalog.MaxPage: true, catalog.MaxPage + 1: false, -1: false} {
			in.Set(field, protoreflect.ValueOfInt32(size))
			data, err := proto.Marshal(in.Interface())
			if err != nil {
				t.Fatal(err)
			}
			err = m.call(auth.With(t.Context(), caller), func() {}, data)
			if refused := errs.Has(err, errs.InvalidField); refused == ok || ok && err != nil {
				t.Errorf("%s with a page of %d: %v", m.name, size, err)
			}
		}
	}
	if pages < 7 {
		t.Errorf("only %d lists were found", pages)
	}
}
