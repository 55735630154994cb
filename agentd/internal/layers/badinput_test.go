// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package layers

import (
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	ggcr "github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// refused asks for an image and wants the reason; nothing may be left behind, and no secret may be told.
func refused(t *testing.T, s *Store, ref string, opts EnsureOptions, want errs.Reason) told {
	t.Helper()
	_, err := s.Ensure(context.Background(), ref, opts)
	if !errs.Has(err, want) {
		t.Fatalf("%s: got %v, want %s", ref, err, want)
	}
	for e := err; e != nil; {
		if strings.Contains(e.Error(), testPassword) || strings.Contains(e.Error(), base64.StdEncoding.EncodeToString([]byte(testUser+":"+testPassword))) {
			t.Errorf("the error tells the password: %v", e)
		}
		u, ok := e.(interface{ Unwrap() error })
		if !ok {
			break
		}
		e = u.Unwrap()
	}
	list, err := s.List(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range list {
		if i.Reference == ref {
			t.Errorf("%s is listed", ref)
		}
	}
	left, err := os.ReadDir(s.disk.staging())
	if err != nil || len(left) != 0 {
		t.Errorf("staging: %v %v", left, err)
	}
	leases, err := s.client.LeasesService().List(s.remote.in(context.Background()))
	if err != nil || len(leases) != 0 {
		t.Errorf("leases: %v %v", leases, err)
	}
	// A refusal is the same the second time.
	_, err = s.Ensure(context.Background(), ref, opts)
	e := errs.From(err)
	if e.Reason != want {
		t.Errorf("%s: the second time %v", ref, err)
	}
	return told{e.Message, e.Details}
}

// told is what an error says to its reader.
type told struct {
	Message string
	Details map[string]string
}

func TestBadInput_References(t *testing.T) {
	s := openStore(t, testConfig(t))
	for _, bad := range []string{"", "example.com/UPPER/case", "a b", "x@sha256:123", "http://127.0.0.1/x", "x:" + strings.Repeat("t", 200), "../x", "x@md5:d41d8cd98f00b204e9800998ecf8427e", "user:secret@host/x"} {
		refused(t, s, bad, EnsureOptions{}, errs.InvalidReference)
	}
	if _, err := s.Get(context.Background(), "not a reference"); !errs.Has(err, errs.InvalidReference) {
		t.Errorf("get: %v", err)
	}
}

func TestBadInput_MissingImageAndWrongDigest(t *testing.T) {
	s := openStore(t, testConfig(t))
	push(t, env.plain, "there", smallImage(t, "there"))
	refused(t, s, env.plain+"/nowhere:v1", EnsureOptions{}, errs.ImageNotFound)
	refused(t, s, env.plain+"/there:v2", EnsureOptions{}, errs.ImageNotFound)
	refused(t, s, env.plain+"/there@sha256:"+strings.Repeat("ab", 32), EnsureOptions{}, errs.ImageNotFound)
}

func TestBadInput_Registries(t *testing.T) {
	cfg := testConfig(t)
	ref := push(t, env.secured, "locked", smallImage(t, "locked"))
	good := Credentials{Username: testUser, Password: testPassword}

	s := openStore(t, cfg)
	refused(t, s, ref, EnsureOptions{}, errs.RegistryDenied)
	e := refused(t, s, ref, EnsureOptions{Credentials: Credentials{Username: testUser, Password: "wrong-" + testPassword}}, errs.RegistryDenied)
	if e.Details["registry"] != env.secured {
		t.Errorf("%v", e.Details)
	}
	if _, err := s.Ensure(context.Background(), ref, EnsureOptions{Credentials: good}); err != nil {
		t.Errorf("good credentials: %v", err)
	}

	distrustful := testConfig(t)
	distrustful.CAFiles = nil
	refused(t, openStore(t, distrustful), ref, EnsureOptions{Credentials: good}, errs.RegistryUntrusted)

	noPlain := testConfig(t)
	noPlain.PlainHTTP = nil
	refused(t, openStore(t, noPlain), push(t, env.plain, "plain", smallImage(t, "plain")), EnsureOptions{}, errs.RegistryUntrusted)

	// A port that is taken, at which nobody listens.
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	nobody, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	refused(t, s, fmt.Sprintf("127.0.0.1:%d/x:v1", nobody.(*unix.SockaddrInet4).Port), EnsureOptions{}, errs.RegistryUnreachable)
}

func TestCredentialsComeFromDockerConfig(t *testing.T) {
	ctx := context.Background()
	ref := push(t, env.secured, "docker-config", smallImage(t, "docker-config"))
	auth := base64.StdEncoding.EncodeToString([]byte(testUser + ":" + testPassword))
	conf := fmt.Sprintf(`{"auths":{"https://%s/v1/":{"auth":%q},"elsewhere.example":{"auth":"eDp5"}}}`, env.secured, auth)
	cfg := testConfig(t)
	cfg.DockerConfig = filepath.Join(t.TempDir(), "config.json")
	s := openStore(t, cfg)
	refused(t, s, ref, EnsureOptions{}, errs.RegistryDenied) // no file yet
	if err := os.WriteFile(cfg.DockerConfig, []byte(conf), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Ensure(ctx, ref, EnsureOptions{}); err != nil {
		t.Errorf("from the node's file: %v", err)
	}
	other := openStore(t, testConfig(t))
	if _, err := other.Ensure(ctx, ref, EnsureOptions{Credentials: Credentials{DockerConfig: []byte(conf)}}); err != nil {
		t.Errorf("from the call: %v", err)
	}
	refused(t, openStore(t, testConfig(t)), ref, EnsureOptions{Credentials: Credentials{DockerConfig: []byte(`{"auths":{"` + testPassword)}}, errs.InvalidField)
	bad := fmt.Sprintf(`{"auths":{%q:{"auth":%q}}}`, env.secured, base64.StdEncoding.EncodeToString([]byte(testPassword)))
	refused(t, openStore(t, testConfig(t)), ref, EnsureOptions{Credentials: Credentials{DockerConfig: []byte(bad)}}, errs.InvalidField)
	if s := fmt.Sprintf("%v %+v %#v %s", Credentials{Password: testPassword}, Credentials{Password: testPassword}, Credentials{Password: testPassword}, Credentials{Password: testPassword}.LogValue()); strings.Contains(s, testPassword) {
		t.Errorf("credentials print as %s", s)
	}
}

func TestHostsFolderSetsCA(t *testing.T) {
	ref := push(t, env.secured, "hosts", smallImage(t, "hosts"))
	cfg := testConfig(t)
	cfg.CAFiles = nil
	cfg.HostsDir = t.TempDir()
	d := filepath.Join(cfg.HostsDir, env.secured)
	if err := os.Mkdir(d, 0o700); err != nil {
		t.Fatal(err)
	}
	toml := fmt.Sprintf("server = \"https://%s\"\n[host.\"https://%s\"]\n  ca = %q\n", env.secured, env.secured, env.caFile)
	if err := os.WriteFile(filepath.Join(d, "hosts.toml"), []byte(toml), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := openStore(t, cfg).Ensure(context.Background(), ref, EnsureOptions{Credentials: Credentials{Username: testUser, Password: testPassword}}); err != nil {
		t.Error(err)
	}
}

func forPlatform(t *testing.T, arch string) v1.Image {
	t.Helper()
	img := smallImage(t, arch)
	cfg, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	cfg = cfg.DeepCopy()
	cfg.Architecture = arch
	if img, err = mutate.ConfigFile(img, cfg); err != nil {
		t.Fatal(err)
	}
	return img
}

func pushIndex(t *testing.T, repo string, archs ...string) string {
	t.Helper()
	var idx v1.ImageIndex = empty.Index
	for _, a := range archs {
		idx = mutate.AppendManifests(idx, mutate.IndexAddendum{Add: forPlatform(t, a), Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: a}}})
	}
	ref, err := name.ParseReference(env.plain + "/" + repo + ":v1")
	if err != nil {
		t.Fatal(err)
	}
	if err := ggcr.WriteIndex(ref, idx, pushOptions()...); err != nil {
		t.Fatal(err)
	}
	return ref.String()
}

func TestPlatforms(t *testing.T) {
	ctx := context.Background()
	s := openStore(t, testConfig(t))
	many := pushIndex(t, "many", "arm64", "amd64", "s390x")
	img, err := s.Ensure(ctx, many, EnsureOptions{})
	if err != nil || img.Architecture != "amd64" || img.Digest == img.ManifestDigest {
		t.Fatalf("%+v, %v", img, err)
	}
	other, err := s.Ensure(ctx, many, EnsureOptions{Platform: "linux/arm64"})
	if err != nil || other.Architecture != "arm64" || other.ErofsDigest == img.ErofsDigest {
		t.Fatalf("%+v, %v", other, err)
	}
	// By the digest of the index, of the manifest, and of the file.
	for _, d := range []string{img.Digest.String(), img.ManifestDigest.String(), img.ErofsDigest.String(), many} {
		if got, err := s.Get(ctx, d); err != nil || got.ErofsDigest != img.ErofsDigest {
			t.Errorf("get %s: %+v, %v", d, got, err)
		}
	}
	e := refused(t, s, pushIndex(t, "others", "arm64", "s390x"), EnsureOptions{}, errs.WrongArchitecture)
	if e.Details["has"] != "linux/arm64,linux/s390x" || e.Details["want"] != "linux/amd64" {
		t.Errorf("%v", e.Details)
	}
	e = refused(t, s, push(t, env.plain, "arm", forPlatform(t, "arm64")), EnsureOptions{}, errs.WrongArchitecture)
	if e.Details["has"] != "linux/arm64" {
		t.Errorf("%v", e.Details)
	}
}

func TestDigestThatIsHereNeedsNoRegistry(t *testing.T) {
	ctx := context.Background()
	cfg := testConfig(t)
	first := openStore(t, cfg)
	img := mustEnsure(t, first, "offline", EnsureOptions{})
	index, err := first.Ensure(ctx, pushIndex(t, "offline-many", "amd64", "arm64"), EnsureOptions{})
	if err != nil {
		t.Fatal(err)
	}
	cfg.PlainHTTP = nil // the registry does not speak TLS: whoever asks it fails
	s := openStore(t, cfg)
	for _, i := range []Image{img, index} {
		repo, _, _ := strings.Cut(strings.TrimPrefix(i.Reference, env.plain+"/"), ":")
		byDigest := env.plain + "/" + repo + "@" + i.Digest.String()
		if got, err := s.Ensure(ctx, byDigest, EnsureOptions{}); err != nil || got.ErofsPath != i.ErofsPath {
			t.Errorf("%s: %+v, %v", byDigest, got, err)
		}
		if got, err := s.Ensure(ctx, i.Reference, EnsureOptions{PreferLocal: true}); err != nil || got.ErofsPath != i.ErofsPath {
			t.Errorf("%s: %+v, %v", i.Reference, got, err)
		}
		if _, err := s.Ensure(ctx, i.Reference, EnsureOptions{}); !errs.Has(err, errs.RegistryUntrusted) {
			t.Errorf("a tag must be resolved: %v", err)
		}
	}
}

// raw makes an image of one layer with exactly these bytes.
func raw(t *testing.T, data []byte) v1.Image {
	t.Helper()
	layer := static.NewLayer(data, types.OCILayer)
	img, err := mutate.AppendLayers(mutate.MediaType(empty.Image, types.OCIManifestSchema1), layer)
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	cfg = cfg.DeepCopy()
	cfg.OS, cfg.Architecture = "linux", "amd64"
	if img, err = mutate.ConfigFile(img, cfg); err != nil {
		t.Fatal(err)
	}
	return img
}

func TestBadInput_MalformedImages(t *testing.T) {
	s := openStore(t, testConfig(t))
	whole := gzipped(t, archive(t, file("a", strings.Repeat("x", 100_000))))
	for what, img := range map[string]v1.Image{
		"noise":            raw(t, []byte(strings.Repeat("noise", 1000))),
		"cut-gzip":         raw(t, whole[:len(whole)/2]),
		"diffid":           raw(t, whole), // static layers call the compressed digest the uncompressed one
		"dotdot":           imageOf(t, archive(t, file("../../etc/passwd", "x"))),
		"link-out":         imageOf(t, archive(t, link("x", "../../../etc/shadow"))),
		"link-to-nothing":  imageOf(t, archive(t, link("x", "nothing"))),
		"below-file":       imageOf(t, archive(t, file("f", "x"), file("f/x", "x"))),
		"symlink-loop":     imageOf(t, archive(t, symlinkTo("a", "b"), symlinkTo("b", "a"), file("a/x", "x"))),
		"whiteout-of-dot":  imageOf(t, archive(t, whiteout(".wh.."))),
		"config-not-image": mutate.ConfigMediaType(smallImage(t, "artefact"), "application/vnd.example.config"),
		"layer-encrypted":  encrypted(t),
	} {
		ref := push(t, env.plain, "bad-"+what, img)
		e := refused(t, s, ref, EnsureOptions{}, errs.ImageMalformed)
		if e.Details["image"] != ref {
			t.Errorf("%s: %v", what, e.Details)
		}
		t.Logf("%s: %v", what, e)
	}
	small := testConfig(t)
	small.Limits.Bytes, small.Limits.Entries, small.Limits.Depth, small.Limits.Layers = 1<<20, 100, 10, 10
	tight := openStore(t, small)
	var many []entry
	for i := range 101 {
		many = append(many, file(fmt.Sprint("f", i), ""))
	}
	for what, img := range map[string]v1.Image{
		"bomb":    imageOf(t, archive(t, file("zeros", strings.Repeat("\x00", 2<<20)))),
		"sparse":  imageOf(t, sparseLayer(t, "gnu")),
		"entries": imageOf(t, archive(t, many...)),
		"depth":   imageOf(t, archive(t, file(strings.Repeat("d/", 11)+"f", ""))),
	} {
		t.Logf("%s: %v", what, refused(t, tight, push(t, env.plain, "large-"+what, img), EnsureOptions{}, errs.ImageMalformed))
	}
}

func encrypted(t *testing.T) v1.Image {
	t.Helper()
	img, err := mutate.Append(empty.Image, mutate.Addendum{Layer: layerOf(t, archive(t, file("a", "a"))), MediaType: "application/vnd.oci.image.layer.v1.tar+gzip+encrypted"})
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	cfg = cfg.DeepCopy()
	cfg.OS, cfg.Architecture = "linux", "amd64"
	if img, err = mutate.ConfigFile(img, cfg); err != nil {
		t.Fatal(err)
	}
	return img
}

// A registry that lies: it is asked for a blob and sends another.
func TestBadInput_DigestMismatch(t *testing.T) {
	img := smallImage(t, "lies")
	dgst, err := img.Digest()
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := img.RawManifest()
	if err != nil {
		t.Fatal(err)
	}
	mt, err := img.MediaType()
	if err != nil {
		t.Fatal(err)
	}
	config, err := partial.ConfigName(img)
	if err != nil {
		t.Fatal(err)
	}
	rawConfig, err := img.RawConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case strings.Contains(r.URL.Path, "/manifests/"):
			w.Header().Set("Content-Type", string(mt))
			w.Header().Set("Docker-Content-Digest", dgst.String())
			w.Header().Set("Content-Length", fmt.Sprint(len(manifest)))
			if r.Method == http.MethodGet {
				_, _ = w.Write(manifest)
			}
		case strings.HasSuffix(r.URL.Path, config.String()):
			_, _ = w.Write(rawConfig)
		default:
			layers, _ := img.Layers()
			for _, lay := range layers {
				if d, _ := lay.Digest(); strings.HasSuffix(r.URL.Path, d.String()) {
					size, _ := lay.Size()
					_, _ = io.WriteString(w, strings.Repeat("x", int(size)))
				}
			}
		}
	})}
	done := make(chan struct{})
	go func() { defer close(done); _ = srv.Serve(l) }()
	defer func() { srv.Close(); <-done }()
	cfg := testConfig(t)
	cfg.PlainHTTP = []string{l.Addr().String()}
	refused(t, openStore(t, cfg), l.Addr().String()+"/lies:v1", EnsureOptions{}, errs.DigestMismatch)
}

// The layers folder is on a disk of its own that is too small.
func TestBadInput_DiskFull(t *testing.T) {
	ref := push(t, env.plain, "large", imageOf(t, archive(t, file("big", bulk(8<<20, 3)))))
	cfg := testConfig(t)
	if err := os.MkdirAll(cfg.Root, 0o700); err != nil {
		t.Fatal(err)
	}
	mountTmpfs(t, cfg.Root, "size=12m")
	s := openStore(t, cfg)
	refused(t, s, ref, EnsureOptions{}, errs.DiskFull)
	// What is small still fits: nothing was left behind.
	mustEnsure(t, s, "still-fits", EnsureOptions{})
}
