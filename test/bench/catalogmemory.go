package bench

import (
	"bytes"
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis"
	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/fence"
	"github.com/dormouse-run/dormouse/pkg/uid"
	"github.com/dormouse-run/dormouse/pkg/wait"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// What a catalog in use has. Each living object has the receipt of its creation, and every seventh tombstone that of its deletion: a receipt
// lives a day, a tombstone a week.
const (
	usedSandboxes, usedSnapshots, usedTombstones = 1024, 10_000, 100_000
	coordinatorMost, redisMost                   = 100, 125 // MiB
)

// catalogMemory fills the cluster's catalog with copies of a sandbox, a snapshot and a tombstone that the coordinator recorded itself, as if they were on
// a node that is away, and looks at both processes once a coordinator leads with it and everything was listed.
func (b *bench) catalogMemory(ctx context.Context) ([]Row, error) {
	s, err := b.create(ctx, 64*mib, nil)
	if err != nil {
		return nil, err
	}
	if _, err := s.Checkpoint(ctx, &dormousev1.CheckpointSandboxRequest{}); err != nil {
		return nil, err
	}
	buried, err := s.Checkpoint(ctx, &dormousev1.CheckpointSandboxRequest{Name: "before-the-upgrade"})
	if err != nil {
		return nil, err
	}
	if err := buried.Delete(ctx, ""); err != nil {
		return nil, err
	}
	if err := b.cluster.KillCoordinator(ctx); err != nil {
		return nil, err
	}
	if err := b.cluster.EndLease(ctx); err != nil {
		return nil, err
	}
	// In a process of its own, without what earlier figures left in its heap.
	if err := b.cluster.KillRedis(ctx); err != nil {
		return nil, err
	}
	if err := b.cluster.StartRedis(ctx); err != nil {
		return nil, err
	}
	if err := fillCatalog(ctx, b.cluster.RedisSocket()); err != nil {
		return nil, err
	}
	if err := b.cluster.StartCoordinatorReady(ctx); err != nil {
		return nil, err
	}
	sandboxes, err := client.Collect(b.cluster.Client.ListSandboxes(ctx, &dormousev1.ListSandboxesRequest{PageSize: 500}))
	if err != nil {
		return nil, err
	}
	snapshots, err := client.Collect(b.cluster.Client.ListSnapshots(ctx, &dormousev1.ListSnapshotsRequest{PageSize: 500}))
	if err != nil {
		return nil, err
	}
	if len(sandboxes) <= usedSandboxes || len(snapshots) <= usedSnapshots {
		return nil, fmt.Errorf("%d sandboxes and %d snapshots are listed", len(sandboxes), len(snapshots))
	}
	if err := wait.For(ctx, 5*time.Second); err != nil {
		return nil, err
	}
	m, err := b.daemon("coordinator")
	if err != nil {
		return nil, err
	}
	resident, used, err := redisMemory(ctx, b.cluster.RedisSocket())
	if err != nil {
		return nil, err
	}
	what := fmt.Sprintf("with %d sandboxes, %d snapshots and %d tombstones", usedSandboxes, usedSnapshots, usedTombstones)
	return []Row{
		{What: "the coordinator " + what + ", resident", Product: fmt.Sprintf("%.1f MB anonymous, %.1f MB of files", m.anonymous, m.files),
			Value: m.anonymous + m.files, Unit: "MB", AtMost: coordinatorMost},
		{What: "Redis " + what + ", receipts included, used_memory", Product: fmt.Sprintf("%.1f MB", used), Value: used, Unit: "MB", AtMost: redisMost},
		{What: "the same, resident", Product: fmt.Sprintf("%.1f MB", resident), Value: resident, Unit: "MB", AtMost: redisMost},
	}, nil
}

func redisMemory(ctx context.Context, socket string) (resident, used float64, err error) {
	db := goredis.NewClient(&goredis.Options{Network: "unix", Addr: socket, MaxRetries: -1})
	defer func() { _ = db.Close() }()
	info, err := db.Info(ctx, "memory").Result()
	if err != nil {
		return 0, 0, err
	}
	for line := range strings.Lines(info) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		n, _ := strconv.ParseFloat(value, 64)
		switch name {
		case "used_memory":
			used = n / mib
		case "used_memory_rss":
			resident = n / mib
		}
	}
	return resident, used, nil
}

// filler writes in a coordinator's place.
type filler struct {
	store *redis.Store
	owner fence.Owner
	batch []catalog.Commit
}

func fillCatalog(ctx context.Context, socket string) error {
	store, err := redis.Open(ctx, redis.Options{Address: socket})
	if err != nil {
		return err
	}
	defer func() { _ = store.Close() }()
	lease, mine, err := store.Lead(ctx, catalog.Claim{Holder: "bench", TTL: time.Minute})
	if err != nil || !mine {
		return fmt.Errorf("the catalog is led by %s: %w", lease.Holder, err)
	}
	f := &filler{store: store, owner: fence.Owner{Coordinator: lease.Epoch}}
	var snapshot catalog.Record
	for _, of := range []struct {
		kind catalog.Kind
		n    int
	}{{catalog.KindSandbox, usedSandboxes}, {catalog.KindSnapshot, usedSnapshots}} {
		page, err := store.List(ctx, catalog.Query{Kind: of.kind, PageSize: 1})
		if err != nil || len(page.Records) != 1 {
			return fmt.Errorf("no %s to copy: %w", of.kind, err)
		}
		snapshot = page.Records[0]
		for range of.n {
			if err := f.add(ctx, catalog.Commit{Puts: []catalog.Put{{Record: another(page.Records[0])}}}); err != nil {
				return err
			}
		}
	}
	tombs, err := store.ListTombstones(ctx, snapshot.Tenant, catalog.KindSnapshot, "", 1)
	if err != nil || len(tombs.Tombstones) != 1 {
		return fmt.Errorf("no tombstone to copy: %w", err)
	}
	trace := tombs.Tombstones[0].Body
	for i := range usedTombstones {
		one := another(snapshot)
		made := catalog.Commit{Puts: []catalog.Put{{Record: one}}, Transient: true}
		gone := catalog.Commit{Deletes: []catalog.Delete{{Key: one.Key, ExpectRevision: 1, Tombstone: true, Body: trace}}, Transient: i%7 != 0}
		if err := f.add(ctx, made, gone); err != nil {
			return err
		}
	}
	if err := f.flush(ctx); err != nil {
		return err
	}
	return store.Release(ctx, "bench", lease.Epoch)
}

// another is a record's copy with a uid of its own, on a node that is away.
func another(r catalog.Record) catalog.Record {
	id := uid.New()
	r.Body = bytes.ReplaceAll(bytes.ReplaceAll(r.Body, []byte(r.UID), []byte(id)), []byte(`"`+r.Node+`"`), []byte(`"node-9"`))
	r.UID, r.Name, r.Node, r.Refs = id, "", "node-9", nil
	return r
}

func (f *filler) add(ctx context.Context, commits ...catalog.Commit) error {
	for _, c := range commits {
		c.Owner, c.Tenant = f.owner, "acme"
		if !c.Transient {
			c.ID, c.Digest, c.Result = uid.New(), strings.Repeat("d", 64), []byte(`{"format":1,"body":{}}`)
		}
		f.batch = append(f.batch, c)
	}
	if len(f.batch) < 256 {
		return nil
	}
	return f.flush(ctx)
}

func (f *filler) flush(ctx context.Context) error {
	results, err := f.store.Commit(ctx, f.batch)
	if err != nil {
		return err
	}
	for i := range results {
		if results[i].Err != nil {
			return results[i].Err
		}
	}
	f.batch = f.batch[:0]
	return nil
}
