package guestwire

// Hello opens the channel for the generation and key in its frame's header.
type Hello struct {
	MinVersion   uint32
	MaxVersion   uint32
	SandboxUID   string
	Capabilities []string
}

// Type gives the frame type.
func (*Hello) Type() Type { return TypeHello }

func (m *Hello) fields(c *codec) {
	c.u32(1, &m.MinVersion)
	c.u32(2, &m.MaxVersion)
	c.str(3, &m.SandboxUID)
	c.strs(4, &m.Capabilities)
}

// Welcome accepts a hello.
type Welcome struct {
	Version            uint32
	PreviousSandboxUID string
	PreviousGeneration uint64
	Capabilities       []string
	Build              string
	MaxPayload         uint32
	MaxMessage         uint32
	Processes          uint32
}

// Type gives the frame type.
func (*Welcome) Type() Type { return TypeWelcome }

func (m *Welcome) fields(c *codec) {
	c.u32(1, &m.Version)
	c.str(2, &m.PreviousSandboxUID)
	c.u64(3, &m.PreviousGeneration)
	c.strs(4, &m.Capabilities)
	c.str(5, &m.Build)
	c.u32(6, &m.MaxPayload)
	c.u32(7, &m.MaxMessage)
	c.u32(8, &m.Processes)
}

// Rejected refuses a hello and changes nothing.
type Rejected struct {
	Reason            string
	Message           string
	CurrentGeneration uint64
}

// Type gives the frame type.
func (*Rejected) Type() Type { return TypeRejected }

func (m *Rejected) fields(c *codec) {
	c.str(1, &m.Reason)
	c.str(2, &m.Message)
	c.u64(3, &m.CurrentGeneration)
}

// Configure gives the sandbox its identity.
type Configure struct {
	Hostname                 string
	Hosts                    []HostEntry
	WriteHosts               bool
	Resolver                 *Resolver
	SecretEnvironment        []string
	ReplaceSecretEnvironment bool
	Hook                     uint32
}

// When the image's hook is started.
const (
	HookAfterRestore uint32 = iota
	HookLater
	HookNow
)

// Type gives the frame type.
func (*Configure) Type() Type { return TypeConfigure }

func (m *Configure) fields(c *codec) {
	c.str(1, &m.Hostname)
	messages(c, 2, &m.Hosts)
	c.bool(3, &m.WriteHosts)
	message(c, 4, &m.Resolver)
	c.strs(5, &m.SecretEnvironment)
	c.bool(6, &m.ReplaceSecretEnvironment)
	c.u32(7, &m.Hook)
}

// HostEntry is a line of /etc/hosts.
type HostEntry struct {
	Address string
	Names   []string
}

func (m *HostEntry) fields(c *codec) {
	c.str(1, &m.Address)
	c.strs(2, &m.Names)
}

// Resolver is the content of /etc/resolv.conf.
type Resolver struct {
	Nameservers []string
	Searches    []string
	Options     []string
}

func (m *Resolver) fields(c *codec) {
	c.strs(1, &m.Nameservers)
	c.strs(2, &m.Searches)
	c.strs(3, &m.Options)
}

// Configured says what came of a Configure.
type Configured struct {
	HostnameSet     bool
	IdentityChanged bool
	HookProcessID   string
}

// Type gives the frame type.
func (*Configured) Type() Type { return TypeConfigured }

func (m *Configured) fields(c *codec) {
	c.bool(1, &m.HostnameSet)
	c.bool(2, &m.IdentityChanged)
	c.str(3, &m.HookProcessID)
}

// Quiesce asks the guest to stop writing until Resume.
type Quiesce struct{}

// Type gives the frame type.
func (*Quiesce) Type() Type { return TypeQuiesce }

func (*Quiesce) fields(*codec) {}

// Quiesced is the last frame before Resume.
type Quiesced struct {
	Processes uint32
}

// Type gives the frame type.
func (*Quiesced) Type() Type { return TypeQuiesced }

func (m *Quiesced) fields(c *codec) {
	c.u32(1, &m.Processes)
}

// Resume ends Quiesce.
type Resume struct{}

// Type gives the frame type.
func (*Resume) Type() Type { return TypeResume }

func (*Resume) fields(*codec) {}

// Resumed is the answer.
type Resumed struct{}

// Type gives the frame type.
func (*Resumed) Type() Type { return TypeResumed }

func (*Resumed) fields(*codec) {}

// Ping asks for a sign of life.
type Ping struct {
	Nonce uint64
}

// Type gives the frame type.
func (*Ping) Type() Type { return TypePing }

func (m *Ping) fields(c *codec) {
	c.u64(1, &m.Nonce)
}

// Pong is that sign.
type Pong struct {
	Nonce uint64
}

// Type gives the frame type.
func (*Pong) Type() Type { return TypePong }

func (m *Pong) fields(c *codec) {
	c.u64(1, &m.Nonce)
}

// Error is a failed request.
type Error struct {
	Reason      string
	Message     string
	DetailKey   string
	DetailValue string
}

// Type gives the frame type.
func (*Error) Type() Type { return TypeError }

func (m *Error) fields(c *codec) {
	c.str(1, &m.Reason)
	c.str(2, &m.Message)
	c.str(3, &m.DetailKey)
	c.str(4, &m.DetailValue)
}

// Credit adds to what the guest may send on the frame's stream.
type Credit struct {
	Bytes uint32
}

// Type gives the frame type.
func (*Credit) Type() Type { return TypeCredit }

func (m *Credit) fields(c *codec) {
	c.u32(1, &m.Bytes)
}

// StreamClose ends the frame's stream.
type StreamClose struct{}

// Type gives the frame type.
func (*StreamClose) Type() Type { return TypeStreamClose }

func (*StreamClose) fields(*codec) {}
