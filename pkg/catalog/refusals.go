package catalog

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// Refusal is what a store's check found, in the form both stores share: the reason and its
// details as alternating keys and values. Its message is made here, so that stores agree.
func Refusal(reason errs.Reason, details ...string) *errs.Error {
	d := make(map[string]string, len(details)/2)
	for i := 0; i+1 < len(details); i += 2 {
		d[details[i]] = details[i+1]
	}
	e := errs.New(reason, "%s", refusalText(reason, d))
	for k, v := range d {
		if k == "holder" || k == "references" {
			v = uids(v) // callers look these up
		}
		e = e.With(k, v)
	}
	return e
}

// uids takes the kinds off a list of "kind/uid".
func uids(list string) string {
	names := strings.Split(list, ",")
	for i, n := range names {
		if _, u, ok := strings.Cut(n, "/"); ok {
			names[i] = u
		}
	}
	return strings.Join(names, ",")
}

func refusalText(reason errs.Reason, d map[string]string) string {
	switch reason {
	case errs.Fenced:
		if d["node"] != "" {
			return fmt.Sprintf("session %s of node %s is not the one in force (%s); the node must open a new session", d["epoch"], d["node"], d["current_epoch"])
		}
		if d["leader"] != "" {
			return fmt.Sprintf("coordinator epoch %s belongs to %s, to which a server that had come back older granted it anew; ask that one", d["epoch"], d["leader"])
		}
		return fmt.Sprintf("coordinator epoch %s is not the one in force (%s); ask the current leader", d["epoch"], d["current_epoch"])
	case errs.CatalogRewound:
		return "the catalog's server came back without something that it had acknowledged; nothing is written until it is repaired (dormouse admin catalog status)"
	case errs.OperationBodyMismatch:
		return "this operation id was used with another request; use a new operation id"
	case errs.OperationExpired:
		return "this operation id is older than receipts are kept; look at the object, then use a new operation id"
	case errs.AttemptVoid:
		return "this attempt was settled as never applied; send the operation again"
	case errs.StaleRevision:
		return fmt.Sprintf("%s is at revision %s, not %s; read it again", d["uid"], d["current_revision"], d["revision"])
	case errs.StaleUID:
		if d["current_uid"] == "" {
			return fmt.Sprintf("%s does not exist any more", d["uid"])
		}
		return fmt.Sprintf("the name now belongs to %s, not %s; look the name up again", d["current_uid"], d["uid"])
	case errs.IdentityMismatch:
		return fmt.Sprintf("%s has another immutable identity than this request expects", d["uid"])
	case errs.NameTaken:
		return fmt.Sprintf("the name %q belongs to %s; choose another or delete that one", d["name"], d["uid"])
	case errs.AlreadyAttached:
		return fmt.Sprintf("volume %s is attached to %s; delete that first, or use a clone of the volume", d["volume"], d["holder"])
	case errs.StillReferenced:
		return fmt.Sprintf("%s is referred to by %s records (%s); delete those first", d["uid"], d["count"], d["references"])
	case errs.WrongPhase:
		return fmt.Sprintf("%s is in phase %s, which does not allow this", d["uid"], d["phase"])
	}
	return "the catalog refused the commit"
}

// NotFound is OBJECT_NOT_FOUND for a uid or name.
func NotFound(kind Kind, uidOrName string) *errs.Error {
	return errs.New(errs.ObjectNotFound, "there is no %s %q", kind, uidOrName).With("kind", string(kind)).With("uid", uidOrName)
}

// TooOld is RESUME_TOO_OLD: the log begins at oldest (0: unknown) and the store is at current.
func TooOld(after, oldest, current uint64) *errs.Error {
	return errs.New(errs.ResumeTooOld, "changes after %d cannot be replayed; list again and watch from there", after).
		With("after", strconv.FormatUint(after, 10)).With("oldest", strconv.FormatUint(oldest, 10)).With("current", strconv.FormatUint(current, 10))
}
