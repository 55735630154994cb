// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

// Command loadsubject is the subject of package test/load/subject: a process that can prove that it is still the same one.
//
//	loadsubject HEAP_BYTES FILE_BYTES FOLDER [VOLUME]
//
// It reads a token from each line of its standard input and answers with a line, until the input ends. It imports little and
// talks to the kernel itself, because a thousand of it share a machine.
package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/test/load/subject"
)

func main() {
	debug.SetGCPercent(-1) // nothing of it is garbage, and what is idle should stay so
	s, err := start(os.Args[1:])
	if err != nil {
		say("failed " + err.Error())
		os.Exit(1)
	}
	for {
		token, err := s.question()
		if err != nil {
			os.Exit(0)
		}
		a, err := s.answer(token)
		if err != nil {
			say("failed " + strings.ReplaceAll(err.Error(), "\n", " "))
			continue
		}
		say(a.String())
	}
}

func say(line string) { _, _ = os.Stdout.WriteString(line + "\n") }

// state is what must be the same after a restore.
type state struct {
	heap         []byte
	file         *os.File // private; its offset counts the answers
	nonce        string
	volume       string // a file on it
	client, peer int    // the two ends of the stream
	frames       uint64
	input        []byte
}

func start(args []string) (*state, error) {
	if len(args) < 3 || len(args) > 4 {
		return nil, errors.New("want HEAP_BYTES FILE_BYTES FOLDER [VOLUME]")
	}
	heap, err := strconv.ParseInt(args[0], 10, 64)
	if err != nil {
		return nil, err
	}
	size, err := strconv.ParseInt(args[1], 10, 64)
	if err != nil {
		return nil, err
	}
	var seed [32]byte
	if _, err := unix.Getrandom(seed[:], 0); err != nil {
		return nil, err
	}
	random := rand.NewChaCha8(seed)
	s := &state{heap: make([]byte, heap)}
	_, _ = random.Read(s.heap) // never fails
	var nonce [16]byte
	_, _ = random.Read(nonce[:])
	s.nonce = hex.EncodeToString(nonce[:])
	if s.file, err = os.OpenFile(filepath.Join(args[2], "private"), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600); err != nil {
		return nil, err
	}
	block := make([]byte, 64<<10)
	for left := size; left > 0; left -= int64(len(block)) {
		block = block[:min(left, int64(len(block)))]
		_, _ = random.Read(block)
		if _, err := s.file.Write(block); err != nil {
			return nil, err
		}
	}
	if _, err := s.file.Seek(0, 0); err != nil {
		return nil, err
	}
	if len(args) == 4 {
		s.volume = filepath.Join(args[3], "mark")
		if err := os.WriteFile(s.volume, []byte(s.nonce), 0o600); err != nil {
			return nil, err
		}
	}
	s.client, s.peer, err = stream()
	return s, err
}

// stream is a TCP connection to this process itself, by plain descriptors that block.
func stream() (client, peer int, err error) {
	listener, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, 0, err
	}
	defer func() { _ = unix.Close(listener) }()
	if err := unix.Bind(listener, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		return 0, 0, err
	}
	if err := unix.Listen(listener, 1); err != nil {
		return 0, 0, err
	}
	addr, err := unix.Getsockname(listener)
	if err != nil {
		return 0, 0, err
	}
	if client, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
		return 0, 0, err
	}
	if err := unix.Connect(client, addr); err != nil {
		return 0, 0, err
	}
	peer, _, err = unix.Accept(listener)
	return client, peer, err
}

// question waits for a line. It reads by the system call itself: a poller would be a thread more.
func (s *state) question() (string, error) {
	for {
		if line, rest, whole := bytes.Cut(s.input, []byte("\n")); whole {
			token := string(line)
			s.input = append(s.input[:0], rest...)
			return token, nil
		}
		var buf [256]byte
		n, err := syscall.Read(0, buf[:])
		if errors.Is(err, syscall.EAGAIN) { // a FIFO that somebody made so
			_, err = unix.Poll([]unix.PollFd{{Fd: 0, Events: unix.POLLIN}}, -1)
		}
		if err == nil && n < 0 || errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil {
			return "", err
		}
		if n == 0 {
			return "", errors.New("no more questions")
		}
		s.input = append(s.input, buf[:n]...)
	}
}

func (s *state) answer(token string) (a subject.Answer, err error) {
	a = subject.Answer{Token: token, PID: os.Getpid(), Nonce: s.nonce, HeapLen: int64(len(s.heap)), Volume: "-"}
	if a.Start, err = startTime(); err != nil {
		return a, err
	}
	a.Heap = digest(s.heap)
	if a.File, a.FileLen, err = s.hashFile(); err != nil {
		return a, err
	}
	var step [subject.Step]byte
	if _, err := s.file.Read(step[:]); err != nil {
		return a, err
	}
	if a.Offset, err = s.file.Seek(0, 1); err != nil {
		return a, err
	}
	if a.Frames, err = s.frame(); err != nil {
		return a, err
	}
	if s.volume != "" {
		data, err := os.ReadFile(s.volume)
		if err != nil {
			return a, err
		}
		a.Volume = digest(data)
	}
	return a, nil
}

func digest(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:16])
}

// hashFile reads the private file without moving its offset.
func (s *state) hashFile() (string, int64, error) {
	h := sha256.New()
	n, err := io.CopyBuffer(h, io.NewSectionReader(s.file, 0, math.MaxInt64), make([]byte, 32<<10))
	return hex.EncodeToString(h.Sum(nil)[:16]), n, err
}

// frame sends one more frame through the stream, and has it come back: length, number, nonce.
func (s *state) frame() (uint64, error) {
	s.frames++
	payload := strconv.FormatUint(s.frames, 10) + " " + s.nonce
	sent := string([]byte{byte(len(payload))}) + payload
	for _, way := range [][2]int{{s.client, s.peer}, {s.peer, s.client}} {
		if _, err := unix.Write(way[0], []byte(sent)); err != nil {
			return 0, err
		}
		got := make([]byte, len(sent))
		for n := 0; n < len(got); {
			m, err := unix.Read(way[1], got[n:])
			if err != nil {
				return 0, err
			}
			if m == 0 {
				return 0, errors.New("the stream ended")
			}
			n += m
		}
		if string(got) != sent {
			return 0, errors.New("the stream carried another frame")
		}
	}
	return s.frames, nil
}

// startTime is field 22 of /proc/self/stat.
func startTime() (uint64, error) {
	data, err := os.ReadFile("/proc/self/stat")
	if err != nil {
		return 0, err
	}
	_, rest, ok := strings.Cut(string(data), ") ")
	fields := strings.Fields(rest)
	if !ok || len(fields) < 20 {
		return 0, errors.New("/proc/self/stat has another form")
	}
	return strconv.ParseUint(fields[19], 10, 64)
}
