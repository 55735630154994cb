package robustness

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// Rewinds that are told step by step, of what the traffic meets by chance at most.

// story is a world without traffic.
type story struct {
	*testing.T
	*world
	faults *faults
	ctx    context.Context
	wg     sync.WaitGroup
}

// newStory starts one, whose nodes refuse images that are called absent, once the channel is closed.
func newStory(t *testing.T, refuse <-chan struct{}, asked chan<- string) *story {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), runLimit)
	image := func(ctx context.Context, reference string) error {
		if !strings.Contains(reference, "absent") {
			return nil
		}
		asked <- reference
		select {
		case <-refuse:
			return errs.New(errs.ImageNotFound, "there is no image %s", reference)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	w, err := newWorld(ctx, coordinator(t, ""), "", image)
	if err != nil {
		t.Fatal(err)
	}
	s := &story{T: t, world: w, ctx: ctx, faults: &faults{world: w, traffic: newTraffic(w, 0), patience: patience}}
	t.Cleanup(func() {
		cancel()
		s.wg.Wait()
		if err := w.close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func (s *story) ok(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

func (s *story) until(what string, ok func() error) {
	s.Helper()
	ctx, cancel := context.WithTimeout(s.ctx, patience)
	defer cancel()
	s.ok(until(ctx, what, ok))
}

// kept copies what the server has now.
func (s *story) kept() string {
	s.Helper()
	to := s.path("kept")
	s.ok(s.redis.copy(to))
	return to
}

// rewind gives the server the copy once the journals have everything; the catalog has to come back by itself.
func (s *story) rewind(kept string) {
	s.Helper()
	s.ok(s.faults.rewind(s.ctx, false, func() error { return s.redis.rewind(kept) }))
	s.until("the nodes are back", func() error { return s.ready(s.ctx) })
}

// begin has a sandbox made by a call that nobody waits for.
func (s *story) begin(name, image string, volumes ...string) {
	req := s.request("", name, image, volumes...)
	s.wg.Go(func() { _, _ = s.user[0].CreateSandbox(s.ctx, req) }) // it fails, or goes on until the story ends
}

// find gives the uid of the sandbox of that name.
func (s *story) find(name string) (u string) {
	s.Helper()
	s.until("the sandbox is there", func() error {
		all, err := client.Collect(s.user[0].ListSandboxes(s.ctx, &dormousev1.ListSandboxesRequest{Name: name}))
		if err == nil && len(all) != 1 {
			err = fmt.Errorf("%d sandboxes are called %s", len(all), name)
		}
		if err == nil {
			u = all[0].GetMeta().GetUid()
		}
		return err
	})
	return u
}

func (s *story) request(op, name, image string, volumes ...string) *dormousev1.CreateSandboxRequest {
	spec := &dormousev1.SandboxSpec{Image: "simulated.test/" + image + ":1"}
	for _, v := range volumes {
		spec.Volumes = append(spec.Volumes, &dormousev1.VolumeMount{VolumeUid: v, Path: "/data"})
	}
	return &dormousev1.CreateSandboxRequest{OperationId: op, Name: name, Spec: spec}
}

// phase of a sandbox; "" if it is not there.
func (s *story) phase(u string) string {
	s.Helper()
	box := s.user[0].Sandbox(u)
	err := box.Refresh(s.ctx)
	if errs.Has(err, errs.ObjectNotFound) {
		return ""
	}
	s.ok(err)
	return seenSandbox(box.Last).Phase
}

// A sandbox that never had a node is in no node's journal. Yet the catalog that comes back older, and goes on by itself, has what was
// acknowledged, and not what was deleted: the coordinator that led has kept it.
func TestC21WhatNeverHadANodeOutlivesARewind(t *testing.T) {
	s := newStory(t, nil, nil)
	cordon := func(cordoned bool) {
		for i := range nodes {
			_, err := s.operator[0].Cordon(s.ctx, fmt.Sprintf("n%d", i), cordoned, "")
			s.ok(err)
		}
	}
	cordon(true)
	_, dropped := s.unplaced("dropped")
	kept := s.kept()
	s.ok(s.user[0].Sandbox(dropped).Delete(s.ctx, ""))
	op, stays := s.unplaced("stays")
	s.rewind(kept)
	if p := s.phase(dropped); p != "" {
		t.Errorf("what was deleted is %s", p)
	}
	if p := s.phase(stays); p != "FAILED" {
		t.Errorf("what was told to have failed is %q", p)
	}
	cordon(false)
	if _, err := s.user[0].CreateSandbox(s.ctx, s.request(op, "stays", "image")); !errs.Has(err, errs.NoNodeFits) {
		t.Errorf("the operation is answered otherwise: %v", err)
	}
	s.ok(s.user[0].Sandbox(stays).Delete(s.ctx, ""))
}

// unplaced has a sandbox made for which there is no node.
func (s *story) unplaced(name string) (op, made string) {
	s.Helper()
	op = uid.New()
	if _, err := s.user[0].CreateSandbox(s.ctx, s.request(op, name, "image")); !errs.Has(err, errs.NoNodeFits) {
		s.Fatal(err)
	}
	return op, s.find(name)
}

// A sandbox that failed holds nothing any more, and another has its volume. A catalog that comes back from before it failed learns that.
func TestC21WhatWasReleasedStaysReleased(t *testing.T) {
	refuse, asked := make(chan struct{}), make(chan string, 100)
	s := newStory(t, refuse, asked)
	v, err := s.user[0].CreateVolume(s.ctx, &dormousev1.CreateVolumeRequest{Name: "data"})
	s.ok(err)
	s.begin("failed", "absent", v.UID)
	<-asked // so that its record names its node
	failed := s.find("failed")
	kept := s.kept()
	close(refuse)
	s.until("it has failed and let go", func() error {
		if p := s.phase(failed); p != "FAILED" {
			return errors.New(p)
		}
		if err := v.Refresh(s.ctx); err != nil || len(v.Last.GetStatus().GetAttachments()) > 0 {
			return fmt.Errorf("%v, %w", v.Last.GetStatus(), err)
		}
		return nil
	})
	next, err := s.user[0].CreateSandbox(s.ctx, s.request("", "next", "image", v.UID))
	s.ok(err)
	s.rewind(kept)
	if p := s.phase(failed); p != "FAILED" {
		t.Errorf("what failed is %q", p)
	}
	if p := s.phase(next.UID); p != "RUNNING" {
		t.Errorf("what ran is %q", p)
	}
	s.ok(v.Refresh(s.ctx))
	if a := v.Last.GetStatus().GetAttachments(); len(a) != 1 || a[0].GetSandboxUid() != next.UID {
		t.Errorf("the volume is attached to %v", a)
	}
	s.ok(s.user[0].Sandbox(failed).Delete(s.ctx, ""))
	s.ok(next.Delete(s.ctx, ""))
	s.ok(v.Delete(s.ctx, ""))
}

// TestDumps: what a dump is loaded from is what was there.
func TestDumps(t *testing.T) {
	s, err := newRedis(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.close(); err != nil {
			t.Error(err)
		}
	}()
	ctx, dump := t.Context(), filepath.Join(t.TempDir(), "dump")
	for _, err := range []error{s.up(ctx), s.client.Set(ctx, "is", "1", 0).Err(), s.dump(ctx, dump), s.client.Set(ctx, "was", "1", 0).Err(), s.kill(), s.load(dump), s.up(ctx)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if n, err := s.client.Exists(ctx, "is", "was").Result(); err != nil || n != 1 || s.client.Get(ctx, "is").Val() != "1" {
		t.Error(n, err)
	}
}
