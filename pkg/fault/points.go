package fault

import "slices"

// steps are those of making a sandbox, in their order.
var steps = []string{"image", "volumes", "folder", "network", "spec", "runtime", "guest", "main", "running"}

// around gives both points of each step.
func around(area string, steps ...string) []string {
	out := make([]string, 0, 2*len(steps))
	for _, s := range steps {
		out = append(out, area+"."+s+".before", area+"."+s+".after")
	}
	return out
}

// after gives the point behind each step.
func after(area string, steps ...string) []string {
	out := make([]string, 0, len(steps))
	for _, s := range steps {
		out = append(out, area+"."+s+".after")
	}
	return out
}

// Agentd lists the fault points of agentd.
func Agentd() []string {
	return slices.Concat(
		// The runner's steps: start and restore make a sandbox by them, delete undoes them from the last to the first.
		around("start", append([]string{"intent"}, steps...)...),
		around("restore", append([]string{"intent"}, steps...)...),
		around("delete", append([]string{"intent"}, steps...)...),
		after("delete", "record"),
		// The runsc driver: its own record, the control group, runsc itself, the record of the process; and back.
		after("runtime", "recorded", "group", "launched", "attached"),
		after("runtime", "killed", "deleted", "ungrouped", "forgotten"),
		// A sandbox is asked to stand still, or to go on; and what the next agentd makes of one that was cut short.
		around("runtime", "turn"),
		[]string{"runtime.save.before"},
		after("runtime", "turned", "unturned"),
		// A capture, and the artefact's way from staging to its place.
		after("checkpoint", "intent", "hold", "freezing"),
		around("checkpoint", "pause"),
		after("checkpoint", "save"),
		around("checkpoint", "resume"),
		around("checkpoint", "record"),
		after("artefact", "stage", "manifest", "rename"),
		after("snapshot", "intent", "trash", "artefact", "image", "record"),
		around("stop", "record"),
		// A pause in memory, and its end.
		after("pause", "intent", "frozen", "record"),
		after("resume", "intent", "thawed", "record"),
		// A claim is a resume, in which the guest takes a new identity.
		after("claim", "told"),
		// A hibernation, and the way back: the steps of a restore, then the artefact goes. And the deletion of what is hibernated.
		after("hibernate", "intent", "frozen", "saved", "record", "released"),
		after("wake", "intent", "running", "dropped"),
		after("delete", "artefact"),
		// Volumes, created and cloned alike.
		after("volume", "record", "stage", "fill", "meta", "rename"),
		around("volume", "attach", "detach", "trash"),
		after("volume", "emptied", "forget"),
		// The outbound network: the table at the start, a device for the pool, a sandbox's policy, and back.
		after("network", "table", "link"),
		around("network", "policy"),
		after("network", "repolicy", "unpolicy", "unlink"),
		// Another policy while it lives: recorded, in force, and that it is.
		after("egress", "intent", "policy", "record"),
		// Images: the pull into containerd, the conversion, and who holds the result.
		after("image", "pull", "stage", "build", "file", "record", "alias", "hold", "release"),
		after("image", "unrecord", "unlink", "layers"),
		// The node's own records of whose commands it takes and what they gave.
		after("command", "admit"),
		around("command", "keep"),
		after("session", "epoch"),
		around("journal", "apply"),
		// The start of agentd: what is recorded, against what is there.
		around("recover", "images", "volumes", "artefacts", "reconcile"),
		after("recover", "snapshot", "sandbox", "resume"),
		// One thing that the doctor removes.
		around("doctor", "fix"),
	)
}

// Coordinator lists the fault points of the coordinator. A commit is one batch of the commit queue: before its script is sent, and after it
// ran, when nobody has heard yet. A node command is known by its step.
func Coordinator() []string {
	return slices.Concat(
		around("commit", "send"),
		around("node", "start", "restore", "checkpoint", "pause", "resume", "hibernate", "update", "setup", "claim", "delete", "delete-snapshot", "delete-volume", "volume"),
		around("operation", "drive"),
		// A catalog that came back older: suspended, put right record by record, taken into service.
		around("catalog", "suspend", "resume"),
		// A server that was started writes its log anew before anything else is written: asked, and done.
		around("catalog", "renew"),
		after("catalog", "renew-asked"),
		around("repair", "commit"),
		// What a node still has although it was deleted: suspected, proven, removed by the node, and said.
		after("orphan", "suspect", "proof"),
		around("orphan", "remove", "adopt"),
		after("orphan", "event"),
		// A backup that is put into an empty catalog.
		around("restore", "begin", "records", "end"),
		[]string{"operation.reply.before", "term.lead.after", "term.load.after"},
	)
}
