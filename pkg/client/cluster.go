package client

import (
	"context"
	"iter"

	"google.golang.org/protobuf/proto"

	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

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
