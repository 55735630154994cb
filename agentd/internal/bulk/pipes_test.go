package bulk

import (
	"bytes"
	"io"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// TestVectors: parts that are more than a pipe holds arrive in their order, and parts to a pipe that nobody reads are
// an error.
func TestVectors(t *testing.T) {
	p, err := newPipes()
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	for _, fd := range p.theirs[1:] {
		defer func() { _ = unix.Close(fd) }()
	}
	content := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	parts := [][]byte{content[:5], nil, content[5:70_000], content[70_000:]}
	theirs := os.NewFile(uintptr(p.theirs[0]), "theirs")
	got := make(chan []byte, 1)
	go func() {
		data := make([]byte, len(content))
		_, _ = io.ReadFull(theirs, data) // what came is looked at
		got <- data
	}()
	if err := (vectors{p.in}).WriteVector(parts); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(<-got, content) {
		t.Error("other bytes arrived")
	}
	if err := theirs.Close(); err != nil {
		t.Fatal(err)
	}
	if err := (vectors{p.in}).WriteVector([][]byte{content}); err == nil {
		t.Error("nobody reads, and it was written")
	}
}

func TestSplit(t *testing.T) {
	content := []byte("0123456789")
	for n := 0; n <= len(content); n++ {
		first, rest := split([][]byte{content[:3], content[3:4], content[4:]}, n)
		if a, b := bytes.Join(first, nil), bytes.Join(rest, nil); !bytes.Equal(a, content[:n]) || !bytes.Equal(b, content[n:]) {
			t.Errorf("at %d: %q and %q", n, a, b)
		}
	}
}
