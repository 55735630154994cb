package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/command"
	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

func cpCommand() *cli.Command {
	return &cli.Command{
		Name: "cp", Usage: "copy files and directories to, from and between sandboxes", ArgsUsage: "SOURCE DESTINATION",
		Description: "Either side is a path of this machine, SANDBOX:PATH, or - for a tar archive on standard input or output.\n" +
			"A path of this machine with a colon in it begins with ./ or /. Into a directory that is there the source is\n" +
			"copied under its own name; SOURCE/. copies what is in a directory. Files are replaced as a whole.",
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "parents", Aliases: []string{"p"}, Usage: "make the directories that are missing on the way"},
			&cli.BoolFlag{Name: "archive", Aliases: []string{"a"}, Usage: "keep the numeric owners of a directory's files"},
			&cli.StringFlag{Name: "owner", Usage: "who owns what is written inside: USER[:GROUP], by default the sandbox's user"},
			&cli.StringFlag{Name: "user", Aliases: []string{"u"}, Usage: "who reads and writes inside, by default root"},
			&cli.BoolFlag{Name: "quiet", Aliases: []string{"q"}, Usage: "no progress"},
			&cli.DurationFlag{Name: "timeout", Usage: "give up after this time"},
		},
		Action: action(2, 2, func(c call) error {
			from, err := placeOf(c, c.Args().Get(0))
			if err != nil {
				return err
			}
			to, err := placeOf(c, c.Args().Get(1))
			if err != nil {
				return err
			}
			cp := &copying{call: c, from: from, to: to}
			if terminal(c.App.ErrWriter) && !c.Bool("quiet") {
				cp.show = c.App.ErrWriter
			}
			defer cp.finished()
			return cp.run()
		}),
	}
}

// place is one side of a copy.
type place struct {
	files  *client.Files // nil: of this machine
	path   string
	stream bool
}

// placeOf reads an argument as docker does: what has a colon before any slash is in a sandbox.
func placeOf(c call, arg string) (place, error) {
	if arg == "-" {
		return place{stream: true}, nil
	}
	name, inside, ok := strings.Cut(arg, ":")
	if !ok || strings.Contains(name, "/") || name == "" || name == "." || name == ".." {
		return place{path: arg}, nil
	}
	s, err := c.client.FindSandbox(c.ctx, name)
	if err != nil {
		return place{}, err
	}
	if inside == "" || inside[0] != '/' {
		return place{}, command.Usage(c.Context, "%q: a path inside is absolute: %s:/PATH", arg, name)
	}
	files := s.Files()
	files.User = c.String("user")
	return place{files: files, path: inside}, nil
}

// copying is one copy.
type copying struct {
	call
	from, to place
	show     io.Writer // of the progress, nil for none

	done  int64
	began time.Time
	shown time.Time
}

func (cp *copying) run() error {
	switch {
	case cp.from.stream && cp.to.stream, cp.from.files == nil && cp.to.files == nil:
		return command.Usage(cp.Context, "one side has to be in a sandbox: SANDBOX:/PATH")
	case cp.from.stream:
		_, err := cp.to.files.WriteArchive(cp.ctx, cp.to.path, cp.meter(cp.App.Reader), cp.archiveOptions())
		return err
	case cp.to.stream:
		_, err := cp.from.files.ReadArchive(cp.ctx, strings.TrimSuffix(cp.from.path, "/."), archiveName(cp.from.path), cp.meterTo(cp.App.Writer))
		return err
	}
	isDir, size, mode, err := cp.source()
	if err != nil {
		return err
	}
	contents := strings.HasSuffix(cp.from.path, "/.")
	target, err := cp.target(isDir, contents)
	if err != nil {
		return err
	}
	if isDir {
		return cp.tree(target)
	}
	return cp.file(target, size, mode)
}

func archiveName(p string) string {
	if strings.HasSuffix(p, "/.") {
		return "."
	}
	return ""
}

func (cp *copying) archiveOptions() client.ArchiveOptions {
	return client.ArchiveOptions{Parents: cp.Bool("parents"), KeepOwners: cp.Bool("archive"), Owner: cp.String("owner")}
}

// source looks at what is copied.
func (cp *copying) source() (isDir bool, size int64, mode uint32, err error) {
	if cp.from.files == nil {
		st, err := os.Stat(cp.from.path)
		if err != nil {
			return false, 0, 0, err
		}
		if !st.IsDir() && !st.Mode().IsRegular() {
			return false, 0, 0, errs.New(errs.NotAFile, "%s is neither a file nor a directory", cp.from.path).With("path", cp.from.path)
		}
		return st.IsDir(), st.Size(), uint32(st.Mode().Perm()), nil
	}
	info, err := cp.from.files.Stat(cp.ctx, cp.from.path)
	return info.GetType() == dormousev1.FileType_FILE_TYPE_DIRECTORY, info.GetSizeBytes(), info.GetMode(), err
}

// target gives the path that the source gets: its own name in a directory that is there, or the path as it is.
func (cp *copying) target(isDir, contents bool) (string, error) {
	there, dir, err := cp.look()
	switch {
	case err != nil:
		return "", err
	case there && dir && !contents:
		return cp.join(cp.to.path, cp.sourceName()), nil
	case !there && !isDir && strings.HasSuffix(cp.to.path, "/") && !cp.Bool("parents"):
		return "", errs.New(errs.FileNotFound, "the directory %s is not there; make it, or use --parents", cp.to.path).With("path", cp.to.path)
	case !there && !isDir && strings.HasSuffix(cp.to.path, "/"):
		return cp.join(cp.to.path, cp.sourceName()), nil
	case there && !dir && isDir:
		return "", errs.New(errs.NotADirectory, "%s is a file; a directory is not copied over it", cp.to.path).With("path", cp.to.path)
	}
	return cp.to.path, nil
}

func (cp *copying) sourceName() string {
	if cp.from.files != nil {
		return path.Base(path.Clean(cp.from.path))
	}
	abs, err := filepath.Abs(cp.from.path)
	if err != nil {
		abs = cp.from.path
	}
	return filepath.Base(abs)
}

func (cp *copying) join(dir, name string) string {
	if cp.to.files != nil {
		return path.Join(dir, name)
	}
	return filepath.Join(dir, name)
}

// look tells what is at the destination.
func (cp *copying) look() (there, dir bool, err error) {
	if cp.to.files == nil {
		st, err := os.Stat(cp.to.path)
		if errors.Is(err, os.ErrNotExist) {
			return false, false, nil
		}
		return err == nil, err == nil && st.IsDir(), err
	}
	info, err := cp.to.files.Stat(cp.ctx, cp.to.path)
	if errs.Has(err, errs.FileNotFound) {
		return false, false, nil
	}
	return err == nil, info.GetType() == dormousev1.FileType_FILE_TYPE_DIRECTORY, err
}

// file copies a file.
func (cp *copying) file(target string, size int64, mode uint32) (err error) {
	var src io.ReadCloser
	if cp.from.files != nil {
		src, err = cp.from.files.Open(cp.ctx, cp.from.path)
	} else {
		src, err = os.Open(cp.from.path)
	}
	if err != nil {
		return err
	}
	defer src.Close()
	if cp.to.files != nil {
		_, err = cp.to.files.Write(cp.ctx, target, cp.meter(src), client.WriteOptions{Mode: &mode, Owner: cp.String("owner"), Parents: cp.Bool("parents"), Size: size})
		return err
	}
	return cp.writeLocal(target, src, mode)
}

// writeLocal replaces a file of this machine as a whole.
func (cp *copying) writeLocal(target string, src io.Reader, mode uint32) (err error) {
	if cp.Bool("parents") {
		if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
			return err
		}
	}
	f, err := os.CreateTemp(filepath.Dir(target), "."+filepath.Base(target)+"-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	_, err = io.Copy(f, cp.meter(src))
	if err := errors.Join(err, f.Chmod(os.FileMode(mode&0o777)), f.Sync(), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), target)
}

// tree copies what is in a directory into one that is made where it is missing.
func (cp *copying) tree(target string) error {
	if err := cp.makeTarget(target); err != nil {
		return err
	}
	r, w := io.Pipe()
	packed := make(chan error, 1)
	go func() {
		var err error
		if cp.from.files != nil {
			_, err = cp.from.files.ReadArchive(cp.ctx, cp.from.path, ".", w)
		} else {
			err = client.PackTree(w, filepath.Clean(cp.from.path))
		}
		packed <- err
		_ = w.CloseWithError(err) // never fails
	}()
	var err error
	if cp.to.files != nil {
		_, err = cp.to.files.WriteArchive(cp.ctx, target, cp.meter(r), cp.archiveOptions())
	} else if err = client.UnpackTree(target, cp.meter(r)); err == nil {
		_, err = io.Copy(io.Discard, r) // the archive's padding, and its digest
	}
	_ = r.CloseWithError(err) // never fails
	if packErr := <-packed; packErr != nil && !errors.Is(packErr, io.ErrClosedPipe) && (err == nil || !errors.Is(err, packErr)) {
		return packErr
	}
	return err
}

func (cp *copying) makeTarget(target string) error {
	if cp.to.files != nil {
		info, err := cp.to.files.Stat(cp.ctx, target)
		if errs.Has(err, errs.FileNotFound) {
			return cp.to.files.MakeDirectory(cp.ctx, target, cp.Bool("parents"))
		}
		if err == nil && info.GetType() != dormousev1.FileType_FILE_TYPE_DIRECTORY {
			return errs.New(errs.NotADirectory, "%s is a file; a directory is not copied over it", target).With("path", target)
		}
		return err
	}
	if cp.Bool("parents") {
		return os.MkdirAll(target, 0o755)
	}
	if err := os.Mkdir(target, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	return nil
}

const showEvery = 200 * time.Millisecond

// meter counts what is read, and shows it.
func (cp *copying) meter(r io.Reader) io.Reader {
	if cp.show == nil {
		return r
	}
	return io.TeeReader(r, counter{cp})
}

func (cp *copying) meterTo(w io.Writer) io.Writer {
	if cp.show == nil {
		return w
	}
	return io.MultiWriter(w, counter{cp})
}

type counter struct{ cp *copying }

func (c counter) Write(p []byte) (int, error) {
	cp := c.cp
	if cp.began.IsZero() {
		cp.began = now()
	}
	cp.done += int64(len(p))
	if now().Sub(cp.shown) >= showEvery {
		cp.shown = now()
		cp.line("")
	}
	return len(p), nil
}

func (cp *copying) line(end string) {
	rate := float64(cp.done) / max(now().Sub(cp.began).Seconds(), 0.001)
	fmt.Fprintf(cp.show, "\r%.1f MiB, %.1f MiB/s   %s", float64(cp.done)/(1<<20), rate/(1<<20), end)
}

func (cp *copying) finished() {
	if cp.show != nil && !cp.began.IsZero() {
		cp.line("\n")
	}
}
