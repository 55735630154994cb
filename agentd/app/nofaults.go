//go:build !faults

package app

// faults is nil but in builds for tests: nothing can stop this agentd at a fault point.
func faults(string) func(point string) error { return nil }
