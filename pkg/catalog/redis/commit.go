package redis

import (
	"context"
	"fmt"
	"strings"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/mutant"
)

// Commit implements catalog.Store.
func (s *Store) Commit(ctx context.Context, batch []catalog.Commit) ([]catalog.Result, error) {
	if len(batch) > catalog.MaxBatch {
		return nil, errs.New(errs.LimitExceeded, "a batch of %d commits is over the limit of %d", len(batch), catalog.MaxBatch).With("field", "batch")
	}
	results := make([]catalog.Result, len(batch))
	sent := make([]int, 0, len(batch))
	for i := range batch {
		if err := batch[i].Validate(); err != nil {
			results[i].Err = errs.From(err)
			continue
		}
		sent = append(sent, i)
	}
	if len(sent) == 0 {
		return results, nil
	}
	reply, err := s.eval(ctx, commitScript, s.encodeBatch(batch, sent))
	if err != nil {
		return nil, err
	}
	rows, ok := reply.([]any)
	if !ok || len(rows) != len(sent) {
		return nil, lostReply(fmt.Errorf("%d results for %d commits", len(rows), len(sent)))
	}
	last := catalog.Point{Incarnation: *s.incarnation.Load()}
	for n, i := range sent {
		var digest string
		if results[i], digest, err = decodeResult(&batch[i], rows[n]); err != nil {
			return nil, lostReply(err)
		}
		if digest != "" && batch[i].Repair {
			s.putBack.Store(&catalog.Point{Incarnation: last.Incarnation, Seq: results[i].Seq, Digest: digest})
		}
		if digest != "" && !batch[i].Repair { // a repair may be of a server that is another catalog than the one seen
			last.Seq, last.Digest = results[i].Seq, digest
		}
	}
	s.saw(last)
	return results, nil
}

func lostReply(cause error) error {
	return errs.Wrap(cause, errs.ReplyLost, "the store's reply was not understood; ask again with the same operation id to learn its outcome")
}

// encodeBatch makes the arguments of commit.lua: a flat list of strings, each list in it after its length.
func (s *Store) encodeBatch(batch []catalog.Commit, sent []int) []any {
	seen := s.Seen()
	if mutant.On(mutant.StaleView) {
		seen = catalog.Point{}
	}
	args := make([]any, 0, 9+32*len(sent))
	args = append(args, string(s.keys), s.retention.Tombstones.Milliseconds(), s.retention.Changes, catalog.MaxAhead.Milliseconds(), catalog.MarkEvery,
		dec(seen.Seq), seen.Digest, s.sender(), len(sent))
	for _, i := range sent {
		c := &batch[i]
		var minted int64
		if !c.Minted.IsZero() {
			minted = c.Minted.UnixMilli()
		}
		life := s.retention.Receipts
		if c.Transient {
			life = min(life, catalog.TransientLife)
		}
		args = append(args, c.ID, c.Tenant, c.Digest, minted, life.Milliseconds(), c.Attempt, flag(c.Repair),
			dec(uint64(c.Owner.Coordinator)), c.Owner.Node, dec(uint64(c.Owner.Session)), c.Result, dec(uint64(len(c.Checks))))
		for j := range c.Checks {
			k := &c.Checks[j]
			args = append(args, string(k.Cond), k.Key.String(), checkArg(k))
		}
		args = append(args, dec(uint64(len(c.Puts))))
		for j := range c.Puts {
			r := &c.Puts[j].Record
			args = append(args, r.String(), dec(c.Puts[j].ExpectRevision), r.Name, r.Phase, r.Node, r.Identity,
				flag(r.Sealed), encodeRefs(r.Refs), r.Body, revision(c.Puts[j].Revision))
		}
		args = append(args, dec(uint64(len(c.Deletes))))
		for j := range c.Deletes {
			d := &c.Deletes[j]
			args = append(args, d.Key.String(), dec(d.ExpectRevision), flag(d.Tombstone), d.Body)
		}
	}
	return args
}

func checkArg(k *catalog.Check) string {
	switch k.Cond {
	case catalog.CondRevision:
		return dec(k.Revision)
	case catalog.CondPhase:
		return strings.Join(k.Phases, " ")
	case catalog.CondIdentity:
		return k.Identity
	case catalog.CondNamed:
		return k.Name
	}
	return ""
}

// decodeResult reads one row: "" sequence revisions digest; "=" receipt; or a reason and its details.
func decodeResult(c *catalog.Commit, row any) (catalog.Result, string, error) {
	raw, _ := row.([]any)
	fields := make([]string, len(raw))
	for i, f := range raw {
		s, ok := f.(string)
		if !ok {
			return catalog.Result{}, "", fmt.Errorf("a result holds a %T", f)
		}
		fields[i] = s
	}
	switch {
	case len(fields) == 4 && fields[0] == "":
		var d decoder
		r := catalog.Result{Seq: d.count(fields[1]), Revisions: d.revisions(fields[2]), Result: c.Result}
		return r, fields[3], d.err
	case len(fields) == 2 && fields[0] == "=":
		receipt, err := decodeReceipt(c.Tenant, c.ID, fields[1])
		return catalog.Result{Seq: receipt.Seq, Revisions: receipt.Revisions, Result: receipt.Result, Replayed: true}, "", err
	case len(fields) > 0 && errs.Known(errs.Reason(fields[0])):
		return catalog.Result{Err: catalog.Refusal(errs.Reason(fields[0]), fields[1:]...)}, "", nil
	}
	return catalog.Result{}, "", fmt.Errorf("a result of %d fields", len(fields))
}

// revision is empty for one that the store gives.
func revision(n uint64) string {
	if n == 0 {
		return ""
	}
	return dec(n)
}

// Settle implements catalog.Store.
func (s *Store) Settle(ctx context.Context, tenant, id, attempt string) (catalog.Receipt, bool, error) {
	if err := catalog.ValidateSettle(tenant, id, attempt); err != nil {
		return catalog.Receipt{}, false, err
	}
	reply, err := s.eval(ctx, settleScript, []any{string(s.keys), tenant + "/" + id, attempt, catalog.VoidLife.Milliseconds()})
	if err != nil {
		return catalog.Receipt{}, false, err
	}
	raw, found := reply.(string)
	if !found {
		return catalog.Receipt{}, false, nil
	}
	receipt, err := decodeReceipt(tenant, id, raw)
	return receipt, err == nil, err
}
