package redis_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	goredis "github.com/redis/go-redis/v9"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/catalog/catalogtest"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis/redistest"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// A commit whose last bytes did not reach the disk is gone, whole, after the first start and after the second.
func TestF09_HalfCommitIsNeverApplied(t *testing.T) { redistest.Each(t, halfCommitIsNeverApplied) }

func halfCommitIsNeverApplied(t *testing.T, p redistest.Program) {
	for name, lost := range map[string]int64{
		"all but the last command": int64(len("*1\r\n$4\r\nEXEC\r\n")), "within the last command": 5, "within a command": 40, "within the first half": 0,
	} {
		t.Run(name, func(t *testing.T) {
			server := p.Start(t)
			f := catalogtest.NewFixture(t, open(t, redis.Options{Address: server.Socket}))
			f.Must(catalogtest.Create(catalogtest.Sandbox("kept")))
			before, whole := contents(t, server), server.LogSize(t)
			f.Must(catalogtest.Create(catalogtest.Sandbox("cut")))
			end := server.LogSize(t)
			if lost == 0 {
				lost = (end - whole) / 2
			}
			server.Kill(t)
			server.CutLog(t, end-lost)
			server.Restart(t)
			same(t, "after the first start", before, contents(t, server))
			// Another coordinator, since the first was told of what is lost here.
			g := catalogtest.NewFixture(t, open(t, redis.Options{Address: server.Socket}))
			g.Must(catalogtest.Create(catalogtest.Sandbox("after")))
			before = contents(t, server)
			server.Kill(t)
			server.Restart(t)
			same(t, "after the second start", before, contents(t, server))
			g.Must(catalogtest.Create(catalogtest.Sandbox("later")))
		})
	}
}

// contents is all that the server has, but for leases, which end.
func contents(t *testing.T, server *redistest.Server) map[string]string {
	t.Helper()
	client, has := raw(t, server), make(map[string]string)
	keys, err := client.Keys(t.Context(), "*").Result()
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range keys {
		if strings.HasSuffix(k, ":lease") {
			continue
		}
		if has[k], err = client.Dump(t.Context(), k).Result(); err != nil {
			t.Fatal(err)
		}
	}
	return has
}

func same(t *testing.T, when string, want, has map[string]string) {
	t.Helper()
	for _, k := range slices.Sorted(maps.Keys(want)) {
		if has[k] != want[k] {
			t.Errorf("%s the server has another %s", when, k)
		}
	}
	for _, k := range slices.Sorted(maps.Keys(has)) {
		if _, ok := want[k]; !ok {
			t.Errorf("%s the server has %s", when, k)
		}
	}
}

// rewrites is how often the server's process has begun to write its log anew, and whether it does now.
func rewrites(t *testing.T, client *goredis.Client) (begun int, running bool) {
	t.Helper()
	info, err := client.Info(t.Context(), "persistence").Result()
	if err != nil {
		t.Fatal(err)
	}
	begun = -1
	for line := range strings.Lines(info) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		switch name {
		case "aof_rewrites":
			if begun, err = strconv.Atoi(value); err != nil {
				t.Fatal(err)
			}
		case "aof_rewrite_in_progress":
			running = value == "1"
		}
	}
	return begun, running
}

// slowly has each rewrite of the log stand still for a while at each key.
func slowly(t *testing.T, client *goredis.Client, microseconds int) {
	t.Helper()
	if err := client.ConfigSet(t.Context(), "rdb-key-save-delay", strconv.Itoa(microseconds)).Err(); err != nil {
		t.Fatal(err)
	}
}

const forever = 1000 * 1000 * 1000 // microseconds at each key

// running waits until the server writes its log anew.
func running(t *testing.T, client *goredis.Client) {
	t.Helper()
	catalogtest.Eventually(t, "the log is written anew", func() bool {
		_, now := rewrites(t, client)
		return now
	})
}

// fails has a rewrite that stands still end, as it does when the disk is full.
func fails(t *testing.T, server *redistest.Server) {
	t.Helper()
	for _, pid := range server.Children(t) {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Error(err)
		}
	}
}

// The log is written anew once by each process of a server that needs it, whoever comes and how many come at once.
func TestLogIsRenewedWhereNeeded(t *testing.T) { redistest.Each(t, logIsRenewedWhereNeeded) }

func logIsRenewedWhereNeeded(t *testing.T, p redistest.Program) {
	server := p.Start(t)
	client := raw(t, server)
	open(t, redis.Options{Address: server.Socket})
	want := 1
	if strings.HasPrefix(p.Reports, "valkey") {
		want = 0
	}
	if n, _ := rewrites(t, client); n != want {
		t.Errorf("a new server was asked %d times, want %d", n, want)
	}
	server.Kill(t)
	server.Restart(t)
	client = raw(t, server)
	const many = 8
	var all sync.WaitGroup
	for i := range many {
		all.Go(func() {
			s, err := redis.Open(t.Context(), redis.Options{Address: server.Socket, Catalog: fmt.Sprint("c", i%2)})
			if err != nil {
				t.Error(err)
				return
			}
			_ = s.Close()
		})
	}
	all.Wait()
	n, _ := rewrites(t, client)
	if n < want || n > want*many {
		t.Errorf("%d at once asked %d times", many, n)
	}
	open(t, redis.Options{Address: server.Socket})
	if again, _ := rewrites(t, client); again != n {
		t.Errorf("who came later asked again: %d, after %d", again, n)
	}
}

// A coordinator that ends while the log is written anew leaves the server at it; the next one waits for its end and does not ask.
func TestF09_CoordinatorEndsDuringRenewal(t *testing.T) {
	server := redistest.Start(t)
	catalogtest.NewFixture(t, open(t, redis.Options{Address: server.Socket})).Must(catalogtest.Create(catalogtest.Sandbox("a")))
	server.Kill(t)
	server.Restart(t)
	client := raw(t, server)
	slowly(t, client, 20_000)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if s, err := redis.Open(ctx, redis.Options{Address: server.Socket}); err == nil { // on a machine that stood still
			_ = s.Close()
		}
	}()
	catalogtest.Eventually(t, "it has asked", func() bool { n, _ := rewrites(t, client); return n > 0 })
	cancel()
	<-ended
	f := catalogtest.NewFixture(t, open(t, redis.Options{Address: server.Socket}))
	if n, now := rewrites(t, client); n != 1 || now {
		t.Errorf("the log was written anew %d times (now: %v)", n, now)
	}
	f.Must(catalogtest.Create(catalogtest.Sandbox("b")))
}

// While the log is written anew nothing is written, and reads go on. When that failed it is tried again.
func TestF09_NothingIsWrittenBeforeRenewal(t *testing.T) {
	server := redistest.Start(t)
	var told []redis.Renewal
	f := catalogtest.NewFixture(t, open(t, redis.Options{Address: server.Socket, Renewed: func(r redis.Renewal) { told = append(told, r) }}))
	f.Must(catalogtest.Create(catalogtest.Sandbox("a")))
	server.Kill(t)
	server.Restart(t)
	client := raw(t, server)
	slowly(t, client, forever)
	t.Cleanup(func() { fails(t, server) })
	before := contents(t, server)
	commit := []catalog.Commit{{Owner: f.Owner, Puts: []catalog.Put{catalogtest.Create(catalogtest.Sandbox("b"))}}}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := f.Commit(ctx, commit)
		ended <- err
	}()
	running(t, client)
	f.Read(catalogtest.Sandbox("a"))
	if _, err := f.History(t.Context()); err != nil {
		t.Error(err)
	}
	cancel()
	if err := <-ended; !errs.Has(err, errs.StoreUnavailable) || !errs.NotStartedFor(err) {
		t.Errorf("a commit meanwhile: %v", err)
	}
	same(t, "before its log was renewed", before, contents(t, server))
	fails(t, server)
	catalogtest.Eventually(t, "the server knows", func() bool { _, now := rewrites(t, client); return !now })
	slowly(t, client, 0)
	catalogtest.Eventually(t, "it is tried again", func() bool {
		results, err := f.Commit(t.Context(), commit)
		if err != nil && !errs.Has(err, errs.StoreUnavailable) {
			t.Fatal(err)
		}
		return err == nil && results[0].Err == nil
	})
	if n, _ := rewrites(t, client); n != 2 {
		t.Errorf("the log was begun %d times, want 2", n)
	}
	if len(told) != 3 || told[0].Err != nil || told[1].Err == nil || told[2].Err != nil || told[1].RunID != told[2].RunID {
		t.Errorf("told %v", told)
	}
}

// Who waits for a rewrite that fails is told why nothing is written.
func TestFailedRenewalIsRefused(t *testing.T) {
	server := redistest.Start(t)
	catalogtest.NewFixture(t, open(t, redis.Options{Address: server.Socket})).Must(catalogtest.Create(catalogtest.Sandbox("a")))
	server.Kill(t)
	server.Restart(t)
	client := raw(t, server)
	slowly(t, client, forever)
	ended := make(chan error, 1)
	go func() {
		s, err := redis.Open(t.Context(), redis.Options{Address: server.Socket})
		if err == nil {
			_ = s.Close()
		}
		ended <- err
	}()
	running(t, client)
	fails(t, server)
	if err := <-ended; !errs.Has(err, errs.StoreUnavailable) || !strings.Contains(err.Error(), "disk and memory") {
		t.Errorf("a rewrite that failed: %v", err)
	}
}

// A user who may not have the log written anew is told so; an operator may do it instead.
func TestRenewalNeedsPermission(t *testing.T) {
	server := redistest.Start(t)
	client := raw(t, server)
	if err := client.ACLSetUser(t.Context(), "coordinator", "on", "nopass", "~*", "&*", "+@all", "-bgrewriteaof").Err(); err != nil {
		t.Fatal(err)
	}
	o := redis.Options{Address: server.Socket, Username: "coordinator", Password: "any"}
	if _, err := redis.Open(t.Context(), o); !errs.Has(err, errs.StoreNotDurable) || !strings.Contains(err.Error(), "allow BGREWRITEAOF") || !errs.NotStartedFor(err) {
		t.Errorf("without permission: %v", err)
	}
	if has := contents(t, server); len(has) > 0 {
		t.Errorf("it has written %v", has)
	}
	if err := client.BgRewriteAOF(t.Context()).Err(); err != nil {
		t.Fatal(err)
	}
	catalogtest.Eventually(t, "the log is written anew", func() bool { _, now := rewrites(t, client); return !now })
	catalogtest.NewFixture(t, open(t, o)).Must(catalogtest.Create(catalogtest.Sandbox("a")))
}
