// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package layers

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// victimEnv makes the test program one that prepares an image and is killed while it does.
const victimEnv = "DORMOUSE_TEST_VICTIM"

type victimConfig struct{ Root, Socket, Namespace, Mkfs, Registry, Ref string }

func victim(config string) int {
	var c victimConfig
	if err := json.Unmarshal([]byte(config), &c); err != nil {
		return 2
	}
	s, err := New(Config{Root: c.Root, Node: "victim", ContainerdSocket: c.Socket, Namespace: c.Namespace, Mkfs: c.Mkfs, PlainHTTP: []string{c.Registry}, Platform: "linux/amd64"})
	if err != nil {
		return 2
	}
	_, err = s.Ensure(context.Background(), c.Ref, EnsureOptions{})
	fmt.Fprintln(os.Stderr, err)
	return 3
}

// until polls a condition.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.NewTimer(2 * time.Minute)
	defer deadline.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-deadline.C:
			t.Fatalf("never: %s", what)
		case <-tick.C:
		}
	}
}

func TestI04_KilledInTheMiddleOfAConversion(t *testing.T) {
	ref := push(t, env.plain, "victim", smallImage(t, "victim"))
	cfg := testConfig(t)
	mkfs, runs, _ := slowMkfs(t, cfg.Mkfs) // its gate never opens
	config, err := json.Marshal(victimConfig{cfg.Root, cfg.ContainerdSocket, cfg.Namespace, mkfs, env.plain, ref})
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), victimEnv+"="+string(config))
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var pid int
	until(t, "the conversion runs", func() bool {
		data, err := os.ReadFile(runs)
		if err != nil {
			return false
		}
		_, err = fmt.Sscanf(string(data), "run %d\n", &pid)
		return err == nil
	})
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil || cmd.ProcessState.ExitCode() != -1 {
		t.Fatalf("the victim was not killed: %v", err)
	}
	until(t, "mkfs.erofs ends with its parent", func() bool { return unix.Kill(pid, 0) == unix.ESRCH || zombie(pid) })

	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	if rep, err := s.Recover(context.Background()); err != nil || rep.Staging != 1 {
		t.Errorf("%+v, %v", rep, err)
	}
	img, err := s.Ensure(context.Background(), ref, EnsureOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Verify(context.Background(), img.Digest); err != nil {
		t.Error(err)
	}
}

// zombie tells whether a process has ended and only waits for whoever adopted it.
func zombie(pid int) bool {
	data, err := os.ReadFile(filepath.Join("/proc", fmt.Sprint(pid), "stat"))
	return err == nil && strings.Contains(string(data), ") Z ")
}

func TestI04_NodesOfASharedRootHoldForThemselves(t *testing.T) {
	ctx := context.Background()
	cfg := testConfig(t)
	a := openStore(t, cfg)
	img := mustEnsure(t, a, "i04-shared", EnsureOptions{Holder: "snapshot-1"})
	cfg.Node = "node-b"
	b := openStore(t, cfg)
	if err := b.Hold(ctx, img.ErofsDigest, "snapshot-1"); err != nil {
		t.Fatal(err)
	}
	if err := a.Release(ctx, img.ErofsDigest, "snapshot-1"); err != nil {
		t.Fatal(err)
	}
	if removed, err := a.GC(ctx, everything); err != nil || len(removed) != 0 {
		t.Errorf("%v %v", removed, err)
	}
	held, err := a.Holders(ctx, img.ErofsDigest)
	if err != nil || len(held) != 1 || held[0].Node != "node-b" || held[0].Name != "snapshot-1" {
		t.Errorf("%+v %v", held, err)
	}
	if err := b.Release(ctx, img.ErofsDigest, "snapshot-1"); err != nil {
		t.Fatal(err)
	}
	if err := a.Remove(ctx, img.ErofsDigest); err != nil {
		t.Error(err)
	}
}

func TestVerifySeesOneBit(t *testing.T) {
	ctx := context.Background()
	s := openStore(t, testConfig(t))
	img := mustEnsure(t, s, "verify", EnsureOptions{})
	for _, d := range []digest.Digest{img.Digest, img.ErofsDigest} {
		if err := s.Verify(ctx, d); err != nil {
			t.Error(err)
		}
	}
	f, err := os.OpenFile(img.ErofsPath, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte{1}, img.Size-1); err != nil {
		t.Fatal(err)
	}
	if err := s.Verify(ctx, img.Digest); !errs.Has(err, errs.DigestMismatch) {
		t.Errorf("got %v", err)
	}
	if err := s.Verify(ctx, digest.FromString("nothing")); !errs.Has(err, errs.ImageNotFound) {
		t.Errorf("got %v", err)
	}
}
