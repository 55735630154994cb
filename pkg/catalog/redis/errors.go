package redis

import (
	"context"
	"errors"
	"net"
	"strings"

	goredis "github.com/redis/go-redis/v9"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// notExecuted are the replies by which a server says that it did not run the script. OOM, MISCONF
// and READONLY can strike inside one too, but only at its first write.
var notExecuted = []string{
	"NOSCRIPT", "LOADING", "BUSY", "OOM", "MISCONF", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN",
	"MOVED", "ASK", "CROSSSLOT", "NOREPLICAS", "NOAUTH", "WRONGPASS", "NOPERM", "ERR max number of clients",
}

// unsent tells that the command certainly had no effect.
func unsent(err error) bool {
	var op *net.OpError
	if errors.As(err, &op) && op.Op == "dial" {
		return true
	}
	if errors.Is(err, goredis.ErrPoolTimeout) || errors.Is(err, goredis.ErrPoolExhausted) || errors.Is(err, goredis.ErrClosed) {
		return true
	}
	var reply goredis.Error
	if errors.As(err, &reply) {
		for _, prefix := range notExecuted {
			if strings.HasPrefix(reply.Error(), prefix) {
				return true
			}
		}
	}
	return false
}

// writeError is the error of a script that may have changed something.
func writeError(err error) error {
	var typed *errs.Error
	switch {
	case errors.As(err, &typed):
		return typed
	case errors.Is(err, goredis.ErrClosed):
		return closed(err)
	case unsent(err):
		return unavailable(err)
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return errs.From(err)
	}
	return errs.Wrap(err, errs.ReplyLost, "the store's reply was lost; ask again with the same operation id to learn its outcome")
}

// readError is the error of a command that changes nothing.
func readError(err error) error {
	var typed *errs.Error
	switch {
	case errors.As(err, &typed):
		return typed
	case errors.Is(err, goredis.ErrClosed):
		return closed(err)
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return errs.From(err).WithOutcome(errs.NotStarted, errs.AfterBackoff)
	}
	return unavailable(err)
}

func unavailable(err error) error {
	for _, prefix := range []string{"NOAUTH", "WRONGPASS", "NOPERM"} {
		if goredis.HasErrorPrefix(err, prefix) {
			return errs.Wrap(err, errs.StoreUnavailable, "the catalog's store refuses the coordinator's user or password; set those that the server knows, with access to all commands and keys of the catalog")
		}
	}
	return errs.Wrap(err, errs.StoreUnavailable, "the catalog's store cannot be reached or does not accept commands; check that it runs and has memory and disk left")
}

func closed(err error) error {
	return errs.Wrap(err, errs.ShuttingDown, "the catalog is closed; ask another coordinator")
}
