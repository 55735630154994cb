//go:build race

package redistest

var tested = 1
