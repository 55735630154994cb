package client

import (
	"context"
	"errors"
	"io"

	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// Files is a handle: the files in a running sandbox. Paths are absolute and resolved inside it.
type Files struct {
	c       *Client
	Sandbox string
	// User is whom calls act as inside; "" is root.
	User string
}

// Files gives the handle without asking the server.
func (s *Sandbox) Files() *Files { return &Files{c: s.c, Sandbox: s.UID} }

// Stat describes what is at the path, behind links.
func (f *Files) Stat(ctx context.Context, path string) (*dormousev1.FileInfo, error) {
	return f.stat(ctx, path, false)
}

// Lstat is Stat that looks at a link itself.
func (f *Files) Lstat(ctx context.Context, path string) (*dormousev1.FileInfo, error) {
	return f.stat(ctx, path, true)
}

func (f *Files) stat(ctx context.Context, path string, noFollow bool) (*dormousev1.FileInfo, error) {
	resp, err := retry(ctx, func(ctx context.Context) (*dormousev1.StatFileResponse, error) {
		return f.c.files.StatFile(ctx, &dormousev1.StatFileRequest{SandboxUid: f.Sandbox, Path: path, NoFollow: noFollow, User: f.User})
	})
	return resp.GetInfo(), err
}

// List calls fn for each entry of a directory, in the order of their names' bytes. It holds a page at a time.
func (f *Files) List(ctx context.Context, path string, fn func(*dormousev1.FileInfo) error) error {
	token := ""
	for {
		resp, err := retry(ctx, func(ctx context.Context) (*dormousev1.ListFilesResponse, error) {
			return f.c.files.ListFiles(ctx, &dormousev1.ListFilesRequest{SandboxUid: f.Sandbox, Path: path, PageSize: 500, PageToken: token, User: f.User})
		})
		if err != nil {
			return err
		}
		for _, info := range resp.GetFiles() {
			if err := fn(info); err != nil {
				return err
			}
		}
		if token = resp.GetNextPageToken(); token == "" {
			return nil
		}
	}
}

// MakeDirectory makes a directory; with parents also what is missing above it, and one that is there is fine.
func (f *Files) MakeDirectory(ctx context.Context, path string, parents bool) error {
	_, err := f.c.files.MakeDirectory(ctx, &dormousev1.MakeDirectoryRequest{SandboxUid: f.Sandbox, Path: path, CreateParents: parents, User: f.User})
	return err
}

// Remove removes a file, or an empty directory; recursive: with all in it. It is sent once: after a lost
// reply look whether it is still there.
func (f *Files) Remove(ctx context.Context, path string, recursive bool) error {
	_, err := f.c.files.RemoveFile(ctx, &dormousev1.RemoveFileRequest{SandboxUid: f.Sandbox, Path: path, Recursive: recursive, User: f.User})
	return err
}

// Move renames within a file system; replace: over a file that is there. It is sent once.
func (f *Files) Move(ctx context.Context, path, newPath string, replace bool) error {
	_, err := f.c.files.MoveFile(ctx, &dormousev1.MoveFileRequest{SandboxUid: f.Sandbox, Path: path, NewPath: newPath, Replace: replace, User: f.User})
	return err
}

// Watch calls fn with changes below the path until fn fails, ctx ends, or what is watched is gone (nil). The
// first call, without events, says that the watch is set.
func (f *Files) Watch(ctx context.Context, path string, recursive bool, fn func(*dormousev1.WatchFilesResponse) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := f.c.files.WatchFiles(ctx, &dormousev1.WatchFilesRequest{SandboxUid: f.Sandbox, Path: path, Recursive: recursive, User: f.User})
	if err != nil {
		return err
	}
	for {
		resp, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := fn(resp); err != nil {
			return err
		}
	}
}

// ReadArchive writes a file or directory with all in it to w as a tar archive. The top is called name in it, or by
// the path's last element where name is "", or has no entry of its own where it is ".". It is not taken up
// again when it is cut.
func (f *Files) ReadArchive(ctx context.Context, path, name string, w io.Writer) (*dormousev1.ArchiveTrailer, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := f.c.files.ReadArchive(ctx, &dormousev1.ReadArchiveRequest{SandboxUid: f.Sandbox, Path: path, Name: name, User: f.User})
	if err != nil {
		return nil, err
	}
	digest := newDigest()
	for {
		resp, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			err = errs.New(errs.ReplyLost, "the archive ended before it was complete; read it again")
		}
		if err != nil {
			return nil, err
		}
		if data := resp.GetData(); len(data) > 0 {
			digest.Write(data)
			if _, err := w.Write(data); err != nil {
				return nil, err
			}
		}
		if t := resp.GetTrailer(); t != nil {
			return t, digest.check(path, t.GetDigest())
		}
	}
}

// ArchiveOptions say how an archive is unpacked.
type ArchiveOptions struct {
	// Parents makes the directory, and what is missing above it.
	Parents bool
	// KeepOwners takes the numeric owners in the archive; otherwise all is Owner's, or the sandbox's user's.
	KeepOwners bool
	Owner      string
}

// WriteArchive unpacks a tar archive into a directory. After an error a part may be there.
func (f *Files) WriteArchive(ctx context.Context, path string, r io.Reader, opts ArchiveOptions) (*dormousev1.ArchiveTrailer, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := f.c.files.WriteArchive(ctx)
	if err != nil {
		return nil, err
	}
	open := &dormousev1.WriteArchiveOpen{SandboxUid: f.Sandbox, Path: path, CreateParents: opts.Parents, KeepOwners: opts.KeepOwners, Owner: opts.Owner, User: f.User}
	// A send that failed says less than what is received then.
	if err := stream.Send(&dormousev1.WriteArchiveRequest{Event: &dormousev1.WriteArchiveRequest_Open{Open: open}}); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	if _, err := stream.Recv(); err != nil {
		return nil, ended(err)
	}
	digest := newDigest()
	buf := make([]byte, pieceBytes)
	for {
		n, err := io.ReadFull(r, buf)
		if n > 0 {
			digest.Write(buf[:n])
			if err := stream.Send(&dormousev1.WriteArchiveRequest{Event: &dormousev1.WriteArchiveRequest_Data{Data: buf[:n]}}); err != nil {
				break // what is received says why
			}
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			if err := stream.CloseSend(); err != nil {
				return nil, err
			}
			break
		}
		if err != nil {
			return nil, err
		}
	}
	resp, err := stream.Recv()
	if err != nil {
		return nil, ended(err)
	}
	return resp.GetDone(), digest.check(path, resp.GetDone().GetDigest())
}

// ended makes an error of a stream that ended without one before it was done.
func ended(err error) error {
	if errors.Is(err, io.EOF) {
		return errs.New(errs.ReplyLost, "the transfer ended before it was done; look what is there")
	}
	return err
}
