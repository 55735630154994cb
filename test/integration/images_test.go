package integration

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/images"
	"github.com/dormouse-run/dormouse/test/stack"
)

// busyboxAnd is busybox with layers on top.
func busyboxAnd(layers ...[]images.Entry) (v1.Image, error) {
	img, err := images.ReadLayout(images.CachedDir("busybox"))
	if err != nil {
		return nil, err
	}
	for _, entries := range layers {
		layer, err := images.Layer(entries...)
		if err != nil {
			return nil, err
		}
		if img, err = mutate.AppendLayers(img, layer); err != nil {
			return nil, err
		}
	}
	return img, nil
}

// ballast is a layer of bytes that do not compress, and that no other image has.
func ballast(size int) []images.Entry {
	b := make([]byte, size)
	_, _ = rand.Read(b) // never fails, by its contract
	return []images.Entry{images.File("ballast", string(b), 0o644)}
}

// ready gives how often the nodes made an image of the manifest ready, by their logs.
func (w *world) ready(digest string) int {
	w.Helper()
	n := 0
	for i := 1; i <= w.Nodes; i++ {
		data, err := os.ReadFile(w.Stack.Log(fmt.Sprintf("agentd%d", i)))
		w.ok(err)
		for line := range bytes.Lines(data) {
			var entry struct{ Msg, Manifest string }
			if json.Unmarshal(line, &entry) == nil && entry.Msg == "image ready" && entry.Manifest == digest {
				n++
			}
		}
	}
	return n
}

// All who want an image wait for its one conversion in flight, see its progress, and one who gives up takes
// it from nobody.
func TestI02OneConversion(t *testing.T) {
	w := enter(t)
	for size := 48 * mib; !w.oneConversion(size); size *= 2 { // until the registry stood still before all bytes had come
		if size > 400*mib {
			t.Fatal("the registry is always done before it stands still")
		}
		w.ok(w.deleteAll(w.ctx))
	}
}

// puller is who asked for an image.
type puller struct {
	flowing chan struct{} // closed once it is told that bytes come
	ended   chan error
	steps   map[string]bool // that it was told of, once it has ended
}

func (w *world) pulls(ctx context.Context, ref string) *puller {
	p := &puller{make(chan struct{}), make(chan error, 1), map[string]bool{}}
	go func() {
		_, err := w.api.PullImage(ctx, ref, stack.NodeName(1), func(u *dormousev1.PullProgress) {
			if step := u.GetStep(); !p.steps[step] {
				p.steps[step] = true
				if step == "pulling" {
					close(p.flowing)
				}
			}
		})
		p.ended <- err
	}()
	return p
}

// oneConversion has an image of that size wanted by four. It says nothing of one whose bytes had all come before anybody could ask for it.
func (w *world) oneConversion(size int) (inTime bool) {
	w.Helper()
	ref := w.image(fmt.Sprintf("test/%s-%d", w.tenant, size/mib), func() (v1.Image, error) { return busyboxAnd(ballast(size)) })
	_, digest, _ := strings.Cut(ref, "@")
	spec := w.spec()
	spec.Image, spec.NodeSelector = ref, map[string]string{"zone": "z1"}

	// The registry stands still once both are told that bytes come.
	registry := w.PID("registry")
	defer func() { _ = unix.Kill(registry, unix.SIGCONT) }()
	leaving, leave := context.WithCancel(w.ctx)
	defer leave()
	leaves, stays := w.pulls(leaving, ref), w.pulls(w.ctx, ref)
	inTime = true
	for _, p := range []*puller{leaves, stays} {
		select {
		case <-p.flowing:
		case err := <-p.ended:
			w.ok(err)
			p.ended <- nil
			inTime = false
		}
	}
	w.ok(unix.Kill(registry, unix.SIGSTOP))
	created := make(chan error, 2)
	sandboxes := make(chan *client.Sandbox, 2)
	for range 2 {
		go func() {
			s, err := w.api.CreateSandbox(w.ctx, &dormousev1.CreateSandboxRequest{Spec: spec})
			sandboxes <- s
			created <- err
		}()
	}
	w.await("both sandboxes are there", func() error {
		all, err := client.Collect(w.api.ListSandboxes(w.ctx, &dormousev1.ListSandboxesRequest{}))
		if err == nil && len(all) < 2 {
			err = fmt.Errorf("%d of 2", len(all))
		}
		return err
	})
	leave()
	inTime = <-leaves.ended != nil && inTime
	w.ok(unix.Kill(registry, unix.SIGCONT))
	w.ok(<-stays.ended)
	if inTime && !stays.steps["converting"] {
		w.Errorf("progress showed %v", stays.steps)
	}
	for range 2 {
		w.ok(<-created)
		if got := w.sh(<-sandboxes, "wc -c < /ballast"); got != fmt.Sprint(size) {
			w.Errorf("the file has %s bytes", got)
		}
	}
	if n := w.ready(digest); n != 1 {
		w.Errorf("the image was made ready %d times, want once", n)
	}
	return inTime
}

// An image stays while a sandbox or a snapshot needs it, and goes when asked after.
func TestI04HeldWhileUsed(t *testing.T) {
	w := enter(t)
	ref := w.image("test/"+w.tenant, func() (v1.Image, error) { return busyboxAnd([]images.Entry{images.File("i04", "i04", 0o644)}) })
	_, digest, _ := strings.Cut(ref, "@")
	spec := w.spec()
	spec.Image = ref
	s := w.create(spec)
	erofs := filepath.Join(w.LayersDir(), "images", strings.TrimPrefix(s.Last.GetStatus().GetErofsDigest(), "sha256:")+".erofs")
	if _, err := os.Stat(erofs); err != nil {
		t.Fatal(err)
	}
	w.refused(w.api.Image(digest).Delete(w.ctx), errs.NotAllowed) // images belong to no tenant

	w.refused(w.Client.Image(digest).Delete(w.ctx), errs.StillReferenced)
	snap := w.checkpoint(s)
	w.ok(s.Delete(w.ctx, ""))
	w.refused(w.Client.Image(digest).Delete(w.ctx), errs.StillReferenced)
	restored, err := snap.Restore(w.ctx, &dormousev1.RestoreSandboxRequest{})
	w.ok(err)
	w.ok(snap.Delete(w.ctx, ""))
	e := w.refusal(w.Client.Image(digest).Delete(w.ctx), errs.StillReferenced)
	if !strings.Contains(e.Details["references"], restored.UID) {
		t.Errorf("the refusal names %q, not %s", e.Details["references"], restored.UID)
	}
	w.ok(restored.Delete(w.ctx, ""))
	w.await("nodes that report the image", func() error { // inventories come with heartbeats
		_, err := w.Client.FindImage(w.ctx, digest)
		return err
	})
	w.ok(w.Client.Image(digest).Delete(w.ctx))
	if _, err := os.Stat(erofs); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the image's file is still there: %v", err)
	}
	w.await("the image is listed nowhere", func() error {
		_, err := w.Client.FindImage(w.ctx, digest)
		if errs.Has(err, errs.ObjectNotFound) {
			return nil
		}
		return fmt.Errorf("it still is (%w)", err)
	})
	// And it comes back from the registry.
	s = w.create(spec)
	if got := w.sh(s, "cat /i04"); got != "i04" {
		t.Errorf("the file has %q", got)
	}
}
