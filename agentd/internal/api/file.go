package api

import (
	"context"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"io"
	"path"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/dormouse-run/dormouse/agentd/internal/bulk"
	"github.com/dormouse-run/dormouse/agentd/internal/bulkwire"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/wire"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// FileSandboxes moves bytes in and out of what runs.
type FileSandboxes interface {
	// Transfer starts a transfer with a running sandbox; the caller closes it.
	Transfer(ctx context.Context, sandboxUID string, order bulkwire.Order) (*bulk.Transfer, error)
	Defaults(sandboxUID string) (Defaults, error)
}

// Files implements dormouse.v1.FileService.
type Files struct {
	dormousev1.UnimplementedFileServiceServer

	Sandboxes FileSandboxes
}

const (
	maxFilePath    = 4096
	maxUploadID    = 64
	maxFileData    = 1 << 20
	maxArchiveName = 255
	defaultPage    = 100
	maxPage        = 500
	permissionBits = 0o7777
	digestPrefix   = "sha256:"
)

func checkFilePath(field, p string) error {
	switch {
	case p == "" || p[0] != '/':
		return errs.New(errs.InvalidField, "%s: %q is no absolute path inside the sandbox", field, p).With("field", field)
	case len(p) > maxFilePath:
		return errs.New(errs.LimitExceeded, "%s: %d bytes, at most %d", field, len(p), maxFilePath).With("field", field).
			With("limit", strconv.Itoa(maxFilePath)).With("got", strconv.Itoa(len(p)))
	case strings.ContainsRune(p, 0):
		return errs.New(errs.InvalidField, "%s: a path has no zero byte", field).With("field", field)
	}
	return nil
}

func checkUser(field, user string) error { return wire.FromProblem(sandbox.ValidateUser(field, user)) }

func checkMode(field string, mode uint32) error {
	if mode > permissionBits {
		return errs.New(errs.InvalidField, "%s: %#o has more than permission bits; at most %#o", field, mode, permissionBits).With("field", field)
	}
	return nil
}

func checkCount(field string, n int64) error {
	if n < 0 {
		return errs.New(errs.InvalidField, "%s: must not be negative", field).With("field", field)
	}
	return nil
}

// digestHex takes the prefix off a digest; "" stays "".
func digestHex(field, digest string) (string, error) {
	if digest == "" {
		return "", nil
	}
	sum, ok := strings.CutPrefix(digest, digestPrefix)
	if raw, err := hex.DecodeString(sum); !ok || err != nil || len(raw) != 32 || sum != strings.ToLower(sum) {
		return "", errs.New(errs.InvalidField, "%s: %q is no digest (sha256: and 64 hexadecimal digits)", field, digest).With("field", field)
	}
	return sum, nil
}

func checkUploadID(field, id string, resume bool) error {
	if resume && id == "" {
		return errs.New(errs.InvalidField, "%s: name the write that is to be taken up", field).With("field", field)
	}
	for _, r := range id {
		if !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '-') {
			return errs.New(errs.InvalidField, "%s: letters, digits and dashes", field).With("field", field)
		}
	}
	if len(id) > maxUploadID {
		return errs.New(errs.LimitExceeded, "%s: at most %d characters", field, maxUploadID).With("field", field).With("limit", strconv.Itoa(maxUploadID))
	}
	return nil
}

var fileTypes = map[bulkwire.Type]dormousev1.FileType{
	bulkwire.File: dormousev1.FileType_FILE_TYPE_FILE, bulkwire.Directory: dormousev1.FileType_FILE_TYPE_DIRECTORY,
	bulkwire.Symlink: dormousev1.FileType_FILE_TYPE_SYMLINK, bulkwire.Other: dormousev1.FileType_FILE_TYPE_OTHER,
}

func fileToProto(i *bulkwire.Info) *dormousev1.FileInfo {
	if i == nil {
		return &dormousev1.FileInfo{}
	}
	return &dormousev1.FileInfo{
		Path: i.Path, Name: i.Name, Type: fileTypes[i.Type], SizeBytes: i.Size, Mode: i.Mode & permissionBits, Uid: i.UID, Gid: i.GID,
		ModifyTime: timestamppb.New(time.Unix(0, i.MTime)), LinkTarget: i.Target, Version: i.Version,
	}
}

// once does an order that is answered at once, if answer is not nil with one answer before its result.
func (s *Files) once(ctx context.Context, uid string, order bulkwire.Order, answer, result any) error {
	t, err := s.Sandboxes.Transfer(ctx, uid, order)
	if err != nil {
		return err
	}
	defer t.Close()
	if answer != nil {
		if err := t.Answer(answer); err != nil {
			return early(t, err)
		}
	}
	return t.Result(result)
}

// early says what an end is that came before its answer.
func early(t *bulk.Transfer, err error) error {
	if errors.Is(err, io.EOF) {
		return t.Garbled()
	}
	return err
}

// StatFile implements FileService.
func (s *Files) StatFile(ctx context.Context, req *dormousev1.StatFileRequest) (*dormousev1.StatFileResponse, error) {
	if err := first(checkUID("sandbox_uid", req.GetSandboxUid()), checkFilePath("path", req.GetPath()), checkUser("user", req.GetUser())); err != nil {
		return nil, err
	}
	var info bulkwire.Info
	err := s.once(ctx, req.GetSandboxUid(), bulkwire.Order{Op: bulkwire.Stat, Path: req.GetPath(), NoFollow: req.GetNoFollow(), User: req.GetUser()}, &info, nil)
	if err != nil {
		return nil, err
	}
	return &dormousev1.StatFileResponse{Info: fileToProto(&info)}, nil
}

// ListFiles implements FileService.
func (s *Files) ListFiles(ctx context.Context, req *dormousev1.ListFilesRequest) (*dormousev1.ListFilesResponse, error) {
	after, err := base64.RawURLEncoding.DecodeString(req.GetPageToken())
	if err != nil || len(after) > maxFilePath {
		err = errs.New(errs.InvalidField, "page_token: not one of this server's; begin again without it").With("field", "page_token")
	}
	size := int(req.GetPageSize())
	if size < 0 || size > maxPage {
		err = first(err, errs.New(errs.InvalidField, "page_size: %d; use 1 to %d, or 0 for %d", size, maxPage, defaultPage).With("field", "page_size"))
	}
	if size == 0 {
		size = defaultPage
	}
	if err := first(checkUID("sandbox_uid", req.GetSandboxUid()), checkFilePath("path", req.GetPath()), checkUser("user", req.GetUser()), err); err != nil {
		return nil, err
	}
	t, err := s.Sandboxes.Transfer(ctx, req.GetSandboxUid(), bulkwire.Order{Op: bulkwire.List, Path: req.GetPath(), After: after, Limit: size, User: req.GetUser()})
	if err != nil {
		return nil, err
	}
	defer t.Close()
	resp := &dormousev1.ListFilesResponse{}
	for {
		var part bulkwire.Entries
		err := t.Answer(&part)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		for i := range part.Entries {
			resp.Files = append(resp.Files, fileToProto(&part.Entries[i]))
		}
		if len(resp.GetFiles()) > size {
			return nil, t.Garbled()
		}
	}
	var end bulkwire.Listed
	if err := t.Result(&end); err != nil {
		return nil, err
	}
	resp.NextPageToken = base64.RawURLEncoding.EncodeToString(end.Next)
	return resp, nil
}

// MakeDirectory implements FileService.
func (s *Files) MakeDirectory(ctx context.Context, req *dormousev1.MakeDirectoryRequest) (*dormousev1.MakeDirectoryResponse, error) {
	err := first(checkUID("sandbox_uid", req.GetSandboxUid()), checkFilePath("path", req.GetPath()), checkMode("mode", req.GetMode()),
		checkUser("owner", req.GetOwner()), checkUser("user", req.GetUser()))
	if err != nil {
		return nil, err
	}
	d, err := s.Sandboxes.Defaults(req.GetSandboxUid())
	if err != nil {
		return nil, err
	}
	var done bulkwire.Done
	err = s.once(ctx, req.GetSandboxUid(), bulkwire.Order{
		Op: bulkwire.MakeDir, Path: req.GetPath(), Mode: req.GetMode(), HasMode: req.Mode != nil, Owner: req.GetOwner(), DefaultOwner: d.User,
		Parents: req.GetCreateParents(), User: req.GetUser(),
	}, nil, &done)
	if err != nil {
		return nil, err
	}
	return &dormousev1.MakeDirectoryResponse{Info: fileToProto(done.Info)}, nil
}

// RemoveFile implements FileService.
func (s *Files) RemoveFile(ctx context.Context, req *dormousev1.RemoveFileRequest) (*dormousev1.RemoveFileResponse, error) {
	if err := first(checkUID("sandbox_uid", req.GetSandboxUid()), checkFilePath("path", req.GetPath()), checkUser("user", req.GetUser())); err != nil {
		return nil, err
	}
	err := s.once(ctx, req.GetSandboxUid(), bulkwire.Order{Op: bulkwire.Remove, Path: req.GetPath(), Recursive: req.GetRecursive(), User: req.GetUser()}, nil, nil)
	if err != nil {
		return nil, err
	}
	return &dormousev1.RemoveFileResponse{}, nil
}

// MoveFile implements FileService.
func (s *Files) MoveFile(ctx context.Context, req *dormousev1.MoveFileRequest) (*dormousev1.MoveFileResponse, error) {
	err := first(checkUID("sandbox_uid", req.GetSandboxUid()), checkFilePath("path", req.GetPath()), checkFilePath("new_path", req.GetNewPath()), checkUser("user", req.GetUser()))
	if err != nil {
		return nil, err
	}
	var done bulkwire.Done
	err = s.once(ctx, req.GetSandboxUid(), bulkwire.Order{Op: bulkwire.Move, Path: req.GetPath(), To: req.GetNewPath(), Replace: req.GetReplace(), User: req.GetUser()}, nil, &done)
	if err != nil {
		return nil, err
	}
	return &dormousev1.MoveFileResponse{Info: fileToProto(done.Info)}, nil
}

// WatchFiles implements FileService.
func (s *Files) WatchFiles(req *dormousev1.WatchFilesRequest, stream grpc.ServerStreamingServer[dormousev1.WatchFilesResponse]) error {
	if err := first(checkUID("sandbox_uid", req.GetSandboxUid()), checkFilePath("path", req.GetPath()), checkUser("user", req.GetUser())); err != nil {
		return err
	}
	t, err := s.Sandboxes.Transfer(stream.Context(), req.GetSandboxUid(), bulkwire.Order{Op: bulkwire.Watch, Path: path.Clean(req.GetPath()), Recursive: req.GetRecursive(), User: req.GetUser()})
	if err != nil {
		return err
	}
	defer t.Close()
	for {
		var events bulkwire.Events
		err := t.Answer(&events)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := stream.Send(eventsToProto(events)); err != nil {
			return err
		}
	}
}

var fileChanges = map[bulkwire.Change]dormousev1.FileChange{
	bulkwire.Created: dormousev1.FileChange_FILE_CHANGE_CREATED, bulkwire.Modified: dormousev1.FileChange_FILE_CHANGE_MODIFIED,
	bulkwire.Removed: dormousev1.FileChange_FILE_CHANGE_REMOVED, bulkwire.MovedFrom: dormousev1.FileChange_FILE_CHANGE_MOVED_FROM,
	bulkwire.MovedTo: dormousev1.FileChange_FILE_CHANGE_MOVED_TO, bulkwire.Changed: dormousev1.FileChange_FILE_CHANGE_ATTRIBUTES,
}

func eventsToProto(events bulkwire.Events) *dormousev1.WatchFilesResponse {
	resp := &dormousev1.WatchFilesResponse{Overflow: events.Overflow}
	for _, e := range events.Events {
		resp.Events = append(resp.Events, &dormousev1.FileEvent{Path: e.Path, Change: fileChanges[e.What], Directory: e.Dir})
	}
	return resp
}
