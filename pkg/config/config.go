// Package config fills a struct from, in this order, each stronger than the one before: its
// defaults (what the struct held), a YAML file, the environment, the command line.
//
// The struct's fields are the only list of settings there is. A field
//
//	Listen string `yaml:"listen" usage:"address of the public API"`
//
// in a group tagged `yaml:"api"` is the key api.listen in the file, the flag --api-listen, and the
// variable PREFIX_API_LISTEN. A key that no field has is refused, with its name and line. Types:
// string, bool, integers, float64, time.Duration, Bytes, Secret, []string and map[string]string (on the command
// line and in the environment: comma separated, key=value), and structs of these.
//
// A Secret has no flag (command lines are public), is never printed, and can be given as a file:
// the variable's or key's name with the suffix _file.
package config

import (
	"encoding"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v2"
	"go.yaml.in/yaml/v3"
)

// FileFlag names the configuration file on the command line; its variable is PREFIX_CONFIG.
const FileFlag = "config"

// Secret is a value that is never shown.
type Secret string

const redacted = "(secret)"

func (s Secret) String() string {
	if s == "" {
		return ""
	}
	return redacted
}

// GoString keeps %#v from showing it.
func (s Secret) GoString() string { return s.String() }

// MarshalText keeps encoders and slog from showing it.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// MarshalYAML keeps Dump from showing it.
func (s Secret) MarshalYAML() (any, error) { return s.String(), nil }

// Reveal gives the value.
func (s Secret) Reveal() string { return string(s) }

// setting is one leaf of the struct.
type setting struct {
	path  []string // the keys in the file
	usage string
	value reflect.Value
}

func (s setting) flag() string { return strings.ReplaceAll(strings.Join(s.path, "-"), "_", "-") }
func (s setting) env(prefix string) string {
	return prefix + "_" + strings.ToUpper(strings.Join(s.path, "_"))
}

var (
	secretType   = reflect.TypeFor[Secret]()
	durationType = reflect.TypeFor[time.Duration]()
	textType     = reflect.TypeFor[encoding.TextUnmarshaler]()
)

// settings lists the leaves of a pointer to a struct, in the order of the fields.
func settings(into any) ([]setting, error) {
	v := reflect.ValueOf(into)
	if v.Kind() != reflect.Pointer || v.Elem().Kind() != reflect.Struct {
		return nil, fmt.Errorf("configuration: %T is not a pointer to a struct", into)
	}
	return walk(v.Elem(), nil)
}

func walk(v reflect.Value, path []string) ([]setting, error) {
	var out []setting
	for i := range v.NumField() {
		f := v.Type().Field(i)
		if !f.IsExported() {
			continue
		}
		name, opts, _ := strings.Cut(f.Tag.Get("yaml"), ",")
		if name == "-" {
			continue
		}
		p := append(append([]string(nil), path...), name)
		if opts == "inline" {
			p = path
		} else if name == "" {
			return nil, fmt.Errorf("configuration: %s.%s has no yaml tag", v.Type(), f.Name)
		}
		if f.Type.Kind() == reflect.Struct && !reflect.PointerTo(f.Type).Implements(textType) {
			inner, err := walk(v.Field(i), p)
			if err != nil {
				return nil, err
			}
			out = append(out, inner...)
			continue
		}
		out = append(out, setting{path: p, usage: f.Tag.Get("usage"), value: v.Field(i)})
	}
	return out, nil
}

// Flags gives the flags of a configuration, --config among them. The struct holds the defaults. It
// panics if the struct cannot be a configuration, which the first start of the program shows.
func Flags(defaults any, prefix string) []cli.Flag {
	list, err := settings(defaults)
	if err != nil {
		panic(err)
	}
	flags := []cli.Flag{&cli.StringFlag{Name: FileFlag, EnvVars: []string{prefix + "_CONFIG"}, Usage: "YAML file with the configuration"}}
	for _, s := range list {
		usage := s.usage
		env := s.env(prefix)
		if s.value.Type() == secretType {
			continue
		}
		if s.value.Kind() == reflect.Bool {
			flags = append(flags, &cli.BoolFlag{Name: s.flag(), EnvVars: []string{env}, Usage: usage, Value: s.value.Bool()})
			continue
		}
		flags = append(flags, &cli.StringFlag{Name: s.flag(), EnvVars: []string{env}, Usage: usage, DefaultText: format(s.value)})
	}
	return flags
}

// Load fills the struct, which holds the defaults, from the file, the environment and the flags.
func Load(c *cli.Context, into any, prefix string) error {
	if file := c.String(FileFlag); file != "" {
		if err := LoadFile(file, into); err != nil {
			return err
		}
	}
	list, err := settings(into)
	if err != nil {
		return err
	}
	var problems []error
	for _, s := range list {
		if s.value.Type() == secretType {
			problems = append(problems, loadSecret(s, s.env(prefix)))
			continue
		}
		if !c.IsSet(s.flag()) {
			continue
		}
		text := c.String(s.flag())
		if s.value.Kind() == reflect.Bool {
			text = strconv.FormatBool(c.Bool(s.flag()))
		}
		if err := set(s.value, text); err != nil {
			problems = append(problems, fmt.Errorf("--%s (or %s): %w", s.flag(), s.env(prefix), err))
		}
	}
	return errors.Join(problems...)
}

// loadSecret takes a secret from its variable, or from the file that VARIABLE_FILE names. Its value is in no error.
func loadSecret(s setting, env string) error {
	if v, ok := os.LookupEnv(env); ok {
		s.value.SetString(v)
		return nil
	}
	file, ok := os.LookupEnv(env + "_FILE")
	if !ok {
		return nil
	}
	return secretFromFile(s.value, file)
}

func secretFromFile(v reflect.Value, file string) error {
	data, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("secret: %w", err)
	}
	v.SetString(strings.TrimRight(string(data), "\r\n"))
	return nil
}

// LoadFile fills the struct from a YAML file. An empty file changes nothing.
func LoadFile(file string, into any) error {
	f, err := os.Open(file)
	if err != nil {
		return fmt.Errorf("configuration: %w", err)
	}
	defer f.Close()
	var doc yaml.Node
	dec := yaml.NewDecoder(f)
	err = dec.Decode(&doc)
	if errors.Is(err, io.EOF) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	if err := dec.Decode(&yaml.Node{}); !errors.Is(err, io.EOF) {
		return fmt.Errorf("%s: one document is expected, there are more", file)
	}
	if len(doc.Content) == 0 {
		return nil
	}
	if err := fill(doc.Content[0], reflect.ValueOf(into).Elem(), ""); err != nil {
		return fmt.Errorf("%s:%w", file, err)
	}
	return nil
}

// fill puts a YAML mapping into a struct; errors begin with the line.
func fill(n *yaml.Node, v reflect.Value, path string) error {
	if n.Kind == yaml.ScalarNode && n.Tag == "!!null" {
		return nil
	}
	if n.Kind != yaml.MappingNode {
		return fmt.Errorf("%d: %s: a group of keys is expected here", n.Line, orTop(path))
	}
	seen := make(map[string]int)
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, val := n.Content[i], n.Content[i+1]
		full := strings.TrimPrefix(path+"."+k.Value, ".")
		if line, ok := seen[k.Value]; ok {
			return fmt.Errorf("%d: key %q is there already, in line %d", k.Line, full, line)
		}
		seen[k.Value] = k.Line
		if f, ok := fieldOf(v, k.Value); ok {
			if err := fillField(val, f, full); err != nil {
				return err
			}
			continue
		}
		if base, ok := strings.CutSuffix(k.Value, "_file"); ok {
			if f, ok := fieldOf(v, base); ok && f.Type() == secretType {
				if err := secretFromFile(f, val.Value); err != nil {
					return fmt.Errorf("%d: %s: %w", val.Line, full, err)
				}
				continue
			}
		}
		return fmt.Errorf("%d: unknown key %q; here are %s", k.Line, full, strings.Join(keysOf(v), ", "))
	}
	return nil
}

func orTop(path string) string {
	if path == "" {
		return "the file"
	}
	return path
}

func fillField(n *yaml.Node, v reflect.Value, path string) error {
	if v.Kind() == reflect.Struct && !v.Addr().Type().Implements(textType) {
		return fill(n, v, path)
	}
	if v.Type() == secretType {
		if n.Kind != yaml.ScalarNode {
			return fmt.Errorf("%d: %s: one value is expected here", n.Line, path)
		}
		v.SetString(n.Value)
		return nil
	}
	if v.Kind() == reflect.Map || v.Kind() == reflect.Slice {
		fresh := reflect.New(v.Type())
		if err := n.Decode(fresh.Interface()); err != nil {
			return fmt.Errorf("%d: %s: %s is expected here", n.Line, path, kindName(v))
		}
		v.Set(fresh.Elem())
		return nil
	}
	if n.Kind != yaml.ScalarNode {
		return fmt.Errorf("%d: %s: one value is expected here", n.Line, path)
	}
	if err := set(v, n.Value); err != nil {
		return fmt.Errorf("%d: %s: %w", n.Line, path, err)
	}
	return nil
}

// fieldOf finds the field with a yaml name, also in inlined structs.
func fieldOf(v reflect.Value, key string) (reflect.Value, bool) {
	for i := range v.NumField() {
		f := v.Type().Field(i)
		name, opts, _ := strings.Cut(f.Tag.Get("yaml"), ",")
		switch {
		case !f.IsExported() || name == "-":
		case opts == "inline":
			if inner, ok := fieldOf(v.Field(i), key); ok {
				return inner, true
			}
		case name == key:
			return v.Field(i), true
		}
	}
	return reflect.Value{}, false
}

func keysOf(v reflect.Value) []string {
	var out []string
	for i := range v.NumField() {
		f := v.Type().Field(i)
		name, opts, _ := strings.Cut(f.Tag.Get("yaml"), ",")
		switch {
		case !f.IsExported() || name == "-":
		case opts == "inline":
			out = append(out, keysOf(v.Field(i))...)
		default:
			out = append(out, name)
		}
	}
	return out
}

// set parses a text into a leaf.
func set(v reflect.Value, text string) error {
	if u, ok := v.Addr().Interface().(encoding.TextUnmarshaler); ok {
		return u.UnmarshalText([]byte(text))
	}
	var err error
	switch {
	case v.Type() == durationType:
		var d time.Duration
		if d, err = time.ParseDuration(text); err == nil {
			v.SetInt(int64(d))
		}
	case v.Kind() == reflect.String:
		v.SetString(text)
	case v.Kind() == reflect.Bool:
		var b bool
		if b, err = strconv.ParseBool(text); err == nil {
			v.SetBool(b)
		}
	case v.CanInt():
		var n int64
		if n, err = strconv.ParseInt(text, 10, v.Type().Bits()); err == nil {
			v.SetInt(n)
		}
	case v.CanUint():
		var n uint64
		if n, err = strconv.ParseUint(text, 10, v.Type().Bits()); err == nil {
			v.SetUint(n)
		}
	case v.CanFloat():
		var f float64
		if f, err = strconv.ParseFloat(text, 64); err == nil {
			v.SetFloat(f)
		}
	case v.Type() == reflect.TypeFor[[]string]():
		v.Set(reflect.ValueOf(splitList(text)))
	case v.Type() == reflect.TypeFor[map[string]string]():
		return setMap(v, text)
	default:
		return fmt.Errorf("a setting of type %s is not supported", v.Type())
	}
	if err != nil {
		return fmt.Errorf("%q: %s is expected here", text, kindName(v))
	}
	return nil
}

func splitList(text string) []string {
	var out []string
	for _, s := range strings.Split(text, ",") {
		if s = strings.TrimSpace(s); s != "" {
			out = append(out, s)
		}
	}
	return out
}

func setMap(v reflect.Value, text string) error {
	m := make(map[string]string)
	for _, kv := range splitList(text) {
		key, val, ok := strings.Cut(kv, "=")
		if !ok || key == "" {
			return fmt.Errorf("%q: key=value is expected here", kv)
		}
		m[key] = val
	}
	v.Set(reflect.ValueOf(m))
	return nil
}

func kindName(v reflect.Value) string {
	switch {
	case v.Type() == durationType:
		return "a duration like 1m30s"
	case v.Kind() == reflect.Bool:
		return "true or false"
	case v.CanInt(), v.CanUint():
		return "an integer that fits"
	case v.CanFloat():
		return "a number"
	case v.Kind() == reflect.Map:
		return "a group of text keys and values"
	case v.Kind() == reflect.Slice:
		return "a list of texts"
	}
	return "a text"
}

var plain = regexp.MustCompile(`^\{|^\[`)

// format shows a default in a flag's help.
func format(v reflect.Value) string {
	if v.IsZero() {
		return "none"
	}
	if v.Type() == reflect.TypeFor[[]string]() {
		return strings.Join(v.Interface().([]string), ",")
	}
	s := fmt.Sprint(v.Interface())
	if plain.MatchString(s) {
		return "set"
	}
	return s
}

// Dump gives the configuration as YAML, secrets redacted.
func Dump(cfg any) ([]byte, error) { return yaml.Marshal(cfg) }
