package placement

import (
	"errors"
	"strings"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

func node(name string, change ...func(*Node)) Node {
	n := Node{Name: name, Online: true, Architecture: "amd64",
		Labels:      map[string]string{"disk": "ssd"},
		Allocatable: Resources{CPUMillis: 2000, MemoryBytes: 1000, DiskBytes: 1000, Sandboxes: 10}}
	for _, c := range change {
		c(&n)
	}
	return n
}

func TestDecide(t *testing.T) {
	ask := Resources{CPUMillis: 100, MemoryBytes: 100, Sandboxes: 1}
	placed := func(m, s int64) func(*Node) {
		return func(n *Node) { n.Placed = Resources{MemoryBytes: m, Sandboxes: s} }
	}
	inside := func(n *Node) { n.NoOutbound = true }
	for _, tc := range []struct {
		name      string
		nodes     []Node
		request   Request
		want      string
		why       string // of node a
		transient bool
		reason    errs.Reason
	}{
		{name: "the emptier wins", nodes: []Node{node("a", placed(500, 1)), node("b")}, request: Request{Resources: ask}, want: "b"},
		{name: "fewer sandboxes win a tie", nodes: []Node{node("a", placed(0, 3)), node("b", placed(0, 2))}, request: Request{Resources: ask}, want: "b"},
		{name: "the name decides at last", nodes: []Node{node("b"), node("a")}, request: Request{Resources: ask}, want: "a"},
		{name: "offline", nodes: []Node{node("a", func(n *Node) { n.Online = false })}, request: Request{Resources: ask}, why: "offline", transient: true},
		{name: "unhealthy", nodes: []Node{node("a", func(n *Node) { n.Problems = map[string]string{"DiskPressure": "x"} })}, request: Request{Resources: ask}, why: "DiskPressure", transient: true},
		{name: "cordoned", nodes: []Node{node("a", func(n *Node) { n.Cordoned = true })}, request: Request{Resources: ask}, why: "cordoned"},
		{name: "selector", nodes: []Node{node("a")}, request: Request{Resources: ask, Selector: map[string]string{"disk": "hdd"}}, why: "disk=hdd"},
		{name: "architecture", nodes: []Node{node("a")}, request: Request{Resources: ask, Architecture: "arm64"}, why: "amd64"},
		{name: "network elsewhere", nodes: []Node{node("a", inside), node("b")},
			request: Request{Resources: ask, Outbound: true}, want: "b"},
		{name: "network nowhere", nodes: []Node{node("a", inside)}, request: Request{Resources: ask, Outbound: true}, why: "no outbound network", reason: errs.NoNodeFits},
		{name: "network gone for one that returns", nodes: []Node{node("a", inside)}, request: Request{Resources: ask, Outbound: true, Node: "a", Returns: true}, why: "no outbound network"},
		{name: "no network asked for", nodes: []Node{node("a", inside)}, request: Request{Resources: ask}, want: "a"},
		{name: "artefact elsewhere", nodes: []Node{node("a"), node("b")}, request: Request{Resources: ask, Artefact: []string{"b"}}, want: "b"},
		{name: "artefact nowhere", nodes: []Node{node("a")}, request: Request{Resources: ask, Artefact: []string{}}, why: "snapshot"},
		{name: "volume elsewhere", nodes: []Node{node("a"), node("b")}, request: Request{Resources: ask, Volumes: map[string]string{"v": "b"}}, want: "b"},
		{name: "volumes on two nodes", nodes: []Node{node("a"), node("b")}, request: Request{Resources: ask, Volumes: map[string]string{"v": "b", "w": "a"}}, why: "volume v"},
		{name: "one node asked for", nodes: []Node{node("a"), node("b")}, request: Request{Resources: ask, Node: "b"}, want: "b"},
		{name: "full", nodes: []Node{node("a", placed(950, 1))}, request: Request{Resources: ask}, why: "memory_bytes: 100 asked, 50 left"},
		{name: "heads", nodes: []Node{node("a", placed(0, 10))}, request: Request{Resources: ask}, why: "all of its 10"},
		{name: "above every node", nodes: []Node{node("a"), node("b")}, request: Request{Resources: Resources{MemoryBytes: 1001}}, reason: errs.AboveEveryNode},
		{name: "limit above every node", nodes: []Node{node("a"), node("b")}, request: Request{Resources: ask, Limits: Resources{MemoryBytes: 1001}}, reason: errs.AboveEveryNode},
		{name: "limit above one node", nodes: []Node{node("a"), node("b", func(n *Node) { n.Allocatable.MemoryBytes = 2000 }, placed(1500, 9))},
			request: Request{Resources: ask, Limits: Resources{MemoryBytes: 1500}}, want: "b"},
		{name: "limits are not counted", nodes: []Node{node("a", placed(850, 1))}, request: Request{Resources: ask, Limits: Resources{MemoryBytes: 1000}}, want: "a"},
		{name: "no nodes", request: Request{Resources: ask}, reason: errs.NoNodeFits},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := Decide(tc.nodes, tc.request)
			if got != tc.want {
				t.Fatalf("got %q, %v; want %q", got, err, tc.want)
			}
			var nofit *NoFit
			errors.As(err, &nofit)
			if tc.why != "" && (nofit == nil || !strings.Contains(nofit.Why["a"], tc.why) || nofit.Transient != tc.transient) {
				t.Fatalf("err %v, want %q for node a, transient %v", err, tc.why, tc.transient)
			}
			if tc.reason != "" {
				if nofit != nil {
					err = nofit.Envelope()
				}
				if !errs.Has(err, tc.reason) {
					t.Fatalf("err %v, want %s", err, tc.reason)
				}
			}
		})
	}
}
