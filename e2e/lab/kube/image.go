package kube

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"debug/elf"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
)

// Image is a container image with some programs.
type Image struct {
	Names []string // with tags
	// Programs are files on this machine. The first one is "/NAME" in the image and its entry point. The others are in
	// /bin. The image also has their libraries.
	Programs []string
	// Files are other files by path in the image, and Links symbolic links.
	Files, Links map[string]string
	// Archive is a file with an image, as from "make release", instead of all the above.
	Archive string
}

// archive returns the image in the format of "docker save", or its Archive.
func (i Image) archive() (string, error) {
	if i.Archive != "" {
		b, err := os.ReadFile(i.Archive)
		return string(b), err
	}
	files := map[string][]byte{}
	for to, text := range i.Files {
		files[strings.TrimPrefix(to, "/")] = []byte(text)
	}
	entry := filepath.Base(i.Programs[0])
	for n, program := range i.Programs {
		to := "bin/" + filepath.Base(program)
		if n == 0 {
			to = entry
		}
		if err := addProgram(files, program, to); err != nil {
			return "", err
		}
	}
	layer, err := tarOf(files, i.Links, 0o755)
	if err != nil {
		return "", err
	}
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH, "os": "linux",
		"config": map[string]any{"Entrypoint": []string{"/" + entry}, "Env": []string{"PATH=/bin:/"}},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{digest(layer)}},
	})
	if err != nil {
		return "", err
	}
	manifest, err := json.Marshal([]map[string]any{{
		"Config": "config.json", "RepoTags": i.Names, "Layers": []string{"layer.tar"},
	}})
	if err != nil {
		return "", err
	}
	files = map[string][]byte{"manifest.json": manifest, "config.json": config, "layer.tar": layer}
	all, err := tarOf(files, nil, 0o644)
	return string(all), err
}

// addProgram adds a program and its libraries to an image's files.
func addProgram(files map[string][]byte, program, to string) error {
	content, err := os.ReadFile(program)
	if err != nil {
		return err
	}
	files[to] = content
	libraries, err := librariesOf(program)
	if err != nil {
		return fmt.Errorf("libraries of %s: %w", program, err)
	}
	for _, name := range libraries {
		if files[strings.TrimPrefix(name, "/")], err = os.ReadFile(name); err != nil {
			return err
		}
	}
	return nil
}

// librariesOf returns a program's loader and the libraries that it links.
func librariesOf(program string) (names []string, err error) {
	f, err := elf.Open(program)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if !slices.ContainsFunc(f.Progs, func(p *elf.Prog) bool { return p.Type == elf.PT_INTERP }) {
		return nil, nil
	}
	out, err := exec.CommandContext(context.Background(), "ldd", program).Output()
	if err != nil {
		return nil, errors.Join(err, errors.New(string(out)))
	}
	for _, field := range strings.Fields(string(out)) {
		if path.IsAbs(field) {
			names = append(names, field)
		}
	}
	return names, nil
}

func tarOf(files map[string][]byte, links map[string]string, mode int64) ([]byte, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, name := range slices.Sorted(maps.Keys(files)) {
		content := files[name]
		if err := w.WriteHeader(&tar.Header{Name: name, Mode: mode, Size: int64(len(content))}); err != nil {
			return nil, err
		}
		if _, err := w.Write(content); err != nil {
			return nil, err
		}
	}
	for _, name := range slices.Sorted(maps.Keys(links)) {
		link := &tar.Header{Typeflag: tar.TypeSymlink, Name: strings.TrimPrefix(name, "/"), Linkname: links[name]}
		if err := w.WriteHeader(link); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

func digest(b []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(b)) }
