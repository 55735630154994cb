// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package images_test

import (
	"archive/tar"
	"encoding/pem"
	"errors"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/validate"

	"github.com/dormouse-run/dormouse/test/images"
)

func twoLayers(t *testing.T, arch string) v1.Image {
	t.Helper()
	image, err := images.FromEntries(images.Config{Architecture: arch, Cmd: []string{"/run"}},
		[]images.Entry{
			images.Dir("etc", 0o755),
			images.File("etc/a", "lower", 0o644).Owned(7, 8).Xattr("user.k", "v"),
			images.Hardlink("etc/b", "etc/a"),
		},
		[]images.Entry{images.Whiteout("etc/a"), images.Opaque("var"), images.Symlink("etc/c", "b")})
	if err != nil {
		t.Fatal(err)
	}
	return image
}

func TestLayersHoldTheirEntries(t *testing.T) {
	layers, err := twoLayers(t, "").Layers()
	if err != nil {
		t.Fatal(err)
	}
	r, err := layers[1].Uncompressed()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	var names []string
	for tr := tar.NewReader(r); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, h.Name)
	}
	if want := []string{"etc/.wh.a", "var/.wh..wh..opq", "etc/c"}; !slices.Equal(names, want) {
		t.Errorf("entries = %q, want %q", names, want)
	}
}

func TestSameEntriesSameDigest(t *testing.T) {
	a, err := twoLayers(t, "arm64").Digest()
	if err != nil {
		t.Fatal(err)
	}
	b, err := twoLayers(t, "arm64").Digest()
	if err != nil {
		t.Fatal(err)
	}
	if a != b {
		t.Errorf("digests differ: %s, %s", a, b)
	}
}

func TestLayoutRoundTrip(t *testing.T) {
	dir, image := t.TempDir(), twoLayers(t, "")
	if err := images.WriteLayout(dir, image); err != nil {
		t.Fatal(err)
	}
	got, err := images.ReadLayout(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := validate.Image(got); err != nil {
		t.Error(err)
	}
}

func TestPush(t *testing.T) {
	store := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if user, password, _ := r.BasicAuth(); user != "u" || password != "p" {
			w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		store.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	at, err := url.Parse(server.URL)
	if err != nil {
		t.Fatal(err)
	}
	to := images.Registry{
		Host: at.Host, User: "u", Password: "p",
		CA: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}),
	}

	index, err := images.Index(twoLayers(t, "amd64"), twoLayers(t, "arm64"))
	if err != nil {
		t.Fatal(err)
	}
	digest, err := to.PushIndex(t.Context(), "some/image:tag", index)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := name.NewDigest(to.Ref("some/image@" + digest)); err != nil {
		t.Errorf("the digest returned: %v", err)
	}

	wrong := to
	wrong.Password = "q"
	if _, err := wrong.Push(t.Context(), "some/image:tag", twoLayers(t, "")); err == nil {
		t.Error("a wrong password was accepted")
	}
	untrusted := to
	untrusted.CA = nil
	if _, err := untrusted.Push(t.Context(), "some/image:tag", twoLayers(t, "")); err == nil {
		t.Error("a certificate that nothing vouches for was accepted")
	}
}
