// Package admission bounds what a tenant asks of one server at a time: how many calls it may begin in a second, and how many calls and
// streams it may have open.
package admission

import (
	"strconv"
	"sync"
	"time"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// Limits are what one tenant may ask at a time of one server. 0 is no limit.
type Limits struct {
	Rate    int `yaml:"calls_per_second" usage:"calls that a tenant may begin in a second, in the long run"`
	Burst   int `yaml:"burst" usage:"calls that a tenant may begin at once"`
	Calls   int `yaml:"calls" usage:"calls of a tenant in progress, waits included"`
	Streams int `yaml:"streams" usage:"streams of a tenant that are open"`
}

// Valid tells whether the limits can be kept.
func (l Limits) Valid() bool {
	return min(l.Rate, l.Burst, l.Calls, l.Streams) >= 0 && (l.Rate == 0 || l.Burst > 0)
}

// DefaultLimits leave room for a tenant with thousands of sandboxes.
func DefaultLimits() Limits { return Limits{Rate: 2000, Burst: 8000, Calls: 4096, Streams: 4096} }

// Admission counts the calls of each tenant and refuses those over the limits with TOO_MANY. A tenant has
// credentials that were checked, so that the number of tenants that are counted is bounded by those.
type Admission struct {
	limits Limits
	now    func() time.Time

	mu      sync.Mutex
	tenants map[string]*account
}

// account is one tenant's. tokens are the calls that it may begin at once.
type account struct {
	tokens         float64
	filled         time.Time
	calls, streams int
}

// New makes one with empty accounts. A nil now is the clock.
func New(l Limits, now func() time.Time) *Admission {
	if now == nil {
		now = time.Now
	}
	return &Admission{limits: l, now: now, tenants: make(map[string]*account)}
}

func tooMany(what, resource string, limit int) error {
	return errs.New(errs.TooMany, "the tenant has too many %s: the limit is %d; go on when some have ended, with pauses", what, limit).
		With("resource", resource).With("limit", strconv.Itoa(limit))
}

// Enter counts a call that begins. leave has to be called when it has ended.
func (a *Admission) Enter(tenant string, stream bool) (leave func(), err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := a.now()
	acc := a.tenants[tenant]
	if acc == nil {
		acc = &account{tokens: float64(max(a.limits.Burst, 1)), filled: now}
		a.tenants[tenant] = acc
	}
	open, limit, what, resource := &acc.calls, a.limits.Calls, "calls in progress", "calls"
	if stream {
		open, limit, what, resource = &acc.streams, a.limits.Streams, "open streams", "streams"
	}
	if limit > 0 && *open >= limit {
		return nil, tooMany(what, resource, limit)
	}
	if a.limits.Rate > 0 {
		// A clock that was set back earns nothing.
		earned := max(now.Sub(acc.filled).Seconds(), 0) * float64(a.limits.Rate)
		acc.tokens, acc.filled = min(acc.tokens+earned, float64(max(a.limits.Burst, 1))), now
		if acc.tokens < 1 {
			return nil, tooMany("calls a second", "calls_per_second", a.limits.Rate)
		}
		acc.tokens--
	}
	*open++
	return sync.OnceFunc(func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		*open--
	}), nil
}
