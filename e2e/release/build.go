package main

import (
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

const modulePath = "github.com/steelyard-lb/steelyard"

// build links the static binary for an architecture.
func (r *release) build(arch string) error {
	out, err := filepath.Abs(r.binary(arch))
	if err != nil {
		return err
	}
	const linked = " -X " + modulePath + "/lb/cli."
	ldflags := "-s -w -buildid=" + linked + "version=" + r.version + linked + "image=" + r.image
	c := r.goCommand(arch, "build", "-trimpath", "-ldflags", ldflags, "-o", out, ".")
	c.Stdout = os.Stderr
	return c.Run()
}

// goCommand returns a go command on the product, with all settings that affect the result.
func (r *release) goCommand(arch string, args ...string) *exec.Cmd {
	c := exec.Command("go", args...)
	c.Dir, c.Stderr = r.tree, os.Stderr
	c.Env = append(os.Environ(), "GOTOOLCHAIN="+r.toolchain(), "GOFLAGS=-buildvcs=false -mod=readonly", "GOWORK=off",
		"CGO_ENABLED=0", "GOOS=linux", "GOARCH="+arch, "GOAMD64=v1", "GOARM64=v8.0", "GOFIPS140=off")
	return c
}

// toolchain returns the Go version in go.mod, which other go commands download.
func (r *release) toolchain() string {
	text, err := os.ReadFile(filepath.Join(r.tree, "go.mod"))
	if err != nil {
		return "local" // the go command reports the error
	}
	for line := range strings.Lines(string(text)) {
		if v, ok := strings.CutPrefix(line, "toolchain "); ok {
			return strings.TrimSpace(v)
		}
	}
	return "local"
}

// sumsFile has the checksums of all other files, in sha256sum's format.
const sumsFile = "sha256sums"

func (r *release) writeSums() error {
	entries, err := os.ReadDir(r.out)
	if err != nil {
		return err
	}
	var sums strings.Builder
	for _, e := range entries {
		data, err := os.ReadFile(r.path(e.Name()))
		if err != nil {
			return err
		}
		fmt.Fprintf(&sums, "%x  %s\n", sha256.Sum256(data), e.Name())
	}
	return os.WriteFile(r.path(sumsFile), []byte(sums.String()), 0o644)
}
