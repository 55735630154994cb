// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package layers

import (
	"context"
	"slices"
	"testing"
)

// pass takes a flight through its phases to its end, as fast as can be.
func pass(f *flight) {
	f.update(func(p *Progress) {
		p.Phase, p.Layers, p.Total = PhasePulling, []LayerProgress{{Total: 7}}, 7
	})
	f.update(func(p *Progress) { p.advance(0, 7) })
	f.update(func(p *Progress) { p.Phase = PhaseConverting })
	close(f.done)
}

// TestNoPhaseIsLeftOut: whoever waits hears of each phase, in order, also of one that was over before the waiter looked.
func TestNoPhaseIsLeftOut(t *testing.T) {
	for name, begin := range map[string]Phase{"before it waits": "", "while it is told of the first": PhaseResolving, "while it is told of the pull": PhasePulling} {
		t.Run(name, func(t *testing.T) {
			f := newFlight()
			if begin == "" {
				pass(f)
			} else if begin == PhasePulling {
				f.update(func(p *Progress) { p.Phase = PhasePulling })
			}
			var phases []Phase
			var last Progress
			if _, err := f.wait(context.Background(), func(p Progress) {
				if p.Phase == begin {
					begin = ""
					pass(f)
				}
				phases, last = append(phases, p.Phase), p
			}); err != nil {
				t.Fatal(err)
			}
			if want := []Phase{PhaseResolving, PhasePulling, PhaseConverting}; !slices.Equal(slices.Compact(phases), want) {
				t.Errorf("it was told of %v, want %v", phases, want)
			}
			if last.Done != 7 || last.Total != 7 {
				t.Errorf("told last of %+v", last)
			}
		})
	}
}
