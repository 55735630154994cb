package runner

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/dormouse-run/dormouse/agentd/internal/nodestate"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// event is what a watcher saw: one of the three.
type event struct {
	exit   *runtime.Exit
	main   *MainExit
	broken Guest
}

// watch starts the watchers of a running sandbox: they wait for the runtime's end, the main command's, and
// the channel's. The owner owns them and ends them with unwatch.
func (o *owner) watch() {
	o.unwatch()
	ctx, cancel := context.WithCancel(o.ctx)
	o.stopWatch = cancel
	o.watchers.Add(1)
	go func() {
		defer o.watchers.Done()
		o.watchRuntime(ctx)
	}()
	g := o.openGuest()
	if g == nil {
		return
	}
	o.watchers.Add(1)
	go func() {
		defer o.watchers.Done()
		select {
		case <-g.Done():
			o.send(ctx, event{broken: g})
		case <-ctx.Done():
		}
	}()
	if o.rec.HasMain {
		o.watchers.Add(1)
		go func() {
			defer o.watchers.Done()
			o.watchMain(ctx, g)
		}()
	}
}

func (o *owner) unwatch() {
	if o.stopWatch != nil {
		o.stopWatch()
		o.stopWatch = nil
	}
	o.watchers.Wait()
	// What they saw before is not news any more: who stops them decides what becomes of the sandbox.
	for len(o.events) > 0 {
		<-o.events
	}
}

func (o *owner) send(ctx context.Context, e event) {
	select {
	case o.events <- e:
	case <-ctx.Done():
	}
}

func (o *owner) watchRuntime(ctx context.Context) {
	exit, err := o.n.Driver.Wait(ctx, o.uid)
	switch {
	case err == nil:
		o.send(ctx, event{exit: &exit})
	case errs.Has(err, errs.ObjectNotFound):
		o.send(ctx, event{exit: &runtime.Exit{At: o.n.Now()}})
	case ctx.Err() == nil:
		o.log.Error("wait for a sandbox's end", "error", err)
	}
}

// watchMain asks until there is an answer: a channel that breaks is opened again by the owner, which
// starts new watchers.
func (o *owner) watchMain(ctx context.Context, g Guest) {
	pause := time.NewTimer(0)
	defer pause.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-pause.C:
		}
		exit, err := g.WaitMain(ctx)
		switch {
		case err == nil:
			o.send(ctx, event{main: &exit})
			return
		case ctx.Err() != nil:
			return
		case errs.Has(err, errs.ProcessNotFound):
			o.log.Error("guest init does not know the sandbox's command", "error", err)
			return
		}
		pause.Reset(firstRetry)
	}
}

// handle records what a watcher saw.
func (o *owner) handle(e event) error {
	if !o.exists || o.rec.Intent != nodestate.IntentKeep || !live(o.rec.Phase) {
		return nil
	}
	switch {
	case e.exit == nil && o.rec.Phase != sandbox.Running:
		return nil // whoever resumes it watches anew
	case e.main != nil:
		return o.mainEnded(*e.main)
	case e.broken != nil:
		if e.broken == o.openGuest() {
			o.log.Warn("the guest channel broke; it is opened again")
			o.again(o.reopen)
		}
		return nil
	}
	o.closeGuest()
	reason, message := endReason(*e.exit)
	return o.failed(reason, message)
}

func endReason(exit runtime.Exit) (reason, message string) {
	switch {
	case exit.OOM:
		return sandbox.ReasonOOMKilled, "the sandbox used more memory than its limit and was ended by the kernel"
	case exit.Known && exit.Signal != 0:
		return sandbox.ReasonKilled, fmt.Sprintf("the sandbox's process was ended from outside by signal %d", int(exit.Signal))
	case exit.Known:
		return sandbox.ReasonKilled, fmt.Sprintf("guest init ended with code %d", exit.Code)
	}
	return sandbox.ReasonLost, "the sandbox ended while nobody watched it"
}

func (o *owner) failed(reason, message string) error {
	rec := o.rec
	rec.Phase, rec.Reason, rec.Message, rec.Capture = sandbox.Failed, reason, message, nil
	if err := o.observe(rec); err != nil {
		return err
	}
	o.n.Room.Leave(o.uid) // its processes are gone
	o.log.Warn("the sandbox failed", "reason", reason, "message", message)
	return nil
}

const finalName = "main.json"

// mainEnded keeps the end of the command's output, records its code, and then ends the runtime: guest
// init has nothing left to do.
func (o *owner) mainEnded(exit MainExit) error {
	ctx, cancel := context.WithTimeout(o.ctx, recordTimeout)
	defer cancel()
	if err := o.keepFinal(ctx); err != nil {
		o.log.Warn("keep the output of an ended command", "error", err)
	}
	if err := o.n.fault("stop.record.before"); err != nil {
		return err
	}
	rec := o.rec
	code := exit.Code
	rec.Phase, rec.ExitCode, rec.Capture = sandbox.Stopped, &code, nil
	rec.Reason, rec.Message = sandbox.ReasonCompleted, ""
	if code != 0 {
		rec.Reason, rec.Message = sandbox.ReasonError, fmt.Sprintf("the command ended with code %d", code)
	}
	if exit.Signal != 0 {
		rec.Message = fmt.Sprintf("the command was ended by signal %d", exit.Signal)
	}
	if err := o.observe(rec); err != nil {
		return err
	}
	if err := o.n.fault("stop.record.after"); err != nil {
		return err
	}
	o.closeGuest()
	o.kill()
	return nil
}

func (o *owner) keepFinal(ctx context.Context) error {
	g := o.openGuest()
	if g == nil {
		return errs.New(errs.GuestSilent, "the channel is closed")
	}
	final, err := g.FinalOf(ctx)
	if err != nil {
		return err
	}
	data, err := json.Marshal(final)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(o.n.Dir(o.uid), finalName), data, 0o600)
}

// kill ends the runtime of a sandbox whose end is recorded; what fails is tried again.
func (o *owner) kill() {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(o.ctx), recordTimeout)
	defer cancel()
	if err := o.n.Driver.Kill(ctx, o.uid, syscall.SIGKILL); err != nil {
		o.log.Warn("end the runtime of a stopped sandbox", "error", err)
		o.again(func(ctx context.Context) error { return o.n.Driver.Kill(ctx, o.uid, syscall.SIGKILL) })
		return
	}
	o.n.Room.Leave(o.uid)
}

// Final gives what was kept of the ended main command. OBJECT_NOT_FOUND or PROCESS_NOT_FOUND.
func (n *Node) Final(uid string) (Final, error) {
	if _, err := n.Store.Sandbox(uid); err != nil {
		return Final{}, err
	}
	data, err := os.ReadFile(filepath.Join(n.Dir(uid), finalName))
	if errors.Is(err, fs.ErrNotExist) {
		return Final{}, errs.New(errs.ProcessNotFound, "sandbox %s keeps no ended command", uid)
	}
	var f Final
	if err == nil {
		err = json.Unmarshal(data, &f)
	}
	if err != nil {
		return Final{}, errs.Wrap(err, errs.InternalError, "read the end of the command of sandbox %s: %v", uid, err)
	}
	return f, nil
}
