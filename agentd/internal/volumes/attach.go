// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package volumes

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/dormouse-run/dormouse/pkg/durable"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fault"
)

const maxListed = 10

// Holder is who has a volume attached: a sandbox, by its uid.
type Holder struct {
	Name     string    `json:"name"`
	ReadOnly bool      `json:"read_only"`
	Since    time.Time `json:"since"`
}

// Attach gives a volume to a holder: alone if it may write, shared if it only reads. It is durable when it
// returns. The same request again is success. ALREADY_ATTACHED names who has it.
func (s *Store) Attach(ctx context.Context, uid, holder string, readOnly bool) (Volume, error) {
	if err := errors.Join(checkUID(uid), checkHolder(holder)); err != nil {
		return Volume{}, errs.From(err)
	}
	release, err := s.claim(ctx, uid)
	if err != nil {
		return Volume{}, err
	}
	defer release()
	m, err := s.load(uid)
	if err != nil {
		return Volume{}, err
	}
	held, err := s.holders(uid)
	if err != nil {
		return Volume{}, err
	}
	for _, h := range held {
		switch {
		case h.Name == holder && h.ReadOnly == readOnly:
			return m.Volume, nil
		case h.ReadOnly && readOnly && h.Name != holder:
		default:
			return Volume{}, errs.New(errs.AlreadyAttached, "the volume %s is attached to %s: detach it there first, or clone it", uid, h.Name).
				With("volume", uid).With("holder", h.Name)
		}
	}
	h := Holder{Name: holder, ReadOnly: readOnly, Since: time.Now().UTC()}
	fault.At("volume.attach.before")
	if err := durable.WriteJSON(filepath.Join(s.attachments(uid), holder), h); err != nil {
		return Volume{}, s.fail("attach", uid, err)
	}
	fault.At("volume.attach.after")
	return m.Volume, nil
}

// Detach ends an attachment. One that is not there is success, as is a volume that is gone.
func (s *Store) Detach(ctx context.Context, uid, holder string) error {
	if err := errors.Join(checkUID(uid), checkHolder(holder)); err != nil {
		return errs.From(err)
	}
	release, err := s.claim(ctx, uid)
	if err != nil {
		return err
	}
	defer release()
	dir := s.attachments(uid)
	fault.At("volume.detach.before")
	err = os.Remove(filepath.Join(dir, holder))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err == nil {
		fault.At("volume.detach.after")
		err = durable.SyncDir(dir)
	}
	if err != nil {
		return s.fail("detach", uid, err)
	}
	return nil
}

// Holders lists who has a volume attached, by name.
func (s *Store) Holders(_ context.Context, uid string) ([]Holder, error) {
	if err := checkUID(uid); err != nil {
		return nil, err
	}
	if _, err := s.load(uid); err != nil {
		return nil, err
	}
	return s.holders(uid)
}

// Attachments lists the holders of all volumes by the volumes' uids: what reconcile compares with the
// sandboxes it knows.
func (s *Store) Attachments(_ context.Context) (map[string][]Holder, error) {
	entries, err := os.ReadDir(s.dir("volumes"))
	if err != nil {
		return nil, s.fail("list", "", err)
	}
	all := map[string][]Holder{}
	for _, e := range entries {
		held, err := s.holders(e.Name())
		if err != nil {
			return nil, err
		}
		if len(held) > 0 {
			all[e.Name()] = held
		}
	}
	return all, nil
}

func (s *Store) holders(uid string) ([]Holder, error) {
	dir := s.attachments(uid)
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, s.fail("read", uid, err)
	}
	var all []Holder
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), durable.Unfinished) {
			continue
		}
		h := Holder{}
		data, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil || json.Unmarshal(data, &h) != nil {
			h.ReadOnly = false // the name is the hold; what it says is damaged, so think the worst
		}
		h.Name = e.Name()
		all = append(all, h)
	}
	slices.SortFunc(all, func(a, b Holder) int { return strings.Compare(a.Name, b.Name) })
	return all, nil
}

func checkHolder(name string) error {
	if !uidPattern.MatchString(name) {
		return errs.New(errs.InvalidField, "%.140q cannot hold a volume: use the uid of a sandbox", name).With("field", "holder")
	}
	return nil
}
