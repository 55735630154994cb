package integration

import (
	"fmt"
	"strings"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/cluster"
)

const refuse = dormousev1.ClaimFallback_CLAIM_FALLBACK_REFUSE

// template makes one.
func (w *world) template(spec *dormousev1.TemplateSpec) *client.Template {
	w.Helper()
	t, err := w.api.CreateTemplate(w.ctx, &dormousev1.CreateTemplateRequest{Spec: spec})
	w.ok(err)
	return t
}

// pool makes one of so many members, all of them ready.
func (w *world) pool(t *client.Template, size int32) *client.Pool {
	w.Helper()
	p, err := w.api.CreatePool(w.ctx, &dormousev1.CreatePoolRequest{Spec: &dormousev1.PoolSpec{TemplateUid: t.UID, Size: size, MaxMembers: size}})
	w.ok(err)
	w.filled(p, size)
	return p
}

func (w *world) filled(p *client.Pool, size int32) {
	w.Helper()
	w.await("the pool is full", func() error {
		if err := p.Refresh(w.ctx); err != nil {
			return err
		}
		if st := p.Last.GetStatus(); st.GetReady() != size || st.GetFilling()+st.GetDraining() > 0 {
			return fmt.Errorf("it is %v", st)
		}
		return nil
	})
}

// TestB09ClaimsHaveIdentitiesOfTheirOwn: what is claimed of a pool has the processes and files of the template, and a host name, machine id, identity file and
// random numbers of its own; the image's hook ran in each. Until it is claimed nobody sees it.
func TestB09ClaimsHaveIdentitiesOfTheirOwn(t *testing.T) {
	w := enter(t)
	hook := `mkdir -p /etc/dormouse; printf '#!/bin/sh\necho "$1" >>/tmp/hooked\n' >/etc/dormouse/on-restore; chmod 755 /etc/dormouse/on-restore`
	tpl := w.template(&dormousev1.TemplateSpec{
		Sandbox:   w.spec("sh", "-c", "echo $$ >/tmp/pid; "+counting),
		Setup:     []*dormousev1.SetupCommand{{Argv: []string{"sh", "-c", hook}}, {Argv: []string{"sh", "-c", "test -x /etc/dormouse/on-restore && mkdir /work"}, Env: map[string]string{"A": "b"}}},
		Readiness: &dormousev1.ReadinessCheck{Argv: []string{"test", "-s", "/tmp/n"}},
	})
	pool := w.pool(tpl, 4)
	if all, err := client.Collect(w.api.ListSandboxes(w.ctx, &dormousev1.ListSandboxesRequest{})); err != nil || len(all) != 0 {
		t.Fatalf("members are in a list: %v (%v)", all, err)
	}
	seen := map[string]string{}
	for i := range 4 {
		name := fmt.Sprintf("claimed-%d", i)
		req := &dormousev1.ClaimSandboxRequest{OperationId: uid.New(), Name: name, Labels: map[string]string{"job": name}, Fallback: refuse}
		s, err := pool.Claim(w.ctx, req)
		if i > 0 && errs.Has(err, errs.PoolEmpty) { // it fills while it is emptied, and may be refilling now
			w.filled(pool, 4)
			s, err = pool.Claim(w.ctx, req)
		}
		w.ok(err)
		again, err := pool.Claim(w.ctx, req)
		w.ok(err)
		if again.UID != s.UID || w.phase(s) != running || s.Last.GetMeta().GetName() != name || s.Last.GetMeta().GetLabels()["job"] != name {
			t.Fatalf("it is %v, and asked again %s", s.Last, again.UID)
		}
		lines := strings.Split(w.sh(s, `hostname; cat /etc/hostname /etc/machine-id; head -c 16 /dev/urandom | base64; ls -d /work; kill -0 $(cat /tmp/pid) && echo goes on`), "\n")
		if len(lines) != 6 || !strings.HasSuffix(s.UID, lines[0]) && lines[0] != name || lines[1] != name || lines[2] != strings.ReplaceAll(s.UID, "-", "") || lines[4] != "/work" || lines[5] != "goes on" {
			t.Fatalf("sandbox %s says %q", s.UID, lines)
		}
		for _, l := range []string{lines[0], lines[2], lines[3]} {
			if other, taken := seen[l]; taken {
				t.Errorf("%s and %s both have %q", s.UID, other, l)
			}
			seen[l] = s.UID
		}
		if id := w.sh(s, "cat /run/dormouse/identity.json"); !strings.Contains(id, s.UID) || !strings.Contains(id, name) {
			t.Errorf("the identity of %s is %s", s.UID, id)
		}
		w.await("the hook ran", func() error {
			out, err := cluster.Exec(w.ctx, s, "sh", "-c", "cat /tmp/hooked 2>/dev/null; true")
			if got := strings.Fields(string(out)); err == nil && (len(got) == 0 || got[len(got)-1] != s.UID) {
				err = fmt.Errorf("it noted %q", out)
			}
			return err
		})
	}
}

// TestTemplateThatFails says which command, how it ended and what it said, and leaves nothing on the node.
func TestTemplateThatFails(t *testing.T) {
	w := enter(t)
	req := &dormousev1.CreateTemplateRequest{Name: "broken", Spec: &dormousev1.TemplateSpec{Sandbox: w.spec(), Setup: []*dormousev1.SetupCommand{
		{Argv: []string{"true"}}, {Argv: []string{"sh", "-c", "echo to one; echo to the other >&2; exit 9"}}}}}
	_, err := w.api.CreateTemplate(w.ctx, req)
	if e := errs.From(err); e.Reason != errs.SetupFailed || e.Details["index"] != "1" || e.Details["exit_code"] != "9" || e.Details["output_tail"] != "to one\nto the other\n" {
		t.Fatalf("%v %v", err, e.Details)
	}
	all, err := client.Collect(w.api.ListTemplates(w.ctx, &dormousev1.ListTemplatesRequest{}))
	w.ok(err)
	if len(all) != 1 || all[0].GetStatus().GetPhase() != dormousev1.TemplatePhase_TEMPLATE_PHASE_FAILED || all[0].GetStatus().GetFailure().GetExitCode() != 9 {
		t.Fatalf("%v", all)
	}
	w.ok(w.api.Template(all[0].GetMeta().GetUid()).Delete(w.ctx, ""))
}

// TestWarmStartsAtTheCommandLine: the page docs/warm.md, in short.
func TestWarmStartsAtTheCommandLine(t *testing.T) {
	w := enter(t)
	run := func(args ...string) string {
		t.Helper()
		out, code := w.dormouse(args...)
		if code != 0 {
			t.Fatalf("%v: %d: %s", args, code, out)
		}
		return strings.TrimSpace(out)
	}
	run("template", "create", "--name", "py", "--cpu-request", "10m", "--setup", "echo 1 >/one", "--setup", "cat /one >/two", "--ready", "test -s /two", w.busybox())
	run("pool", "create", "py", "--size", "1", "--max-members", "2", "--name", "py-pool")
	w.await("the pool is full", func() error {
		if out, _ := w.dormouse("pool", "ls"); !strings.Contains(out, "1/1") {
			return fmt.Errorf("it is %s", out)
		}
		return nil
	})
	box := run("claim", "py", "--name", "job-7", "--lifetime", "1h")
	if got := run("exec", "job-7", "--", "cat", "/two"); got != "1" {
		t.Errorf("it has %q", got)
	}
	if got := run("get", "-o", "name", "job-7"); !strings.Contains(got, box) {
		t.Errorf("%s is not %s", got, box)
	}
	run("pool", "set", "py-pool", "--size", "0")
	if out, code := w.dormouse("template", "rm", "py"); code != 4 {
		t.Errorf("a template that a pool is of was deleted: %d %s", code, out)
	}
	run("pool", "rm", "py-pool")
	cold := run("claim", "py") // no pool: restored
	run("rm", box, cold)
	run("template", "rm", "py")
}
