package clock

import (
	"context"
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

//go:embed shim.c.txt
var shimSource []byte

// BuildShim compiles, in dir, the library for C programs. Env gives what such a program is started with.
func BuildShim(ctx context.Context, dir string) (library string, err error) {
	source := filepath.Join(dir, "shim.c")
	if err := os.WriteFile(source, shimSource, 0o600); err != nil {
		return "", err
	}
	library = filepath.Join(dir, "shim.so")
	out, err := exec.CommandContext(ctx, "gcc", "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", library, source).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("compile the clock's library: %w: %s", err, out)
	}
	return library, nil
}

// Env is the environment of a C program whose clock the file moves.
func Env(library, file string) []string {
	return []string{"LD_PRELOAD=" + library, "DORMOUSE_TEST_CLOCK=" + file}
}
