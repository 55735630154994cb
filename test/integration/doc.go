// Package integration tests Dormouse as its users meet it: the real daemons on real Redis, registry,
// containerd and runsc, through the public API. It has tests only.
//
// All tests share one cluster of two nodes, which the first of them starts. They run one after the
// other, each as a tenant of its own. A test that ends a daemon starts it again before it is
// over, and each test leaves the cluster empty: when it ends, its objects are deleted and both
// nodes are searched, by the doctor and without it, for anything that is left.
package integration
