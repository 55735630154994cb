package guestwire

// Tag is a name and value that the host keeps with a process.
type Tag struct {
	Key   string
	Value string
}

func (m *Tag) fields(c *codec) {
	c.str(1, &m.Key)
	c.str(2, &m.Value)
}

// Terminal is the size of a terminal.
type Terminal struct {
	Rows    uint32
	Columns uint32
}

func (m *Terminal) fields(c *codec) {
	c.u32(1, &m.Rows)
	c.u32(2, &m.Columns)
}

// Start runs a process as a child of guest init.
type Start struct {
	ProcessID   string
	Args        []string
	Environment []string
	User        string
	Directory   string
	Stdin       uint32
	TimeoutMS   uint64
	Tags        []Tag
	Main        bool
	OutputBytes uint32
	HoldOutput  bool
	Terminal    *Terminal
	Groups      []string
}

// Type gives the frame type.
func (*Start) Type() Type { return TypeStart }

func (m *Start) fields(c *codec) {
	c.str(1, &m.ProcessID)
	c.strs(2, &m.Args)
	c.strs(3, &m.Environment)
	c.str(4, &m.User)
	c.str(5, &m.Directory)
	c.u32(6, &m.Stdin)
	c.u64(7, &m.TimeoutMS)
	messages(c, 8, &m.Tags)
	c.bool(9, &m.Main)
	c.u32(10, &m.OutputBytes)
	c.bool(11, &m.HoldOutput)
	message(c, 12, &m.Terminal)
	c.strs(13, &m.Groups)
}

// Started is a process that runs, or ran.
type Started struct {
	Process  *ProcessInfo
	Existing bool
}

// Type gives the frame type.
func (*Started) Type() Type { return TypeStarted }

func (m *Started) fields(c *codec) {
	message(c, 1, &m.Process)
	c.bool(2, &m.Existing)
}

// ProcessInfo is what guest init knows of a process.
type ProcessInfo struct {
	ProcessID       string
	PID             uint32
	StartTimeUnixNS uint64
	Args            []string
	Tags            []Tag
	Main            bool
	StdoutOffset    uint64
	StderrOffset    uint64
	Exit            *Exit
	Terminal        *Terminal
}

func (m *ProcessInfo) fields(c *codec) {
	c.str(1, &m.ProcessID)
	c.u32(2, &m.PID)
	c.u64(3, &m.StartTimeUnixNS)
	c.strs(4, &m.Args)
	messages(c, 5, &m.Tags)
	c.bool(6, &m.Main)
	c.u64(7, &m.StdoutOffset)
	c.u64(8, &m.StderrOffset)
	message(c, 9, &m.Exit)
	message(c, 10, &m.Terminal)
}

// Exit is how a process ended.
type Exit struct {
	Code         uint32
	Signal       uint32
	CoreDumped   bool
	TimedOut     bool
	TimeUnixNS   uint64
	StdoutOffset uint64
	StderrOffset uint64
}

func (m *Exit) fields(c *codec) {
	c.u32(1, &m.Code)
	c.u32(2, &m.Signal)
	c.bool(3, &m.CoreDumped)
	c.bool(4, &m.TimedOut)
	c.u64(5, &m.TimeUnixNS)
	c.u64(6, &m.StdoutOffset)
	c.u64(7, &m.StderrOffset)
}

// List asks for the processes that guest init knows, ended ones included.
type List struct {
	ProcessID string
}

// Type gives the frame type.
func (*List) Type() Type { return TypeList }

func (m *List) fields(c *codec) {
	c.str(1, &m.ProcessID)
}

// Listed is a part of the answer; the last part has more = false.
type Listed struct {
	Processes []ProcessInfo
	More      bool
}

// Type gives the frame type.
func (*Listed) Type() Type { return TypeListed }

func (m *Listed) fields(c *codec) {
	messages(c, 1, &m.Processes)
	c.bool(2, &m.More)
}

// Signal sends a signal to a process, or to it and its descendants.
type Signal struct {
	ProcessID string
	Signal    uint32
	Tree      bool
}

// Type gives the frame type.
func (*Signal) Type() Type { return TypeSignal }

func (m *Signal) fields(c *codec) {
	c.str(1, &m.ProcessID)
	c.u32(2, &m.Signal)
	c.bool(3, &m.Tree)
}

// Signaled is the answer.
type Signaled struct {
	Sent uint32
}

// Type gives the frame type.
func (*Signaled) Type() Type { return TypeSignaled }

func (m *Signaled) fields(c *codec) {
	c.u32(1, &m.Sent)
}

// Wait asks how a process ended.
type Wait struct {
	ProcessID string
}

// Type gives the frame type.
func (*Wait) Type() Type { return TypeWait }

func (m *Wait) fields(c *codec) {
	c.str(1, &m.ProcessID)
}

// Exited answers Wait.
type Exited struct {
	Exit *Exit
}

// Type gives the frame type.
func (*Exited) Type() Type { return TypeExited }

func (m *Exited) fields(c *codec) {
	message(c, 1, &m.Exit)
}

// OutputOpen asks for an output from an absolute offset on.
type OutputOpen struct {
	ProcessID  string
	Output     uint32
	FromOffset uint64
	Follow     uint32
	Credit     uint32
	Hold       bool
}

// Type gives the frame type.
func (*OutputOpen) Type() Type { return TypeOutputOpen }

func (m *OutputOpen) fields(c *codec) {
	c.str(1, &m.ProcessID)
	c.u32(2, &m.Output)
	c.u64(3, &m.FromOffset)
	c.u32(4, &m.Follow)
	c.u32(5, &m.Credit)
	c.bool(6, &m.Hold)
}

// OutputData is a piece of an output.
type OutputData struct {
	Offset uint64
	Gap    uint64
	Data   []byte
}

// Type gives the frame type.
func (*OutputData) Type() Type { return TypeOutputData }

func (m *OutputData) fields(c *codec) {
	c.u64(1, &m.Offset)
	c.u64(2, &m.Gap)
	c.bytes(3, &m.Data)
}

// OutputEnd is the end of an output stream.
type OutputEnd struct {
	Offset uint64
	EOF    bool
	Gap    uint64
}

// Type gives the frame type.
func (*OutputEnd) Type() Type { return TypeOutputEnd }

func (m *OutputEnd) fields(c *codec) {
	c.u64(1, &m.Offset)
	c.bool(2, &m.EOF)
	c.u64(3, &m.Gap)
}

// StdinOpen asks for the state of a process's input and for its changes.
type StdinOpen struct {
	ProcessID string
	Writer    uint64
	Resume    bool
}

// Type gives the frame type.
func (*StdinOpen) Type() Type { return TypeStdinOpen }

func (m *StdinOpen) fields(c *codec) {
	c.str(1, &m.ProcessID)
	c.u64(2, &m.Writer)
	c.bool(3, &m.Resume)
}

// StdinData is a piece of input.
type StdinData struct {
	Offset uint64
	Data   []byte
}

// Type gives the frame type.
func (*StdinData) Type() Type { return TypeStdinData }

func (m *StdinData) fields(c *codec) {
	c.u64(1, &m.Offset)
	c.bytes(2, &m.Data)
}

// StdinClose closes the input once everything before offset has been read.
type StdinClose struct {
	Offset uint64
}

// Type gives the frame type.
func (*StdinClose) Type() Type { return TypeStdinClose }

func (m *StdinClose) fields(c *codec) {
	c.u64(1, &m.Offset)
}

// StdinState says what was accepted and what may be sent.
type StdinState struct {
	AcceptedOffset uint64
	LimitOffset    uint64
	Closed         bool
	Broken         bool
}

// Type gives the frame type.
func (*StdinState) Type() Type { return TypeStdinState }

func (m *StdinState) fields(c *codec) {
	c.u64(1, &m.AcceptedOffset)
	c.u64(2, &m.LimitOffset)
	c.bool(3, &m.Closed)
	c.bool(4, &m.Broken)
}

// Forget drops an ended process and its output.
type Forget struct {
	ProcessID string
}

// Type gives the frame type.
func (*Forget) Type() Type { return TypeForget }

func (m *Forget) fields(c *codec) {
	c.str(1, &m.ProcessID)
}

// Forgotten is the answer.
type Forgotten struct{}

// Type gives the frame type.
func (*Forgotten) Type() Type { return TypeForgotten }

func (*Forgotten) fields(*codec) {}

// Resize sets the size of a process's terminal.
type Resize struct {
	ProcessID string
	Terminal  *Terminal
}

// Type gives the frame type.
func (*Resize) Type() Type { return TypeResize }

func (m *Resize) fields(c *codec) {
	c.str(1, &m.ProcessID)
	message(c, 2, &m.Terminal)
}

// Resized is the answer.
type Resized struct{}

// Type gives the frame type.
func (*Resized) Type() Type { return TypeResized }

func (*Resized) fields(*codec) {}

// The values of the enums.
const (
	StdinNull uint32 = 0
	StdinPipe uint32 = 1

	Stdout uint32 = 1
	Stderr uint32 = 2

	FollowNone      uint32 = 0
	FollowUntilExit uint32 = 1
	FollowUntilEOF  uint32 = 2
)
