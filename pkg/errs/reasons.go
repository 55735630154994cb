package errs

import "slices"

// Reason is the exact kind of an error. The set is closed: wire maps each and a test round-trips each.
type Reason string

// The reasons. Each one's code, retry and outcome are in the table below.
const (
	// The request is wrong as it stands.
	InvalidField       Reason = "INVALID_FIELD"        // a value that cannot be; details: field
	UnknownField       Reason = "UNKNOWN_FIELD"        // a key that does not exist; details: field
	LimitExceeded      Reason = "LIMIT_EXCEEDED"       // larger than the door allows; details: field, limit, got
	BelowFloor         Reason = "BELOW_FLOOR"          // a resource limit below what a sandbox needs; details: field, floor, got
	AboveEveryNode     Reason = "ABOVE_EVERY_NODE"     // no node could ever hold it; details: resource, asked, largest
	DuplicatePath      Reason = "DUPLICATE_PATH"       // two volumes on one path; details: path
	UnsafePath         Reason = "UNSAFE_PATH"          // a path with "..", or not absolute; details: path
	InvalidReference   Reason = "INVALID_REFERENCE"    // not an image reference; details: image
	CommandNotFound    Reason = "COMMAND_NOT_FOUND"    // not in the image; details: command
	CommandNotRunnable Reason = "COMMAND_NOT_RUNNABLE" // there, but not executable; details: command
	UserNotFound       Reason = "USER_NOT_FOUND"       // not in the image's passwd; details: user
	WrongArchitecture  Reason = "WRONG_ARCHITECTURE"   // the image has none for the node; details: image, want, has
	ImageMalformed     Reason = "IMAGE_MALFORMED"      // a layer or config that cannot be used; details: image
	AmbiguousName      Reason = "AMBIGUOUS_NAME"       // a name or prefix that matches several; details: matches

	// Who is asking.
	CredentialsMissing Reason = "CREDENTIALS_MISSING"
	CredentialsInvalid Reason = "CREDENTIALS_INVALID"
	NotAllowed         Reason = "NOT_ALLOWED"
	TicketInvalid      Reason = "TICKET_INVALID"   // a ticket that a node does not take: get another; details: why
	PortNotExposed     Reason = "PORT_NOT_EXPOSED" // the spec does not have it in exposed_ports; details: uid, port
	RegistryDenied     Reason = "REGISTRY_DENIED"  // the registry refused our credentials; details: registry

	// It is not there.
	ObjectNotFound  Reason = "OBJECT_NOT_FOUND" // details: kind, uid or name
	ImageNotFound   Reason = "IMAGE_NOT_FOUND"  // the registry has no such reference; details: image
	ProcessNotFound Reason = "PROCESS_NOT_FOUND"
	FileNotFound    Reason = "FILE_NOT_FOUND" // in the sandbox; details: path
	SandboxMoved    Reason = "SANDBOX_MOVED"  // the sandbox is gone, what was restored from it goes on; details: uid, new_uid

	// It conflicts with what is there.
	StaleUID              Reason = "STALE_UID"               // the uid is of an earlier object of that name; details: uid, current_uid
	StaleRevision         Reason = "STALE_REVISION"          // details: uid, revision, current_revision
	OperationBodyMismatch Reason = "OPERATION_BODY_MISMATCH" // same operation id, other body
	OperationExpired      Reason = "OPERATION_EXPIRED"       // older than the receipts' life
	NameTaken             Reason = "NAME_TAKEN"              // details: name, uid
	AlreadyAttached       Reason = "ALREADY_ATTACHED"        // details: volume, holder
	StillReferenced       Reason = "STILL_REFERENCED"        // details: uid, references (bounded, comma separated), count
	WrongPhase            Reason = "WRONG_PHASE"             // details: uid, phase
	SandboxPaused         Reason = "SANDBOX_PAUSED"          // it stands still: resume it first; details: uid, phase
	IdentityMismatch      Reason = "IDENTITY_MISMATCH"       // the immutable digest is another; details: uid, want, has
	AttemptVoid           Reason = "ATTEMPT_VOID"            // a commit's attempt that was settled as never applied; internal to the catalog
	InputTaken            Reason = "INPUT_TAKEN"             // another writes the process's input now; details: process_id
	ResumeTooOld          Reason = "RESUME_TOO_OLD"          // the change log does not reach back there; details: after, oldest, current
	VolumeDiverged        Reason = "VOLUME_DIVERGED"         // details: volume, path
	CatalogNotEmpty       Reason = "CATALOG_NOT_EMPTY"       // a backup is restored into an empty catalog only; details: kind
	RestoreUnfinished     Reason = "RESTORE_UNFINISHED"      // a backup's records are not all in yet; details: backup_id
	OrphanUnproven        Reason = "ORPHAN_UNPROVEN"         // what a node holds without a record may be the last copy; details: uid, node
	IncompatibleRuntime   Reason = "INCOMPATIBLE_RUNTIME"    // details: want, has
	IncompatibleNode      Reason = "INCOMPATIBLE_NODE"       // CPU features, image path; details: node, missing

	// What is in the sandbox is not so that it could be done; details: path.
	NotADirectory     Reason = "NOT_A_DIRECTORY"
	IsADirectory      Reason = "IS_A_DIRECTORY"
	NotAFile          Reason = "NOT_A_FILE" // a device, FIFO or socket
	FileExists        Reason = "FILE_EXISTS"
	DirectoryNotEmpty Reason = "DIRECTORY_NOT_EMPTY"
	CrossDevice       Reason = "CROSS_DEVICE" // a move between file systems
	FileBusy          Reason = "FILE_BUSY"
	FileChanged       Reason = "FILE_CHANGED"   // it is not the file any more that was being read; details: want, has
	FileDenied        Reason = "FILE_DENIED"    // the user inside may not
	ReadOnlyPath      Reason = "READ_ONLY_PATH" // a read-only file system

	// There is not enough.
	NoNodeFits      Reason = "NO_NODE_FITS"      // details: one per node: why not
	DiskFull        Reason = "DISK_FULL"         // the node's; details: asked, left
	TooMany         Reason = "TOO_MANY"          // a count or rate of the tenant's; details: resource, limit
	QueueFull       Reason = "QUEUE_FULL"        // details: resource, limit
	OutOfMemory     Reason = "OUT_OF_MEMORY"     // the node's; details: resource, asked, left
	NodeFull        Reason = "NODE_FULL"         // the node has all of its sandboxes; details: resource, asked, left
	PoolEmpty       Reason = "POOL_EMPTY"        // no member is ready; details: pool or template, ready, filling, size
	SandboxDiskFull Reason = "SANDBOX_DISK_FULL" // the sandbox's own, or a volume's; details: path

	// It cannot be reached now.
	NoLeader            Reason = "NO_LEADER"
	NodeAway            Reason = "NODE_AWAY" // details: node
	Fenced              Reason = "FENCED"    // an epoch lower than the one in force; details: epoch, current_epoch
	StoreUnavailable    Reason = "STORE_UNAVAILABLE"
	StoreNotDurable     Reason = "STORE_NOT_DURABLE"
	CatalogRewound      Reason = "CATALOG_REWOUND"      // the store lost what it had acknowledged; no writes until it is repaired
	RegistryUnreachable Reason = "REGISTRY_UNREACHABLE" // details: registry
	RegistryUntrusted   Reason = "REGISTRY_UNTRUSTED"   // TLS did not verify; details: registry
	ContainerdAway      Reason = "CONTAINERD_AWAY"      // the node's containerd does not answer
	ShuttingDown        Reason = "SHUTTING_DOWN"
	SaveFailed          Reason = "SAVE_FAILED"  // the runtime could not save the sandbox, which goes on; details: uid, step
	GuestSilent         Reason = "GUEST_SILENT" // guest init does not answer; details: uid
	TransferCut         Reason = "TRANSFER_CUT" // the helper of a transfer ended before the transfer did; details: uid
	PortClosed          Reason = "PORT_CLOSED"  // nothing listens there inside; details: port
	ClaimFailed         Reason = "CLAIM_FAILED" // what a claim was given could not be resumed, and is deleted, and there was no other; details: uid, node, cause, lost, instead

	// It ended before it was known.
	DeadlineExpired Reason = "DEADLINE_EXPIRED"
	CallCancelled   Reason = "CALL_CANCELLED"
	ReplyLost       Reason = "REPLY_LOST"

	// It is damaged.
	ArtefactDamaged Reason = "ARTEFACT_DAMAGED" // details: uid, file
	DigestMismatch  Reason = "DIGEST_MISMATCH"  // details: want, got
	SecretsLost     Reason = "SECRETS_LOST"     // a restart lost the secret environment before it was delivered; details: uid
	StateDamaged    Reason = "STATE_DAMAGED"    // the node's state file; the message names the way out

	NotSupported  Reason = "NOT_SUPPORTED"  // details: feature
	SetupFailed   Reason = "SETUP_FAILED"   // a template's command; details: step, index, exit_code, timed_out, output_tail
	SandboxFailed Reason = "SANDBOX_FAILED" // the runtime could not run it; details: step
	InternalError Reason = "INTERNAL_ERROR"
	// InvariantBroken: a program was about to do what its own rules exclude, and did not; details: kind, uid, from, to
	InvariantBroken Reason = "INVARIANT_BROKEN"
)

type row struct {
	code    Code
	retry   Retry
	outcome Outcome
}

var (
	invalid     = row{InvalidArgument, Never, NotStarted}
	notFound    = row{NotFound, Never, Terminal}
	conflict    = row{Conflict, Never, NotStarted}
	exhausted   = row{ResourceExhausted, AfterBackoff, NotStarted}
	unavailable = row{Unavailable, AfterBackoff, NotStarted}
	lost        = row{DataLoss, Never, Terminal}
)

var table = map[Reason]row{
	InvalidField: invalid, UnknownField: invalid, LimitExceeded: invalid, BelowFloor: invalid,
	AboveEveryNode: invalid, DuplicatePath: invalid, UnsafePath: invalid, InvalidReference: invalid,
	CommandNotFound: invalid, CommandNotRunnable: invalid, UserNotFound: invalid,
	WrongArchitecture: invalid, ImageMalformed: invalid, AmbiguousName: invalid,

	CredentialsMissing: {Unauthenticated, Never, NotStarted},
	CredentialsInvalid: {Unauthenticated, Never, NotStarted},
	TicketInvalid:      {Unauthenticated, Never, NotStarted},
	NotAllowed:         {PermissionDenied, Never, NotStarted},
	RegistryDenied:     {PermissionDenied, Never, NotStarted},
	PortNotExposed:     {PermissionDenied, Never, NotStarted},

	ObjectNotFound: notFound, ImageNotFound: notFound, ProcessNotFound: notFound, FileNotFound: notFound, SandboxMoved: notFound,

	NotADirectory: conflict, IsADirectory: conflict, NotAFile: conflict, FileExists: conflict, DirectoryNotEmpty: conflict,
	CrossDevice: conflict, FileBusy: conflict, FileChanged: conflict,
	FileDenied: {PermissionDenied, Never, NotStarted}, ReadOnlyPath: {PermissionDenied, Never, NotStarted},
	SandboxDiskFull: exhausted, TransferCut: unavailable, PortClosed: unavailable,

	StaleUID: conflict, StaleRevision: conflict, OperationBodyMismatch: conflict,
	OperationExpired: conflict, NameTaken: conflict, AlreadyAttached: conflict,
	StillReferenced: conflict, WrongPhase: conflict, SandboxPaused: conflict, VolumeDiverged: conflict, OrphanUnproven: conflict,
	IncompatibleRuntime: conflict, IncompatibleNode: conflict, CatalogNotEmpty: conflict, RestoreUnfinished: conflict,
	IdentityMismatch: conflict, AttemptVoid: conflict, ResumeTooOld: conflict, InputTaken: conflict,

	NoNodeFits: exhausted, DiskFull: exhausted, TooMany: exhausted, QueueFull: exhausted, OutOfMemory: exhausted, NodeFull: exhausted, PoolEmpty: exhausted,

	NoLeader: unavailable, NodeAway: unavailable, Fenced: unavailable, StoreUnavailable: unavailable,
	StoreNotDurable: unavailable, CatalogRewound: unavailable, RegistryUnreachable: unavailable, RegistryUntrusted: unavailable,
	ContainerdAway: unavailable, SaveFailed: unavailable, ShuttingDown: unavailable, GuestSilent: unavailable, ClaimFailed: unavailable,

	DeadlineExpired: {DeadlineExceeded, SameOperation, Unknown},
	CallCancelled:   {Cancelled, SameOperation, Unknown},
	ReplyLost:       {OutcomeUnknown, SameOperation, Unknown},

	ArtefactDamaged: lost, DigestMismatch: lost, StateDamaged: lost, SecretsLost: lost,

	NotSupported:    {Unsupported, Never, NotStarted},
	SandboxFailed:   {Internal, Never, Terminal},
	SetupFailed:     {Internal, Never, Terminal},
	InternalError:   {Internal, SameOperation, Unknown},
	InvariantBroken: {Internal, Never, Terminal},
}

// Reasons lists the closed set in a fixed order.
func Reasons() []Reason {
	all := make([]Reason, 0, len(table))
	for r := range table {
		all = append(all, r)
	}
	slices.Sort(all)
	return all
}

// Known tells whether the reason is of the closed set.
func Known(r Reason) bool { _, ok := table[r]; return ok }
