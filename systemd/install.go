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
// systemd when root is "/" and systemd runs the machine. It may be repeated, which is how to upgrade. It starts nothing and
// enables nothing, for the example does nothing yet, and says on w what it did and what comes next.
func Install(w io.Writer, root string) error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this binary: %w", err)
	}
	binary, err := os.ReadFile(self)
	if err != nil {
		return fmt.Errorf("read this binary: %w", err)
	}
	_, err = os.Lstat(filepath.Join(root, unitPath))
	next := "systemctl enable --now steelyard"
	if err == nil {
		next = "systemctl restart steelyard"
	}
	for _, f := range []struct {
		path string
		text []byte
		mode os.FileMode
		keep bool
	}{{binaryPath, binary, 0o755, false}, {unitPath, unit, 0o644, false}, {configPath, example, 0o640, true}} {
		path := filepath.Join(root, f.path)
		if _, err := os.Lstat(path); err == nil && f.keep {
			fmt.Fprintf(w, "kept      %s\n", path)
			continue
		}
		if err := replace(path, f.text, f.mode); err != nil {
			return fmt.Errorf("install %s: %w", path, err)
		}
		fmt.Fprintf(w, "installed %s\n", path)
		if f.keep {
			next = fmt.Sprintf("edit %s, then %s", path, next)
		}
	}
	if err := tell(root, "daemon-reload"); err != nil {
		return err
	}
	_, err = fmt.Fprintf(w, "Next: %s\n", next)
	return err
}

// Uninstall stops the service and removes what Install wrote, but for the configuration. What the kernel forwards goes
// on until "steelyard cleanup". What is not there is no error.
func Uninstall(w io.Writer, root string) error {
	if _, err := os.Lstat(filepath.Join(root, unitPath)); err == nil {
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

// replace writes a file at once, so that neither a program that runs from it nor a reader ever sees half of it. The mode
// holds whatever the umask is: a unit that systemd's tools cannot read is of no use.
func replace(path string, text []byte, mode os.FileMode) error {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	f, err := os.CreateTemp(dir, ".steelyard-*")
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	err = errors.Join(err, f.Chmod(mode), f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}

// tell runs systemctl when root is the machine itself and systemd runs it (sd_booted(3)).
func tell(root string, args ...string) error {
	if fi, err := os.Lstat("/run/systemd/system"); filepath.Clean(root) != "/" || err != nil || !fi.IsDir() {
		return nil
	}
	if out, err := exec.Command("systemctl", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("systemctl %v: %w: %s", args, err, out)
	}
	return nil
}
