package guestinit

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// TestInitStaysLight: guest init is in every sandbox's memory. Each of these packages brings
// megabytes or goroutines of its own over a thousand sandboxes.
func TestInitStaysLight(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "github.com/dormouse-run/dormouse/agentd/cmd/guestinit").Output()
	if err != nil {
		t.Fatal(err)
	}
	deps := strings.Fields(string(out))
	for _, heavy := range []string{
		"fmt", "os", "net", "time", "reflect", "encoding/json", "encoding/binary", "os/exec", "os/user", "os/signal", "log/slog", "context", "strings",
		"golang.org/x/sys/unix", "google.golang.org/protobuf/encoding/protowire", "google.golang.org/protobuf/proto",
	} {
		if slices.Contains(deps, heavy) {
			t.Errorf("guest init imports %s", heavy)
		}
	}
	if len(deps) > 60 {
		t.Errorf("guest init has %d packages, at most 60 are allowed", len(deps))
	}
}
