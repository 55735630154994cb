// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import "testing"

func TestRole(t *testing.T) {
	for name, tc := range map[string]struct {
		args []string
		want part
	}{
		"sandbox":                {[]string{"runsc-sandbox", "--root=/r", "--debug=false", "boot", "--bundle=/b", "id"}, sandbox},
		"gofer":                  {[]string{"runsc-gofer", "--root=/r", "gofer", "--bundle=/b"}, gofer},
		"command":                {[]string{"runsc", "--root=/r", "pause", "boot"}, command},
		"flag with its own word": {[]string{"runsc", "--root", "/r", "exec", "id", "boot"}, command},
		"nothing":                {[]string{"runsc"}, command},
	} {
		t.Run(name, func(t *testing.T) {
			if got := role(tc.args); got != tc.want {
				t.Errorf("role(%q) = %d, want %d", tc.args, got, tc.want)
			}
		})
	}
}
