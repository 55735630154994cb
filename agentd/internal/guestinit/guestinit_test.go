package guestinit

import (
	"bytes"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"syscall"
	"testing"

	"github.com/dormouse-run/dormouse/agentd/internal/guestwire"
)

// TestRingAgainstAModel writes random pieces and holds what the ring gives to the whole history.
func TestRingAgainstAModel(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, limit := range []int{1, 7, 4096, 5000, 64 << 10} {
		r := ring{limit: limit}
		var all []byte
		for range 300 {
			p := make([]byte, rng.IntN(2*limit+2))
			for i := range p {
				p[i] = byte(rng.Uint32())
			}
			r.write(p)
			all = append(all, p...)
			if rng.IntN(20) == 0 {
				r.trim()
			}
			if r.end != uint64(len(all)) || r.size != min(limit, len(all)) && r.size > limit || len(r.buf) > max(limit, 0) {
				t.Fatalf("limit %d: end %d of %d, size %d, buffer %d", limit, r.end, len(all), r.size, len(r.buf))
			}
			offset := uint64(rng.IntN(len(all) + 1))
			data, begins, gap := r.from(offset)
			if begins != offset+gap || gap > 0 && begins != r.start() || !bytes.Equal(data, all[begins:begins+uint64(len(data))]) {
				t.Fatalf("limit %d: wrong piece at %d: begins %d, gap %d, %d bytes", limit, offset, begins, gap, len(data))
			}
			if begins < r.end && len(data) == 0 {
				t.Fatalf("limit %d: nothing at %d although the end is %d", limit, begins, r.end)
			}
		}
		r.clear()
		if data, begins, _ := r.from(0); len(data) != 0 || begins != r.end {
			t.Fatal("a cleared ring still gives bytes")
		}
	}
}

func TestLookupUser(t *testing.T) {
	passwd := []byte("# comment\n\nbroken line\nroot:x:0:0::/root:/bin/sh\nann:x:1000:1001::/home/ann:/bin/sh\nodd:x:not:1::/:\n7:x:77:78::/seven:\nhome:x:5:5:::\n")
	group := []byte("ann:x:1001:\nextra:x:2000:bob,ann\nmore:x:2001:ann\nbad:x:zz:ann\n")
	for spec, want := range map[string]account{
		"":          {&syscall.Credential{}, "/root"},
		"ann":       {&syscall.Credential{Uid: 1000, Gid: 1001, Groups: []uint32{2000, 2001}}, "/home/ann"},
		"1000":      {&syscall.Credential{Uid: 1000, Gid: 1001, Groups: []uint32{2000, 2001}}, "/home/ann"},
		"ann:extra": {&syscall.Credential{Uid: 1000, Gid: 2000}, "/home/ann"},
		"4242:9":    {&syscall.Credential{Uid: 4242, Gid: 9}, "/"},
		"4242":      {&syscall.Credential{Uid: 4242}, "/"},
		"7":         {&syscall.Credential{Uid: 77, Gid: 78}, "/seven"},
		"home":      {&syscall.Credential{Uid: 5, Gid: 5}, "/"},
	} {
		got, err := lookupUser(spec, passwd, group)
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%q: %+v %v, want %+v", spec, got, err, want)
		}
	}
	for _, spec := range []string{"bob", "odd", "ann:none", "-1", "99999999999", "root "} {
		if _, err := lookupUser(spec, passwd, group); err == nil || err.Reason != "USER_NOT_FOUND" {
			t.Errorf("%q: %v", spec, err)
		}
	}
	if acc, err := lookupUser("", nil, nil); err != nil || acc.cred.Uid != 0 || acc.home != "/" {
		t.Errorf("an image without accounts: %+v %v", acc, err)
	}
}

func TestParseStat(t *testing.T) {
	for stat, want := range map[string]entry{
		"12 (a) S 3 4 5 0":          {12, 3, 5},
		"12 (a ) b) 1 2) R 1 7 8 9": {12, 1, 8},
	} {
		if got, ok := parseStat(12, stat); !ok || got != want {
			t.Errorf("%q: %+v %v", stat, got, ok)
		}
	}
	for _, stat := range []string{"", "12", "12 (a)", "12 (a) S x y z"} {
		if _, ok := parseStat(12, stat); ok {
			t.Errorf("%q was taken", stat)
		}
	}
}

func TestQuote(t *testing.T) {
	if got := quote("a\"b\\c\n\x7f"); got != `"a\"b\\c\u000a\u007f"` {
		t.Errorf("got %s", got)
	}
}

// testAgent is an agent without processes, whose output goes to a pipe.
func testAgent(t testing.TB) *agent {
	t.Helper()
	return &agent{
		cfg: Config{Out: -1, In: -1, Root: t.TempDir()}, kick: make(chan struct{}, 1),
		sources: map[int32]func(uint32){}, procs: map[string]*process{}, byPID: map[int]*process{},
	}
}

func TestConfigureReplacesLinks(t *testing.T) {
	a := testAgent(t)
	target := filepath.Join(a.cfg.Root, "precious")
	if err := os.WriteFile(target, []byte("keep"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(a.cfg.Root, "etc"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"resolv.conf", ".dormouse-resolv.conf"} {
		if err := os.Symlink(target, filepath.Join(a.cfg.Root, "etc", name)); err != nil {
			t.Fatal(err)
		}
	}
	a.uid = "u"
	if _, err := a.configure(&guestwire.Configure{Resolver: &guestwire.Resolver{Nameservers: []string{"10.0.0.1"}}}); err != nil {
		t.Fatal(err)
	}
	if got, _ := os.ReadFile(target); string(got) != "keep" {
		t.Fatal("a link was followed")
	}
	if got, _ := os.ReadFile(filepath.Join(a.cfg.Root, "etc/resolv.conf")); string(got) != "nameserver 10.0.0.1\n" {
		t.Fatalf("resolv.conf: %q", got)
	}
}

// TestEndedProcessesAreBounded: the oldest go first, the main command never, and outputs before exits.
func TestEndedProcessesAreBounded(t *testing.T) {
	a := testAgent(t)
	add := func(id string, main bool, kept int) {
		p := &process{id: id, main: main, exit: &guestwire.Exit{}}
		p.stdin.fd, p.out[0].fd, p.out[1].fd = -1, -1, -1
		p.out[0].ring = ring{limit: maxRing, buf: make([]byte, kept), size: kept, end: uint64(kept)}
		a.procs[id] = p
		a.ended = append(a.ended, p)
		a.shed()
	}
	add("main", true, 100)
	for i := range maxEnded + 50 {
		add(itoa(uint64(i)), false, 0)
	}
	if len(a.procs) != maxEnded || a.procs["main"] == nil || a.procs["49"] != nil || a.procs["305"] == nil {
		t.Fatalf("%d processes are remembered", len(a.procs))
	}
	for i := range 20 {
		add("big"+itoa(uint64(i)), false, maxRing)
	}
	kept := 0
	for _, p := range a.procs {
		kept += len(p.out[0].ring.buf)
	}
	if kept > maxKept || a.procs["big0"] == nil || a.procs["big0"].out[0].ring.size != 0 || a.procs["big19"].out[0].ring.size != maxRing {
		t.Fatalf("%d bytes of output are kept", kept)
	}
}

// TestHeldOutputIsReleased: a process waits for its first reader and for one with hold, and for
// neither of them for ever.
func TestHeldOutputIsReleased(t *testing.T) {
	a := testAgent(t)
	var err error
	if a.poll, err = syscall.EpollCreate1(syscall.EPOLL_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	var fds [2]int
	if err := syscall.Pipe2(fds[:], syscall.O_CLOEXEC|syscall.O_NONBLOCK); err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = syscall.Close(fds[1]), syscall.Close(a.poll) }()
	p := &process{id: "p", pid: 1 << 30}
	p.stdin.fd, p.out[1].fd = -1, -1
	p.out[0] = outPipe{fd: fds[0], ring: ring{limit: 100}, awaited: clock(clockMonotonic) + holdLimit}
	a.procs["p"], a.byPID[p.pid] = p, p
	fill := func(n int) {
		t.Helper()
		if _, err := write(fds[1], make([]byte, n)); err != nil {
			t.Fatal(err)
		}
		a.readOutput(p, 0)
	}
	at := func(end uint64, held bool, what string) {
		t.Helper()
		if o := &p.out[0]; o.ring.end != end || o.held != held {
			t.Fatalf("%s: %d bytes taken, held %v; want %d, %v", what, o.ring.end, o.held, end, held)
		}
	}
	fill(150)
	at(100, true, "nobody has opened it")
	if d := a.timeout(); d < 0 || d > 10_000 {
		t.Fatalf("the loop would sleep %d ms", d)
	}
	p.out[0].awaited = clock(clockMonotonic)
	a.expire()
	at(100, false, "nobody came in time")
	a.readOutput(p, 0)
	at(150, false, "then the oldest are overwritten")

	open := &guestwire.OutputOpen{ProcessID: "p", Output: guestwire.Stdout, FromOffset: 100, Follow: guestwire.FollowUntilEOF, Hold: true}
	if _, err := a.openOutput(1, open); err != nil {
		t.Fatal(err)
	}
	fill(80)
	at(200, true, "a reader without credit has 100 bytes unread")
	a.outputs[0].credit = 60
	a.pump()
	at(200, false, "it read")
	a.readOutput(p, 0)
	at(230, false, "there is room again")
	fill(80)
	at(260, true, "and it is full again")
	a.outputs[0].moved -= holdLimit
	a.expire()
	a.readOutput(p, 0)
	at(310, false, "the reader stood still")
	a.closeStream(1)
	if a.streams != 0 || a.timeout() != -1 {
		t.Fatalf("%d streams, timeout %d", a.streams, a.timeout())
	}
	_ = syscall.Close(fds[0])
}

// FuzzChannel feeds guest init with bytes from an enemy of the host's. Requests that would act on
// this machine are left out.
func FuzzChannel(f *testing.F) {
	ch := guestwire.Channel{Generation: 1, Key: 5}
	hello, _ := guestwire.AppendMessage(nil, ch, 1, &guestwire.Hello{MinVersion: 1, MaxVersion: 1, SandboxUID: "u"})
	for _, m := range []guestwire.Message{
		&guestwire.OutputOpen{ProcessID: "p", Output: 1, Credit: 99, Follow: 2}, &guestwire.StdinOpen{ProcessID: "p"},
		&guestwire.StdinData{Data: []byte("x")}, &guestwire.StdinClose{}, &guestwire.Wait{ProcessID: "p"}, &guestwire.Forget{ProcessID: "p"},
		&guestwire.Credit{Bytes: 1 << 31}, &guestwire.Quiesce{}, &guestwire.Resume{}, &guestwire.List{}, &guestwire.StreamClose{}, &guestwire.Ping{Nonce: 3},
	} {
		f.Add(uint16(m.Type()), uint32(2), guestwire.Marshal(m))
	}
	f.Add(uint16(guestwire.TypeHello), uint32(1), hello)
	f.Fuzz(func(t *testing.T, typ uint16, stream uint32, payload []byte) {
		switch guestwire.Type(typ) {
		case guestwire.TypeStart, guestwire.TypeSignal, guestwire.TypeConfigure:
			return
		}
		a := testAgent(t)
		p := &process{id: "p", exit: &guestwire.Exit{StdoutOffset: 2}}
		p.stdin.fd, p.out[0].fd, p.out[1].fd = -1, -1, -1
		p.out[0].ring.limit = 8
		p.out[0].ring.write([]byte("0123456789"))
		a.procs["p"], a.ended = p, []*process{p}
		a.handle(guestwire.Frame{Type: guestwire.TypeHello, Channel: ch}, guestwire.Marshal(&guestwire.Hello{MinVersion: 1, MaxVersion: 1, SandboxUID: "u"}))
		if !a.open {
			t.Fatal("hello was not accepted")
		}
		for i := range 3 {
			a.handle(guestwire.Frame{Type: guestwire.Type(typ), Stream: stream, Channel: ch}, payload)
			if !a.quiesced {
				a.tell()
				a.pump()
			}
			a.handle(guestwire.Frame{Type: guestwire.TypeOutputOpen, Stream: uint32(i), Channel: ch}, payload)
		}
		if a.streams < 0 || a.streams > 8 || len(a.out) > 1<<20 {
			t.Fatalf("%d streams, %d bytes to say", a.streams, len(a.out))
		}
	})
}
