// Package deps holds the modules in go.mod while the code that uses them is being written.
package deps

import (
	_ "github.com/containerd/cgroups/v3"
	_ "github.com/containerd/containerd/v2/client"
	_ "github.com/containerd/errdefs"
	_ "github.com/google/go-cmp/cmp"
	_ "github.com/google/go-containerregistry/pkg/v1/remote"
	_ "github.com/google/uuid"
	_ "github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	_ "github.com/opencontainers/go-digest"
	_ "github.com/opencontainers/image-spec/specs-go/v1"
	_ "github.com/opencontainers/runtime-spec/specs-go"
	_ "github.com/prometheus/client_golang/prometheus/promhttp"
	_ "github.com/redis/go-redis/v9"
	_ "github.com/urfave/cli/v2"
	_ "github.com/vishvananda/netlink"
	_ "github.com/vishvananda/netns"
	_ "go.etcd.io/bbolt"
	_ "go.uber.org/goleak"
	_ "golang.org/x/sync/errgroup"
	_ "golang.org/x/sys/unix"
	_ "golang.org/x/term"
	_ "google.golang.org/genproto/googleapis/api/annotations"
	_ "google.golang.org/grpc"
	_ "google.golang.org/protobuf/proto"
	_ "sigs.k8s.io/yaml"
)
