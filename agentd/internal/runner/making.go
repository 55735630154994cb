package runner

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/dormouse-run/dormouse/agentd/internal/checkpoint"
	"github.com/dormouse-run/dormouse/agentd/internal/nodestate"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// This file has the steps of steps.go, one after the other: do, then undo.

func (o *owner) holdImage(ctx context.Context, b *build) error {
	var err error
	if b.from == nil {
		b.image, err = o.n.Images.Ensure(ctx, o.rec.Spec.Image, o.uid)
	} else {
		want := Image{Reference: b.from.Image.Reference, Digest: b.from.Image.Digest, ErofsDigest: b.from.Image.ErofsDigest, Path: b.from.Image.Path}
		b.image, err = o.n.Images.EnsureExact(ctx, want, o.uid)
	}
	if err != nil {
		return err
	}
	o.rec.ImageDigest, o.rec.ErofsDigest, o.rec.ImagePath = b.image.Digest, b.image.ErofsDigest, b.image.Path
	if b.from == nil {
		b.main, o.rec.Defaults = mainOf(o.rec.Spec, b.image.Config)
		o.rec.HasMain = b.main != nil
		if b.main == nil && o.rec.Spec.RunImageCommand {
			return errs.New(errs.InvalidField, "the image %s has no command of its own; give one, or leave run_image_command out", o.rec.Spec.Image).With("field", "spec.run_image_command")
		}
	}
	if b.from != nil && b.image.Path != b.from.Image.Path {
		return errs.New(errs.IncompatibleNode, "the snapshot is bound to the image at %s, this node keeps it at %s; use the same layers root on every node", b.from.Image.Path, b.image.Path).
			With("node", o.n.Host.Node).With("missing", b.from.Image.Path)
	}
	return nil
}

func (o *owner) releaseImage(ctx context.Context) error {
	return o.n.Images.Release(ctx, o.rec.ErofsDigest, o.uid)
}

func (o *owner) attachVolumes(ctx context.Context, b *build) error {
	for _, v := range o.rec.Spec.Volumes {
		dir, err := o.n.Volumes.Attach(ctx, v.VolumeUID, o.uid, v.ReadOnly)
		if err != nil {
			return err
		}
		b.binds = append(b.binds, Bind{Source: dir, Path: v.Path, ReadOnly: v.ReadOnly})
	}
	return nil
}

func (o *owner) detachVolumes(ctx context.Context) error {
	if !o.exists {
		return o.n.Volumes.Detach(ctx, nil, o.uid)
	}
	volumes := make([]string, 0, len(o.rec.Spec.Volumes))
	for _, v := range o.rec.Spec.Volumes {
		volumes = append(volumes, v.VolumeUID)
	}
	return o.n.Volumes.Detach(ctx, volumes, o.uid)
}

func (o *owner) makeFolder(_ context.Context, _ *build) error {
	if dir := o.n.Dir(o.uid); !o.n.shelf.take(dir) {
		return furnish(dir)
	}
	return nil
}

func (o *owner) removeFolder(context.Context) error {
	dir := o.n.Dir(o.uid)
	if err := os.RemoveAll(dir); err != nil {
		return errs.Wrap(err, errs.InternalError, "remove the sandbox's folder: %v", err)
	}
	if _, err := os.Lstat(dir); !errors.Is(err, fs.ErrNotExist) {
		return errs.New(errs.InternalError, "the sandbox's folder %s is still there", dir)
	}
	return nil
}

func networkMode(spec sandbox.Spec) string {
	if spec.Network == "" {
		return string(sandbox.NetworkNone)
	}
	return string(spec.Network)
}

// reserveNetwork chooses the address, so that it is durable with the intent. Only in memory until then.
func (o *owner) reserveNetwork(ctx context.Context) error {
	address, err := o.n.Networks.Reserve(ctx, o.uid, networkMode(o.rec.Spec))
	o.rec.Address = address
	return err
}

func (o *owner) acquireNetwork(ctx context.Context, b *build) error {
	lease, err := o.n.Networks.Acquire(ctx, o.uid, networkMode(o.rec.Spec), o.rec.Spec.Egress)
	if err != nil {
		return err
	}
	o.lease = lease
	b.identity.Nameservers = lease.Nameservers()
	return nil
}

// leaveNamespace lets go of the namespace: a sandbox that entered it keeps it.
func (o *owner) leaveNamespace() error {
	if o.lease == nil {
		return nil
	}
	lease := o.lease
	o.lease = nil
	return lease.Release()
}

func (o *owner) removeNetwork(context.Context) error {
	return errors.Join(o.leaveNamespace(), o.n.Networks.Remove(o.uid))
}

const specName = "spec.json"

func (o *owner) makeSpec(_ context.Context, b *build) error {
	r := o.rec.Spec.Resources.WithDefaults()
	in := SpecInput{
		Hostname: o.rec.Hostname, Image: b.image.Path, Init: b.bundle.Init, NetNS: o.lease.Path(), Volumes: b.binds,
		MemoryBytes: r.MemoryLimitBytes, MemoryRequestBytes: r.MemoryRequestBytes, LayerBytes: r.DiskLimitBytes, CPUMillis: r.CPULimitMillis, CPURequestMillis: r.CPURequestMillis,
	}
	var err error
	if b.from == nil {
		b.spec, err = o.n.Specs.New(in)
	} else {
		b.spec, err = o.n.Specs.ForRestore(b.from.Spec, in)
	}
	if err != nil {
		return err
	}
	data, err := json.Marshal(b.spec)
	if err == nil {
		err = os.WriteFile(filepath.Join(o.n.Dir(o.uid), specName), data, 0o600)
	}
	if err != nil {
		return errs.Wrap(err, errs.InternalError, "write the sandbox's spec: %v", err)
	}
	return nil
}

// readSpec reads the spec that the sandbox runs with.
func (o *owner) readSpec() (*specs.Spec, error) {
	data, err := os.ReadFile(filepath.Join(o.n.Dir(o.uid), specName))
	var spec specs.Spec
	if err == nil {
		err = json.Unmarshal(data, &spec)
	}
	if err != nil {
		return nil, errs.Wrap(err, errs.InternalError, "read the spec of sandbox %s: %v", o.uid, err)
	}
	return &spec, nil
}

func (o *owner) startRuntime(ctx context.Context, b *build) error {
	cfg := runtime.Config{
		ID: o.uid, Dir: o.n.Dir(o.uid), Spec: b.spec, Bundle: b.bundle.Bundle, Flags: o.rec.Flags,
		Stdio: o.n.stdio(o.uid), Cgroup: o.n.Groups.Path(o.uid),
	}
	asked := o.n.Now()
	leave, err := o.n.turns.take(ctx, b.from != nil)
	if err != nil {
		return err
	}
	defer leave()
	b.queued += o.n.Now().Sub(asked)
	o.n.measure(b.verb, queueStep, b.queued, nil)
	var handle runtime.Handle
	if b.from == nil {
		handle, err = o.n.Driver.Start(ctx, cfg)
	} else {
		handle, err = o.n.Driver.Restore(ctx, cfg, runtime.Image{Dir: b.fromDir, Direct: o.n.Snapshots.ReadDirect(b.from)})
	}
	if err != nil {
		return err
	}
	o.rec.Handle = handle
	if o.rec.StartTime.IsZero() { // one that was hibernated has started long ago
		o.rec.StartTime = o.n.Now().UTC()
	}
	// The sandbox has entered the namespace and keeps it.
	return o.leaveNamespace()
}

// deleteRuntime ends and removes the driver's side, and looks whether it is gone.
func (o *owner) deleteRuntime(ctx context.Context) error {
	o.unwatch()
	leave := o.n.ends.enter(ctx)
	defer leave()
	if err := o.n.Driver.Delete(ctx, o.uid); err != nil {
		return err
	}
	if st, err := o.n.Driver.State(ctx, o.uid); !errs.Has(err, errs.ObjectNotFound) {
		if err != nil {
			return err
		}
		return errs.New(errs.InternalError, "the runtime still knows sandbox %s (%s); delete it again", o.uid, st.Phase)
	}
	if o.n.Groups.Exists(o.uid) {
		return errs.New(errs.InternalError, "the control group of sandbox %s is still there; delete it again", o.uid)
	}
	return nil
}

func (o *owner) greetGuest(ctx context.Context, b *build) error {
	if err := o.openChannel(ctx); err != nil {
		return err
	}
	hello, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	err := o.openGuest().Configure(hello, b.identity)
	b.identity.SecretEnv = nil
	return o.explainSilence(ctx, err)
}

// openChannel opens the channel of the recorded generation and says hello.
func (o *owner) openChannel(ctx context.Context) error {
	o.closeGuest()
	hello, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	g, err := o.n.Guests.Open(hello, o.uid, o.rec.GuestGeneration, o.n.stdio(o.uid))
	if err != nil {
		return o.explainSilence(ctx, err)
	}
	o.setGuest(g)
	return nil
}

// explainSilence says more than that init did not answer, where the runtime knows that it ended.
func (o *owner) explainSilence(ctx context.Context, err error) error {
	if err == nil || ctx.Err() != nil {
		return err
	}
	look, cancel := context.WithTimeout(ctx, recordTimeout)
	defer cancel()
	st, stateErr := o.n.Driver.State(look, o.uid)
	if stateErr == nil && st.Phase == runtime.Stopped {
		return errs.Wrap(err, errs.SandboxFailed, "guest init of sandbox %s ended before it answered; is the memory limit too low for the image?", o.uid)
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return errs.Wrap(err, errs.GuestSilent, "guest init of sandbox %s did not answer within %s", o.uid, helloTimeout).With("uid", o.uid)
	}
	return err
}

func (o *owner) leaveGuest(context.Context) error {
	o.unwatch()
	o.closeGuest()
	return nil
}

func (o *owner) startMain(ctx context.Context, b *build) error {
	if b.main == nil || b.from != nil {
		return nil
	}
	return o.openGuest().StartMain(ctx, *b.main)
}

func (o *owner) recordRunning(ctx context.Context, b *build) error {
	if b.parked {
		o.stand(true)
		if err := checkpoint.Halt(ctx, checkpoint.Subject{ID: o.uid, Machine: o.n.Driver, Channel: o.openGuest()}); err != nil {
			o.stand(false)
			return err
		}
	}
	rec := o.rec
	rec.StartQueued, rec.StartService = b.queued, max(o.n.Now().Sub(b.began)-b.queued, 0)
	rec.Intent, rec.Phase, rec.Hibernation = nodestate.IntentKeep, sandbox.Running, spent(rec.Hibernation)
	if b.parked {
		rec.Phase, rec.Parked = sandbox.Paused, true
	}
	if err := o.observe(rec); err != nil {
		return err
	}
	o.n.Room.Settle(o.uid)
	o.watch()
	return nil
}

// restoreOverhead is what a restored sandbox takes besides the memory that is in its artefact: measured, 11 MB for the sentry.
const restoreOverhead = 12 << 20

// enter asks for room, before anything of the sandbox is recorded or made: who is refused leaves nothing.
func (o *owner) enter(ctx context.Context, b *build) error {
	expect := int64(0)
	if b.from != nil {
		expect = b.from.SizeBytes + restoreOverhead
	}
	err := o.n.Room.Enter(ctx, o.uid, o.rec.Spec.Resources.WithDefaults().MemoryRequestBytes, expect)
	if e := errs.From(err); err != nil && ctx.Err() != nil && e.Outcome == errs.Unknown {
		return e.WithOutcome(errs.NotStarted, errs.SameOperation)
	}
	return err
}
