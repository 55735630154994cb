package redis

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fault"
	"github.com/dormouse-run/dormouse/pkg/wait"
)

// A log that was cut off in the middle of a commit is repaired wrongly by some servers: they leave the commit's first commands
// at its end, and append to them. So a server process is written to only once its log was written anew since it started: what
// leads to it is one of two pools, and a connection of the one for writes is not used before that (ADR 54). Reads do not wait.
//
// Whether it was done is asked of the server, whose process knows it and forgets it when it ends: its last rewrite ended well. Whoever asked for
// it, a rewrite takes what is in memory, where no half commit is, and what is written from its begin on lies in another file.

const (
	renewPoll     = 5 * time.Millisecond // the first pause between two looks at a rewrite, which doubles up to renewPollMost
	renewPollMost = 200 * time.Millisecond
	// renewPause is how long a failed rewrite is not tried again, while all that is to be written is refused.
	renewPause = time.Second
)

// Renewal is one server process whose log was found not to be written anew yet.
type Renewal struct {
	Server, RunID string
	Took          time.Duration
	// Err tells why the process is still not written to; nil if it is.
	Err error
}

// renewal is what a Store knows of it. Who holds the turn may use the rest.
type renewal struct {
	turn   chan struct{}
	done   string // the run id of the process that was seen to have been renewed last
	failed struct {
		run string
		at  time.Time
		err error
	}
	tell func(Renewal)
}

func newRenewal(tell func(Renewal)) renewal {
	if tell == nil {
		tell = func(Renewal) {}
	}
	return renewal{turn: make(chan struct{}, 1), tell: tell}
}

// cutsInsideCommits tells whether a server of this kind may leave half a commit in its log. Seen to: Redis 7.0.15 and 8.0.2. Seen not to:
// Valkey 9.1.2. What is not known is not trusted.
func cutsInsideCommits(server map[string]string) bool {
	major, rest, _ := strings.Cut(server["valkey_version"], ".")
	minor, _, _ := strings.Cut(rest, ".")
	a, errA := strconv.Atoi(major)
	b, errB := strconv.Atoi(minor)
	return errA != nil || errB != nil || a < 9 || a == 9 && b < 1
}

// renewed returns once the process at the other end has written its log anew since it started.
func (s *Store) renewed(ctx context.Context, cn *goredis.Conn, server map[string]string) error {
	ctx, cancel := context.WithTimeout(ctx, s.replyTimeout)
	defer cancel()
	select {
	case s.renewal.turn <- struct{}{}:
	case <-ctx.Done():
		return stillRenewing(ctx.Err())
	}
	defer func() { <-s.renewal.turn }()
	r, run := &s.renewal, server["run_id"]
	switch {
	case r.done == run && run != "":
		return nil
	case r.failed.err != nil && r.failed.run == run && time.Since(r.failed.at) < renewPause:
		return r.failed.err
	}
	began := time.Now()
	asked, err := renew(ctx, cn)
	if err == nil {
		r.done, r.failed.err = run, nil
	} else {
		r.failed.run, r.failed.at, r.failed.err = run, time.Now(), err
		if ctx.Err() != nil { // it goes on in the server, and who comes next waits on
			r.failed.err = nil
		}
	}
	if asked || err != nil {
		r.tell(Renewal{Server: serverName(server), RunID: run, Took: time.Since(began), Err: err})
	}
	return err
}

// renew asks for a rewrite unless there was one, and waits for its end. It tells whether it asked.
func renew(ctx context.Context, cn *goredis.Conn) (bool, error) {
	var refusal error
	asked := false
	for pause := renewPoll; ; pause = min(2*pause, renewPollMost) {
		log, err := readLogState(ctx, cn)
		switch {
		case err != nil:
			return asked, err
		case log.renewed:
			if asked {
				fault.At("catalog.renew.after")
			}
			return asked, nil
		case log.running:
		case asked && !log.scheduled:
			return true, notRenewed(refusal)
		default: // also if it is scheduled: a server whose rewrites failed may put that off for an hour
			fault.At("catalog.renew.before")
			if refusal, err = askToRenew(ctx, cn); err != nil {
				return asked, err
			}
			asked = true
			fault.At("catalog.renew-asked.after")
		}
		if err := wait.For(ctx, pause); err != nil {
			return asked, stillRenewing(err)
		}
	}
}

// askToRenew gives the server's refusal, which may be that a rewrite is under way, apart from not being heard.
func askToRenew(ctx context.Context, cn *goredis.Conn) (refusal, err error) {
	err = cn.BgRewriteAOF(ctx).Err()
	var reply goredis.Error
	if errors.As(err, &reply) {
		return err, nil
	}
	if err != nil {
		return nil, readError(err)
	}
	return nil, nil
}

// logState is what a server says of the rewriting of its log.
type logState struct {
	running, scheduled bool
	renewed            bool // the last rewrite since the process started ended well
}

func readLogState(ctx context.Context, cn *goredis.Conn) (logState, error) {
	info, err := infoFields(ctx, cn, "persistence")
	if err != nil {
		return logState{}, err
	}
	seconds, err := strconv.Atoi(info["aof_last_rewrite_time_sec"]) // -1: none yet
	return logState{
		running: info["aof_rewrite_in_progress"] == "1", scheduled: info["aof_rewrite_scheduled"] == "1",
		renewed: err == nil && seconds >= 0 && info["aof_last_bgrewrite_status"] == "ok",
	}, nil
}

// notRenewed is the error of a rewrite that did not end well, or was refused.
func notRenewed(refusal error) error {
	if goredis.HasErrorPrefix(refusal, "NOPERM") || goredis.HasErrorPrefix(refusal, "ERR unknown command") {
		return errs.Wrap(refusal, errs.StoreNotDurable, "the store may apply half a commit that was cut off when it stopped, unless its log is written anew before anything else is written: allow BGREWRITEAOF to the coordinator's user, or run it by hand after each start of the server")
	}
	if refusal == nil {
		refusal = errors.New("the rewrite failed")
	}
	return errs.Wrap(refusal, errs.StoreUnavailable, "the store could not write its log anew, which has to succeed once after each start of the server before anything else is written; its own log says why: give it disk and memory. It is tried again")
}

func stillRenewing(cause error) error {
	return errs.Wrap(cause, errs.StoreUnavailable, "the store, which was started, writes its log anew before anything else is written; ask again")
}

// writable runs on every new connection of the pool for writes.
func (s *Store) writable(ctx context.Context, cn *goredis.Conn) error {
	server, err := s.meet(ctx, cn)
	if err == nil && cutsInsideCommits(server) {
		err = s.renewed(ctx, cn, server)
	}
	return connectError(err)
}

// connectError keeps the client, which takes off one layer, from taking a typed error apart.
func connectError(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("a new connection to the store: %w", err)
}
