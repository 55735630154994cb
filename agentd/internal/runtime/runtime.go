// Package runtime is the contract between the node agent and whatever runs sandboxes on this node.
//
// A Driver owns the runtime's side of a sandbox: its processes, its cgroup and its own records. It
// owns nothing else: the image, the volumes' folders, the network namespace, the FIFOs and the
// snapshot folders belong to the caller, who prepares them before Start or Restore and removes them
// after Delete.
//
// # States
//
//	                 Pause            Resume
//	Start, Restore -> Running -> Paused -> Running
//	Running, Paused -> Stopped          (init ended, Kill, out of memory, the host killed it)
//	any, and absent -> absent           (Delete)
//
// Save is allowed in Paused only and leaves the sandbox Paused, whether it succeeds or fails.
//
// # Invariants
//
//   - A sandbox outlives the driver and its process. Nothing of it hangs on a descriptor, a session
//     or a cgroup of the driver's process; Close lets go and ends no sandbox.
//   - The driver writes down what it is about to start before it starts it. After a crash at any line
//     List names the sandbox and Delete(id) removes it, even when no Handle was ever persisted.
//   - The caller persists the Handle before it reports the sandbox as running.
//   - Every method that names a sandbox takes its id, and acts on that id only: an id is never used twice.
//   - Calls for different sandboxes may run at once. Calls for one sandbox are made one at a time by
//     its owner, except Exec, State, Stats, Wait, List and Kill, which may run beside any other.
//   - Errors are of package errs. Methods return early with the context's error when it ends; what
//     then holds is said at each method.
package runtime

import (
	"context"
	"syscall"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// IDLen is the length of every sandbox id: a UUID in its canonical text form. One length for all,
// because runsc refuses an id that is a prefix of another as ambiguous.
const IDLen = 36

// Driver runs sandboxes. See the package comment for states and invariants.
type Driver interface {
	// Name is the driver's name, as handles carry it: "runsc", "fake".
	Name() string

	// Start starts a new sandbox and returns when its init has been started; whether init answers is
	// the caller's to find out. The handle is for the caller to persist.
	//
	// Not idempotent: an id that the driver knows gives CONFLICT. On any other error, and when ctx
	// ends, nothing of the sandbox is left if the driver could see to it in a bounded time of its
	// own; otherwise List shows the id and Delete removes it. Delete after a failed Start is always
	// right.
	Start(ctx context.Context, cfg Config) (Handle, error)

	// Restore is Start from the files that Save wrote. The sandbox runs when it returns. The image's
	// folder is only read; it may be removed once Restore has returned.
	//
	// Besides Start's errors: INCOMPATIBLE_RUNTIME when the image was made by another runtime or its
	// spec does not fit, INCOMPATIBLE_NODE when the CPU lacks a feature, VOLUME_DIVERGED with the
	// path when a file that the guest held open is gone, ARTEFACT_DAMAGED when a file is missing or
	// cannot be read. After these nothing of the new sandbox is left.
	Restore(ctx context.Context, cfg Config, img Image) (Handle, error)

	// Recover attaches to a sandbox that an earlier driver started, so that Wait knows its end.
	// Idempotent, and a no-op for a sandbox that this driver started. A sandbox that ended meanwhile
	// is Stopped; one that the runtime does not know is OBJECT_NOT_FOUND. A handle that is not of this
	// driver or of a version it cannot read is INCOMPATIBLE_RUNTIME and changes nothing.
	Recover(ctx context.Context, h Handle) (Status, error)

	// Pause freezes every process of the sandbox; its memory changes no more. Idempotent.
	// A sandbox that is not Running or Paused gives WRONG_PHASE. When ctx ends the sandbox may be
	// either; Resume makes it run.
	Pause(ctx context.Context, id string) error

	// Save writes the memory and state of a paused sandbox into the folder, which exists, is empty and
	// belongs to the caller. The files are written but not synced. The sandbox stays Paused in every
	// case: the caller calls Resume at once, before it syncs or verifies anything.
	//
	// Before it, the caller quiesces the guest channel, pauses and drains the out-FIFO, because bytes
	// that sit in a FIFO are read into the image.
	//
	// Errors: DISK_FULL, WRONG_PHASE, SAVE_FAILED (the runtime says why; the sandbox goes on), SANDBOX_FAILED (the
	// sandbox died). On an error the folder's
	// content is worthless. When ctx ends the sandbox may go on writing into the folder until Resume
	// has returned.
	Save(ctx context.Context, id string, opts SaveOptions) error

	// Resume ends a Pause. Idempotent. It waits for a Save that is still going on. When it fails for
	// another reason than ctx, the sandbox is not to be relied on: kill it.
	Resume(ctx context.Context, id string) error

	// Trim asks the runtime to give back memory that it holds and has no use for, as after a Save. It returns at once, may be called
	// beside any other call, and changes nothing else; a runtime with nothing of that kind does nothing. OBJECT_NOT_FOUND when the driver is not
	// attached to the sandbox; one that has ended is nil.
	Trim(id string) error

	// Kill sends the signal to the sandbox's init. SIGKILL ends the whole sandbox, paused or not, and
	// whether or not it still answers. Idempotent: a sandbox that has ended, or is unknown, is nil.
	// It does not wait for the end.
	Kill(ctx context.Context, id string, sig syscall.Signal) error

	// Wait returns how the sandbox ended, once it has, as often as it is asked and however late. An
	// id that this driver neither started nor recovered gives OBJECT_NOT_FOUND; so does one that has
	// been deleted. A Delete while waiting ends the wait with the exit that it caused.
	Wait(ctx context.Context, id string) (Exit, error)

	// Delete ends the sandbox if it runs and removes everything of it that is the driver's: processes,
	// cgroup, records. Idempotent: an unknown id is nil. Nil means that absence was observed, and only
	// then is the caller free to remove what the sandbox used. Every step runs even if one fails; after
	// an error or the end of ctx, Delete may be called again, by any later driver.
	Delete(ctx context.Context, id string) error

	// Exec starts a program in a running sandbox, with the three pipes as its standard input, output and
	// error, and returns once it runs. The caller may close its copies of them then, and when Exec failed.
	// WRONG_PHASE for a sandbox that does not run, COMMAND_NOT_FOUND for a program that is not there. After
	// another error, or the end of ctx, the program may run: closing the pipes has to be enough for it to end.
	//
	// A program started so goes on through Pause, Save and Resume. It is not in what a Restore starts.
	Exec(ctx context.Context, id string, p Program) (Process, error)

	// State tells how a sandbox is, without asking the sandbox. An unknown id is OBJECT_NOT_FOUND.
	State(ctx context.Context, id string) (Status, error)

	// Stats reads the sandbox's counters, without asking the sandbox.
	Stats(ctx context.Context, id string) (Stats, error)

	// List gives everything that the runtime is observed to have, complete or with an error: a part is
	// never returned as the whole. It includes sandboxes that an earlier driver was about to start.
	List(ctx context.Context) ([]Status, error)

	// Close ends the driver's goroutines and releases its descriptors, and waits for both. Waits that
	// are going on end with SHUTTING_DOWN. Sandboxes go on.
	Close() error
}

// ConfigName is the file of the OCI spec in a sandbox's folder, by the name that runtimes look for.
const ConfigName = "config.json"

// Config is everything about one sandbox that the driver needs.
type Config struct {
	// ID is the sandbox's uid, IDLen characters.
	ID string
	// Dir is a folder of the sandbox's own (0700), visible under this path in the host's mount
	// namespace. The driver writes ConfigName into it and nothing else. It lives as long as the sandbox.
	Dir string
	// Spec is the whole OCI spec, from package ocispec. The driver adds nothing to it but
	// linux.cgroupsPath from Cgroup.
	Spec *specs.Spec
	// Bundle is the runtime bundle that drives the sandbox for the whole of its life.
	Bundle Bundle
	// Flags are the runtime's own global flags that decide whether a snapshot fits (they belong into
	// the manifest, and come from there on restore). DefaultFlags of the driver's package where the
	// sandbox is new.
	Flags []string
	// Stdio are the FIFOs that become init's standard input, output and error.
	Stdio Stdio
	// Cgroup is the sandbox's cgroup, as a path below the root of each hierarchy
	// ("/dormouse/<node instance>/<uid>"); the driver makes and removes it. Its limits are
	// Spec.Linux.Resources.
	Cgroup string
}

// Bundle names a runtime bundle: a digest and where its files are, under paths of the host.
type Bundle struct {
	Digest string
	// Dir is the folder; the runtime's binary is Dir/runsc.
	Dir string
}

// Stdio are the paths of FIFOs that exist and that the caller made for this sandbox and this run
// alone (MakeFIFOs). A restored sandbox gets fresh ones. The driver opens each of them once, for
// reading and writing, hands that descriptor over and keeps none; so neither side sees an end of
// file, and the caller may close and reopen its end at any time. All three are needed. The runtime may
// change their owner. The caller drains Out and Err: a full one blocks the guest.
type Stdio struct {
	In, Out, Err string
}

// SaveOptions say how Save writes.
type SaveOptions struct {
	// Dir is where the files go.
	Dir string
	// Direct writes past the page cache. It is several times faster for large images and takes no
	// memory from others; the file system has to support it.
	Direct bool
}

// Image is what Restore reads.
type Image struct {
	// Dir holds the files that Save wrote.
	Dir string
	// Direct reads past the page cache: right for files that are not in it.
	Direct bool
}

// Handle is what a later driver needs in order to find a sandbox again: versioned, opaque to all but
// the driver that made it, free of secrets, safe to persist as it is.
type Handle []byte

// Phase is a sandbox's state as the runtime shows it.
type Phase string

// The phases.
//
// Creating: the driver wrote down that it starts the sandbox; whether it came to be is not known. Only a
// crash or a Start that is going on shows it. Stopped: its processes are gone, its records are not.
const (
	Creating Phase = "creating"
	Running  Phase = "running"
	Paused   Phase = "paused"
	Stopped  Phase = "stopped"
)

// Status is one sandbox as observed.
type Status struct {
	ID    string
	Phase Phase
	// Pid is the host's process that is the sandbox, 0 when there is none.
	Pid int
	// StartedAt is when the sandbox process started, zero when there is none.
	StartedAt time.Time
	// BundleDigest is of the bundle that drives it, "" when that is not known.
	BundleDigest string
}

// Exit says how a sandbox ended.
type Exit struct {
	// Known is false when the end was observed but not how: the sandbox ended while no driver was
	// attached, or the kernel cannot tell. Code and Signal are then 0 and mean nothing.
	Known bool
	// Code is init's exit code, 128+n when a signal n ended it.
	Code int
	// Signal is the signal that ended the sandbox process itself from outside, 0 for none.
	Signal syscall.Signal
	// OOM: the kernel killed it because the sandbox's memory limit was reached.
	OOM bool
	// At is when the driver saw it.
	At time.Time
}

// Program is what Exec starts.
type Program struct {
	// Args are the program's arguments. Args[0] is its absolute path inside.
	Args []string
	Env  []string
	// Capabilities are those that it has, as root ("CAP_CHOWN"). Nil is none.
	Capabilities []string
	// Stdio are raw descriptors of pipes, which become 0, 1 and 2. Each is an open file description of
	// its own that nothing on the host uses, and blocks, which the program sees: pipes, never sockets
	// or files, because a save reads what is readable and knows no sockets.
	Stdio [3]int
}

// Process is a program that Exec started.
type Process interface {
	// Pid is its number inside.
	Pid() int
	// Wait returns its exit code, 128+n when signal n ended it, as often as it is asked. SANDBOX_FAILED
	// when the sandbox ended or was restored first, SHUTTING_DOWN when the driver was closed.
	Wait(ctx context.Context) (code int, err error)
	// Kill sends it the signal. Nil when it has ended.
	Kill(ctx context.Context, sig syscall.Signal) error
}

// Stats are a sandbox's counters: of everything in its cgroup, the runtime's own share included.
type Stats struct {
	At               time.Time
	CPU              time.Duration // used since the start
	MemoryBytes      uint64        // in use now
	MemoryPeakBytes  uint64        // the most so far, 0 where the kernel does not tell
	MemoryLimitBytes uint64        // 0 for none
	Pids             uint64        // the host's threads
	OOMKills         uint64
}
