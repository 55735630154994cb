package bench

import (
	"path/filepath"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	barerunsc "github.com/dormouse-run/dormouse/test/bare"
)

// bare is runsc with nothing around it.
type bare struct{ *barerunsc.Runsc }

// newBare takes bundle and flags from a sandbox of node 1 that runs.
func (b *bench) newBare(uid string) (*bare, error) {
	r, err := barerunsc.New(filepath.Join(b.cluster.Dir, "bare"), b.state(), uid, b.cluster.CgroupParent(1), b.cluster.ID)
	return &bare{r}, err
}

// spec reads the OCI spec that agentd made for one of its sandboxes.
func (b *bench) spec(uid string) (*specs.Spec, error) { return barerunsc.Spec(b.state(), uid) }
