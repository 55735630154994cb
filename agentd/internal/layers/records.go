// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package layers

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/dormouse-run/dormouse/pkg/durable"
	"github.com/dormouse-run/dormouse/pkg/fault"
)

const recordVersion = 1

// record says what a manifest became.
type record struct {
	Version        int                 `json:"version"`
	Reference      string              `json:"reference"`
	Digest         digest.Digest       `json:"digest"`
	ManifestDigest digest.Digest       `json:"manifest_digest"`
	ErofsDigest    digest.Digest       `json:"erofs_digest"`
	Size           int64               `json:"size"`
	Format         string              `json:"format"`
	Platform       ocispec.Platform    `json:"platform"`
	Layers         int                 `json:"layers"`
	Config         ocispec.ImageConfig `json:"config"`
	PulledAt       time.Time           `json:"pulled_at"`
}

// alias says which manifest a name stood for: a tag, or an index on a platform.
type alias struct {
	Version        int           `json:"version"`
	Name           string        `json:"name"`
	Digest         digest.Digest `json:"digest"`
	ManifestDigest digest.Digest `json:"manifest_digest"`
}

// disk is the folder of a Store.
type disk struct{ root string }

func (d disk) dir(name string) string { return filepath.Join(d.root, name) }
func (d disk) images() string         { return d.dir("images") }
func (d disk) records() string        { return d.dir("records") }
func (d disk) refs() string           { return d.dir("refs") }
func (d disk) holders() string        { return d.dir("holders") }
func (d disk) staging() string        { return d.dir("staging") }
func (d disk) locks() string          { return d.dir("locks") }

func (d disk) erofsPath(dgst digest.Digest) string {
	return filepath.Join(d.images(), dgst.Encoded()+".erofs")
}

func (d disk) recordName(manifest digest.Digest) string { return manifest.Encoded() + ".json" }

func aliasFile(name string) string {
	sum := sha256.Sum256([]byte(name))
	return hex.EncodeToString(sum[:]) + ".json"
}

// indexName is the name under which an index, or a manifest asked for by platform, has its alias.
func indexName(d digest.Digest, platform string) string { return d.String() + " " + platform }

func (d disk) make() error {
	for _, dir := range []string{d.root, d.images(), d.records(), d.refs(), d.holders(), d.staging(), d.locks()} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return err
		}
	}
	return os.Chmod(d.root, 0o700)
}

// lock is taken for every change of images, records, refs and holders.
func (d disk) lock() (func(), error) { return lockFile(d.dir("lock")) }

// conversionLock is the stripe that an image's conversion takes. Two images that share one wait for each other.
func (d disk) conversionLock(manifest digest.Digest) string {
	return filepath.Join(d.locks(), manifest.Encoded()[:2])
}

// errNotRecorded is not an error of the disk.
var errNotRecorded = errors.New("not recorded")

func readJSON(path string, v any) error {
	data, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return errNotRecorded
	}
	if err != nil {
		return err
	}
	if err := json.Unmarshal(data, v); err != nil {
		return &damagedRecord{file: filepath.Base(path), err: err}
	}
	return nil
}

// damagedRecord is a record that cannot be read as one. The image can be pulled again.
type damagedRecord struct {
	file string
	err  error
}

func (e *damagedRecord) Error() string { return fmt.Sprintf("record %s: %v", e.file, e.err) }
func (e *damagedRecord) Unwrap() error { return e.err }

// load reads the record of a manifest. A damaged one counts as none: preparing the image again replaces it.
func (d disk) load(manifest digest.Digest) (record, error) {
	return d.loadFile(filepath.Join(d.records(), d.recordName(manifest)))
}

func (d disk) loadFile(path string) (record, error) {
	var r record
	if err := readJSON(path, &r); err != nil {
		return record{}, err
	}
	if r.Version != recordVersion || r.ErofsDigest.Validate() != nil || r.ManifestDigest.Validate() != nil {
		return record{}, &damagedRecord{file: filepath.Base(path), err: fmt.Errorf("version %d, digest %q", r.Version, r.ErofsDigest)}
	}
	return r, nil
}

// all reads every record; damaged ones are named apart.
func (d disk) all() (good []record, damaged []string, err error) {
	entries, err := os.ReadDir(d.records())
	if err != nil {
		return nil, nil, err
	}
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), ".json") {
			continue
		}
		r, err := d.loadFile(filepath.Join(d.records(), e.Name()))
		var bad *damagedRecord
		switch {
		case errors.Is(err, errNotRecorded): // removed in between
		case errors.As(err, &bad):
			damaged = append(damaged, e.Name())
		case err != nil:
			return nil, nil, err
		default:
			good = append(good, r)
		}
	}
	return good, damaged, nil
}

// present tells whether the record's file is there in its full size.
func (d disk) present(r record) bool {
	st, err := os.Stat(d.erofsPath(r.ErofsDigest))
	return err == nil && st.Mode().IsRegular() && st.Size() == r.Size
}

func (d disk) loadAlias(name string) (alias, error) {
	var a alias
	err := readJSON(filepath.Join(d.refs(), aliasFile(name)), &a)
	var bad *damagedRecord
	if errors.As(err, &bad) || err == nil && (a.Name != name || a.Version != recordVersion || a.ManifestDigest.Validate() != nil) {
		return alias{}, errNotRecorded // it only saves a question to the registry
	}
	return a, err
}

// saveAlias writes an alias if it says something new. The caller holds the lock.
func (d disk) saveAlias(a alias) error {
	a.Version = recordVersion
	if old, err := d.loadAlias(a.Name); err == nil && old == a {
		return nil
	}
	if err := durable.WriteJSON(filepath.Join(d.refs(), aliasFile(a.Name)), a); err != nil {
		return err
	}
	fault.At("image.alias.after")
	return nil
}

func (d disk) image(r record) Image {
	return Image{
		Reference: r.Reference, Digest: r.Digest, ManifestDigest: r.ManifestDigest, ErofsDigest: r.ErofsDigest,
		ErofsPath: d.erofsPath(r.ErofsDigest), Size: r.Size, Config: r.Config, Architecture: r.Platform.Architecture,
		Layers: r.Layers, PulledAt: r.PulledAt,
	}
}
