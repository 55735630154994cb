// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package stack

import (
	"fmt"
	"os"
	"strings"

	"github.com/dormouse-run/dormouse/pkg/apikey"
	"github.com/dormouse-run/dormouse/pkg/pki"
	"github.com/dormouse-run/dormouse/test/fabric"
)

// Tenant is whose key and certificates the stack makes.
const Tenant = "dev"

// NodeName is how node i calls itself, in its certificate and elsewhere.
func NodeName(i int) string { return fmt.Sprintf("node-%d", i) }

// writeIdentities makes the CA of the daemons, a certificate for each of them and
// an operator's API key.
func (s *Stack) writeIdentities() error {
	ca, err := pki.NewCA("dormouse development " + s.ID)
	if err != nil {
		return err
	}
	if err := ca.Save(s.caFiles()); err != nil {
		return fmt.Errorf("CA: %w", err)
	}
	coordinator := pki.Identity{Role: pki.RoleCoordinator, Name: "coordinator-1"}
	if _, err := s.Issue(coordinator, fabric.HubAddr, "127.0.0.1", "localhost"); err != nil {
		return err
	}
	for i := 1; i <= s.Nodes; i++ {
		if _, err := s.Issue(pki.Identity{Role: pki.RoleNode, Name: NodeName(i)}, fabric.NodeAddr(i)); err != nil {
			return err
		}
	}
	key, err := s.newAPIKey(Tenant, apikey.RoleOperator)
	if err != nil {
		return err
	}
	if err := writeFile(s.APIKeyFile(), []byte(key), 0o600); err != nil {
		return fmt.Errorf("API key: %w", err)
	}
	return nil
}

func (s *Stack) caFiles() (cert, key string) { return s.path("tls", "ca.pem"), s.path("tls", "ca.key") }

func (s *Stack) tlsFiles(name string) pki.Files {
	cert, _ := s.caFiles()
	return pki.Files{CA: cert, Cert: s.path("tls", name+".pem"), Key: s.path("tls", name+".key")}
}

// Issue makes a certificate of the daemons' CA and returns where it is.
func (s *Stack) Issue(id pki.Identity, sans ...string) (pki.Files, error) {
	ca, err := pki.LoadCA(s.caFiles())
	if err != nil {
		return pki.Files{}, err
	}
	pair, err := ca.Issue(id, sans...)
	if err != nil {
		return pki.Files{}, err
	}
	files := s.tlsFiles(id.Name)
	if err := pair.Save(files.Cert, files.Key); err != nil {
		return pki.Files{}, fmt.Errorf("certificate of %s: %w", id, err)
	}
	return files, nil
}

// CoordinatorTLS is where the coordinator's certificate is.
func (s *Stack) CoordinatorTLS() pki.Files { return s.tlsFiles("coordinator-1") }

// NodeTLS is where the certificate of node i is.
func (s *Stack) NodeTLS(i int) pki.Files { return s.tlsFiles(NodeName(i)) }

// APIKeys is the file of keys that the coordinator checks callers against.
func (s *Stack) APIKeys() string { return s.path("tls", "api-keys.yaml") }

// APIKeyFile is the root-only file with an operator's key of Tenant.
func (s *Stack) APIKeyFile() string { return s.path("tls", "api-key") }

// APIKey is an operator's key of Tenant.
func (s *Stack) APIKey() (string, error) {
	data, err := os.ReadFile(s.APIKeyFile())
	if err != nil {
		return "", fmt.Errorf("API key: %w", err)
	}
	return strings.TrimSpace(string(data)), nil
}

// NewAPIKey makes a user's key for a tenant; the coordinator knows it at once.
func (s *Stack) NewAPIKey(tenant string) (string, error) { return s.newAPIKey(tenant, apikey.RoleUser) }

func (s *Stack) newAPIKey(tenant string, role apikey.Role) (string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	entries, err := apikey.Read(s.APIKeys())
	if err != nil {
		return "", fmt.Errorf("API keys: %w", err)
	}
	key, entry, err := apikey.New(tenant, role, "made by the development stack")
	if err != nil {
		return "", fmt.Errorf("API keys: %w", err)
	}
	if err := apikey.Write(s.APIKeys(), append(entries, entry)); err != nil {
		return "", fmt.Errorf("API keys: %w", err)
	}
	return key, nil
}
