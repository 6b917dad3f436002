package labtest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/e2e/lab"
)

// FaultsPath is the file that says where a FaultyBinary program panics (lb/agent/faults.go).
const FaultsPath = "/run/steelyard-lab/faults"

// FaultsEnv belongs in the program's environment.
const FaultsEnv = "STEELYARD_FAULTS=" + FaultsPath

// FaultyBinary builds the program with the tag "faults".
func FaultyBinary(t testing.TB) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "steelyard")
	build := exec.Command("go", "build", "-tags", "faults", "-o", name, "github.com/steelyard-lb/steelyard")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the program with faults: %v\n%s", err, out)
	}
	return name
}

// Panics returns steelyard_panics_total for a part, or "0" before the first panic.
func Panics(t testing.TB, a *lab.Agent, part string) string {
	t.Helper()
	_, n, _ := strings.Cut(Metrics(t, a, fmt.Sprintf("steelyard_panics_total{part=%q}", part)), " ")
	return strings.TrimSpace(n)
}
