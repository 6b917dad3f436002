package cli

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// openPrivate creates or empties a file that only its owner can read. It does not follow a symbolic link, which
// somebody else may have put into a shared directory.
func openPrivate(name string) (*os.File, error) {
	file, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW, 0o600)
	if errors.Is(err, unix.ELOOP) {
		return nil, fmt.Errorf("%s is a symbolic link; name a file", name)
	}
	if err != nil {
		return nil, err
	}
	info, err := file.Stat()
	if err == nil && info.Mode().IsRegular() { // a device or a pipe keeps its mode
		err = file.Chmod(0o600) // it may have existed
	}
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}
