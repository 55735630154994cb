package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/cluster"
)

// The guest sees the memory that its control group has: the user's limit, the private layer's and the
// runtime's share, and not the machine's. What it requested is protected. So it is after a restore, too.
func TestB25MemoryShows(t *testing.T) {
	w := enter(t)
	spec := w.spec()
	spec.Resources.MemoryLimitBytes, spec.Resources.DiskLimitBytes = 96*mib, 32*mib
	spec.Resources.MemoryRequestBytes = 48 * mib
	s := w.create(spec)
	shows := func(s *client.Sandbox) {
		t.Helper()
		kb, err := strconv.ParseInt(w.sh(s, "awk '/MemTotal/ {print $2}' /proc/meminfo"), 10, 64)
		w.ok(err)
		limit, err := strconv.ParseInt(w.limitOf(s, "memory", "memory.limit_in_bytes", "memory.max"), 10, 64)
		w.ok(err)
		if kb<<10 != limit || limit < 128*mib || limit > 256*mib {
			t.Errorf("MemTotal is %d, the group's limit %d; 96 MiB and 32 MiB were asked for", kb<<10, limit)
		}
		if low := w.limitOf(s, "memory", "memory.soft_limit_in_bytes", "memory.low"); low != strconv.Itoa(48*mib) {
			t.Errorf("%s bytes are protected; 48 MiB were requested", low)
		}
	}
	shows(s)
	restored, err := w.checkpoint(s).Restore(w.ctx, &dormousev1.RestoreSandboxRequest{})
	w.ok(err)
	w.ok(s.Delete(w.ctx, ""))
	shows(restored)
}

// limitOf reads a limit of the node's only sandbox: from the control groups v1 or v2.
func (w *world) limitOf(s *client.Sandbox, controller, v1, v2 string) string {
	w.Helper()
	parent := w.CgroupParent(w.nodeOf(s))
	for _, pattern := range []string{"/sys/fs/cgroup/" + controller + parent + "/*/" + v1, "/sys/fs/cgroup" + parent + "/*/" + v2} {
		files, err := filepath.Glob(pattern)
		w.ok(err)
		if len(files) > 1 {
			w.Fatalf("more than one group: %v", files)
		}
		for _, f := range files {
			limit, err := os.ReadFile(f)
			w.ok(err)
			return strings.TrimSpace(string(limit))
		}
	}
	w.Fatalf("no control group below %s has %s or %s", parent, v1, v2)
	return ""
}

// Filling the private layer gives ENOSPC inside, and the sandbox lives (B26). The layer's room is its own: it
// is more than the memory that the processes have.
func TestB26DiskLimit(t *testing.T) {
	w := enter(t)
	spec := w.spec()
	spec.Resources.MemoryLimitBytes, spec.Resources.DiskLimitBytes = 32*mib, 128*mib
	s := w.create(spec)
	fill := func(s *client.Sandbox, dir string) {
		t.Helper()
		out := w.sh(s, fmt.Sprintf("dd if=/dev/zero of=%s/fill bs=1M count=1000 2>&1; wc -c < %[1]s/fill; rm %[1]s/fill", dir))
		lines := strings.Split(out, "\n")
		written, err := strconv.Atoi(lines[len(lines)-1])
		if err != nil || !strings.Contains(out, "No space left on device") || written < 96*mib || written > 128*mib {
			t.Errorf("filling %s: %s", dir, out)
		}
		if got := w.sh(s, "echo again > "+dir+"/after && cat "+dir+"/after"); got != "again" {
			t.Errorf("after it was filled and emptied: %q", got)
		}
	}
	for _, dir := range []string{"/root", "/tmp", "/var/tmp"} {
		fill(s, dir)
	}
	w.ok(s.Refresh(w.ctx))
	if ph := s.Last.GetStatus().GetPhase(); ph != dormousev1.SandboxPhase_SANDBOX_PHASE_RUNNING {
		t.Errorf("the sandbox is %s", ph)
	}
	// Full when it is frozen, full when it wakes.
	w.sh(s, "dd if=/dev/zero of=/root/full bs=1M count=100 2>/dev/null; true")
	restored, err := w.checkpoint(s).Restore(w.ctx, &dormousev1.RestoreSandboxRequest{})
	w.ok(err)
	if got := w.sh(restored, "wc -c < /root/full; rm /root/full"); got != strconv.Itoa(100*mib) {
		t.Errorf("the restored file has %s bytes", got)
	}
	fill(restored, "/root")
}

// More memory than there is ends the sandbox, with the reason, and with nothing left on the node.
func TestB26OutOfMemory(t *testing.T) {
	w := enter(t)
	spec := w.spec("sh", "-c", "mkfifo /tmp/go; read word </tmp/go; exec tail /dev/zero") // its start is answered before it ends its sandbox
	spec.Resources.MemoryLimitBytes, spec.Resources.DiskLimitBytes = 32*mib, 16*mib
	s, err := w.api.CreateSandbox(w.ctx, &dormousev1.CreateSandboxRequest{Spec: spec})
	w.ok(err)
	_, _ = cluster.Exec(w.ctx, s, "sh", "-c", "until [ -p /tmp/go ]; do sleep 0.01; done; echo go >/tmp/go") // it may not be answered
	w.ok(s.Await(w.ctx, func(s *dormousev1.Sandbox) bool {
		ph := s.GetStatus().GetPhase()
		return ph == dormousev1.SandboxPhase_SANDBOX_PHASE_FAILED || ph == dormousev1.SandboxPhase_SANDBOX_PHASE_STOPPED
	}))
	if r := s.Last.GetStatus().GetReason(); r != "OOMKilled" {
		t.Errorf("reason %q: %v", r, s.Last.GetStatus())
	}
}

// A sandbox' limit of CPU is its control group's.
func TestCPULimit(t *testing.T) {
	w := enter(t)
	spec := w.spec()
	spec.Resources.CpuLimitMillis = 250
	s := w.create(spec)
	if quota := w.limitOf(s, "cpu", "cpu.cfs_quota_us", "cpu.max"); quota != "25000" && quota != "25000 100000" {
		t.Errorf("the quota is %s, want 25000 of each 100000", quota)
	}
}

// A limit of a volume's size is enforced, or refused where that cannot be.
func TestVolumeSizeLimit(t *testing.T) {
	w := enter(t)
	v, err := w.api.CreateVolume(w.ctx, &dormousev1.CreateVolumeRequest{Name: "small", Spec: &dormousev1.VolumeSpec{SizeLimitBytes: 8 * mib}})
	if err != nil {
		w.refused(err, errs.NotSupported)
		if all, err := client.Collect(w.api.ListVolumes(w.ctx, &dormousev1.ListVolumesRequest{})); err != nil || len(all) != 0 {
			t.Errorf("the refused volume is there: %v, %v", all, err)
		}
		return
	}
	spec := w.spec()
	spec.Volumes = []*dormousev1.VolumeMount{mount(v, "/data")}
	s := w.create(spec)
	out := w.sh(s, "dd if=/dev/zero of=/data/fill bs=1M count=64 2>&1; wc -c < /data/fill")
	lines := strings.Split(out, "\n")
	if written, err := strconv.Atoi(lines[len(lines)-1]); err != nil || written > 8*mib {
		t.Errorf("64 MiB into 8: %s", out)
	}
	w.sh(s, "rm /data/fill; echo x > /data/file")
}
