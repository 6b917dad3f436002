// Mutants changes the program by one token at a time and reports the changes that unit tests do not detect.
//
// For each package, it draws a random sample of mutants and runs the package's unit tests against each, as "make unit"
// does (go test -short). A mutant survives if they pass: no test depends on that token. The tree stays unchanged,
// because the go command receives the changed file through -overlay. Mutants that do not compile are drawn again. The
// printed seed draws the same mutants from the same source.
//
// Calls of loggers are not mutated, because nothing depends on them. A survivor does not always indicate a missing
// test, because some mutants behave like the original.
//
// With -bpf, it mutates the C source of BPF programs.
//
// Existing tools do not suffice: gremlins (v0.6) runs every mutant of a package, without a sample or fixed budget, and
// does not change constants, nil errors or calls; go-mutesting is no longer maintained.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"hash/fnv"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"
)

func main() {
	n := flag.Int("n", 60, "mutants per package")
	seed := flag.Uint64("seed", uint64(time.Now().UnixNano())%1_000_000, "seed of the sample")
	limit := flag.Duration("limit", 0, "time for the tests of one mutant (default: 5 times the time without a change)")
	tests := flag.String("run", "", "run these tests, also those that need root (default: as make unit)")
	source := flag.String("bpf", "", "mutate this C file and what it includes instead of Go files")
	file := flag.String("object", "", "the BPF object of -bpf that the package embeds")
	flag.Parse()
	r := runner{n: *n, seed: *seed, limit: *limit, tests: *tests, out: os.Stdout}
	if *source != "" {
		r.object = &object{source: absolute(*source), file: absolute(*file)}
	}
	if err := r.run(context.Background(), flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		os.Exit(1)
	}
}

func absolute(file string) string {
	file, err := filepath.Abs(file)
	if err != nil {
		panic(err) // there is no working directory
	}
	return file
}

type runner struct {
	n      int
	seed   uint64
	limit  time.Duration
	tests  string
	object *object // nil to mutate Go files
	dir    string  // where the go command runs; empty for here
	out    io.Writer
}

// pkg is the output of "go list" for a package.
type pkg struct {
	ImportPath, Dir string
	GoFiles         []string
	TestGoFiles     []string
	XTestGoFiles    []string
}

func (r *runner) run(ctx context.Context, patterns []string) error {
	pkgs, err := r.list(ctx, patterns)
	if err != nil {
		return err
	}
	fmt.Fprintf(r.out, "seed %d, %d mutants per package\n", r.seed, r.n)
	var failed []error
	for _, p := range pkgs {
		if err := r.sample(ctx, p); err != nil {
			failed = append(failed, fmt.Errorf("%s: %w", p.ImportPath, err))
		}
	}
	return errors.Join(failed...)
}

func (r *runner) list(ctx context.Context, patterns []string) (all []pkg, err error) {
	args := []string{"list", "-json=ImportPath,Dir,GoFiles,TestGoFiles,XTestGoFiles"}
	cmd := exec.CommandContext(ctx, "go", append(args, patterns...)...)
	cmd.Dir, cmd.Stderr = r.dir, os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	for d := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			return all, nil
		} else if err != nil {
			return nil, err
		}
		if len(p.TestGoFiles)+len(p.XTestGoFiles) > 0 {
			all = append(all, p)
		}
	}
}

func (r *runner) mutants(p pkg) (all []mutant, err error) {
	if r.object != nil {
		return r.object.mutants()
	}
	for _, f := range p.GoFiles {
		found, err := mutantsOf(filepath.Join(p.Dir, f))
		if err != nil {
			return nil, err
		}
		all = append(all, found...)
	}
	return all, nil
}

func (r *runner) overlay(m *mutant, dir string) (string, error) {
	if r.object != nil {
		return r.object.overlay(*m, dir)
	}
	return m.overlay(dir)
}

// sample runs the tests of p unchanged, then against the mutants that it draws.
func (r *runner) sample(ctx context.Context, p pkg) error {
	all, err := r.mutants(p)
	if err != nil {
		return err
	}
	began := time.Now()
	if how, out := r.test(ctx, p, nil, 10*time.Minute); how != survived {
		return fmt.Errorf("the tests fail without a change:\n%s", out)
	}
	limit := r.limit
	if limit == 0 {
		limit = max(10*time.Second, 5*time.Since(began))
	}
	h := fnv.New64()
	h.Write([]byte(p.ImportPath))
	draw := rand.New(rand.NewPCG(r.seed, h.Sum64()))
	draw.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })

	// The first n mutants that compile count, in the order of the draw, not of completion.
	results := make([]result, len(all))
	tried, compiled := 0, 0
	for compiled < r.n && tried < len(all) {
		batch := all[tried:min(len(all), tried+r.n-compiled)]
		r.testAll(ctx, p, batch, results[tried:], limit)
		for _, how := range results[tried : tried+len(batch)] {
			if how != invalid {
				compiled++
			}
		}
		tried += len(batch)
	}
	alive, late := 0, 0
	for i, m := range all[:tried] {
		switch results[i] {
		case survived:
			alive++
			fmt.Fprintf(r.out, "%s\n", m)
		case timedOut:
			late++
		}
	}
	rate := 100 * float64(alive) / float64(max(1, compiled))
	fmt.Fprintf(r.out, "%s: %d of %d mutants survive (%.0f %%), %d time out\n",
		p.ImportPath, alive, compiled, rate, late)
	return nil
}

// testAll fills results for the mutants, as many in parallel as there are CPUs.
func (r *runner) testAll(ctx context.Context, p pkg, all []mutant, results []result, limit time.Duration) {
	var wg sync.WaitGroup
	slots := make(chan struct{}, runtime.GOMAXPROCS(0))
	for i := range all {
		slots <- struct{}{}
		wg.Go(func() {
			results[i], _ = r.test(ctx, p, &all[i], limit)
			<-slots
		})
	}
	wg.Wait()
}

type result int

const (
	invalid  result = iota // it does not compile, or to the same program
	killed                 // a test fails
	timedOut               // the mutant does not end, or the machine is busy
	survived               // the tests pass
)

// buildTime is added to the tests' limit, for compiling and linking them.
const buildTime = 2 * time.Minute

// test runs p's tests against m, or against the unchanged package if m is nil.
func (r *runner) test(ctx context.Context, p pkg, m *mutant, limit time.Duration) (result, string) {
	ctx, cancel := context.WithTimeout(ctx, limit+buildTime)
	defer cancel()
	args := []string{"test", "-count=1", "-vet=off", "-failfast", "-timeout", limit.String()}
	if r.tests != "" {
		args = append(args, "-run", r.tests)
	} else {
		args = append(args, "-short")
	}
	if m != nil {
		dir, err := os.MkdirTemp("", "mutant-")
		if err != nil {
			return invalid, err.Error()
		}
		defer os.RemoveAll(dir)
		overlay, err := r.overlay(m, dir)
		if err != nil {
			return invalid, err.Error()
		}
		args = append(args, "-overlay", overlay)
	}
	cmd := exec.CommandContext(ctx, "go", append(args, p.ImportPath)...)
	cmd.Dir = r.dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // to kill the tests and their children with the go command
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 5 * time.Second
	out, err := cmd.CombinedOutput()
	switch {
	case err == nil:
		return survived, string(out)
	case strings.Contains(string(out), "[build failed]") || strings.Contains(string(out), "[setup failed]"):
		return invalid, string(out)
	case ctx.Err() != nil || strings.Contains(string(out), "panic: test timed out after"):
		return timedOut, string(out)
	}
	return killed, string(out)
}
