package client

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// PackTree writes what is in a folder of this machine to w as a tar archive, for WriteArchive. Links are packed
// as links; sockets are left out.
func PackTree(w io.Writer, dir string) error {
	archive := tar.NewWriter(w)
	err := filepath.WalkDir(dir, func(file string, entry fs.DirEntry, err error) error {
		if err != nil || file == dir {
			return err
		}
		name, err := filepath.Rel(dir, file)
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		return packEntry(archive, file, filepath.ToSlash(name), info)
	})
	return errors.Join(err, archive.Close())
}

func packEntry(archive *tar.Writer, file, name string, info fs.FileInfo) error {
	if info.Mode()&fs.ModeSocket != 0 {
		return nil
	}
	link := ""
	if info.Mode()&fs.ModeSymlink != 0 {
		var err error
		if link, err = os.Readlink(file); err != nil {
			return err
		}
	}
	head, err := tar.FileInfoHeader(info, link)
	if err != nil {
		return err
	}
	head.Name, head.Format = name, tar.FormatPAX
	if info.IsDir() {
		head.Name += "/"
	}
	if head.Typeflag != tar.TypeReg {
		return archive.WriteHeader(head)
	}
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := archive.WriteHeader(head); err != nil {
		return err
	}
	if n, err := io.Copy(archive, io.LimitReader(f, head.Size)); err != nil || n < head.Size {
		return errors.Join(err, fmt.Errorf("%s became shorter while it was read", file))
	}
	return nil
}

// UnpackTree unpacks a tar archive into a folder of this machine, as from ReadArchive. The archive is a sandbox's
// word: no entry gets out of the folder, by its name or through a link; owners, set-id bits and devices are
// not taken. After an error a part may be there.
func UnpackTree(dir string, r io.Reader) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	archive := tar.NewReader(r)
	var dirs []*tar.Header
	for {
		head, err := archive.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		head.Name = path.Clean(strings.TrimLeft(head.Name, "/"))
		if head.Name == "." {
			continue
		}
		if err := unpackEntry(root, head, archive); err != nil {
			return errs.Wrap(err, errs.UnsafePath, "the entry %s of the archive cannot be unpacked: %v", head.Name, err).With("path", head.Name)
		}
		if head.Typeflag == tar.TypeDir {
			dirs = append(dirs, head)
		}
	}
	// Deepest first: what is put into a directory changes its time, and its mode may keep out.
	for i := len(dirs) - 1; i >= 0; i-- {
		err = errors.Join(err, root.Chmod(dirs[i].Name, fs.FileMode(dirs[i].Mode&0o777)), root.Chtimes(dirs[i].Name, dirs[i].ModTime, dirs[i].ModTime))
	}
	return err
}

func unpackEntry(root *os.Root, head *tar.Header, content io.Reader) error {
	if err := root.MkdirAll(path.Dir(head.Name), 0o755); err != nil {
		return err
	}
	if head.Typeflag == tar.TypeDir {
		return root.MkdirAll(head.Name, 0o755)
	}
	if err := root.Remove(head.Name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	switch head.Typeflag {
	case tar.TypeSymlink:
		return root.Symlink(head.Linkname, head.Name)
	case tar.TypeLink:
		return root.Link(path.Clean(strings.TrimLeft(head.Linkname, "/")), head.Name)
	case tar.TypeReg:
	default:
		return errors.New("it is a device or a FIFO")
	}
	mode := fs.FileMode(head.Mode & 0o777)
	f, err := root.OpenFile(head.Name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, content)
	if err := errors.Join(err, f.Chmod(mode), f.Close()); err != nil {
		return err
	}
	return root.Chtimes(head.Name, head.ModTime, head.ModTime)
}
