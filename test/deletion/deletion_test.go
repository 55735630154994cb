package deletion_test

import (
	"context"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/test/deletion"
)

// Deleting many snapshots is paced and visible, protects what is referred to, outlives the coordinator and leaves nothing. DELETIONS is another number
// of snapshots; make bench-deletion has 10,000.
func TestDeletingManySnapshots(t *testing.T) {
	n := 500
	if s := os.Getenv("DELETIONS"); s != "" {
		var err error
		if n, err = strconv.Atoi(s); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 15*time.Minute)
	defer cancel()
	f, err := deletion.Run(ctx, deletion.Options{Snapshots: n, Nodes: 2, Rounds: 10, Logf: t.Logf})
	t.Logf("%+v", f)
	if err != nil {
		t.Fatal(err)
	}
	if f.Published != n || f.Deleted == 0 || f.AtNode == 0 || f.Checked < n || f.Refused == 0 || f.Active == 0 {
		t.Error("the run did not look at everything")
	}
}
