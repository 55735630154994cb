package app

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"time"

	"github.com/dormouse-run/dormouse/agentd/internal/layers"
	"github.com/dormouse-run/dormouse/pkg/admission"
	"github.com/dormouse-run/dormouse/pkg/config"
	"github.com/dormouse-run/dormouse/pkg/obs"
	"github.com/dormouse-run/dormouse/pkg/pki"
)

// EnvPrefix begins the names of agentd's environment variables.
const EnvPrefix = "AGENTD"

// Config is agentd's configuration: a file, the environment, flags (see package config).
type Config struct {
	Node string `yaml:"node" usage:"name of this node; the certificate has to carry the same"`

	StateDir string `yaml:"state_dir" usage:"folder of the node's records, sandboxes, snapshots and volumes; it outlives agentd"`
	RunDir   string `yaml:"run_dir" usage:"folder of the root-only sockets"`

	// Cgroup is a setting so that several nodes of one machine, or of one name, keep apart.
	Cgroup  string `yaml:"cgroup" usage:"control group that the sandboxes' groups are below; /dormouse/<node> by default"`
	MountNS string `yaml:"mount_ns" usage:"mount namespace that sandboxes run in; agentd in a container names /proc/1/ns/mnt"`

	Layers     LayersConfig     `yaml:"layers"`
	Containerd ContainerdConfig `yaml:"containerd"`
	Registry   RegistryConfig   `yaml:"registry"`
	Bundle     BundleConfig     `yaml:"bundle"`

	Listen      string            `yaml:"listen" usage:"where the node API is served: host:port or unix:/path"`
	Advertise   string            `yaml:"advertise" usage:"where the coordinator reaches the node API; the listen address by default"`
	Direct      DirectConfig      `yaml:"direct"`
	Coordinator string            `yaml:"coordinator" usage:"addresses of the coordinators, separated by commas: host:port or unix:/path each"`
	TLS         pki.Files         `yaml:"tls"`
	Labels      map[string]string `yaml:"labels" usage:"labels that node selectors match"`

	Protect     ProtectConfig `yaml:"protect"`
	RaiseLimits bool          `yaml:"raise_limits" usage:"raise limits of the host that are too low for limits.sandboxes when agentd starts"`

	Reserve  ReserveConfig  `yaml:"reserve"`
	Limits   LimitsConfig   `yaml:"limits"`
	Network  NetworkConfig  `yaml:"network"`
	Snapshot SnapshotConfig `yaml:"snapshot"`
	Log      obs.LogConfig  `yaml:"log"`
}

// DirectConfig is the listener for clients that show tickets.
type DirectConfig struct {
	Listen    string `yaml:"listen" usage:"host:port at which clients with tickets reach processes, files and ports; empty: only through a coordinator"`
	Advertise string `yaml:"advertise" usage:"host:port that clients are told; the listen address by default"`
	// Tenant limits what one tenant may ask here at a time.
	Tenant admission.Limits `yaml:"tenant"`
}

// LayersConfig is of the read-only layers.
type LayersConfig struct {
	Root        string `yaml:"root" usage:"folder of the images' EROFS files; the same path on every node"`
	Mkfs        string `yaml:"mkfs" usage:"mkfs.erofs, 1.8 or newer"`
	Conversions int    `yaml:"conversions" usage:"how many images are converted at a time"`
}

// ContainerdConfig says where images are pulled to.
type ContainerdConfig struct {
	Socket    string `yaml:"socket" usage:"containerd's socket"`
	Namespace string `yaml:"namespace" usage:"containerd's namespace for Dormouse's images"`
}

// RegistryConfig says how registries are spoken to.
type RegistryConfig struct {
	HostsDir     string   `yaml:"hosts_dir" usage:"folder of registry settings, as containerd's certs.d"`
	CAFiles      []string `yaml:"ca_files" usage:"certificates trusted besides the system's for every registry"`
	PlainHTTP    []string `yaml:"plain_http" usage:"registries (host:port) that are spoken to without TLS"`
	DockerConfig string   `yaml:"docker_config" usage:"docker config.json with the node's credentials"`
}

// BundleConfig says which runtime bundle new sandboxes get.
type BundleConfig struct {
	Dir string `yaml:"dir" usage:"runtime bundle for new sandboxes (scripts/bundle.sh makes one)"`
	// Root is a setting of its own so that nodes of one machine can share what is installed.
	Root string `yaml:"root" usage:"folder that bundles are installed below; the state folder by default"`
}

// ReserveConfig is what the node keeps for itself.
type ReserveConfig struct {
	CPUMillis int64        `yaml:"cpu_millis" usage:"thousandths of a core kept for the node itself"`
	Memory    config.Bytes `yaml:"memory" usage:"memory kept for the node itself"`
	Disk      config.Bytes `yaml:"disk" usage:"disk space that is left free"`
}

// ProtectConfig is of agentd's own memory.
type ProtectConfig struct {
	Memory config.Bytes `yaml:"memory" usage:"agentd's memory that is the last to be taken from it; 0: agentd stays in the control group in which it was started, as it is"`
	Cgroup string       `yaml:"cgroup" usage:"agentd's own control group, where it makes one; /dormouse-agentd/<node> by default"`
}

// LimitsConfig bounds what the node takes on.
type LimitsConfig struct {
	Sandboxes int64 `yaml:"sandboxes" usage:"how many sandboxes the node takes"`
	// CPUMillis and Memory replace what is found, where a node is to offer less than its machine has.
	CPUMillis int64        `yaml:"cpu_millis" usage:"thousandths of a core to offer; 0: what the machine has"`
	Memory    config.Bytes `yaml:"memory" usage:"memory to offer; 0: what the machine has"`
	// MemoryWait gives what is being deleted time to go.
	MemoryWait time.Duration `yaml:"memory_wait" usage:"how long a start or restore waits for memory before it is refused"`
	Commands   int           `yaml:"commands" usage:"how many finished commands are remembered"`
	Starts     int           `yaml:"starts" usage:"how many sandboxes are started or restored at a time; 0: two more than there are cores"`
	Restores   int           `yaml:"restores" usage:"how many of those may be restored; 0: as many as there are cores, and two at the least"`
	Networks   int           `yaml:"networks" usage:"how many network namespaces, and folders of sandboxes, are kept ready"`
}

// NetworkConfig is of sandboxes with an outbound network.
type NetworkConfig struct {
	// CIDR has no default: with it the node forwards packets, which is to be asked for.
	CIDR      string   `yaml:"cidr" usage:"IPv4 range of the sandboxes' addresses, /16 to /28, of no use elsewhere on this node; empty: no outbound networks"`
	Blocked   []string `yaml:"blocked" usage:"IPv4 ranges that no sandbox reaches, besides the node, other sandboxes, link-local and multicast"`
	Resolvers []string `yaml:"resolvers" usage:"name servers, address or address:port, that are asked for the names that sandboxes ask for; the node's own (/etc/resolv.conf) by default"`
	Ready     int      `yaml:"ready" usage:"how many outbound networks are kept ready"`
}

// SnapshotConfig is of captures.
type SnapshotConfig struct {
	Width  int  `yaml:"width" usage:"how many sandboxes are captured at a time"`
	Direct bool `yaml:"direct" usage:"write memory past the page cache; the file system has to support O_DIRECT"`
}

// Defaults is the configuration before file, environment and flags.
func Defaults() Config {
	host, err := os.Hostname()
	if err != nil {
		host = ""
	}
	return Config{
		Node: host, StateDir: "/var/lib/dormouse/agentd", RunDir: "/run/dormouse",
		Layers:     LayersConfig{Root: layers.DefaultRoot, Mkfs: "mkfs.erofs", Conversions: 2},
		Containerd: ContainerdConfig{Socket: "/run/containerd/containerd.sock", Namespace: layers.DefaultNamespace},
		Bundle:     BundleConfig{Dir: "/usr/lib/dormouse/bundle"},
		Listen:     "127.0.0.1:7421", RaiseLimits: true, Protect: ProtectConfig{Memory: 128 << 20},
		Direct:   DirectConfig{Tenant: admission.DefaultLimits()},
		Reserve:  ReserveConfig{CPUMillis: 0, Memory: 256 << 20, Disk: 1 << 30},
		Limits:   LimitsConfig{Sandboxes: 1024, MemoryWait: 5 * time.Second, Commands: 20000, Networks: 16},
		Network:  NetworkConfig{Ready: 4},
		Snapshot: SnapshotConfig{Width: 4, Direct: true},
		Log:      obs.DefaultLog(),
	}
}

// maxReady bounds the networks that are kept ready: each is a namespace of the kernel's.
const maxReady = 256

var nodeForm = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$`)

// check finds what cannot work, and fills what follows from other keys.
func (c *Config) check() error {
	if !nodeForm.MatchString(c.Node) {
		return fmt.Errorf("node: %q is no name for a node: lower case letters, digits, '.' and '-', at most 63", c.Node)
	}
	for _, p := range []struct{ key, path string }{
		{"state_dir", c.StateDir}, {"run_dir", c.RunDir}, {"layers.root", c.Layers.Root}, {"bundle.dir", c.Bundle.Dir}, {"containerd.socket", c.Containerd.Socket},
	} {
		if !filepath.IsAbs(p.path) {
			return fmt.Errorf("%s: %q is not an absolute path", p.key, p.path)
		}
	}
	c.fill()
	if err := errors.Join(c.Network.check(), c.checkDirect()); err != nil {
		return err
	}
	if len(c.coordinators()) == 0 {
		return fmt.Errorf("coordinator: name its address")
	}
	if c.TLS.CA == "" || c.TLS.Cert == "" || c.TLS.Key == "" {
		return fmt.Errorf("tls: ca, cert and key are all needed: the node API is served over mTLS only")
	}
	if c.Limits.Sandboxes < 1 || c.Snapshot.Width < 1 || c.Reserve.CPUMillis < 0 || c.Reserve.Memory < 0 || c.Reserve.Disk < 0 || c.Limits.MemoryWait < 0 || c.Limits.Starts < 0 || c.Limits.Restores < 0 || c.Protect.Memory < 0 {
		return fmt.Errorf("limits and reserves: must not be negative, and at least one sandbox and one capture at a time")
	}
	return nil
}

// fill gives the keys that are empty what follows from others.
func (c *Config) fill() {
	if c.Bundle.Root == "" {
		c.Bundle.Root = c.StateDir
	}
	if c.Cgroup == "" {
		c.Cgroup = "/dormouse/" + c.Node
	}
	if c.Protect.Cgroup == "" {
		c.Protect.Cgroup = "/dormouse-agentd/" + c.Node
	}
	if c.Limits.Starts == 0 {
		c.Limits.Starts = runtime.NumCPU() + 2
	}
	if c.Limits.Restores == 0 {
		c.Limits.Restores = max(runtime.NumCPU(), 2)
	}
	if c.Advertise == "" {
		c.Advertise = c.Listen
	}
}

// checkDirect is check for the listener that takes tickets.
func (c *Config) checkDirect() error {
	if c.Direct.Listen == "" && c.Direct.Advertise != "" {
		return fmt.Errorf("direct.advertise: clients are told of a listener that direct.listen does not open")
	}
	if c.Direct.Advertise == "" {
		c.Direct.Advertise = c.Direct.Listen
	}
	if !c.Direct.Tenant.Valid() {
		return fmt.Errorf("direct.tenant: no limit is below zero, and a rate needs a burst; 0 is no limit")
	}
	for _, address := range []string{c.Direct.Listen, c.Direct.Advertise} {
		if _, _, err := net.SplitHostPort(address); address != "" && err != nil {
			return fmt.Errorf("direct: %q is not host:port", address)
		}
	}
	return nil
}

// AdminSocket serves metrics, health and profiles; DebugSocket is agentctl's.
func (c *Config) AdminSocket() string { return filepath.Join(c.RunDir, "admin.sock") }

// DebugSocket is the socket of DebugService.
func (c *Config) DebugSocket() string { return filepath.Join(c.RunDir, "agentd.sock") }

// listenOn splits an address into what net.Listen takes.
func listenOn(address string) (network, addr string) {
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		return "unix", path
	}
	return "tcp", address
}

// coordinators are the addresses of all coordinators.
func (c *Config) coordinators() []string {
	var all []string
	for part := range strings.SplitSeq(c.Coordinator, ",") {
		if part = strings.TrimSpace(part); part != "" {
			all = append(all, part)
		}
	}
	return all
}
