package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/wait"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/stack"
)

// poolSize is how many members the pool of the benchmark has.
const poolSize = 20

// benchWarm tells how long a claim takes: of a full pool that nothing else is done with, and as many in a row as the pool has, while it is
// filled again. What the node needs for one is by agentd's own clock.
func benchWarm(ctx context.Context, b *bench) (_ []Row, err error) {
	api := b.cluster.Client
	template, err := api.CreateTemplate(ctx, &dormousev1.CreateTemplateRequest{Spec: &dormousev1.TemplateSpec{
		Sandbox:   &dormousev1.SandboxSpec{Image: b.subject, Command: []string{subjectPath, "4", "2", "/var"}, Resources: &dormousev1.Resources{CpuRequestMillis: 1, MemoryLimitBytes: 70 * mib}},
		Readiness: &dormousev1.ReadinessCheck{Argv: []string{subjectPath, "check", "/var"}}}})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, template.Delete(ctx, "")) }()
	pool, err := api.CreatePool(ctx, &dormousev1.CreatePoolRequest{Spec: &dormousev1.PoolSpec{TemplateUid: template.UID, Size: poolSize}})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, pool.Delete(ctx, "")) }()
	var all []*client.Sandbox
	defer func() { err = errors.Join(err, deleteAll(ctx, all)) }()
	claim := func(into *Sample) error {
		return timed(into, func() error {
			s, err := pool.Claim(ctx, &dormousev1.ClaimSandboxRequest{Fallback: dormousev1.ClaimFallback_CLAIM_FALLBACK_REFUSE})
			all = append(all, s)
			return err
		})
	}
	began := time.Now()
	if err := full(ctx, pool); err != nil {
		return nil, err
	}
	filled := time.Since(began)
	var alone, row, use Sample
	count, sum, err := b.claimsOnNode(ctx)
	if err != nil {
		return nil, err
	}
	for range b.times(40) {
		if err := full(ctx, pool); err != nil {
			return nil, err
		}
		if err := wait.For(ctx, breath/4); err != nil {
			return nil, err
		}
		if err := claim(&alone); err != nil {
			return nil, err
		}
		if err := timed(&use, func() error { return check(ctx, all[len(all)-1]) }); err != nil {
			return nil, err
		}
	}
	onNode, onNodeSum, err := b.claimsOnNode(ctx)
	if err != nil {
		return nil, err
	}
	if err := full(ctx, pool); err != nil {
		return nil, err
	}
	for range poolSize {
		if err := claim(&row); err != nil {
			return nil, err
		}
	}
	mean := (onNodeSum - sum) / float64(max(onNode-count, 1)) * 1000
	return []Row{
		{What: fmt.Sprintf("claim of a full pool of %d, through the API", poolSize), Product: fine(alone), Value: alone.Median(), Unit: "ms", AtMost: 30},
		{What: "of that on the node (mean of the same claims)", Product: fmt.Sprintf("%.2f ms", mean), Value: mean, Unit: "ms", AtMost: 10},
		{What: fmt.Sprintf("%d claims in a row, while the pool fills", poolSize), Product: fine(row), Value: row.Median(), Unit: "ms"},
		{What: "the first process in a claimed sandbox", Product: fine(use), Value: use.Median(), Unit: "ms"},
		{What: "members made a second, from the pool's creation on", Product: fmt.Sprintf("%.1f s for %d", filled.Seconds(), poolSize), Value: poolSize / filled.Seconds(), Unit: "/s"},
	}, nil
}

// full waits until the pool has its size, and makes and deletes nothing.
func full(ctx context.Context, pool *client.Pool) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	for {
		if err := pool.Refresh(ctx); err != nil {
			return err
		}
		if st := pool.Last.GetStatus(); st.GetReady() == poolSize && st.GetFilling()+st.GetDraining() == 0 {
			return nil
		}
		if err := wait.For(ctx, 20*time.Millisecond); err != nil {
			return fmt.Errorf("the pool is %v: %w", pool.Last.GetStatus(), err)
		}
	}
}

// claimsOnNode is how many claims the node has answered, and the seconds that it took for them.
func (b *bench) claimsOnNode(ctx context.Context) (count uint64, seconds float64, err error) {
	var text bytes.Buffer
	if err := stack.FetchAdmin(ctx, b.daemons()["agentd"], "/metrics", &text); err != nil {
		return 0, 0, err
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(&text)
	if err != nil {
		return 0, 0, err
	}
	for _, m := range families["dormouse_rpc_seconds"].GetMetric() {
		for _, l := range m.GetLabel() {
			if l.GetName() == "method" && l.GetValue() == nodev1.AgentService_ClaimSandbox_FullMethodName {
				count, seconds = m.GetHistogram().GetSampleCount(), m.GetHistogram().GetSampleSum()
			}
		}
	}
	return count, seconds, nil
}
