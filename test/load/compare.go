// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package load

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"
)

// ReadSummary reads the summary of a run's folder.
func ReadSummary(dir string) (s Summary, err error) {
	data, err := os.ReadFile(filepath.Join(dir, "summary.json"))
	if err != nil {
		return s, fmt.Errorf("%s has no summary: %w", dir, err)
	}
	return s, json.Unmarshal(data, &s)
}

// Compare puts two runs side by side.
func Compare(a, b Summary) string {
	var out strings.Builder
	t := tabwriter.NewWriter(&out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "phase\tround\trate A\trate B\tB/A\tp50 A\tp50 B\tp95 A\tp95 B\tmax A\tmax B\tfailed A\tfailed B\t")
	for _, x := range a.Phases {
		for _, y := range b.Phases {
			if x.Phase == y.Phase && x.Round == y.Round {
				fmt.Fprintf(t, "%s\t%d\t%.1f/s\t%.1f/s\t%.2f\t%s\t%s\t%s\t%s\t%s\t%s\t%d\t%d\t\n", x.Phase, x.Round, x.Rate, y.Rate, y.Rate/x.Rate,
					ms(x.Call.P50), ms(y.Call.P50), ms(x.Call.P95), ms(y.Call.P95), ms(x.Call.Max), ms(y.Call.Max), x.Failed, y.Failed)
			}
		}
	}
	_ = t.Flush() // to memory
	if a.Plan != b.Plan {
		fmt.Fprintf(&out, "the plans differ: A %+v\n                  B %+v\n", a.Plan, b.Plan)
	}
	fmt.Fprintf(&out, "most memory: A %s\n             B %s\n", memory(Sample{Resident: a.Peak, Available: a.Least}), memory(Sample{Resident: b.Peak, Available: b.Least}))
	return out.String()
}
