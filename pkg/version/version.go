// Package version says which build this is.
package version

import (
	"fmt"
	"runtime"
	"runtime/debug"
)

// Version and Commit are stamped by the linker (-X); a build without them says what Go recorded.
var (
	Version = "dev"
	Commit  = ""
)

// Info is the build.
type Info struct {
	Version string `json:"version"`
	Commit  string `json:"commit"`
	Dirty   bool   `json:"dirty,omitempty"`
	Go      string `json:"go"`
	Arch    string `json:"arch"`
}

// Get gives the build's facts.
func Get() Info {
	i := Info{Version: Version, Commit: Commit, Go: runtime.Version(), Arch: runtime.GOOS + "/" + runtime.GOARCH}
	build, ok := debug.ReadBuildInfo()
	if !ok {
		return i
	}
	for _, s := range build.Settings {
		switch {
		case s.Key == "vcs.revision" && i.Commit == "":
			i.Commit = s.Value
		case s.Key == "vcs.modified" && Commit == "":
			i.Dirty = s.Value == "true"
		}
	}
	return i
}

// String is one line for --version.
func (i Info) String() string {
	commit := i.Commit
	if commit == "" {
		commit = "unknown"
	}
	if len(commit) > 12 {
		commit = commit[:12]
	}
	if i.Dirty {
		commit += "+changes"
	}
	return fmt.Sprintf("%s (commit %s, %s, %s)", i.Version, commit, i.Go, i.Arch)
}
