package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/dormouse-run/dormouse/test/cluster"
	"github.com/dormouse-run/dormouse/test/proof"
)

// forks is how many copies the demo makes.
const forks = 8

// demo is what the steps hand on.
type demo struct {
	*show
	cluster *cluster.Cluster

	ref      string // the image
	volume   string // uid
	sandbox1 string // uid of the first, then of the restored sandbox
	snapshot string
	copies   []string
	last     map[string]proof.Answer // the last answer of each sandbox's process
}

func (d *demo) image(ctx context.Context) error {
	d.title("An image made on this machine (Debian, Python, the demo's program), pushed to the registry")
	start := time.Now()
	ref, err := d.cluster.PushSubject(ctx, "demo/python")
	if err != nil {
		return err
	}
	d.ref = ref
	d.note("%s %s", ref, d.took(start))
	_, err = d.run(ctx, "dormouse", "image", "pull", ref)
	return err
}

func (d *demo) sandbox(ctx context.Context) (err error) {
	d.title("A volume, and a sandbox from the image's reference: pulled, flattened to one EROFS file, started in gVisor")
	if d.volume, err = d.run(ctx, "dormouse", "volume", "create", "--name", "work"); err != nil {
		return err
	}
	if d.sandbox1, err = d.run(ctx, "dormouse", "create", "--name", "subject", "--memory", "256Mi", "--volume", d.volume+":/data", d.ref); err != nil {
		return err
	}
	d.title("A program that keeps state in memory, in a private file, in the volume and over TCP")
	if _, err = d.run(ctx, "dormouse", "exec", d.sandbox1, "--", "sh", "-c", "echo "+d.volume+" > /data/volume-uid"); err != nil {
		return err
	}
	if _, err = d.run(ctx, "dormouse", "exec", "--detach", d.sandbox1, "--", "python3", proof.SubjectPath, "serve", "16", "/data"); err != nil {
		return err
	}
	a, err := d.firstAnswer(ctx, d.sandbox1)
	if err != nil {
		return err
	}
	d.last = map[string]proof.Answer{d.sandbox1: a}
	d.note("pid %d, started at tick %s, nonce %s, answer %d, file offset %d, TCP frame %d",
		a.PID, a.StartTicks, brief(a.Nonce), a.Counter, a.FileOffset, a.TCPFrames)
	_, err = d.run(ctx, "dormouse", "ps", d.sandbox1)
	return err
}

func (d *demo) restore(ctx context.Context) (err error) {
	d.title("Checkpoint it, delete it, restore it: the same process answers")
	if d.snapshot, err = d.run(ctx, "dormouse", "checkpoint", d.sandbox1); err != nil {
		return err
	}
	if _, err = d.run(ctx, "dormouse", "rm", d.sandbox1); err != nil {
		return err
	}
	source := d.sandbox1
	if d.sandbox1, err = d.run(ctx, "dormouse", "restore", "--name", "woken", d.snapshot); err != nil {
		return err
	}
	d.last[d.sandbox1] = d.last[source]
	return d.proveNext(ctx)
}

// proveNext asks the sandbox once more, and shows this answer beside the one before.
func (d *demo) proveNext(ctx context.Context) error {
	now, err := d.ask(ctx, d.sandbox1)
	if err != nil {
		return err
	}
	if err := d.prove(d.last[d.sandbox1], now); err != nil {
		return err
	}
	d.last[d.sandbox1] = now
	return nil
}

// next asks a sandbox once more, and fails if another process answered than before.
func (d *demo) next(ctx context.Context, uid string) (proof.Answer, error) {
	a, err := d.ask(ctx, uid)
	if err != nil {
		return a, err
	}
	if bad := proof.Failed(proof.Compare(d.last[uid], a)); len(bad) > 0 {
		return a, fmt.Errorf("%w: %s: %+v", errProof, uid, bad)
	}
	d.last[uid] = a
	return a, nil
}

func (d *demo) fork(ctx context.Context) error {
	d.title("Fork it eight ways, volumes cloned: eight running copies with identities of their own")
	out, err := d.run(ctx, "dormouse", "fork", "-n", strconv.Itoa(forks), "--name-prefix", "copy", d.sandbox1)
	if err != nil {
		return err
	}
	d.copies = strings.Fields(out)
	if len(d.copies) != forks {
		return fmt.Errorf("asked for %d copies, got %d", forks, len(d.copies))
	}
	seen := map[string]string{}
	for _, uid := range d.copies {
		d.last[uid] = d.last[d.sandbox1]
		a, err := d.next(ctx, uid)
		if err != nil {
			return err
		}
		d.note("%s  hostname %-20s nonce %s  answer %d  urandom %s", uid, brief(a.Hostname), brief(a.Nonce), a.Counter, a.Urandom)
		for _, own := range []string{"hostname " + a.Hostname, "urandom " + a.Urandom, "identity " + identityOf(a)} {
			if other, ok := seen[own]; ok {
				return fmt.Errorf("%s and %s have the same %s", other, uid, own)
			}
			seen[own] = uid
		}
	}
	if err := d.proveNext(ctx); err != nil { // the source went on
		return err
	}
	_, err = d.run(ctx, "dormouse", "ls", "-o", "wide")
	return err
}

func identityOf(a proof.Answer) string {
	if a.Identity == nil {
		return ""
	}
	return a.Identity.UID
}

func (d *demo) killAgentd(ctx context.Context) error {
	d.title("Kill agentd with SIGKILL, start it again: the sandboxes are still there")
	for i := 1; i <= d.cluster.Nodes; i++ {
		pid := d.cluster.AgentdPID(i)
		start := time.Now()
		if err := d.cluster.KillAgentd(ctx, i); err != nil {
			return err
		}
		if err := d.cluster.StartAgentdReady(ctx, i); err != nil {
			return err
		}
		d.note("node %d: agentd %d killed, %d is ready %s", i, pid, d.cluster.AgentdPID(i), d.took(start))
	}
	if err := d.proveNext(ctx); err != nil {
		return err
	}
	for _, uid := range d.copies {
		if _, err := d.next(ctx, uid); err != nil {
			return err
		}
	}
	d.note("and so for the %d copies: the same processes, each one answer further", len(d.copies))
	return nil
}

func (d *demo) clean(ctx context.Context) error {
	d.title("Delete everything; agentctl doctor finds nothing left")
	if _, err := d.run(ctx, "sh", "-c", "dormouse rm $(dormouse ls -q)"); err != nil {
		return err
	}
	if _, err := d.run(ctx, "sh", "-c", "dormouse snapshot rm $(dormouse snapshot ls -q)"); err != nil {
		return err
	}
	if _, err := d.run(ctx, "sh", "-c", "dormouse volume rm $(dormouse volume ls -q)"); err != nil {
		return err
	}
	for i := 1; i <= d.cluster.Nodes; i++ {
		if _, err := d.run(ctx, "agentctl", "--socket", d.cluster.DebugSocket(i), "doctor"); err != nil {
			return err
		}
	}
	return nil
}

// ask gets one answer from the subject in a sandbox.
func (d *demo) ask(ctx context.Context, uid string) (proof.Answer, error) {
	out, _, err := d.quiet(ctx, "dormouse", "exec", uid, "--", "python3", proof.SubjectPath, "ask")
	if err != nil {
		return proof.Answer{}, err
	}
	return proof.Parse([]byte(out))
}

// firstAnswer waits for the subject to have made its state.
func (d *demo) firstAnswer(ctx context.Context, uid string) (proof.Answer, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		a, err := d.ask(ctx, uid)
		if err == nil {
			return a, nil
		}
		select {
		case <-ctx.Done():
			return a, errors.Join(errors.New("the subject never answered"), err)
		case <-time.After(200 * time.Millisecond):
		}
	}
}
