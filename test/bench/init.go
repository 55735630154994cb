package bench

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sync/errgroup"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/wait"
	barerunsc "github.com/dormouse-run/dormouse/test/bare"
)

// waiterPath is the least init there is, in the subject's image; initMount is where the product has its own.
const (
	waiterPath = "/bin/waiter"
	initMount  = "/.dormouse"
)

// waiter gives a static program for amd64 that waits for signals and does nothing else: a header, one segment, and pause in a loop.
func waiter() []byte {
	const base = 0x400000
	code := []byte{
		0xb8, 34, 0, 0, 0, // mov eax, pause
		0x0f, 0x05, // syscall
		0xeb, 0xf7, // jmp to the beginning
	}
	const headers = 64 + 56
	var p bytes.Buffer
	p.WriteString("\x7fELF\x02\x01\x01" + string(make([]byte, 9)))
	size := uint64(headers + len(code))
	for _, v := range []any{
		uint16(2), uint16(62), uint32(1), uint64(base + headers), uint64(64), uint64(0), uint32(0), // executable, amd64, entry, program headers
		uint16(64), uint16(56), uint16(1), uint16(64), uint16(0), uint16(0), // sizes and numbers of headers
		uint32(1), uint32(5), uint64(0), uint64(base), uint64(base), size, size, uint64(0x1000), // loaded, to read and execute
	} {
		_ = binary.Write(&p, binary.LittleEndian, v) // a Buffer takes all
	}
	p.Write(code)
	return p.Bytes()
}

// costOfInit tells what guest init adds to an idle sandbox: those of the product beside as many that have the same image, runtime, limits and
// flags, and for their init the waiter. All run at the same time, so that what they share of runsc's program is shared out alike.
func (b *bench) costOfInit(ctx context.Context, plain []*client.Sandbox) (_ Row, err error) {
	floor, err := b.newBare(plain[0].UID)
	if err != nil {
		return Row{}, err
	}
	spec, err := b.spec(plain[0].UID)
	if err != nil {
		return Row{}, err
	}
	spec.Process.Args, spec.Process.Cwd = []string{waiterPath}, "/"
	spec.Mounts = slices.DeleteFunc(spec.Mounts, func(m specs.Mount) bool { return m.Destination == initMount })
	boxes := make([]*barerunsc.Box, len(plain))
	defer func() {
		for _, x := range boxes {
			if x != nil {
				err = errors.Join(err, x.Remove(context.WithoutCancel(ctx)))
			}
		}
	}()
	var group errgroup.Group
	group.SetLimit(3)
	for i := range boxes {
		group.Go(func() error {
			x, err := floor.Prepare(spec)
			if err != nil {
				return err
			}
			boxes[i] = x
			return x.Run(ctx, true, "run", "-detach")
		})
	}
	if err := group.Wait(); err != nil {
		return Row{}, err
	}
	if err := wait.For(ctx, settle); err != nil {
		return Row{}, err
	}
	var ours, least Sample
	for i, x := range boxes {
		mine, _, err := b.processes(plain[i].UID)
		if err != nil {
			return Row{}, err
		}
		bare, _, err := b.processes(x.ID)
		if err != nil {
			return Row{}, err
		}
		ours, least = append(ours, mine), append(least, bare)
	}
	return Row{
		What:    "guest init: idle sandbox beside one of bare runsc whose init only waits",
		Product: shares(ours), Bare: shares(least), Value: ours.Median() - least.Median(), Unit: "MB", AtMost: 2.5,
	}, nil
}

func shares(s Sample) string { return fmt.Sprintf("%.1f / %.1f MB PSS", s.Median(), s.at(0.95)) }
