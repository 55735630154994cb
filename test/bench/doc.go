// Package bench measures Dormouse against its own floor: what runsc alone does on the same machine, in the
// same minute, with the same bundle, image, guest init and spec.
//
// # How a figure is made
//
//   - Each benchmark starts a cluster of its own (package cluster) and takes the product's path and the
//     bare one in turn, so that whatever else the machine does weighs on both alike.
//   - A time is a median, with its 95th percentile beside it. What counts is the ratio.
//   - The bare path gets what the product has to prepare: a ready network namespace, FIFOs that exist,
//     the spec that agentd wrote for a sandbox of its own, a control group's path. A bare start ends when
//     guest init has answered a hello that waited in its FIFO, for a sandbox of the product is Running
//     no earlier.
//   - A target that is missed is a result, not an error; an error is a benchmark that could not run.
//
// # Where the results are
//
// Run writes the rows of a benchmark to bench/results/<name>.json and all there are to bench/RESULTS.md.
package bench
