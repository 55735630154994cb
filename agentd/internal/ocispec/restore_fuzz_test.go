package ocispec

import (
	"encoding/json"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// FuzzForRestore: a manifest's spec, whatever it is, gives a spec to restore with or an error.
func FuzzForRestore(f *testing.F) {
	good, err := New(Sandbox{Hostname: "h", Rootfs: "/layers/x.erofs", Init: "/bundle/init.erofs", NetNS: "/run/netns/n", MemoryBytes: 64 << 20, LayerBytes: 1 << 20,
		Volumes: []Volume{{Source: "/v", Path: "/data"}}})
	if err != nil {
		f.Fatal(err)
	}
	seed, err := json.Marshal(good)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(seed)
	f.Add([]byte(`{}`))
	f.Add([]byte(`{"process":{},"linux":{"namespaces":[{"type":"network"}]},"annotations":{},"mounts":[{"type":"bind","destination":""}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		var spec specs.Spec
		if json.Unmarshal(data, &spec) != nil {
			return
		}
		b := Bindings{Hostname: "copy", NetNS: "/run/netns/m", Init: "/bundle/init.erofs", Volumes: map[string]string{}}
		for _, v := range Volumes(&spec) {
			b.Volumes[v.Path] = "/mine"
		}
		made, err := ForRestore(&spec, b)
		if err != nil {
			return
		}
		if Image(made) != Image(&spec) || made.Hostname != "copy" {
			t.Fatalf("another image, or the old name: %v", made)
		}
		for _, m := range made.Mounts {
			if m.Type == "bind" && m.Source != "/mine" && m.Destination != InitDir {
				t.Fatalf("a mount of the source's is left: %v", m)
			}
		}
	})
}
