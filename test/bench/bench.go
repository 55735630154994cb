package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/version"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/cluster"
	"github.com/dormouse-run/dormouse/test/images"
	"github.com/dormouse-run/dormouse/test/stack"
)

// Options of a run.
type Options struct {
	// Out is the folder of the report.
	Out string
	// Bin is where the daemons and benchsubject are; the checkout's bin folder if empty.
	Bin string
	// Scale multiplies the number of repetitions; 1 if 0.
	Scale float64
	// Note goes into the report, for what a reader has to know of this run.
	Note string
	// Profile, if set, is a folder for the daemons' profiles.
	Profile string
	Logf    func(format string, args ...any)
}

// bench is one benchmark at work.
type bench struct {
	Options
	cluster *cluster.Cluster
	subject string // the image's reference, by digest
	notes   []string

	mu  sync.Mutex
	all []*client.Sandbox
}

// function measures and gives the rows.
type function func(ctx context.Context, b *bench) ([]Row, error)

var functions = map[string]function{
	"start": benchStart, "checkpoint": benchCheckpoint, "restore": benchRestore, "memory": benchMemory, "image": benchImage, "catalog": benchCatalog,
	"exec": benchExec, "files": benchFiles, "lifecycle": benchLifecycle, "network": benchNetwork, "warm": benchWarm,
}

// Names of the benchmarks, in the order of the report.
func Names() []string { return slices.Clone(names) }

// Run measures, prints the result and writes the report.
func Run(ctx context.Context, name string, opts Options) (_ Result, err error) {
	fn := functions[name]
	if fn == nil && apart[name] == nil {
		return Result{}, fmt.Errorf("there is no benchmark %q; there are %s", name, strings.Join(Names(), ", "))
	}
	if opts.Logf == nil {
		opts.Logf = func(string, ...any) {}
	}
	if opts.Scale <= 0 {
		opts.Scale = 1
	}
	before, began := loadAverage(), time.Now()
	found := func(rows []Row, notes []string) (Result, error) {
		r := Result{Name: name, When: time.Now().UTC(), Host: host(), Load: before + " before, " + loadAverage() + " after", Commit: version.Get().Commit,
			Took: time.Since(began).Seconds(), Rows: rows, Notes: notes}
		return r, save(opts.Out, r)
	}
	if alone := apart[name]; alone != nil {
		rows, notes, err := alone(ctx, name, opts)
		if err != nil {
			return Result{}, fmt.Errorf("%s: %w", name, err)
		}
		return found(rows, notes)
	}
	c, err := cluster.Up(ctx, stack.Options{Nodes: 1, Bin: opts.Bin})
	if err != nil {
		return Result{}, err
	}
	b := &bench{Options: opts, cluster: c}
	if opts.Note != "" {
		b.note("%s", opts.Note)
	}
	defer func() {
		down, cancel := context.WithTimeout(context.WithoutCancel(ctx), 3*time.Minute)
		defer cancel()
		err = errors.Join(err, c.Down(down))
	}()
	if err := b.pushSubject(ctx); err != nil {
		return Result{}, err
	}
	stopProfiles := b.profile(ctx, name)
	rows, err := fn(ctx, b)
	stopProfiles()
	if err != nil {
		return Result{}, fmt.Errorf("%s: %w", name, err)
	}
	return found(rows, b.notes)
}

func loadAverage() string {
	data, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "unknown"
	}
	one, _, _ := strings.Cut(string(data), " ")
	return one
}

func host() string {
	model := runtime.GOARCH
	if data, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.Lines(string(data)) {
			if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == "model name" {
				model = strings.TrimSpace(value)
				break
			}
		}
	}
	return fmt.Sprintf("%d CPUs (%s)", runtime.NumCPU(), model)
}

// times scales a number of repetitions.
func (b *bench) times(n int) int { return max(int(float64(n)*b.Scale), 1) }

func (b *bench) note(format string, args ...any) {
	b.notes = append(b.notes, fmt.Sprintf(format, args...))
	b.Logf("%s", b.notes[len(b.notes)-1])
}

// state is the folder of node 1's agentd.
func (b *bench) state() string { return b.cluster.NodeDir(1) }

const subjectPath = "/bin/benchsubject"

// pushSubject makes the subject's image: one static program and the folders that it needs.
func (b *bench) pushSubject(ctx context.Context) error {
	program, err := os.ReadFile(filepath.Join(b.cluster.Bin, "benchsubject"))
	if err != nil {
		return fmt.Errorf("the subject is not built: %w", err)
	}
	image, err := images.FromEntries(images.Config{Env: []string{"PATH=/bin"}}, []images.Entry{
		images.Dir("bin", 0o755), images.Dir("etc", 0o755), images.Dir("tmp", 0o1777), images.Dir("var", 0o755), images.Dir("data", 0o755),
		images.Dir("proc", 0o755), images.Dir("sys", 0o755), images.Dir("dev", 0o755), images.Dir("root", 0o700),
		images.File(strings.TrimPrefix(subjectPath, "/"), string(program), 0o755),
		images.File(strings.TrimPrefix(waiterPath, "/"), string(waiter()), 0o755),
	})
	if err != nil {
		return err
	}
	registry, err := b.cluster.Registry()
	if err != nil {
		return err
	}
	digest, err := registry.Push(ctx, "bench/subject", image)
	if err != nil {
		return err
	}
	b.subject = registry.Ref("bench/subject") + "@" + digest
	_, err = b.cluster.Client.PullImage(ctx, b.subject, stack.NodeName(1), nil)
	return err
}

const mib = 1 << 20

// create makes a sandbox of the subject's image with guest init alone.
func (b *bench) create(ctx context.Context, memory int64, change func(*dormousev1.SandboxSpec)) (*client.Sandbox, error) {
	spec := &dormousev1.SandboxSpec{Image: b.subject, Resources: &dormousev1.Resources{
		CpuRequestMillis: 10, MemoryRequestBytes: 16 * mib, MemoryLimitBytes: memory, DiskLimitBytes: 64 * mib,
	}}
	if change != nil {
		change(spec)
	}
	s, err := b.cluster.Client.CreateSandbox(ctx, &dormousev1.CreateSandboxRequest{Spec: spec})
	if err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.all = append(b.all, s)
	return s, nil
}

// filled makes n sandboxes whose subject has its heap and its file, and waits until they have.
func (b *bench) filled(ctx context.Context, n, heapMiB, fileMiB int) ([]*client.Sandbox, error) {
	all := make([]*client.Sandbox, n)
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(3)
	for i := range all {
		group.Go(func() error {
			s, err := b.create(ctx, int64(heapMiB+fileMiB+64)*mib, func(spec *dormousev1.SandboxSpec) {
				spec.Command = []string{subjectPath, fmt.Sprint(heapMiB), fmt.Sprint(fileMiB), "/var"}
			})
			if err != nil {
				return err
			}
			all[i] = s
			return b.awaitFilled(ctx, s)
		})
	}
	return all, group.Wait()
}

// awaitFilled looks, through the sandbox's memory, whether the subject is done: nothing runs inside that was not there.
func (b *bench) awaitFilled(ctx context.Context, s *client.Sandbox) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		_, exit, err := s.Run(ctx, &dormousev1.ProcessSpec{Argv: []string{subjectPath, "check", "/var"}}, nil, nil, nil)
		if err == nil && exit.GetCode() == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("the subject of sandbox %s never filled its memory", s.UID), err)
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// deleteAll removes sandboxes, several at a time.
func deleteAll(ctx context.Context, all []*client.Sandbox) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(4)
	for _, s := range all {
		group.Go(func() error { return s.Delete(ctx, "") })
	}
	return group.Wait()
}

// ratio makes a row of two samples whose medians are compared.
func ratio(what string, product, floor Sample, atMost float64) Row {
	return Row{What: what, Product: times(product), Bare: times(floor), Value: product.Median() / floor.Median(), Unit: "x", AtMost: atMost}
}

func times(s Sample) string { return fmt.Sprintf("%.1f / %.1f ms", s.Median(), s.at(0.95)) }
