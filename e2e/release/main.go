package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// release describes what to build, and from what.
type release struct {
	tree    string // directory of the product's go.mod
	out     string // directory of the release's files
	version string // semantic version, without "v"
	image   string // name of the image, without a tag
	time    time.Time
	archs   []string // in Go's notation
}

func main() {
	var r release
	flag.StringVar(&r.tree, "tree", ".", "build the product in this `folder`")
	out := flag.String("out", "dist", "write into a `folder` for each version below this one")
	version := flag.String("version", "", "`version`, or what git describe says")
	flag.StringVar(&r.image, "image", "steelyard-lb/steelyard", "`name` of the image")
	archs := flag.String("arch", "amd64,arm64", "`list` of architectures")
	key := flag.String("key", "", "sign with the secret key of minisign in this `file`")
	push := flag.String("push", "", "push the image to this `repository`, with the version as tag if it has none")
	flag.Parse()
	r.version = semantic(*version)
	r.out = filepath.Join(*out, r.version)
	r.archs = strings.Split(*archs, ",")
	if err := r.run(*key, *push); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

// run removes a previous release of the same version and builds everything. Given a key, it signs the release; given a
// registry, it pushes the image.
func (r *release) run(key, push string) (err error) {
	if r.time, err = commitTime(r.tree); err != nil {
		return err
	}
	if err := errors.Join(os.RemoveAll(r.out), os.MkdirAll(r.out, 0o755)); err != nil {
		return err
	}
	for _, arch := range r.archs {
		if err := r.build(arch); err != nil {
			return fmt.Errorf("build for %s: %w", arch, err)
		}
		if err := r.writeBOM(arch); err != nil {
			return fmt.Errorf("list the modules for %s: %w", arch, err)
		}
	}
	if err := r.writeLicences(); err != nil {
		return fmt.Errorf("collect the licences: %w", err)
	}
	index, err := r.index()
	if err != nil {
		return fmt.Errorf("make the image: %w", err)
	}
	if err := r.writeImage(index); err != nil {
		return fmt.Errorf("write the image: %w", err)
	}
	if err := r.writePackages(); err != nil {
		return fmt.Errorf("make the packages: %w", err)
	}
	if err := r.writeSums(); err != nil {
		return fmt.Errorf("write the checksums: %w", err)
	}
	if key != "" {
		if err := r.sign(key); err != nil {
			return fmt.Errorf("sign the checksums: %w", err)
		}
	}
	if push != "" {
		if err := r.push(index, push); err != nil {
			return fmt.Errorf("push the image: %w", err)
		}
	}
	return r.list()
}

// path returns the path of a file in the release.
func (r *release) path(name string) string { return filepath.Join(r.out, name) }

// binary and licences return the paths of files that are used to build others.
func (r *release) binary(arch string) string {
	return r.path("steelyard-" + r.version + "-linux-" + arch)
}
func (r *release) licences() string { return r.path("steelyard-" + r.version + "-licences.txt") }

func (r *release) list() error {
	entries, err := os.ReadDir(r.out)
	if err != nil {
		return err
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			return err
		}
		fmt.Printf("%11d %s\n", info.Size(), r.path(e.Name()))
	}
	return nil
}

var isSemantic = regexp.MustCompile(`^[0-9]+\.[0-9]+\.[0-9]+(-[0-9A-Za-z.-]+)?$`)

// semantic returns a version that packages can have, from a tag or from the output of git describe.
func semantic(described string) string {
	if v := strings.TrimPrefix(described, "v"); isSemantic.MatchString(v) {
		return v
	}
	return "0.0.0-dev." + regexp.MustCompile(`[^0-9A-Za-z.-]`).ReplaceAllString(described, "-")
}

// commitTime returns the time of the checked-out commit. It fails if files differ from the commit, because nobody could
// reproduce that release.
func commitTime(tree string) (time.Time, error) {
	changes, err := output(tree, "git", "status", "--porcelain")
	if err != nil {
		return time.Time{}, err
	}
	if changes != "" {
		return time.Time{}, fmt.Errorf("a release is built from a commit, and these files differ from it:\n%s", changes)
	}
	text, err := output(tree, "git", "log", "-1", "--format=%ct")
	if err != nil {
		return time.Time{}, err
	}
	seconds, err := strconv.ParseInt(strings.TrimSpace(text), 10, 64)
	return time.Unix(seconds, 0).UTC(), err
}

// output runs a program in a directory and returns its stdout.
func output(dir, program string, args ...string) (string, error) {
	c := exec.Command(program, args...)
	c.Dir, c.Stderr = dir, os.Stderr
	out, err := c.Output()
	if err != nil {
		err = fmt.Errorf("%s: %w", strings.Join(c.Args, " "), err)
	}
	return string(out), err
}
