package redis_test

import (
	"bytes"
	"fmt"
	"runtime"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/catalog/catalogtest"
	"github.com/dormouse-run/dormouse/pkg/catalog/memory"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis/redistest"
)

// allocated is how many bytes one call takes, the least of some.
func allocated(call func()) uint64 {
	least := ^uint64(0)
	for range 5 {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		call()
		runtime.ReadMemStats(&after)
		least = min(least, after.TotalAlloc-before.TotalAlloc)
	}
	return least
}

// What a list leaves out, by phase, node or tenant, is not fetched, decoded or copied: 200 records of 64 KiB that are not asked for
// cost less than ten of them. The same predicate (catalog.Query.Matches) decides in both stores.
func TestC11_FilteredBeforeCopied(t *testing.T) {
	const size, many = 64 << 10, 200
	server := redistest.Start(t)
	for name, store := range map[string]catalog.Store{
		"redis": open(t, redis.Options{Address: server.Socket}), "memory": memory.New(memory.Options{}),
	} {
		t.Run(name, func(t *testing.T) {
			f := catalogtest.NewFixture(t, store)
			for i := range many {
				p := catalogtest.Create(catalogtest.Sandbox(fmt.Sprintf("other-%03d", i)))
				p.Record.Phase, p.Record.Node, p.Record.Body = "Other", "n2", bytes.Repeat([]byte("x"), size)
				f.Must(p)
			}
			p := catalogtest.Create(catalogtest.Sandbox("wanted"))
			p.Record.Phase, p.Record.Node = "Wanted", "n1"
			f.Must(p)
			for _, q := range []catalog.Query{
				{Kind: catalog.KindSandbox, Phases: []string{"Wanted"}},
				{Kind: catalog.KindSandbox, Node: "n1"},
				{Kind: catalog.KindSandbox, Tenant: "acme", Node: "n1", Phases: []string{"Wanted"}},
			} {
				var found int
				bytes := allocated(func() {
					page, err := f.List(t.Context(), q)
					if err != nil {
						t.Fatal(err)
					}
					found = len(page.Records)
				})
				if found != 1 || bytes > 10*size {
					t.Errorf("%+v found %d and allocated %d bytes; all bodies are %d", q, found, bytes, many*size)
				}
			}
		})
	}
}

// Who owns what a node holds is asked without reading, decoding or copying a record: 200 of 64 KiB cost less than two.
func TestC11_OwnershipBorrowsRecords(t *testing.T) {
	const size, many = 64 << 10, 200
	server := redistest.Start(t)
	for name, store := range map[string]catalog.Store{
		"redis": open(t, redis.Options{Address: server.Socket}), "memory": memory.New(memory.Options{}),
	} {
		t.Run(name, func(t *testing.T) {
			f := catalogtest.NewFixture(t, store)
			keys := []catalog.Key{catalogtest.Sandbox("never")}
			for i := range many {
				p := catalogtest.Create(catalogtest.Sandbox(fmt.Sprintf("held-%03d", i)))
				p.Record.Phase, p.Record.Body = "Deleting", bytes.Repeat([]byte("x"), size)
				f.Must(p)
				keys = append(keys, p.Record.Key)
			}
			var living map[catalog.Key]bool
			took := allocated(func() {
				var err error
				if living, err = f.Living(t.Context(), keys); err != nil {
					t.Fatal(err)
				}
			})
			if len(living) != many || living[keys[0]] || took > 2*size {
				t.Errorf("%d live, and it allocated %d bytes; all bodies are %d", len(living), took, many*size)
			}
		})
	}
}
