package client

import (
	"context"
	"errors"
	"io"
	"iter"

	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// Image is a handle: the digest of a manifest or index, and what was last seen of it on the nodes.
type Image struct {
	c      *Client
	Digest string
	Last   *dormousev1.Image // nil until it was read
}

// Image gives the handle of a digest without asking the server.
func (c *Client) Image(digest string) *Image { return &Image{c: c, Digest: digest} }

func (c *Client) seenImage(i *dormousev1.Image) *Image {
	return &Image{c: c, Digest: i.GetDigest(), Last: i}
}

// PullImage brings an image to a node, or with an empty node to every online one. The progress
// (may be nil) is called from this goroutine. An image that is there already costs a look.
func (c *Client) PullImage(ctx context.Context, reference, node string, progress func(*dormousev1.PullProgress)) (*Image, error) {
	return retry(ctx, func(ctx context.Context) (*Image, error) { return c.pull(ctx, reference, node, progress) })
}

func (c *Client) pull(ctx context.Context, reference, node string, progress func(*dormousev1.PullProgress)) (*Image, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.images.PullImage(ctx, &dormousev1.PullImageRequest{Reference: reference, Node: node})
	if err != nil {
		return nil, err
	}
	var image *Image
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
			image = c.seenImage(ev.GetImage())
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

// FindImage gives the image of a digest or a reference, if a node has it.
func (c *Client) FindImage(ctx context.Context, ref string) (*Image, error) {
	for image, err := range c.ListImages(ctx) {
		if err != nil {
			return nil, err
		}
		if image.GetDigest() == ref || image.GetReference() == ref {
			return c.seenImage(image), nil
		}
	}
	return nil, errs.New(errs.ObjectNotFound, "no node has the image %q", ref).With("kind", "image").With("name", ref)
}

// Refresh reads what nodes have of the image.
func (i *Image) Refresh(ctx context.Context) error {
	found, err := i.c.FindImage(ctx, i.Digest)
	if err != nil {
		return err
	}
	i.Last = found.Last
	return nil
}

// Delete removes the image from every node where nothing holds it. Images belong to no tenant: it is the
// operator's call.
func (i *Image) Delete(ctx context.Context) error {
	_, err := retry(ctx, func(ctx context.Context) (*dormousev1.DeleteImageResponse, error) {
		return i.c.images.DeleteImage(ctx, &dormousev1.DeleteImageRequest{Digest: i.Digest})
	})
	return err
}
