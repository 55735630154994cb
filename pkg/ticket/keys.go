package ticket

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/dormouse-run/dormouse/pkg/dataplane"
	"github.com/dormouse-run/dormouse/pkg/durable"
)

// Keys is the file of private keys. The first signs; all of them are told to nodes. So a key is replaced without
// a gap: the new one is added below, moved to the top once nodes know it (a heartbeat later), and the old one
// removed when its last tickets have ended. All coordinators have the same file; it is read again when it changes.
type Keys struct {
	path     string
	onReload func(error)

	mu    sync.Mutex
	seen  os.FileInfo
	keys  []key
	clock func() time.Time
}

type key struct {
	id      string
	private ed25519.PrivateKey
}

type keyFile struct {
	Keys []keyEntry `yaml:"keys"`
}

type keyEntry struct {
	ID string `yaml:"id"`
	// Seed is the private key: 32 bytes, base64.
	Seed string `yaml:"seed"`
}

const (
	maxKeys  = 16
	maxKeyID = 64
)

// OpenKeys reads the file. If there is none it is made, with one key and mode 0600: enough for one coordinator.
// Later onReload (may be nil) is told of each attempt to read it again; while that fails the keys before stay.
func OpenKeys(path string, onReload func(error)) (*Keys, error) {
	k := &Keys{path: path, onReload: onReload, clock: time.Now}
	if k.onReload == nil {
		k.onReload = func(error) {}
	}
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		if err := generate(path); err != nil {
			return nil, fmt.Errorf("tickets: %w", err)
		}
	}
	return k, k.load()
}

// generate makes the file, unless another was quicker.
func generate(path string) error {
	id := make([]byte, 6)
	seed := make([]byte, ed25519.SeedSize)
	_, _ = rand.Read(id) // never fails, by its contract
	_, _ = rand.Read(seed)
	data, err := yaml.Marshal(keyFile{Keys: []keyEntry{{ID: hex.EncodeToString(id), Seed: base64.StdEncoding.EncodeToString(seed)}}})
	if err != nil {
		return err
	}
	if err := durable.CreateFile(path, data); !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil
}

func (k *Keys) load() error {
	info, err := os.Stat(k.path)
	if err != nil {
		return fmt.Errorf("tickets: %w", err)
	}
	if info.Mode().Perm()&0o077 != 0 {
		return fmt.Errorf("tickets: %s has mode %o; it holds private keys: let its owner alone read it (0600)", k.path, info.Mode().Perm())
	}
	data, err := os.ReadFile(k.path)
	if err != nil {
		return fmt.Errorf("tickets: %w", err)
	}
	keys, err := parse(data)
	if err != nil {
		return fmt.Errorf("tickets: %s: %w", k.path, err)
	}
	k.seen, k.keys = info, keys
	return nil
}

func parse(data []byte) ([]key, error) {
	var file keyFile
	dec := yaml.NewDecoder(bytes.NewReader(data))
	dec.KnownFields(true)
	if dec.Decode(&file) != nil { // its error quotes values
		return nil, errors.New("it is no list of keys (keys: [{id, seed}])")
	}
	if n := len(file.Keys); n == 0 || n > maxKeys {
		return nil, fmt.Errorf("it has %d keys; 1 to %d are wanted", n, maxKeys)
	}
	var keys []key
	for i, e := range file.Keys {
		seed, err := base64.StdEncoding.DecodeString(e.Seed)
		if err != nil || len(seed) != ed25519.SeedSize {
			return nil, fmt.Errorf("key %d: the seed is %d bytes in base64", i+1, ed25519.SeedSize)
		}
		if e.ID == "" || len(e.ID) > maxKeyID {
			return nil, fmt.Errorf("key %d: an id of 1 to %d bytes", i+1, maxKeyID)
		}
		for _, other := range keys {
			if other.id == e.ID {
				return nil, fmt.Errorf("key %d: the id %q is another's", i+1, e.ID)
			}
		}
		keys = append(keys, key{e.ID, ed25519.NewKeyFromSeed(seed)})
	}
	return keys, nil
}

// current gives the keys of the file as it is now.
func (k *Keys) current() []key {
	k.mu.Lock()
	defer k.mu.Unlock()
	now, err := os.Stat(k.path)
	if err == nil && (now.Size() != k.seen.Size() || !now.ModTime().Equal(k.seen.ModTime()) || !os.SameFile(now, k.seen)) {
		k.onReload(k.load())
	}
	return k.keys
}

// Public gives what nodes verify with.
func (k *Keys) Public() []PublicKey {
	var all []PublicKey
	for _, key := range k.current() {
		all = append(all, PublicKey{ID: key.id, Key: key.private.Public().(ed25519.PublicKey)})
	}
	return all
}

// Issue makes a ticket that lives for a time.
func (k *Keys) Issue(tenant, sandboxUID, node string, verbs []dataplane.Verb, life time.Duration) (string, error) {
	first := k.current()[0]
	return encode(Claims{Key: first.id, Tenant: tenant, SandboxUID: sandboxUID, Verbs: verbs, Node: node, Expires: k.clock().Add(life).Unix()}, first.private)
}

// Check gives what a ticket says, whatever node it is for. TICKET_INVALID: get another one.
func (k *Keys) Check(text string) (Claims, error) {
	keys := k.current()
	return check(text, func(id string) (ed25519.PublicKey, bool) {
		for _, key := range keys {
			if key.id == id {
				return key.private.Public().(ed25519.PublicKey), true
			}
		}
		return nil, false
	}, k.clock())
}
