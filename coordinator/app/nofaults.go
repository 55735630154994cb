//go:build !faults

package app

// faults does nothing but in builds for tests.
func faults(Config) {}
