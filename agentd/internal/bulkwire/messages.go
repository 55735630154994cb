package bulkwire

// Op is what a helper is to do.
type Op string

// The operations.
const (
	Dial    Op = "dial"   // Answer; Data both ways, End both ways
	Stat    Op = "stat"   // Answer Info, End
	List    Op = "list"   // Answer Entries*, End Listed
	Read    Op = "read"   // Answer Info, Data*, End Done
	Write   Op = "write"  // Answer Opened; Data* End from the host; End Done
	MakeDir Op = "mkdir"  // End Done
	Remove  Op = "remove" // End
	Move    Op = "move"   // End Done
	Pack    Op = "pack"   // Answer, Data* (tar), End Done
	Unpack  Op = "unpack" // Answer; Data* (tar) End from the host; End Done
	Watch   Op = "watch"  // Answer; Answer Events* until a pipe is closed; End when what is watched is gone
)

// Order is the body of a Request. Each operation reads what concerns it.
type Order struct {
	Op Op `json:"op"`
	// User is whom the helper acts as, as docker's --user says it; "" is root.
	User string `json:"user,omitempty"`
	// Path is what it is about; To where it is to be moved.
	Path string `json:"path,omitempty"`
	To   string `json:"to,omitempty"`
	// Port is dialled on the loopback addresses; Path, where it is zero, is a socket's.
	Port int `json:"port,omitempty"`

	// Offset and Length bound what is read; Length 0 is to the end. Version is what the file has to be
	// at, "" for any. HashAll has the digest begin at the file's first byte, whatever the offset.
	Offset  int64  `json:"offset,omitempty"`
	Length  int64  `json:"length,omitempty"`
	Version string `json:"version,omitempty"`
	HashAll bool   `json:"hash_all,omitempty"`

	// Mode are permission bits, where HasMode. Owner is user[:group], DefaultOwner that of what is new
	// where Owner is "".
	Mode         uint32 `json:"mode,omitempty"`
	HasMode      bool   `json:"has_mode,omitempty"`
	Owner        string `json:"owner,omitempty"`
	DefaultOwner string `json:"default_owner,omitempty"`
	// KeepOwners takes the owners in an archive.
	KeepOwners bool `json:"keep_owners,omitempty"`
	// Upload names a write that can be taken up again, with Resume; Size is what is expected, 0 for
	// unknown, and Digest (hexadecimal SHA-256) what the content has to have, "" for any.
	Upload string `json:"upload,omitempty"`
	Resume bool   `json:"resume,omitempty"`
	Size   int64  `json:"size,omitempty"`
	Digest string `json:"digest,omitempty"`

	// Parents makes missing folders on the way, Recursive goes into folders, Replace takes the place of
	// what is there, NoFollow looks at a link itself.
	Parents   bool `json:"parents,omitempty"`
	Recursive bool `json:"recursive,omitempty"`
	Replace   bool `json:"replace,omitempty"`
	NoFollow  bool `json:"no_follow,omitempty"`

	// After is the name after which a list goes on, in whatever bytes it has; Limit how many there are at most.
	After []byte `json:"after,omitempty"`
	Limit int    `json:"limit,omitempty"`
	// Name is what the top of an archive is called, "" for the path's last element, "." for none.
	Name string `json:"name,omitempty"`
}

// Type is what a file is.
type Type string

// The types.
const (
	File      Type = "file"
	Directory Type = "directory"
	Symlink   Type = "symlink"
	Other     Type = "other" // a device, FIFO or socket
)

// Info describes a file.
type Info struct {
	Path   string `json:"path"`
	Name   string `json:"name"`
	Type   Type   `json:"type"`
	Size   int64  `json:"size"`
	Mode   uint32 `json:"mode"` // permission bits, with set-id and sticky ones
	UID    uint32 `json:"uid"`
	GID    uint32 `json:"gid"`
	MTime  int64  `json:"mtime"` // nanoseconds since 1970
	Target string `json:"target,omitempty"`
	// Version changes when the content does.
	Version string `json:"version"`
}

// Entries is a part of a list.
type Entries struct {
	Entries []Info `json:"entries"`
}

// Listed ends a list. Next is the last name where there are more.
type Listed struct {
	Next []byte `json:"next,omitempty"`
}

// Opened says from which byte on a write goes on.
type Opened struct {
	Offset int64 `json:"offset"`
	// Part is the hidden file.
	Part string `json:"part"`
}

// Done says what was done.
type Done struct {
	Info    *Info  `json:"info,omitempty"`
	Bytes   int64  `json:"bytes"`
	Digest  string `json:"digest,omitempty"` // hexadecimal SHA-256
	Entries int64  `json:"entries,omitempty"`
}

// Events are changes below what is watched.
type Events struct {
	Events []Event `json:"events"`
	// Overflow: there were more events than the sandbox's kernel kept.
	Overflow bool `json:"overflow,omitempty"`
}

// Event is one change.
type Event struct {
	Path string `json:"path"`
	What Change `json:"what"`
	Dir  bool   `json:"dir,omitempty"`
}

// Change is what happened to a file.
type Change string

// The changes.
const (
	Created   Change = "created"
	Modified  Change = "modified"
	Removed   Change = "removed"
	MovedFrom Change = "moved_from"
	MovedTo   Change = "moved_to"
	Changed   Change = "attributes"
)

// Refusal is the body of a Failure. Reason is one of pkg/errs.
type Refusal struct {
	Reason  string `json:"reason"`
	Message string `json:"message"`
	Key     string `json:"key,omitempty"`
	Value   string `json:"value,omitempty"`
}
