// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package layers

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"net/http"
	"strings"
	"syscall"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	remoteerrors "github.com/containerd/containerd/v2/core/remotes/errors"
	"github.com/containerd/errdefs"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// explain gives an error of the registry or of containerd its reason. The cause stays in the chain for the
// log; of its text only what cannot hold a secret gets into the message (addresses of requests may).
func (r *registry) explain(ctx context.Context, err error) error {
	var known *errs.Error
	if errors.As(err, &known) {
		return err
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	reg := r.ref.domain
	if isTrust(err) {
		return errs.Wrap(err, errs.RegistryUntrusted, "the registry %s does not prove who it is (%s): add its CA to the node's registry settings, or name it as one without TLS", reg, trustDetail(err)).With("registry", reg)
	}
	var status remoteerrors.ErrUnexpectedStatus
	if errors.As(err, &status) {
		return r.explainStatus(err, status.StatusCode)
	}
	var op *net.OpError
	var dns *net.DNSError
	var netErr net.Error
	switch {
	case errors.Is(err, docker.ErrInvalidAuthorization), errdefs.IsUnauthorized(err), errdefs.IsPermissionDenied(err):
		return r.explainStatus(err, http.StatusUnauthorized)
	case errors.As(err, &dns):
		return errs.Wrap(err, errs.RegistryUnreachable, "the registry %s cannot be reached: its name is not known here", reg).With("registry", reg)
	case errors.As(err, &op):
		return errs.Wrap(err, errs.RegistryUnreachable, "the registry %s cannot be reached: %v", reg, op).With("registry", reg)
	case errors.As(err, &netErr):
		return errs.Wrap(err, errs.RegistryUnreachable, "the registry %s does not answer in time", reg).With("registry", reg)
	case isNoRoom(err):
		return errs.Wrap(err, errs.DiskFull, "the disk of containerd is full: the image could not be pulled; free some room")
	case errdefs.IsUnavailable(err):
		return errs.Wrap(err, errs.ContainerdAway, "containerd does not answer on this node: check that it runs and where its socket is")
	case errdefs.IsFailedPrecondition(err):
		return errs.Wrap(err, errs.DigestMismatch, "the registry %s delivers other content than %s names; the image is damaged there or on the way", reg, r.ref.full).With("image", r.ref.full)
	case errdefs.IsNotFound(err):
		return r.explainStatus(err, http.StatusNotFound)
	case errdefs.IsInvalidArgument(err), errdefs.IsNotImplemented(err):
		return errs.Wrap(err, errs.ImageMalformed, "the manifest of %s is not one of an image that can be used here", r.ref.full).With("image", r.ref.full)
	}
	return errs.Wrap(err, errs.RegistryUnreachable, "the image %s could not be fetched: the connection ended early; try again", r.ref.full).With("registry", reg)
}

func (r *registry) explainStatus(err error, code int) error {
	reg := r.ref.domain
	switch {
	case code == http.StatusUnauthorized || code == http.StatusForbidden:
		return errs.Wrap(err, errs.RegistryDenied, "the registry %s refuses access to %s: check the credentials given for it", reg, r.ref.full).With("registry", reg)
	case code == http.StatusNotFound:
		return errs.Wrap(err, errs.ImageNotFound, "the registry %s has no %s: check the name and the tag or digest", reg, r.ref.full).With("image", r.ref.full)
	case code >= 400 && code < 500 && code != http.StatusTooManyRequests && code != http.StatusRequestTimeout:
		return errs.Wrap(err, errs.ImageNotFound, "the registry %s refuses the request for %s with status %d", reg, r.ref.full, code).With("image", r.ref.full)
	}
	return errs.Wrap(err, errs.RegistryUnreachable, "the registry %s answers with status %d; try again later", reg, code).With("registry", reg)
}

// isTrust recognises what TLS verification says, and a server that does not speak TLS.
func isTrust(err error) bool {
	var authority x509.UnknownAuthorityError
	var host x509.HostnameError
	var invalid x509.CertificateInvalidError
	var verify *tls.CertificateVerificationError
	var record tls.RecordHeaderError
	var alert tls.AlertError
	return errors.As(err, &authority) || errors.As(err, &host) || errors.As(err, &invalid) ||
		errors.As(err, &verify) || errors.As(err, &record) || errors.As(err, &alert) || errors.Is(err, http.ErrSchemeMismatch)
}

func trustDetail(err error) string {
	var authority x509.UnknownAuthorityError
	var host x509.HostnameError
	var invalid x509.CertificateInvalidError
	switch {
	case errors.As(err, &authority):
		return "its certificate is signed by an unknown authority"
	case errors.As(err, &host):
		return "its certificate is for another name"
	case errors.As(err, &invalid):
		return "its certificate is not valid, or not now"
	}
	return "it does not speak TLS as asked"
}

// isNoRoom recognises a full disk, also through containerd's API, which has no code of its own for it.
func isNoRoom(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || strings.Contains(err.Error(), syscall.ENOSPC.Error())
}
