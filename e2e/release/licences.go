package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// isLicence matches names of files that must accompany copies of the code beside them.
var isLicence = regexp.MustCompile(`(?i)^(licen[cs]e|copying|notice|copyright|patents)([-._].*)?$`)

// source is a module, or Go itself, with the directories of its linked packages.
type source struct {
	name, dir string
	packages  map[string]bool
}

// writeLicences writes one file with the licences of the product, Go, and all modules in the binaries. A module without
// a licence is an error.
func (r *release) writeLicences() error {
	sources := map[string]*source{}
	for _, arch := range r.archs {
		if err := r.addSources(sources, arch); err != nil {
			return err
		}
	}
	own, err := licencesOf(r.tree, map[string]bool{r.tree: true, filepath.Join(r.tree, "LICENSES"): true})
	if err != nil {
		return err
	}
	var text bytes.Buffer
	fmt.Fprintf(&text, "Steelyard %s, and the licences of what is linked into it.\n", r.version)
	add(&text, modulePath, own)
	for _, name := range slices.Sorted(maps.Keys(sources)) {
		files, err := licencesOf(sources[name].dir, sources[name].packages)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		add(&text, name, files)
	}
	return os.WriteFile(r.licences(), text.Bytes(), 0o644)
}

// add writes a module's licences, each below a heading.
func add(w io.Writer, name string, files map[string][]byte) {
	line := strings.Repeat("=", 80)
	for _, path := range slices.Sorted(maps.Keys(files)) {
		fmt.Fprintf(w, "\n%s\n%s: %s\n%s\n\n%s", line, name, path, line, files[path])
	}
}

// addSources adds everything linked into the binary for an architecture.
func (r *release) addSources(sources map[string]*source, arch string) error {
	list := r.goCommand(arch, "list", "-deps", "-json=Dir,Root,Standard,Module", ".")
	out, err := list.Output()
	if err != nil {
		return fmt.Errorf("%s: %w", list, err)
	}
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var p struct {
			Dir, Root string
			Standard  bool
			Module    *struct {
				Path, Version, Dir string
				Main               bool
			}
		}
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		s := &source{packages: map[string]bool{}}
		switch {
		case p.Standard:
			s.name, s.dir = "Go", p.Root
		case p.Module == nil || p.Module.Main:
			continue
		default:
			s.name, s.dir = p.Module.Path+" "+p.Module.Version, p.Module.Dir
		}
		if sources[s.name] == nil {
			sources[s.name] = s
		}
		sources[s.name].packages[p.Dir] = true
	}
}

// licencesOf reads the licences in the packages' directories and their parents up to root, by path below root.
func licencesOf(root string, packages map[string]bool) (map[string][]byte, error) {
	seen, files := map[string]bool{}, map[string][]byte{}
	for dir := range packages {
		for ; !seen[dir]; dir = filepath.Dir(dir) {
			seen[dir] = true
			entries, err := os.ReadDir(dir)
			if err != nil {
				return nil, err
			}
			for _, e := range entries {
				is := isLicence.MatchString(e.Name()) || filepath.Base(dir) == "LICENSES"
				if !is || !e.Type().IsRegular() || filepath.Ext(e.Name()) == ".go" {
					continue
				}
				path := filepath.Join(dir, e.Name())
				below, err := filepath.Rel(root, path)
				if err != nil {
					return nil, err
				}
				if files[filepath.ToSlash(below)], err = os.ReadFile(path); err != nil {
					return nil, err
				}
			}
			if dir == root {
				break
			}
		}
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("no licence in %s: %w", root, fs.ErrNotExist)
	}
	return files, nil
}
