package bench

import (
	"context"
	"fmt"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"

	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/images"
	"github.com/dormouse-run/dormouse/test/proof"
	"github.com/dormouse-run/dormouse/test/stack"
)

// benchImage tells how long the conversion of the demo's image takes once its layers are there, and that of
// images which share all but their last layer with it.
func benchImage(ctx context.Context, b *bench) ([]Row, error) {
	base, err := images.ReadLayout(images.CachedDir("python"))
	if err != nil {
		return nil, err
	}
	first, err := b.pull(ctx, base, 0)
	if err != nil {
		return nil, err
	}
	var pulls, next Sample
	for i := range b.times(5) {
		t, err := b.pull(ctx, base, i+1)
		if err != nil {
			return nil, err
		}
		next.add(t.converting)
		pulls.add(t.whole)
	}
	firstMS, s := float64(first.converting.Milliseconds()), fmt.Sprintf("%.2f s", first.converting.Seconds())
	return []Row{
		{What: "conversion of the demo image, after its pull", Product: s + fmt.Sprintf(" (whole pull %.2f s)", first.whole.Seconds()),
			Value: first.converting.Seconds(), Unit: "s", AtMost: 2},
		{What: "conversion of another image that shares its base; bare: the first", Product: times(next), Bare: s, Value: next.Median() / firstMS, Unit: "x", AtMost: 1},
		{What: "its whole pull", Product: times(pulls), Value: pulls.Median(), Unit: "ms"},
	}, nil
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
