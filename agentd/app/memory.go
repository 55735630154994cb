package app

import (
	"context"

	"github.com/dormouse-run/dormouse/agentd/internal/cgroup"
	"github.com/dormouse-run/dormouse/agentd/internal/nodestate"
	"github.com/dormouse-run/dormouse/agentd/internal/room"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// figures is where the room's figures come from: the kernel, and the sandboxes' control groups.
type figures struct{ groups *cgroup.Manager }

func (f figures) Machine() (room.Machine, error)   { return room.ReadMachine("/proc") }
func (f figures) Used() (int64, error)             { return f.groups.InMemory() }
func (f figures) UsedBy(uid string) (int64, error) { return f.groups.Group(uid).InMemory() }

var pressures = map[room.Level]dormousev1.MemoryPressure{
	room.None: dormousev1.MemoryPressure_MEMORY_PRESSURE_NONE,
	room.Some: dormousev1.MemoryPressure_MEMORY_PRESSURE_SOME,
	room.High: dormousev1.MemoryPressure_MEMORY_PRESSURE_HIGH,
}

func memoryProto(f room.Figures) *dormousev1.NodeMemory {
	return &dormousev1.NodeMemory{Pressure: pressures[f.Level], AvailableBytes: f.Available, UsedBytes: f.Used, RequestedBytes: f.Requested,
		UnclaimedBytes: f.Unclaimed, Waiting: int32(f.Waiting)}
}

// doorway is the room as the runner sees it.
type doorway struct{ *room.Room }

func (a doorway) Enter(ctx context.Context, uid string, request, expect int64) error {
	return a.Room.Enter(ctx, uid, room.Need{Request: request, Expect: expect})
}

// Spare implements runner.Room. Nothing is to spare where that cannot be told.
func (a doorway) Spare() int64 {
	f, err := a.Figures()
	if err != nil {
		return 0
	}
	return f.Available - f.Reserve
}

// openRoom makes the room, and puts into it what is on the node.
func (a *App) openRoom() error {
	a.room = room.New(room.Options{Source: figures{a.groups}, Limit: int64(a.cfg.Limits.Memory), Reserve: int64(a.cfg.Reserve.Memory), Sandboxes: a.sandboxes,
		Wait: a.cfg.Limits.MemoryWait, Low: a.giveBack, Requested: a.guarantee(), Log: a.log})
	all, err := a.state.Sandboxes()
	if err != nil {
		return err
	}
	for _, rec := range all {
		if holdsMemory(rec) {
			a.room.Keep(rec.UID, room.Need{Request: rec.Spec.Resources.WithDefaults().MemoryRequestBytes})
		}
	}
	return nil
}

// holdsMemory tells whether there may be processes of the sandbox. What is being removed has some until it is gone.
func holdsMemory(rec nodestate.Sandbox) bool {
	switch rec.Phase {
	case sandbox.Stopped, sandbox.Failed:
		return false
	case sandbox.Hibernated:
		return !rec.Hibernation.Released
	}
	return true
}

// giveBack lets go of the page cache of artefacts: it would be taken when it is needed, but who is admitted by what is available
// should not wait for that.
func (a *App) giveBack(ctx context.Context) {
	files, err := a.snapshots.DropCache(ctx)
	a.log.InfoContext(ctx, "memory is short: the page cache of artefacts was given back", "files", files, "error", err)
}

// guarantee gives a function that protects the sandboxes' groups together, each of which has its request. It tells once of what it cannot do.
func (a *App) guarantee() func(bytes int64) {
	told := false
	return func(bytes int64) {
		err := a.groups.Guarantee(bytes)
		if err != nil && !told {
			a.log.Warn("the memory that sandboxes requested is not protected", "bytes", bytes, "error", err)
		}
		told = err != nil
	}
}

// protect puts this process into a control group of its own, and gives what takes it out again. Without it agentd does all the same.
func (a *App) protect(ctx context.Context) (leave func()) {
	if a.cfg.Protect.Memory == 0 {
		return func() {}
	}
	own, err := a.groups.Protect(a.cfg.Protect.Cgroup, int64(a.cfg.Protect.Memory))
	if err != nil {
		a.log.WarnContext(ctx, "agentd's own memory is not protected; start it with MemoryLow=, and set protect.memory to 0", "error", err)
		return func() {}
	}
	a.log.InfoContext(ctx, "agentd's own memory is protected", "group", own.Path(), "bytes", int64(a.cfg.Protect.Memory))
	return func() {
		if err := own.Leave(); err != nil {
			a.log.WarnContext(ctx, "leave agentd's own control group", "error", err)
		}
	}
}
