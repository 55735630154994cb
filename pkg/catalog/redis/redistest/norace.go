//go:build !race

package redistest

// tested is how many of Programs each test meets.
var tested = len(Programs)
