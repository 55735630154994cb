// Package app is the coordinator: its configuration, how its parts are put together, and the order in
// which they start and stop. It is importable, so that tests run it in their own process.
//
// Start: logs and metrics; files (TLS, keys); the catalog; the commit queue; the registry of nodes and their
// client; the API; the listeners, which answer reads and the data plane, and pass on to the leader what only that
// can do; and last the campaign for leadership. Stop runs the other way: the term ends (operations are left to the next leader, sessions
// end, the lease is released), then the listeners drain for a bounded time, then the queue, the client of
// nodes and the catalog are closed. The admin socket lives longest.
//
// # Leadership
//
// A term begins when the catalog grants the lease, and ends when the lease is lost, or cannot be
// renewed before it runs out by the local clock, counted from before it was asked for. All work of a
// term runs under a context that is cancelled with the reason. The catalog refuses what an older
// term still writes, whatever this process believes.
package app

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/dormouse-run/dormouse/pkg/admission"
	"github.com/dormouse-run/dormouse/pkg/config"
	"github.com/dormouse-run/dormouse/pkg/obs"
	"github.com/dormouse-run/dormouse/pkg/pki"
)

// EnvPrefix begins the names of environment variables.
const EnvPrefix = "DORMOUSE_COORDINATOR"

// Config of a coordinator. Addresses are host:port or unix:/path. Listeners on TCP speak TLS; those of the
// public API on unix sockets do not, and still ask for an API key. The node listener always
// speaks mTLS.
type Config struct {
	Listen struct {
		GRPC []string `yaml:"grpc" usage:"addresses of the public gRPC API"`
		REST []string `yaml:"rest" usage:"addresses of the public REST API"`
		Node []string `yaml:"node" usage:"addresses that nodes dial"`
	} `yaml:"listen"`
	// Holder names this process to other coordinators.
	Holder string `yaml:"holder" usage:"name of this coordinator; the host's name if empty"`
	// Advertise is where other coordinators reach the gRPC API while this one leads.
	Advertise string    `yaml:"advertise" usage:"host:port at which other coordinators pass calls on to this one while it leads; the first TCP address of listen.grpc if empty"`
	TLS       pki.Files `yaml:"tls"`
	Keys      string    `yaml:"keys_file" usage:"file with the API keys (hashed)"`
	Tickets   struct {
		Keys string        `yaml:"keys_file" usage:"file with the keys that tickets for nodes are signed with, the same for all coordinators; made if it is not there; empty: no tickets"`
		Life time.Duration `yaml:"life" usage:"how long calls may be begun with a ticket"`
	} `yaml:"tickets"`
	Ports struct {
		Idle time.Duration `yaml:"idle_timeout" usage:"how long a connection to an exposed port may be silent"`
	} `yaml:"ports"`
	WebSocket struct {
		Origins []string      `yaml:"origins" usage:"origins (https://host) whose pages may open WebSockets, beside the API's own"`
		Ping    time.Duration `yaml:"ping" usage:"how often a WebSocket's client is asked whether it is there; after two without an answer it is not"`
	} `yaml:"websocket"`
	// Tenant limits what one tenant may ask of this coordinator at a time.
	Tenant admission.Limits `yaml:"tenant"`
	Redis  struct {
		Address  string        `yaml:"address" usage:"host:port or absolute path of the Redis or Valkey server"`
		Username string        `yaml:"username" usage:"user at the server"`
		Password config.Secret `yaml:"password" usage:"password at the server"`
		DB       int           `yaml:"db" usage:"number of the database"`
		Catalog  string        `yaml:"catalog" usage:"name of the catalog inside the server"`
		CA       string        `yaml:"ca" usage:"file with the CAs of the server; TLS is used if it is given"`
	} `yaml:"redis"`
	Lease struct {
		TTL time.Duration `yaml:"ttl" usage:"life of the leader's lease"`
	} `yaml:"lease"`
	Nodes struct {
		Heartbeat     time.Duration `yaml:"heartbeat" usage:"interval of the nodes' heartbeats"`
		Missed        int           `yaml:"missed" usage:"heartbeats missed before a node is away"`
		OrphansEvery  time.Duration `yaml:"orphans_every" usage:"how long after one look for orphans on a node the next one comes"`
		OrphanGrace   time.Duration `yaml:"orphan_grace" usage:"how long what only a node's own journal calls deleted is kept all the same"`
		ReturnTime    time.Duration `yaml:"return_time" usage:"how long nodes that a coordinator does not know may take to come to it, before it takes an operator's word that something is lost"`
		PlacementWait time.Duration `yaml:"placement_wait" usage:"how long a node that is away is waited for when no other fits"`
	} `yaml:"nodes"`
	Operations struct {
		Parallel   int `yaml:"parallel" usage:"copies of one fork that are made at a time"`
		MaxPending int `yaml:"max_pending" usage:"operations in progress before QUEUE_FULL"`
		// DeletionsPerNode has a default that is narrow, since it is the disk that is waited for.
		DeletionsPerNode int `yaml:"deletions_per_node" usage:"snapshots and volumes that are removed from a node at a time"`

		Life      time.Duration `yaml:"life" usage:"how long ended operations and receipts are kept"`
		EventLife time.Duration `yaml:"event_life" usage:"how long events are kept"`
	} `yaml:"operations"`
	Admin string        `yaml:"admin_socket" usage:"unix socket for metrics, profiles and health, for root only; none if empty"`
	Stop  time.Duration `yaml:"stop_grace" usage:"how long calls may go on when the process is told to stop"`
	Log   obs.LogConfig `yaml:"log"`
}

// DefaultConfig is what is not said otherwise.
func DefaultConfig() Config {
	var c Config
	c.Listen.GRPC = []string{"127.0.0.1:7443"}
	c.Listen.REST = []string{"127.0.0.1:7080"}
	c.Listen.Node = []string{"127.0.0.1:7444"}
	c.Redis.Address = "127.0.0.1:6379"
	c.Redis.Catalog = "dormouse"
	c.Tenant = admission.DefaultLimits()
	c.Lease.TTL = 6 * time.Second
	c.Tickets.Life = 2 * time.Minute
	c.Ports.Idle = 5 * time.Minute
	c.WebSocket.Ping = 30 * time.Second
	c.Nodes.Heartbeat = 2 * time.Second
	c.Nodes.Missed = 4
	c.Nodes.PlacementWait = 10 * time.Second
	c.Nodes.OrphansEvery = 10 * time.Minute
	c.Nodes.OrphanGrace = 10 * time.Minute
	c.Nodes.ReturnTime = 15 * time.Second
	c.Operations.Parallel = 4
	c.Operations.MaxPending = 8192
	c.Operations.DeletionsPerNode = 4
	c.Operations.Life = 24 * time.Hour
	c.Operations.EventLife = time.Hour
	c.Admin = "/run/dormouse/coordinator/admin.sock"
	c.Stop = 5 * time.Second
	c.Log = obs.DefaultLog()
	return c
}

// Validate tells what is wrong, all of it.
func (c *Config) Validate() error {
	var all []error
	fail := func(key, format string, args ...any) {
		all = append(all, fmt.Errorf("%s: "+format, append([]any{key}, args...)...))
	}
	if c.Holder == "" {
		name, err := os.Hostname()
		if err != nil {
			fail("holder", "the host has no name: %v", err)
		}
		c.Holder = name
	}
	c.validateListen(fail)
	if c.TLS.CA == "" || c.TLS.Cert == "" || c.TLS.Key == "" {
		fail("tls", "ca, cert and key are needed: nodes are only met over mTLS")
	}
	if !c.Tenant.Valid() {
		fail("tenant", "no limit is below zero, and a rate needs a burst; 0 is no limit")
	}
	if c.Tickets.Life < 5*time.Second || c.Tickets.Life > time.Hour {
		fail("tickets.life", "5s to 1h")
	}
	if c.Ports.Idle < 100*time.Millisecond {
		fail("ports.idle_timeout", "at least 100ms")
	}
	c.validateWebSocket(fail)
	if c.Lease.TTL < 500*time.Millisecond {
		fail("lease.ttl", "at least 500ms")
	}
	if c.Nodes.Heartbeat < 10*time.Millisecond || c.Nodes.Missed < 2 {
		fail("nodes", "a heartbeat of at least 10ms, and at least 2 missed")
	}
	if c.Nodes.ReturnTime < 0 || c.Nodes.ReturnTime > time.Hour {
		fail("nodes.return_time", "0 to 1h")
	}
	if c.Nodes.OrphansEvery < time.Second || c.Nodes.OrphanGrace < 0 {
		fail("nodes.orphans_every", "at least 1s, and no grace below 0")
	}
	if c.Operations.Life < time.Minute {
		fail("operations.life", "at least a minute")
	}
	if c.Operations.DeletionsPerNode < 1 {
		fail("operations.deletions_per_node", "at least 1")
	}
	return errors.Join(all...)
}

// validateWebSocket is Validate for WebSockets.
func (c *Config) validateWebSocket(fail func(key, format string, args ...any)) {
	if c.WebSocket.Ping < 100*time.Millisecond {
		fail("websocket.ping", "at least 100ms")
	}
	for _, o := range c.WebSocket.Origins {
		if u, err := url.Parse(o); err != nil || u.Host == "" || u.Scheme+"://"+u.Host != o {
			fail("websocket.origins", "%q is no origin; write https://host or https://host:port", o)
		}
	}
}

// validateListen is Validate for the addresses.
func (c *Config) validateListen(fail func(key, format string, args ...any)) {
	for key, list := range map[string][]string{"listen.grpc": c.Listen.GRPC, "listen.rest": c.Listen.REST, "listen.node": c.Listen.Node} {
		for _, a := range list {
			if !strings.HasPrefix(a, "unix:/") && !strings.Contains(a, ":") {
				fail(key, "%q is neither host:port nor unix:/path", a)
			}
		}
	}
	if c.Advertise != "" {
		if _, _, err := net.SplitHostPort(c.Advertise); err != nil {
			fail("advertise", "%q is not host:port", c.Advertise)
		}
	}
	if len(c.Listen.GRPC) == 0 || len(c.Listen.Node) == 0 {
		fail("listen", "the gRPC API and the nodes need an address each")
	}
}
