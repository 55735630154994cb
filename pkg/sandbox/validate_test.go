package sandbox

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

const volumeUID = "01900000-0000-7000-8000-000000000001"

func good() Spec {
	return Spec{
		Image: "registry.example/debian:12", Command: []string{"/bin/sleep", "1"}, Env: map[string]string{"A": "1"}, User: "1000:1000",
		WorkingDir: "/work", Network: NetworkNone, RuntimeClass: "runsc", Hostname: "box-1",
		Resources: Resources{CPURequestMillis: 100, CPULimitMillis: 500, MemoryRequestBytes: 32 << 20, MemoryLimitBytes: 64 << 20, DiskLimitBytes: 1 << 20},
		Volumes:   []VolumeMount{{VolumeUID: volumeUID, Path: "/data"}}, NodeSelector: map[string]string{"zone": "a"},
	}
}

func env(n int, value string) map[string]string {
	m := make(map[string]string, n)
	for i := range n {
		m[fmt.Sprintf("K%d", i)] = value
	}
	return m
}

func TestSpecValidate(t *testing.T) {
	for name, c := range map[string]struct {
		change        func(*Spec)
		reason, field string
	}{
		"good":                       {func(*Spec) {}, "", ""},
		"only an image":              {func(s *Spec) { *s = Spec{Image: "a"} }, "", ""},
		"no image":                   {func(s *Spec) { s.Image = "" }, "INVALID_FIELD", "spec.image"},
		"long image":                 {func(s *Spec) { s.Image = strings.Repeat("a", MaxImage+1) }, "LIMIT_EXCEEDED", "spec.image"},
		"longest image":              {func(s *Spec) { s.Image = strings.Repeat("a", MaxImage) }, "", ""},
		"two commands":               {func(s *Spec) { s.RunImageCommand = true }, "INVALID_FIELD", "spec.run_image_command"},
		"outbound":                   {func(s *Spec) { s.Network = NetworkOutbound }, "", ""},
		"another network":            {func(s *Spec) { s.Network = "host" }, "INVALID_FIELD", "spec.network"},
		"egress without a network":   {func(s *Spec) { s.Egress = &Egress{} }, "INVALID_FIELD", "spec.egress"},
		"another runtime":            {func(s *Spec) { s.RuntimeClass = "runc" }, "NOT_SUPPORTED", "spec.runtime_class"},
		"hostname with a dot":        {func(s *Spec) { s.Hostname = "a.b" }, "INVALID_FIELD", "spec.hostname"},
		"hostname with a dash first": {func(s *Spec) { s.Hostname = "-a" }, "INVALID_FIELD", "spec.hostname"},
		"long hostname":              {func(s *Spec) { s.Hostname = strings.Repeat("a", MaxName+1) }, "INVALID_FIELD", "spec.hostname"},
		"many selectors":             {func(s *Spec) { s.NodeSelector = env(MaxSelector+1, "x") }, "LIMIT_EXCEEDED", "spec.node_selector"},
		"selector without a key":     {func(s *Spec) { s.NodeSelector = map[string]string{"": "x"} }, "INVALID_FIELD", "spec.node_selector"},
		"many arguments":             {func(s *Spec) { s.Command = make([]string, MaxArgv+1) }, "LIMIT_EXCEEDED", "spec.command"},
		"long arguments":             {func(s *Spec) { s.Command = []string{"a", strings.Repeat("b", MaxArgvBytes)} }, "LIMIT_EXCEEDED", "spec.command"},
		"no program":                 {func(s *Spec) { s.Command = []string{"", "b"} }, "INVALID_FIELD", "spec.command"},
		"NUL in an argument":         {func(s *Spec) { s.Command = []string{"a\x00"} }, "INVALID_FIELD", "spec.command"},
		"many variables":             {func(s *Spec) { s.Env = env(MaxEnv+1, "") }, "LIMIT_EXCEEDED", "spec.env"},
		"large environment":          {func(s *Spec) { s.Env = env(2, strings.Repeat("x", MaxEnvBytes/2)) }, "LIMIT_EXCEEDED", "spec.env"},
		"bad variable":               {func(s *Spec) { s.Env = map[string]string{"1A": ""} }, "INVALID_FIELD", "spec.env"},
		"variable with =":            {func(s *Spec) { s.Env = map[string]string{"A=B": ""} }, "INVALID_FIELD", "spec.env"},
		"NUL in a value":             {func(s *Spec) { s.Env = map[string]string{"A": "\x00"} }, "INVALID_FIELD", "spec.env"},
		"user by name":               {func(s *Spec) { s.User = "www-data" }, "", ""},
		"user with a space":          {func(s *Spec) { s.User = "a b" }, "INVALID_FIELD", "spec.user"},
		"user with two groups":       {func(s *Spec) { s.User = "1:2:3" }, "INVALID_FIELD", "spec.user"},
		"relative directory":         {func(s *Spec) { s.WorkingDir = "work" }, "UNSAFE_PATH", "spec.working_dir"},
		"directory with ..":          {func(s *Spec) { s.WorkingDir = "/a/../b" }, "UNSAFE_PATH", "spec.working_dir"},
		"long directory":             {func(s *Spec) { s.WorkingDir = "/" + strings.Repeat("a", MaxPath) }, "LIMIT_EXCEEDED", "spec.working_dir"},
		"negative":                   {func(s *Spec) { s.Resources.DiskLimitBytes = -1 }, "INVALID_FIELD", "spec.resources.disk_limit_bytes"},
		"all negative":               {func(s *Spec) { s.Resources = Resources{-1, -1, -1, -1, -1} }, "INVALID_FIELD", "spec.resources.cpu_request_millis"},
		"too little cpu":             {func(s *Spec) { s.Resources.CPULimitMillis = FloorCPULimitMillis - 1 }, "BELOW_FLOOR", "spec.resources.cpu_limit_millis"},
		"too little memory":          {func(s *Spec) { s.Resources.MemoryLimitBytes = FloorMemoryLimitBytes - 1 }, "BELOW_FLOOR", "spec.resources.memory_limit_bytes"},
		"too little disk":            {func(s *Spec) { s.Resources.DiskLimitBytes = FloorDiskLimitBytes - 1 }, "BELOW_FLOOR", "spec.resources.disk_limit_bytes"},
		"cpu request over limit":     {func(s *Spec) { s.Resources.CPURequestMillis = 501 }, "INVALID_FIELD", "spec.resources.cpu_request_millis"},
		"memory request over limit":  {func(s *Spec) { s.Resources.MemoryRequestBytes = 65 << 20 }, "INVALID_FIELD", "spec.resources.memory_request_bytes"},
		"no limits":                  {func(s *Spec) { s.Resources = Resources{CPURequestMillis: 1e6, MemoryRequestBytes: 1 << 40} }, "", ""},
		"volume at /":                {func(s *Spec) { s.Volumes[0].Path = "/" }, "INVALID_FIELD", "spec.volumes[0].path"},
		"volume nowhere":             {func(s *Spec) { s.Volumes[0].Path = "" }, "INVALID_FIELD", "spec.volumes[0].path"},
		"volume with ..":             {func(s *Spec) { s.Volumes[0].Path = "/data/.." }, "UNSAFE_PATH", "spec.volumes[0].path"},
		"volume with a slash":        {func(s *Spec) { s.Volumes[0].Path = "/data/" }, "UNSAFE_PATH", "spec.volumes[0].path"},
		"volume with a NUL":          {func(s *Spec) { s.Volumes[0].Path = "/a\x00" }, "UNSAFE_PATH", "spec.volumes[0].path"},
		"volume in /proc":            {func(s *Spec) { s.Volumes[0].Path = "/proc/x" }, "INVALID_FIELD", "spec.volumes[0].path"},
		"volume over guest init":     {func(s *Spec) { s.Volumes[0].Path = "/.dormouse" }, "INVALID_FIELD", "spec.volumes[0].path"},
		"volume beside /proc":        {func(s *Spec) { s.Volumes[0].Path = "/processes" }, "", ""},
		"two at one path": {func(s *Spec) {
			s.Volumes = append(s.Volumes, VolumeMount{VolumeUID: "01900000-0000-7000-8000-000000000002", Path: "/data"})
		}, "DUPLICATE_PATH", "spec.volumes[1].path"},
		"one twice": {func(s *Spec) {
			s.Volumes = append(s.Volumes, VolumeMount{VolumeUID: volumeUID, Path: "/more"})
		}, "INVALID_FIELD", "spec.volumes[1].volume_uid"},
		"many volumes": {func(s *Spec) { s.Volumes = make([]VolumeMount, MaxVolumes+1) }, "LIMIT_EXCEEDED", "spec.volumes"},
	} {
		t.Run(name, func(t *testing.T) {
			s := good()
			c.change(&s)
			p := s.Validate()
			switch {
			case c.reason == "" && p != nil:
				t.Errorf("refused: %v", p)
			case c.reason != "" && (p == nil || p.Reason != c.reason || p.Field != c.field || p.Error() == ""):
				t.Errorf("got %+v", p)
			case p != nil && p.Reason == "LIMIT_EXCEEDED" && (p.Details["limit"] == "" || p.Details["got"] == ""):
				t.Errorf("the limit is not named: %+v", p)
			}
		})
	}
}

func TestSecretValuesStayOutOfProblems(t *testing.T) {
	for _, e := range []map[string]string{{"A": "hunter2\x00"}, {"1A": "hunter2"}, env(2, "hunter2"+strings.Repeat("x", MaxEnvBytes))} {
		if p := ValidateEnv("spec.env", e); p == nil || strings.Contains(fmt.Sprintf("%+v", *p), "hunter2") {
			t.Errorf("got %+v", p)
		}
	}
}

func TestNamesAndLabels(t *testing.T) {
	for name, reason := range map[string]string{
		"": "", "a": "", "a-b.c_d": "", "0": "", strings.Repeat("a", MaxName): "",
		strings.Repeat("a", MaxName+1): "LIMIT_EXCEEDED", "A": "INVALID_FIELD", "-a": "INVALID_FIELD", "a-": "INVALID_FIELD",
		"a b": "INVALID_FIELD", "a/b": "INVALID_FIELD", "\u00e9": "INVALID_FIELD", "a\n": "INVALID_FIELD",
	} {
		if p := ValidateName("name", name); (p == nil) != (reason == "") || p != nil && p.Reason != reason {
			t.Errorf("%q: %+v", name, p)
		}
	}
	for _, c := range []struct {
		labels map[string]string
		reason string
	}{
		{nil, ""},
		{map[string]string{"a.b/c": "any = value,\twith things"}, ""},
		{map[string]string{"a=b": ""}, "INVALID_FIELD"},
		{map[string]string{"a b": ""}, "INVALID_FIELD"},
		{map[string]string{"a": "\xff"}, "INVALID_FIELD"},
		{map[string]string{strings.Repeat("a", MaxLabelKey+1): ""}, "LIMIT_EXCEEDED"},
		{map[string]string{"a": strings.Repeat("a", MaxLabelValue+1)}, "LIMIT_EXCEEDED"},
		{env(MaxLabels+1, ""), "LIMIT_EXCEEDED"},
	} {
		p := ValidateLabels("labels", c.labels)
		if (p == nil) != (c.reason == "") || p != nil && p.Reason != c.reason {
			t.Errorf("%v: %+v", c.labels, p)
		}
	}
}

func TestDefaults(t *testing.T) {
	for name, c := range map[string]struct{ in, want Resources }{
		"nothing":        {Resources{}, Resources{100, 0, 32 << 20, 512 << 20, 1 << 30}},
		"small limits":   {Resources{CPULimitMillis: 50, MemoryLimitBytes: 16 << 20}, Resources{50, 50, 16 << 20, 16 << 20, 1 << 30}},
		"large requests": {Resources{CPURequestMillis: 4000, MemoryRequestBytes: 1 << 40}, Resources{4000, 0, 1 << 40, 1 << 40, 1 << 30}},
	} {
		got := c.in.WithDefaults()
		if got != c.want {
			t.Errorf("%s: %+v", name, got)
		}
		if got.validate() != nil || got.WithDefaults() != got {
			t.Errorf("%s: defaults are not valid, or not stable", name)
		}
	}
}

func TestCloneAndConditions(t *testing.T) {
	s := good()
	c := s.Clone()
	c.Command[0], c.Env["A"], c.Volumes[0].Path, c.NodeSelector["zone"] = "x", "x", "x", "x"
	if s.Command[0] != "/bin/sleep" || s.Env["A"] != "1" || s.Volumes[0].Path != "/data" || s.NodeSelector["zone"] != "a" {
		t.Error("the copy shares something")
	}
	var st Status
	t0, t1 := time.Unix(1, 0), time.Unix(2, 0)
	st.SetCondition(Condition{Type: "Scheduled", Reason: "NoNode", LastTransitionTime: t0})
	st.SetCondition(Condition{Type: "Scheduled", Reason: "StillNoNode", LastTransitionTime: t1})
	if len(st.Conditions) != 1 || st.Conditions[0].Reason != "StillNoNode" || st.Conditions[0].LastTransitionTime != t0 {
		t.Errorf("same status: %+v", st.Conditions)
	}
	st.SetCondition(Condition{Type: "Scheduled", Status: true, LastTransitionTime: t1})
	st.SetCondition(Condition{Type: "ImageReady", LastTransitionTime: t1})
	if len(st.Conditions) != 2 || st.Conditions[0].LastTransitionTime != t1 {
		t.Errorf("another status: %+v", st.Conditions)
	}
}
