package layers

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// FuzzManifest: a registry's manifest, index or configuration of any content is taken or refused, in a
// message of bounded size.
func FuzzManifest(f *testing.F) {
	for _, text := range []string{
		`{"mediaType":"application/vnd.oci.image.manifest.v1+json","config":{"mediaType":"application/vnd.oci.image.config.v1+json","digest":"sha256:x","size":1},"layers":[{"mediaType":"application/vnd.oci.image.layer.v1.tar+gzip","digest":"x","size":-1,"urls":["http://x"],"data":"AAAA"}]}`,
		`{"manifests":[{"mediaType":"application/vnd.oci.image.manifest.v1+json","platform":{"os":"linux","architecture":"` + strings.Repeat("a", 9000) + `"}},{"platform":null}]}`,
		`{"manifests":[{"mediaType":"application/vnd.oci.image.index.v1+json","platform":{"os":"linux","architecture":"amd64","variant":"v999"}},{"mediaType":"application/vnd.oci.image.manifest.v1+json","platform":{"os":"linux","architecture":"amd64"}}]}`,
		`{"os":"linux","architecture":"arm64","rootfs":{"diff_ids":["x"]},"config":{"Env":["=","A"],"User":"\u0000"}}`,
		`null`, `{}`, `{"layers":null}`,
	} {
		f.Add([]byte(text))
	}
	p := &puller{reg: &registry{}, platform: ocispec.Platform{OS: "linux", Architecture: "amd64"}}
	f.Fuzz(func(t *testing.T, data []byte) {
		var man ocispec.Manifest
		var index ocispec.Index
		var cfg ocispec.Image
		var all []error
		if json.Unmarshal(data, &man) == nil {
			all = append(all, p.checkManifest(&man))
		}
		if json.Unmarshal(data, &index) == nil {
			_, err := p.choose(index.Manifests)
			all = append(all, err)
		}
		if json.Unmarshal(data, &cfg) == nil {
			all = append(all, p.checkConfig(man, cfg))
		}
		for _, err := range all {
			var e *errs.Error
			if err != nil && (!errors.As(err, &e) || len(err.Error()) > 4096) {
				t.Fatalf("%.200s, %d bytes", err, len(err.Error()))
			}
		}
	})
}
