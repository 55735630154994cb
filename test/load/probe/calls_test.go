// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"context"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/types/known/emptypb"
)

// Calls and streams that fail are told of, each once; a stream that its caller ends, or that ends well, is not.
func TestF12FailedCallsAreTold(t *testing.T) {
	listener := bufconn.Listen(1 << 16)
	server := grpc.NewServer(grpc.UnknownServiceHandler(func(_ any, s grpc.ServerStream) error {
		switch method, _ := grpc.MethodFromServerStream(s); method {
		case "/t/good":
			return nil
		case "/t/waits":
			<-s.Context().Done()
		}
		return status.Error(codes.Unavailable, "not now")
	}))
	go func() { _ = server.Serve(listener) }() // ends with Stop
	t.Cleanup(server.Stop)
	var mu sync.Mutex
	var told []string
	opts := append(FailedCalls(func(_ context.Context, method string, _ time.Time, err error) {
		mu.Lock()
		defer mu.Unlock()
		told = append(told, method+" "+status.Code(err).String())
	}), grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
	cc, err := grpc.NewClient("passthrough:///bufconn", opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cc.Close() })
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	if err := cc.Invoke(ctx, "/t/call", &emptypb.Empty{}, &emptypb.Empty{}); err == nil {
		t.Error("the call succeeded")
	}
	for _, method := range []string{"/t/stream", "/t/good", "/t/waits"} {
		s, err := cc.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method)
		if err != nil {
			t.Fatal(err)
		}
		if method == "/t/waits" {
			cancel()
		}
		if err := s.RecvMsg(&emptypb.Empty{}); err == nil {
			t.Errorf("%s gave a message", method)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if want := []string{"/t/call Unavailable", "/t/stream Unavailable"}; !slices.Equal(told, want) {
		t.Errorf("told of %q, want %q", told, want)
	}
}
