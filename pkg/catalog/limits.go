package catalog

import (
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// Limits, enforced before anything is sent. Sizes are in bytes.
const (
	MaxBatch     = 512
	MaxBody      = 256 << 10
	MaxResult    = 64 << 10
	MaxTombstone = 16 << 10
	MaxRefs      = 256
	MaxWrites    = 512 // puts and deletes, and checks, of one commit
	MaxUID       = 200
	MaxName      = 512
	MaxID        = 128

	DefaultPage  = 100
	MaxPage      = 500
	MaxPageBytes = 4 << 20
	// MaxHolders bounds how many referrers a STILL_REFERENCED names.
	MaxHolders = 10
	// MaxCounter is the largest revision, sequence and epoch: stores count in doubles.
	MaxCounter = 1<<53 - 1
	// VoidLife is how long a voided attempt stays void.
	VoidLife = 24 * time.Hour
	// MaxAhead is how far in the future an operation's id may have been made, by a clock that is ahead of the
	// store's or because the store's was set back. Its receipt lives that much longer.
	MaxAhead = 2 * time.Hour
	// TransientLife is how long the receipt of a transient commit lives.
	TransientLife = 10 * time.Minute
)

// String gives tenant/kind/uid.
func (k Key) String() string { return k.Tenant + "/" + string(k.Kind) + "/" + k.UID }

// ParseKey reads what String gives.
func ParseKey(s string) (Key, error) {
	parts := strings.Split(s, "/")
	if len(parts) != 3 {
		return Key{}, errs.New(errs.InvalidField, "a catalog key is tenant/kind/uid").With("field", "key")
	}
	k := Key{Tenant: parts[0], Kind: Kind(parts[1]), UID: parts[2]}
	return k, k.Validate()
}

// Validate checks the form: tenant and kind of letters, digits and "._-"; uid also of ":@+";
// none of them empty, none over MaxUID.
func (k Key) Validate() error {
	if err := ValidateScope(k.Tenant, k.Kind); err != nil {
		return err
	}
	return token("uid", k.UID, ":@+")
}

// ValidateScope checks a tenant and a kind.
func ValidateScope(tenant string, kind Kind) error {
	if err := token("tenant", tenant, ""); err != nil {
		return err
	}
	return token("kind", string(kind), "")
}

// ValidateNode checks the name of a node.
func ValidateNode(node string) error { return token("node", node, "") }

func token(field, s, extra string) error {
	if s == "" {
		return errs.New(errs.InvalidField, "%s must not be empty", field).With("field", field)
	}
	if len(s) > MaxUID {
		return tooLarge(field, MaxUID, len(s))
	}
	for i := range len(s) {
		c := s[i]
		ok := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.IndexByte("._-", c) >= 0
		if !ok && strings.IndexByte(extra, c) < 0 {
			return errs.New(errs.InvalidField, "%s may hold letters, digits and %q only", field, "._-"+extra).With("field", field)
		}
	}
	return nil
}

func printable(field, s string, limit int) error {
	if len(s) > limit {
		return tooLarge(field, limit, len(s))
	}
	if !utf8.ValidString(s) || strings.ContainsFunc(s, unicode.IsControl) {
		return errs.New(errs.InvalidField, "%s must be valid UTF-8 without control characters", field).With("field", field)
	}
	return nil
}

func tooLarge(field string, limit, got int) error {
	return errs.New(errs.LimitExceeded, "%s is %d, over the limit of %d", field, got, limit).
		With("field", field).With("limit", strconv.Itoa(limit)).With("got", strconv.Itoa(got))
}

// PageSize resolves a requested page size; out of range is INVALID_FIELD.
func PageSize(asked int) (int, error) {
	if asked == 0 {
		return DefaultPage, nil
	}
	if asked < 0 || asked > MaxPage {
		return 0, errs.New(errs.InvalidField, "page size %d is outside 1..%d", asked, MaxPage).With("field", "page_size")
	}
	return asked, nil
}

// Validate checks the form of a commit. Stores call it for each commit of a batch; a malformed one
// gets its error as its Result and leaves the others alone.
func (c *Commit) Validate() error {
	if c.ID != "" {
		if err := token("tenant", c.Tenant, ""); err != nil {
			return err
		}
	}
	for _, f := range []struct{ name, value string }{{"id", c.ID}, {"digest", c.Digest}, {"attempt", c.Attempt}} {
		if err := printable(f.name, f.value, MaxID); err != nil {
			return err
		}
	}
	if n := len(c.Puts) + len(c.Deletes); n > MaxWrites {
		return tooLarge("writes", MaxWrites, n)
	}
	if len(c.Checks) > MaxWrites {
		return tooLarge("checks", MaxWrites, len(c.Checks))
	}
	if len(c.Result) > MaxResult {
		return tooLarge("result", MaxResult, len(c.Result))
	}
	if c.Owner.Coordinator > MaxCounter || c.Owner.Session > MaxCounter {
		return errs.New(errs.InvalidField, "an epoch is above %d", uint64(MaxCounter)).With("field", "owner")
	}
	if c.Owner.Node != "" {
		if err := ValidateNode(c.Owner.Node); err != nil {
			return err
		}
	}
	for i := range c.Checks {
		if err := c.Checks[i].validate(); err != nil {
			return err
		}
	}
	return c.validateWrites()
}

func (c *Commit) validateWrites() error {
	seen := make(map[Key]bool, len(c.Puts)+len(c.Deletes))
	once := func(k Key) error {
		if seen[k] {
			return errs.New(errs.InvalidField, "the commit writes %s twice", k).With("field", "puts")
		}
		seen[k] = true
		return k.Validate()
	}
	deleted := make(map[Key]bool, len(c.Deletes))
	for i := range c.Deletes {
		d := &c.Deletes[i]
		if err := once(d.Key); err != nil {
			return err
		}
		if d.ExpectRevision == 0 || d.ExpectRevision > MaxCounter {
			return errs.New(errs.InvalidField, "a delete needs the revision that it deletes").With("field", "expect_revision")
		}
		if len(d.Body) > MaxTombstone {
			return tooLarge("tombstone", MaxTombstone, len(d.Body))
		}
		deleted[d.Key] = true
	}
	for i := range c.Puts {
		p := &c.Puts[i]
		if err := once(p.Record.Key); err != nil {
			return err
		}
		if p.ExpectRevision > MaxCounter {
			return errs.New(errs.InvalidField, "a revision is above %d", uint64(MaxCounter)).With("field", "expect_revision")
		}
		if p.Revision != 0 && (!c.Repair || p.Revision <= p.ExpectRevision || p.Revision > MaxCounter) {
			return errs.New(errs.InvalidField, "only a repair gives a revision, above the one expected and up to %d", uint64(MaxCounter)).With("field", "revision")
		}
		if err := p.Record.validate(deleted); err != nil {
			return err
		}
	}
	return nil
}

// Validate checks the form of a record that is read from elsewhere than a store.
func (r *Record) Validate() error {
	if err := r.Key.Validate(); err != nil {
		return err
	}
	return r.validate(nil)
}

func (r *Record) validate(deleted map[Key]bool) error {
	if err := printable("name", r.Name, MaxName); err != nil {
		return err
	}
	if err := printable("identity", r.Identity, MaxName); err != nil {
		return err
	}
	if r.Phase != "" {
		if err := token("phase", r.Phase, ""); err != nil {
			return err
		}
	}
	if r.Node != "" {
		if err := ValidateNode(r.Node); err != nil {
			return err
		}
	}
	if len(r.Body) > MaxBody {
		return tooLarge("body", MaxBody, len(r.Body))
	}
	if len(r.Refs) > MaxRefs {
		return tooLarge("refs", MaxRefs, len(r.Refs))
	}
	targets := make(map[Key]bool, len(r.Refs))
	for _, ref := range r.Refs {
		if err := ref.Target.Validate(); err != nil {
			return err
		}
		if ref.Mode != Reference && !ref.Mode.Attaches() {
			return errs.New(errs.InvalidField, "unknown reference mode %q", ref.Mode).With("field", "refs")
		}
		if targets[ref.Target] || deleted[ref.Target] || ref.Target == r.Key {
			return errs.New(errs.InvalidField, "%s refers to %s twice, or to itself, or to what the commit deletes", r.Key, ref.Target).With("field", "refs")
		}
		targets[ref.Target] = true
	}
	return nil
}

func (c *Check) validate() error {
	if err := c.Key.Validate(); err != nil {
		return err
	}
	switch c.Cond {
	case CondRevision, CondUnreferenced, CondIdentity:
		if c.Revision > MaxCounter {
			return errs.New(errs.InvalidField, "a revision is above %d", uint64(MaxCounter)).With("field", "checks")
		}
		return printable("identity", c.Identity, MaxName)
	case CondPhase:
		for _, p := range c.Phases {
			if err := token("phase", p, ""); err != nil {
				return err
			}
		}
		if len(c.Phases) > 0 {
			return nil
		}
	case CondNamed:
		if c.Name != "" {
			return printable("name", c.Name, MaxName)
		}
	}
	return errs.New(errs.InvalidField, "check %q on %s is incomplete or unknown", c.Cond, c.Key).With("field", "checks")
}

// Validate checks a query and resolves its page size.
func (q Query) Validate() (int, error) {
	size, err := PageSize(q.PageSize)
	if err != nil {
		return 0, err
	}
	if err := token("kind", string(q.Kind), ""); err != nil {
		return 0, err
	}
	if q.Tenant != "" {
		if err := token("tenant", q.Tenant, ""); err != nil {
			return 0, err
		}
	}
	if q.Node != "" {
		return size, ValidateNode(q.Node)
	}
	return size, nil
}

// Matches tells whether a record belongs in the list.
func (q Query) Matches(r *Record) bool {
	return r.Kind == q.Kind && (q.Tenant == "" || q.Tenant == r.Tenant) && (q.Node == "" || q.Node == r.Node) &&
		(len(q.Phases) == 0 || slices.Contains(q.Phases, r.Phase))
}

// ValidateKeys checks the keys of a GetMany.
func ValidateKeys(keys []Key) error {
	if len(keys) > MaxPage {
		return tooLarge("keys", MaxPage, len(keys))
	}
	for _, k := range keys {
		if err := k.Validate(); err != nil {
			return err
		}
	}
	return nil
}

// ValidateSettle checks the arguments of Settle, all of which are needed.
func ValidateSettle(tenant, id, attempt string) error {
	if id == "" || attempt == "" {
		return errs.New(errs.InvalidField, "only a commit with an id and an attempt can be settled").With("field", "id")
	}
	for _, f := range []struct{ name, value string }{{"id", id}, {"attempt", attempt}} {
		if err := printable(f.name, f.value, MaxID); err != nil {
			return err
		}
	}
	return token("tenant", tenant, "")
}

// Validate checks a claim.
func (c Claim) Validate() error {
	if c.Holder == "" {
		return errs.New(errs.InvalidField, "a claim needs a holder").With("field", "holder")
	}
	if err := printable("holder", c.Holder, MaxName); err != nil {
		return err
	}
	if c.TTL < time.Millisecond || c.Above > MaxCounter {
		return errs.New(errs.InvalidField, "a claim needs a TTL of at least a millisecond, and epochs end at %d", uint64(MaxCounter)).With("field", "ttl")
	}
	return nil
}
