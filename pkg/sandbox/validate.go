package sandbox

import (
	"fmt"
	"path"
	"regexp"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// Limits at the door. Sizes in bytes.
const (
	MaxName        = 63
	MaxLabels      = 64
	MaxLabelKey    = 128
	MaxLabelValue  = 256
	MaxImage       = 512
	MaxArgv        = 1024
	MaxArgvBytes   = 128 << 10
	MaxEnv         = 1024
	MaxEnvBytes    = 256 << 10
	MaxVolumes     = 32
	MaxPath        = 1024
	MaxSelector    = 32
	MaxForkCount   = 64
	MaxExposed     = 64
	MaxOperationID = 36
)

// Bounds of the times that a sandbox is given.
const (
	FloorTimer = time.Second
	MaxTimer   = 10 * 365 * 24 * time.Hour
)

// ValidateIdle checks what is asked for when a sandbox is not used.
func ValidateIdle(prefix string, timeout time.Duration, on IdleAction) *Problem {
	switch on {
	case "", IdlePause, IdleHibernate, IdleDelete:
	default:
		return invalid(prefix+"on_idle", "pause, hibernate or delete")
	}
	if timeout == 0 && on != "" {
		return invalid(prefix+"on_idle", "only with an idle_timeout")
	}
	return ValidateTimer(prefix+"idle_timeout", timeout)
}

// ValidateTimer checks a time that a sandbox is given; zero is none.
func ValidateTimer(field string, d time.Duration) *Problem {
	switch {
	case d == 0:
		return nil
	case d < FloorTimer:
		return &Problem{Reason: "BELOW_FLOOR", Field: field, Message: fmt.Sprintf("%s: at least %s, got %s", field, FloorTimer, d),
			Details: map[string]string{"floor": FloorTimer.String(), "got": d.String()}}
	case d > MaxTimer:
		return &Problem{Reason: "LIMIT_EXCEEDED", Field: field, Message: fmt.Sprintf("%s: at most %s, got %s", field, MaxTimer, d),
			Details: map[string]string{"limit": MaxTimer.String(), "got": d.String()}}
	}
	return nil
}

// Problem is one thing that is wrong with a request. Reason is a reason of pkg/errs, by its text.
type Problem struct {
	Reason  string
	Field   string
	Message string
	Details map[string]string
}

func (p *Problem) Error() string { return p.Message }

func invalid(field, format string, args ...any) *Problem {
	return &Problem{Reason: "INVALID_FIELD", Field: field, Message: field + ": " + fmt.Sprintf(format, args...)}
}

func tooLarge(field, unit string, limit, got int) *Problem {
	return &Problem{Reason: "LIMIT_EXCEEDED", Field: field,
		Message: fmt.Sprintf("%s: at most %d %s, got %d", field, limit, unit, got),
		Details: map[string]string{"limit": strconv.Itoa(limit), "got": strconv.Itoa(got)}}
}

func below(field string, floor, got int64) *Problem {
	return &Problem{Reason: "BELOW_FLOOR", Field: field,
		Message: fmt.Sprintf("%s: at least %d, got %d", field, floor, got),
		Details: map[string]string{"floor": strconv.FormatInt(floor, 10), "got": strconv.FormatInt(got, 10)}}
}

var (
	nameForm = regexp.MustCompile(`^[a-z0-9]([a-z0-9._-]*[a-z0-9])?$`)
	hostForm = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?$`)
	envForm  = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_.-]*$`)
	userForm = regexp.MustCompile(`^([a-z_][a-zA-Z0-9_.-]*\$?|[0-9]+)(:([a-z_][a-zA-Z0-9_.-]*|[0-9]+))?$`)
)

// ValidateName checks a name; empty is allowed.
func ValidateName(field, name string) *Problem {
	switch {
	case name == "":
		return nil
	case len(name) > MaxName:
		return tooLarge(field, "characters", MaxName, len(name))
	case !nameForm.MatchString(name):
		return invalid(field, "lower case letters, digits, '.', '_' and '-', beginning and ending with a letter or digit")
	}
	return nil
}

// ValidateHostname checks a host name; empty is allowed.
func ValidateHostname(field, name string) *Problem {
	if name != "" && (len(name) > MaxName || !hostForm.MatchString(name)) {
		return invalid(field, "letters, digits and '-', at most %d", MaxName)
	}
	return nil
}

// ValidateLabels checks labels.
func ValidateLabels(field string, labels map[string]string) *Problem {
	if len(labels) > MaxLabels {
		return tooLarge(field, "labels", MaxLabels, len(labels))
	}
	for k, v := range labels {
		switch {
		case k == "":
			return invalid(field, "a label needs a key")
		case len(k) > MaxLabelKey:
			return tooLarge(field, "bytes in a key", MaxLabelKey, len(k))
		case len(v) > MaxLabelValue:
			return tooLarge(field, "bytes in a value", MaxLabelValue, len(v))
		case !utf8.ValidString(k) || !utf8.ValidString(v) || strings.ContainsAny(k, "=, \n\x00"):
			return invalid(field, "a key is UTF-8 without '=', ',', spaces and newlines; a value is UTF-8")
		}
	}
	return nil
}

// ValidateEnv checks environment names and sizes. Values are never put into the message.
func ValidateEnv(field string, env map[string]string) *Problem {
	if len(env) > MaxEnv {
		return tooLarge(field, "variables", MaxEnv, len(env))
	}
	total := 0
	for k, v := range env {
		total += len(k) + len(v) + 2
		if !envForm.MatchString(k) {
			return invalid(field, "a variable's name has letters, digits, '_', '.' and '-'")
		}
		if strings.ContainsRune(v, 0) {
			return invalid(field, "a value has a NUL byte")
		}
	}
	if total > MaxEnvBytes {
		return tooLarge(field, "bytes in all", MaxEnvBytes, total)
	}
	return nil
}

// ValidateArgv checks an argument list; empty is allowed.
func ValidateArgv(field string, argv []string) *Problem {
	if len(argv) > MaxArgv {
		return tooLarge(field, "arguments", MaxArgv, len(argv))
	}
	total := 0
	for _, a := range argv {
		total += len(a) + 1
		if strings.ContainsRune(a, 0) {
			return invalid(field, "an argument has a NUL byte")
		}
	}
	if total > MaxArgvBytes {
		return tooLarge(field, "bytes in all", MaxArgvBytes, total)
	}
	if len(argv) > 0 && argv[0] == "" {
		return invalid(field, "the program's name is empty")
	}
	return nil
}

// ValidateUser checks a user: a name, a uid, or either with :group.
func ValidateUser(field, user string) *Problem {
	if user != "" && (len(user) > 128 || !userForm.MatchString(user)) {
		return invalid(field, "a name, a uid, or uid:gid")
	}
	return nil
}

// ValidatePath checks an absolute clean path; empty is allowed.
func ValidatePath(field, p string) *Problem {
	switch {
	case p == "":
		return nil
	case len(p) > MaxPath:
		return tooLarge(field, "bytes", MaxPath, len(p))
	case !strings.HasPrefix(p, "/") || path.Clean(p) != p || strings.ContainsRune(p, 0):
		return &Problem{Reason: "UNSAFE_PATH", Field: field,
			Message: field + ": an absolute path without '..', '.', doubled or trailing slashes",
			Details: map[string]string{"path": p}}
	}
	return nil
}

// reserved paths cannot be volumes: the runtime and guest init own them.
var reserved = []string{"/proc", "/sys", "/dev", "/.dormouse", "/run/dormouse"}

func validateVolumes(vols []VolumeMount) *Problem {
	if len(vols) > MaxVolumes {
		return tooLarge("spec.volumes", "volumes", MaxVolumes, len(vols))
	}
	byPath := make(map[string]bool, len(vols))
	byUID := make(map[string]bool, len(vols))
	for i, v := range vols {
		field := fmt.Sprintf("spec.volumes[%d].path", i)
		if v.Path == "" || v.Path == "/" {
			return invalid(field, "name a folder below /")
		}
		if p := ValidatePath(field, v.Path); p != nil {
			return p
		}
		for _, r := range reserved {
			if v.Path == r || strings.HasPrefix(v.Path, r+"/") {
				return invalid(field, "%s belongs to the runtime", r)
			}
		}
		if byPath[v.Path] {
			return &Problem{Reason: "DUPLICATE_PATH", Field: field, Message: "two volumes at " + v.Path + "; give each a path of its own", Details: map[string]string{"path": v.Path}}
		}
		if byUID[v.VolumeUID] {
			return invalid(fmt.Sprintf("spec.volumes[%d].volume_uid", i), "the volume is attached twice")
		}
		byPath[v.Path], byUID[v.VolumeUID] = true, true
	}
	return nil
}

// ValidateExposed checks the ports that are served over HTTP.
func ValidateExposed(field string, ports []uint32) *Problem {
	if len(ports) > MaxExposed {
		return tooLarge(field, "ports", MaxExposed, len(ports))
	}
	seen := make(map[uint32]bool, len(ports))
	for i, p := range ports {
		at := fmt.Sprintf("%s[%d]", field, i)
		if p < 1 || p > 65535 {
			return invalid(at, "%d is no port; use 1 to 65535", p)
		}
		if seen[p] {
			return invalid(at, "port %d is there twice", p)
		}
		seen[p] = true
	}
	return nil
}

func (r Resources) validate() *Problem {
	for _, f := range []struct {
		name  string
		value int64
	}{
		{"cpu_request_millis", r.CPURequestMillis},
		{"cpu_limit_millis", r.CPULimitMillis},
		{"memory_request_bytes", r.MemoryRequestBytes},
		{"memory_limit_bytes", r.MemoryLimitBytes},
		{"disk_limit_bytes", r.DiskLimitBytes},
	} {
		if f.value < 0 {
			return invalid("spec.resources."+f.name, "must not be negative")
		}
	}
	switch {
	case r.CPULimitMillis > 0 && r.CPULimitMillis < FloorCPULimitMillis:
		return below("spec.resources.cpu_limit_millis", FloorCPULimitMillis, r.CPULimitMillis)
	case r.MemoryLimitBytes > 0 && r.MemoryLimitBytes < FloorMemoryLimitBytes:
		return below("spec.resources.memory_limit_bytes", FloorMemoryLimitBytes, r.MemoryLimitBytes)
	case r.DiskLimitBytes > 0 && r.DiskLimitBytes < FloorDiskLimitBytes:
		return below("spec.resources.disk_limit_bytes", FloorDiskLimitBytes, r.DiskLimitBytes)
	case r.CPULimitMillis > 0 && r.CPURequestMillis > r.CPULimitMillis:
		return invalid("spec.resources.cpu_request_millis", "above the limit")
	case r.MemoryLimitBytes > 0 && r.MemoryRequestBytes > r.MemoryLimitBytes:
		return invalid("spec.resources.memory_request_bytes", "above the limit")
	}
	return nil
}

// Validate checks a spec as it comes in at the door. The first problem is returned, nil for none.
// The uids of volumes are checked by who looks them up, the image reference by who parses it.
func (s Spec) Validate() *Problem {
	switch {
	case s.Image == "":
		return invalid("spec.image", "name an image")
	case len(s.Image) > MaxImage:
		return tooLarge("spec.image", "bytes", MaxImage, len(s.Image))
	case s.RunImageCommand && len(s.Command) > 0:
		return invalid("spec.run_image_command", "and a command exclude each other")
	case s.Network != "" && s.Network != NetworkNone && s.Network != NetworkOutbound:
		return invalid("spec.network", "none or outbound")
	case s.Egress != nil && s.Network != NetworkOutbound:
		return invalid("spec.egress", "only with network outbound")
	case s.RuntimeClass != "" && s.RuntimeClass != "runsc":
		return &Problem{Reason: "NOT_SUPPORTED", Field: "spec.runtime_class", Message: "the only runtime class is runsc", Details: map[string]string{"feature": "runtime class"}}
	case len(s.NodeSelector) > MaxSelector:
		return tooLarge("spec.node_selector", "labels", MaxSelector, len(s.NodeSelector))
	}
	for _, check := range []func() *Problem{
		func() *Problem { return ValidateHostname("spec.hostname", s.Hostname) },
		func() *Problem { return ValidateArgv("spec.command", s.Command) },
		func() *Problem { return ValidateEnv("spec.env", s.Env) },
		func() *Problem { return ValidateUser("spec.user", s.User) },
		func() *Problem { return ValidatePath("spec.working_dir", s.WorkingDir) },
		func() *Problem { return ValidateLabels("spec.node_selector", s.NodeSelector) },
		s.Resources.validate,
		func() *Problem { return ValidateTimer("spec.lifetime", s.Lifetime) },
		func() *Problem { return ValidateIdle("spec.", s.IdleTimeout, s.OnIdle) },
		func() *Problem { return validateVolumes(s.Volumes) },
		func() *Problem { return s.Egress.Validate("spec.egress") },
		func() *Problem { return ValidateExposed("spec.exposed_ports", s.ExposedPorts) },
	} {
		if p := check(); p != nil {
			return p
		}
	}
	return nil
}
