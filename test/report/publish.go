// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package report

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// Publish writes NAME.json and NAME.md of a run into a folder that others see: what v says, but for paths, addresses and hosts' names, and
// with days in place of times. It fails, and writes nothing, if something of the kind is left after all.
func Publish(dir, name string, v any, markdown string) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	var all any
	if err := json.Unmarshal(data, &all); err != nil {
		return err
	}
	if data, err = json.MarshalIndent(cleaned(all), "", "  "); err != nil {
		return err
	}
	files := map[string]string{name + ".json": string(data) + "\n", name + ".md": Clean(markdown)}
	for file, text := range files {
		if found := Leaks(text); len(found) > 0 {
			return fmt.Errorf("%s would tell of this machine: %q", file, found)
		}
	}
	if err := os.MkdirAll(dir, 0o755); err != nil { //nolint:gosec // a part of the documentation
		return err
	}
	for file, text := range files {
		if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o644); err != nil { //nolint:gosec // as above
			return err
		}
	}
	return nil
}

// cleaned is a JSON value whose texts are clean. Fields that tell how the cluster was reached are gone.
func cleaned(v any) any {
	switch v := v.(type) {
	case map[string]any:
		out := make(map[string]any, len(v))
		for k, x := range v {
			if k != "addr" {
				out[Clean(k)] = cleaned(x)
			}
		}
		return out
	case []any:
		out := make([]any, len(v))
		for i, x := range v {
			out[i] = cleaned(x)
		}
		return out
	case string:
		return Clean(v)
	}
	return v
}

var (
	// A time is its day.
	times = regexp.MustCompile(`\b(\d{4}-\d\d-\d\d)[T ]\d\d:\d\d(:\d\d(\.\d+)?)?( ?UTC|Z|[+-]\d\d:?\d\d)?`)
	// An absolute path of two parts or more, and how something is reached. Fractions and units ("3/4", "MB/s") are no paths.
	paths     = regexp.MustCompile(`(^|[\s"'(=:,\[])/[A-Za-z0-9._-]+(/[A-Za-z0-9._@-]+)+/?`)
	locations = regexp.MustCompile(`\b[a-z][a-z0-9+.-]*://[^\s"')\]]+`)
	addresses = regexp.MustCompile(`\b\d{1,3}(\.\d{1,3}){3}(:\d+)?\b`)
	clocks    = regexp.MustCompile(`\b\d\d:\d\d:\d\d(\.\d+)?\b`)
)

// isMethod tells whether what looks like a path is the name of a call.
func isMethod(found string) bool {
	return strings.Contains(found, "/dormouse.v1.") && strings.Count(found, "/") == 2
}

// Clean takes out of a text what tells of a machine: paths, addresses, its name; of times the days stay.
func Clean(text string) string {
	text = times.ReplaceAllString(text, "$1")
	text = locations.ReplaceAllString(text, "(location)")
	text = paths.ReplaceAllStringFunc(text, func(found string) string {
		if isMethod(found) {
			return found
		}
		return paths.ReplaceAllString(found, "$1(path)")
	})
	text = addresses.ReplaceAllString(text, "(address)")
	text = clocks.ReplaceAllString(text, "(time)")
	if name := hostname(); name != "" {
		text = regexp.MustCompile(`\b`+regexp.QuoteMeta(name)+`\b`).ReplaceAllString(text, "(host)")
	}
	return text
}

// Leaks lists what of a text tells of a machine.
func Leaks(text string) []string {
	var found []string
	for _, kind := range []*regexp.Regexp{times, locations, paths, addresses, clocks} {
		found = append(found, kind.FindAllString(text, -1)...)
	}
	found = slices.DeleteFunc(found, isMethod)
	if name := hostname(); name != "" && regexp.MustCompile(`\b`+regexp.QuoteMeta(name)+`\b`).MatchString(text) {
		found = append(found, name)
	}
	return found
}

// hostname of this machine, if it is one that no word could be.
func hostname() string {
	name, err := os.Hostname()
	if err != nil || name == "localhost" || len(name) < 4 || !strings.ContainsAny(name, "-.0123456789") {
		return ""
	}
	return name
}

// ReadJSON reads what Write wrote for programs.
func ReadJSON(path string, v any) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(data, v); err != nil {
		return errors.Join(fmt.Errorf("%s is not a report", filepath.Base(path)), err)
	}
	return nil
}

// Day of a time, as it may be shown.
func Day(t time.Time) string { return t.UTC().Format(time.DateOnly) }
