// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package layers

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/containerd/v2/core/remotes/docker"
	dockerconfig "github.com/containerd/containerd/v2/core/remotes/docker/config"
	"github.com/containerd/log"
	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/sirupsen/logrus"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

const (
	hubDomain    = "docker.io"
	hubHost      = "registry-1.docker.io"
	hubConfigKey = "https://index.docker.io/v1/"
	maxConfig    = 1 << 20
)

// imageRef is a reference in full form.
type imageRef struct {
	full   string        // for people and for the registry
	domain string        // the registry, without credentials
	digest digest.Digest // empty where a tag is asked for
}

func parseRef(s string) (imageRef, error) {
	named, err := reference.ParseDockerRef(s)
	if err != nil {
		return imageRef{}, errs.New(errs.InvalidReference, "%q is not an image reference: %v; write it as registry/name:tag or registry/name@sha256:digest", clip(s), err).With("image", clip(s))
	}
	ref := imageRef{full: named.String(), domain: reference.Domain(named)}
	if d, ok := named.(reference.Digested); ok {
		ref.digest = d.Digest()
		if ref.digest.Algorithm() != digest.SHA256 {
			return imageRef{}, errs.New(errs.InvalidReference, "%q has a digest that is not sha256", clip(s)).With("image", clip(s))
		}
	}
	return ref, nil
}

func clip(s string) string {
	if len(s) > 256 {
		return s[:256] + "..."
	}
	return s
}

// registry is a connection to the registry of one reference, for the calls of one image.
type registry struct {
	ref      imageRef
	resolver remotes.Resolver
	mu       sync.Mutex
	clients  []*http.Client
}

// close ends idle connections.
func (r *registry) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.clients {
		c.CloseIdleConnections()
	}
}

// dial prepares to talk to the reference's registry. Nothing is sent yet.
func (c *Config) dial(ref imageRef, creds Credentials) (*registry, error) {
	pool, err := c.trusted()
	if err != nil {
		return nil, err
	}
	user, secret, err := c.credentials(ref.domain, creds)
	if err != nil {
		return nil, err
	}
	reg := &registry{ref: ref}
	opts := dockerconfig.HostOptions{
		// Without a scheme of ours the library would not verify what runs on this machine.
		DefaultScheme: "https",
		DefaultTLS:    &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12},
		Credentials: func(host string) (string, string, error) {
			// Mirrors of the hosts folder get nothing: the credentials are for the registry that was named.
			if host == ref.domain || ref.domain == hubDomain && host == hubHost {
				return user, secret, nil
			}
			return "", "", nil
		},
		UpdateClient: func(client *http.Client) error {
			reg.mu.Lock()
			defer reg.mu.Unlock()
			reg.clients = append(reg.clients, client)
			return nil
		},
	}
	if slices.Contains(c.PlainHTTP, ref.domain) {
		opts.DefaultScheme, opts.DefaultTLS = "http", nil
	}
	if c.HostsDir != "" {
		opts.HostDir = dockerconfig.HostDirFromRoot(c.HostsDir)
	}
	reg.resolver = docker.NewResolver(docker.ResolverOptions{
		Hosts:   dockerconfig.ConfigureHosts(context.Background(), opts),
		Headers: http.Header{"User-Agent": []string{"dormouse"}},
	})
	return reg, nil
}

func (c *Config) trusted() (*x509.CertPool, error) {
	pool, err := x509.SystemCertPool()
	if err != nil {
		pool = x509.NewCertPool()
	}
	for _, f := range c.CAFiles {
		pem, err := os.ReadFile(f)
		if err != nil {
			return nil, fmt.Errorf("registry CA: %w", err)
		}
		if !pool.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("registry CA %s holds no certificate in PEM", f)
		}
	}
	return pool, nil
}

// credentials gives what to send to a registry: a user and a password, or no user and a refresh token.
func (c *Config) credentials(domain string, creds Credentials) (user, secret string, err error) {
	switch {
	case creds.IdentityToken != "":
		return "", creds.IdentityToken, nil
	case creds.Username != "" || creds.Password != "":
		return creds.Username, creds.Password, nil
	case len(creds.DockerConfig) > 0:
		return fromDockerConfig(creds.DockerConfig, domain)
	case c.DockerConfig != "":
		data, err := readBounded(c.DockerConfig, maxConfig)
		if errors.Is(err, os.ErrNotExist) {
			return "", "", nil
		}
		if err != nil {
			return "", "", fmt.Errorf("docker config: %w", err)
		}
		return fromDockerConfig(data, domain)
	}
	return "", "", nil
}

func readBounded(path string, limit int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, limit))
}

// fromDockerConfig looks a registry up in a docker config.json. Credential helpers are programs and are not run.
func fromDockerConfig(data []byte, domain string) (user, secret string, err error) {
	var cfg struct {
		Auths map[string]struct {
			Auth          string `json:"auth"`
			Username      string `json:"username"`
			Password      string `json:"password"`
			IdentityToken string `json:"identitytoken"`
		} `json:"auths"`
	}
	// What the decoder says could quote a secret.
	if json.Unmarshal(data, &cfg) != nil {
		return "", "", errs.New(errs.InvalidField, "the docker config with the registry's credentials is not valid JSON").With("field", "docker_config")
	}
	for key, a := range cfg.Auths {
		if !sameRegistry(key, domain) {
			continue
		}
		if a.IdentityToken != "" {
			return "", a.IdentityToken, nil
		}
		if a.Auth == "" {
			return a.Username, a.Password, nil
		}
		plain, err := base64.StdEncoding.DecodeString(a.Auth)
		name, pass, ok := strings.Cut(string(plain), ":")
		if err != nil || !ok {
			return "", "", errs.New(errs.InvalidField, "the docker config's entry for %s is not base64 of user:password", domain).With("field", "docker_config")
		}
		return name, strings.TrimRight(pass, "\x00"), nil
	}
	return "", "", nil
}

// sameRegistry compares a key of a docker config, which may be a URL, with a registry.
func sameRegistry(key, domain string) bool {
	if domain == hubDomain && key == hubConfigKey {
		return true
	}
	key = strings.TrimPrefix(strings.TrimPrefix(key, "https://"), "http://")
	key, _, _ = strings.Cut(key, "/")
	return key == domain
}

// quiet keeps the library's own log away from ours: errors are returned, and headers are nobody's business.
func quiet(ctx context.Context) context.Context {
	l := logrus.New()
	l.SetOutput(io.Discard)
	l.SetLevel(logrus.PanicLevel)
	return log.WithLogger(ctx, logrus.NewEntry(l))
}

// resolve asks the registry what the reference stands for.
func (r *registry) resolve(ctx context.Context) (ocispec.Descriptor, error) {
	_, desc, err := r.resolver.Resolve(quiet(ctx), r.ref.full)
	if err != nil {
		return ocispec.Descriptor{}, r.explain(ctx, err)
	}
	return desc, nil
}
