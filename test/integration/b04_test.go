package integration

import (
	"fmt"
	"strings"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/client"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// What was removed from its folder before the checkpoint, and is open still, is whole after the restore: a file, written
// to on, and a folder that is somebody's own.
func TestB04DeletedButOpen(t *testing.T) {
	w := enter(t)
	v := w.volume("node-1")
	spec := w.spec()
	spec.Volumes = []*dormousev1.VolumeMount{mount(v, "/vol")}
	source := w.create(spec)
	// In each place: a program in a folder that is gone, with a file that is gone, which says what it has when asked.
	const program = `mkdir -p $1/gone && cd $1/gone && echo before >file && exec 3<>file 4<file && rm file && rmdir ../gone && echo ready && ` +
		`read x && read line <&4 && echo "$line $(ls | wc -l)" && cat <&3 >/dev/null && echo after >&3 && read line <&4 && echo "$line"`
	places := []string{"/tmp", "/root", "/vol"}
	for i, dir := range places {
		p, err := source.Start(w.ctx, &dormousev1.ProcessSpec{Argv: []string{"sh", "-c", program, "sh", dir}, Stdin: true}, fmt.Sprintf("p%d", i))
		w.ok(err)
		w.await("the program is ready", func() error { return w.has(source, p.ID, "ready") })
	}
	snap := w.checkpoint(source)
	w.ok(source.Delete(w.ctx, ""))
	restored, err := snap.Restore(w.ctx, &dormousev1.RestoreSandboxRequest{})
	w.ok(err)
	for i := range places {
		p := restored.Process(fmt.Sprintf("p%d", i))
		w.ok(p.Write(w.ctx, []byte("go\n"), false))
		w.await("the program has its file and its folder", func() error { return w.has(restored, p.ID, "before 0\nafter\n") })
	}
}

// has tells whether a process has written a text.
func (w *world) has(s *client.Sandbox, process, text string) error {
	var out, errOut strings.Builder
	if _, err := s.Process(process).Follow(w.ctx, &client.Output{Stdout: &out, Stderr: &errOut}, false); err != nil {
		return err
	}
	if !strings.Contains(out.String(), text) {
		return fmt.Errorf("process %s has written %q and %q, not %q", process, out.String(), errOut.String(), text)
	}
	return nil
}
