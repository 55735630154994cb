package catalog

// Condition is what a Check asks of a record.
type Condition string

// The conditions. Use the constructors below, which fill the fields that each one needs.
const (
	CondRevision     Condition = "revision"
	CondPhase        Condition = "phase"
	CondIdentity     Condition = "identity"
	CondNamed        Condition = "named"
	CondUnreferenced Condition = "unreferenced"
)

// Check is a condition on a record that the commit does not itself write, or on more than the
// revision of one that it does.
type Check struct {
	Cond     Condition
	Key      Key
	Revision uint64
	Phases   []string
	Identity string
	Name     string
}

// AtRevision wants the record at the revision; 0 wants it absent. Else STALE_REVISION.
func AtRevision(key Key, revision uint64) Check {
	return Check{Cond: CondRevision, Key: key, Revision: revision}
}

// Absent wants no such record. Else STALE_REVISION.
func Absent(key Key) Check { return AtRevision(key, 0) }

// InPhase wants the record in one of the phases, at whatever revision. Else WRONG_PHASE, and
// STALE_UID if there is no such record.
func InPhase(key Key, phases ...string) Check {
	return Check{Cond: CondPhase, Key: key, Phases: phases}
}

// HasIdentity wants the record with the immutable identity. Else IDENTITY_MISMATCH, and STALE_UID
// if there is no such record.
func HasIdentity(key Key, identity string) Check {
	return Check{Cond: CondIdentity, Key: key, Identity: identity}
}

// Named wants the name, among the living of the key's tenant and kind, to be the key's. Else
// STALE_UID with details uid and current_uid ("" when the name is free).
func Named(key Key, name string) Check { return Check{Cond: CondNamed, Key: key, Name: name} }

// Unreferenced wants nothing to refer to the record. Else STILL_REFERENCED.
func Unreferenced(key Key) Check { return Check{Cond: CondUnreferenced, Key: key} }
