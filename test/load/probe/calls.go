// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"context"
	"errors"
	"io"
	"time"

	"google.golang.org/grpc"
)

// FailedCalls has failed told of each call of a client that fails, those too that the client library tries again: with the call's
// context, its method, when it began, and the error as it came over the wire. A stream that its caller cut short has not failed.
func FailedCalls(failed func(ctx context.Context, method string, began time.Time, err error)) []grpc.DialOption {
	unary := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		began := time.Now()
		err := invoke(ctx, method, req, reply, cc, opts...)
		if err != nil {
			failed(ctx, method, began, err)
		}
		return err
	}
	stream := func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
		began := time.Now()
		s, err := open(ctx, desc, cc, method, opts...)
		if err != nil {
			failed(ctx, method, began, err)
			return nil, err
		}
		return &watched{s, func(err error) {
			// The caller's context: the stream's own ends with the stream, whatever ended it.
			if !errors.Is(err, io.EOF) && ctx.Err() == nil {
				failed(ctx, method, began, err)
			}
		}}, nil
	}
	return []grpc.DialOption{grpc.WithChainUnaryInterceptor(unary), grpc.WithChainStreamInterceptor(stream)}
}

// watched is a stream whose end is told of.
type watched struct {
	grpc.ClientStream
	ended func(error)
}

// RecvMsg implements grpc.ClientStream.
func (w *watched) RecvMsg(m any) error {
	err := w.ClientStream.RecvMsg(m)
	if err != nil {
		w.ended(err)
	}
	return err
}
