package network

import (
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"hash/fnv"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// This file has the parts that rules are made of. Registers: 1 and 2 hold 16 bytes each, 9 is the second four of
// register 1.
const (
	reg1  = 1
	reg2  = 2
	reg1b = 9
)

func deviceIs(key expr.MetaKey, prefix string) []expr.Any {
	// Without a final zero, the beginning of the name is compared.
	return []expr.Any{&expr.Meta{Key: key, Register: reg1}, &expr.Cmp{Op: expr.CmpOpEq, Register: reg1, Data: []byte(prefix)}}
}

func from(prefix string) []expr.Any { return deviceIs(expr.MetaKeyIIFNAME, prefix) }
func to(prefix string) []expr.Any   { return deviceIs(expr.MetaKeyOIFNAME, prefix) }

func notIPv4() []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: reg1}, &expr.Cmp{Op: expr.CmpOpNeq, Register: reg1, Data: []byte{unix.NFPROTO_IPV4}}}
}

func loadSource(register uint32) expr.Any {
	return &expr.Payload{DestRegister: register, Base: expr.PayloadBaseNetworkHeader, Offset: 12, Len: 4}
}

func loadDestination() expr.Any {
	return &expr.Payload{DestRegister: reg1, Base: expr.PayloadBaseNetworkHeader, Offset: 16, Len: 4}
}

func loadPort() expr.Any {
	return &expr.Payload{DestRegister: reg1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2}
}

func in(set *nftables.Set) expr.Any {
	return &expr.Lookup{SourceRegister: reg1, SetName: set.Name, SetID: set.ID}
}

func equals(data []byte) expr.Any { return &expr.Cmp{Op: expr.CmpOpEq, Register: reg1, Data: data} }

// state matches connections in one of the states.
func state(bits uint32) []expr.Any {
	return []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATE, Register: reg1},
		&expr.Bitwise{SourceRegister: reg1, DestRegister: reg1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(bits), Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: reg1, Data: make([]byte, 4)},
	}
}

const known = expr.CtStateBitESTABLISHED | expr.CtStateBitRELATED

// answering matches what goes back to who began a connection.
func answering() []expr.Any {
	return []expr.Any{&expr.Ct{Key: expr.CtKeyDIRECTION, Register: reg1}, equals([]byte{1})}
}

func protocol(p uint8) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg1}, equals([]byte{p})}
}

func verdict(k expr.VerdictKind) expr.Any { return &expr.Verdict{Kind: k} }

func jump(chain string) expr.Any { return &expr.Verdict{Kind: expr.VerdictJump, Chain: chain} }

func rule(parts ...any) []expr.Any {
	var out []expr.Any
	for _, p := range parts {
		switch p := p.(type) {
		case []expr.Any:
			out = append(out, p...)
		case expr.Any:
			out = append(out, p)
		}
	}
	return out
}

// intervals are the elements of an interval set: sorted, and with overlaps and neighbours made one, which the kernel
// does not do itself.
func intervals[T any](ranges []T, bounds func(T) (first, last uint64), size int) []nftables.SetElement {
	type span struct{ first, last uint64 }
	var spans []span
	for _, r := range ranges {
		first, last := bounds(r)
		spans = append(spans, span{first, last})
	}
	slices.SortFunc(spans, func(a, b span) int { return int(int64(a.first) - int64(b.first)) })
	var merged []span
	for _, s := range spans {
		if n := len(merged); n > 0 && s.first <= merged[n-1].last+1 {
			merged[n-1].last = max(merged[n-1].last, s.last)
			continue
		}
		merged = append(merged, s)
	}
	key := func(v uint64) []byte {
		var b [8]byte
		binary.BigEndian.PutUint64(b[:], v)
		return b[8-size:]
	}
	var out []nftables.SetElement
	if len(merged) > 0 && merged[0].first > 0 {
		out = append(out, nftables.SetElement{Key: key(0), IntervalEnd: true})
	}
	for _, s := range merged {
		out = append(out, nftables.SetElement{Key: key(s.first)})
		if s.last+1 < 1<<(8*size) {
			out = append(out, nftables.SetElement{Key: key(s.last + 1), IntervalEnd: true})
		}
	}
	return out
}

func addressIntervals(ranges []netip.Prefix) []nftables.SetElement {
	return intervals(ranges, func(p netip.Prefix) (uint64, uint64) {
		first, last := p.Masked().Addr().As4(), lastOf(p).As4()
		return uint64(binary.BigEndian.Uint32(first[:])), uint64(binary.BigEndian.Uint32(last[:]))
	}, 4)
}

func portIntervals(ranges []sandbox.PortRange) []nftables.SetElement {
	return intervals(ranges, func(r sandbox.PortRange) (uint64, uint64) { return uint64(r.First), uint64(r.Last) }, 2)
}

// mark is what the connections that a policy let through are known by. It follows from the policy and whose it is,
// so that they are known after a restart of agentd as well, and no more once the policy is another.
func mark(uid string, e *sandbox.Egress) uint32 {
	data, err := json.Marshal(e)
	if err != nil {
		data = nil // a struct of texts and numbers: it cannot fail
	}
	h := fnv.New32a()
	_, _ = h.Write([]byte(uid)) // never fails
	_, _ = h.Write(data)
	return max(h.Sum32(), 1)
}

func hexOf(addr netip.Addr) string {
	b := addr.As4()
	return hex.EncodeToString(b[:])
}

func bytesOf(addr netip.Addr) []byte { return addr.AsSlice() }

func deviceKey(name string, addr netip.Addr) []byte {
	key := make([]byte, 16, 20)
	copy(key, name)
	return append(key, bytesOf(addr)...)
}

func markKey(addr netip.Addr, mark uint32) []byte {
	return append(bytesOf(addr), binaryutil.NativeEndian.PutUint32(mark)...)
}
