package api

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/pkg/catalog"
)

// changing is a store of which the test says when something is committed.
type changing struct {
	Store
	mu    sync.Mutex
	seq   uint64
	reads int
	moved chan struct{}
}

func (c *changing) commit() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.seq++
	close(c.moved)
	c.moved = make(chan struct{})
}

func (c *changing) read() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.reads
}

func (c *changing) Seq(context.Context) (uint64, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.reads++
	return c.seq, nil
}

func (c *changing) Changes(ctx context.Context, after uint64, _ int, _ time.Duration) ([]catalog.Change, error) {
	for {
		c.mu.Lock()
		c.reads++
		seq, moved := c.seq, c.moved
		c.mu.Unlock()
		if seq > after {
			return []catalog.Change{{Seq: seq}}, nil
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// The hub follows the log as long as somebody waits for it, and whoever comes later misses nothing.
func TestTheLogIsFollowedForThoseWhoWait(t *testing.T) {
	store := &changing{moved: make(chan struct{})}
	h := newHub(store, slog.New(slog.DiscardHandler))
	ctx, stop := context.WithCancel(t.Context())
	go h.run(ctx)
	defer func() { stop(); <-h.done }()
	for range 10 {
		store.commit()
	}
	if n := store.read(); n != 0 {
		t.Fatalf("read %d times, and nobody watches", n)
	}
	if err := h.wait(ctx, 3); err != nil { // what was committed before it waits
		t.Fatal(err)
	}
	var waiting sync.WaitGroup
	for range 5 {
		waiting.Go(func() {
			for after := uint64(10); after < 13; after++ {
				if err := h.wait(ctx, after); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for range 3 {
		store.commit()
	}
	waiting.Wait()
	// One that reads on for nobody ends with the next commit.
	for {
		n := store.read()
		store.commit()
		if store.read() == n {
			break
		}
		if ctx.Err() != nil {
			t.Fatal("it reads on for nobody")
		}
	}
	gone, leave := context.WithCancel(ctx)
	leave()
	if err := h.wait(gone, 1<<40); err == nil {
		t.Fatal("waited for what never comes")
	}
}
