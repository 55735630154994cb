// Package apikey is how clients without a certificate are known: a file of keys, each with the
// tenant it is for. The file has only hashes, so who reads it can do nothing with it.
//
// A key is dm_<id>_<secret>: the id (12 hexadecimal digits) finds the row and may be shown and
// logged, the secret (32 random bytes, base64url) is shown once, when the key is made. A random
// secret of that length needs no slow hash.
package apikey

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/dormouse-run/dormouse/pkg/durable"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// Role is what a key may do: RoleUser acts within its tenant, RoleOperator also on nodes and images.
type Role string

// The roles of keys.
const (
	RoleUser     Role = "user"
	RoleOperator Role = "operator"
)

// Entry is one key in the file, without its secret.
type Entry struct {
	ID      string    `yaml:"id" json:"id"`
	Tenant  string    `yaml:"tenant" json:"tenant"`
	Role    Role      `yaml:"role" json:"role"`
	SHA256  string    `yaml:"sha256" json:"-"`
	Note    string    `yaml:"note,omitempty" json:"note,omitempty"`
	Created time.Time `yaml:"created" json:"created"`
}

// document is the file.
type document struct {
	Keys []Entry `yaml:"keys"`
}

var (
	tenantForm = regexp.MustCompile(`^[a-zA-Z0-9]([a-zA-Z0-9._-]{0,61}[a-zA-Z0-9])?$`)
	keyForm    = regexp.MustCompile(`^dm_([0-9a-f]{12})_([A-Za-z0-9_-]{43})$`)
)

// New makes a key: the text to give away, and the row to keep.
func New(tenant string, role Role, note string) (key string, e Entry, err error) {
	if !tenantForm.MatchString(tenant) {
		return "", Entry{}, fmt.Errorf("tenant %q: 1 to 63 letters, digits, '.', '_' and '-', beginning and ending with a letter or digit", tenant)
	}
	if role != RoleUser && role != RoleOperator {
		return "", Entry{}, fmt.Errorf("role %q: user or operator", role)
	}
	var id [6]byte
	var secret [32]byte
	if _, err := rand.Read(id[:]); err != nil {
		return "", Entry{}, err
	}
	if _, err := rand.Read(secret[:]); err != nil {
		return "", Entry{}, err
	}
	e = Entry{ID: hex.EncodeToString(id[:]), Tenant: tenant, Role: role, Note: note, Created: time.Now().UTC().Truncate(time.Second)}
	key = "dm_" + e.ID + "_" + base64.RawURLEncoding.EncodeToString(secret[:])
	e.SHA256 = hash(key)
	return key, e, nil
}

func hash(key string) string {
	sum := sha256.Sum256([]byte(key))
	return hex.EncodeToString(sum[:])
}

// ID gives the id of a key, for logs, or "" for what is not a key.
func ID(key string) string {
	if m := keyForm.FindStringSubmatch(key); m != nil {
		return m[1]
	}
	return ""
}

// Read gives the rows of a file; a file that is not there has none.
func Read(file string) ([]Entry, error) {
	f, err := os.Open(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var d document
	dec := yaml.NewDecoder(f)
	dec.KnownFields(true)
	if err := dec.Decode(&d); err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	seen := make(map[string]bool)
	for i, e := range d.Keys {
		if _, err := hex.DecodeString(e.SHA256); err != nil || len(e.SHA256) != 64 || e.ID == "" || seen[e.ID] ||
			!tenantForm.MatchString(e.Tenant) || e.Role != RoleUser && e.Role != RoleOperator {
			return nil, fmt.Errorf("%s: key %d (id %q) is malformed or there twice", file, i, e.ID)
		}
		seen[e.ID] = true
	}
	return d.Keys, nil
}

// Write replaces the file as a whole, readable by the owner only. Once it returns, a revoked key stays
// revoked, also after a power failure.
func Write(file string, entries []Entry) error {
	data, err := yaml.Marshal(document{entries})
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		return err
	}
	return durable.WriteFile(file, data)
}

// Keyring checks keys against a file, which it reads again when it changed: a key that was made
// works at once, and one that was revoked stops at once. It is safe for concurrent use.
type Keyring struct {
	file     string
	onReload func(error)

	mu      sync.Mutex
	seen    os.FileInfo
	entries map[string]Entry
}

// OpenKeyring reads the file, which must be there.
func OpenKeyring(file string, onReload func(error)) (*Keyring, error) {
	if onReload == nil {
		onReload = func(error) {}
	}
	k := &Keyring{file: file, onReload: onReload}
	if err := k.load(); err != nil {
		return nil, err
	}
	return k, nil
}

func (k *Keyring) load() error {
	fi, err := os.Stat(k.file)
	if err != nil {
		return fmt.Errorf("API keys: %w", err)
	}
	list, err := Read(k.file)
	if err != nil {
		return fmt.Errorf("API keys: %w", err)
	}
	entries := make(map[string]Entry, len(list))
	for _, e := range list {
		entries[e.ID] = e
	}
	k.seen, k.entries = fi, entries
	return nil
}

// refresh reads the file again if it changed. While it cannot be read the old rows count.
func (k *Keyring) refresh() {
	fi, err := os.Stat(k.file)
	if err == nil && os.SameFile(fi, k.seen) && fi.Size() == k.seen.Size() && fi.ModTime().Equal(k.seen.ModTime()) {
		return
	}
	k.onReload(k.load())
}

// Check gives the row of a key, or CREDENTIALS_MISSING or CREDENTIALS_INVALID. The error says
// nothing of which part was wrong.
func (k *Keyring) Check(key string) (Entry, error) {
	if key == "" {
		return Entry{}, errs.New(errs.CredentialsMissing, "an API key is needed: send it as 'authorization: Bearer KEY' (the CLI takes DORMOUSE_API_KEY)")
	}
	k.mu.Lock()
	k.refresh()
	e, ok := k.entries[ID(key)]
	k.mu.Unlock()
	if !ok {
		e.SHA256 = strings.Repeat("0", 64) // compare anyway: the time says nothing
	}
	if subtle.ConstantTimeCompare([]byte(hash(key)), []byte(strings.ToLower(e.SHA256))) != 1 || !ok {
		return Entry{}, errs.New(errs.CredentialsInvalid, "the API key is not known here or was revoked; ask the operator for a new one")
	}
	return e, nil
}

// FromBearer gives the key in an Authorization header's value, or "".
func FromBearer(header string) string {
	scheme, key, ok := strings.Cut(header, " ")
	if !ok || !strings.EqualFold(scheme, "bearer") {
		return ""
	}
	return strings.TrimSpace(key)
}
