package labtest

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// Main runs a package's tests. First it sets *binary to the program under test: the value of STEELYARD_BINARY, or a
// binary that it builds. Up to four parallel tests run concurrently, even on fewer CPUs, because they mostly wait.
func Main(m *testing.M, binary *string) (status int) {
	flag.Parse()
	if err := flag.Set("test.parallel", "4"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if *binary = os.Getenv("STEELYARD_BINARY"); *binary != "" {
		return m.Run()
	}
	dir, err := os.MkdirTemp("", "steelyard-e2e-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	*binary = filepath.Join(dir, "steelyard")
	build := exec.Command("go", "build", "-o", *binary, "github.com/steelyard-lb/steelyard")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build the program under test: %v\n%s", err, out)
		return 1
	}
	return m.Run()
}
