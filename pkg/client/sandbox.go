package client

import (
	"context"
	"errors"
	"io"
	"iter"

	"google.golang.org/protobuf/proto"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	"github.com/dormouse-run/dormouse/pkg/wait"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// Sandbox is a handle: a uid and what was last seen of it.
type Sandbox struct {
	c    *Client
	UID  string
	Last *dormousev1.Sandbox // nil until it was read
}

// Sandbox gives the handle of a uid without asking the server.
func (c *Client) Sandbox(uid string) *Sandbox { return &Sandbox{c: c, UID: uid} }

func (c *Client) seen(s *dormousev1.Sandbox) *Sandbox {
	return &Sandbox{c: c, UID: s.GetMeta().GetUid(), Last: s}
}

// operation gives the request's operation id, or a new one.
func operation(id string) string {
	if id == "" {
		return uid.New()
	}
	return id
}

// CreateSandbox returns when the sandbox runs, or failed. The request is not changed.
func (c *Client) CreateSandbox(ctx context.Context, req *dormousev1.CreateSandboxRequest) (*Sandbox, error) {
	req = proto.CloneOf(req)
	req.OperationId = operation(req.GetOperationId())
	resp, err := retry(ctx, func(ctx context.Context) (*dormousev1.CreateSandboxResponse, error) {
		return c.sandboxes.CreateSandbox(ctx, req)
	})
	if err != nil {
		return nil, err
	}
	return c.seen(resp.GetSandbox()), nil
}

// FindSandbox gives the sandbox of a uid, or the living one of a name. A name is looked up once;
// from then on the handle's uid counts.
func (c *Client) FindSandbox(ctx context.Context, ref string) (*Sandbox, error) {
	if uid.Check(ref) == nil {
		s := c.Sandbox(ref)
		return s, s.Refresh(ctx)
	}
	found, err := byName(ctx, "sandbox", ref, c.ListSandboxes(ctx, &dormousev1.ListSandboxesRequest{Name: ref}))
	if err != nil {
		return nil, err
	}
	return c.seen(found), nil
}

// ListSandboxes gives all sandboxes that match, page by page.
func (c *Client) ListSandboxes(ctx context.Context, req *dormousev1.ListSandboxesRequest) iter.Seq2[*dormousev1.Sandbox, error] {
	return pages(func(token string) ([]*dormousev1.Sandbox, string, error) {
		next := proto.CloneOf(req)
		if token != "" {
			next.PageToken = token
		}
		resp, err := retry(ctx, func(ctx context.Context) (*dormousev1.ListSandboxesResponse, error) {
			return c.sandboxes.ListSandboxes(ctx, next)
		})
		return resp.GetSandboxes(), resp.GetNextPageToken(), err
	})
}

// pages turns pages into one sequence, which ends with the first error.
func pages[T any](page func(token string) ([]T, string, error)) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		token := ""
		for {
			items, next, err := page(token)
			if err != nil {
				var none T
				yield(none, err)
				return
			}
			for _, item := range items {
				if !yield(item, nil) {
					return
				}
			}
			if next == "" {
				return
			}
			token = next
		}
	}
}

// Collect gathers a sequence.
func Collect[T any](seq iter.Seq2[T, error]) ([]T, error) {
	var all []T
	for item, err := range seq {
		if err != nil {
			return nil, err
		}
		all = append(all, item)
	}
	return all, nil
}

type named interface{ GetMeta() *dormousev1.ObjectMeta }

// byName takes the only object of a name.
func byName[T named](_ context.Context, kind, name string, seq iter.Seq2[T, error]) (T, error) {
	var none T
	if name == "" {
		return none, errs.New(errs.InvalidField, "name a %s, or give its uid", kind).With("field", kind)
	}
	found, err := Collect(seq)
	switch {
	case err != nil:
		return none, err
	case len(found) == 0:
		return none, errs.New(errs.ObjectNotFound, "there is no %s named %q", kind, name).With("kind", kind).With("name", name)
	case len(found) > 1:
		return none, errs.New(errs.AmbiguousName, "%d objects of kind %s are named %q; give a uid: %s, %s ...", len(found), kind, name,
			found[0].GetMeta().GetUid(), found[1].GetMeta().GetUid()).With("name", name)
	}
	return found[0], nil
}

// Refresh reads the sandbox.
func (s *Sandbox) Refresh(ctx context.Context) error {
	resp, err := retry(ctx, func(ctx context.Context) (*dormousev1.GetSandboxResponse, error) {
		return s.c.sandboxes.GetSandbox(ctx, &dormousev1.GetSandboxRequest{Uid: s.UID})
	})
	if err != nil {
		return err
	}
	s.Last = resp.GetSandbox()
	return nil
}

// Network tells what the sandbox's network has seen.
func (s *Sandbox) Network(ctx context.Context) (*dormousev1.SandboxNetwork, error) {
	resp, err := retry(ctx, func(ctx context.Context) (*dormousev1.GetSandboxNetworkResponse, error) {
		return s.c.sandboxes.GetSandboxNetwork(ctx, &dormousev1.GetSandboxNetworkRequest{Uid: s.UID})
	})
	return resp.GetNetwork(), err
}

// Delete returns when its absence was observed. The operation id may be empty.
func (s *Sandbox) Delete(ctx context.Context, operationID string) error {
	req := &dormousev1.DeleteSandboxRequest{Uid: s.UID, OperationId: operation(operationID)}
	_, err := retry(ctx, func(ctx context.Context) (*dormousev1.DeleteSandboxResponse, error) {
		return s.c.sandboxes.DeleteSandbox(ctx, req)
	})
	return err
}

// Checkpoint returns when the snapshot is ready and durable. The request's uid is the handle's.
func (s *Sandbox) Checkpoint(ctx context.Context, req *dormousev1.CheckpointSandboxRequest) (*Snapshot, error) {
	req = proto.CloneOf(req)
	req.Uid, req.OperationId = s.UID, operation(req.GetOperationId())
	resp, err := retry(ctx, func(ctx context.Context) (*dormousev1.CheckpointSandboxResponse, error) {
		return s.c.sandboxes.CheckpointSandbox(ctx, req)
	})
	if err != nil {
		return nil, err
	}
	return s.c.seenSnapshot(resp.GetSnapshot()), nil
}

// seeAfter makes a call that answers with the sandbox, and keeps what it says in Last.
func seeAfter[T interface{ GetSandbox() *dormousev1.Sandbox }](ctx context.Context, s *Sandbox, call func(context.Context) (T, error)) error {
	resp, err := retry(ctx, call)
	if err == nil {
		s.Last = resp.GetSandbox()
	}
	return err
}

// Update changes what the request's mask names. The request's uid is the handle's.
func (s *Sandbox) Update(ctx context.Context, req *dormousev1.UpdateSandboxRequest) error {
	req = proto.CloneOf(req)
	req.Uid, req.OperationId = s.UID, operation(req.GetOperationId())
	return seeAfter(ctx, s, func(ctx context.Context) (*dormousev1.UpdateSandboxResponse, error) {
		return s.c.sandboxes.UpdateSandbox(ctx, req)
	})
}

// Pause freezes the sandbox in memory and returns when it stands still. The operation id may be empty.
func (s *Sandbox) Pause(ctx context.Context, operationID string) error {
	req := &dormousev1.PauseSandboxRequest{Uid: s.UID, OperationId: operation(operationID)}
	return seeAfter(ctx, s, func(ctx context.Context) (*dormousev1.PauseSandboxResponse, error) {
		return s.c.sandboxes.PauseSandbox(ctx, req)
	})
}

// Resume returns when the sandbox runs, whether it was paused or hibernated. The operation id may be empty.
func (s *Sandbox) Resume(ctx context.Context, operationID string) error {
	req := &dormousev1.ResumeSandboxRequest{Uid: s.UID, OperationId: operation(operationID)}
	return seeAfter(ctx, s, func(ctx context.Context) (*dormousev1.ResumeSandboxResponse, error) {
		return s.c.sandboxes.ResumeSandbox(ctx, req)
	})
}

// Hibernate returns when the sandbox is on its node's disk alone. The operation id may be empty.
func (s *Sandbox) Hibernate(ctx context.Context, operationID string) error {
	req := &dormousev1.HibernateSandboxRequest{Uid: s.UID, OperationId: operation(operationID)}
	return seeAfter(ctx, s, func(ctx context.Context) (*dormousev1.HibernateSandboxResponse, error) {
		return s.c.sandboxes.HibernateSandbox(ctx, req)
	})
}

// Fork makes copies of a sandbox or of a snapshot, as the request says.
func (c *Client) Fork(ctx context.Context, req *dormousev1.ForkSandboxRequest) (copies []*Sandbox, snapshotUID string, err error) {
	req = proto.CloneOf(req)
	req.OperationId = operation(req.GetOperationId())
	resp, err := retry(ctx, func(ctx context.Context) (*dormousev1.ForkSandboxResponse, error) {
		return c.sandboxes.ForkSandbox(ctx, req)
	})
	if err != nil {
		return nil, "", err
	}
	for _, s := range resp.GetSandboxes() {
		copies = append(copies, c.seen(s))
	}
	return copies, resp.GetSnapshotUid(), nil
}

// Await reads the sandbox until the condition holds. The condition gets nil when it was deleted.
func (s *Sandbox) Await(ctx context.Context, holds func(*dormousev1.Sandbox) bool) error {
	for {
		// The list's sequence is taken before the object is read, so the watch misses nothing.
		list, err := retry(ctx, func(ctx context.Context) (*dormousev1.ListSandboxesResponse, error) {
			return s.c.sandboxes.ListSandboxes(ctx, &dormousev1.ListSandboxesRequest{PageSize: 1})
		})
		if err != nil {
			return err
		}
		if err := s.Refresh(ctx); errs.Has(err, errs.ObjectNotFound) {
			s.Last = nil
			if holds(nil) {
				return nil
			}
			return err
		} else if err != nil {
			return err
		}
		if holds(s.Last) {
			return nil
		}
		done, err := s.follow(ctx, list.GetSequence(), holds)
		if done || err != nil && !again(ctx, err) && !errs.Has(err, errs.ResumeTooOld) {
			return err
		}
		if err := wait.For(ctx, firstBackoff); err != nil {
			return errs.From(err)
		}
	}
}

// follow watches from a sequence until the condition holds or the stream ends.
func (s *Sandbox) follow(ctx context.Context, after uint64, holds func(*dormousev1.Sandbox) bool) (bool, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := s.c.sandboxes.WatchSandboxes(ctx, &dormousev1.WatchSandboxesRequest{AfterSequence: after, Uid: s.UID})
	if err != nil {
		return false, err
	}
	for {
		ev, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return false, nil
		}
		if err != nil {
			return false, err
		}
		if ev.GetUid() != s.UID {
			continue
		}
		if ev.GetDeleted() {
			s.Last = nil
			if holds(nil) {
				return true, nil
			}
			return true, errs.New(errs.ObjectNotFound, "the sandbox was deleted meanwhile").With("kind", "sandbox").With("uid", s.UID)
		}
		s.Last = ev.GetSandbox()
		if holds(s.Last) {
			return true, nil
		}
	}
}
