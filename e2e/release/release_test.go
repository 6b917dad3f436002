package main

import (
	"archive/tar"
	"bytes"
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"aead.dev/minisign"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
)

// made returns a release whose slow parts already exist, with short files instead of binaries.
func made(t *testing.T) *release {
	t.Helper()
	r := &release{
		tree: "../..", out: t.TempDir(), version: "0.1.0", image: "steelyard-lb/steelyard",
		time: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), archs: []string{"amd64", "arm64"},
	}
	for _, arch := range r.archs {
		check(t, os.WriteFile(r.binary(arch), []byte("program for "+arch), 0o755))
	}
	check(t, os.WriteFile(r.licences(), []byte("licences"), 0o644))
	return r
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Everything except the binaries is the same at another time in another directory. repeat.sh compares the binaries.
func TestSameBytes(t *testing.T) {
	var sums [2]string
	for i := range sums {
		r := made(t)
		index, err := r.index()
		check(t, err)
		check(t, errors.Join(r.writeImage(index), r.writePackages(), r.writeSums()))
		text, err := os.ReadFile(r.path(sumsFile))
		check(t, err)
		sums[i] = string(text)
		time.Sleep(time.Second) // the resolution of most times in archives is one second
	}
	if n := strings.Count(sums[0], "\n"); n != 8 {
		t.Errorf("%d files; want 8:\n%s", n, sums[0])
	}
	if sums[0] != sums[1] {
		t.Errorf("once:\n%s\nand again:\n%s", sums[0], sums[1])
	}
}

func TestSemantic(t *testing.T) {
	for described, want := range map[string]string{
		"v0.1.0":             "0.1.0",
		"0.1.0":              "0.1.0",
		"0.1.0-rc.1":         "0.1.0-rc.1",
		"v0.1.0-5-g9dc945c":  "0.1.0-5-g9dc945c",
		"9dc945c":            "0.0.0-dev.9dc945c",
		"1234567":            "0.0.0-dev.1234567",
		"topic/a_b-3-g12345": "0.0.0-dev.topic-a-b-3-g12345",
	} {
		if got := semantic(described); got != want {
			t.Errorf("%s: %s; want %s", described, got, want)
		}
	}
}

// The module list has everything linked into the program.
func TestBOM(t *testing.T) {
	r := made(t)
	self, err := os.Executable()
	check(t, err)
	program, err := os.ReadFile(self)
	check(t, err)
	check(t, os.WriteFile(r.binary("arm64"), program, 0o755))
	check(t, r.writeBOM("arm64"))
	text, err := os.ReadFile(r.binary("arm64") + ".cdx.json")
	check(t, err)
	var list bom
	check(t, json.Unmarshal(text, &list))
	info, err := buildinfo.ReadFile(r.binary("arm64"))
	check(t, err)
	if n, at := len(list.Modules), list.Metadata.Timestamp; n != len(info.Deps)+1 || at != "2026-01-02T03:04:05Z" {
		t.Errorf("the list has %d modules and the time %s; want %d and 2026-01-02T03:04:05Z", n, at, len(info.Deps)+1)
	}
	refs := map[string]bool{}
	for _, m := range list.Modules {
		if refs[m.Ref] || m.Version == "" {
			t.Errorf("%+v is there twice, or has no version", m)
		}
		refs[m.Ref] = true
	}
	if !refs["pkg:golang/aead.dev/minisign@v0.3.0"] {
		t.Errorf("minisign is missing in %s", text)
	}
}

// Licences are found next to linked packages and above them, but not elsewhere in the module.
func TestLicences(t *testing.T) {
	root := t.TempDir()
	for _, path := range []string{
		"LICENSE", "a/b/NOTICE.txt", "a/COPYING", "a/licence.go", "c/LICENSE", "a/b/code.go",
	} {
		path = filepath.Join(root, path)
		check(t, errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(path), 0o644)))
	}
	files, err := licencesOf(root, map[string]bool{filepath.Join(root, "a/b"): true})
	if err != nil || len(files) != 3 || files["LICENSE"] == nil || files["a/COPYING"] == nil ||
		files["a/b/NOTICE.txt"] == nil {
		t.Errorf("files %q, error %v; want LICENSE, a/COPYING and a/b/NOTICE.txt", files, err)
	}
	var text strings.Builder
	add(&text, "example.org/m v1.0.0", files)
	if got := text.String(); !strings.Contains(got, "\nexample.org/m v1.0.0: a/b/NOTICE.txt\n") ||
		strings.Count(got, "/LICENSE") != 1 || !strings.HasSuffix(got, root+"/a/b/NOTICE.txt") {
		t.Errorf("the text lacks a heading or a licence:\n%s", got)
	}
	check(t, os.Remove(filepath.Join(root, "LICENSE")))
	if _, err := licencesOf(root, map[string]bool{root: true}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a module without a licence: error %v; want %v", err, os.ErrNotExist)
	}
}

// The image is pushed under the version, for each architecture, with certificates and licences.
func TestPush(t *testing.T) {
	r := made(t)
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer server.Close()
	index, err := r.index()
	check(t, err)
	repository := strings.TrimPrefix(server.URL, "http://") + "/own/steelyard"
	check(t, r.push(index, repository))
	tag, err := name.NewTag(repository + ":0.1.0")
	check(t, err)
	for _, arch := range r.archs {
		image, err := remote.Image(tag, remote.WithPlatform(v1.Platform{OS: "linux", Architecture: arch}))
		check(t, err)
		config, err := image.ConfigFile()
		check(t, err)
		if config.Architecture != arch || config.Config.Entrypoint[0] != "/steelyard" || !config.Created.Equal(r.time) {
			t.Errorf("%s: %+v", arch, config)
		}
		files := contents(t, mutate.Extract(image))
		if !bytes.HasPrefix(files["etc/ssl/certs/ca-certificates.crt"], []byte("-----BEGIN CERTIFICATE-----\n")) {
			t.Errorf("%s has no certificates", arch)
		}
		program, err := os.ReadFile(r.binary(arch))
		check(t, err)
		licences := string(files["usr/share/doc/steelyard/licences.txt"])
		if !bytes.Equal(files["steelyard"], program) || licences != "licences" {
			t.Errorf("%s: the image has a different program or different licences", arch)
		}
	}
	if err := r.push(index, "no such name"); err == nil {
		t.Error("pushed to an invalid name")
	}
}

// If the manifest names the image without a registry, the archive has the name that a kubelet expects.
func TestImageArchive(t *testing.T) {
	r := made(t)
	index, err := r.index()
	check(t, err)
	check(t, r.writeImage(index))
	f, err := os.Open(r.path("steelyard-0.1.0-image.tar"))
	check(t, err)
	defer f.Close()
	files := contents(t, f)
	var top v1.IndexManifest
	check(t, json.Unmarshal(files["index.json"], &top))
	called := top.Manifests[0].Annotations["io.containerd.image.name"]
	if !strings.HasSuffix(called, "/steelyard-lb/steelyard:0.1.0") || files["oci-layout"] == nil {
		t.Errorf("the image is called %q", called)
	}
	digest, err := index.Digest()
	check(t, err)
	if top.Manifests[0].Digest != digest || files["blobs/sha256/"+digest.Hex] == nil {
		t.Errorf("%s is not in the archive", digest)
	}
	r.image = "registry.example:5000/Own"
	if err := r.writeImage(index); err == nil {
		t.Error("an invalid name was written")
	}
}

// contents returns an archive's files by path.
func contents(t *testing.T, archive io.Reader) map[string][]byte {
	t.Helper()
	files := map[string][]byte{}
	for r := tar.NewReader(archive); ; {
		head, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		check(t, err)
		if files[head.Name], err = io.ReadAll(r); err != nil {
			t.Fatal(err)
		}
	}
}

// The key has signed the checksums. A key with a password would take a second or more to read.
func TestSign(t *testing.T) {
	r := made(t)
	public, secret, err := minisign.GenerateKey(nil)
	check(t, err)
	text, err := secret.MarshalText()
	check(t, err)
	key := filepath.Join(t.TempDir(), "key")
	check(t, os.WriteFile(key, text, 0o600))
	check(t, r.writeSums())
	if err := r.sign(r.path(sumsFile)); err == nil {
		t.Error("signed with a file that is not a key")
	}
	check(t, r.sign(key))
	sums, err := os.ReadFile(r.path(sumsFile))
	check(t, err)
	signature, err := os.ReadFile(r.path(sumsFile + ".minisig"))
	check(t, err)
	hashed := minisign.NewReader(bytes.NewReader(sums))
	_, err = io.Copy(io.Discard, hashed)
	check(t, err)
	if !hashed.Verify(public, signature) {
		t.Errorf("not a signature of the checksums:\n%s", signature)
	}
	if !strings.Contains(string(signature), "\tfile:sha256sums\tsteelyard 0.1.0\n") {
		t.Errorf("the trusted comment does not name the release:\n%s", signature)
	}
}
