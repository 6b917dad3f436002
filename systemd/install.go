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

	"github.com/google/renameio/v2"
)

//go:embed steelyard.service
var unit []byte

//go:embed steelyard-watch.service
var watchUnit []byte

//go:embed steelyard.toml
var example []byte

// Paths of installed files, relative to the root given to Install.
const (
	binaryPath = "usr/local/bin/steelyard"
	unitPath   = "etc/systemd/system/steelyard.service"
	watchPath  = "etc/systemd/system/steelyard-watch.service"
	configPath = "etc/steelyard/steelyard.toml"
	drainsPath = "run/steelyard/drained.json" // lb/agent writes it; a new installation must not start drained
)

// watchName is the unit of "steelyard proxy watch", which steelyard.service starts.
const watchName = "steelyard-watch.service"

// Install copies the running binary and the units to root and, if there is no configuration, adds an example. If root
// is "/" and systemd runs the system, it reloads systemd, and starts the watcher again if the agent runs. To upgrade,
// install again. Because the example configures nothing, Install does not start or enable a unit. It reports each file
// and the next step on w.
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
		next = "steelyard restart"
	}
	for _, f := range []struct {
		path string
		text []byte
		mode os.FileMode
		keep bool
	}{
		{binaryPath, binary, 0o755, false}, {unitPath, unit, 0o644, false}, {watchPath, watchUnit, 0o644, false},
		{configPath, example, 0o640, true},
	} {
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
	if err := systemctl(root, "daemon-reload"); err != nil {
		return err
	}
	if systemctl(root, "is-active", "--quiet", "steelyard.service") == nil {
		if err := systemctl(root, "restart", watchName); err != nil {
			return err
		}
	}
	_, err = fmt.Fprintf(w, "Next: %s\n", next)
	return err
}

// errRemains is why Uninstall refuses: the kernel would continue to forward, without a binary to clean up.
var errRemains = errors.New(`Steelyard's programs are in the kernel and forward even without the agent; ` +
	`stop the agent and run "steelyard cleanup" first`)

// Uninstall stops the service and removes the record of drains and the files from Install, except the configuration. It
// refuses while remains reports that something is left in the kernel. A missing file is not an error.
func Uninstall(w io.Writer, root string, remains func() (bool, error)) error {
	if is, err := remains(); err != nil {
		return fmt.Errorf("uninstall: %w", err)
	} else if is {
		return errRemains
	}
	if _, err := os.Lstat(filepath.Join(root, unitPath)); err == nil {
		if err := systemctl(root, "disable", "--now", "steelyard.service"); err != nil {
			return err
		}
	}
	if _, err := os.Lstat(filepath.Join(root, watchPath)); err == nil {
		if err := systemctl(root, "stop", watchName); err != nil {
			return err
		}
	}
	for _, path := range []string{unitPath, watchPath, binaryPath, drainsPath} {
		path = filepath.Join(root, path)
		switch err := os.Remove(path); {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			return fmt.Errorf("uninstall: %w", err)
		default:
			fmt.Fprintf(w, "removed   %s\n", path)
		}
	}
	return systemctl(root, "daemon-reload")
}

// replace writes a file atomically, so readers never see a partial file. The mode does not depend on the umask or an
// older file, because systemd's tools must be able to read the unit.
func replace(path string, text []byte, mode os.FileMode) error {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	f, err := renameio.NewPendingFile(path, renameio.WithTempDir(dir), renameio.WithStaticPermissions(mode))
	if err != nil {
		return err
	}
	defer f.Cleanup()
	if _, err := f.Write(text); err != nil {
		return err
	}
	return f.CloseAtomicallyReplace()
}

// systemctl runs systemctl if root is the root of this system and systemd runs it (sd_booted(3)).
func systemctl(root string, args ...string) error {
	if fi, err := os.Lstat("/run/systemd/system"); filepath.Clean(root) != "/" || err != nil || !fi.IsDir() {
		return nil
	}
	if out, err := exec.Command("systemctl", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("systemctl %v: %w: %s", args, err, out)
	}
	return nil
}
