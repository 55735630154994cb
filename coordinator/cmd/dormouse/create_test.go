package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

func TestCreateFlags(t *testing.T) {
	f := serve(t)
	f.volumes = []*dormousev1.Volume{{Meta: &dormousev1.ObjectMeta{Uid: uidAt(90), Name: "data"}}}
	envFile := filepath.Join(t.TempDir(), "env")
	if err := os.WriteFile(envFile, []byte("# comment\nA=from file\nB=2\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PASSED", "on")
	t.Setenv("TOKEN", "hunter2")
	op := uidAt(77)
	r := dormouse(t, "create", "reg.example/a:1", "--name", "box", "-l", "team=x", "--cpu", "0.5", "--memory=512Mi", "--disk", "1Gi", "--cpu-request=100m",
		"-v", "data:/data:ro", "-e", "A=1,2", "--env", "PASSED", "--env-file", envFile, "--secret-env", "TOKEN", "-u", "1000", "-w", "/work",
		"--network", "none", "--node-selector", "zone=a", "--expose", "8080", "--expose", "3000", "--operation-id", op, "--", "sh", "-c", "echo --name")
	if r.code != 0 {
		t.Fatal(r.err)
	}
	want := &dormousev1.CreateSandboxRequest{
		OperationId: op, Name: "box", Labels: map[string]string{"team": "x"}, SecretEnv: map[string]string{"TOKEN": "hunter2"},
		Spec: &dormousev1.SandboxSpec{
			Image: "reg.example/a:1", Command: []string{"sh", "-c", "echo --name"}, Env: map[string]string{"A": "1,2", "B": "2", "PASSED": "on"},
			User: "1000", WorkingDir: "/work", Network: dormousev1.NetworkMode_NETWORK_MODE_NONE, NodeSelector: map[string]string{"zone": "a"},
			ExposedPorts: []uint32{8080, 3000},
			Resources:    &dormousev1.Resources{CpuLimitMillis: 500, CpuRequestMillis: 100, MemoryLimitBytes: 512 << 20, DiskLimitBytes: 1 << 30},
			Volumes:      []*dormousev1.VolumeMount{{VolumeUid: uidAt(90), Path: "/data", ReadOnly: true}},
		},
	}
	if d := cmp.Diff(want, asked[*dormousev1.CreateSandboxRequest](t, f), protocmp.Transform()); d != "" {
		t.Errorf("asked (-want +got):\n%s", d)
	}
	if strings.Contains(r.out+r.err, "hunter2") {
		t.Error("a secret was printed")
	}
}

func TestCreateWithEgress(t *testing.T) {
	f := serve(t)
	file := filepath.Join(t.TempDir(), "egress.yaml")
	if err := os.WriteFile(file, []byte("defaultAction: EGRESS_ACTION_DENY\nallow:\n- domains: [example.com]\n  ports: [{first: 443, last: 443}]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	ok(t, uidAt(1)+"\n", "create", "a", "--network", "outbound", "--egress", file)
	want := &dormousev1.EgressPolicy{DefaultAction: dormousev1.EgressAction_EGRESS_ACTION_DENY, Allow: []*dormousev1.EgressRule{
		{Domains: []string{"example.com"}, Ports: []*dormousev1.PortRange{{First: 443, Last: 443}}}}}
	if d := cmp.Diff(want, asked[*dormousev1.CreateSandboxRequest](t, f).GetSpec().GetEgress(), protocmp.Transform()); d != "" {
		t.Errorf("asked (-want +got):\n%s", d)
	}
	if err := os.WriteFile(file, []byte("allowed: []"), 0o600); err != nil {
		t.Fatal(err)
	}
	if r := dormouse(t, "create", "a", "--egress", file); r.code != 2 || !strings.Contains(r.err, "allowed") {
		t.Errorf("an unknown key: %d %s", r.code, r.err)
	}
}

func TestCreateFromFile(t *testing.T) {
	f := serve(t)
	file := filepath.Join(t.TempDir(), "sandbox.yaml")
	write := func(text string) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("name: box\nspec:\n  image: reg.example/a:1\n  resources: {memory_limit_bytes: 1048576000}\n  network: NETWORK_MODE_NONE\n")
	ok(t, uidAt(1)+"\n", "create", "-f", file)
	got := asked[*dormousev1.CreateSandboxRequest](t, f)
	if got.GetName() != "box" || got.GetSpec().GetResources().GetMemoryLimitBytes() != 1048576000 || got.GetOperationId() == "" {
		t.Errorf("asked %v", got)
	}
	write("name: box\nspec:\n  imagee: a\n")
	r := dormouse(t, "create", "-f", file)
	if r.code != 2 || !strings.Contains(r.err, "spec.imagee") || !strings.Contains(r.err, file) || !strings.Contains(r.err, "UNKNOWN_FIELD") {
		t.Errorf("an unknown field: %+v", r)
	}
	write("name: a\nname: b\n")
	if r := dormouse(t, "create", "-f", file); r.code != 2 {
		t.Errorf("a key twice: %+v", r)
	}
	if r := dormouse(t, "create", "-f", file, "--name", "x"); r.code != 2 || !strings.Contains(r.err, "--name") {
		t.Errorf("a file and a flag: %+v", r)
	}
	if r := dormouseIn(t, "{spec: {image: b}}", "create", "-f", "-"); r.code != 0 {
		t.Errorf("standard input: %+v", r)
	}
}

func TestPullPlainLines(t *testing.T) {
	serve(t)
	if r := dormouse(t, "image", "pull", "reg.example/a:1"); r.code != 0 || r.err != "n1: resolving\nn1: pulling\nn1: done\n" {
		t.Errorf("got %+v", r)
	}
}

func TestPullOnATerminal(t *testing.T) {
	var out bytes.Buffer
	p := &pullProgress{w: &out, live: true, last: make(map[string]string)}
	for _, u := range []*dormousev1.PullProgress{{Node: "n1", Step: "pulling", BytesDone: 1 << 20, BytesTotal: 4 << 20}, {Node: "n2", Step: "converting", BytesDone: 2 << 20}, {Node: "n1", Step: "done"}} {
		p.update(u)
	}
	p.end()
	want := "\r\x1b[Kn1: pulling 25% of 4Mi\r\x1b[Kn1: pulling 25% of 4Mi  n2: converting 2Mi\r\x1b[Kn1: done  n2: converting 2Mi\n"
	if d := cmp.Diff(want, out.String()); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}
