// Command benchsubject is what the benchmarks run in a sandbox: it fills its heap and a file with random
// bytes, says so by a second file, and then does nothing at all, so that a thousand of it cost no CPU.
//
//	benchsubject HEAP_MIB FILE_MIB FOLDER
//	benchsubject check FOLDER              ends with 0 once all is filled
package main

import (
	"crypto/rand"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"syscall"
)

func main() {
	debug.SetGCPercent(-1)
	if len(os.Args) == 3 && os.Args[1] == "check" {
		if _, err := os.Stat(filepath.Join(os.Args[2], filled)); err != nil {
			os.Exit(1)
		}
		return
	}
	heap, err := fill(os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "benchsubject:", err)
		os.Exit(1)
	}
	end := make(chan os.Signal, 1)
	signal.Notify(end, syscall.SIGTERM, syscall.SIGINT)
	<-end
	runtime.KeepAlive(heap)
}

const filled = "filled"

// fill makes the heap and the file, and last the file that tells that both are there.
func fill(args []string) ([]byte, error) {
	if len(args) != 3 {
		return nil, fmt.Errorf("want HEAP_MIB FILE_MIB FOLDER")
	}
	heapMiB, err := strconv.Atoi(args[0])
	if err != nil {
		return nil, err
	}
	fileMiB, err := strconv.Atoi(args[1])
	if err != nil {
		return nil, err
	}
	heap := make([]byte, heapMiB<<20)
	_, _ = rand.Read(heap) // never fails
	f, err := os.Create(filepath.Join(args[2], "data"))
	if err != nil {
		return nil, err
	}
	block := make([]byte, 1<<20)
	for range fileMiB {
		_, _ = rand.Read(block)
		if _, err := f.Write(block); err != nil {
			return nil, err
		}
	}
	if err := f.Close(); err != nil {
		return nil, err
	}
	return heap, os.WriteFile(filepath.Join(args[2], filled), nil, 0o600)
}
