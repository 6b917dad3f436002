package program

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// Find requires that only root can replace the program and that the user can execute it.
func TestFind(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: files have owners")
	}
	top, err := os.MkdirTemp("", "programs") // in a sticky directory
	must.Do(t, err)
	t.Cleanup(func() { os.RemoveAll(top) })
	do := func(err error) {
		t.Helper()
		must.Do(t, err)
	}
	file := func(name string, dirMode, mode os.FileMode) string {
		path := filepath.Join(top, name, "check")
		do(os.MkdirAll(filepath.Dir(path), 0o755))
		do(os.WriteFile(path, []byte("#!/bin/sh\n"), 0o755))
		do(os.Chmod(path, mode))
		do(os.Chmod(filepath.Dir(path), dirMode))
		return path
	}
	do(os.Chmod(top, 0o755))
	link := func(name, to string) string {
		path := filepath.Join(top, name)
		do(os.Symlink(to, path))
		return path
	}
	good := file("good", 0o755, 0o755)
	open := file("open", 0o777, 0o755)
	theirs := file("theirs", 0o755, 0o755)
	do(os.Chown(theirs, 1000, 0))
	group := file("group", 0o775, 0o755)
	do(os.Chown(filepath.Dir(group), 0, 50))
	ours := file("ours", 0o755, 0o750)
	do(os.Chown(ours, 0, 65534))
	root := User{Name: "root"}
	for name, tt := range map[string]struct {
		path string
		user User
		want string // the path found, or part of the error
	}{
		"good":                {good, nobody, good},
		"not clean":           {top + "//good/../good/check", nobody, good},
		"writable":            {file("w", 0o755, 0o757), nobody, "w/check can be written by users other than root"},
		"writable directory":  {open, nobody, "open can be written by users other than root (mode 0777)"},
		"sticky directory":    {file("sticky", 0o777|os.ModeSticky, 0o755), nobody, "sticky/check"},
		"another owner":       {theirs, nobody, "theirs/check belongs to user 1000, not to root"},
		"group":               {group, nobody, "group can be written by users other than root (mode 0775)"},
		"group root":          {file("groot", 0o775, 0o775), nobody, "groot/check"},
		"of root only":        {file("rootfile", 0o755, 0o700), nobody, "user nobody cannot execute it: the mode of"},
		"for root":            {file("rootall", 0o700, 0o700), root, "rootall/check"},
		"directory of root":   {file("rootdir", 0o700, 0o755), nobody, "the mode of " + top + "/rootdir is 0700"},
		"of the group":        {ours, nobody, ours},
		"of another group":    {ours, User{"x", 1000, 1000}, "user x cannot execute it"},
		"not executable":      {file("data", 0o755, 0o644), root, "user root cannot execute it"},
		"a directory":         {filepath.Dir(good), nobody, "good is not a file"},
		"a link":              {link("link", "good/check"), nobody, good},
		"a link to a folder":  {link("folder", top+"/good") + "/check", nobody, good},
		"a link from outside": {filepath.Join(filepath.Dir(open), "../good/check"), nobody, good},
		"a loop":              {link("loop", "loop"), nobody, "too many symbolic links"},
		"missing":             {top + "/good/none", nobody, "no such file"},
	} {
		got, err := Find(tt.path, tt.user)
		if err != nil {
			got = err.Error()
		}
		must.True(t, strings.Contains(got, tt.want), "%s: %s; want %s", name, got, tt.want)
	}
	do(os.Symlink(good, filepath.Join(filepath.Dir(open), "link"))) // anybody can replace the link
	got, err := Find(filepath.Join(filepath.Dir(open), "link"), nobody)
	must.True(t, err != nil, "a link that others can replace: %s", got)
}

func TestLookup(t *testing.T) {
	for name, want := range map[string]User{
		"root": {"root", 0, 0}, "0": {"root", 0, 0}, "4000000": {"4000000", 4000000, 4000000}, "nobody": nobody,
	} {
		got, err := Lookup(name)
		must.True(t, got == want && err == nil, "%s: %+v, %v; want %+v", name, got, err, want)
	}
	_, err := Lookup("no such user")
	must.Fail(t, err, `no user "no such user"`)
}
