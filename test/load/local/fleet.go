// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package local

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/dormouse-run/dormouse/agentd/simulated"
	"github.com/dormouse-run/dormouse/pkg/pki"
	"github.com/dormouse-run/dormouse/test/cluster"
	"github.com/dormouse-run/dormouse/test/stack"
)

// simulatedImage is what the sandboxes of simulated nodes are made of: it is always there.
const simulatedImage = "registry.invalid/simulated@sha256:0000000000000000000000000000000000000000000000000000000000000000"

// UpFleet starts a real coordinator and a real Redis with simulated nodes, which are part of this process. What watch gives for a node, if it is not nil,
// stands before its calls.
func UpFleet(ctx context.Context, nodes int, watch func(node string) grpc.UnaryServerInterceptor, logf func(string, ...any)) (*Cluster, error) {
	c, err := cluster.UpWith(ctx, stack.Options{Nodes: 1, Logf: logf}, cluster.Settings{LogLevel: "info", NoAgents: true})
	if err != nil {
		return nil, err
	}
	l := &Cluster{Cluster: c, Image: simulatedImage, simulated: true}
	if err := mountDisks(l.disks()); err != nil {
		return nil, errors.Join(err, l.End(ctx))
	}
	group, startCtx := errgroup.WithContext(ctx)
	for i := 1; i <= nodes; i++ {
		name := stack.NodeName(i)
		dir := l.Disk(i)
		if err := os.Mkdir(dir, 0o700); err != nil {
			return nil, errors.Join(err, l.End(ctx))
		}
		files, err := c.Issue(pki.Identity{Role: pki.RoleNode, Name: name}, "localhost")
		if err != nil {
			return nil, errors.Join(err, l.End(ctx))
		}
		o := simulated.Options{Name: name, Dir: dir, Coordinators: []string{"unix:" + c.NodeSocket()}, TLS: files,
			Log: slog.New(slog.DiscardHandler), Silence: 30 * time.Second}
		if watch != nil {
			o.Watch = watch(name)
		}
		m := simulated.NewMachine(o)
		group.Go(func() error {
			a, err := m.Start(startCtx)
			if err != nil {
				return err
			}
			l.mu.Lock()
			defer l.mu.Unlock()
			l.agents = append(l.agents, a)
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return nil, errors.Join(err, l.End(ctx))
	}
	if err := l.online(ctx, nodes); err != nil {
		return nil, errors.Join(err, l.End(ctx))
	}
	return l, nil
}

func (l *Cluster) disks() string { return filepath.Join(l.Dir, "disks") }

// Disk is the folder of simulated node i.
func (l *Cluster) Disk(i int) string { return filepath.Join(l.disks(), fmt.Sprintf("s%d", i)) }

// mountDisks makes a file system in memory for what the simulated nodes write. Real nodes have disks of their own: thirteen of them that sync to the
// one that Redis syncs to would be measured, not Redis. It goes with the cluster's folder.
func mountDisks(dir string) error {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=0700"); err != nil {
		return fmt.Errorf("mount the simulated nodes' disks: %w", err)
	}
	return nil
}

// online waits until so many nodes are.
func (l *Cluster) online(ctx context.Context, want int) error {
	for {
		have := 0
		for n, err := range l.Client.ListNodes(ctx) {
			if err != nil {
				return err
			}
			if n.GetOnline() {
				have++
			}
		}
		if have >= want {
			return nil
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("%d of %d nodes are online: %w", have, want, context.Cause(ctx))
		}
	}
}

// stopAgents ends the simulated nodes.
func (l *Cluster) stopAgents() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	var all []error
	for _, a := range l.agents {
		all = append(all, a.Stop())
	}
	l.agents = nil
	return errors.Join(all...)
}

// Within gives the share of the snapshots that were Ready in the catalog no later than so long after their node had reported them, and
// how many there were, as the coordinator counts them.
func (l *Cluster) Within(ctx context.Context, limit time.Duration) (share float64, count uint64, err error) {
	const name = "dormouse_snapshot_publish_seconds"
	metrics, err := l.metrics(ctx)
	if err != nil {
		return 0, 0, err
	}
	family := metrics[name]
	if family == nil || len(family.GetMetric()) != 1 {
		return 0, 0, fmt.Errorf("the coordinator has no metric %s", name)
	}
	h := family.GetMetric()[0].GetHistogram()
	count = h.GetSampleCount()
	for _, b := range h.GetBucket() {
		if b.GetUpperBound() <= limit.Seconds() && count > 0 {
			share = float64(b.GetCumulativeCount()) / float64(count)
		}
	}
	return share, count, nil
}

// metrics reads what the coordinator counts.
func (l *Cluster) metrics(ctx context.Context) (map[string]*dto.MetricFamily, error) {
	var text bytes.Buffer
	if err := stack.FetchAdmin(ctx, l.AdminSocket(), "/metrics", &text); err != nil {
		return nil, err
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	return parser.TextToMetricFamilies(&text)
}
