package redis_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/catalog/catalogtest"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis/redistest"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// A catalog moves to a newer server with its data, and a coordinator that is connected moves along.
func TestUpgradeInPlace(t *testing.T) {
	for _, p := range redistest.Programs[1:] {
		t.Run(p.Name, func(t *testing.T) {
			server := redistest.Start(t)
			f := catalogtest.NewFixture(t, open(t, redis.Options{Address: server.Socket}))
			f.Must(catalogtest.Create(catalogtest.Sandbox("before")))
			reports(t, f, redistest.Oldest)
			server.Kill(t)
			server.Become(t, p)
			server.Restart(t)
			f.Must(catalogtest.Create(catalogtest.Sandbox("after")))
			f.Read(catalogtest.Sandbox("before"))
			reports(t, f, p)
		})
	}
}

// reports checks that the status names the server that runs.
func reports(t *testing.T, f *catalogtest.Fixture, p redistest.Program) {
	t.Helper()
	if st, err := f.Status(t.Context()); err != nil || !strings.HasPrefix(st.Server, p.Reports) {
		t.Errorf("on %s the status says %q (%v)", p.Name, st.Server, err)
	}
}

// A server that is too old, or does not say what it is, is refused before anything is written to it.
func TestServerThatIsTooOldIsRefused(t *testing.T) {
	for name, info := range map[string]string{
		"redis 6.2": "redis_version:6.2.14\r\n", "redis 5": "redis_version:5.0.0\r\n", "nameless": "os:Linux\r\n", "odd": "redis_version:new\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			fake := pretend(t, "# Server\r\n"+info+"run_id:0123\r\n")
			_, err := redis.Open(t.Context(), redis.Options{Address: fake.socket})
			if !errs.Has(err, errs.NotSupported) || !errs.NotStartedFor(err) || !strings.Contains(err.Error(), "Redis 7.0 or Valkey 7.2 is the oldest") {
				t.Errorf("got %v", err)
			}
			fake.mu.Lock()
			defer fake.mu.Unlock()
			for _, c := range fake.commands {
				if c != "hello" && c != "config" && c != "info" {
					t.Errorf("it was asked for %s", c)
				}
			}
			if len(fake.commands) == 0 {
				t.Error("it was asked nothing")
			}
		})
	}
}

// pretender answers like a durable server that gives a certain INFO.
type pretender struct {
	socket, info string

	mu       sync.Mutex
	commands []string
}

func pretend(t *testing.T, info string) *pretender {
	t.Helper()
	f := &pretender{socket: filepath.Join(shortDir(t), "s"), info: info}
	l, err := net.Listen("unix", f.socket)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer conn.Close()
				f.serve(conn)
			})
		}
	})
	// Open closes its connections, so that none is left to wait for.
	t.Cleanup(func() {
		l.Close()
		wg.Wait()
	})
	return f
}

// serve answers until the client closes the connection.
func (f *pretender) serve(conn io.ReadWriter) {
	durable := map[string]string{"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}
	for r := bufio.NewReader(conn); ; {
		words, err := readCommand(r)
		if err != nil || len(words) == 0 {
			return
		}
		command := strings.ToLower(words[0])
		f.mu.Lock()
		f.commands = append(f.commands, command)
		f.mu.Unlock()
		answer := "-ERR unknown command\r\n"
		switch {
		case command == "info":
			answer = "$" + strconv.Itoa(len(f.info)) + "\r\n" + f.info + "\r\n"
		case command == "config" && len(words) == 3:
			value := durable[words[2]]
			answer = fmt.Sprintf("*2\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n", len(words[2]), words[2], len(value), value)
		}
		if _, err := io.WriteString(conn, answer); err != nil {
			return
		}
	}
}

// readCommand reads an array of bulk strings without line breaks.
func readCommand(r *bufio.Reader) ([]string, error) {
	var n int
	if _, err := fmt.Fscanf(r, "*%d\r\n", &n); err != nil {
		return nil, err
	}
	words := make([]string, n)
	for i := range words {
		for range 2 { // the length, then the word
			line, err := r.ReadString('\n')
			if err != nil {
				return nil, err
			}
			words[i] = strings.TrimSpace(line)
		}
	}
	return words, nil
}

// shortDir is a folder whose path leaves room for a unix socket's.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "dmfake")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}
