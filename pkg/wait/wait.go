// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

// Package wait lets a goroutine stand still for a while without outliving its context.
package wait

import (
	"context"
	"time"
)

// For returns nil when d has passed, or the context's error as soon as it ends. A d of zero or less gives
// a context that has ended its error too.
func For(ctx context.Context, d time.Duration) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
