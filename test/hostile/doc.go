// Package hostile attacks a running Dormouse from inside its sandboxes and at its door. It has tests
// only.
//
// They share one cluster of one node, whose runtime bundle has a guest init that is the real one in
// most sandboxes and an enemy in those whose host name says so. Each attack must cost its own sandbox
// and nothing else: the node agent is the same process afterwards, with bounded memory and
// descriptors, other sandboxes answer and can be checkpointed meanwhile, the hostile one can be
// deleted, and the doctor finds nothing.
package hostile
