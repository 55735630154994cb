package crash

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
)

// under starts an operation, has the world's weather change in the middle of it, and then expects its end.
func (w *world) under(do scenario, weather func()) {
	w.Helper()
	o := do(w)
	done := make(chan error, 1)
	go func() { done <- w.insist(o.run) }()
	weather()
	if err := <-done; err != nil {
		w.Fatalf("the same operation id does not lead to its end: %v", err)
	}
	w.online()
	w.ok(w.insist(o.run))
	o.check()
	w.lives()
	o.clean()
	w.settled()
}

// every lists the operations whose outage is tried.
var every = map[string]scenario{"create": create, "restore": restore, "checkpoint": capture, "fork": fork, "delete": remove, "clone-volume": cloneVolume}

// Redis killed under an operation, beside an agentd that dies in it: what was acknowledged is there.
func TestF10RedisKilled(t *testing.T) {
	w := enter(t)
	for name, do := range every {
		t.Run(name, func(t *testing.T) {
			s := w.sub(t)
			s.under(do, func() {
				s.ok(s.KillRedis(s.ctx))
				s.ok(s.StartRedis(s.ctx))
			})
			w.asked = s.asked
		})
	}
}

// Redis that answers nothing for longer than the lease, while agentd dies: a coordinator that could not renew
// stops leading, and the next term ends what was begun.
func TestF10RedisPausedAndAgentdKilled(t *testing.T) {
	w := enter(t)
	const long, short = "ttl: 20s", "ttl: 800ms"
	w.ok(configure(w.ctx, w.Cluster, long, short))
	defer func() { w.ok(configure(w.ctx, w.Cluster, short, long)) }()
	for _, name := range []string{"create", "checkpoint"} {
		t.Run(name, func(t *testing.T) {
			s := w.sub(t)
			s.under(every[name], func() {
				s.ok(s.PauseRedis())
				pause, cancel := context.WithTimeout(s.ctx, 1500*time.Millisecond) // longer than the lease
				defer cancel()
				<-pause.Done()
				s.ok(s.KillAgentd(s.ctx, 1))
				s.ok(s.ResumeRedis())
				s.restart(agentd)
			})
			w.asked = s.asked
		})
	}
}

// Both daemons and Redis at once, at fault points of both.
func TestF10EverythingKilledAtOnce(t *testing.T) {
	w := enter(t)
	for name, points := range map[string][2]string{
		"create":     {"start.runtime.after", "node.start.before"},
		"checkpoint": {"checkpoint.save.after", "commit.send.after"},
		"restore":    {"restore.guest.after", "node.restore.before"},
	} {
		t.Run(name, func(t *testing.T) {
			s := w.sub(t)
			o := every[name]
			s.under(func(w *world) operation {
				prepared := o(w)
				w.arm(agentd, []string{points[0]})
				w.arm(coordinator, []string{points[1]})
				return prepared
			}, func() {
				s.await("the coordinator dies", func() error {
					if s.Running(coordinator) {
						return errors.New("it lives")
					}
					return nil
				})
				s.ok(s.KillRedis(s.ctx))
				s.ok(s.StartRedis(s.ctx))
				s.restart(coordinator)
				s.await("agentd dies", func() error {
					if s.Running(agentd) {
						return errors.New("it lives")
					}
					return nil
				})
				s.restart(agentd)
			})
			w.asked = s.asked
		})
	}
}

// containerd killed and started again: images, which are files, do not care; a pull is done once it is back.
func TestF10ContainerdRestarted(t *testing.T) {
	w := enter(t)
	w.ok(w.KillContainerd(w.ctx, 1))
	w.under(create, func() {})
	w.ok(w.KillAgentd(w.ctx, 1))
	w.restart(agentd) // without a containerd
	w.lives()
	w.ok(w.StartContainerd(w.ctx, 1))
	w.under(pull, func() {
		w.ok(w.KillContainerd(w.ctx, 1))
		w.ok(w.StartContainerd(w.ctx, 1))
	})
}

// A damaged state file is refused with the way out and left as it is; with the file as it was, all is there.
func TestF10StateFileDamaged(t *testing.T) {
	w := enter(t)
	w.ok(w.StopAgentd(w.ctx, 1))
	file := filepath.Join(w.NodeDir(1), "state.db")
	whole, err := os.ReadFile(file)
	w.ok(err)
	for name, damage := range map[string]func() []byte{
		"header": func() []byte { return append(make([]byte, 8192), whole[8192:]...) },
		"pages": func() []byte {
			return append(bytes.Clone(whole[:8192]), bytes.Repeat([]byte{0xa5}, len(whole)-8192)...)
		},
		"truncated": func() []byte { return whole[:len(whole)/2] },
		"foreign":   func() []byte { return []byte("this is no state file\n") },
	} {
		damaged := damage()
		w.ok(os.WriteFile(file, damaged, 0o600))
		err := w.StartAgentd(w.ctx, 1, func(context.Context) error { return errors.New("it is not to be ready") })
		if err == nil || !strings.Contains(err.Error(), "agentctl doctor") || !strings.Contains(err.Error(), file) {
			t.Errorf("%s: a damaged state file was answered with %v", name, err)
		}
		if now, err := os.ReadFile(file); err != nil || !bytes.Equal(now, damaged) {
			t.Errorf("%s: the damaged file was changed (%v)", name, err)
		}
		w.ok(w.KillAgentd(w.ctx, 1))
	}
	w.ok(os.WriteFile(file, whole, 0o600))
	w.restart(agentd)
	w.online()
	w.lives()
	w.settled()
}

// A node whose agentd is away: what needs it waits or says so; nothing is lost when it comes back.
func TestF10AgentdAway(t *testing.T) {
	w := enter(t)
	w.ok(w.KillAgentd(w.ctx, 1))
	ctx, leave := context.WithCancel(w.ctx)
	defer leave()
	id, said := uid.New(), make(chan error, 1)
	go func() { said <- w.survivor.Delete(ctx, id) }()
	w.await("the deletion is accepted", func() error {
		_, err := w.api.GetOperation(w.ctx, id)
		return err
	})
	leave()
	err := <-said
	var e *errs.Error
	if !errors.As(err, &e) || e.Retry == errs.Never {
		t.Fatalf("a deletion without its node said %v", err)
	}
	w.restart(agentd)
	w.await("the deletion is finished", func() error {
		if err := w.survivor.Refresh(w.ctx); !errs.Has(err, errs.ObjectNotFound) {
			return errors.Join(err, errors.New("it is still there"))
		}
		return nil
	})
}
