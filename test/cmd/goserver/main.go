// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

// Command goserver is one of the real programs that the tests run inside sandboxes: an ordinary Go HTTP
// server that keeps a nonce and a count in its memory.
//
//	goserver PORT
//
// GET / on 127.0.0.1 answers "PID NONCE COUNT".
package main

import (
	"crypto/rand"
	"fmt"
	"net/http"
	"os"
	"sync/atomic"
	"time"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "goserver: want a port")
		os.Exit(2)
	}
	nonce := rand.Text()
	var count atomic.Int64
	server := &http.Server{Addr: "127.0.0.1:" + os.Args[1], ReadHeaderTimeout: 10 * time.Second}
	server.Handler = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = fmt.Fprintln(w, os.Getpid(), nonce, count.Add(1))
	})
	fmt.Fprintln(os.Stderr, "goserver:", server.ListenAndServe())
	os.Exit(1)
}
