package cluster

import (
	"context"
	"errors"
	"strings"

	goredis "github.com/redis/go-redis/v9"
)

// Holders of the coordinators' leases.
const holder, standbyHolder = "coordinator-1", "coordinator-2"

// EndLease has the lease of the coordinator, which is dead, run out now. Leases here are longer than a busy machine
// stands still, so that no term ends by chance; who takes over from a killed coordinator would wait for one. The
// lease of another coordinator is left alone.
func (c *Cluster) EndLease(ctx context.Context) (err error) {
	store := goredis.NewClient(&goredis.Options{Network: "unix", Addr: c.RedisSocket()})
	defer func() { err = errors.Join(err, store.Close()) }()
	keys, err := store.Keys(ctx, "*:leader").Result()
	if err != nil {
		return err
	}
	for _, key := range keys {
		who, err := store.HGet(ctx, key, "h").Result()
		if err != nil {
			return err
		}
		if strings.HasPrefix(who, holder+"/") {
			if err := store.Del(ctx, strings.TrimSuffix(key, "leader")+"lease").Err(); err != nil {
				return err
			}
		}
	}
	return nil
}
