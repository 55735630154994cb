package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/apikey"
	"github.com/dormouse-run/dormouse/pkg/command"
	"github.com/dormouse-run/dormouse/pkg/pki"
)

func TestWrongUsageIsTwoWithAHint(t *testing.T) {
	f := serve(t)
	f.add("box", nil, nil)
	for _, line := range []string{
		"nonsense", "snapshot nonsense", "ls --nonsense", "ls extra", "get", "get box -o xml", "exec box", "exec --nonsense box -- a",
		"create", "create --cpu lots a", "create --memory -1 a", "create --label x a", "create --volume data a", "create --volume data:/x:rw a",
		"create --network magic a", "create --expose http a", "create --expose 0 a", "create --expose 65536 a", "create --secret-env A=b a", "create -e NOT_SET_ANYWHERE a", "create --env-file /nonexistent a",
		"create -f /nonexistent", "create -f x image", "create --operation-id short a", "fork -n 0 box", "fork -n 65 box", "fork -n many box",
		"rm", "rm --all box", "rm --operation-id " + uidAt(5) + " a b", "kill -s NOPE box", "wait --for ever box", "ls --phase happy",
		"restore box --volume /a", "volume create --access sometimes", "volume create --size big", "completion tcsh", "completion",
		"admin pki init", "admin pki init --dir x --node a/b", "admin pki init --dir x --client nobody", "admin apikey create --file x",
		"admin apikey create --file /tmp/unused-keys --tenant ..", "admin apikey revoke --file x", "run -i reg.example/a:1", "ls --timeout soon", "image pull",
	} {
		r := dormouse(t, strings.Fields(line)...)
		if r.code != 2 || r.out != "" || !strings.Contains(r.err, "see 'dormouse") {
			t.Errorf("%q: %+v", line, r)
		}
	}
	if len(f.sandboxes) != 1 {
		t.Errorf("wrong usage changed something: %v", f.sandboxes)
	}
}

func TestHelp(t *testing.T) {
	for _, line := range []string{"", "--help", "snapshot", "create --help", "admin pki init -h", "--version", "version"} {
		if r := dormouse(t, strings.Fields(line)...); r.code != 0 || r.out == "" || r.err != "" {
			t.Errorf("%q: %+v", line, r)
		}
	}
	if r := dormouse(t, "--help"); strings.Contains(r.out, command.CompletionFlag) {
		t.Error("the completion's own flag is shown")
	}
}

func TestWithoutCredentialsOrServer(t *testing.T) {
	serve(t)
	t.Setenv("DORMOUSE_API_KEY", "wrong")
	if r := dormouse(t, "ls"); r.code != 1 || !strings.Contains(r.err, "CREDENTIALS_INVALID") || strings.Contains(r.err, "wrong") {
		t.Errorf("a wrong key: %+v", r)
	}
	key := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(key, []byte(testKey+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if r := dormouse(t, "--api-key-file", key, "ls", "-q"); r.code != 0 {
		t.Errorf("a key in a file: %+v", r)
	}
	if r := dormouse(t, "--addr", "unix:///nonexistent/socket", "ls"); r.code != 5 || !strings.Contains(r.err, "REPLY_LOST") {
		t.Errorf("no server: %+v", r)
	}
	t.Setenv("DORMOUSE_ADDR", "")
	t.Setenv("DORMOUSE_CONFIG", "")
	t.Setenv("XDG_CONFIG_HOME", t.TempDir())
	if r := dormouse(t, "ls"); r.code != 2 || !strings.Contains(r.err, "DORMOUSE_ADDR") {
		t.Errorf("no address: %+v", r)
	}
	if r := dormouse(t, "--addr", "http://somewhere", "ls"); r.code != 2 {
		t.Errorf("in the clear: %+v", r)
	}
}

func TestAdminFiles(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "pki")
	r := dormouse(t, "admin", "pki", "init", "--dir", dir, "--node", "n1", "--node", "n2", "--client", "acme/alice", "--san", "dormouse.example")
	if r.code != 0 || strings.Count(r.out, "\n") != 5 {
		t.Fatalf("init: %+v", r)
	}
	for file, want := range map[string]string{"coordinator": "dormouse://role/coordinator/coordinator", "node-n2": "dormouse://role/node/n2", "client-acme-alice": "dormouse://role/client/acme/alice"} {
		if _, err := pki.Open(pki.Files{CA: filepath.Join(dir, "ca.crt"), Cert: filepath.Join(dir, file+".crt"), Key: filepath.Join(dir, file+".key")}, nil); err != nil {
			t.Errorf("%s (%s): %v", file, want, err)
		}
	}
	if r := dormouse(t, "admin", "pki", "init", "--dir", dir, "--node", "n1", "--node", "n3"); r.code != 0 || r.out != filepath.Join(dir, "node-n3.crt")+"\n" {
		t.Errorf("again: %+v", r)
	}
	if r := dormouse(t, "admin", "pki", "init", "--dir", dir, "--renew"); r.code != 0 || r.out != filepath.Join(dir, "coordinator.crt")+"\n" {
		t.Errorf("renew: %+v", r)
	}
	if err := os.Remove(filepath.Join(dir, "ca.key")); err != nil {
		t.Fatal(err)
	}
	if r := dormouse(t, "admin", "pki", "init", "--dir", dir, "--node", "n4"); r.code != 1 || !strings.Contains(r.err, "ca.key") {
		t.Errorf("half a CA: %+v", r)
	}

	keys := filepath.Join(dir, "keys.yaml")
	first, second := dormouse(t, "admin", "apikey", "create", "--file", keys, "--tenant", "acme", "--role", "operator"), dormouse(t, "admin", "apikey", "create", "--file", keys, "--tenant", "acme")
	if first.code != 0 || second.code != 0 || first.err != "" {
		t.Fatalf("create: %+v %+v", first, second)
	}
	ring, err := apikey.OpenKeyring(keys, nil)
	if err != nil {
		t.Fatal(err)
	}
	if e, err := ring.Check(strings.TrimSpace(first.out)); err != nil || e.Role != apikey.RoleOperator || e.Tenant != "acme" {
		t.Errorf("%+v %v", e, err)
	}
	id := apikey.ID(strings.TrimSpace(first.out))
	if r := dormouse(t, "admin", "apikey", "ls", "--file", keys, "-o", "json"); r.code != 0 || !strings.Contains(r.out, id) || strings.Contains(strings.ToLower(r.out), "sha256") {
		t.Errorf("ls: %+v", r)
	}
	if r := dormouse(t, "admin", "apikey", "revoke", id, "--file", keys); r.code != 0 {
		t.Errorf("revoke: %+v", r)
	}
	if _, err := ring.Check(strings.TrimSpace(first.out)); err == nil {
		t.Error("a revoked key works")
	}
	if r := dormouse(t, "admin", "apikey", "revoke", id, "--file", keys); r.code != 3 {
		t.Errorf("revoke again: %+v", r)
	}
}

// The script is run by a real bash with the real program.
func TestBashCompletion(t *testing.T) {
	dir := t.TempDir()
	build := exec.CommandContext(t.Context(), "go", "build", "-o", filepath.Join(dir, "dormouse"), ".")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	for words, want := range map[string]string{
		"sn": "snapshot", "snapshot ": "rm", "volume c": "create", "create --mem": "--memory", "completion z": "zsh", "admin apikey re": "revoke",
	} {
		said := strings.Split("dormouse "+words, " ")
		quoted := ""
		for _, w := range said {
			quoted += " '" + w + "'"
		}
		script := `source <(dormouse completion bash); COMP_WORDS=(` + quoted + `); COMP_CWORD=$((${#COMP_WORDS[@]}-1)); _dormouse; printf '%s\n' "${COMPREPLY[@]}"`
		bash := exec.CommandContext(t.Context(), "bash", "-c", script)
		bash.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"))
		out, err := bash.CombinedOutput()
		if err != nil || !strings.Contains("\n"+string(out), "\n"+want+"\n") {
			t.Errorf("%q: want %q in %q (%v)", words, want, out, err)
		}
	}
	for _, shell := range []string{"zsh", "fish"} {
		if r := dormouse(t, "completion", shell); r.code != 0 || !strings.Contains(r.out, command.CompletionFlag) {
			t.Errorf("%s: %+v", shell, r)
		}
	}
}
