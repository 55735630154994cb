// Package redistest runs a real server, of Redis or Valkey, for a test: a process of its own, with a folder and a unix
// socket of its own and no port, which the test may kill, pause and start again on its data.
package redistest

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/test/tools"
)

// startBudget is how long a server may take to load its data and answer.
const startBudget = 2 * time.Minute

// Program is one of the servers that the catalog is kept in.
type Program struct {
	// Name is that of its subtests. Reports is what a catalog in it says about its server, up to the pinned patch.
	Name, Reports string
	binary        string
}

// Programs are the servers that tests run on: the oldest that works, which is also the one that everything
// else is tested with, and the newest of each kind.
var (
	Oldest   = Program{Name: "redis-7.0", Reports: "redis 7.0.", binary: "redis-server"}
	Programs = []Program{
		Oldest,
		{Name: "redis-8", Reports: "redis 8.", binary: "redis8-server"},
		{Name: "valkey-9", Reports: "valkey 9.", binary: "valkey9-server"},
	}
)

// Each runs a test on every server; under the race detector, which looks at this side only, on the oldest.
func Each(t *testing.T, test func(*testing.T, Program)) {
	t.Helper()
	for _, p := range Programs[:tested] {
		t.Run(p.Name, func(t *testing.T) { test(t, p) })
	}
}

// Server is a running, or killed, server. It is not safe for concurrent use.
type Server struct {
	// Socket is where it listens, the same after a restart.
	Socket string

	dir, program string
	settings     []string
	cmd          *exec.Cmd
	log          bytes.Buffer
}

// Start runs the oldest server, as Program.Start does.
func Start(t testing.TB, settings ...string) *Server {
	t.Helper()
	return Oldest.Start(t, settings...)
}

// Start runs a durable server (appendonly, appendfsync always). Settings are pairs of name and value
// that override. The test's cleanup ends the server and removes its data.
func (p Program) Start(t testing.TB, settings ...string) *Server {
	t.Helper()
	// Not t.TempDir: the path of a unix socket is short, a test's name is not.
	dir, err := os.MkdirTemp("", "dmredis")
	if err != nil {
		t.Fatal(err)
	}
	s := &Server{dir: dir, Socket: filepath.Join(dir, "s"), program: tools.Path(t, p.binary), settings: settings}
	t.Cleanup(func() {
		s.Kill(t)
		os.RemoveAll(dir)
	})
	s.Restart(t)
	return s
}

// Restart starts a killed server on the data that it left.
func (s *Server) Restart(t testing.TB) {
	t.Helper()
	args := []string{
		"--port", "0", "--unixsocket", s.Socket, "--unixsocketperm", "700", "--dir", s.dir, "--daemonize", "no",
		"--save", "", "--appendonly", "yes", "--appendfsync", "always", "--loglevel", "notice",
	}
	for i := 0; i+1 < len(s.settings); i += 2 {
		args = append(args, "--"+s.settings[i], s.settings[i+1])
	}
	s.log.Reset()
	s.cmd = exec.Command(s.program, args...)
	s.cmd.Env = append(os.Environ(), "LC_ALL=C") // a newer server refuses a locale that the machine does not have
	s.cmd.Stdout, s.cmd.Stderr = &s.log, &s.log
	// A test binary that is killed takes its server along.
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := s.cmd.Start(); err != nil {
		t.Fatalf("start redis-server: %v", err)
	}
	deadline := time.Now().Add(startBudget)
	for err := s.ping(); err != nil; err = s.ping() {
		if time.Now().After(deadline) {
			s.Kill(t)
			t.Fatalf("redis-server does not answer: %v\n%s", err, s.log.String())
		}
	}
}

// Become makes a killed server another program, which the next Restart starts on the same data.
func (s *Server) Become(t testing.TB, p Program) {
	t.Helper()
	s.program = tools.Path(t, p.binary)
}

// ping waits up to a second for one answer.
func (s *Server) ping() error {
	conn, err := net.DialTimeout("unix", s.Socket, time.Second)
	if err != nil {
		<-time.After(10 * time.Millisecond)
		return err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(time.Second)); err != nil {
		return err
	}
	if _, err := conn.Write([]byte("PING\r\n")); err != nil {
		return err
	}
	answer := make([]byte, 64)
	n, err := conn.Read(answer)
	if err != nil {
		return err
	}
	if !bytes.HasPrefix(answer[:n], []byte("+PONG")) && !bytes.HasPrefix(answer[:n], []byte("-NOAUTH")) {
		return fmt.Errorf("answer %q", answer[:n])
	}
	return nil
}

// Kill ends the server with SIGKILL and waits until it is gone. Its data stays. Harmless when it is gone.
func (s *Server) Kill(t testing.TB) {
	t.Helper()
	if s.cmd == nil || s.cmd.ProcessState != nil {
		return
	}
	if err := s.cmd.Process.Kill(); err != nil {
		t.Errorf("kill redis-server: %v", err)
	}
	// The error is the signal; what matters is that it is gone.
	_ = s.cmd.Wait()
}

// Pause stops the server's process without ending it; connections stay open. Resume lets it go on.
func (s *Server) Pause(t testing.TB) { s.signal(t, syscall.SIGSTOP) }

// Resume ends a Pause.
func (s *Server) Resume(t testing.TB) { s.signal(t, syscall.SIGCONT) }

func (s *Server) signal(t testing.TB, sig syscall.Signal) {
	t.Helper()
	if err := s.cmd.Process.Signal(sig); err != nil {
		t.Fatalf("signal redis-server: %v", err)
	}
}

// Copy keeps a copy of what a killed server has on its disk, and returns its folder.
func (s *Server) Copy(t testing.TB) string {
	t.Helper()
	kept := t.TempDir()
	if err := os.CopyFS(kept, os.DirFS(s.appendDir())); err != nil {
		t.Fatal(err)
	}
	return kept
}

// Rewind gives a killed server the data of an earlier Copy: what it acknowledged since is lost.
func (s *Server) Rewind(t testing.TB, kept string) {
	t.Helper()
	if err := os.RemoveAll(s.appendDir()); err != nil {
		t.Fatal(err)
	}
	if err := os.CopyFS(s.appendDir(), os.DirFS(kept)); err != nil {
		t.Fatal(err)
	}
}

func (s *Server) appendDir() string { return filepath.Join(s.dir, "appendonlydir") }

// LogSize is how long the part of the log is that is appended to.
func (s *Server) LogSize(t testing.TB) int64 {
	t.Helper()
	info, err := os.Stat(s.lastLog(t))
	if err != nil {
		t.Fatal(err)
	}
	return info.Size()
}

// CutLog cuts off a killed server's log, as a power cut does that kept a part of the last write.
func (s *Server) CutLog(t testing.TB, size int64) {
	t.Helper()
	if err := os.Truncate(s.lastLog(t), size); err != nil {
		t.Fatal(err)
	}
}

// lastLog finds the part of the log that is appended to: the manifest names it last.
func (s *Server) lastLog(t testing.TB) string {
	t.Helper()
	manifest, err := os.ReadFile(filepath.Join(s.appendDir(), "appendonly.aof.manifest"))
	if err != nil {
		t.Fatal(err)
	}
	name := ""
	for line := range strings.Lines(string(manifest)) {
		if f := strings.Fields(line); len(f) >= 6 && f[0] == "file" && f[4] == "type" && f[5] == "i" {
			name = f[1]
		}
	}
	return filepath.Join(s.appendDir(), name)
}

// Children are the processes that the server forked: one, at the most, while it rewrites its log.
func (s *Server) Children(t testing.TB) []int {
	t.Helper()
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	var found []int
	for _, path := range stats {
		raw, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		var pid, parent int
		_, rest, _ := strings.Cut(string(raw), ") ")
		if _, err := fmt.Sscanf(string(raw), "%d", &pid); err != nil {
			t.Fatal(err)
		}
		if _, err := fmt.Sscanf(rest, "%1s %d", new(string), &parent); err == nil && parent == s.cmd.Process.Pid {
			found = append(found, pid)
		}
	}
	return found
}
