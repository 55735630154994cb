// Package ticket is what a client shows a node to use one sandbox without a coordinator in between.
//
// A ticket names its tenant, the sandbox's uid, the verbs, the node and when it ends, signed by a key of the
// coordinators (Ed25519). Uids are never used twice, so a ticket is worth nothing for another sandbox, and nothing for
// one that was made again under the same name. It is looked at when a call begins: a stream that runs outlives it.
//
// Form: "dt1.<base64url of the claims, JSON>.<base64url of the signature>". What is signed begins with the
// form's name, so that no other signature of the same key can be taken for a ticket's.
//
// Private keys live in a file (Keys), public ones go to the nodes. Nothing of a ticket is stored.
package ticket

import (
	"crypto/ed25519"
	"encoding/base64"
	"encoding/json"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/dormouse-run/dormouse/pkg/dataplane"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// Claims are what a ticket says.
type Claims struct {
	Key        string           `json:"kid"`
	Tenant     string           `json:"ten"`
	SandboxUID string           `json:"sbx"`
	Verbs      []dataplane.Verb `json:"vrb"`
	Node       string           `json:"nod"`
	// Expires in seconds since 1970.
	Expires int64 `json:"exp"`
}

// May tells whether the ticket is for the verb.
func (c Claims) May(v dataplane.Verb) bool { return slices.Contains(c.Verbs, v) }

const (
	form = "dt1"
	// maxSize bounds a ticket.
	maxSize = 2 << 10
)

// encode signs claims.
func encode(c Claims, key ed25519.PrivateKey) (string, error) {
	body, err := json.Marshal(c)
	if err != nil {
		return "", err
	}
	signed := form + "." + base64.RawURLEncoding.EncodeToString(body)
	return signed + "." + base64.RawURLEncoding.EncodeToString(ed25519.Sign(key, []byte(signed))), nil
}

// PublicKey is what tickets are verified with.
type PublicKey struct {
	ID  string
	Key ed25519.PublicKey
}

// Verifier verifies tickets for one node. Without keys it refuses all. The zero value is useful.
type Verifier struct {
	// Node is the only one that tickets have to be for.
	Node string
	keys atomic.Pointer[[]PublicKey]
}

// SetKeys replaces the keys. Malformed ones are left out.
func (v *Verifier) SetKeys(keys []PublicKey) {
	good := slices.DeleteFunc(slices.Clone(keys), func(k PublicKey) bool { return len(k.Key) != ed25519.PublicKeySize || k.ID == "" })
	v.keys.Store(&good)
}

func invalid(why, format string, args ...any) error {
	return errs.New(errs.TicketInvalid, format, args...).With("why", why)
}

// Verify gives what a ticket for this node says. TICKET_INVALID: get another one.
func (v *Verifier) Verify(ticket string, now time.Time) (Claims, error) {
	c, err := check(ticket, v.key, now)
	if err == nil && c.Node != v.Node {
		return Claims{}, invalid("node", "the ticket is for another node; get another one")
	}
	return c, err
}

// check gives what a ticket says that a key has signed and that has not ended.
func check(ticket string, find func(id string) (ed25519.PublicKey, bool), now time.Time) (Claims, error) {
	var c Claims
	head, signature, ok := cutLast(ticket)
	body, formed := strings.CutPrefix(head, form+".")
	if !ok || !formed || len(ticket) > maxSize {
		return c, invalid("form", "this is no ticket of this version")
	}
	sig, err := base64.RawURLEncoding.DecodeString(signature)
	data, berr := base64.RawURLEncoding.DecodeString(body)
	if err != nil || berr != nil || json.Unmarshal(data, &c) != nil {
		return Claims{}, invalid("form", "this is no ticket of this version")
	}
	key, ok := find(c.Key)
	if !ok || !ed25519.Verify(key, []byte(head), sig) {
		return Claims{}, invalid("signature", "the ticket's signature is of no key that is in use; get another one")
	}
	if now.Unix() >= c.Expires {
		return Claims{}, invalid("expired", "the ticket has ended; get another one")
	}
	return c, nil
}

func cutLast(s string) (before, after string, ok bool) {
	i := strings.LastIndexByte(s, '.')
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+1:], true
}

func (v *Verifier) key(id string) (ed25519.PublicKey, bool) {
	keys := v.keys.Load()
	if keys == nil {
		return nil, false
	}
	for _, k := range *keys {
		if k.ID == id {
			return k.Key, true
		}
	}
	return nil, false
}

// Form begins every ticket.
const Form = form + "."

// Scheme is how a ticket is named in the header authorization.
const Scheme = "Ticket "
