// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package stack

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"
)

// ErrOwned says that a living process owns the stack, so that it is not ended.
var ErrOwned = errors.New("the stack belongs to a running process")

// Base is where stacks are unless a folder was chosen, and where the index of all
// stacks of this machine is. It is short, because sockets are below it, and on a
// disk, because checkpoints are.
func Base() string {
	if dir := os.Getenv("DORMOUSE_STACKS"); dir != "" {
		return dir
	}
	return "/var/lib/dormouse-dev"
}

func indexDir() string { return filepath.Join(Base(), "index") }

// checkoutBin is the bin folder of the checkout this package was built from. A
// program that does not know its sources any more is in that folder itself.
func checkoutBin() (string, error) {
	if _, file, _, ok := runtime.Caller(0); ok && filepath.IsAbs(file) {
		return filepath.Join(filepath.Dir(file), "..", "..", "bin"), nil
	}
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("the folder of the daemons: %w", err)
	}
	return filepath.Dir(self), nil
}

// register writes the stack's record, into its folder and then into the index.
func (s *Stack) register() error {
	data, err := json.Marshal(s.record)
	if err != nil {
		return fmt.Errorf("stack record: %w", err)
	}
	if err := os.MkdirAll(indexDir(), 0o700); err != nil {
		return fmt.Errorf("stack index: %w", err)
	}
	for _, file := range []string{s.path("stack.json"), s.indexFile()} {
		if err := writeFile(file, data, 0o600); err != nil {
			return fmt.Errorf("stack record: %w", err)
		}
	}
	for _, dir := range []string{"pids", "logs"} {
		if err := os.MkdirAll(s.path(dir), 0o700); err != nil {
			return fmt.Errorf("stack folder: %w", err)
		}
	}
	return nil
}

func (s *Stack) indexFile() string { return filepath.Join(indexDir(), s.ID+".json") }

// writeFile replaces a file in one step: a reader sees the old one or the new one.
func writeFile(path string, data []byte, mode os.FileMode) error {
	tmp := path + ".new"
	if err := os.WriteFile(tmp, data, mode); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}

// lockDir makes this process the owner of the stack in dir, or fails with ErrOwned.
func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("stack lock: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("%s: %w", dir, ErrOwned)
		}
		return nil, fmt.Errorf("stack lock: %w", err)
	}
	return f, nil
}

// release gives up the ownership.
func (s *Stack) release() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lock == nil {
		return nil
	}
	err := s.lock.Close()
	s.lock = nil
	return err
}

// Indexed lists the stacks of this machine, whatever their state.
func Indexed() ([]*Stack, error) {
	files, err := filepath.Glob(filepath.Join(indexDir(), "*.json"))
	if err != nil {
		return nil, fmt.Errorf("stack index: %w", err)
	}
	var all []*Stack
	for _, file := range files {
		data, err := os.ReadFile(file)
		if errors.Is(err, os.ErrNotExist) {
			continue // ended meanwhile
		}
		if err != nil {
			return nil, fmt.Errorf("stack index: %w", err)
		}
		s := &Stack{logf: func(string, ...any) {}}
		if err := json.Unmarshal(data, &s.record); err != nil || s.ID == "" || s.Dir == "" {
			return nil, fmt.Errorf("stack index: %s cannot be read (%w): remove it when nothing of its stack is left", file, err)
		}
		all = append(all, s)
	}
	return all, nil
}

// Sweep ends every abandoned stack.
func Sweep(ctx context.Context, logf func(format string, args ...any)) error {
	all, err := Indexed()
	if err != nil {
		return err
	}
	var errs []error
	for _, s := range all {
		if s.kept() {
			continue
		}
		s.logf = logf
		if err := s.Down(ctx); err != nil && !errors.Is(err, ErrOwned) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
