package api

import (
	"errors"
	"io"
	"strconv"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/dormouse-run/dormouse/agentd/internal/bulk"
	"github.com/dormouse-run/dormouse/agentd/internal/bulkwire"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/wire"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// ReadFile implements FileService. It holds one piece of the file at a time.
func (s *Files) ReadFile(req *dormousev1.ReadFileRequest, stream grpc.ServerStreamingServer[dormousev1.ReadFileResponse]) error {
	err := first(checkUID("sandbox_uid", req.GetSandboxUid()), checkFilePath("path", req.GetPath()), checkCount("offset", req.GetOffset()),
		checkCount("length", req.GetLength()), checkUser("user", req.GetUser()), checkVersion(req.GetVersion()))
	if err != nil {
		return err
	}
	t, err := s.Sandboxes.Transfer(stream.Context(), req.GetSandboxUid(), bulkwire.Order{
		Op: bulkwire.Read, Path: req.GetPath(), Offset: req.GetOffset(), Length: req.GetLength(), Version: req.GetVersion(),
		HashAll: req.GetDigestFromStart(), User: req.GetUser(),
	})
	if err != nil {
		return err
	}
	defer t.Close()
	var info bulkwire.Info
	if err := t.Answer(&info); err != nil {
		return early(t, err)
	}
	if err := stream.Send(&dormousev1.ReadFileResponse{Event: &dormousev1.ReadFileResponse_Header{Header: fileToProto(&info)}}); err != nil {
		return err
	}
	done, err := sendAll(t, stream)
	if err != nil {
		return err
	}
	return stream.Send(&dormousev1.ReadFileResponse{Event: &dormousev1.ReadFileResponse_Trailer{
		Trailer: &dormousev1.ReadFileTrailer{SizeBytes: done.Bytes, Digest: digestPrefix + done.Digest},
	}})
}

func checkVersion(version string) error {
	if len(version) > 64 {
		return errs.New(errs.LimitExceeded, "version: at most 64 characters").With("field", "version").With("limit", "64")
	}
	return nil
}

// dataField is the number of the field of bytes in all messages that carry a part of a file or an archive.
const dataField = 2

// sendAll passes on all that the helper sends, in the memory in which it came.
func sendAll(t *bulk.Transfer, stream grpc.ServerStream) (done bulkwire.Done, err error) {
	for {
		data, err := t.Next()
		if errors.Is(err, io.EOF) {
			err = t.Result(&done)
			return done, err
		}
		if err != nil {
			return done, err
		}
		piece := wire.NewOutgoing(dataField, t.Swap(wire.Room()), len(data))
		err = stream.SendMsg(piece)
		piece.Free()
		if err != nil {
			return done, err
		}
	}
}

// receiveAll passes on all that the client sends, up to the close of its side. A message that is no data is decoded
// into msg, and opens tells whether it opens.
func receiveAll(t *bulk.Transfer, stream grpc.ServerStream, msg proto.Message, opens func() bool) (done bulkwire.Done, err error) {
	piece := wire.Incoming{Field: dataField, Message: msg}
	defer piece.Free()
	for {
		err := stream.RecvMsg(&piece)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return done, err
		}
		parts, size, ok := piece.Bytes()
		switch {
		case !ok && opens():
			return done, notOpen(true)
		case size > maxFileData:
			return done, errs.New(errs.LimitExceeded, "data: %d bytes in a message, at most %d", size, maxFileData).With("field", "data").
				With("limit", strconv.Itoa(maxFileData)).With("got", strconv.Itoa(size))
		case size > 0:
			if err := t.WriteParts(parts, size); err != nil {
				return done, t.Verdict(err)
			}
		}
	}
	if err := t.CloseWrite(); err != nil {
		return done, t.Verdict(err)
	}
	err = t.Result(&done)
	return done, err
}

func notOpen(second bool) error {
	if second {
		return errs.New(errs.InvalidField, "open: only the first message opens; send data").With("field", "open")
	}
	return errs.New(errs.InvalidField, "open: the first message says what is written where").With("field", "open")
}

// WriteFile implements FileService.
func (s *Files) WriteFile(stream grpc.BidiStreamingServer[dormousev1.WriteFileRequest, dormousev1.WriteFileResponse]) error {
	msg, err := stream.Recv()
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	open := msg.GetOpen()
	if open == nil {
		return notOpen(false)
	}
	order, err := s.writeOrder(open)
	if err != nil {
		return err
	}
	t, err := s.Sandboxes.Transfer(stream.Context(), open.GetSandboxUid(), order)
	if err != nil {
		return err
	}
	defer t.Close()
	var opened bulkwire.Opened
	if err := t.Answer(&opened); err != nil {
		return early(t, err)
	}
	err = stream.Send(&dormousev1.WriteFileResponse{Event: &dormousev1.WriteFileResponse_Opened{Opened: &dormousev1.WriteFileOpened{Offset: opened.Offset, PartPath: opened.Part}}})
	if err != nil {
		return err
	}
	done, err := receiveAll(t, stream, msg, func() bool { return msg.GetOpen() != nil })
	if err != nil {
		return err
	}
	return stream.Send(&dormousev1.WriteFileResponse{Event: &dormousev1.WriteFileResponse_Done{
		Done: &dormousev1.WriteFileDone{Info: fileToProto(done.Info), Digest: digestPrefix + done.Digest},
	}})
}

func (s *Files) writeOrder(open *dormousev1.WriteFileOpen) (bulkwire.Order, error) {
	digest, err := digestHex("open.expected_digest", open.GetExpectedDigest())
	err = first(checkUID("open.sandbox_uid", open.GetSandboxUid()), checkFilePath("open.path", open.GetPath()), checkMode("open.mode", open.GetMode()),
		checkUser("open.owner", open.GetOwner()), checkUser("open.user", open.GetUser()), checkCount("open.size_hint_bytes", open.GetSizeHintBytes()),
		checkUploadID("open.upload_id", open.GetUploadId(), open.GetResume()), err)
	if err != nil {
		return bulkwire.Order{}, err
	}
	d, err := s.Sandboxes.Defaults(open.GetSandboxUid())
	return bulkwire.Order{
		Op: bulkwire.Write, Path: open.GetPath(), Mode: open.GetMode(), HasMode: open.Mode != nil, Owner: open.GetOwner(), DefaultOwner: d.User,
		Parents: open.GetCreateParents(), Size: open.GetSizeHintBytes(), Digest: digest, Upload: open.GetUploadId(), Resume: open.GetResume(), User: open.GetUser(),
	}, err
}

// ReadArchive implements FileService.
func (s *Files) ReadArchive(req *dormousev1.ReadArchiveRequest, stream grpc.ServerStreamingServer[dormousev1.ReadArchiveResponse]) error {
	err := first(checkUID("sandbox_uid", req.GetSandboxUid()), checkFilePath("path", req.GetPath()), checkUser("user", req.GetUser()), checkArchiveName(req.GetName()))
	if err != nil {
		return err
	}
	t, err := s.Sandboxes.Transfer(stream.Context(), req.GetSandboxUid(), bulkwire.Order{Op: bulkwire.Pack, Path: req.GetPath(), Name: req.GetName(), User: req.GetUser()})
	if err != nil {
		return err
	}
	defer t.Close()
	var info bulkwire.Info
	if err := t.Answer(&info); err != nil {
		return early(t, err)
	}
	if err := stream.Send(&dormousev1.ReadArchiveResponse{Event: &dormousev1.ReadArchiveResponse_Header{Header: fileToProto(&info)}}); err != nil {
		return err
	}
	done, err := sendAll(t, stream)
	if err != nil {
		return err
	}
	return stream.Send(&dormousev1.ReadArchiveResponse{Event: &dormousev1.ReadArchiveResponse_Trailer{Trailer: trailer(done)}})
}

func trailer(done bulkwire.Done) *dormousev1.ArchiveTrailer {
	return &dormousev1.ArchiveTrailer{Entries: done.Entries, SizeBytes: done.Bytes, Digest: digestPrefix + done.Digest}
}

func checkArchiveName(name string) error {
	if len(name) > maxArchiveName || name == ".." || strings.ContainsAny(name, "/\x00") {
		return errs.New(errs.InvalidField, "name: one element of a path, at most %d bytes, or \".\"", maxArchiveName).With("field", "name")
	}
	return nil
}

// WriteArchive implements FileService.
func (s *Files) WriteArchive(stream grpc.BidiStreamingServer[dormousev1.WriteArchiveRequest, dormousev1.WriteArchiveResponse]) error {
	msg, err := stream.Recv()
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	open := msg.GetOpen()
	if open == nil {
		return notOpen(false)
	}
	err = first(checkUID("open.sandbox_uid", open.GetSandboxUid()), checkFilePath("open.path", open.GetPath()),
		checkUser("open.owner", open.GetOwner()), checkUser("open.user", open.GetUser()))
	if err != nil {
		return err
	}
	d, err := s.Sandboxes.Defaults(open.GetSandboxUid())
	if err != nil {
		return err
	}
	t, err := s.Sandboxes.Transfer(stream.Context(), open.GetSandboxUid(), bulkwire.Order{
		Op: bulkwire.Unpack, Path: open.GetPath(), Parents: open.GetCreateParents(), KeepOwners: open.GetKeepOwners(), Owner: open.GetOwner(),
		DefaultOwner: d.User, User: open.GetUser(),
	})
	if err != nil {
		return err
	}
	defer t.Close()
	if err := t.Answer(nil); err != nil {
		return early(t, err)
	}
	if err := stream.Send(&dormousev1.WriteArchiveResponse{Event: &dormousev1.WriteArchiveResponse_Opened{Opened: &dormousev1.WriteArchiveOpened{}}}); err != nil {
		return err
	}
	done, err := receiveAll(t, stream, msg, func() bool { return msg.GetOpen() != nil })
	if err != nil {
		return err
	}
	return stream.Send(&dormousev1.WriteArchiveResponse{Event: &dormousev1.WriteArchiveResponse_Done{Done: trailer(done)}})
}
