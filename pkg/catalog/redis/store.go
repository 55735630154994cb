// Package redis keeps the catalog in a Redis or Valkey server (7.0 or newer) with durable writes.
//
// All changes go through Lua scripts that check before they write (see commit.lua); a batch of
// commits is one call. The client's own retries are off: they would be blind replays. The layout of the keys
// is described at the type layout.
//
// # What is promised
//
// The server must run with appendonly yes and appendfsync always, so that a reply means that the
// commit is on the disk; Open, and every new connection, refuses another (STORE_NOT_DURABLE).
// One that evicts keys is refused too, since an evicted record is a lost one.
//
// # Crash points
//
// A reply that does not come (server killed, connection cut, deadline) leaves a commit applied or
// not; Settle tells which. A server that was killed keeps whole scripts: its log holds each one as
// one transaction, and an incomplete one is ignored when it starts. Some servers leave a part of it in the log, though,
// so that nothing is written to a process before its log was written anew: see renew.go.
package redis

import (
	"context"
	"crypto/tls"
	_ "embed"
	"errors"
	"fmt"
	"net"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	goredis "github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

var (
	//go:embed commit.lua
	commitSource string
	//go:embed settle.lua
	settleSource string
	//go:embed lead.lua
	leadSource string
	//go:embed release.lua
	releaseSource string
	//go:embed session.lua
	sessionSource string
	//go:embed compact.lua
	compactSource string
	//go:embed migrate.lua
	migrateSource string
	//go:embed compare.lua
	compareSource string
	//go:embed suspend.lua
	suspendSource string
	//go:embed resume.lua
	resumeSource string
	//go:embed delta.lua
	deltaSource string
	//go:embed restore.lua
	restoreSource string
	//go:embed restored.lua
	restoredSource string

	commitScript  = goredis.NewScript(variant(commitSource))
	settleScript  = goredis.NewScript(settleSource)
	leadScript    = goredis.NewScript(leadSource)
	releaseScript = goredis.NewScript(releaseSource)
	sessionScript = goredis.NewScript(sessionSource)
	compactScript = goredis.NewScript(compactSource)
	migrateScript = goredis.NewScript(migrateSource)
	compareScript = goredis.NewScript(compareSource)
	suspendScript = goredis.NewScript(suspendSource)
	resumeScript  = goredis.NewScript(resumeSource)
	deltaScript   = goredis.NewScript(deltaSource)
	restoreScript = goredis.NewScript(restoreSource)

	restoredScript = goredis.NewScript(restoredSource)
)

// Options say where the catalog is. Only Address is required.
type Options struct {
	// Address is host:port, or the absolute path of a unix socket.
	Address            string
	Username, Password string
	DB                 int
	TLS                *tls.Config
	// Catalog names the catalog inside the server: letters, digits and "._-"; "dormouse" if empty.
	Catalog string
	// Connections bounds each of the two pools, for reads and for writes; 32 if zero.
	Connections int
	// DialTimeout (5 s if zero) bounds a connection; ReplyTimeout (30 s if zero) is how long a
	// reply is waited for when the context has no earlier deadline.
	DialTimeout, ReplyTimeout time.Duration
	Retention                 catalog.Retention
	// Renewed, if set, is told of each server process whose log this store had written anew, or could not have. It returns soon.
	Renewed func(Renewal)
}

// Store is a catalog.Store.
type Store struct {
	client    *goredis.Client // for what changes nothing
	writer    *goredis.Client // for the rest: see renew.go
	renewal   renewal
	keys      layout
	retention catalog.Retention

	replyTimeout time.Duration

	incarnation atomic.Pointer[string]
	seen        atomic.Pointer[catalog.Point] // nil: nothing
	putBack     atomic.Pointer[catalog.Point] // by the repair that goes on, the last; nil: nothing
	holder      atomic.Pointer[string]        // nil: no lease was granted through this store

	mu         sync.Mutex
	generation generation
}

var _ catalog.Store = (*Store)(nil)

var catalogName = regexp.MustCompile(`^[A-Za-z0-9._-]{1,64}$`)

// The client would log what it also returns.
func init() { goredis.SetLogger(silent{}) }

type silent struct{}

func (silent) Printf(context.Context, string, ...any) {}

// Open connects and checks that the server is recent enough and durable. If its log was not written anew since it started it
// has that done first: within ReplyTimeout, or it is STORE_UNAVAILABLE and goes on in the server. Close the Store.
func Open(ctx context.Context, o Options) (*Store, error) {
	if o.Catalog == "" {
		o.Catalog = "dormouse"
	}
	if !catalogName.MatchString(o.Catalog) {
		return nil, errs.New(errs.InvalidField, "a catalog's name is 1 to 64 letters, digits and \"._-\"").With("field", "catalog")
	}
	s := &Store{keys: layout("{" + o.Catalog + "}:"), retention: o.Retention.WithDefaults()}
	reads, writes := clientOptions(o), clientOptions(o)
	reads.OnConnect, writes.OnConnect = s.connected, s.writable
	s.client, s.writer = goredis.NewClient(reads), goredis.NewClient(writes)
	s.renewal, s.replyTimeout = newRenewal(o.Renewed), reads.ReadTimeout
	err := s.identify(ctx)
	if err == nil {
		err = s.adopt(ctx)
	}
	if err != nil {
		_ = s.Close() // the reason is above
		return nil, err
	}
	return s, nil
}

func clientOptions(o Options) *goredis.Options {
	network := "tcp"
	if strings.HasPrefix(o.Address, "/") {
		network = "unix"
	}
	orElse := func(d, def time.Duration) time.Duration {
		if d > 0 {
			return d
		}
		return def
	}
	pool := o.Connections
	if pool <= 0 {
		pool = 32
	}
	dial := orElse(o.DialTimeout, 5*time.Second)
	reply := orElse(o.ReplyTimeout, 30*time.Second)
	return &goredis.Options{
		Network: network, Addr: o.Address, Username: o.Username, Password: o.Password, DB: o.DB, TLSConfig: o.TLS,
		Protocol: 2, DisableIdentity: true, ContextTimeoutEnabled: true,
		MaxRetries: -1, DialerRetries: 1,
		DialTimeout: dial, ReadTimeout: reply, WriteTimeout: reply, PoolTimeout: reply,
		// A record is a few KiB; the library's 64 KiB for each connection would be most of a coordinator's memory.
		ReadBufferSize: 8 << 10, WriteBufferSize: 8 << 10,
		PoolSize:                 pool,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
		Dialer: func(ctx context.Context, network, addr string) (net.Conn, error) {
			return dialServer(ctx, network, addr, dial, o.TLS)
		},
	}
}

// dialServer makes a failed TLS handshake look like what it is, a connection that was never made.
func dialServer(ctx context.Context, network, addr string, timeout time.Duration, conf *tls.Config) (net.Conn, error) {
	d := &net.Dialer{Timeout: timeout, KeepAlive: 15 * time.Second}
	if conf == nil {
		return d.DialContext(ctx, network, addr)
	}
	conn, err := (&tls.Dialer{NetDialer: d, Config: conf}).DialContext(ctx, network, addr)
	if err != nil {
		return nil, &net.OpError{Op: "dial", Net: network, Err: err}
	}
	return conn, nil
}

// requireDurable refuses a server that may forget what it acknowledged.
func requireDurable(ctx context.Context, cn *goredis.Conn) error {
	for _, want := range []struct{ name, value, advice string }{
		{"appendonly", "yes", "set \"appendonly yes\""},
		{"appendfsync", "always", "set \"appendfsync always\""},
		{"maxmemory-policy", "noeviction", "set \"maxmemory-policy noeviction\""},
	} {
		has, err := cn.ConfigGet(ctx, want.name).Result()
		if err != nil {
			var reply goredis.Error
			if !errors.As(err, &reply) || slices.ContainsFunc([]string{"LOADING", "NOAUTH", "WRONGPASS"}, func(p string) bool { return strings.HasPrefix(reply.Error(), p) }) {
				return unavailable(err)
			}
			return errs.Wrap(err, errs.StoreNotDurable, "the store does not say whether its writes are durable; allow CONFIG GET to the coordinator's user")
		}
		if has[want.name] != want.value {
			return errs.New(errs.StoreNotDurable, "the store may forget what it acknowledged: %s is %q; %s in the server's configuration and restart it", want.name, has[want.name], want.advice)
		}
	}
	return nil
}

// informer is a connection, or a pool of them.
type informer interface {
	Info(ctx context.Context, section ...string) *goredis.StringCmd
}

// infoFields reads a section of what the server says of itself.
func infoFields(ctx context.Context, c informer, section string) (map[string]string, error) {
	info, err := c.Info(ctx, section).Result()
	if err != nil {
		return nil, readError(err)
	}
	fields := make(map[string]string)
	for line := range strings.Lines(info) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), ":"); ok {
			fields[name] = value
		}
	}
	return fields, nil
}

// serverName is what the server is, for people.
func serverName(fields map[string]string) string {
	if v := fields["valkey_version"]; v != "" {
		return "valkey " + v
	}
	return "redis " + fields["redis_version"]
}

// identify refuses a server that is too old, and marks a new catalog.
func (s *Store) identify(ctx context.Context) error {
	fields, err := infoFields(ctx, s.client, "server")
	if err != nil {
		return err
	}
	version := fields["redis_version"] // Valkey gives the Redis version that it is compatible with
	major, _, _ := strings.Cut(version, ".")
	if n, err := strconv.Atoi(major); err != nil || n < 7 {
		return errs.New(errs.NotSupported, "the store is version %q; Redis 7.0 or Valkey 7.2 is the oldest that works", version).With("feature", "store version")
	}
	key := s.keys.one("incarnation")
	if err := s.writer.SetNX(ctx, key, uuid.NewString(), 0).Err(); err != nil {
		return writeError(err)
	}
	h, err := s.History(ctx)
	if err != nil {
		return err
	}
	s.incarnation.Store(&h.Head.Incarnation)
	return nil
}

// eval runs a script that writes, ask one that does not.
func (s *Store) eval(ctx context.Context, script *goredis.Script, args []any) (any, error) {
	return s.run(ctx, s.writer, script, args)
}

func (s *Store) ask(ctx context.Context, script *goredis.Script, args []any) (any, error) {
	return s.run(ctx, s.client, script, args)
}

// run runs a script by its digest. A server that does not know it has run nothing, so loading
// it and asking again is no replay.
func (s *Store) run(ctx context.Context, client *goredis.Client, script *goredis.Script, args []any) (any, error) {
	if err := ctx.Err(); err != nil {
		return nil, errs.From(err).WithOutcome(errs.NotStarted, errs.SameOperation)
	}
	keys := []string{s.keys.one("seq")} // routes to the catalog's slot; the scripts make the rest
	reply, err := script.EvalSha(ctx, client, keys, args...).Result()
	if goredis.HasErrorPrefix(err, "NOSCRIPT") {
		if err := script.Load(ctx, client).Err(); err != nil {
			return nil, unavailable(err)
		}
		reply, err = script.EvalSha(ctx, client, keys, args...).Result()
	}
	if err != nil && !errors.Is(err, goredis.Nil) {
		return nil, writeError(err)
	}
	return reply, nil
}

// Status implements catalog.Store.
func (s *Store) Status(ctx context.Context) (catalog.Status, error) {
	p := s.client.Pipeline()
	seq := p.Get(ctx, s.keys.one("seq"))
	epoch := p.HGet(ctx, s.keys.one("leader"), "e")
	tombs := p.XLen(ctx, s.keys.one("tl"))
	inc := p.Get(ctx, s.keys.one("incarnation"))
	suspended := p.HGetAll(ctx, s.keys.one("suspended"))
	restored := p.Get(ctx, s.keys.one("restored"))
	if _, err := p.Exec(ctx); err != nil && !errors.Is(err, goredis.Nil) {
		return catalog.Status{}, readError(err)
	}
	s.mu.Lock()
	runID, server := s.generation.runID, s.generation.server
	s.mu.Unlock()
	st := catalog.Status{Server: server, RunID: runID, Incarnation: inc.Val(), Durability: "appendfsync always", Tombstones: int(tombs.Val()), Restored: restored.Val()}
	var err error
	if st.Seq, err = number(seq); err != nil {
		return catalog.Status{}, err
	}
	if st.Suspended, err = decodeSuspension(suspended.Val()); err != nil {
		return catalog.Status{}, err
	}
	st.Epoch, err = epochOf(epoch)
	return st, err
}

// Close implements catalog.Store.
func (s *Store) Close() error {
	var failed error
	for _, c := range []*goredis.Client{s.client, s.writer} {
		if err := c.Close(); err != nil && !errors.Is(err, goredis.ErrClosed) {
			failed = errors.Join(failed, fmt.Errorf("close the catalog: %w", err))
		}
	}
	return failed
}
