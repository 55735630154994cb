package bench

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"

	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/images"
	"github.com/dormouse-run/dormouse/test/proof"
	"github.com/dormouse-run/dormouse/test/stack"
	"github.com/dormouse-run/dormouse/test/tools"
)

// benchImage tells how long the conversion of the demo's image takes once its layers are there, and that of
// images which share all but their last layer with it. Bare is mkfs.erofs on the unpacked layer.
func benchImage(ctx context.Context, b *bench) ([]Row, error) {
	base, err := images.ReadLayout(images.CachedDir("python"))
	if err != nil {
		return nil, err
	}
	first, err := b.pull(ctx, base, 0)
	if err != nil {
		return nil, err
	}
	var pulls, next, floor Sample
	for i := range b.times(5) {
		took, err := b.bareConversion(ctx, base)
		if err != nil {
			return nil, err
		}
		floor.add(took)
		t, err := b.pull(ctx, base, i+1)
		if err != nil {
			return nil, err
		}
		next.add(t.converting)
		pulls.add(t.whole)
	}
	firstTime := Sample{float64(first.converting.Milliseconds())}
	return []Row{
		{What: "conversion of the demo image, after its pull; bare: gunzip, mkfs.erofs, sync, SHA-256 of its largest layer",
			Product: times(firstTime), Bare: times(floor), Value: first.converting.Seconds(), Unit: "s", AtMost: 2},
		{What: "conversion of another image that shares its base; bare: the first image's", Product: times(next), Bare: times(firstTime),
			Value: next.Median() / firstTime.Median(), Unit: "x", AtMost: 1},
		ratio("the same; bare: as above", next, floor, 0),
		{What: "its whole pull", Product: times(pulls), Value: pulls.Median(), Unit: "ms"},
	}, nil
}

// bareConversion makes an EROFS file of the image's largest layer by a pipe, with the product's options.
func (b *bench) bareConversion(ctx context.Context, image v1.Image) (time.Duration, error) {
	layer, err := largest(image)
	if err != nil {
		return 0, err
	}
	mkfs, err := tools.Find("mkfs.erofs")
	if err != nil {
		return 0, err
	}
	began := time.Now()
	tar, err := layer.Uncompressed()
	if err != nil {
		return 0, err
	}
	defer func() { _ = tar.Close() }()
	out := filepath.Join(b.cluster.Dir, "bare.erofs")
	defer func() { _ = os.Remove(out) }()
	cmd := exec.CommandContext(ctx, mkfs, "--quiet", "-b4096", "-U", "clear", "-Enoinline_data", "-T0", "--mkfs-time", "--tar=f", out)
	cmd.Stdin = tar
	if said, err := cmd.CombinedOutput(); err != nil {
		return 0, fmt.Errorf("mkfs.erofs: %w: %s", err, said)
	}
	f, err := os.Open(out)
	if err != nil {
		return 0, err
	}
	defer func() { _ = f.Close() }()
	if err := f.Sync(); err != nil {
		return 0, err
	}
	_, err = io.Copy(sha256.New(), f)
	return time.Since(began), err
}

func largest(image v1.Image) (v1.Layer, error) {
	all, err := image.Layers()
	if err != nil {
		return nil, err
	}
	var found v1.Layer
	var size int64
	for _, l := range all {
		n, err := l.Size()
		if err != nil {
			return nil, err
		}
		if n > size {
			found, size = l, n
		}
	}
	if found == nil {
		return nil, errors.New("the image has no layers")
	}
	return found, nil
}

type pullTimes struct{ whole, converting time.Duration }

// pull pushes the demo's image with one more layer and lets node 1 pull it.
func (b *bench) pull(ctx context.Context, base v1.Image, n int) (pullTimes, error) {
	layer, err := images.Layer(images.File(strings.TrimPrefix(proof.SubjectPath, "/"), string(proof.Subject), 0o644),
		images.File("opt/variant", fmt.Sprint(n), 0o644))
	if err != nil {
		return pullTimes{}, err
	}
	image, err := mutate.AppendLayers(base, layer)
	if err != nil {
		return pullTimes{}, err
	}
	registry, err := b.cluster.Registry()
	if err != nil {
		return pullTimes{}, err
	}
	repository := fmt.Sprintf("bench/demo-%d", n)
	digest, err := registry.Push(ctx, repository, image)
	if err != nil {
		return pullTimes{}, err
	}
	began := time.Now()
	var converting time.Time
	_, err = b.cluster.Client.PullImage(ctx, registry.Ref(repository)+"@"+digest, stack.NodeName(1), func(p *dormousev1.PullProgress) {
		if p.GetStep() == "converting" && converting.IsZero() {
			converting = time.Now()
		}
	})
	if err == nil && converting.IsZero() {
		err = fmt.Errorf("the pull of %s reported no conversion", repository)
	}
	return pullTimes{time.Since(began), time.Since(converting)}, err
}
