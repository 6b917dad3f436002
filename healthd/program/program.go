// Package program decides whether the program of an exec check may run, and as which user. It does not run it.
package program

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// User is a user with its primary group. Programs run without the user's other groups.
type User struct {
	Name     string
	UID, GID uint32
}

// nobody is used if /etc/passwd lacks that user, as in most containers.
var nobody = User{"nobody", 65534, 65534}

// Lookup returns a user by name or number.
func Lookup(name string) (User, error) {
	found, err := user.Lookup(name)
	id, number := strconv.ParseUint(name, 10, 31)
	if err != nil && number == nil {
		if found, err = user.LookupId(name); err != nil {
			return User{name, uint32(id), uint32(id)}, nil
		}
	}
	if err != nil && name == nobody.Name {
		return nobody, nil
	}
	if err != nil {
		return User{}, fmt.Errorf("there is no user %.200q", name)
	}
	uid, err1 := strconv.ParseUint(found.Uid, 10, 32)
	gid, err2 := strconv.ParseUint(found.Gid, 10, 32)
	return User{found.Username, uint32(uid), uint32(gid)}, errors.Join(err1, err2)
}

// maxLinks is the maximum number of symbolic links followed, the kernel's limit.
const maxLinks = 40

// Find returns a program's path without symbolic links. It returns an error if u cannot execute the program, or if
// anybody except root could replace it.
func Find(path string, u User) (string, error) {
	path = filepath.Clean(path)
	for range maxLinks {
		link := "" // the first link in the path
		for p := path; ; p = filepath.Dir(p) {
			info, err := os.Lstat(p)
			if err != nil {
				return "", err
			}
			if info.Mode()&fs.ModeSymlink != 0 {
				link = p // changing the link requires writing to the directory
			} else if err := check(p, info, p == path, u); err != nil {
				return "", err
			}
			if p == "/" {
				break
			}
		}
		if link == "" {
			return path, nil
		}
		to, err := os.Readlink(link)
		if err != nil {
			return "", err
		}
		if !filepath.IsAbs(to) {
			to = filepath.Join(filepath.Dir(link), to)
		}
		path = filepath.Join(to, strings.TrimPrefix(path, link))
	}
	return "", fmt.Errorf("%s: too many symbolic links", path)
}

// check returns an error if the program, or a directory above it, must not be used.
func check(path string, info fs.FileInfo, isProgram bool, u User) error {
	mode := info.Mode()
	if isProgram && !mode.IsRegular() {
		return fmt.Errorf("%s is not a file", path)
	}
	stat := info.Sys().(*syscall.Stat_t)
	// In a sticky directory, other users cannot replace root's files. A read-only mount proves nothing: it may be
	// read-only only for this process, like /usr with systemd's ProtectSystem.
	others := mode&0o002 != 0 || mode&0o020 != 0 && stat.Gid != 0
	if others && (isProgram || mode&fs.ModeSticky == 0) {
		return fmt.Errorf("%s can be written by users other than root (mode %04o)", path, mode.Perm())
	}
	if stat.Uid != 0 && (os.Geteuid() == 0 || stat.Uid != u.UID) { // a non-root agent may use its own programs
		return fmt.Errorf("%s belongs to user %d, not to root", path, stat.Uid)
	}
	var x fs.FileMode = 0o001
	switch {
	case u.UID == 0:
		x = 0o111
	case u.UID == stat.Uid:
		x = 0o100
	case u.GID == stat.Gid:
		x = 0o010
	}
	if mode&x == 0 && (isProgram || u.UID != 0) {
		return fmt.Errorf("user %s cannot execute it: the mode of %s is %04o", u.Name, path, mode.Perm())
	}
	return nil
}
