// Package cluster runs a whole Dormouse on one machine: the real parts of package stack, and on top of
// them one coordinator and an agentd for each node, with their own binaries, certificates and keys.
package cluster

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"go.yaml.in/yaml/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/pki"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/fabric"
	"github.com/dormouse-run/dormouse/test/images"
	"github.com/dormouse-run/dormouse/test/proof"
	"github.com/dormouse-run/dormouse/test/stack"
	"github.com/dormouse-run/dormouse/test/tools"
)

// Cluster is a stack with its daemons.
type Cluster struct {
	*stack.Stack
	// Client speaks to the coordinator as the stack's operator.
	Client *client.Client
	// KeepLeases leaves it to the leases themselves when they end.
	KeepLeases bool

	settings Settings
}

// Settings of the daemons that are not the same for all clusters.
type Settings struct {
	// Memory that each node offers; 8Gi if empty, since two nodes share the machine.
	Memory string
	// RaiseLimits has the nodes raise limits of this machine, for runs with more sandboxes than those allow. Tests leave it as it is.
	RaiseLimits bool
	// LogLevel of the daemons; debug if empty.
	LogLevel string
	// NoAgents leaves it to the caller to give the coordinator nodes, at NodeSocket.
	NoAgents bool
}

// ready is how long a daemon may take to be of use on a busy machine.
const ready = 2 * time.Minute

// New starts a cluster for one test and ends it with the test.
func New(t testing.TB, opts stack.Options) *Cluster {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	s := stack.New(t, opts)
	c := &Cluster{Stack: s}
	if err := c.startDaemons(ctx); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Client.Close() })
	return c
}

// Up starts a cluster; after an error nothing is left.
func Up(ctx context.Context, opts stack.Options) (*Cluster, error) {
	return UpWith(ctx, opts, Settings{})
}

// UpWith is Up with settings.
func UpWith(ctx context.Context, opts stack.Options, settings Settings) (*Cluster, error) {
	s, err := stack.Up(ctx, opts)
	if err != nil {
		return nil, err
	}
	c := &Cluster{Stack: s, settings: settings}
	if err := c.startDaemons(ctx); err != nil {
		return nil, errors.Join(err, s.Down(context.WithoutCancel(ctx)))
	}
	return c, nil
}

// NewPassword makes a password for a registry that lives as long as a test.
func NewPassword() string {
	b := make([]byte, 18)
	_, _ = rand.Read(b) // never fails, by its contract
	return base64.RawURLEncoding.EncodeToString(b)
}

func (c *Cluster) startDaemons(ctx context.Context) error {
	if err := c.writeConfigs(); err != nil {
		return err
	}
	if err := c.StartCoordinatorReady(ctx); err != nil {
		return err
	}
	cl, err := client.Dial(c.clientConfig())
	if err != nil {
		return err
	}
	c.Client = cl
	if c.settings.NoAgents {
		return nil
	}
	for i := 1; i <= c.Nodes; i++ {
		if err := c.StartAgentdReady(ctx, i); err != nil {
			return err
		}
	}
	return nil
}

// ---- configuration ------------------------------------------------------------

// GRPCSocket and RESTSocket are the public API's, for who is not inside the fabric.
func (c *Cluster) GRPCSocket() string { return filepath.Join(c.Dir, "api.sock") }

// RESTSocket is where the REST API listens.
func (c *Cluster) RESTSocket() string { return filepath.Join(c.Dir, "rest.sock") }

// NodeSocket is where the coordinator takes nodes that are not inside the fabric.
func (c *Cluster) NodeSocket() string { return filepath.Join(c.Dir, "nodes.sock") }

// AdminSocket has the coordinator's metrics and profiles.
func (c *Cluster) AdminSocket() string { return filepath.Join(c.Dir, "admin.sock") }

// Ports of the daemons, at addresses that exist inside the stack's own namespaces only.
const (
	grpcPort, nodePort, restPort, agentPort, directPort = "7443", "7444", "7080", "7421", "7422"
	// Those of the standby.
	grpcPort2, nodePort2 = "7453", "7454"
)

// AgentAddress is where node i's agentd listens, inside the fabric.
func (c *Cluster) AgentAddress(i int) string { return net.JoinHostPort(fabric.NodeAddr(i), agentPort) }

// NetworkCIDR is the range of the sandboxes' addresses on each node.
const NetworkCIDR = "10.89.0.0/24"

// NameServer is who the nodes ask for the names that sandboxes ask for; a test that needs one serves there.
const NameServer = fabric.HubAddr + ":5353"

// DirectAddr is where node i serves clients with tickets, inside the fabric.
func (c *Cluster) DirectAddr(i int) string { return fabric.NodeAddr(i) + ":" + directPort }

// TicketKeys is the file of the keys that tickets are signed with.
func (c *Cluster) TicketKeys() string { return filepath.Join(c.Dir, "tickets.yaml") }

// StandbySocket is the gRPC API of a second coordinator, which is there once StartStandbyReady started it.
func (c *Cluster) StandbySocket() string { return filepath.Join(c.Dir, "standby.sock") }

type dict = map[string]any

func tlsKeys(f pki.Files) dict { return dict{"ca": f.CA, "cert": f.Cert, "key": f.Key} }

func (c *Cluster) writeConfigs() error {
	memory, level := cmp.Or(c.settings.Memory, "8Gi"), cmp.Or(c.settings.LogLevel, "debug")
	coordinator := dict{
		"listen": dict{
			"grpc": []string{"unix:" + c.GRPCSocket(), fabric.HubAddr + ":" + grpcPort},
			"rest": []string{"unix:" + c.RESTSocket(), fabric.HubAddr + ":" + restPort},
			"node": []string{"unix:" + c.NodeSocket(), fabric.HubAddr + ":" + nodePort},
		},
		"holder":    holder,
		"tls":       tlsKeys(c.CoordinatorTLS()),
		"keys_file": c.APIKeys(),
		"tickets":   dict{"keys_file": c.TicketKeys()},
		"redis":     dict{"address": c.RedisSocket()},
		// Heartbeats are frequent because tests wait for what they tell. What is long is longer than a busy
		// machine stands still: see EndLease.
		"lease":        dict{"ttl": "20s"},
		"nodes":        dict{"heartbeat": "500ms", "missed": 40},
		"admin_socket": c.AdminSocket(),
		"log":          dict{"level": level, "format": "json"},
	}
	if err := writeYAML(c.CoordinatorConfig(), coordinator); err != nil {
		return err
	}
	coordinator["listen"] = dict{
		"grpc": []string{"unix:" + c.StandbySocket(), fabric.HubAddr + ":" + grpcPort2}, "rest": []string{},
		"node": []string{fabric.HubAddr + ":" + nodePort2},
	}
	coordinator["holder"], coordinator["admin_socket"] = standbyHolder, filepath.Join(c.Dir, "standby-admin.sock")
	if err := writeYAML(c.StandbyConfig(), coordinator); err != nil {
		return err
	}
	mkfs, err := tools.Find("mkfs.erofs")
	if err != nil {
		return err
	}
	for i := 1; i <= c.Nodes; i++ {
		registry := dict{"ca_files": []string{c.RegistryCA()}}
		if c.RegistryUser != "" {
			if registry["docker_config"], err = c.writeDockerConfig(i); err != nil {
				return err
			}
		}
		agentd := dict{
			"node":         stack.NodeName(i),
			"state_dir":    c.NodeDir(i),
			"run_dir":      filepath.Join(c.NodeDir(i), "run"),
			"cgroup":       c.CgroupParent(i),
			"protect":      dict{"cgroup": c.CgroupParent(i) + "-agentd"},
			"layers":       dict{"root": c.LayersDir(), "mkfs": mkfs},
			"containerd":   dict{"socket": c.ContainerdSocket(i), "namespace": stack.ContainerdNamespace},
			"registry":     registry,
			"bundle":       dict{"dir": filepath.Join(c.Bin, "bundle")},
			"listen":       fabric.NodeAddr(i) + ":" + agentPort,
			"direct":       dict{"listen": c.DirectAddr(i)},
			"coordinator":  fabric.HubAddr + ":" + nodePort + "," + fabric.HubAddr + ":" + nodePort2,
			"tls":          tlsKeys(c.NodeTLS(i)),
			"labels":       dict{"zone": fmt.Sprintf("z%d", i)},
			"raise_limits": c.settings.RaiseLimits,
			"limits":       dict{"cpu_millis": 8000, "memory": memory},
			// In the node's own namespace, so that the same addresses are of use on every node.
			"network": dict{"cidr": NetworkCIDR, "ready": 2, "resolvers": []string{NameServer}},
			"log":     dict{"level": level, "format": "json"},
		}
		if err := writeYAML(c.AgentdConfig(i), agentd); err != nil {
			return err
		}
	}
	return nil
}

// writeDockerConfig gives node i the registry's credentials, as docker login would.
func (c *Cluster) writeDockerConfig(i int) (string, error) {
	secret, err := os.ReadFile(c.RegistryPasswordFile())
	if err != nil {
		return "", fmt.Errorf("registry password: %w", err)
	}
	auth := base64.StdEncoding.EncodeToString([]byte(c.RegistryUser + ":" + strings.TrimSpace(string(secret))))
	data, err := json.Marshal(dict{"auths": dict{c.RegistryHost(): dict{"auth": auth}}})
	if err != nil {
		return "", err
	}
	file := filepath.Join(c.NodeDir(i), "docker.json")
	return file, os.WriteFile(file, data, 0o600)
}

func writeYAML(file string, v any) error {
	data, err := yaml.Marshal(v)
	if err != nil {
		return err
	}
	return os.WriteFile(file, data, 0o600)
}

// Env is what the dormouse and agentctl commands need to reach the cluster.
func (c *Cluster) Env() []string {
	return []string{
		"DORMOUSE_ADDR=unix://" + c.GRPCSocket(),
		"DORMOUSE_API_KEY_FILE=" + c.APIKeyFile(),
		"AGENTCTL_SOCKET=" + c.DebugSocket(1),
	}
}

func (c *Cluster) clientConfig() client.Config {
	return client.Config{Addr: "unix://" + c.GRPCSocket(), APIKeyFile: c.APIKeyFile()}
}

// ClientOf gives a client with a key of its own for a tenant.
func (c *Cluster) ClientOf(t testing.TB, tenant string) *client.Client {
	t.Helper()
	cl, err := c.Dial(tenant)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cl.Close() })
	return cl
}

// Dial is ClientOf for who closes it.
func (c *Cluster) Dial(tenant string) (*client.Client, error) {
	key, err := c.NewAPIKey(tenant)
	if err != nil {
		return nil, err
	}
	return client.Dial(client.Config{Addr: "unix://" + c.GRPCSocket(), APIKey: key})
}

// ---- daemons --------------------------------------------------------------------

// StartCoordinatorReady starts the coordinator and waits until it leads, or another does. It does not wait for the
// lease of one that was killed, unless KeepLeases is set.
func (c *Cluster) StartCoordinatorReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, ready)
	defer cancel()
	if !c.KeepLeases && !c.Running("coordinator") {
		_ = c.EndLease(ctx) // without a store to tell, it runs out by itself
	}
	return c.StartCoordinator(ctx, func(ctx context.Context) error {
		cl, err := client.Dial(c.clientConfig())
		if err != nil {
			return err
		}
		defer func() { _ = cl.Close() }()
		for _, err := range cl.ListNodes(ctx) {
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// StartStandbyReady starts a second coordinator and waits until it answers.
func (c *Cluster) StartStandbyReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, ready)
	defer cancel()
	return c.StartStandby(ctx, func(ctx context.Context) error {
		cl, err := client.Dial(client.Config{Addr: "unix://" + c.StandbySocket(), APIKeyFile: c.APIKeyFile()})
		if err != nil {
			return err
		}
		defer cl.Close()
		_, err = client.Collect(cl.ListVolumes(ctx, &dormousev1.ListVolumesRequest{}))
		return err
	})
}

// StartAgentdReady starts the agentd of node i and waits until it has recovered and the coordinator
// takes it for online in its new session.
func (c *Cluster) StartAgentdReady(ctx context.Context, i int) error {
	ctx, cancel := context.WithTimeout(ctx, ready)
	defer cancel()
	return c.StartAgentd(ctx, i, func(ctx context.Context) error {
		over, err := c.Overview(ctx, i)
		if err != nil {
			return err
		}
		if !over.GetConnected() {
			return errors.New("no session with the coordinator yet")
		}
		node, err := c.Client.GetNode(ctx, stack.NodeName(i))
		if err != nil {
			return err
		}
		if !node.GetOnline() || node.GetSessionEpoch() != over.GetSessionEpoch() {
			return errors.New("not online in its new session yet")
		}
		return nil
	})
}

// AgentdPID is the process of the agentd of node i.
func (c *Cluster) AgentdPID(i int) int { return c.PID(fmt.Sprintf("agentd%d", i)) }

// DebugSocket is agentctl's socket on node i.
func (c *Cluster) DebugSocket(i int) string {
	return filepath.Join(c.NodeDir(i), "run", "agentd.sock")
}

func (c *Cluster) debug(i int, call func(nodev1.DebugServiceClient) error) error {
	cc, err := grpc.NewClient("unix://"+c.DebugSocket(i), grpc.WithTransportCredentials(insecure.NewCredentials())) // a root-only unix socket
	if err != nil {
		return err
	}
	defer func() { _ = cc.Close() }()
	return call(nodev1.NewDebugServiceClient(cc))
}

// Overview asks the agentd of node i how it is.
func (c *Cluster) Overview(ctx context.Context, i int) (over *nodev1.OverviewResponse, err error) {
	err = c.debug(i, func(d nodev1.DebugServiceClient) error {
		over, err = d.Overview(ctx, &nodev1.OverviewRequest{})
		return err
	})
	return over, err
}

// Doctor gives what the doctor of node i finds.
func (c *Cluster) Doctor(ctx context.Context, i int) ([]*nodev1.Finding, error) {
	return c.doctor(ctx, i, false)
}

// Fix has the doctor of node i remove what may be removed, and gives what it found.
func (c *Cluster) Fix(ctx context.Context, i int) ([]*nodev1.Finding, error) {
	return c.doctor(ctx, i, true)
}

func (c *Cluster) doctor(ctx context.Context, i int, fix bool) (found []*nodev1.Finding, err error) {
	err = c.debug(i, func(d nodev1.DebugServiceClient) error {
		r, err := d.Doctor(ctx, &nodev1.DoctorRequest{Fix: fix})
		found = r.GetFindings()
		return err
	})
	return found, err
}

// ---- images and the subject -------------------------------------------------------

// PushSubject pushes Debian with Python and the subject of package proof, and returns its reference
// by digest.
func (c *Cluster) PushSubject(ctx context.Context, repository string) (string, error) {
	base, err := images.ReadLayout(images.CachedDir("python"))
	if err != nil {
		return "", err
	}
	layer, err := images.Layer(images.File(strings.TrimPrefix(proof.SubjectPath, "/"), string(proof.Subject), 0o644))
	if err != nil {
		return "", err
	}
	image, err := mutate.AppendLayers(base, layer)
	if err != nil {
		return "", fmt.Errorf("subject's image: %w", err)
	}
	registry, err := c.Registry()
	if err != nil {
		return "", err
	}
	digest, err := registry.Push(ctx, repository, image)
	if err != nil {
		return "", err
	}
	return registry.Ref(repository) + "@" + digest, nil
}

// Exec runs a command in a sandbox and returns its standard output; a code other than 0 is an error.
func Exec(ctx context.Context, s *client.Sandbox, argv ...string) ([]byte, error) {
	var out, errOut strings.Builder
	_, exit, err := s.Run(ctx, &dormousev1.ProcessSpec{Argv: argv}, nil, &client.Output{Stdout: &out, Stderr: &errOut}, nil)
	if err != nil {
		return nil, err
	}
	if exit.GetCode() != 0 {
		return nil, fmt.Errorf("%v ended with code %d: %s%s", argv, exit.GetCode(), out.String(), errOut.String())
	}
	return []byte(out.String()), nil
}

// Ask gets one answer of the subject in a sandbox.
func Ask(ctx context.Context, s *client.Sandbox) (proof.Answer, error) {
	out, err := Exec(ctx, s, "python3", proof.SubjectPath, "ask")
	if err != nil {
		return proof.Answer{}, err
	}
	return proof.Parse(out)
}
