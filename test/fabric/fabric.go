// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

// Package fabric is the network of a development stack: namespaces of its own,
// joined by a bridge, with no way in or out.
//
// One namespace, the hub, holds the bridge and what all nodes share (registry,
// coordinator); each node has a namespace with one link to the bridge. Nothing
// listens in the machine's own namespace, so two stacks use the same addresses
// and ports at once, and neither meets what else runs on the machine. Namespaces
// are named after the stack, and removing them by that prefix removes everything,
// whatever state a crash left: a link goes with its namespace.
package fabric

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// namedDir is where named namespaces are bound, as ip-netns(8) does.
const namedDir = "/run/netns"

// HubAddr is the hub's address, on the bridge.
const HubAddr = "10.88.0.1"

// NodeAddr is the address of node i, counted from 1.
func NodeAddr(i int) string { return fmt.Sprintf("10.88.0.%d", 10+i) }

// Prefix begins the name of every namespace of a stack. A namespace made under
// it by anyone, agentd for example, is removed with the stack.
func Prefix(id string) string { return "dm-" + id + "-" }

// HubPath is the file that stands for the hub.
func HubPath(id string) string { return filepath.Join(namedDir, Prefix(id)+"hub") }

// NodePath is the file that stands for node i.
func NodePath(id string, i int) string {
	return filepath.Join(namedDir, fmt.Sprintf("%sn%d", Prefix(id), i))
}

// Create makes the hub and its nodes. After an error nothing of them is left.
func Create(id string, nodes int) (err error) {
	defer func() {
		if err != nil {
			err = errors.Join(err, Remove(id))
		}
	}()
	hub, err := makeNamespace(HubPath(id))
	if err != nil {
		return err
	}
	defer hub.Close()
	h, err := netlink.NewHandleAt(hub)
	if err != nil {
		return fmt.Errorf("netlink in the hub: %w", err)
	}
	defer h.Close()
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}}
	if err := h.LinkAdd(bridge); err != nil {
		return fmt.Errorf("bridge: %w", err)
	}
	if err := bring(h, "br0", HubAddr); err != nil {
		return err
	}
	for i := 1; i <= nodes; i++ {
		if err := addNode(h, hub, bridge.Index, id, i); err != nil {
			return fmt.Errorf("node %d: %w", i, err)
		}
	}
	return nil
}

// addNode makes a node's namespace and its link to the bridge.
func addNode(hub *netlink.Handle, hubNS netns.NsHandle, bridge int, id string, i int) error {
	ns, err := makeNamespace(NodePath(id, i))
	if err != nil {
		return err
	}
	defer ns.Close()
	h, err := netlink.NewHandleAt(ns)
	if err != nil {
		return fmt.Errorf("netlink: %w", err)
	}
	defer h.Close()
	// Made inside the node and with its other end handed to the hub, the link is
	// never to be seen in the machine's own namespace.
	port := fmt.Sprintf("port%d", i)
	if err := h.LinkAdd(&netlink.Veth{
		LinkAttrs:     netlink.LinkAttrs{Name: "eth0"},
		PeerName:      port,
		PeerNamespace: netlink.NsFd(hubNS),
	}); err != nil {
		return fmt.Errorf("link: %w", err)
	}
	peer, err := hub.LinkByName(port)
	if err != nil {
		return fmt.Errorf("link %s: %w", port, err)
	}
	if err := hub.LinkSetMasterByIndex(peer, bridge); err != nil {
		return fmt.Errorf("link %s: %w", port, err)
	}
	if err := hub.LinkSetUp(peer); err != nil {
		return fmt.Errorf("link %s: %w", port, err)
	}
	return bring(h, "eth0", NodeAddr(i))
}

// bring gives a link its address and starts it, and the namespace's loopback.
func bring(h *netlink.Handle, name, addr string) error {
	link, err := h.LinkByName(name)
	if err != nil {
		return fmt.Errorf("link %s: %w", name, err)
	}
	a, err := netlink.ParseAddr(addr + "/24")
	if err != nil {
		return fmt.Errorf("address %s: %w", addr, err)
	}
	if err := h.AddrAdd(link, a); err != nil {
		return fmt.Errorf("address %s: %w", addr, err)
	}
	lo, err := h.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("loopback: %w", err)
	}
	for _, l := range []netlink.Link{lo, link} {
		if err := h.LinkSetUp(l); err != nil {
			return fmt.Errorf("link %s: %w", l.Attrs().Name, err)
		}
	}
	return nil
}

// makeNamespace makes a named namespace and returns to the caller's own.
func makeNamespace(path string) (netns.NsHandle, error) {
	var made netns.NsHandle
	err := onOwnThread(func() error {
		var err error
		made, err = netns.NewNamed(filepath.Base(path))
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("network namespace %s: %w", filepath.Base(path), err)
	}
	return made, nil
}

// Remove unbinds every namespace of the stack. It is no error if there is none.
// A namespace goes when its last process has gone.
func Remove(id string) error {
	names, err := List(id)
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range names {
		if err := netns.DeleteNamed(name); err != nil {
			errs = append(errs, fmt.Errorf("network namespace %s: %w", name, err))
		}
	}
	return errors.Join(errs...)
}

// List names the stack's namespaces.
func List(id string) ([]string, error) {
	entries, err := os.ReadDir(namedDir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("network namespaces: %w", err)
	}
	var names []string
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), Prefix(id)) {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// Do runs f inside the namespace at path. What f starts, processes and sockets,
// belongs to it; goroutines that f starts do not.
func Do(path string, f func() error) error {
	return onOwnThread(func() error {
		ns, err := netns.GetFromPath(path)
		if err != nil {
			return fmt.Errorf("network namespace %s: %w", path, err)
		}
		defer ns.Close()
		if err := netns.Set(ns); err != nil {
			return fmt.Errorf("network namespace %s: %w", path, err)
		}
		return f()
	})
}

// onOwnThread runs f on a thread that ends with it, so that no other goroutine
// ever runs where f left that thread.
func onOwnThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == os.Getpid() {
			// The first thread cannot end, and stands for the process in /proc:
			// it must stay where it is. While this goroutine holds it, another
			// one gets another thread.
			defer runtime.UnlockOSThread()
			done <- onOwnThread(f)
			return
		}
		// Never unlocked: the runtime ends the thread with the goroutine.
		done <- f()
	}()
	return <-done
}

// Dialer connects from inside the namespace at path. Addresses must be literal:
// names would be looked up on another thread.
func Dialer(path string) func(ctx context.Context, network, address string) (net.Conn, error) {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		var conn net.Conn
		err := Do(path, func() error {
			var err error
			conn, err = (&net.Dialer{}).DialContext(ctx, network, address)
			return err
		})
		return conn, err
	}
}
