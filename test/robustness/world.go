package robustness

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/dormouse-run/dormouse/agentd/simulated"
	"github.com/dormouse-run/dormouse/pkg/apikey"
	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/pki"
)

// Coordinators and nodes of a world.
const (
	coordinators = 2
	nodes        = 2
)

// lease is how long a coordinator that was killed or stopped is waited for.
const lease = 1500 * time.Millisecond

// tenant of all traffic.
const tenant = "acme"

// world is one system under test, of processes and files of its own.
type world struct {
	dir   string
	redis *redisServer
	coord [coordinators]*process
	link  [coordinators]*link
	// user and operator speak to each of the coordinators.
	user, operator [coordinators]*client.Client

	nodes   [nodes]*simulated.Machine
	closers []func() error

	mu     sync.Mutex
	agents [nodes]*simulated.Agent
}

// newWorld starts a system: a server, coordinators of the binary, nodes, which have each image that the function does not refuse. It
// returns when the nodes are in session.
func newWorld(ctx context.Context, binary, variant string, image func(context.Context, string) error) (w *world, err error) {
	dir, err := os.MkdirTemp("", "dmr")
	if err != nil {
		return nil, err
	}
	w = &world{dir: dir}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.close())
		}
	}()
	if w.redis, err = newRedis(dir); err != nil {
		return w, err
	}
	w.onClose(w.redis.close)
	if err := w.redis.up(ctx); err != nil {
		return w, err
	}
	ca, err := pki.NewCA("robustness")
	if err != nil {
		return w, err
	}
	if err := os.WriteFile(w.path("ca.pem"), ca.CertPEM(), 0o600); err != nil {
		return w, err
	}
	if err := w.openCoordinators(ca, binary, variant); err != nil {
		return w, err
	}
	if err := w.openNodes(ctx, ca, image); err != nil {
		return w, err
	}
	return w, w.ready(ctx)
}

func (w *world) path(name string) string { return filepath.Join(w.dir, name) }

func (w *world) onClose(fn func() error) { w.closers = append(w.closers, fn) }

// close ends everything and removes the files.
func (w *world) close() error {
	var all []error
	for _, fn := range slices.Backward(w.closers) {
		all = append(all, fn())
	}
	return errors.Join(append(all, os.RemoveAll(w.dir))...)
}

func issue(ca *pki.CA, dir, name string, id pki.Identity) (pki.Files, error) {
	f := pki.Files{CA: filepath.Join(dir, "ca.pem"), Cert: filepath.Join(dir, name+".pem"), Key: filepath.Join(dir, name+".key")}
	pair, err := ca.Issue(id, "127.0.0.1", "localhost")
	if err != nil {
		return f, err
	}
	return f, pair.Save(f.Cert, f.Key)
}

type dict = map[string]any

func (w *world) openCoordinators(ca *pki.CA, binary, variant string) error {
	userKey, user, err := apikey.New(tenant, apikey.RoleUser, "")
	if err != nil {
		return err
	}
	operatorKey, operator, err := apikey.New("ops", apikey.RoleOperator, "")
	if err != nil {
		return err
	}
	if err := apikey.Write(w.path("keys.yaml"), []apikey.Entry{user, operator}); err != nil {
		return err
	}
	for i := range coordinators {
		name := fmt.Sprintf("c%d", i)
		files, err := issue(ca, w.dir, name, pki.Identity{Role: pki.RoleCoordinator, Name: name})
		if err != nil {
			return err
		}
		if w.link[i], err = newLink(w.path("l"+name), w.redis.socket); err != nil {
			return err
		}
		w.onClose(w.link[i].close)
		config, err := yaml.Marshal(dict{
			"listen": dict{"grpc": []string{"unix:" + w.api(i), "127.0.0.1:0"}, "rest": []string{}, "node": []string{"unix:" + w.nodeAPI(i)}},
			"holder": name, "tls": dict{"ca": files.CA, "cert": files.Cert, "key": files.Key}, "keys_file": w.path("keys.yaml"),
			"redis": dict{"address": w.link[i].socket}, "lease": dict{"ttl": lease.String()},
			"nodes":        dict{"heartbeat": "200ms", "missed": 15, "placement_wait": "10m"},
			"tenant":       dict{}, // the traffic is one tenant's
			"admin_socket": "", "log": dict{"level": "info"},
		})
		if err != nil {
			return err
		}
		if err := os.WriteFile(w.path(name+".yaml"), config, 0o600); err != nil {
			return err
		}
		w.coord[i] = &process{path: binary, args: []string{"--config", w.path(name + ".yaml")}, log: w.path(name + ".log"), env: []string{"DORMOUSE_MUTANT=" + variant}}
		w.onClose(w.coord[i].kill)
		if err := w.coord[i].start(); err != nil {
			return err
		}
		for key, into := range map[string]*[coordinators]*client.Client{userKey: &w.user, operatorKey: &w.operator} {
			if into[i], err = client.Dial(client.Config{Addr: "unix://" + w.api(i), APIKey: key}); err != nil {
				return err
			}
			w.onClose(into[i].Close)
		}
	}
	return nil
}

func (w *world) api(i int) string { return w.path(fmt.Sprintf("a%d", i)) }

func (w *world) nodeAPI(i int) string { return w.path(fmt.Sprintf("n%d.sock", i)) }

func (w *world) openNodes(ctx context.Context, ca *pki.CA, image func(context.Context, string) error) error {
	var to []string
	for i := range coordinators {
		to = append(to, "unix:"+w.nodeAPI(i))
	}
	for i := range nodes {
		name := nodeName(i)
		if err := os.Mkdir(w.path(name), 0o700); err != nil {
			return err
		}
		files, err := issue(ca, w.dir, name, pki.Identity{Role: pki.RoleNode, Name: name})
		if err != nil {
			return err
		}
		log, err := os.Create(w.path(name + ".log"))
		if err != nil {
			return err
		}
		w.onClose(log.Close)
		w.nodes[i] = simulated.NewMachine(simulated.Options{Name: name, Dir: w.path(name), Coordinators: to, TLS: files,
			Log: slog.New(slog.NewTextHandler(log, nil)), Silence: 2 * time.Second, Image: image})
		w.onClose(func() error { return w.stopAgent(i) })
		if err := w.startAgent(ctx, i); err != nil {
			return err
		}
	}
	return nil
}

func (w *world) startAgent(ctx context.Context, i int) error {
	a, err := w.nodes[i].Start(ctx)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.agents[i] = a
	return err
}

// agent gives a node's agentd, if there is one.
func (w *world) agent(i int) *simulated.Agent {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.agents[i]
}

// stopAgent ends a node's agentd. Harmless when there is none.
func (w *world) stopAgent(i int) error {
	w.mu.Lock()
	a := w.agents[i]
	w.agents[i] = nil
	w.mu.Unlock()
	if a == nil {
		return nil
	}
	return a.Stop()
}

// ready waits until somebody leads and all nodes are online.
func (w *world) ready(ctx context.Context) error {
	return until(ctx, "somebody leads and the nodes are online", func() error {
		st, err := w.operator[0].CatalogStatus(ctx)
		if err != nil {
			return err
		}
		online := 0
		for _, j := range st.GetJournals() {
			if j.GetOnline() {
				online++
			}
		}
		if online < nodes || st.GetSuspended() != nil {
			return fmt.Errorf("%d of %d nodes are online; suspended: %v", online, nodes, st.GetSuspended())
		}
		return nil
	})
}
