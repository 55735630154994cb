// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package layers

import (
	"context"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/mutate"

	"github.com/dormouse-run/dormouse/test/images"
)

// A real Debian root with Python, and a second image that adds a layer to it: pulled with TLS and a password.
func TestI01_DebianSameAsOverlayfs(t *testing.T) {
	began := time.Now()
	base := images.Python(t)
	s := openStore(t, testConfig(t))
	creds := Credentials{Username: testUser, Password: testPassword}
	img, err := s.Ensure(context.Background(), push(t, env.secured, "debian", base), EnsureOptions{Credentials: creds})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d layers, %d bytes", img.Layers, img.Size)
	mustMatch(t, s, img, began)

	more, err := mutate.AppendLayers(base, layerOf(t, archive(t, file("opt/mine", "mine"), whiteout("etc/.wh.hostname"))))
	if err != nil {
		t.Fatal(err)
	}
	var first []Progress
	second, err := s.Ensure(context.Background(), push(t, env.secured, "debian-more", more), EnsureOptions{Credentials: creds,
		Progress: func(p Progress) { first = append(first, p) }})
	if err != nil {
		t.Fatal(err)
	}
	mustMatch(t, s, second, began, "opt", "etc")
	if last := first[len(first)-2]; last.Total == 0 || last.Done != last.Total {
		t.Errorf("%+v", last)
	}
}
