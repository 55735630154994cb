package redis

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// layout makes the names of keys. Its value is the prefix, a hash tag and a colon, so that all keys
// of a catalog are in one slot. KEY is tenant/kind/uid.
//
//	r:KEY            hash    a record: n name, v revision, s sequence, p phase, o node, i identity,
//	                         x sealed ("1"), r references ("m KEY" lines, m one of r s e), b body,
//	                         c created, u updated (ms)
//	i:TENANT/KIND    zset    uids of the living, score 0 (order of bytes)
//	k:KIND           zset    uid/tenant of the living of all tenants
//	o:NODE/KIND      zset    uid/tenant of those that concern a node
//	n:TENANT/KIND    hash    name -> uid
//	f:KEY            zset    who refers to KEY
//	a:KEY            zset    those of them that attach it; score 1 shared, 2 exclusive
//	c:TENANT/ID      string  a receipt: digest, sequence, time (ms), "KEY revision;...", result; a line each
//	d:ATTEMPT        string  a voided attempt
//	t:TENANT/KIND    zset    tombstones, score 0: "UID REVISION SEQUENCE DELETED LIFE BODY", times in ms
//	tl               stream  the line in which they are forgotten; ids are the time they expire (ms); k KEY
//	schema           string  which form all this has, see Schema
//	seq              string  the global sequence
//	digest           string  the digest that is chained over all commits
//	log              stream  the change log; ids are SEQ-0; e epoch, i items: lines "p KEY revision phase node" (d: deleted), h digest
//	marks            stream  each catalog.MarkEvery-th commit, kept longer; ids are SEQ-0; h digest
//	suspended        hash    why there are no commits now: t since (ms), b who found it, i s d the witness, r the sequence then; absent in service;
//	                         while a backup is restored x its id, y its sequence
//	lost             hash    incarnation -> the highest sequence that was found missing, while suspended
//	ancestors        hash    earlier incarnation -> the sequence up to which its history is part of this one
//	restored         string  the id of the backup that was restored last
//	leader           hash    e the epoch in force, h its holder, t the life of its lease in ms
//	lease            string  its holder, while the lease lives
//	sessions         hash    node -> session epoch
//	incarnation      string  made once, and anew by each repair
type layout string

func (l layout) key(class, name string) string { return string(l) + class + ":" + name }
func (l layout) record(k catalog.Key) string   { return l.key("r", k.String()) }
func (l layout) one(name string) string        { return string(l) + name }

var modeLetters = map[catalog.RefMode]byte{catalog.Reference: 'r', catalog.Shared: 's', catalog.Exclusive: 'e'}

func encodeRefs(refs []catalog.Ref) string {
	var b strings.Builder
	for _, r := range refs {
		b.WriteByte(modeLetters[r.Mode])
		b.WriteByte(' ')
		b.WriteString(r.Target.String())
		b.WriteByte('\n')
	}
	return b.String()
}

func decodeRefs(s string) ([]catalog.Ref, error) {
	if s == "" {
		return nil, nil
	}
	lines := strings.Split(strings.TrimSuffix(s, "\n"), "\n")
	refs := make([]catalog.Ref, 0, len(lines))
	for _, line := range lines {
		letter, target, ok := strings.Cut(line, " ")
		key, err := catalog.ParseKey(target)
		if !ok || err != nil {
			return nil, fmt.Errorf("reference %q is malformed", line)
		}
		var mode catalog.RefMode
		switch letter {
		case "r":
			mode = catalog.Reference
		case "s":
			mode = catalog.Shared
		case "e":
			mode = catalog.Exclusive
		default:
			return nil, fmt.Errorf("reference %q has an unknown mode", line)
		}
		refs = append(refs, catalog.Ref{Target: key, Mode: mode})
	}
	return refs, nil
}

func decodeRecord(key catalog.Key, h map[string]string) (catalog.Record, error) {
	refs, err := decodeRefs(h["r"])
	d := decoder{err: err}
	r := catalog.Record{
		Key: key, Name: h["n"], Phase: h["p"], Node: h["o"], Identity: h["i"], Sealed: h["x"] == "1",
		Refs: refs, Body: []byte(h["b"]),
		Revision: d.count(h["v"]), Seq: d.count(h["s"]), Created: d.time(h["c"]), Updated: d.time(h["u"]),
	}
	if d.err != nil {
		return catalog.Record{}, damaged(d.err, "record "+key.String())
	}
	return r, nil
}

func decodeReceipt(tenant, id, raw string) (catalog.Receipt, error) {
	lines := strings.SplitN(raw, "\n", 5)
	if len(lines) != 5 {
		return catalog.Receipt{}, damaged(fmt.Errorf("%d lines", len(lines)), "receipt "+id)
	}
	var d decoder
	r := catalog.Receipt{Tenant: tenant, ID: id, Digest: lines[0], Seq: d.count(lines[1]), At: d.time(lines[2])}
	r.Revisions = d.revisions(lines[3])
	if lines[4] != "" {
		r.Result = []byte(lines[4])
	}
	if d.err != nil {
		return catalog.Receipt{}, damaged(d.err, "receipt "+id)
	}
	return r, nil
}

// decoder reads numbers and keeps the first error.
type decoder struct{ err error }

func (d *decoder) count(s string) uint64 {
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil && d.err == nil {
		d.err = err
	}
	return n
}

func (d *decoder) time(s string) time.Time { return time.UnixMilli(int64(d.count(s))).UTC() }

func (d *decoder) revisions(s string) map[catalog.Key]uint64 {
	m := make(map[catalog.Key]uint64)
	if s == "" {
		return m
	}
	for item := range strings.SplitSeq(s, ";") {
		name, rev, _ := strings.Cut(item, " ")
		key, err := catalog.ParseKey(name)
		if err != nil && d.err == nil {
			d.err = err
		}
		m[key] = d.count(rev)
	}
	return m
}

func damaged(cause error, what string) error {
	return errs.Wrap(cause, errs.StateDamaged, "the catalog's %s cannot be read; stop the coordinator, keep a copy of the server's data and restore a backup", what)
}

func dec(n uint64) string { return strconv.FormatUint(n, 10) }

func flag(b bool) string {
	if b {
		return "1"
	}
	return ""
}
