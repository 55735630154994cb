//go:build !race

package model

import (
	"flag"
	"strings"
	"testing"
)

var long = flag.Bool("model.long", false, "search far: minutes, and gigabytes")

// TestInvariants visits every state within each of the bounds. They are chosen so that all that may happen does, not all of it
// together, and that it takes a few seconds.
func TestInvariants(t *testing.T) {
	bounds := []Bounds{
		{Attempts: 3, Epochs: 3, Cuts: 2, Crashes: 1},
		{Attempts: 3, Epochs: 2, Sessions: 2, Cuts: 1},
		{Attempts: 2, Epochs: 2, Sessions: 2, Cuts: 1, Crashes: 1},
		{Attempts: 2, Epochs: 2, Sessions: 2, ServerRestarts: 1},
		{Attempts: 3, Epochs: 3, ServerRestarts: 1},
		{Attempts: 2, Epochs: 2, ServerRestarts: 1, Cuts: 1, Crashes: 1},
		{Attempts: 2, Epochs: 2, ServerRestarts: 2},
	}
	if *long {
		bounds = append(bounds,
			Bounds{Attempts: 4, Epochs: 3, Sessions: 2, Cuts: 2},
			Bounds{Attempts: 3, Epochs: 3, Sessions: 2, Cuts: 1, Crashes: 1},
			Bounds{Attempts: 3, Epochs: 2, Sessions: 2, ServerRestarts: 1},
			Bounds{Attempts: 3, Epochs: 3, ServerRestarts: 2})
	}
	for _, b := range bounds {
		found := Rules{}.Search(Begin(b))
		t.Logf("%+v: %s", b, found)
		if found.Err != nil {
			t.Error("the protocol does not hold what it promises")
		}
		if found.States < 10_000 {
			t.Errorf("only %d states: the search does not get anywhere", found.States)
		}
	}
}

var (
	calm  = Bounds{Attempts: 3, Epochs: 3, Sessions: 2, Crashes: 1, Cuts: 1}
	older = Bounds{Attempts: 3, Epochs: 2, Sessions: 1, ServerRestarts: 1, Cuts: 1}
)

// broken are the rules with one of them taken away each, where to search, and what the search must find to be broken. All steps of the
// way there, or as many as shared (if not 0), are steps under the true rules, too.
var broken = []struct {
	name   string
	rules  Rules
	within Bounds
	breaks string
	shared int
}{
	{"no epoch check", Rules{NoEpochCheck: true}, calm, "Fencing", 0},
	{"no holder check", Rules{NoHolderCheck: true}, older, "Fencing", 0},
	{"no session check", Rules{NoSessionCheck: true}, calm, "Fencing", 0},
	{"a lease that is given up keeps its epoch", Rules{ReleaseKeepsEpoch: true}, calm, "Fencing", 0},
	{"epochs repeat", Rules{EpochsRepeat: true}, calm, "EpochsGrow", 0},
	{"no receipts", Rules{NoReceipts: true}, calm, "AtMostOnce", 0},
	{"blind retry", Rules{BlindRetry: true}, calm, "AtMostOnce", 6},
	{"settling voids nothing", Rules{NoVoid: true}, calm, "Truth", 0},
	{"calls outlive the server", Rules{CallsOutlive: true}, older, "Truth", 7},
	{"senders do not say what they have seen", Rules{NoSeenCheck: true}, older, "RewindNoticed", 0},
	{"nodes are no witnesses", Rules{NoWitness: true}, Bounds{Attempts: 2, Epochs: 2, Sessions: 2, ServerRestarts: 1}, "RewindNoticed", 0},
	{"who stands by forgets", Rules{BlindStandby: true}, Bounds{Attempts: 3, Epochs: 2, Sessions: 1, ServerRestarts: 1}, "WitnessRemembers", 0},
}

// searched is what was found already. Tests here run one after another.
var searched = make(map[Rules]Found)

func counterexample(r Rules, within Bounds) Found {
	found, ok := searched[r]
	if !ok {
		found = r.Search(Begin(within))
		searched[r] = found
	}
	return found
}

// TestBrokenRules takes one rule away at a time: the search must find what goes wrong.
func TestBrokenRules(t *testing.T) {
	for _, v := range broken {
		t.Run(v.name, func(t *testing.T) {
			found := counterexample(v.rules, v.within)
			t.Log(found)
			if found.Err == nil || !strings.HasPrefix(found.Err.Error(), v.breaks+":") {
				t.Errorf("the search did not find that it breaks %s", v.breaks)
			}
		})
	}
}

// TestDeterministic wants the same states and the same trace of each run.
func TestDeterministic(t *testing.T) {
	b := Bounds{Attempts: 2, Epochs: 2, Sessions: 2, ServerRestarts: 1}
	first, second := Rules{NoHolderCheck: true}.Search(Begin(b)), Rules{NoHolderCheck: true}.Search(Begin(b))
	if first.String() != second.String() {
		t.Errorf("first %s\nsecond %s", first, second)
	}
}
