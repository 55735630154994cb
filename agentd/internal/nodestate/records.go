package nodestate

import (
	"encoding/json"
	"fmt"
	"time"

	bolt "go.etcd.io/bbolt"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/snapshot"
)

// Intent is what agentd is doing with a sandbox. It is written before the first effect.
type Intent string

// The intents. An unfinished start or restore is undone after a crash; an unfinished delete is
// finished; a sandbox that is kept is attached to again.
const (
	IntentStart   Intent = "start"
	IntentRestore Intent = "restore"
	IntentKeep    Intent = "keep"
	IntentDelete  Intent = "delete"
)

// Capture is a checkpoint that is going on. It is written before the sandbox is frozen and removed
// once it runs again; a crash between the two leaves it, and the next agentd lets the sandbox go on.
type Capture struct {
	SnapshotUID string    `json:"snapshot_uid,omitempty"`
	Began       time.Time `json:"began"`
}

// Hibernation says that there may be an artefact under the sandbox's own uid. It is written before the artefact is made and removed
// after the artefact is gone.
type Hibernation struct {
	Began time.Time `json:"began"`
	// From is the phase to go back to if it fails.
	From sandbox.Phase `json:"from"`
	// Released: nothing but the artefact, the volumes and the image is held any more.
	Released bool `json:"released,omitempty"`
	// Spent: the sandbox is not what the artefact shows any more; it is to be removed.
	Spent bool `json:"spent,omitempty"`
}

// Claim says who a sandbox that was restored ahead of need was given to. It is written before the sandbox runs.
type Claim struct {
	// CommandID is the command's: no other gets the sandbox.
	CommandID string `json:"command_id"`
	// Told: the guest has taken its identity, and the sandbox ran after that.
	Told bool `json:"told,omitempty"`
}

// Defaults are what a process of the sandbox gets where its caller says nothing: the image's
// environment with the spec's in it, user and folder. No secret environment.
type Defaults struct {
	Env  []string `json:"env,omitempty"`
	User string   `json:"user,omitempty"`
	Dir  string   `json:"dir,omitempty"`
}

// Sandbox is what the node knows of a sandbox.
type Sandbox struct {
	UID        string       `json:"uid"`
	Tenant     string       `json:"tenant"`
	Name       string       `json:"name,omitempty"`
	Generation int64        `json:"generation"`
	Spec       sandbox.Spec `json:"spec"`
	Created    time.Time    `json:"created"`
	// CommandID is the command that made it.
	CommandID string `json:"command_id"`

	Intent Intent `json:"intent"`
	// Step is the last step whose end was recorded.
	Step  string        `json:"step,omitempty"`
	Phase sandbox.Phase `json:"phase"`

	ImageDigest  string   `json:"image_digest,omitempty"`
	ErofsDigest  string   `json:"erofs_digest,omitempty"`
	ImagePath    string   `json:"image_path,omitempty"`
	Bundle       string   `json:"bundle,omitempty"`
	Flags        []string `json:"flags,omitempty"`
	RestoredFrom string   `json:"restored_from,omitempty"`
	Hostname     string   `json:"hostname,omitempty"`
	// Address is the lease of its network: nobody else has it while it is written here.
	Address string `json:"address,omitempty"`
	// Handle is the driver's, opaque.
	Handle []byte `json:"handle,omitempty"`
	// GuestGeneration is the channel generation of its guest init.
	GuestGeneration uint64   `json:"guest_generation,omitempty"`
	Defaults        Defaults `json:"defaults"`
	// HasMain: a command of its own was started; its end is the sandbox's end.
	HasMain bool `json:"has_main,omitempty"`

	Capture     *Capture     `json:"capture,omitempty"`
	Hibernation *Hibernation `json:"hibernation,omitempty"`
	// Parked: restored ahead of need, it has stood still since, and its image's hook has not run.
	Parked bool   `json:"parked,omitempty"`
	Claim  *Claim `json:"claim,omitempty"`

	StartTime  time.Time     `json:"start_time,omitzero"`
	ExitCode   *int32        `json:"exit_code,omitempty"`
	Reason     string        `json:"reason,omitempty"`
	Message    string        `json:"message,omitempty"`
	LastFreeze time.Duration `json:"last_freeze,omitempty"`
	// StartQueued and StartService are of the last start, restore or wake: the wait for its turn, and the work until it ran.
	StartQueued  time.Duration `json:"start_queued,omitempty"`
	StartService time.Duration `json:"start_service,omitempty"`

	// Observation counts the changes worth reporting, from the node's LastObservation on. Acked is the highest that the coordinator has
	// taken; a report is due while it is lower.
	Observation uint64 `json:"observation"`
	Acked       uint64 `json:"acked,omitempty"`
}

// SnapshotState is where an artefact stands.
type SnapshotState string

// The states. Before Ready nothing is at the artefact's own path; after Deleting it may be gone.
const (
	SnapshotSaving   SnapshotState = "saving"
	SnapshotReady    SnapshotState = "ready"
	SnapshotDeleting SnapshotState = "deleting"
)

// Snapshot is an artefact that the node holds, or is making or removing.
type Snapshot struct {
	UID              string          `json:"uid"`
	Tenant           string          `json:"tenant"`
	SourceSandboxUID string          `json:"source_sandbox_uid"`
	State            SnapshotState   `json:"state"`
	Created          time.Time       `json:"created"`
	CommandID        string          `json:"command_id"`
	Status           snapshot.Status `json:"status"`
}

// Volume says whose a volume is. It is written before the volume is made and removed after it is gone.
type Volume struct {
	UID     string    `json:"uid"`
	Tenant  string    `json:"tenant"`
	Created time.Time `json:"created"`
}

// PutVolume writes a record as a whole.
func (s *Store) PutVolume(rec Volume) error {
	return s.update(func(tx *bolt.Tx) error { return put(tx.Bucket(bucketVolumes), rec.UID, rec) })
}

// Volume reads one record; OBJECT_NOT_FOUND.
func (s *Store) Volume(uid string) (Volume, error) {
	var rec Volume
	return rec, s.get(bucketVolumes, "volume", uid, &rec)
}

// Volumes reads all records, in the order of their uids.
func (s *Store) Volumes() ([]Volume, error) { return list[Volume](s, bucketVolumes, "volume") }

// RemoveVolume removes a record. Idempotent.
func (s *Store) RemoveVolume(uid string) error { return s.remove(bucketVolumes, uid) }

// PutSandbox writes a record as a whole. The observation counter must not go down.
func (s *Store) PutSandbox(rec Sandbox) error {
	// Also after an error: the write may be applied.
	defer s.reports.changed(rec.UID)
	return s.update(func(tx *bolt.Tx) error {
		b := tx.Bucket(bucketSandboxes)
		if old := b.Get([]byte(rec.UID)); old != nil {
			var was Sandbox
			if err := decode(old, &was, "sandbox", rec.UID); err != nil {
				return err
			}
			if was.Observation > rec.Observation {
				return errs.New(errs.StaleRevision, "the record of sandbox %s is at observation %d, not %d", rec.UID, was.Observation, rec.Observation).With("uid", rec.UID)
			}
			rec.Acked = max(rec.Acked, was.Acked)
		}
		return put(b, rec.UID, rec)
	})
}

// Sandbox reads one record; OBJECT_NOT_FOUND.
func (s *Store) Sandbox(uid string) (Sandbox, error) {
	var rec Sandbox
	return rec, s.get(bucketSandboxes, "sandbox", uid, &rec)
}

// Sandboxes reads all records, in the order of their uids.
func (s *Store) Sandboxes() ([]Sandbox, error) {
	return list[Sandbox](s, bucketSandboxes, "sandbox")
}

// RemoveSandbox removes a record. Idempotent. What it had observed stays counted: see LastObservation.
func (s *Store) RemoveSandbox(uid string) error {
	return s.update(func(tx *bolt.Tx) error {
		b := tx.Bucket(bucketSandboxes)
		data := b.Get([]byte(uid))
		if data == nil {
			return nil
		}
		var was Sandbox
		// One that cannot be read can be removed all the same.
		if decode(data, &was, "sandbox", uid) == nil && was.Observation > b.Sequence() {
			if err := b.SetSequence(was.Observation); err != nil {
				return err
			}
		}
		return b.Delete([]byte(uid))
	})
}

// LastObservation is the highest number of an observation of any sandbox whose record was removed. A new record counts
// on from it: its sandbox may have been observed before, in a start that failed and was undone, and neither a lower
// number nor an acknowledgement of that time must be taken for one of now.
func (s *Store) LastObservation() (last uint64, err error) {
	err = s.view(func(tx *bolt.Tx) error {
		last = tx.Bucket(bucketSandboxes).Sequence()
		return nil
	})
	return last, err
}

// PutSnapshot writes a record as a whole.
func (s *Store) PutSnapshot(rec Snapshot) error {
	return s.update(func(tx *bolt.Tx) error { return put(tx.Bucket(bucketSnapshots), rec.UID, rec) })
}

// Snapshot reads one record; OBJECT_NOT_FOUND.
func (s *Store) Snapshot(uid string) (Snapshot, error) {
	var rec Snapshot
	return rec, s.get(bucketSnapshots, "snapshot", uid, &rec)
}

// Snapshots reads all records, in the order of their uids.
func (s *Store) Snapshots() ([]Snapshot, error) {
	return list[Snapshot](s, bucketSnapshots, "snapshot")
}

// RemoveSnapshot removes a record. Idempotent.
func (s *Store) RemoveSnapshot(uid string) error { return s.remove(bucketSnapshots, uid) }

func put(b *bolt.Bucket, key string, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return b.Put([]byte(key), data)
}

func decode(data []byte, v any, kind, key string) error {
	if err := json.Unmarshal(data, v); err != nil {
		return errs.Wrap(err, errs.StateDamaged, "the record of %s %s in the state file cannot be read; stop agentd and keep the file before anything else", kind, key)
	}
	return nil
}

func (s *Store) get(bucket []byte, kind, uid string, v any) error {
	return s.view(func(tx *bolt.Tx) error {
		data := tx.Bucket(bucket).Get([]byte(uid))
		if data == nil {
			return errs.New(errs.ObjectNotFound, "this node has no %s %s", kind, uid).With("kind", kind).With("uid", uid)
		}
		return decode(data, v, kind, uid)
	})
}

func list[T any](s *Store, bucket []byte, kind string) ([]T, error) {
	var all []T
	err := s.view(func(tx *bolt.Tx) error {
		return tx.Bucket(bucket).ForEach(func(k, data []byte) error {
			var rec T
			if err := decode(data, &rec, kind, string(k)); err != nil {
				return err
			}
			all = append(all, rec)
			return nil
		})
	})
	if err != nil {
		return nil, fmt.Errorf("list the records of kind %s: %w", kind, err)
	}
	return all, nil
}

func (s *Store) remove(bucket []byte, uid string) error {
	return s.update(func(tx *bolt.Tx) error { return tx.Bucket(bucket).Delete([]byte(uid)) })
}
