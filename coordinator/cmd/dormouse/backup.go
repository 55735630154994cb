package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/urfave/cli/v2"
	"google.golang.org/protobuf/proto"

	"github.com/dormouse-run/dormouse/pkg/catalog/backup"
	"github.com/dormouse-run/dormouse/pkg/durable"
	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

func backupCommands() []*cli.Command {
	return []*cli.Command{
		{
			Name: "backup", Usage: "write a copy of the catalog as of one commit to FILE, or to standard output (-)", ArgsUsage: "FILE|-",
			Description: "Commits go on meanwhile. FILE is replaced once the new one is whole and on the disk; only its owner can read it. It has no secrets\n" +
				"and no keys, but names, labels and plain environment. Prints the backup's id.",
			Flags: callFlags(false), Action: action(1, 1, backupCatalog),
		},
		{
			Name: "restore", Usage: "put a backup into an empty catalog; what came after it is then put back from the nodes' journals", ArgsUsage: "FILE|-",
			Description: "The whole file is checked first. The catalog takes no writes from the first record on; afterwards the coordinator repairs it by itself,\n" +
				"or says in \"catalog repair\" what may be lost. A restore that was cut off is run again with the same file.",
			Flags: callFlags(false, &cli.BoolFlag{Name: "check", Usage: "only check the file; no server is asked"}), Action: restoreCatalog,
		},
	}
}

func backupCatalog(c call) error {
	id, end, err := "", (*dormousev1.CatalogBackupEnd)(nil), error(nil)
	name := c.Args().First()
	if name == "-" {
		id, end, err = writeBackup(c, c.App.Writer)
	} else {
		id, end, err = saveBackup(c, name)
	}
	if err != nil {
		return err
	}
	out := c.App.Writer
	if name == "-" {
		out = c.App.ErrWriter
	}
	if !c.print.Table() {
		_, err = fmt.Fprintln(out, id)
		return err
	}
	_, err = fmt.Fprintf(out, "%s: %d entries, as of commit %s\n", id, end.GetEntries(), pointText(end.GetPoint()))
	return err
}

// saveBackup writes the file beside its place, and gives it its name once it is on the disk.
func saveBackup(c call, name string) (id string, end *dormousev1.CatalogBackupEnd, err error) {
	f, err := os.CreateTemp(filepath.Dir(name), durable.Unfinished) // with mode 0600
	if err != nil {
		return "", nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	id, end, err = writeBackup(c, f)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return "", nil, err
	}
	if err = os.Rename(f.Name(), name); err != nil {
		return "", nil, err
	}
	return id, end, durable.SyncDir(filepath.Dir(name))
}

func writeBackup(c call, to io.Writer) (id string, end *dormousev1.CatalogBackupEnd, err error) {
	buffer := bufio.NewWriterSize(to, 1<<20)
	w := backup.NewWriter(buffer)
	for msg, err := range c.client.BackupCatalog(c.ctx) {
		if err == nil && msg.GetHeader() != nil {
			err = w.Header(msg.GetHeader())
		}
		for _, e := range msg.GetEntries() {
			if err == nil {
				err = w.Entry(e)
			}
		}
		if end = msg.GetEnd(); err == nil && end != nil {
			id, err = w.End(end)
		}
		if err != nil {
			return "", nil, err
		}
	}
	return id, end, buffer.Flush()
}

func restoreCatalog(ctx *cli.Context) error {
	return action(1, 1, func(c call) error {
		from, done, err := seekable(c, c.Args().First())
		if err != nil {
			return err
		}
		defer done()
		f, err := backup.Open(from)
		if err != nil {
			return err
		}
		if c.Bool("check") {
			_, err := fmt.Fprintf(c.App.Writer, "%s: whole, %d records, as of commit %s\n", f.ID, f.Records, pointText(f.End.GetPoint()))
			return err
		}
		return putBack(c, f)
	})(ctx)
}

// seekable opens the file. What comes from standard input is kept in a file without a name, since it is read twice.
func seekable(c call, name string) (io.ReadSeeker, func(), error) {
	if name != "-" {
		f, err := os.Open(name)
		if err != nil {
			return nil, nil, err
		}
		return f, func() { _ = f.Close() }, nil // was only read
	}
	f, err := os.CreateTemp("", "dormouse-restore-")
	if err != nil {
		return nil, nil, err
	}
	if err := os.Remove(f.Name()); err != nil {
		return nil, nil, errors.Join(err, f.Close())
	}
	if _, err := io.Copy(f, c.App.Reader); err != nil {
		return nil, nil, errors.Join(err, f.Close())
	}
	return f, func() { _ = f.Close() }, nil // and is gone with that
}

// What is sent in one call.
const (
	restoreCount = 256
	restoreBytes = 1 << 20
)

// putBack begins the restore, sends all records, those that have to wait for others again, and ends it.
func putBack(c call, f *backup.File) error {
	if err := c.client.BeginCatalogRestore(c.ctx, &dormousev1.BeginCatalogRestoreRequest{BackupId: f.ID, Point: f.End.GetPoint(),
		CoordinatorEpoch: f.Header.GetCoordinatorEpoch(), Ancestors: f.Header.GetAncestors()}); err != nil {
		return err
	}
	s := sender{call: c, id: f.ID}
	for r, err := range f.Entries() {
		if err == nil {
			err = s.add(r)
		}
		if err != nil {
			return err
		}
	}
	if err := s.finish(); err != nil {
		return err
	}
	if err := c.client.EndCatalogRestore(c.ctx, &dormousev1.EndCatalogRestoreRequest{BackupId: f.ID, Records: f.Records, Sum: f.Sum}); err != nil {
		return err
	}
	if !c.print.Table() {
		_, err := fmt.Fprintln(c.App.Writer, f.ID)
		return err
	}
	_, err := fmt.Fprintf(c.App.Writer, "%s: %d records restored, as of commit %s.\nThe catalog is suspended until what came after is put back from the nodes' journals: see \"dormouse admin catalog status\".\n",
		f.ID, f.Records, pointText(f.End.GetPoint()))
	return err
}

// sender gathers records, and keeps those that wait.
type sender struct {
	call
	id      string
	batch   []*dormousev1.CatalogRecord
	bytes   int
	waiting []*dormousev1.CatalogRecord
	held    int // bytes that wait
}

func (s *sender) add(r *dormousev1.CatalogRecord) error {
	n := proto.Size(r)
	if len(s.batch) == restoreCount || s.bytes+n > restoreBytes {
		if err := s.flush(); err != nil {
			return err
		}
	}
	s.batch, s.bytes = append(s.batch, r), s.bytes+n
	return nil
}

func (s *sender) flush() error {
	if len(s.batch) == 0 {
		return nil
	}
	waiting, err := s.client.RestoreCatalogRecords(s.ctx, s.id, s.batch)
	if err != nil {
		return err
	}
	for _, i := range waiting {
		if i < 0 || int(i) >= len(s.batch) {
			return errs.New(errs.InternalError, "the coordinator has record %d of %d wait", i, len(s.batch))
		}
		s.waiting = append(s.waiting, s.batch[i])
		s.held += proto.Size(s.batch[i])
	}
	if s.held > backup.MaxWaiting {
		return errs.New(errs.LimitExceeded, "records of more than %d bytes of the backup refer to what comes after them; take another, when less happens", backup.MaxWaiting).With("field", "waiting")
	}
	s.batch, s.bytes = nil, 0
	return nil
}

// finish sends what waits in rounds, each of which does what can be done.
func (s *sender) finish() error {
	if err := s.flush(); err != nil {
		return err
	}
	for left := s.waiting; len(left) > 0; left = s.waiting {
		s.waiting, s.held = nil, 0
		for _, r := range left {
			if err := s.add(r); err != nil {
				return err
			}
		}
		if err := s.flush(); err != nil {
			return err
		}
		if len(s.waiting) == len(left) {
			return errs.New(errs.StateDamaged, "%d records, %s/%s among them, refer to what the backup does not have; take another, and begin with an empty server",
				len(left), left[0].GetKind(), left[0].GetUid())
		}
	}
	return nil
}
