// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package layers

import (
	"log/slog"
	"slices"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/dormouse-run/dormouse/agentd/internal/layers/flatten"
)

// Image is an image that is ready on this node.
type Image struct {
	// Reference is what was asked for, in full form.
	Reference string
	// Digest is what the reference stood for: of an index, or of a manifest.
	Digest digest.Digest
	// ManifestDigest is of the manifest for this node's platform.
	ManifestDigest digest.Digest
	// ErofsDigest is of the file at ErofsPath. A snapshot is bound to both.
	ErofsDigest digest.Digest
	ErofsPath   string
	Size        int64
	// Config has the environment, entrypoint, command, user, folder and stop signal.
	Config       ocispec.ImageConfig
	Architecture string
	Layers       int
	PulledAt     time.Time
}

// Credentials are for one call. They go to the registry that the reference names and nowhere else, and
// print as nothing.
type Credentials struct {
	Username, Password string
	// IdentityToken is an OAuth2 refresh token, instead of the two above.
	IdentityToken string
	// DockerConfig is a docker config.json (or a Kubernetes .dockerconfigjson) to look the registry up in,
	// where none of the above is set.
	DockerConfig []byte
}

// String hides the credentials.
func (Credentials) String() string { return "(credentials)" }

// GoString hides the credentials.
func (Credentials) GoString() string { return "(credentials)" }

// LogValue hides the credentials.
func (Credentials) LogValue() slog.Value { return slog.StringValue("(credentials)") }

// MarshalJSON hides the credentials: they are never stored.
func (Credentials) MarshalJSON() ([]byte, error) { return []byte(`"(credentials)"`), nil }

// EnsureOptions are of one call of Ensure.
type EnsureOptions struct {
	Credentials Credentials
	// Platform overrides the node's own: "linux/arm64". For tools; a sandbox needs the node's.
	Platform string
	// Holder, if set, holds the image before Ensure returns, so that no collection can come between.
	Holder string
	// PreferLocal uses what a tag stood for when it was last resolved here, without asking the registry.
	PreferLocal bool
	// Progress is called from the goroutine of Ensure, a few times a second at most and once at least in each phase that a
	// preparation goes through, in their order; the last time with PhaseDone. It must not block for long.
	Progress func(Progress)
}

// Phase is what is being done for an image.
type Phase string

// The phases, in order.
const (
	PhaseResolving  Phase = "resolving"
	PhasePulling    Phase = "pulling"
	PhaseConverting Phase = "converting"
	PhaseDone       Phase = "done"
)

// Progress is how far an image is. It is a snapshot: receivers may keep it.
type Progress struct {
	Phase       Phase
	Done, Total int64 // bytes pulled and to be pulled, over all layers
	Layers      []LayerProgress
}

func (p Progress) clone() Progress {
	p.Layers = slices.Clone(p.Layers)
	return p
}

// LayerProgress is how far one layer's download is. A layer that was there already is done at once.
type LayerProgress struct {
	Digest      digest.Digest
	Done, Total int64
}

// Config is of a Store.
type Config struct {
	// Root is the layers folder. It must be the same path on every node: snapshots are bound to it.
	Root string
	// Node is written into holders, so that each agentd of a shared root knows its own.
	Node string
	// ContainerdSocket and Namespace say where images are pulled to.
	ContainerdSocket, Namespace string
	// Mkfs is the path of mkfs.erofs.
	Mkfs string
	// Platform is the node's, "linux/amd64"; empty means that of this process.
	Platform string
	// HostsDir is a folder of registry settings as containerd's certs.d (<host>/hosts.toml); optional.
	HostsDir string
	// CAFiles are certificates, in PEM, trusted besides the system's for every registry.
	CAFiles []string
	// PlainHTTP are registries ("host:port") that are spoken to without TLS. Each is a decision to trust the network.
	PlainHTTP []string
	// DockerConfig is the path of a docker config.json with the node's credentials; optional, read at each use.
	DockerConfig string
	// Limits bound an image; the zero value means flatten.DefaultLimits.
	Limits flatten.Limits
	// Conversions is how many images are converted at a time; 0 means 2.
	Conversions int
	// Downloads is how many layers of an image are downloaded at a time; 0 means 4.
	Downloads int
	Log       *slog.Logger
}

// DefaultRoot is where images are on every node.
const DefaultRoot = "/var/lib/dormouse/layers"

// DefaultNamespace keeps Dormouse's images apart from those of other users of containerd.
const DefaultNamespace = "dormouse"
