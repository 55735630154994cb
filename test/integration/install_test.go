package integration

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/cluster"
	"github.com/dormouse-run/dormouse/test/fabric"
)

// tarball is a compressed archive of files, as a Debian package has two of.
func tarball(files fstest.MapFS, names ...string) ([]byte, error) {
	var out bytes.Buffer
	z := gzip.NewWriter(&out)
	t := tar.NewWriter(z)
	for _, name := range names {
		f := files[name]
		head := &tar.Header{Name: "./" + name, Mode: int64(f.Mode.Perm()), Size: int64(len(f.Data)), Typeflag: tar.TypeReg}
		if f.Mode.IsDir() {
			head.Typeflag, head.Name = tar.TypeDir, head.Name+"/"
		}
		if err := t.WriteHeader(head); err != nil {
			return nil, err
		}
		if _, err := t.Write(f.Data); err != nil {
			return nil, err
		}
	}
	if err := errors.Join(t.Close(), z.Close()); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

// control is what a Debian package says of itself.
const control = `Package: dormouse-proof
Version: 1.0
Architecture: all
Maintainer: Nobody <nobody@example.org>
Description: a package that says that it is there
`

// debianRepository has one package, dormouse-proof, which has a command of that name, and an index.
func debianRepository() (fstest.MapFS, error) {
	meta, err := tarball(fstest.MapFS{"control": {Data: []byte(control), Mode: 0o644}}, "control")
	if err != nil {
		return nil, err
	}
	dir := &fstest.MapFile{Mode: fs.ModeDir | 0o755}
	data, err := tarball(fstest.MapFS{"usr": dir, "usr/bin": dir, "usr/bin/dormouse-proof": {Data: []byte("#!/bin/sh\necho installed by apt\n"), Mode: 0o755}},
		"usr", "usr/bin", "usr/bin/dormouse-proof")
	if err != nil {
		return nil, err
	}
	var deb bytes.Buffer
	deb.WriteString("!<arch>\n")
	for _, member := range []struct {
		name string
		data []byte
	}{{"debian-binary", []byte("2.0\n")}, {"control.tar.gz", meta}, {"data.tar.gz", data}} {
		fmt.Fprintf(&deb, "%-16s%-12d%-6d%-6d%-8s%-10d`\n", member.name, 1600000000, 0, 0, "100644", len(member.data))
		deb.Write(member.data)
		if len(member.data)%2 == 1 {
			deb.WriteByte('\n')
		}
	}
	index := fmt.Sprintf("%sFilename: ./dormouse-proof.deb\nSize: %d\nSHA256: %x\n\n", control, deb.Len(), sha256.Sum256(deb.Bytes()))
	return fstest.MapFS{"Packages": {Data: []byte(index)}, "dormouse-proof.deb": {Data: deb.Bytes()}}, nil
}

const wheelName = "dormouse_proof-1.0-py3-none-any.whl"

// pythonIndex has one wheel, dormouse-proof, with a module of that name.
func pythonIndex() (fstest.MapFS, error) {
	var wheel, record bytes.Buffer
	z := zip.NewWriter(&wheel)
	add := func(name, body string) error {
		w, err := z.Create(name)
		if err == nil {
			_, err = w.Write([]byte(body))
		}
		sum := sha256.Sum256([]byte(body))
		fmt.Fprintf(&record, "%s,sha256=%s,%d\n", name, base64.RawURLEncoding.EncodeToString(sum[:]), len(body))
		return err
	}
	const info = "dormouse_proof-1.0.dist-info/"
	err := errors.Join(
		add("dormouse_proof.py", "print('installed by pip')\n"),
		add(info+"METADATA", "Metadata-Version: 2.1\nName: dormouse-proof\nVersion: 1.0\n"),
		add(info+"WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"))
	record.WriteString(info + "RECORD,,\n")
	err = errors.Join(err, add(info+"RECORD", record.String()), z.Close())
	page := `<!DOCTYPE html><html><body><a href="/` + wheelName + `">` + wheelName + `</a></body></html>`
	return fstest.MapFS{"simple/dormouse-proof/index.html": {Data: []byte(page)}, wheelName: {Data: wheel.Bytes()}}, err
}

// gitRepository is the folder of a repository that git fetches from over plain HTTP.
func gitRepository(dir string) error {
	script := `git init -q -b main work && cd work && echo "fetched by git" >proof && git add proof &&
		git -c user.name=a -c user.email=a@example.org commit -q -m one && cd .. && git clone -q --bare work repo.git && git -C repo.git update-server-info`
	cmd := exec.Command("sh", "-ec", script)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_NOSYSTEM=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("make a repository: %w: %s", err, out)
	}
	return nil
}

// mirror serves what agents install from, in the hub, by the name that it is asked by.
func (w *world) mirror(names map[string]fs.FS) (port string) {
	w.Helper()
	var l net.Listener
	w.ok(fabric.Do(fabric.HubPath(w.ID), func() (err error) {
		l, err = net.Listen("tcp4", fabric.HubAddr+":0")
		return err
	}))
	server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(out http.ResponseWriter, r *http.Request) {
		host, _, _ := net.SplitHostPort(r.Host)
		if files := names[host]; files != nil {
			http.FileServerFS(files).ServeHTTP(out, r)
			return
		}
		http.NotFound(out, r)
	})}
	done := make(chan error, 1)
	go func() { done <- server.Serve(l) }()
	w.Cleanup(func() {
		_ = server.Close()
		if err := <-done; !errors.Is(err, http.ErrServerClosed) {
			w.Error(err)
		}
	})
	_, port, _ = net.SplitHostPort(l.Addr().String())
	return port
}

// apt-get, pip and git install from servers that the policy names, and from no other: what it does not name is not answered, and cannot be
// reached by its address either. What was allowed is so no more once the policy is another.
func TestInstallsUnderAnEgressPolicy(t *testing.T) {
	w := enter(t)
	apt, err := debianRepository()
	w.ok(err)
	pip, err := pythonIndex()
	w.ok(err)
	work := t.TempDir()
	w.ok(gitRepository(work))
	port := w.mirror(map[string]fs.FS{"deb.example": apt, "pip.example": pip, "git.example": os.DirFS(work), "other.example": pip})
	elsewhere := w.website()
	zone := map[string]string{}
	for _, name := range []string{"deb.example.", "pip.example.", "git.example.", "other.example."} {
		zone[name] = fabric.HubAddr
	}
	w.nameServer(zone)
	spec := w.outbound(1, only(&dormousev1.EgressRule{Domains: []string{"deb.example", "pip.example", "git.example"}, Protocol: dormousev1.EgressProtocol_EGRESS_PROTOCOL_TCP}))
	spec.Egress.Deny = []*dormousev1.EgressRule{{Ports: []*dormousev1.PortRange{portRange(elsewhere)}}}
	spec.Image, spec.Resources = w.programs(), &dormousev1.Resources{MemoryLimitBytes: 512 * mib, DiskLimitBytes: 128 * mib}
	s := w.create(spec)

	installs := map[string]string{
		"apt": `echo "deb [trusted=yes] http://deb.example:PORT ./" >/etc/apt/sources.list &&
			apt-get -qq update && apt-get -qq -y install dormouse-proof >/dev/null && dormouse-proof`,
		"pip": `python3 -m pip --disable-pip-version-check install -q --no-cache-dir --root-user-action ignore --break-system-packages --retries 0 --timeout 60 \
			--index-url http://pip.example:PORT/simple --trusted-host pip.example dormouse-proof && python3 -m dormouse_proof`,
		"git": `git clone -q http://git.example:PORT/repo.git /root/clone && cat /root/clone/proof`,
	}
	says := map[string]string{"apt": "installed by apt", "pip": "installed by pip", "git": "fetched by git"}
	for tool, script := range installs {
		began := time.Now()
		if got := w.sh(s, strings.ReplaceAll(script, "PORT", port)); got != says[tool] {
			t.Errorf("%s: %q", tool, got)
		}
		t.Logf("%s: %.1f s", tool, time.Since(began).Seconds())
	}
	refused := func(what, script string) {
		t.Helper()
		if out, err := cluster.Exec(w.ctx, s, "sh", "-c", strings.ReplaceAll(script, "PORT", port)); err == nil {
			t.Errorf("%s is not refused: %s", what, out)
		}
	}
	refused("a server that is not named", strings.ReplaceAll(strings.ReplaceAll(installs["pip"], "pip.example", "other.example"), "-q ", "-q --target /root/again "))
	refused("another port", "git clone -q http://git.example:"+elsewhere+"/repo.git /root/again")
	w.ok(w.egress(w.ctx, s, only()))
	refused("what was allowed before", "git -C /root/clone fetch -q")
	seen, err := s.Network(w.ctx)
	w.ok(err)
	if seen.GetRefusedNames() == 0 || seen.GetRefusedPackets() == 0 {
		t.Errorf("nothing is counted as refused: %v", seen)
	}
}

func portRange(port string) *dormousev1.PortRange {
	var n uint32
	_, _ = fmt.Sscan(port, &n)
	return &dormousev1.PortRange{First: n, Last: n}
}
