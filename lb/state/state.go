// Package state stores values in files that outlive the agent. A file has a version and a checksum and is replaced
// atomically, so that a reader receives a complete value of its own version, or an error.
package state

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/google/renameio/v2"
)

// File is a file that holds one value. The first line is "steelyard NAME VERSION SHA256"; the rest is JSON.
type File struct {
	path    string
	name    string
	version int
}

// New returns the file NAME.json in a directory, which need not exist. version is the version of the value's layout.
func New(dir, name string, version int) *File {
	return &File{filepath.Join(dir, name+".json"), name, version}
}

// Path returns the path of the file.
func (f *File) Path() string { return f.path }

// Remove removes the file, which need not exist.
func (f *File) Remove() error {
	if err := os.Remove(f.path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// ErrDamaged marks files that are truncated or changed, or that another version has written.
var ErrDamaged = errors.New("not usable")

// Load reads the file into v, and reports whether it exists. After an error, v must not be used.
func (f *File) Load(v any) (found bool, err error) {
	text, err := os.ReadFile(f.path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	header, body, _ := bytes.Cut(text, []byte("\n"))
	sum := sha256.New()
	sum.Write(body)
	if want := strings.TrimSuffix(f.header(sum), "\n"); string(header) != want {
		return false, fmt.Errorf("%s: %w: the first line is %.120q, want %q", f.path, ErrDamaged, header, want)
	}
	if err := json.Unmarshal(body, v); err != nil {
		return false, fmt.Errorf("%s: %w: %w", f.path, ErrDamaged, err)
	}
	return true, nil
}

// Save replaces the file. Only root can read it.
func (f *File) Save(v any) error {
	return f.Write(func(w io.Writer) error {
		body, err := json.Marshal(v)
		if err == nil {
			_, err = w.Write(body)
		}
		return err
	})
}

// Write replaces the file, like Save, with the JSON that body writes, so that a large value need not be in memory
// twice.
func (f *File) Write(body func(io.Writer) error) error { return WriteError(f.path, f.write(body)) }

// WriteError makes the error of an atomic write name the file instead of the temporary one, so that the next attempt
// has the same error.
func WriteError(path string, err error) error {
	var of *fs.PathError
	var link *os.LinkError
	switch {
	case errors.As(err, &of):
		err = of.Err
	case errors.As(err, &link):
		err = link.Err
	case err == nil:
		return nil
	}
	return fmt.Errorf("write %s: %w", path, err)
}

func (f *File) write(body func(io.Writer) error) error {
	dir := filepath.Dir(f.path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	file, err := renameio.NewPendingFile(f.path, renameio.WithTempDir(dir), renameio.WithPermissions(0o600),
		renameio.WithExistingPermissions())
	if err != nil {
		return err
	}
	defer file.Cleanup()
	sum := sha256.New()
	if _, err := io.WriteString(file, f.header(sum)); err != nil { // replaced below, once the checksum is known
		return err
	}
	w := bufio.NewWriterSize(io.MultiWriter(file, sum), 64<<10)
	if err := body(w); err != nil {
		return err
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if _, err := file.WriteAt([]byte(f.header(sum)), 0); err != nil {
		return err
	}
	return file.CloseAtomicallyReplace()
}

// header returns the first line of a file with this checksum. Its length is always the same.
func (f *File) header(sum hash.Hash) string {
	return fmt.Sprintf("steelyard %s %d %s\n", f.name, f.version, hex.EncodeToString(sum.Sum(nil)))
}
