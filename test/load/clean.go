// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package load

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// cleaners is how many deletions are asked for at once.
const cleaners = 32

// Clean deletes all that a run made, found by its label, and gives what is left: the debt.
func Clean(ctx context.Context, api *client.Client, id string, logf func(string, ...any)) ([]string, error) {
	mine := func(m *dormousev1.ObjectMeta) bool { return m.GetLabels()[runLabel] == id }
	kinds := []struct {
		name string
		all  iter.Seq2[deletion, error]
	}{
		{"sandboxes", deletions(api.ListSandboxes(ctx, &dormousev1.ListSandboxesRequest{Labels: []string{runLabel + "=" + id}}), mine,
			func(p *dormousev1.Sandbox) deletion { return api.Sandbox(p.GetMeta().GetUid()).Delete })},
		{"snapshots", deletions(api.ListSnapshots(ctx, &dormousev1.ListSnapshotsRequest{}), mine,
			func(p *dormousev1.Snapshot) deletion { return api.Snapshot(p.GetMeta().GetUid()).Delete })},
		{"volumes", deletions(api.ListVolumes(ctx, &dormousev1.ListVolumesRequest{}), mine,
			func(p *dormousev1.Volume) deletion { return api.Volume(p.GetMeta().GetUid()).Delete })},
	}
	var debt []string
	for _, kind := range kinds {
		group, ctx := errgroup.WithContext(ctx)
		group.SetLimit(cleaners)
		failed := make(chan string, 4096)
		n := 0
		for remove, err := range kind.all {
			if err != nil {
				return debt, errors.Join(err, group.Wait())
			}
			n++
			group.Go(func() error {
				if err := remove(ctx, ""); err != nil && !errs.Has(err, errs.ObjectNotFound) {
					select {
					case failed <- fmt.Sprintf("one of the %s: %s", kind.name, err):
					default:
					}
				}
				return nil
			})
		}
		_ = group.Wait() // the errors are in failed
		close(failed)
		for text := range failed {
			debt = append(debt, text)
		}
		if n > 0 && logf != nil {
			logf("cleaned up %d %s", n, kind.name)
		}
	}
	return debt, nil
}

// deletion is the deletion of an object, under an operation id.
type deletion = func(ctx context.Context, operationID string) error

// deletions gives that of each object of a list that is meant.
func deletions[T interface{ GetMeta() *dormousev1.ObjectMeta }](all iter.Seq2[T, error], mine func(*dormousev1.ObjectMeta) bool, remove func(T) deletion) iter.Seq2[deletion, error] {
	return func(yield func(deletion, error) bool) {
		for v, err := range all {
			if err != nil {
				yield(nil, err)
				return
			}
			if mine(v.GetMeta()) && !yield(remove(v), nil) {
				return
			}
		}
	}
}

// CleanFolder cleans up after the run of a folder, if the cluster that it used is still there.
func CleanFolder(ctx context.Context, dir string, reach Reach, logf func(string, ...any)) ([]string, error) {
	data, err := os.ReadFile(filepath.Join(dir, "run.json"))
	if err != nil {
		return nil, fmt.Errorf("%s has no run: %w", dir, err)
	}
	var who Identity
	if err := json.Unmarshal(data, &who); err != nil || strings.TrimSpace(who.ID) == "" {
		return nil, fmt.Errorf("%s: not a run's (%w)", filepath.Join(dir, "run.json"), err)
	}
	if reach.Addr == "" {
		reach.Addr = who.Addr
	}
	api, err := reach.dial()
	if err != nil {
		return nil, err
	}
	debt, err := Clean(ctx, api, who.ID, logf)
	return debt, errors.Join(err, api.Close())
}
