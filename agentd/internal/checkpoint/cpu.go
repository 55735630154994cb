package checkpoint

import (
	"fmt"
	"os"
	"slices"
	"strings"
)

// CPUFeatures reads the features that every CPU of this machine has, in order.
func CPUFeatures() ([]string, error) {
	data, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return nil, fmt.Errorf("read the CPU's features: %w", err)
	}
	return parseCPUInfo(string(data)), nil
}

func parseCPUInfo(text string) []string {
	var common []string
	first := true
	for line := range strings.Lines(text) {
		key, value, ok := strings.Cut(line, ":")
		key = strings.TrimSpace(key)
		if !ok || (key != "flags" && key != "Features") {
			continue
		}
		has := strings.Fields(value)
		if first {
			common, first = has, false
			continue
		}
		common = slices.DeleteFunc(common, func(f string) bool { return !slices.Contains(has, f) })
	}
	slices.Sort(common)
	return slices.Compact(common)
}
