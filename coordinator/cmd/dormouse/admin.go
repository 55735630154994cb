package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/dormouse-run/dormouse/pkg/apikey"
	"github.com/dormouse-run/dormouse/pkg/command"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/pki"
	"github.com/dormouse-run/dormouse/pkg/uid"
)

func isUID(s string) bool { return uid.Check(s) == nil }

// adminCommands are an operator's. Those for certificates and keys work on files, not on a server.
func adminCommands() *cli.Command {
	return &cli.Command{Name: "admin", Usage: "make certificates and API keys, look after the catalog", Subcommands: []*cli.Command{
		catalogCommands(),
		{Name: "pki", Usage: "certificates", Subcommands: []*cli.Command{{
			Name: "init", Usage: "make a CA, if there is none yet, and the certificates that are missing",
			Description: "Writes ca.crt, ca.key, coordinator.crt, coordinator.key and for each node node-NAME.crt and node-NAME.key.\n" +
				"What is there stays, unless --renew makes all but the CA anew. Keep ca.key off the nodes.",
			Flags: []cli.Flag{
				&cli.StringFlag{Name: "dir", Usage: "folder for the files"},
				&cli.StringSliceFlag{Name: "node", Usage: "a node's name; may be repeated"},
				&cli.StringSliceFlag{Name: "client", Usage: "TENANT/NAME of a client that uses a certificate; may be repeated"},
				&cli.StringSliceFlag{Name: "operator", Usage: "TENANT/NAME of an operator that uses a certificate; may be repeated"},
				&cli.StringSliceFlag{Name: "san", Usage: "host name or address of the coordinator; may be repeated"},
				&cli.BoolFlag{Name: "renew", Usage: "replace the certificates; running processes take them up by themselves"},
			},
			Action: initPKI,
		}}},
		{Name: "apikey", Usage: "API keys", Subcommands: []*cli.Command{
			{
				Name: "create", Usage: "make a key and print it, once",
				Flags: []cli.Flag{
					keysFlag(),
					&cli.StringFlag{Name: "tenant", Usage: "whose it is"},
					&cli.StringFlag{Name: "role", Usage: "user or operator", Value: string(apikey.RoleUser)},
					&cli.StringFlag{Name: "note", Usage: "what it is for"},
				},
				Action: createKey,
			},
			{Name: "ls", Usage: "list keys, without their secrets", Flags: append(command.OutputFlags(), keysFlag()), Action: listKeys},
			{Name: "revoke", Usage: "end keys", ArgsUsage: "ID...", Flags: []cli.Flag{keysFlag()}, Action: revokeKeys},
		}},
	}}
}

func keysFlag() cli.Flag {
	return &cli.StringFlag{Name: "file", Usage: "file with the keys"}
}

// wanted is one certificate that should be there.
type wanted struct {
	file string
	id   pki.Identity
	sans []string
}

func wantedOf(c *cli.Context) ([]wanted, error) {
	sans := append([]string{"localhost", "127.0.0.1", "::1"}, c.StringSlice("san")...)
	list := []wanted{{"coordinator", pki.Identity{Role: pki.RoleCoordinator, Name: "coordinator"}, sans}}
	for _, n := range c.StringSlice("node") {
		list = append(list, wanted{"node-" + n, pki.Identity{Role: pki.RoleNode, Name: n}, nil})
	}
	for flag, role := range map[string]pki.Role{"client": pki.RoleClient, "operator": pki.RoleOperator} {
		for _, text := range c.StringSlice(flag) {
			tenant, name, ok := strings.Cut(text, "/")
			if !ok {
				return nil, command.Usage(c, "--%s %q: TENANT/NAME is expected", flag, text)
			}
			list = append(list, wanted{string(role) + "-" + tenant + "-" + name, pki.Identity{Role: role, Name: name, Tenant: tenant}, nil})
		}
	}
	for _, w := range list {
		if err := w.id.Check(); err != nil {
			return nil, command.Usage(c, "%s", err)
		}
	}
	slices.SortFunc(list, func(a, b wanted) int { return strings.Compare(a.file, b.file) })
	return list, nil
}

func initPKI(c *cli.Context) error {
	if c.Args().Present() {
		return command.Usage(c, "too many arguments: %q", c.Args().First())
	}
	if err := needs(c, "dir"); err != nil {
		return err
	}
	list, err := wantedOf(c)
	if err != nil {
		return err
	}
	dir := c.String("dir")
	ca, err := openCA(c, dir)
	if err != nil {
		return err
	}
	for _, w := range list {
		cert, key := filepath.Join(dir, w.file+".crt"), filepath.Join(dir, w.file+".key")
		if exists(cert) && exists(key) && !c.Bool("renew") {
			continue
		}
		pair, err := ca.Issue(w.id, w.sans...)
		if err != nil {
			return err
		}
		if err := pair.Save(cert, key); err != nil {
			return fmt.Errorf("write the certificate of %s: %w", w.id, err)
		}
		fmt.Fprintln(c.App.Writer, cert)
	}
	return nil
}

// openCA reads the CA of the folder, or makes it. A CA of which one half is missing is refused:
// a new one would lock out every process that has a certificate of the old.
func openCA(c *cli.Context, dir string) (*pki.CA, error) {
	cert, key := filepath.Join(dir, "ca.crt"), filepath.Join(dir, "ca.key")
	if exists(cert) || exists(key) {
		ca, err := pki.LoadCA(cert, key)
		if err != nil {
			return nil, errs.Wrap(err, errs.StateDamaged, "the CA in %s cannot be used: %s; put the missing file back, or use another folder", dir, err)
		}
		return ca, nil
	}
	ca, err := pki.NewCA("dormouse")
	if err != nil {
		return nil, err
	}
	if err := ca.Save(cert, key); err != nil {
		return nil, fmt.Errorf("write the CA: %w", err)
	}
	fmt.Fprintln(c.App.Writer, cert)
	return ca, nil
}

func exists(file string) bool {
	_, err := os.Lstat(file)
	return !errors.Is(err, fs.ErrNotExist)
}

func createKey(c *cli.Context) error {
	if err := needs(c, "file", "tenant"); err != nil {
		return err
	}
	file := c.String("file")
	entries, err := apikey.Read(file)
	if err != nil {
		return err
	}
	key, entry, err := apikey.New(c.String("tenant"), apikey.Role(c.String("role")), c.String("note"))
	if err != nil {
		return command.Usage(c, "%s", err)
	}
	if err := apikey.Write(file, append(entries, entry)); err != nil {
		return fmt.Errorf("write %s: %w", file, err)
	}
	if terminal(c.App.ErrWriter) {
		fmt.Fprintln(c.App.ErrWriter, "Keep it: it is not shown again.")
	}
	_, err = fmt.Fprintln(c.App.Writer, key)
	return err
}

func listKeys(c *cli.Context) error {
	p, err := command.NewPrinter(c)
	if err != nil {
		return err
	}
	if err := needs(c, "file"); err != nil {
		return err
	}
	entries, err := apikey.Read(c.String("file"))
	if err != nil {
		return err
	}
	if !p.Table() && !c.Bool("quiet") && c.String("output") != "name" {
		return p.Value(entries)
	}
	if !p.Table() {
		for _, e := range entries {
			fmt.Fprintln(c.App.Writer, e.ID)
		}
		return nil
	}
	type col = command.Column[apikey.Entry]
	return command.Table(p, entries, []col{
		{Name: "ID", Show: func(e apikey.Entry) string { return e.ID }},
		{Name: "TENANT", Show: func(e apikey.Entry) string { return e.Tenant }},
		{Name: "ROLE", Show: func(e apikey.Entry) string { return string(e.Role) }},
		{Name: "AGE", Show: func(e apikey.Entry) string { return command.Age(now(), e.Created) }},
		{Name: "NOTE", Show: func(e apikey.Entry) string { return e.Note }},
	})
}

// needs refuses a command line without the flags.
func needs(c *cli.Context, flags ...string) error {
	for _, f := range flags {
		if c.String(f) == "" {
			return command.Usage(c, "--%s is needed", f)
		}
	}
	return nil
}

func revokeKeys(c *cli.Context) error {
	if err := needs(c, "file"); err != nil {
		return err
	}
	if !c.Args().Present() {
		return command.Usage(c, "name the key's id: the part between the underscores")
	}
	file := c.String("file")
	entries, err := apikey.Read(file)
	if err != nil {
		return err
	}
	for _, id := range c.Args().Slice() {
		if full := apikey.ID(id); full != "" {
			id = full
		}
		i := slices.IndexFunc(entries, func(e apikey.Entry) bool { return e.ID == id })
		if i < 0 {
			return errs.New(errs.ObjectNotFound, "there is no such key in %s", file).With("kind", "apikey")
		}
		entries = slices.Delete(entries, i, i+1)
	}
	return apikey.Write(file, entries)
}
