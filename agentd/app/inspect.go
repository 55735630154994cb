package app

import (
	"context"
	"fmt"
	"strings"

	"github.com/dormouse-run/dormouse/agentd/internal/debug"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/pkg/config"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/version"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
)

// This file is what agentctl sees.

func (a *App) objects() map[nodev1.DebugKind]debug.Lister {
	return map[nodev1.DebugKind]debug.Lister{
		nodev1.DebugKind_DEBUG_KIND_SANDBOX:  a.sandboxObjects,
		nodev1.DebugKind_DEBUG_KIND_SNAPSHOT: a.snapshotObjects,
		nodev1.DebugKind_DEBUG_KIND_VOLUME:   a.volumeObjects,
		nodev1.DebugKind_DEBUG_KIND_IMAGE:    a.imageObjects,
		nodev1.DebugKind_DEBUG_KIND_NETWORK:  a.networkObjects,
	}
}

func (a *App) sandboxObjects(context.Context) ([]debug.Object, error) {
	all, err := a.state.Sandboxes()
	if err != nil {
		return nil, err
	}
	var out []debug.Object
	for _, rec := range all {
		out = append(out, debug.Object{UID: rec.UID, Tenant: rec.Tenant, State: string(rec.Phase),
			Columns: map[string]string{"name": rec.Name, "image": rec.Spec.Image, "intent": string(rec.Intent), "step": rec.Step, "reason": rec.Reason, "restored_from": rec.RestoredFrom},
			Detail: func(ctx context.Context) (any, error) {
				detail := map[string]any{"record": rec, "folder": a.run.Dir(rec.UID)}
				st, err := a.driver.State(ctx, rec.UID)
				if err != nil {
					detail["observed"] = errs.From(err).Message
					return detail, nil
				}
				detail["observed"] = st
				if stats, err := a.driver.Stats(ctx, rec.UID); err == nil && st.Phase != runtime.Stopped {
					detail["stats"] = stats
				}
				return detail, nil
			}})
	}
	return out, nil
}

func (a *App) snapshotObjects(context.Context) ([]debug.Object, error) {
	all, err := a.state.Snapshots()
	if err != nil {
		return nil, err
	}
	var out []debug.Object
	for _, rec := range all {
		out = append(out, debug.Object{UID: rec.UID, Tenant: rec.Tenant, State: string(rec.State),
			Columns: map[string]string{"source": rec.SourceSandboxUID, "size": config.FormatBytes(rec.Status.SizeBytes), "freeze": rec.Status.Freeze.String()},
			Detail: func(context.Context) (any, error) {
				detail := map[string]any{"record": rec, "folder": a.snapshots.Path(rec.UID)}
				m, err := a.snapshots.Load(rec.UID)
				if err != nil {
					detail["observed"] = errs.From(err).Message
					return detail, nil
				}
				detail["manifest"] = m
				return detail, nil
			}})
	}
	return out, nil
}

func (a *App) volumeObjects(ctx context.Context) ([]debug.Object, error) {
	all, err := a.volumes.list(ctx)
	if err != nil {
		return nil, err
	}
	var out []debug.Object
	for _, v := range all {
		holders, err := a.volumes.store.Holders(ctx, v.UID)
		if err != nil {
			return nil, err
		}
		var names []string
		for _, h := range holders {
			names = append(names, h.Name)
		}
		out = append(out, debug.Object{UID: v.UID, Tenant: v.Tenant, State: string(v.Status.Phase),
			Columns: map[string]string{"limit": config.FormatBytes(v.Spec.SizeLimitBytes), "attached": strings.Join(names, ",")},
			Detail: func(ctx context.Context) (any, error) {
				detail := map[string]any{"volume": v, "holders": holders}
				if usage, err := a.volumes.store.Usage(ctx, v.UID); err == nil {
					detail["usage"] = usage
				}
				return detail, nil
			}})
	}
	return out, nil
}

func (a *App) imageObjects(ctx context.Context) ([]debug.Object, error) {
	all, err := a.images.List(ctx)
	if err != nil {
		return nil, err
	}
	var out []debug.Object
	for _, img := range all {
		held, err := a.images.Holders(ctx, img.ErofsDigest)
		if err != nil {
			return nil, err
		}
		out = append(out, debug.Object{UID: img.ManifestDigest.String(), State: "ready",
			Columns: map[string]string{"reference": img.Reference, "erofs": img.ErofsDigest.String(), "size": config.FormatBytes(img.Size),
				"layers": fmt.Sprint(img.Layers), "holders": fmt.Sprint(len(held))},
			Detail: func(context.Context) (any, error) { return map[string]any{"image": img, "holders": held}, nil }})
	}
	return out, nil
}

func (a *App) overview(ctx context.Context) (*nodev1.OverviewResponse, error) {
	epochs, err := a.state.Epochs()
	if err != nil {
		return nil, err
	}
	inv, err := a.node.items(ctx)
	if err != nil {
		return nil, err
	}
	count := func(kind string) int32 {
		n := int32(0)
		for _, i := range inv {
			if strings.HasPrefix(i.key, kind+"/") {
				n++
			}
		}
		return n
	}
	return &nodev1.OverviewResponse{
		Node: a.cfg.Node, Version: version.Get().String(), SessionEpoch: uint64(a.session.Epoch()), CoordinatorEpoch: uint64(epochs.Coordinator),
		Connected: a.session.Connected(), Sandboxes: count("sandbox"), Snapshots: count("snapshot"),
		Volumes: count("volume"), Images: count("image"), RuntimeBundle: a.bundles.Current().Digest,
	}, nil
}
