package room

import (
	"bufio"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// ReadMachine reads the machine's figures below proc, which is /proc. Where the kernel counts no stalls, none are told.
func ReadMachine(proc string) (Machine, error) {
	f, err := os.Open(filepath.Join(proc, "meminfo"))
	if err != nil {
		return Machine{}, errs.Wrap(err, errs.InternalError, "read the machine's memory: %v", err)
	}
	defer f.Close()
	m := Machine{Total: -1, Available: -1}
	scan := bufio.NewScanner(f)
	for (m.Total < 0 || m.Available < 0) && scan.Scan() {
		name, rest, _ := strings.Cut(scan.Text(), ":")
		field := map[string]*int64{"MemTotal": &m.Total, "MemAvailable": &m.Available}[name]
		if field == nil {
			continue
		}
		kb, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
		if err != nil {
			return Machine{}, errs.Wrap(err, errs.InternalError, "read the machine's memory: %s: %v", name, err)
		}
		*field = kb << 10
	}
	if err := scan.Err(); err != nil {
		return Machine{}, errs.Wrap(err, errs.InternalError, "read the machine's memory: %v", err)
	}
	if m.Total < 0 || m.Available < 0 {
		return Machine{}, errs.New(errs.InternalError, "%s says nothing of the machine's memory", f.Name())
	}
	m.Stalled, err = readStalled(filepath.Join(proc, "pressure", "memory"))
	return m, err
}

// readStalled reads "some avg10=0.04 avg60=...".
func readStalled(file string) (float64, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return 0, nil //nolint:nilerr // a kernel without it, or with it switched off, which shows when it is opened
	}
	for _, word := range strings.Fields(string(data)) {
		if text, ok := strings.CutPrefix(word, "avg10="); ok {
			n, err := strconv.ParseFloat(text, 64)
			if err != nil {
				return 0, errs.Wrap(err, errs.InternalError, "read the memory's pressure: %v", err)
			}
			return n, nil
		}
	}
	return 0, nil
}
