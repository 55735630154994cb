package guestinit

import (
	"syscall"

	"github.com/dormouse-run/dormouse/agentd/internal/guestwire"
)

// Where the sandbox learns who it is.
const (
	identityDir  = "/run/dormouse"
	identityFile = "identity.json"
	restoreHook  = "/etc/dormouse/on-restore"
)

func (a *agent) configure(m *guestwire.Configure) (guestwire.Message, *failure) {
	if err := validConfigure(m); err != nil {
		return nil, err
	}
	done := &guestwire.Configured{}
	etc := a.cfg.Root + "/etc"
	if m.Hostname != "" {
		a.hostname = m.Hostname
		done.HostnameSet = syscall.Sethostname([]byte(m.Hostname)) == nil
		if err := replaceFile(etc, "hostname", m.Hostname+"\n", 0o644); err != nil {
			return nil, notWritten("/etc/hostname", err)
		}
	}
	if m.WriteHosts || len(m.Hosts) > 0 {
		if err := replaceFile(etc, "hosts", hostsFile(a.hostname, m.Hosts), 0o644); err != nil {
			return nil, notWritten("/etc/hosts", err)
		}
	}
	if m.Resolver != nil {
		if err := replaceFile(etc, "resolv.conf", resolverFile(m.Resolver), 0o644); err != nil {
			return nil, notWritten("/etc/resolv.conf", err)
		}
	}
	if m.ReplaceSecretEnvironment {
		a.secrets = m.SecretEnvironment
	}
	if a.named == a.uid && a.namedGen == a.ch.Generation {
		return done, nil
	}
	identity := `{"sandbox_uid":` + quote(a.uid) + `,"hostname":` + quote(a.hostname) + `,"generation":` + itoa(a.ch.Generation) + "}\n"
	if err := replaceFile(a.cfg.Root+identityDir, identityFile, identity, 0o644); err != nil {
		return nil, notWritten(identityDir+"/"+identityFile, err)
	}
	done.IdentityChanged = a.named != a.uid
	if done.IdentityChanged {
		if err := replaceFile(etc, "machine-id", machineID(a.uid)+"\n", 0o444); err != nil {
			return nil, notWritten("/etc/machine-id", err)
		}
	}
	if a.named != "" && (done.IdentityChanged && m.Hook != guestwire.HookLater || m.Hook == guestwire.HookNow) {
		done.HookProcessID = a.runHook()
	}
	a.named, a.namedGen = a.uid, a.ch.Generation
	return done, nil
}

// machineID is the uid as /etc/machine-id has it: its hexadecimal digits alone.
func machineID(uid string) string {
	id := make([]byte, 0, len(uid))
	for i := range len(uid) {
		if uid[i] != '-' {
			id = append(id, uid[i])
		}
	}
	return string(id)
}

// runHook starts the image's own hook after a restore or a claim, if it has one. It is a process like others:
// listed, its output kept. That it cannot start is the image's affair.
func (a *agent) runHook() string {
	hook := a.cfg.Root + restoreHook
	if runnable(hook, hook) != nil {
		return ""
	}
	m := &guestwire.Start{ProcessID: "on-restore-" + itoa(a.ch.Generation), Args: []string{hook, a.uid}, TimeoutMS: 60_000}
	if _, err := a.start(m); err != nil {
		return ""
	}
	return m.ProcessID
}

func notWritten(path string, err error) *failure {
	return fail("SANDBOX_FAILED", "guest init cannot write "+path+": "+err.Error()).with("step", "configure")
}

// validConfigure lets nothing into the files that would make other lines of them.
func validConfigure(m *guestwire.Configure) *failure {
	var words []string
	words = append(words, m.Hostname)
	for _, h := range m.Hosts {
		words = append(append(words, h.Address), h.Names...)
	}
	if r := m.Resolver; r != nil {
		words = append(append(append(words, r.Nameservers...), r.Searches...), r.Options...)
	}
	for _, w := range words {
		for i := range len(w) {
			if w[i] <= ' ' || w[i] == 0x7f {
				return fail("INVALID_FIELD", "host names, addresses and resolver options hold no blanks and no control characters").with("field", "hosts")
			}
		}
	}
	if m.Hook > guestwire.HookNow {
		return fail("INVALID_FIELD", "there is no such time for the hook").with("field", "hook")
	}
	if len(m.Hostname) > 64 {
		return fail("INVALID_FIELD", "a host name has at most 64 bytes").with("field", "hostname")
	}
	for _, kv := range m.SecretEnvironment {
		if k, _, ok := cut(kv, '='); !ok || k == "" {
			return fail("INVALID_FIELD", "an environment entry is NAME=value").with("field", "secret_environment")
		}
		if _, _, nul := cut(kv, 0); nul {
			return fail("INVALID_FIELD", "an environment entry holds no zero byte").with("field", "secret_environment")
		}
	}
	return nil
}

func hostsFile(hostname string, hosts []guestwire.HostEntry) string {
	s := "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
	named := false
	for _, h := range hosts {
		s += h.Address + "\t"
		for i, n := range h.Names {
			if i > 0 {
				s += " "
			}
			s += n
			named = named || n == hostname
		}
		s += "\n"
	}
	if !named && hostname != "" {
		s += "127.0.1.1\t" + hostname + "\n"
	}
	return s
}

func resolverFile(r *guestwire.Resolver) string {
	s := ""
	for _, n := range r.Nameservers {
		s += "nameserver " + n + "\n"
	}
	for _, l := range []struct {
		word string
		list []string
	}{{"search", r.Searches}, {"options", r.Options}} {
		if len(l.list) == 0 {
			continue
		}
		s += l.word
		for _, w := range l.list {
			s += " " + w
		}
		s += "\n"
	}
	return s
}

// quote makes a JSON string of one that is printable ASCII but for what it escapes.
func quote(s string) string {
	const hex = "0123456789abcdef"
	b := []byte{'"'}
	for i := range len(s) {
		switch c := s[i]; {
		case c == '"' || c == '\\':
			b = append(b, '\\', c)
		case c < ' ' || c >= 0x7f:
			b = append(b, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
		default:
			b = append(b, c)
		}
	}
	return string(append(b, '"'))
}
