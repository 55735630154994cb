// Package proof tells from a program's own answers whether two of them came from one process.
//
// The program is subject.py: it keeps state in its memory, a private file, a volume and a TCP stream,
// and every answer counts on. A process that was started anew, however cleverly, gives another nonce, heap and
// start time; one whose file or stream was opened again gives another offset or frame count.
package proof

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"strconv"
)

// Subject is the program's source, for images that carry it.
//
//go:embed subject.py
var Subject []byte

// SubjectPath is where images carry it.
const SubjectPath = "/opt/dormouse/subject.py"

// Answer is what the subject says of itself.
type Answer struct {
	PID           int     `json:"pid"`
	StartTicks    string  `json:"start_ticks"`
	Born          float64 `json:"born"`
	Nonce         string  `json:"nonce"`
	Counter       int     `json:"counter"`
	HeapBytes     int64   `json:"heap_bytes"`
	HeapSHA256    string  `json:"heap_sha256"`
	FileOffset    int64   `json:"file_offset"`
	FileSHA256    string  `json:"file_sha256"`
	TCPFrames     int     `json:"tcp_frames"`
	TCPPort       int     `json:"tcp_port"`
	Hostname      string  `json:"hostname"`
	Urandom       string  `json:"urandom"`
	JournalLines  int     `json:"journal_lines"`
	JournalOffset int64   `json:"journal_offset"`
	VolumeUID     string  `json:"volume_uid"`
	Identity      *struct {
		UID        string `json:"sandbox_uid"`
		Hostname   string `json:"hostname"`
		Generation uint64 `json:"generation"`
	} `json:"identity"`
	Error string `json:"error"`
}

// bytesPerAnswer is how far each answer moves the offset of the private file.
const bytesPerAnswer = 100

// Parse reads an answer.
func Parse(out []byte) (Answer, error) {
	var a Answer
	if err := json.Unmarshal(out, &a); err != nil {
		return a, fmt.Errorf("the subject's answer is not JSON: %w", err)
	}
	if a.Error != "" {
		return a, fmt.Errorf("the subject failed: %s", a.Error)
	}
	return a, nil
}

// Claim is one thing that has to hold between two answers of one process.
type Claim struct {
	What          string
	Before, After string
	Holds         bool
}

// Compare gives the claims for an answer and the very next one.
func Compare(before, after Answer) []Claim {
	claims := []Claim{
		same("pid", strconv.Itoa(before.PID), strconv.Itoa(after.PID)),
		same("start time (ticks)", before.StartTicks, after.StartTicks),
		same("start time (its own clock)", fmt.Sprint(before.Born), fmt.Sprint(after.Born)),
		same("nonce", before.Nonce, after.Nonce),
		next("counter goes on", int64(before.Counter), int64(after.Counter), 1),
		same("heap bytes", strconv.FormatInt(before.HeapBytes, 10), strconv.FormatInt(after.HeapBytes, 10)),
		same("heap sha256", before.HeapSHA256, after.HeapSHA256),
		next("offset of the open file", before.FileOffset, after.FileOffset, bytesPerAnswer),
		same("private file sha256", before.FileSHA256, after.FileSHA256),
		next("frames over the TCP stream", int64(before.TCPFrames), int64(after.TCPFrames), 1),
		same("local port of the TCP stream", strconv.Itoa(before.TCPPort), strconv.Itoa(after.TCPPort)),
	}
	if before.VolumeUID != "" {
		claims = append(claims,
			same("volume's marker", before.VolumeUID, after.VolumeUID),
			next("lines in the volume's journal", int64(before.JournalLines), int64(after.JournalLines), 1))
	}
	return claims
}

// Failed gives the claims that do not hold.
func Failed(claims []Claim) []Claim {
	var bad []Claim
	for _, c := range claims {
		if !c.Holds {
			bad = append(bad, c)
		}
	}
	return bad
}

// same holds for two equal values that are there: two empty ones prove nothing.
func same(what, before, after string) Claim {
	return Claim{What: what, Before: before, After: after, Holds: before == after && before != "" && before != "0"}
}

func next(what string, before, after, by int64) Claim {
	return Claim{What: what, Before: strconv.FormatInt(before, 10), After: strconv.FormatInt(after, 10), Holds: before > 0 && after == before+by}
}
