package app

import (
	"context"
	"time"
)

// gcInterval is how often the images' disk is looked at.
const gcInterval = 30 * time.Second

// housekeep makes room on the images' disk when less is free than the node reserves: images that nothing
// holds go, the longest unused first. It ends with ctx.
func (a *App) housekeep(ctx context.Context) {
	tick := time.NewTicker(gcInterval)
	defer tick.Stop()
	for {
		a.makeRoom(ctx)
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// makeRoom is one look, and one collection if it is due.
func (a *App) makeRoom(ctx context.Context) {
	reserve := int64(a.cfg.Reserve.Disk)
	free, _, err := diskOf(a.cfg.Layers.Root)
	if err != nil {
		a.log.WarnContext(ctx, "look at the images' disk", "error", err)
		return
	}
	if free >= reserve {
		return
	}
	// A little more than is due, so that the next image does not bring it back at once.
	removed, err := a.images.GC(ctx, reserve+reserve/4)
	var bytes int64
	for _, r := range removed {
		bytes += r.Size
	}
	a.log.InfoContext(ctx, "images collected", "free", free, "reserve", reserve, "removed", len(removed), "bytes", bytes, "error", err)
}
