package systemd

import (
	_ "embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
)

//go:embed steelyard.service
var unit []byte

//go:embed steelyard.toml
var example []byte

// Where things go, below the root given to Install.
const (
	binaryPath = "usr/local/bin/steelyard"
	unitPath   = "etc/systemd/system/steelyard.service"
	configPath = "etc/steelyard/steelyard.toml"
)

// Install copies the running binary, the unit and, where there is no configuration, an example below root, and tells
// systemd when root is "/". It starts nothing, and says on w what it did and what comes next.
func Install(w io.Writer, root string) error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this binary: %w", err)
	}
	binary, err := os.ReadFile(self)
	if err != nil {
		return fmt.Errorf("read this binary: %w", err)
	}
	for _, f := range []struct {
		path string
		text []byte
		mode os.FileMode
		keep bool
	}{{binaryPath, binary, 0o755, false}, {unitPath, unit, 0o644, false}, {configPath, example, 0o640, true}} {
		path := filepath.Join(root, f.path)
		if _, err := os.Stat(path); err == nil && f.keep {
			fmt.Fprintf(w, "kept      %s\n", path)
			continue
		}
		if err := replace(path, f.text, f.mode); err != nil {
			return fmt.Errorf("install %s: %w", path, err)
		}
		fmt.Fprintf(w, "installed %s\n", path)
	}
	if err := tell(root, "daemon-reload"); err != nil {
		return err
	}
	_, err = fmt.Fprintf(w, "Next: edit /%s, then systemctl enable --now steelyard\n", configPath)
	return err
}

// Uninstall stops the service and removes what Install wrote, but for the configuration. What the kernel forwards goes
// on until "steelyard cleanup".
func Uninstall(w io.Writer, root string) error {
	if _, err := os.Stat(filepath.Join(root, unitPath)); err == nil {
		if err := tell(root, "disable", "--now", "steelyard.service"); err != nil {
			return err
		}
	}
	for _, path := range []string{unitPath, binaryPath} {
		path = filepath.Join(root, path)
		switch err := os.Remove(path); {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			return fmt.Errorf("uninstall: %w", err)
		default:
			fmt.Fprintf(w, "removed   %s\n", path)
		}
	}
	return tell(root, "daemon-reload")
}

// replace writes a file at once, so that a running program or a reader never sees half of it.
func replace(path string, text []byte, mode os.FileMode) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", text, mode); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// tell runs systemctl when root is the machine itself and systemd runs it.
func tell(root string, args ...string) error {
	if _, err := os.Stat("/run/systemd/system"); root != "/" || err != nil {
		return nil
	}
	if out, err := exec.Command("systemctl", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("systemctl %v: %w: %s", args, err, out)
	}
	return nil
}
