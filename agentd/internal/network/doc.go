// Package network prepares what a sandbox needs to be on a network, and takes it back.
//
// There are two modes. ModeNone is loopback only (Pool). ModeOutbound reaches out by NAT and under a policy
// (Outbound). Making a network namespace takes locks of the whole machine, so both keep some ready.
//
// # Lifecycle of a namespace
//
//	made (anonymous, loopback up) -> idle in the pool -> leased to one sandbox -> entered by it -> gone
//
// A namespace has no name and no mount: it lives as long as someone holds it. The pool holds it by a
// descriptor until the lease is released; the sandbox holds it by being in it. So no namespace is left
// behind by an agent that is killed at any line. A namespace is handed out once: the runtime takes the
// addresses out of the namespace that it enters, and a restore needs a fresh one too.
//
// # Outbound
//
// Each sandbox has an address of the node's own range and a veth pair: eth0 inside, and a device in agentd's
// network namespace whose name is made of this agentd (seven characters) and of the address, so that what a
// crash leaves says whose it is. The device is a point-to-point link: there is no bridge between sandboxes, and
// neither ARP nor anything else of one reaches another. A route and a static neighbour for each address are
// all that agentd's side has; the gateway's address is one for all, on a device without ports.
//
// What passes is decided by one nftables table of this agentd's (firewall.go), in agentd's namespace as well. What
// has no policy in it is dropped, and the policy is put there before the runtime starts: no code of the guest
// ever runs without it. The table is the kernel's: it goes on while agentd is away.
//
// Always blocked, whatever the policy says: the node's own addresses (but for the resolver at the gateway), other
// sandboxes, this-network, loopback, link-local and metadata addresses (169.254.0.0/16), multicast, reserved
// and broadcast, a source that is not the sandbox's, and what the node's configuration blocks besides.
// IPv6 is closed: there is no address, it is switched off on both ends, and the table drops it.
//
// # Leases
//
//	address free -> prepared (in memory) -> reserved for a uid (in memory)
//	  -> in the sandbox's record (durable, with its intent) -> policy, device entered
//	  -> policy and device gone (observed) -> record removed -> address free
//
// The durable lease is the sandbox's own record: it is written before the runtime is started, and an address is
// handed out again only when no record has it. So a crash never gives one address to two sandboxes.
//
// # After a crash
//
// Open makes the table anew from the records, in one transaction; connections that go on are known by a
// mark that follows from the policy, and those that the recorded policy forbids are ended (flows.go), as after an
// update. Devices of addresses that no record has are removed: idle namespaces
// ended with their agentd, and took their devices with them, so there is rarely one. Sandboxes that were
// being made are undone by the runner, by their uid.
//
// # Concurrency
//
// One lock guards the leases, one the table; neither is held while namespaces are made. Calls for one uid come
// from its owner, one at a time.
package network
