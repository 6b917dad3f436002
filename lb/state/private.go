package state

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"
)

// Private ensures that nobody else can change the contents of a directory, which may not exist yet. The directory must
// belong to this user, must not be a symbolic link, and must have mode 0700. Private corrects a mode that lets others
// only read. A mode that lets them write is an error, because they may have written; so are a link and another owner.
func Private(dir string) error {
	info, err := os.Lstat(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("find the owner of a directory: %w", err)
	}
	const check = "; stop what uses it, check or remove its content, and "
	switch owner := info.Sys().(*syscall.Stat_t).Uid; {
	case info.Mode()&fs.ModeSymlink != 0:
		return fmt.Errorf("%s is a symbolic link, but must be a directory%sremove the link", dir, check)
	case !info.IsDir(): // nothing can be stored there, which is reported at the first attempt
		return nil
	case int(owner) != os.Geteuid():
		return fmt.Errorf("%s belongs to user %d, who can change its content%s\"chown %d %s\"",
			dir, owner, check, os.Geteuid(), dir)
	case info.Mode().Perm()&0o022 != 0:
		return fmt.Errorf("%s can be written by other users (mode %04o)%s\"chmod 0700 %s\"",
			dir, info.Mode().Perm(), check, dir)
	case info.Mode().Perm() != 0o700:
		// Nobody else can write there, so a failure, such as on a read-only file system, need not prevent the start.
		_ = os.Chmod(dir, 0o700)
	}
	return nil
}
