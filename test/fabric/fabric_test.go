// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package fabric_test

import (
	"fmt"
	"net"
	"os"
	"testing"

	"github.com/dormouse-run/dormouse/test/fabric"
)

// Two fabrics at once use the same addresses, nodes reach their own hub, and
// nothing is left in the machine's namespace or among the named ones.
func TestFabric(t *testing.T) {
	before, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	for _, suffix := range []string{"a", "b"} {
		id := fmt.Sprintf("ft%d%s", os.Getpid(), suffix)
		if err := fabric.Create(id, 2); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := fabric.Remove(id); err != nil {
				t.Error(err)
			}
			if left, err := fabric.List(id); err != nil || len(left) > 0 {
				t.Errorf("left: %q, %v", left, err)
			}
		})
		reach(t, id, suffix)
	}
	after, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	if len(after) != len(before) {
		t.Errorf("interfaces in the machine's namespace: %d, were %d", len(after), len(before))
	}
}

// reach starts a listener in the hub that says word, and hears it from node 2.
func reach(t *testing.T, id, word string) {
	t.Helper()
	address := net.JoinHostPort(fabric.HubAddr, "5000")
	var listener net.Listener
	if err := fabric.Do(fabric.HubPath(id), func() (err error) {
		listener, err = net.Listen("tcp", address)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	served := make(chan error, 1)
	go func() {
		conn, err := listener.Accept()
		if err != nil {
			served <- err
			return
		}
		_, err = conn.Write([]byte(word))
		served <- err
		_ = conn.Close()
	}()
	conn, err := fabric.Dialer(fabric.NodePath(id, 2))(t.Context(), "tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	got := make([]byte, len(word))
	if _, err := conn.Read(got); err != nil || string(got) != word {
		t.Errorf("heard %q, %v; want %q", got, err, word)
	}
	if err := <-served; err != nil {
		t.Error(err)
	}
	if from, _, _ := net.SplitHostPort(conn.LocalAddr().String()); from != fabric.NodeAddr(2) {
		t.Errorf("dialled from %s, want %s", from, fabric.NodeAddr(2))
	}
}
