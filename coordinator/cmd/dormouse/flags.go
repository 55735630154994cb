package main

import (
	"bufio"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"sigs.k8s.io/yaml"

	"github.com/dormouse-run/dormouse/pkg/command"
	"github.com/dormouse-run/dormouse/pkg/config"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/wire"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// metaFlags are those of everything that gets a name.
func metaFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringFlag{Name: "name", Usage: "a name, unique among the living"},
		&cli.StringSliceFlag{Name: "label", Aliases: []string{"l"}, Usage: "KEY=VALUE, may be repeated"},
	}
}

func envFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringSliceFlag{Name: "env", Aliases: []string{"e"}, Usage: "KEY=VALUE, or KEY to pass it on; may be repeated"},
		&cli.StringSliceFlag{Name: "env-file", Usage: "file with KEY=VALUE lines"},
		&cli.StringFlag{Name: "user", Aliases: []string{"u"}, Usage: "a name, a uid, or uid:gid"},
		&cli.StringFlag{Name: "workdir", Aliases: []string{"w"}, Usage: "working directory inside"},
	}
}

// specFlags describe a sandbox.
func specFlags() []cli.Flag {
	return append(append(metaFlags(), envFlags()...),
		&cli.StringSliceFlag{Name: "secret-env", Usage: "KEY to pass on, stored nowhere; may be repeated"},
		&cli.StringFlag{Name: "cpu", Usage: "limit, e.g. 500m or 0.5"},
		&cli.StringFlag{Name: "cpu-request", Usage: "what placement counts, e.g. 100m"},
		&cli.StringFlag{Name: "memory", Aliases: []string{"m"}, Usage: "limit, e.g. 512Mi"},
		&cli.StringFlag{Name: "memory-request", Usage: "what placement counts, e.g. 64Mi"},
		&cli.StringFlag{Name: "disk", Usage: "size of the private writable layer, e.g. 1Gi"},
		&cli.StringSliceFlag{Name: "volume", Aliases: []string{"v"}, Usage: "VOLUME:PATH[:ro], by uid or name; may be repeated"},
		&cli.StringFlag{Name: "network", Usage: "none or outbound"},
		&cli.StringFlag{Name: "egress", Usage: "YAML file with what it may reach (EgressPolicy of the API), with --network outbound; see docs/network.md"},
		&cli.StringSliceFlag{Name: "expose", Usage: "a PORT inside that is served at /v1/sandboxes/UID/ports/PORT/ of the REST API; may be repeated"},
		&cli.StringFlag{Name: "hostname", Usage: "the name inside"},
		&cli.DurationFlag{Name: "idle-timeout", Usage: "how long it may be unused, e.g. 15m"},
		&cli.StringFlag{Name: "on-idle", Usage: "what happens then: pause (the default), hibernate or delete"},
		&cli.DurationFlag{Name: "lifetime", Usage: "delete the sandbox this long after its creation, e.g. 8h"},
		&cli.BoolFlag{Name: "wake-on-use", Usage: "exec, files and ports resume it when it is paused or hibernated"},
		&cli.StringFlag{Name: "runtime", Usage: "runtime class"},
		&cli.StringSliceFlag{Name: "node-selector", Usage: "KEY=VALUE that the node must have; may be repeated"},
	)
}

// pairs reads KEY=VALUE flags; with pass a lone KEY takes its value from the caller's environment.
func pairs(c *cli.Context, flag string, pass bool) (map[string]string, error) {
	out := make(map[string]string)
	for _, kv := range c.StringSlice(flag) {
		k, v, ok := strings.Cut(kv, "=")
		if !ok && pass {
			v, ok = os.LookupEnv(k)
			if !ok {
				return nil, command.Usage(c, "--%s %s: there is no such variable here; write %s=VALUE", flag, k, k)
			}
		}
		if !ok || k == "" {
			return nil, command.Usage(c, "--%s %q: KEY=VALUE is expected", flag, kv)
		}
		out[k] = v
	}
	return out, nil
}

// environment reads --env-file, then --env, which is stronger.
func environment(c *cli.Context) (map[string]string, error) {
	out := make(map[string]string)
	for _, file := range c.StringSlice("env-file") {
		if err := readEnvFile(c, file, out); err != nil {
			return nil, err
		}
	}
	env, err := pairs(c, "env", true)
	if err != nil {
		return nil, err
	}
	for k, v := range env {
		out[k] = v
	}
	return out, nil
}

func readEnvFile(c *cli.Context, file string, into map[string]string) error {
	f, err := os.Open(file)
	if err != nil {
		return command.Usage(c, "--env-file: %s", err)
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for n := 1; lines.Scan(); n++ {
		line := strings.TrimSpace(lines.Text())
		if line == "" || line[0] == '#' {
			continue
		}
		k, v, ok := strings.Cut(line, "=")
		if !ok || k == "" {
			return command.Usage(c, "--env-file %s, line %d: KEY=VALUE is expected", file, n) // the line may be a secret: not shown
		}
		into[k] = v
	}
	if err := lines.Err(); err != nil {
		return command.Usage(c, "--env-file: %s", err)
	}
	return nil
}

// specOf reads the flags of a sandbox; volumes by name are looked up.
func specOf(c call, image string, argv []string) (*dormousev1.SandboxSpec, error) {
	env, err := environment(c.Context)
	if err != nil {
		return nil, err
	}
	selector, err := pairs(c.Context, "node-selector", false)
	if err != nil {
		return nil, err
	}
	spec := &dormousev1.SandboxSpec{
		Image: image, Command: argv, Env: env, User: c.String("user"), WorkingDir: c.String("workdir"),
		RuntimeClass: c.String("runtime"), NodeSelector: selector, Hostname: c.String("hostname"),
	}
	spec.WakeOnUse = c.Bool("wake-on-use")
	if spec.OnIdle, err = idleActionOf(c.Context); err != nil {
		return nil, err
	}
	if c.IsSet("idle-timeout") {
		spec.IdleTimeout = durationpb.New(c.Duration("idle-timeout"))
	}
	if c.IsSet("lifetime") {
		spec.Lifetime = durationpb.New(c.Duration("lifetime"))
	}
	if n := c.String("network"); n != "" {
		v, ok := dormousev1.NetworkMode_value["NETWORK_MODE_"+strings.ToUpper(n)]
		if !ok || v == 0 {
			return nil, command.Usage(c.Context, "--network %q: none or outbound", n)
		}
		spec.Network = dormousev1.NetworkMode(v)
	}
	if file := c.String("egress"); file != "" {
		spec.Egress = &dormousev1.EgressPolicy{}
		if err := readFile(c, "egress", file, spec.Egress); err != nil {
			return nil, err
		}
	}
	for _, text := range c.StringSlice("expose") {
		port, err := strconv.ParseUint(text, 10, 16)
		if err != nil || port == 0 {
			return nil, command.Usage(c.Context, "--expose %q: a port from 1 to 65535 is expected", text)
		}
		spec.ExposedPorts = append(spec.ExposedPorts, uint32(port))
	}
	if spec.Resources, err = resourcesOf(c.Context); err != nil {
		return nil, err
	}
	for _, v := range c.StringSlice("volume") {
		mount, err := mountOf(c, v)
		if err != nil {
			return nil, err
		}
		spec.Volumes = append(spec.Volumes, mount)
	}
	return spec, nil
}

func idleActionOf(c *cli.Context) (dormousev1.IdleAction, error) {
	text := c.String("on-idle")
	if text == "" {
		return 0, nil
	}
	v, ok := dormousev1.IdleAction_value["IDLE_ACTION_"+strings.ToUpper(text)]
	if !ok || v == 0 {
		return 0, command.Usage(c, "--on-idle %q: pause, hibernate or delete", text)
	}
	return dormousev1.IdleAction(v), nil
}

func resourcesOf(c *cli.Context) (*dormousev1.Resources, error) {
	r := &dormousev1.Resources{}
	set := false
	for flag, f := range map[string]struct {
		into  *int64
		parse func(string) (int64, error)
	}{
		"cpu": {&r.CpuLimitMillis, config.ParseMillis}, "cpu-request": {&r.CpuRequestMillis, config.ParseMillis},
		"memory": {&r.MemoryLimitBytes, config.ParseBytes}, "memory-request": {&r.MemoryRequestBytes, config.ParseBytes},
		"disk": {&r.DiskLimitBytes, config.ParseBytes},
	} {
		if !c.IsSet(flag) {
			continue
		}
		n, err := f.parse(c.String(flag))
		if err != nil {
			return nil, command.Usage(c, "--%s: %s", flag, err)
		}
		*f.into, set = n, true
	}
	if !set {
		return nil, nil
	}
	return r, nil
}

func mountOf(c call, text string) (*dormousev1.VolumeMount, error) {
	parts := strings.Split(text, ":")
	if len(parts) < 2 || len(parts) > 3 || parts[0] == "" || parts[1] == "" || len(parts) == 3 && parts[2] != "ro" {
		return nil, command.Usage(c.Context, "--volume %q: VOLUME:PATH or VOLUME:PATH:ro is expected", text)
	}
	v, err := c.client.FindVolume(c.ctx, parts[0])
	if err != nil {
		return nil, err
	}
	return &dormousev1.VolumeMount{VolumeUid: v.UID, Path: parts[1], ReadOnly: len(parts) == 3}, nil
}

// bindingsOf reads PATH=same|clone|VOLUME.
func bindingsOf(c call) ([]*dormousev1.VolumeBinding, error) {
	var out []*dormousev1.VolumeBinding
	for _, text := range c.StringSlice("volume") {
		path, what, ok := strings.Cut(text, "=")
		if !ok || path == "" || what == "" {
			return nil, command.Usage(c.Context, "--volume %q: PATH=same, PATH=clone or PATH=VOLUME is expected", text)
		}
		b := &dormousev1.VolumeBinding{Path: path}
		switch what {
		case "same":
			b.Policy = dormousev1.VolumePolicy_VOLUME_POLICY_SAME
		case "clone":
			b.Policy = dormousev1.VolumePolicy_VOLUME_POLICY_CLONE
		default:
			v, err := c.client.FindVolume(c.ctx, what)
			if err != nil {
				return nil, err
			}
			b.Policy, b.ReplaceWith = dormousev1.VolumePolicy_VOLUME_POLICY_REPLACE, v.UID
		}
		out = append(out, b)
	}
	return out, nil
}

// createRequest reads the flags, or with -f the file that has the fields of the API.
func createRequest(c call, image string, argv []string) (*dormousev1.CreateSandboxRequest, error) {
	op, err := operationOf(c.Context)
	if err != nil {
		return nil, err
	}
	if file := c.String("file"); file != "" {
		return requestFromFile(c, file, op)
	}
	if image == "" {
		return nil, command.Usage(c.Context, "name an image, or give a file with -f")
	}
	labels, err := pairs(c.Context, "label", false)
	if err != nil {
		return nil, err
	}
	secrets, err := secretsOf(c.Context)
	if err != nil {
		return nil, err
	}
	spec, err := specOf(c, image, argv)
	if err != nil {
		return nil, err
	}
	return &dormousev1.CreateSandboxRequest{OperationId: op, Name: c.String("name"), Labels: labels, Spec: spec, SecretEnv: secrets}, nil
}

func secretsOf(c *cli.Context) (map[string]string, error) {
	for _, k := range c.StringSlice("secret-env") {
		if strings.Contains(k, "=") {
			return nil, command.Usage(c, "--secret-env takes only the variable's name: a command line is no place for a secret")
		}
	}
	return pairs(c, "secret-env", true)
}

// readFile reads a message of the API from a YAML file; "-" is standard input.
func readFile(c call, flag, file string, into proto.Message) error {
	var data []byte
	var err error
	if file == "-" {
		data, err = io.ReadAll(c.App.Reader)
	} else {
		data, err = os.ReadFile(file)
	}
	if err != nil {
		return command.Usage(c.Context, "--%s: %s", flag, err)
	}
	raw, err := yaml.YAMLToJSONStrict(data)
	if err != nil {
		return errs.Wrap(err, errs.InvalidField, "%s is not YAML, or has a key twice", file).With("field", flag)
	}
	if err := wire.UnmarshalJSON(raw, into); err != nil {
		e := errs.From(err)
		named := errs.New(e.Reason, "%s: %s", file, e.Message)
		for k, v := range e.Details {
			named = named.With(k, v)
		}
		return named
	}
	return nil
}

func requestFromFile(c call, file, op string) (*dormousev1.CreateSandboxRequest, error) {
	if c.Args().Present() {
		return nil, command.Usage(c.Context, "with -f the image and the command are in the file")
	}
	for _, f := range specFlags() {
		if c.IsSet(f.Names()[0]) {
			return nil, command.Usage(c.Context, "--%s: with -f everything about the sandbox is in the file", f.Names()[0])
		}
	}
	req := &dormousev1.CreateSandboxRequest{}
	if err := readFile(c, "file", file, req); err != nil {
		return nil, err
	}
	if req.GetOperationId() == "" || c.IsSet("operation-id") {
		req.OperationId = op
	}
	return req, nil
}
