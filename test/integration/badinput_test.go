package integration

import (
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/cluster"
	"github.com/dormouse-run/dormouse/test/fabric"
	"github.com/dormouse-run/dormouse/test/images"
)

type badInput struct {
	reason errs.Reason
	change func(*dormousev1.SandboxSpec)
	says   []string          // parts of the message
	detail map[string]string // exact details
}

// Each bad request gives a typed error that says what is wrong, and leaves nothing.
func TestBadInputCreate(t *testing.T) {
	w := enter(t)
	used, free := w.volume("node-1"), w.volume("node-1")
	spec := w.spec()
	spec.Volumes = []*dormousev1.VolumeMount{mount(used, "/data")}
	holder := w.create(spec)

	otherArch := w.image("test/arch", func() (v1.Image, error) {
		return images.FromEntries(images.Config{Architecture: "riscv64"}, []images.Entry{images.File("f", "x", 0o644)})
	})
	oddities := w.image("test/odd", func() (v1.Image, error) {
		return busyboxAnd([]images.Entry{images.File("bin/text", "not a program", 0o644), images.Dir("bin/folder", 0o755)})
	})
	host := w.RegistryHost()
	missing := uid.New()
	untrusted := w.serve(":5001", true, http.NotFoundHandler())
	closed := w.serve(":5002", true, http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
		rw.Header().Set("WWW-Authenticate", `Basic realm="closed"`)
		rw.WriteHeader(http.StatusUnauthorized)
	}))
	plain := w.serve(":5003", false, http.NotFoundHandler())

	for name, tc := range map[string]badInput{
		"missing repository":   {errs.ImageNotFound, func(s *dormousev1.SandboxSpec) { s.Image = host + "/test/nothing:1" }, []string{"test/nothing"}, nil},
		"missing tag":          {errs.ImageNotFound, func(s *dormousev1.SandboxSpec) { s.Image = host + "/test/busybox:nothing" }, []string{"busybox:nothing"}, nil},
		"wrong digest":         {errs.ImageNotFound, func(s *dormousev1.SandboxSpec) { s.Image = host + "/test/busybox@sha256:" + strings.Repeat("0", 64) }, []string{"0000"}, nil},
		"no reference":         {errs.InvalidReference, func(s *dormousev1.SandboxSpec) { s.Image = "Not An Image" }, nil, nil},
		"half a digest":        {errs.InvalidReference, func(s *dormousev1.SandboxSpec) { s.Image = host + "/test/busybox@sha256:12" }, nil, nil},
		"no image":             {errs.InvalidField, func(s *dormousev1.SandboxSpec) { s.Image = "" }, []string{"image"}, nil},
		"unreachable registry": {errs.RegistryUnreachable, func(s *dormousev1.SandboxSpec) { s.Image = fabric.HubAddr + ":9/test/busybox:1" }, nil, map[string]string{"registry": fabric.HubAddr + ":9"}},
		"untrusted registry":   {errs.RegistryUntrusted, func(s *dormousev1.SandboxSpec) { s.Image = untrusted + "/test/busybox:1" }, nil, map[string]string{"registry": untrusted}},
		"no TLS":               {errs.RegistryUntrusted, func(s *dormousev1.SandboxSpec) { s.Image = plain + "/test/busybox:1" }, nil, map[string]string{"registry": plain}},
		"no credentials":       {errs.RegistryUntrusted, func(s *dormousev1.SandboxSpec) { s.Image = closed + "/test/busybox:1" }, nil, nil}, // not even asked for: its certificate comes first
		"other architecture":   {errs.WrongArchitecture, func(s *dormousev1.SandboxSpec) { s.Image = otherArch }, []string{"riscv64"}, map[string]string{"has": "linux/riscv64"}},
		"command not found":    {errs.CommandNotFound, func(s *dormousev1.SandboxSpec) { s.Command = []string{"nothing-like-it"} }, []string{"nothing-like-it"}, nil},
		"path not found":       {errs.CommandNotFound, func(s *dormousev1.SandboxSpec) { s.Command = []string{"/opt/nothing"} }, []string{"/opt/nothing"}, nil},
		"not executable":       {errs.CommandNotRunnable, func(s *dormousev1.SandboxSpec) { s.Image, s.Command = oddities, []string{"/bin/text"} }, []string{"/bin/text"}, nil},
		"a folder as command":  {errs.CommandNotRunnable, func(s *dormousev1.SandboxSpec) { s.Image, s.Command = oddities, []string{"/bin/folder"} }, []string{"/bin/folder"}, nil},
		"unknown user":         {errs.UserNotFound, func(s *dormousev1.SandboxSpec) { s.Command, s.User = []string{"sleep", "1"}, "nobody-like-it" }, []string{"nobody-like-it"}, nil},
		"malformed user":       {errs.InvalidField, func(s *dormousev1.SandboxSpec) { s.User = "a b" }, []string{"user"}, nil},
		"memory below floor":   {errs.BelowFloor, func(s *dormousev1.SandboxSpec) { s.Resources.MemoryLimitBytes = 1 * mib }, []string{"memory"}, map[string]string{"got": "1048576"}},
		"cpu below floor":      {errs.BelowFloor, func(s *dormousev1.SandboxSpec) { s.Resources.CpuLimitMillis = 1 }, []string{"cpu"}, nil},
		"disk below floor":     {errs.BelowFloor, func(s *dormousev1.SandboxSpec) { s.Resources.DiskLimitBytes = 1 }, []string{"disk"}, nil},
		"memory of no node": {errs.AboveEveryNode, func(s *dormousev1.SandboxSpec) {
			s.Resources.MemoryLimitBytes, s.Resources.MemoryRequestBytes = 1<<50, 1<<50
		}, []string{"memory"}, nil},
		"cpu of no node":      {errs.AboveEveryNode, func(s *dormousev1.SandboxSpec) { s.Resources.CpuRequestMillis = 1 << 40 }, []string{"cpu"}, nil},
		"request above limit": {errs.InvalidField, func(s *dormousev1.SandboxSpec) { s.Resources.MemoryRequestBytes = 128 * mib }, []string{"memory_request"}, nil},
		"two volumes, one path": {errs.DuplicatePath, func(s *dormousev1.SandboxSpec) {
			s.Volumes = []*dormousev1.VolumeMount{mount(free, "/a"), mount(used, "/a")}
		}, []string{"/a"}, map[string]string{"path": "/a"}},
		"a volume twice": {errs.InvalidField, func(s *dormousev1.SandboxSpec) {
			s.Volumes = []*dormousev1.VolumeMount{mount(free, "/a"), mount(free, "/b")}
		}, nil, nil},
		"a volume in use": {errs.AlreadyAttached, func(s *dormousev1.SandboxSpec) {
			s.Volumes = []*dormousev1.VolumeMount{mount(free, "/free"), mount(used, "/a")}
		}, []string{holder.UID}, map[string]string{"holder": holder.UID, "volume": used.UID}},
		"no such volume": {errs.ObjectNotFound, func(s *dormousev1.SandboxSpec) {
			s.Volumes = []*dormousev1.VolumeMount{mount(free, "/free"), {VolumeUid: missing, Path: "/a"}}
		}, []string{missing}, nil},
		"a path with ..":             {errs.UnsafePath, func(s *dormousev1.SandboxSpec) { s.Volumes = []*dormousev1.VolumeMount{mount(free, "/a/../../b")} }, nil, nil},
		"a relative path":            {errs.UnsafePath, func(s *dormousev1.SandboxSpec) { s.Volumes = []*dormousev1.VolumeMount{mount(free, "a")} }, nil, nil},
		"a volume as /":              {errs.InvalidField, func(s *dormousev1.SandboxSpec) { s.Volumes = []*dormousev1.VolumeMount{mount(free, "/")} }, nil, nil},
		"a volume on /proc":          {errs.InvalidField, func(s *dormousev1.SandboxSpec) { s.Volumes = []*dormousev1.VolumeMount{mount(free, "/proc/x")} }, []string{"/proc"}, nil},
		"working dir ..":             {errs.UnsafePath, func(s *dormousev1.SandboxSpec) { s.WorkingDir = "/a/.." }, nil, nil},
		"a policy without a network": {errs.InvalidField, func(s *dormousev1.SandboxSpec) { s.Egress = &dormousev1.EgressPolicy{} }, []string{"egress"}, nil},
		"another runtime":            {errs.NotSupported, func(s *dormousev1.SandboxSpec) { s.RuntimeClass = "other" }, nil, nil},
		"no node like that":          {errs.NoNodeFits, func(s *dormousev1.SandboxSpec) { s.NodeSelector = map[string]string{"zone": "z9"} }, []string{"zone"}, nil},
		"an odd environment":         {errs.InvalidField, func(s *dormousev1.SandboxSpec) { s.Env = map[string]string{"A B": "c"} }, []string{"env"}, nil},
		"too many arguments":         {errs.LimitExceeded, func(s *dormousev1.SandboxSpec) { s.Command = make([]string, 2000) }, nil, map[string]string{"limit": "1024", "got": "2000"}},
	} {
		t.Run(name, func(t *testing.T) {
			w := w.sub(t)
			spec := w.spec()
			tc.change(spec)
			// A volume besides: it must be free afterwards, whatever failed.
			if len(spec.Volumes) == 0 {
				spec.Volumes = []*dormousev1.VolumeMount{mount(free, "/beside")}
			}
			ctx, cancel := context.WithTimeout(w.ctx, 2*time.Minute)
			defer cancel()
			s, err := w.api.CreateSandbox(ctx, &dormousev1.CreateSandboxRequest{Name: "bad", Spec: spec})
			if err == nil {
				t.Fatalf("it worked: %v", s.Last)
			}
			e := w.refusal(err, tc.reason)
			for _, part := range tc.says {
				if !strings.Contains(e.Message, part) {
					t.Errorf("%q does not speak of %q", e.Message, part)
				}
			}
			for k, v := range tc.detail {
				if e.Details[k] != v {
					t.Errorf("detail %s is %q, want %q", k, e.Details[k], v)
				}
			}
			w.holdNothing(holder)
			w.ok(free.Refresh(w.ctx))
		})
	}
	// The name is free, and so is the volume.
	spec = w.spec()
	spec.Volumes = []*dormousev1.VolumeMount{mount(free, "/a")}
	s, err := w.api.CreateSandbox(w.ctx, &dormousev1.CreateSandboxRequest{Name: "bad", Spec: spec})
	w.ok(err)
	w.ok(s.Delete(w.ctx, ""))
	w.ok(holder.Delete(w.ctx, ""))
}

// serve runs a small server inside the fabric until the test ends, and gives its address there.
func (w *world) serve(port string, withTLS bool, h http.Handler) string {
	w.Helper()
	address := fabric.HubAddr + port
	var l net.Listener
	w.ok(fabric.Do(w.HubNetns(), func() (err error) {
		l, err = net.Listen("tcp", address)
		return err
	}))
	srv := httptest.NewUnstartedServer(h)
	w.ok(srv.Listener.Close())
	srv.Listener = l
	srv.TLS = &tls.Config{MinVersion: tls.VersionTLS12}
	if withTLS {
		srv.StartTLS() // with a certificate that nobody trusts
	} else {
		srv.Start()
	}
	w.Cleanup(srv.Close)
	return address
}

// Bad input to processes is refused as such, and the sandbox goes on.
func TestBadInputProcess(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec())
	for name, tc := range map[string]struct {
		reason errs.Reason
		spec   *dormousev1.ProcessSpec
	}{
		"no command":       {errs.InvalidField, &dormousev1.ProcessSpec{}},
		"not found":        {errs.CommandNotFound, &dormousev1.ProcessSpec{Argv: []string{"nothing-like-it"}}},
		"a folder":         {errs.CommandNotRunnable, &dormousev1.ProcessSpec{Argv: []string{"/tmp"}}},
		"unknown user":     {errs.UserNotFound, &dormousev1.ProcessSpec{Argv: []string{"true"}, User: "nobody-like-it"}},
		"a relative dir":   {errs.UnsafePath, &dormousev1.ProcessSpec{Argv: []string{"true"}, WorkingDir: "tmp"}},
		"a dir with ..":    {errs.UnsafePath, &dormousev1.ProcessSpec{Argv: []string{"true"}, WorkingDir: "/tmp/.."}},
		"a name with a =":  {errs.InvalidField, &dormousev1.ProcessSpec{Argv: []string{"true"}, Env: map[string]string{"A=B": ""}}},
		"too much to pass": {errs.LimitExceeded, &dormousev1.ProcessSpec{Argv: []string{"true", strings.Repeat("x", 200<<10)}}},
	} {
		t.Run(name, func(t *testing.T) {
			w := w.sub(t)
			_, err := s.Start(w.ctx, tc.spec, "")
			w.refused(err, tc.reason)
			_, _, err = s.Run(w.ctx, tc.spec, nil, &client.Output{}, nil)
			w.refused(err, tc.reason)
		})
	}
	_, err := s.Process(uid.New()).Wait(w.ctx)
	w.refused(err, errs.ProcessNotFound)
	w.refused(s.Process(uid.New()).Signal(w.ctx, 9, false), errs.ProcessNotFound)
	_, err = w.api.Sandbox(uid.New()).Start(w.ctx, &dormousev1.ProcessSpec{Argv: []string{"true"}}, "")
	w.refused(err, errs.ObjectNotFound)
	w.sh(s, "true")
}

// Wrong credentials for a registry are refused as the registry's answer, and found nowhere afterwards.
func TestBadInputRegistryCredentials(t *testing.T) {
	w := enter(t)
	ref := w.image("test/"+w.tenant, func() (v1.Image, error) { return busyboxAnd([]images.Entry{images.File("denied", w.tenant, 0o644)}) })
	wrong := cluster.NewPassword()
	file := filepath.Join(w.NodeDir(1), "docker.json")
	right, err := os.ReadFile(file)
	w.ok(err)
	auth := base64.StdEncoding.EncodeToString([]byte(w.RegistryUser + ":" + wrong))
	data, err := json.Marshal(map[string]any{"auths": map[string]any{w.RegistryHost(): map[string]string{"auth": auth}}})
	w.ok(err)
	w.ok(os.WriteFile(file, data, 0o600))
	defer func() { w.ok(os.WriteFile(file, right, 0o600)) }()
	spec := w.spec()
	spec.Image, spec.NodeSelector = ref, map[string]string{"zone": "z1"}
	_, err = w.api.CreateSandbox(w.ctx, &dormousev1.CreateSandboxRequest{Spec: spec})
	if e := w.refusal(err, errs.RegistryDenied); e.Details["registry"] != w.RegistryHost() {
		t.Errorf("details %v", e.Details)
	}
	_, err = w.api.PullImage(w.ctx, ref, "node-1", nil)
	w.refused(err, errs.RegistryDenied)
	w.ok(os.WriteFile(file, []byte(`{"auths": {}}`), 0o600))
	_, err = w.api.PullImage(w.ctx, ref, "node-1", nil)
	w.refused(err, errs.RegistryDenied)
	w.ok(os.WriteFile(file, right, 0o600))
	_, err = w.api.PullImage(w.ctx, ref, "node-1", nil)
	w.ok(err)
	w.nowhere(map[string]string{"the wrong password": wrong, "the wrong password, encoded": auth})
}

// A file or a body with a field that does not exist is refused with its name.
func TestBadInputUnknownField(t *testing.T) {
	w := enter(t)
	dir := t.TempDir()
	for name, tc := range map[string]struct {
		text, says string
	}{
		"a field of the spec": {"spec:\n  image: " + w.busybox() + "\n  imagine: x\n", "imagine"},
		"a field at the top":  {"nom: x\nspec:\n  image: " + w.busybox() + "\n", "nom"},
		"a nested field":      {"spec:\n  image: " + w.busybox() + "\n  resources:\n    memory: 5\n", "memory"},
	} {
		t.Run(name, func(t *testing.T) {
			w := w.sub(t)
			file := filepath.Join(dir, "sandbox.yaml")
			w.ok(os.WriteFile(file, []byte(tc.text), 0o600))
			out, code := w.dormouse("create", "-f", file)
			if code != 2 || !strings.Contains(out, tc.says) {
				t.Errorf("exit code %d: %s", code, out)
			}
		})
	}
	for name, tc := range map[string]struct{ method, path, body, field string }{
		"at the top":    {"POST", "/v1/sandboxes", `{"spec": {"image": "x"}, "nom": "y"}`, "nom"},
		"nested":        {"POST", "/v1/sandboxes", `{"spec": {"image": "x", "resources": {"memory": 5}}}`, "spec.resources.memory"},
		"in the query":  {"GET", "/v1/sandboxes?page_sise=3", "", "page_sise"},
		"of a volume":   {"POST", "/v1/volumes", `{"size": 5}`, "size"},
		"of a deletion": {"DELETE", "/v1/volumes/" + uid.New() + "?force=true", "", "force"},
	} {
		t.Run("REST "+name, func(t *testing.T) {
			w := w.sub(t)
			e := w.refusedREST(w.rest(w.key, tc.method, tc.path, tc.body), errs.UnknownField)
			if e.Details["field"] != tc.field || !strings.Contains(e.Message, tc.field) {
				t.Errorf("%+v; want the field %s", e, tc.field)
			}
		})
	}
	for name, tc := range map[string]struct{ method, path, body string }{
		"no JSON":       {"POST", "/v1/volumes", `{"name"`},
		"a wrong type":  {"POST", "/v1/volumes", `{"name": 5}`},
		"not a uid":     {"GET", "/v1/sandboxes/abc", ""},
		"a bad number":  {"GET", "/v1/sandboxes?page_size=many", ""},
		"an enum value": {"POST", "/v1/volumes", `{"spec": {"access": "SOMETIMES"}}`},
	} {
		t.Run("REST "+name, func(t *testing.T) {
			w := w.sub(t)
			w.refusedREST(w.rest(w.key, tc.method, tc.path, tc.body), errs.InvalidField)
		})
	}
	if a := w.rest(w.key, "GET", "/v1/nothing", ""); a.status != 404 {
		t.Errorf("a path that is none: %d %s", a.status, a.body)
	}
	w.holdNothing()
}

// dormouse runs the command as the tenant and gives what it said and its exit code.
func (w *world) dormouse(args ...string) (string, int) {
	w.Helper()
	cmd := exec.CommandContext(w.ctx, filepath.Join(w.Bin, "dormouse"), args...)
	cmd.Env = []string{"DORMOUSE_ADDR=unix://" + w.GRPCSocket(), "DORMOUSE_API_KEY=" + w.key, "HOME=" + w.TempDir(), "PATH=" + os.Getenv("PATH")}
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		w.Fatal(err)
	}
	return string(out), cmd.ProcessState.ExitCode()
}
