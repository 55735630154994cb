// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package images

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
)

// Registry is where images are pushed to. It is always spoken to over TLS.
type Registry struct {
	// Host is the registry as references name it, host:port.
	Host string
	// CA is the PEM certificate that signs the registry's own; the machine's
	// roots are trusted where it is empty.
	CA []byte
	// User and Password are sent as basic authentication, unless User is empty.
	User, Password string
	// Dial connects, for a registry in another network namespace; the usual
	// dialer is used where it is nil.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
}

// Ref is the reference of a repository with tag or digest in this registry.
func (r Registry) Ref(repository string) string { return r.Host + "/" + repository }

// Push uploads an image under repository[:tag] and returns its digest. What the
// registry already has is not sent again.
func (r Registry) Push(ctx context.Context, repository string, image v1.Image) (string, error) {
	return r.push(ctx, repository, image, image.Digest)
}

// PushIndex is Push for images of several architectures.
func (r Registry) PushIndex(ctx context.Context, repository string, index v1.ImageIndex) (string, error) {
	return r.push(ctx, repository, index, index.Digest)
}

func (r Registry) push(ctx context.Context, repository string, what remote.Taggable, digest func() (v1.Hash, error)) (string, error) {
	ref, err := name.ParseReference(r.Ref(repository))
	if err != nil {
		return "", fmt.Errorf("push: %w", err)
	}
	transport, err := r.transport()
	if err != nil {
		return "", err
	}
	defer transport.CloseIdleConnections()
	opts := []remote.Option{remote.WithContext(ctx), remote.WithTransport(transport)}
	if r.User != "" {
		opts = append(opts, remote.WithAuth(&authn.Basic{Username: r.User, Password: r.Password}))
	}
	if err := remote.Push(ref, what, opts...); err != nil {
		return "", fmt.Errorf("push %s: %w", ref, err)
	}
	hash, err := digest()
	if err != nil {
		return "", fmt.Errorf("push %s: %w", ref, err)
	}
	return hash.String(), nil
}

// MustPush is Push for tests.
func (r Registry) MustPush(t testing.TB, repository string, image v1.Image) string {
	t.Helper()
	digest, err := r.Push(t.Context(), repository, image)
	if err != nil {
		t.Fatal(err)
	}
	return digest
}

func (r Registry) transport() (*http.Transport, error) {
	transport := &http.Transport{
		DialContext:         r.Dial,
		TLSClientConfig:     &tls.Config{MinVersion: tls.VersionTLS12},
		TLSHandshakeTimeout: 10 * time.Second,
	}
	if len(r.CA) > 0 {
		roots := x509.NewCertPool()
		if !roots.AppendCertsFromPEM(r.CA) {
			return nil, errors.New("push: the CA file holds no certificate")
		}
		transport.TLSClientConfig.RootCAs = roots
	}
	return transport, nil
}
