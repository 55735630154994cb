package main

import (
	"context"
	"fmt"

	"github.com/dormouse-run/dormouse/pkg/command"
)

// remover is what can be deleted.
type remover interface {
	Delete(ctx context.Context, operationID string) error
}

// removeEach deletes every argument and prints the uids of those that are gone. With --force those
// that are not there are no error.
func removeEach(c call, find func(ref string) (remover, string, error)) error {
	op, err := operationOf(c.Context)
	if err != nil {
		return err
	}
	if c.IsSet("operation-id") && c.Args().Len() > 1 {
		return command.Usage(c.Context, "--operation-id is for one object")
	}
	return each(c, func(ref string) error {
		r, uid, err := find(ref)
		if err == nil {
			id := op
			if c.Args().Len() > 1 {
				id = ""
			}
			err = r.Delete(c.ctx, id)
		}
		if err != nil {
			if c.Bool("force") && notThere(err) {
				return nil
			}
			return err
		}
		_, err = fmt.Fprintln(c.App.Writer, uid)
		return err
	})
}
