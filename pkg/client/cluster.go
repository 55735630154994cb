package client

import (
	"context"
	"errors"
	"io"
	"iter"

	"google.golang.org/protobuf/proto"

	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// PullImage brings an image to a node, or with an empty node to every online one. The progress
// (may be nil) is called from this goroutine.
func (c *Client) PullImage(ctx context.Context, reference, node string, progress func(*dormousev1.PullProgress)) (*dormousev1.Image, error) {
	return retry(ctx, func(ctx context.Context) (*dormousev1.Image, error) { return c.pull(ctx, reference, node, progress) })
}

func (c *Client) pull(ctx context.Context, reference, node string, progress func(*dormousev1.PullProgress)) (*dormousev1.Image, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.images.PullImage(ctx, &dormousev1.PullImageRequest{Reference: reference, Node: node})
	if err != nil {
		return nil, err
	}
	var image *dormousev1.Image
	for {
		ev, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF) && image != nil:
			return image, nil
		case errors.Is(err, io.EOF):
			return nil, errs.New(errs.ReplyLost, "the server ended the pull without a result; pull again")
		case err != nil:
			return nil, err
		}
		if ev.GetImage() != nil {
			image = ev.GetImage()
		} else if p := ev.GetProgress(); p != nil && progress != nil {
			progress(p)
		}
	}
}

// ListImages gives all images that nodes have.
func (c *Client) ListImages(ctx context.Context) iter.Seq2[*dormousev1.Image, error] {
	return pages(func(token string) ([]*dormousev1.Image, string, error) {
		resp, err := retry(ctx, func(ctx context.Context) (*dormousev1.ListImagesResponse, error) {
			return c.images.ListImages(ctx, &dormousev1.ListImagesRequest{PageToken: token})
		})
		return resp.GetImages(), resp.GetNextPageToken(), err
	})
}

// FindImage gives the image of a digest or a reference.
func (c *Client) FindImage(ctx context.Context, ref string) (*dormousev1.Image, error) {
	for image, err := range c.ListImages(ctx) {
		if err != nil {
			return nil, err
		}
		if image.GetDigest() == ref || image.GetReference() == ref {
			return image, nil
		}
	}
	return nil, errs.New(errs.ObjectNotFound, "no node has the image %q", ref).With("kind", "image").With("name", ref)
}

// DeleteImage removes an image, by digest, from every node where nothing holds it.
func (c *Client) DeleteImage(ctx context.Context, digest string) error {
	_, err := retry(ctx, func(ctx context.Context) (*dormousev1.DeleteImageResponse, error) {
		return c.images.DeleteImage(ctx, &dormousev1.DeleteImageRequest{Digest: digest})
	})
	return err
}

// GetNode reads a node.
func (c *Client) GetNode(ctx context.Context, name string) (*dormousev1.Node, error) {
	resp, err := retry(ctx, func(ctx context.Context) (*dormousev1.GetNodeResponse, error) {
		return c.nodes.GetNode(ctx, &dormousev1.GetNodeRequest{Name: name})
	})
	return resp.GetNode(), err
}

// ListNodes gives all nodes.
func (c *Client) ListNodes(ctx context.Context) iter.Seq2[*dormousev1.Node, error] {
	return pages(func(token string) ([]*dormousev1.Node, string, error) {
		resp, err := retry(ctx, func(ctx context.Context) (*dormousev1.ListNodesResponse, error) {
			return c.nodes.ListNodes(ctx, &dormousev1.ListNodesRequest{PageToken: token})
		})
		return resp.GetNodes(), resp.GetNextPageToken(), err
	})
}

// Cordon keeps new work away from a node, or with false lets it come again.
func (c *Client) Cordon(ctx context.Context, name string, cordoned bool, operationID string) (*dormousev1.Node, error) {
	operationID = operation(operationID)
	return retry(ctx, func(ctx context.Context) (*dormousev1.Node, error) {
		if cordoned {
			resp, err := c.nodes.CordonNode(ctx, &dormousev1.CordonNodeRequest{Name: name, OperationId: operationID})
			return resp.GetNode(), err
		}
		resp, err := c.nodes.UncordonNode(ctx, &dormousev1.UncordonNodeRequest{Name: name, OperationId: operationID})
		return resp.GetNode(), err
	})
}

// GetOperation tells what became of an operation.
func (c *Client) GetOperation(ctx context.Context, id string) (*dormousev1.Operation, error) {
	resp, err := retry(ctx, func(ctx context.Context) (*dormousev1.GetOperationResponse, error) {
		return c.operations.GetOperation(ctx, &dormousev1.GetOperationRequest{OperationId: id})
	})
	return resp.GetOperation(), err
}

// ListEvents gives what happened, page by page.
func (c *Client) ListEvents(ctx context.Context, req *dormousev1.ListEventsRequest) iter.Seq2[*dormousev1.Event, error] {
	return pages(func(token string) ([]*dormousev1.Event, string, error) {
		next := proto.CloneOf(req)
		if token != "" {
			next.PageToken = token
		}
		resp, err := retry(ctx, func(ctx context.Context) (*dormousev1.ListEventsResponse, error) {
			return c.events.ListEvents(ctx, next)
		})
		return resp.GetEvents(), resp.GetNextPageToken(), err
	})
}
