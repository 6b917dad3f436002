package main

import (
	"archive/tar"
	"bytes"
	"encoding/pem"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/distribution/reference"
	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/crypto/x509roots/fallback/bundle"
)

// index returns the image for all architectures.
func (r *release) index() (v1.ImageIndex, error) {
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, arch := range r.archs {
		image, err := r.imageFor(arch)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", arch, err)
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{
			Add: image, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: arch}},
		})
	}
	return index, nil
}

// imageFor returns the image for an architecture: the binary, its licences, and the trusted certificates for https
// checks. It has no shell.
func (r *release) imageFor(arch string) (v1.Image, error) {
	binary, err := os.ReadFile(r.binary(arch))
	if err != nil {
		return nil, err
	}
	licences, err := os.ReadFile(r.licences())
	if err != nil {
		return nil, err
	}
	files, err := r.archive(
		file{"etc/ssl/certs/ca-certificates.crt", 0o644, certificates()},
		file{"steelyard", 0o755, binary},
		file{"usr/share/doc/steelyard/licences.txt", 0o644, licences},
	)
	if err != nil {
		return nil, err
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(files)), nil
	}, tarball.WithMediaType(types.OCILayer), tarball.WithCompressedCaching)
	if err != nil {
		return nil, err
	}
	image := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	image, err = mutate.ConfigFile(image, &v1.ConfigFile{
		OS: "linux", Architecture: arch, Created: v1.Time{Time: r.time},
		RootFS: v1.RootFS{Type: "layers"},
		Config: v1.Config{
			Entrypoint: []string{"/steelyard"}, Cmd: []string{"run"},
			Labels: map[string]string{
				"org.opencontainers.image.title":    "steelyard",
				"org.opencontainers.image.version":  r.version,
				"org.opencontainers.image.licenses": "Apache-2.0",
			},
		},
	})
	if err != nil {
		return nil, err
	}
	return mutate.Append(image, mutate.Addendum{
		Layer: layer, History: v1.History{Created: v1.Time{Time: r.time}, CreatedBy: "make release"},
	})
}

// certificates returns the roots that Mozilla trusts. It omits roots that Mozilla trusts only until some date, because
// PEM cannot express that.
func certificates() []byte {
	var text bytes.Buffer
	for root := range bundle.Roots() {
		if root.Constraint == nil {
			text.Write(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: root.Certificate}))
		}
	}
	return text.Bytes()
}

// writeImage writes the archive for "ctr images import" and "docker load", with the image name that a kubelet uses.
func (r *release) writeImage(index v1.ImageIndex) error {
	tag, err := reference.ParseDockerRef(r.image + ":" + r.version)
	if err != nil {
		return fmt.Errorf("name of the image: %w", err)
	}
	dir, err := os.MkdirTemp("", "steelyard-release")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	named := mutate.AppendManifests(mutate.IndexMediaType(empty.Index, types.OCIImageIndex), mutate.IndexAddendum{
		Add: index, Descriptor: v1.Descriptor{Annotations: map[string]string{
			"io.containerd.image.name":          tag.String(),
			"org.opencontainers.image.ref.name": r.version,
		}},
	})
	if _, err := layout.Write(dir, named); err != nil {
		return err
	}
	var files []file
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		below, err := filepath.Rel(dir, path)
		files = append(files, file{filepath.ToSlash(below), 0o644, text})
		return err
	})
	if err != nil {
		return err
	}
	archive, err := r.archive(files...)
	if err != nil {
		return err
	}
	return os.WriteFile(r.path("steelyard-"+r.version+"-image.tar"), archive, 0o644)
}

// push sends the image to a registry, with the credentials of docker or podman.
func (r *release) push(index v1.ImageIndex, to string) error {
	tag, err := name.NewTag(to, name.WithDefaultTag(r.version))
	if err != nil {
		return err
	}
	if err := remote.WriteIndex(tag, index, remote.WithAuthFromKeychain(authn.DefaultKeychain)); err != nil {
		return err
	}
	digest, err := index.Digest()
	if err != nil {
		return err
	}
	fmt.Printf("pushed %s@%s\n", tag, digest)
	return nil
}

// file is a file in an archive.
type file struct {
	path string
	mode int64
	text []byte
}

// archive returns a tar archive of files owned by root.
func (r *release) archive(files ...file) ([]byte, error) {
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	made := map[string]bool{".": true}
	for _, f := range files {
		if err := r.folders(w, made, filepath.Dir(f.path)); err != nil {
			return nil, err
		}
		head := tar.Header{
			Name: f.path, Mode: f.mode, Size: int64(len(f.text)), ModTime: r.time, Format: tar.FormatUSTAR,
		}
		if err := w.WriteHeader(&head); err != nil {
			return nil, err
		}
		if _, err := w.Write(f.text); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

// folders adds a directory and its parents.
func (r *release) folders(w *tar.Writer, made map[string]bool, dir string) error {
	if made[dir] {
		return nil
	}
	made[dir] = true
	if err := r.folders(w, made, filepath.Dir(dir)); err != nil {
		return err
	}
	return w.WriteHeader(&tar.Header{
		Typeflag: tar.TypeDir, Name: dir + "/", Mode: 0o755, ModTime: r.time, Format: tar.FormatUSTAR,
	})
}
