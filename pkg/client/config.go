package client

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// Config says where the coordinator is and who is calling.
type Config struct {
	// Addr is https://host:port, or unix:///path for a socket on this machine; several coordinators are
	// separated by commas, and any of them that answers will do.
	Addr string `yaml:"addr"`
	// APIKey, or the file that has it. Empty where the certificate says who is calling.
	APIKey     string `yaml:"api_key,omitempty"`
	APIKeyFile string `yaml:"api_key_file,omitempty"`
	// CA is a file with Dormouse's own CA: the server must then be a coordinator of it, whatever
	// host name was dialled. Without it the server is verified by its host name and the system's CAs.
	CA string `yaml:"ca,omitempty"`
	// Cert and Key identify the caller by mTLS.
	Cert string `yaml:"cert,omitempty"`
	Key  string `yaml:"key,omitempty"`
	// Through keeps all calls on the way through a coordinator, also where nodes could be reached.
	Through bool `yaml:"through,omitempty"`
	// DialNode (may be nil) opens connections to nodes. Without it a client whose coordinator is a socket of this
	// machine does not look for nodes.
	DialNode func(ctx context.Context, network, address string) (net.Conn, error) `yaml:"-"`
}

// contexts is the file of named configurations.
type contexts struct {
	Current  string            `yaml:"current"`
	Contexts map[string]Config `yaml:"contexts"`
}

// ContextFile gives the path of the file with the contexts: DORMOUSE_CONFIG, or the user's own.
func ContextFile() string {
	if f := os.Getenv("DORMOUSE_CONFIG"); f != "" {
		return f
	}
	dir, err := os.UserConfigDir()
	if err != nil {
		return ""
	}
	return filepath.Join(dir, "dormouse", "config.yaml")
}

// FromEnvironment gives the configuration of a context (empty: the file's current one), with
// DORMOUSE_ADDR, DORMOUSE_API_KEY, DORMOUSE_API_KEY_FILE, DORMOUSE_CA, DORMOUSE_CERT and
// DORMOUSE_KEY stronger than the file.
func FromEnvironment(name string) (Config, error) {
	cfg, err := fromFile(ContextFile(), name)
	if err != nil {
		return Config{}, err
	}
	if v := os.Getenv("DORMOUSE_API_KEY_FILE"); v != "" {
		cfg.APIKey, cfg.APIKeyFile = "", v
	}
	for name, into := range map[string]*string{
		"DORMOUSE_ADDR": &cfg.Addr, "DORMOUSE_API_KEY": &cfg.APIKey, "DORMOUSE_CA": &cfg.CA,
		"DORMOUSE_CERT": &cfg.Cert, "DORMOUSE_KEY": &cfg.Key,
	} {
		if v := os.Getenv(name); v != "" {
			*into = v
		}
	}
	return cfg, nil
}

func fromFile(file, name string) (Config, error) {
	data, err := os.ReadFile(file)
	if os.IsNotExist(err) && os.Getenv("DORMOUSE_CONFIG") == "" {
		if name != "" {
			return Config{}, errs.New(errs.InvalidField, "there is no context %q: %s does not exist", name, file).With("field", "context")
		}
		return Config{}, nil
	}
	if err != nil {
		return Config{}, errs.Wrap(err, errs.InvalidField, "the file with the contexts cannot be read: %s", err).With("field", "DORMOUSE_CONFIG")
	}
	var all contexts
	dec := yaml.NewDecoder(strings.NewReader(string(data)))
	dec.KnownFields(true)
	if err := dec.Decode(&all); err != nil {
		return Config{}, errs.New(errs.InvalidField, "%s: %s", file, hideValues(err)).With("field", "DORMOUSE_CONFIG")
	}
	if name == "" {
		name = all.Current
	}
	cfg, ok := all.Contexts[name]
	if !ok && name != "" {
		return Config{}, errs.New(errs.InvalidField, "there is no context %q in %s", name, file).With("field", "context")
	}
	return cfg, nil
}

// hideValues keeps the first line of a YAML error: the others quote values, which may be keys.
func hideValues(err error) string {
	lines := strings.Split(err.Error(), "\n")
	if len(lines) > 1 && strings.Contains(lines[1], "field ") {
		return strings.TrimSpace(lines[1])
	}
	return strings.SplitN(lines[0], "`", 2)[0]
}

// key gives the API key.
func (c Config) key() (string, error) {
	if c.APIKey != "" || c.APIKeyFile == "" {
		return c.APIKey, nil
	}
	data, err := os.ReadFile(c.APIKeyFile)
	if err != nil {
		return "", errs.Wrap(err, errs.InvalidField, "the API key's file cannot be read: %s", err).With("field", "api_key_file")
	}
	return strings.TrimSpace(string(data)), nil
}
