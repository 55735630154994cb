// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

// Package images makes container images for tests and the demo, and pushes them.
//
// An image is built from layers, and a layer from the entries of its tar, so
// that a test states exactly the whiteout, hard link or odd owner it is about.
// The same entries give the same digests: times are fixed and nothing is taken
// from the machine. The larger images come from scripts/images.sh, which keeps
// them in the cache as OCI layouts.
package images

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"os"
	"path"
	"runtime"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// epoch is the time of every entry that names none.
var epoch = time.Unix(1_600_000_000, 0).UTC()

// Entry is one member of a layer's tar. The helpers below fill in the usual
// ones; the header may be changed before the entry is used.
type Entry struct {
	Header tar.Header
	Body   []byte
}

// File is a regular file with the given permission bits.
func File(name, body string, mode int64) Entry {
	return Entry{Header: tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode}, Body: []byte(body)}
}

// Dir is a folder.
func Dir(name string, mode int64) Entry {
	return Entry{Header: tar.Header{Typeflag: tar.TypeDir, Name: name, Mode: mode}}
}

// Symlink is a symbolic link called name.
func Symlink(name, target string) Entry {
	return Entry{Header: tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target, Mode: 0o777}}
}

// Hardlink is a second name for a file of this layer or one below.
func Hardlink(name, target string) Entry {
	return Entry{Header: tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: target, Mode: 0o644}}
}

// Whiteout removes name, as lower layers gave it.
func Whiteout(name string) Entry {
	return File(path.Join(path.Dir(name), ".wh."+path.Base(name)), "", 0o644)
}

// Opaque hides everything that lower layers put into the folder.
func Opaque(dir string) Entry {
	return File(path.Join(dir, ".wh..wh..opq"), "", 0o644)
}

// Owned is the entry with another owner.
func (e Entry) Owned(uid, gid int) Entry {
	e.Header.Uid, e.Header.Gid = uid, gid
	return e
}

// Xattr is the entry with one more extended attribute.
func (e Entry) Xattr(name, value string) Entry {
	records := map[string]string{"SCHILY.xattr." + name: value}
	for k, v := range e.Header.PAXRecords {
		records[k] = v
	}
	e.Header.PAXRecords = records
	return e
}

// Layer packs entries in the order given, gzip-compressed.
func Layer(entries ...Entry) (v1.Layer, error) {
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, e := range entries {
		h := e.Header
		h.Size = int64(len(e.Body))
		if h.ModTime.IsZero() {
			h.ModTime = epoch
		}
		if err := w.WriteHeader(&h); err != nil {
			return nil, fmt.Errorf("layer entry %s: %w", h.Name, err)
		}
		if _, err := w.Write(e.Body); err != nil {
			return nil, fmt.Errorf("layer entry %s: %w", h.Name, err)
		}
	}
	if err := w.Close(); err != nil {
		return nil, fmt.Errorf("layer: %w", err)
	}
	return openLayer(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(buf.Bytes())), nil })
}

// LayerFromFile is the tar at path as one layer.
func LayerFromFile(path string) (v1.Layer, error) {
	return openLayer(func() (io.ReadCloser, error) { return os.Open(path) })
}

func openLayer(open tarball.Opener) (v1.Layer, error) {
	layer, err := tarball.LayerFromOpener(open,
		tarball.WithMediaType(types.OCILayer), tarball.WithCompressionLevel(gzip.BestSpeed))
	if err != nil {
		return nil, fmt.Errorf("layer: %w", err)
	}
	return layer, nil
}

// Config is what an image says about how to run it. Architecture is this
// machine's where it is empty.
type Config struct {
	Architecture string
	Entrypoint   []string
	Cmd          []string
	Env          []string
	User         string
	WorkingDir   string
	Volumes      []string
	Labels       map[string]string
}

func (c Config) architecture() string {
	if c.Architecture != "" {
		return c.Architecture
	}
	return runtime.GOARCH
}

// Build stacks layers, lowest first.
func Build(cfg Config, layers ...v1.Layer) (v1.Image, error) {
	image := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	for _, layer := range layers {
		var err error
		image, err = mutate.Append(image, mutate.Addendum{
			Layer:   layer,
			History: v1.History{Created: v1.Time{Time: epoch}, CreatedBy: "dormouse test/images"},
		})
		if err != nil {
			return nil, fmt.Errorf("image: %w", err)
		}
	}
	file, err := image.ConfigFile()
	if err != nil {
		return nil, fmt.Errorf("image: %w", err)
	}
	file = file.DeepCopy()
	file.OS, file.Architecture = "linux", cfg.architecture()
	file.Created = v1.Time{Time: epoch}
	file.Config = v1.Config{
		Entrypoint: cfg.Entrypoint, Cmd: cfg.Cmd, Env: cfg.Env,
		User: cfg.User, WorkingDir: cfg.WorkingDir, Labels: cfg.Labels,
	}
	for _, v := range cfg.Volumes {
		if file.Config.Volumes == nil {
			file.Config.Volumes = map[string]struct{}{}
		}
		file.Config.Volumes[v] = struct{}{}
	}
	if image, err = mutate.ConfigFile(image, file); err != nil {
		return nil, fmt.Errorf("image: %w", err)
	}
	return image, nil
}

// FromEntries is Build for layers that are given by their entries.
func FromEntries(cfg Config, layers ...[]Entry) (v1.Image, error) {
	packed := make([]v1.Layer, 0, len(layers))
	for _, entries := range layers {
		layer, err := Layer(entries...)
		if err != nil {
			return nil, err
		}
		packed = append(packed, layer)
	}
	return Build(cfg, packed...)
}

// Index offers images for several architectures under one reference.
func Index(images ...v1.Image) (v1.ImageIndex, error) {
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, image := range images {
		file, err := image.ConfigFile()
		if err != nil {
			return nil, fmt.Errorf("index: %w", err)
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{
			Add:        image,
			Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: file.OS, Architecture: file.Architecture}},
		})
	}
	return index, nil
}
