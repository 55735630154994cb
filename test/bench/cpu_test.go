package bench

import (
	"os"
	"os/exec"
	"testing"
)

func TestProcessCPU(t *testing.T) {
	_, before, err := processCPU(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if err := exec.Command(os.Args[0], "-test.run=^$").Run(); err != nil {
		t.Fatal(err)
	}
	if _, after, err := processCPU(os.Getpid()); err != nil || after <= before {
		t.Fatalf("a child took %f ms: %v", after-before, err)
	}
	own, _, err := processCPU(os.Getppid())
	if err != nil || own < 0 {
		t.Fatalf("%f, %v", own, err)
	}
	if _, _, err := processCPU(1 << 30); err == nil {
		t.Fatal("a process that is not there used something")
	}
}

func TestCPUUse(t *testing.T) {
	sum := cpuUse{}
	for range 2 {
		sum.add(cpuUse{"a": 30, "b": 100, "c": 0.01}.since(cpuUse{"a": 10, "b": 40}))
	}
	if got, want := sum.each(10), "b 12.0, a 4.0 ms"; got != want {
		t.Fatalf("%q, want %q", got, want)
	}
}
