// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package images

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"

	"github.com/dormouse-run/dormouse/test/tools"
)

// CachedDir is the OCI layout that scripts/images.sh made under this name.
func CachedDir(name string) string { return filepath.Join(tools.Cache(), "images", name) }

// Busybox is the small image: busybox and the links to it, a few megabytes.
func Busybox(t testing.TB) v1.Image { return cached(t, "busybox") }

// Python is a Debian root with Python 3.
func Python(t testing.TB) v1.Image { return cached(t, "python") }

func cached(t testing.TB, name string) v1.Image {
	t.Helper()
	dir := CachedDir(name)
	if _, err := os.Stat(dir); err != nil {
		t.Fatalf("the image %s is not there: run scripts/images.sh %s", name, name)
	}
	image, err := ReadLayout(dir)
	if err != nil {
		t.Fatal(err)
	}
	return image
}

// ReadLayout is the only image of an OCI layout. Blobs are read when they are
// needed, so dir must stay while the image is used.
func ReadLayout(dir string) (v1.Image, error) {
	index, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		return nil, fmt.Errorf("OCI layout %s: %w", dir, err)
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		return nil, fmt.Errorf("OCI layout %s: %w", dir, err)
	}
	if len(manifest.Manifests) != 1 {
		return nil, fmt.Errorf("OCI layout %s holds %d images, want one", dir, len(manifest.Manifests))
	}
	image, err := index.Image(manifest.Manifests[0].Digest)
	if err != nil {
		return nil, fmt.Errorf("OCI layout %s: %w", dir, err)
	}
	return image, nil
}

// WriteLayout makes dir an OCI layout with just this image.
func WriteLayout(dir string, image v1.Image) error {
	path, err := layout.Write(dir, empty.Index)
	if err != nil {
		return fmt.Errorf("OCI layout %s: %w", dir, err)
	}
	if err := path.AppendImage(image); err != nil {
		return fmt.Errorf("OCI layout %s: %w", dir, err)
	}
	return nil
}
