package checkpoint

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/snapshot"
)

// FuzzManifest: whatever lies where a manifest should, loading it gives a manifest that can be used or a
// typed error.
func FuzzManifest(f *testing.F) {
	const id = "01890a5d-ac96-774b-bcce-b302099a8057"
	good := Manifest{Version: ManifestVersion, UID: id, Spec: &specs.Spec{}, CPUFeatures: []string{"avx"}, Architecture: "amd64",
		Volumes: []snapshot.VolumeReference{{VolumeUID: id, Path: "/data"}}, Processes: []ProcessEntry{{ID: "main", Pid: 2}},
		Files: []snapshot.File{{Name: "checkpoint.img", SizeBytes: 3}}, SizeBytes: 3}
	seed, err := json.Marshal(good)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(seed)
	for _, text := range []string{
		"", "null", "{}", "[", `{"version":1,"uid":"` + id + `","spec":{},"files":[],"size_bytes":9223372036854775807}`,
		`{"version":1,"uid":"` + id + `","spec":{},"files":[{"name":"../../etc/passwd","size_bytes":-1}]}`, `{"version":2,"uid":"` + id + `","spec":{"process":null}}`,
	} {
		f.Add([]byte(text))
	}
	s, err := OpenStore(StoreOptions{Root: f.TempDir(), Require: []string{"checkpoint.img"}, Direct: true})
	if err != nil {
		f.Fatal(err)
	}
	dir := s.Path(id)
	if err := os.Mkdir(dir, 0o700); err != nil {
		f.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "checkpoint.img"), []byte("abc"), 0o600); err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		if err := os.WriteFile(filepath.Join(dir, manifestName), data, 0o600); err != nil {
			t.Fatal(err)
		}
		m, err := s.Load(id)
		if err != nil {
			if !errs.Has(err, errs.ArtefactDamaged) && !errs.Has(err, errs.IncompatibleRuntime) {
				t.Fatalf("%v", err)
			}
			return
		}
		_ = m.CheckHost(Host{Node: "n", Driver: "runsc", Architecture: "amd64"})
		_ = m.CheckVolumes(m.Volumes)
		_ = m.CheckVolumes([]snapshot.VolumeReference{{Path: "/data"}, {Path: "/data"}})
		s.ReadDirect(m)
		if st := m.Status(); len(st.Files) == 0 || st.SizeBytes < 0 {
			t.Fatalf("an artefact of %d bytes in %d files", st.SizeBytes, len(st.Files))
		}
	})
}
