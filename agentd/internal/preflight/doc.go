// Package preflight knows what a host must have for a number of sandboxes: it compares the host's limits with what they need, raises what it
// may, and says how many sandboxes the host allows, so that a limit is never met for the first time by the sandbox that goes past it.
//
// # What is needed
//
// Each limit needs Base + Per * sandboxes. Where a figure was measured it says so, else it is an allowance:
//
//	kernel.pid_max, kernel.threads-max   8192 + 48 N   measured: 13 threads an idle sandbox, 5 more with a gofer, 41 to 48 after a restore
//	RLIMIT_NOFILE of agentd              1024 + 8 N    counted: 3 FIFOs, 2 pidfds, and what a call into a sandbox opens
//	fs.file-max                          16384 + 128 N allowance
//	vm.max_map_count                     65530         the kernel's own default, of each process
//	user.max_*_namespaces                256 + 2 N     one of a kind a sandbox, and those that are kept ready
//	fs.mount-max                         4096 + 4 N    counted: the namespace's file, and what runsc mounts on the host
//	net.netfilter.nf_conntrack_max       4096 + 64 N   allowance; only with outbound networks, and once the module is there
//
// # Not looked at, since it does not bite
//
// The kernel's EROFS and loop devices: gVisor maps the file itself. /dev/kvm: the platform is systrap. inotify: agentd and its sandboxes watch
// nothing with it. The neighbour tables' gc_thresh: the neighbours of outbound networks are permanent entries, which are not counted.
//
// # Verdicts
//
//	ok       enough for so many sandboxes
//	raise    too low; whoever runs with --fix, or agentd when it starts, raises it
//	lower    too low, and not to be raised from here: the host takes only Sandboxes of them
//	refuse   no sandbox can run here
package preflight
