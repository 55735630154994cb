//go:build faults && !wallclock

package fault

func mapClock(string) {}
