package preflight

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// Verdict of a check.
type Verdict string

// The verdicts, see the package's documentation.
const (
	OK     Verdict = "ok"
	Raise  Verdict = "raise"
	Lower  Verdict = "lower"
	Refuse Verdict = "refuse"
)

// Check is one look at the host.
type Check struct {
	Name    string  `json:"name"`
	Found   string  `json:"found"`
	Needed  string  `json:"needed"`
	Verdict Verdict `json:"verdict"`
	// Sandboxes is how many the host allows by this check; -1 where it bounds nothing.
	Sandboxes int64 `json:"sandboxes"`
	// Why the value is needed, and how to mend it, for one that is not ok.
	Why    string `json:"why"`
	Remedy string `json:"remedy,omitempty"`

	limit *limit
	need  int64
}

// Raised is a limit that was raised.
type Raised struct {
	Name     string
	Old, New int64
}

// Want is what the host is to carry.
type Want struct {
	Sandboxes int64
	Outbound  bool // there are outbound networks
}

// Host is where it is looked. The zero value is this machine.
type Host struct {
	Proc string // /proc
	// UID and Capabilities are the caller's; Descriptors its limit, and SetDescriptors how that is raised. For tests.
	UID            func() int
	Capabilities   func() (uint64, error)
	Descriptors    func() (soft, hard int64, err error)
	SetDescriptors func(soft int64) error
}

func (h Host) fill() Host {
	if h.Proc == "" {
		h.Proc = "/proc"
	}
	if h.UID == nil {
		h.UID = os.Geteuid
	}
	if h.Capabilities == nil {
		h.Capabilities = capabilities
	}
	if h.Descriptors == nil {
		h.Descriptors, h.SetDescriptors = descriptors, setDescriptors
	}
	return h
}

// limit is a number of the host's that has to grow with the sandboxes.
type limit struct {
	name      string
	base, per int64
	why       string
	outbound  bool // only with outbound networks
}

func (l limit) need(n int64) int64 { return l.base + l.per*n }

// allows is how many sandboxes the value is enough for.
func (l limit) allows(value int64) int64 {
	switch {
	case value >= l.base && l.per == 0:
		return -1
	case value < l.base:
		return 0
	}
	return (value - l.base) / l.per
}

const threads = "a sandbox has 13 threads when idle, and up to 48 after a restore"

// nofile is no file of the kernel's but a limit of the process.
const nofile = "RLIMIT_NOFILE"

var limits = []limit{
	{name: "kernel.pid_max", base: 8192, per: 48, why: threads},
	{name: "kernel.threads-max", base: 8192, per: 48, why: threads},
	{name: nofile, base: 1024, per: 8, why: "agentd holds the channel of each sandbox open"},
	{name: "fs.file-max", base: 16384, per: 128, why: "files that all processes have open"},
	{name: "vm.max_map_count", base: 65530, why: "a sandbox maps its memory in many pieces"},
	{name: "user.max_user_namespaces", base: 256, per: 2, why: "each sandbox is in namespaces of its own"},
	{name: "user.max_pid_namespaces", base: 256, per: 2, why: "each sandbox is in namespaces of its own"},
	{name: "user.max_net_namespaces", base: 256, per: 2, why: "each sandbox is in namespaces of its own, and some are kept ready"},
	{name: "user.max_mnt_namespaces", base: 256, per: 2, why: "each sandbox is in namespaces of its own"},
	{name: "user.max_ipc_namespaces", base: 256, per: 2, why: "each sandbox is in namespaces of its own"},
	{name: "user.max_uts_namespaces", base: 256, per: 2, why: "each sandbox is in namespaces of its own"},
	{name: "fs.mount-max", base: 4096, per: 4, why: "each sandbox's network namespace is a mount of the host's"},
	{name: "net.netfilter.nf_conntrack_max", base: 4096, per: 64, why: "connections of outbound networks are tracked", outbound: true},
}

// Limits compares the host's limits with what is wanted, and looks whether a sandbox can run at all.
func Limits(h Host, w Want) []Check {
	h = h.fill()
	all := []Check{h.rights(), h.memoryGroup(), h.ptrace()}
	for i := range limits {
		l := &limits[i]
		if l.outbound && !w.Outbound {
			continue
		}
		found, ceiling, err := h.read(l.name)
		if errors.Is(err, fs.ErrNotExist) {
			continue // this kernel has no such limit
		}
		all = append(all, judge(l, w.Sandboxes, found, ceiling, err))
	}
	return all
}

func judge(l *limit, n, found, ceiling int64, err error) Check {
	need := l.need(n)
	c := Check{Name: l.name, Found: strconv.FormatInt(found, 10), Needed: strconv.FormatInt(need, 10), Verdict: OK, Sandboxes: l.allows(found), Why: l.why, limit: l, need: need}
	switch {
	case err != nil:
		c.Found, c.Verdict, c.Sandboxes, c.Remedy = err.Error(), Lower, -1, "make it readable for agentd"
	case found >= need:
	case found < ceiling:
		c.Verdict, c.need = Raise, min(need, ceiling)
		c.Remedy = l.remedy(need)
	default:
		c.Verdict, c.Remedy = Lower, l.remedy(need)
	}
	if c.Verdict == Lower && c.Sandboxes == 0 {
		c.Verdict = Refuse
	}
	return c
}

func (l limit) remedy(need int64) string {
	if l.name == nofile {
		return fmt.Sprintf("start agentd with LimitNOFILE=%d", need)
	}
	return fmt.Sprintf("sysctl -w %s=%d, and the same in /etc/sysctl.d", l.name, need)
}

func (h Host) file(name string) string {
	parts := strings.SplitN(name, ".", 2)
	if strings.HasPrefix(name, "net.netfilter.") {
		parts = strings.Split(name, ".")
	}
	return filepath.Join(append([]string{h.Proc, "sys"}, parts...)...)
}

// read gives a limit, and up to what it can be raised.
func (h Host) read(name string) (found, ceiling int64, err error) {
	if name == nofile {
		return h.Descriptors()
	}
	data, err := os.ReadFile(h.file(name))
	if err != nil {
		return 0, 0, err
	}
	found, err = strconv.ParseInt(strings.TrimSpace(string(data)), 10, 64)
	if errors.Is(err, strconv.ErrRange) {
		return math.MaxInt64, math.MaxInt64, nil // more than anybody needs
	}
	if name == "kernel.pid_max" {
		return found, 1 << 22, err // the kernel's own bound
	}
	return found, math.MaxInt64, err
}

// RaiseAll raises what is to be raised, and judges that anew. What could not be raised is lower.
func RaiseAll(h Host, checks []Check) (after []Check, raised []Raised) {
	h = h.fill()
	after = slices.Clone(checks)
	for i, c := range after {
		if c.Verdict != Raise {
			continue
		}
		old, _, err := h.read(c.Name)
		if err == nil {
			err = h.write(c.Name, c.need)
		}
		found, _, readErr := h.read(c.Name)
		now := c
		now.Found, now.Sandboxes = strconv.FormatInt(found, 10), c.limit.allows(found)
		wanted, _ := strconv.ParseInt(c.Needed, 10, 64)
		switch {
		case err == nil && readErr == nil && found >= wanted:
			now.Verdict, now.Remedy = OK, ""
		default:
			now.Verdict = Lower
			if err != nil {
				now.Remedy += fmt.Sprintf(" (it could not be raised: %v)", err)
			}
			if now.Sandboxes == 0 {
				now.Verdict = Refuse
			}
		}
		if found > old {
			raised = append(raised, Raised{c.Name, old, found})
		}
		after[i] = now
	}
	return after, raised
}

func (h Host) write(name string, value int64) error {
	if name == nofile {
		return h.SetDescriptors(value)
	}
	return os.WriteFile(h.file(name), []byte(strconv.FormatInt(value, 10)), 0o644) //nolint:gosec // a file of the kernel
}

// Waterline is how many sandboxes the host allows, at most n, and which check says so.
func Waterline(checks []Check, n int64) (int64, *Check) {
	var by *Check
	for i := range checks {
		if c := &checks[i]; c.Verdict != OK && c.Sandboxes >= 0 && c.Sandboxes < n {
			n, by = c.Sandboxes, c
		}
	}
	return n, by
}

// Refusal is NOT_SUPPORTED where no sandbox can run on the host, with all that is in the way.
func Refusal(checks []Check) error {
	var why, names []string
	for _, c := range checks {
		if c.Verdict == Refuse {
			names = append(names, c.Name)
			why = append(why, fmt.Sprintf("%s is %s, %s is needed: %s", c.Name, c.Found, c.Needed, c.Remedy))
		}
	}
	if len(why) == 0 {
		return nil
	}
	return errs.New(errs.NotSupported, "this host runs no sandbox (%s); `agentctl preflight` has all checks", strings.Join(why, "; ")).With("feature", strings.Join(names, ", "))
}

// rights: root with the capabilities that a launch needs.
func (h Host) rights() Check {
	const needed = "root, with CAP_SYS_ADMIN and CAP_NET_ADMIN"
	c := Check{Name: "rights", Needed: needed, Verdict: OK, Sandboxes: -1, Why: "namespaces, networks and control groups are made"}
	caps, err := h.Capabilities()
	if err != nil {
		c.Found, c.Verdict = err.Error(), Refuse
		return c
	}
	has := func(n uint) bool { return caps&(1<<n) != 0 }
	c.Found = fmt.Sprintf("uid %d, CAP_SYS_ADMIN %t, CAP_NET_ADMIN %t", h.UID(), has(unix.CAP_SYS_ADMIN), has(unix.CAP_NET_ADMIN))
	if h.UID() != 0 || !has(unix.CAP_SYS_ADMIN) || !has(unix.CAP_NET_ADMIN) {
		c.Verdict, c.Remedy = Refuse, "run agentd as root on the host, or in a privileged container"
	}
	return c
}

// ptrace: gVisor's platform attaches to its own processes.
func (h Host) ptrace() Check {
	c := Check{Name: "kernel.yama.ptrace_scope", Needed: "0 to 2", Verdict: OK, Sandboxes: -1, Why: "gVisor's platform traces the processes that it makes"}
	data, err := os.ReadFile(filepath.Join(h.Proc, "sys", "kernel", "yama", "ptrace_scope"))
	if c.Found = strings.TrimSpace(string(data)); err != nil {
		c.Found = "none"
	}
	if c.Found == "3" {
		c.Verdict, c.Remedy = Refuse, "boot with kernel.yama.ptrace_scope at 2 at most: 3 cannot be taken back"
	}
	return c
}

// memoryGroup: limits of memory are kept by the memory controller.
func (h Host) memoryGroup() Check {
	c := Check{Name: "memory control groups", Needed: "enabled", Verdict: OK, Sandboxes: -1, Why: "each sandbox has a limit of its own", Found: "enabled"}
	data, err := os.ReadFile(filepath.Join(h.Proc, "cgroups"))
	if err != nil {
		c.Found, c.Verdict, c.Remedy = err.Error(), Refuse, "use a kernel with control groups"
		return c
	}
	for line := range strings.Lines(string(data)) {
		f := strings.Fields(line)
		if len(f) == 4 && f[0] == "memory" && f[3] == "1" {
			return c
		}
	}
	// Kernels that are for v2 alone may not list it there.
	if strings.Contains(string(data), "\nmemory") || !h.unifiedMemory() {
		c.Found, c.Verdict, c.Remedy = "disabled", Refuse, "boot with cgroup_enable=memory"
	}
	return c
}

func (h Host) unifiedMemory() bool {
	data, err := os.ReadFile(filepath.Join(h.Proc, "1", "root", "sys", "fs", "cgroup", "cgroup.controllers"))
	return err == nil && slices.Contains(strings.Fields(string(data)), "memory")
}

func capabilities() (uint64, error) {
	data, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(data)) {
		if text, ok := strings.CutPrefix(line, "CapEff:"); ok {
			return strconv.ParseUint(strings.TrimSpace(text), 16, 64)
		}
	}
	return 0, errors.New("/proc/self/status has no CapEff")
}

func descriptors() (soft, hard int64, err error) {
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &r); err != nil {
		return 0, 0, err
	}
	return bounded(r.Cur), bounded(r.Max), nil
}

func bounded(n uint64) int64 { return int64(min(n, math.MaxInt64)) }

func setDescriptors(soft int64) error {
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &r); err != nil {
		return err
	}
	r.Cur = min(uint64(soft), r.Max)
	return unix.Setrlimit(unix.RLIMIT_NOFILE, &r)
}
