// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package stack

import (
	"context"
	"fmt"
	"path/filepath"
)

// The command lines of Dormouse's own daemons, and nothing else.

const (
	coordinatorName = "coordinator"
	standbyName     = "standby"
)

func agentdName(i int) string { return fmt.Sprintf("agentd%d", i) }

// CoordinatorConfig is the coordinator's configuration file; whoever starts the
// coordinator writes it first.
func (s *Stack) CoordinatorConfig() string { return s.path("coordinator.yaml") }

// AgentdConfig is the configuration file of the agentd of node i.
func (s *Stack) AgentdConfig(i int) string { return filepath.Join(s.NodeDir(i), "agentd.yaml") }

// StartCoordinator starts the coordinator in the hub and waits until ready is nil.
func (s *Stack) StartCoordinator(ctx context.Context, ready func(context.Context) error) error {
	return s.start(ctx, command{
		name: coordinatorName, netns: s.HubNetns(), path: filepath.Join(s.Bin, "coordinator"),
		args: []string{"--config", s.CoordinatorConfig()}, ready: ready,
	})
}

// KillCoordinator ends it with SIGKILL.
func (s *Stack) KillCoordinator(ctx context.Context) error { return s.stop(ctx, coordinatorName, 0) }

// StopCoordinator ends it in order.
func (s *Stack) StopCoordinator(ctx context.Context) error {
	return s.stop(ctx, coordinatorName, stopGrace)
}

// StandbyConfig is the configuration file of a second coordinator; whoever starts it writes it first.
func (s *Stack) StandbyConfig() string { return s.path("standby.yaml") }

// StartStandby starts a second coordinator in the hub and waits until ready is nil.
func (s *Stack) StartStandby(ctx context.Context, ready func(context.Context) error) error {
	return s.start(ctx, command{
		name: standbyName, netns: s.HubNetns(), path: filepath.Join(s.Bin, "coordinator"),
		args: []string{"--config", s.StandbyConfig()}, ready: ready,
	})
}

// StopStandby ends it in order. It does nothing when there is none.
func (s *Stack) StopStandby(ctx context.Context) error { return s.stop(ctx, standbyName, stopGrace) }

// StartAgentd starts the agentd of node i, in the node's network namespace, and
// waits until ready is nil.
func (s *Stack) StartAgentd(ctx context.Context, i int, ready func(context.Context) error) error {
	return s.start(ctx, command{
		name: agentdName(i), netns: s.NodeNetns(i), path: filepath.Join(s.Bin, "agentd"),
		args: []string{"--config", s.AgentdConfig(i)}, ready: ready,
	})
}

// KillAgentd ends the agentd of node i with SIGKILL; its sandboxes stay.
func (s *Stack) KillAgentd(ctx context.Context, i int) error { return s.stop(ctx, agentdName(i), 0) }

// StopAgentd ends it in order; its sandboxes stay.
func (s *Stack) StopAgentd(ctx context.Context, i int) error {
	return s.stop(ctx, agentdName(i), stopGrace)
}
