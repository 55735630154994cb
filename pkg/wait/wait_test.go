// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package wait

import (
	"context"
	"errors"
	"testing"
	"time"
)

func TestFor(t *testing.T) {
	if err := For(t.Context(), time.Millisecond); err != nil {
		t.Errorf("a short wait gave %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(time.Millisecond, cancel)
	if err := For(ctx, time.Hour); !errors.Is(err, context.Canceled) {
		t.Errorf("a wait whose context was cancelled gave %v", err)
	}
	if err := For(ctx, 0); !errors.Is(err, context.Canceled) {
		t.Errorf("no wait, with a context that has ended, gave %v", err)
	}
}
