package integration

import (
	"fmt"
	"io"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/client"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// Every stream of the client goes on where it was when the coordinator that it went through is killed and another takes its
// place: an attachment's input and output, output that is followed, a file that is written and one that is read. (For an
// agentd that is replaced: TestB22Reattach and TestFilesAcrossAgentdKill.)
func TestStreamsGoOnAfterTheCoordinator(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec())
	const size = 16 * mib
	want := sumOf(t, &pattern{size: size})
	_, err := s.Files().Write(w.ctx, "/root/there", &pattern{size: size}, client.WriteOptions{})
	w.ok(err)

	cat, err := s.Start(w.ctx, &dormousev1.ProcessSpec{Argv: []string{"cat"}, Stdin: true}, "")
	w.ok(err)
	attached, followed := &liner{lines: make(chan string, 64)}, &liner{lines: make(chan string, 64)}
	a, err := cat.Attach(w.ctx, client.AttachOptions{Output: &client.Output{Stdout: attached}, Input: true})
	w.ok(err)
	defer a.Close()
	ends := make(chan error, 2)
	go func() {
		_, err := s.Process(cat.ID).Follow(w.ctx, &client.Output{Stdout: followed}, true)
		ends <- err
	}()
	src := &pausing{pattern: pattern{size: size}, reached: make(chan struct{}), resume: make(chan struct{})}
	reached := src.reached
	go func() {
		done, err := s.Files().Write(w.ctx, "/root/written", src, client.WriteOptions{})
		if err == nil && done.GetDigest() != want {
			err = fmt.Errorf("written is %s, want %s", done.GetDigest(), want)
		}
		ends <- err
	}()
	r, err := s.Files().Open(w.ctx, "/root/there")
	w.ok(err)
	defer r.Close()
	_, err = io.ReadFull(r, make([]byte, mib))
	w.ok(err)
	fmt.Fprintln(a, "one")
	attached.want(w, "one")
	followed.want(w, "one")
	<-reached

	w.ok(w.KillCoordinator(w.ctx))
	fmt.Fprintln(a, "two") // nobody is there to take it
	w.ok(w.StartCoordinatorReady(w.ctx))
	w.nodesOnline()
	close(src.resume)
	attached.want(w, "two")
	followed.want(w, "two")
	if n, err := io.Copy(io.Discard, r); err != nil || n != size-mib { // its digest is checked at the end
		t.Errorf("%d more bytes were read: %v", n, err)
	}
	fmt.Fprintln(a, "three")
	a.CloseInput()
	exit, err := a.Wait()
	w.ok(err)
	if exit.GetCode() != 0 {
		t.Errorf("it ended with %d", exit.GetCode())
	}
	attached.want(w, "three")
	followed.want(w, "three")
	for range 2 {
		w.ok(<-ends)
	}
	if left := w.sh(s, "ls -A /root"); left != "there\nwritten" {
		t.Errorf("in the folder: %s", left)
	}
}
