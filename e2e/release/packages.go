package main

import (
	"bytes"
	"compress/gzip"
	"embed"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"github.com/goreleaser/nfpm/v2"
	_ "github.com/goreleaser/nfpm/v2/deb"
	"github.com/goreleaser/nfpm/v2/files"
	_ "github.com/goreleaser/nfpm/v2/rpm"
)

//go:embed scripts
var scripts embed.FS

// writePackages writes a deb and an rpm for each architecture.
func (r *release) writePackages() error {
	dir, err := os.MkdirTemp("", "steelyard-release")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := r.stage(dir); err != nil {
		return err
	}
	for _, arch := range r.archs {
		for _, format := range []string{"deb", "rpm"} {
			if err := r.writePackage(format, arch, dir); err != nil {
				return fmt.Errorf("%s for %s: %w", format, arch, err)
			}
		}
	}
	return nil
}

// "steelyard install" writes a unit with paths in /usr/local; a package's unit uses /usr.
const (
	exampleFile = "systemd/steelyard.toml"
	manualFile  = "steelyard.8.gz"
	ownBinary   = "/usr/local/bin/steelyard"
	binaryPath  = "/usr/bin/steelyard"
)

// unitNames are the units, in the tree's directory systemd.
var unitNames = []string{"steelyard.service", "steelyard-watch.service"}

// stage copies the files that all packages have to dir.
func (r *release) stage(dir string) error {
	example, err := os.ReadFile(filepath.Join(r.tree, exampleFile))
	if err != nil {
		return err
	}
	manual, err := r.manual()
	if err != nil {
		return err
	}
	staged := map[string][]byte{
		manualFile:       manual,
		"steelyard.toml": example,
	}
	for _, name := range unitNames {
		unit, err := os.ReadFile(filepath.Join(r.tree, "systemd", name))
		if err != nil {
			return err
		}
		staged[name] = bytes.ReplaceAll(unit, []byte(ownBinary), []byte(binaryPath))
	}
	for _, name := range []string{"postinstall.sh", "preremove.sh", "postremove.sh"} {
		if staged[name], err = scripts.ReadFile("scripts/" + name); err != nil {
			return err
		}
	}
	for name, text := range staged {
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// manual returns the compressed manual page, which the program prints itself. This machine cannot run the programs for
// other architectures.
func (r *release) manual() ([]byte, error) {
	page, err := r.goCommand(runtime.GOARCH, "run", "-trimpath", ".", "man").Output()
	if err != nil {
		return nil, fmt.Errorf("print the manual page: %w", err)
	}
	var out bytes.Buffer
	to := gzip.NewWriter(&out)
	_, err = to.Write(page)
	err = errors.Join(err, to.Close())
	return out.Bytes(), err
}

func (r *release) writePackage(format, arch, dir string) error {
	info := nfpm.WithDefaults(&nfpm.Info{
		Name: "steelyard", Arch: arch, Platform: "linux", Version: r.version, Release: "1",
		Section: "net", Priority: "optional", License: "Apache-2.0",
		Maintainer: "The Steelyard authors <steelyard-lb@users.noreply.github.com>",
		Vendor:     "The Steelyard authors",
		Homepage:   "https://" + modulePath,
		Description: "load balancer for Linux machines and Kubernetes clusters\n" +
			"Announces the addresses of services by BGP, ARP and NDP, forwards their\n" +
			"traffic in the kernel (eBPF), and checks the health of the servers.",
		MTime: r.time, DisableGlobbing: true,
		Overridables: nfpm.Overridables{
			Contents: r.contents(arch, dir),
			Scripts: nfpm.Scripts{
				PostInstall: filepath.Join(dir, "postinstall.sh"),
				PreRemove:   filepath.Join(dir, "preremove.sh"),
				PostRemove:  filepath.Join(dir, "postremove.sh"),
			},
			RPM: nfpm.RPM{BuildHost: "localhost", Summary: "load balancer for Linux machines and Kubernetes clusters"},
		},
	})
	packager, err := nfpm.Get(format)
	if err != nil {
		return err
	}
	if err := nfpm.PrepareForPackager(info, format); err != nil {
		return err
	}
	var out bytes.Buffer
	if err := packager.Package(info, &out); err != nil {
		return err
	}
	return os.WriteFile(r.path(packager.ConventionalFileName(info)), out.Bytes(), 0o644)
}

func (r *release) contents(arch, dir string) files.Contents {
	of := func(mode os.FileMode) *files.ContentFileInfo {
		return &files.ContentFileInfo{Owner: "root", Group: "root", Mode: mode, MTime: r.time}
	}
	var units files.Contents
	for _, name := range unitNames {
		units = append(units, &files.Content{
			Source: filepath.Join(dir, name), Destination: "/usr/lib/systemd/system/" + name, FileInfo: of(0o644),
		})
	}
	return append(units, files.Contents{
		{Source: r.binary(arch), Destination: binaryPath, FileInfo: of(0o755)},
		{
			Source: filepath.Join(dir, manualFile), Destination: "/usr/share/man/man8/" + manualFile,
			FileInfo: of(0o644),
		},
		{Destination: "/etc/steelyard", Type: files.TypeDir, FileInfo: of(0o750)},
		{
			Source: filepath.Join(dir, "steelyard.toml"), Destination: "/etc/steelyard/steelyard.toml",
			Type: files.TypeConfigNoReplace, FileInfo: of(0o640),
		},
		{Source: r.licences(), Destination: "/usr/share/doc/steelyard/copyright", FileInfo: of(0o644), Packager: "deb"},
		{
			Source: r.licences(), Destination: "/usr/share/licenses/steelyard/licences.txt", FileInfo: of(0o644),
			Packager: "rpm",
		},
	}...)
}
