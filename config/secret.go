package config

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"strings"
	"unicode/utf8"
	"unique"
)

const redacted = "[redacted]"

// Secret is a password or key from a file. It prints, logs and marshals as [redacted]; only Reveal returns the value.
// The zero Secret means that none is set. Compare secrets with ==.
type Secret struct {
	// A handle hides the value from fmt, which calls no methods on unexported fields and would print a string.
	handle unique.Handle[string]
}

// NewSecret is for tests and for secrets that are not in the configuration. "" gives the zero Secret.
func NewSecret(value string) Secret {
	if value == "" {
		return Secret{}
	}
	return Secret{handle: unique.Make(value)}
}

// Reveal returns the value, or "" if the secret is not set.
func (s Secret) Reveal() string {
	if !s.IsSet() {
		return ""
	}
	return s.handle.Value()
}

// IsSet reports whether s is not the zero Secret.
func (s Secret) IsSet() bool { return s != Secret{} }

// String never returns the secret.
func (s Secret) String() string {
	if !s.IsSet() {
		return ""
	}
	return redacted
}

// LogValue never returns the secret.
func (s Secret) LogValue() slog.Value { return slog.StringValue(s.String()) }

// MarshalText never returns the secret.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// Format prints the result of String for every verb.
func (s Secret) Format(f fmt.State, _ rune) { fmt.Fprint(f, s.String()) }

// secretMax exceeds every limit on secrets. It bounds how much of a wrong file is read.
const secretMax = 4096

// secret reads the secret file that a key names. An empty file is an error, because a wrong password file must not lead
// to a session without a password. low and high limit the length in bytes.
func (t *table) secret(key, like string, low, high int) Secret {
	i, name, text, ok := t.secretText(key, like)
	if !ok {
		return Secret{}
	}
	text = bytes.TrimRight(text, "\r\n")
	switch {
	case len(text) == 0:
		i.errorf("write the secret into it, on one line", "%s is empty", name)
	case bytes.ContainsAny(text, "\r\n\x00") || !utf8.Valid(text):
		i.errorf("write one line of text", "%s is not a single line of text", name)
	case len(text) < low:
		i.errorf(fmt.Sprintf("write at least %d", low), "%s has only %d bytes", name, len(text))
	case len(text) > high:
		i.errorf(fmt.Sprintf("write at most %d", high), "%s has more than %d bytes", name, high)
	default:
		return NewSecret(string(text))
	}
	return Secret{}
}

// secrets reads up to n secrets from the file that a key names, one per line.
func (t *table) secrets(key, like string, low, high, n int) (list []Secret) {
	i, name, text, ok := t.secretText(key, like)
	if !ok {
		return nil
	}
	lines := strings.FieldsFunc(string(text), func(r rune) bool { return r == '\r' || r == '\n' })
	switch {
	case len(lines) == 0:
		i.errorf("write the secret into it, on one line", "%s is empty", name)
		return nil
	case bytes.ContainsRune(text, 0) || !utf8.Valid(text):
		i.errorf("write one secret a line", "%s is not text", name)
		return nil
	case len(lines) > n:
		i.errorf("remove the oldest", "%s has %d secrets; at most %d are accepted", name, len(lines), n)
		return nil
	}
	for _, line := range lines {
		switch {
		case len(line) < low:
			i.errorf(fmt.Sprintf("write at least %d", low), "%s has only %d bytes", name, len(line))
			return nil
		case len(line) > high:
			i.errorf(fmt.Sprintf("write at most %d", high), "%s has more than %d bytes", name, high)
			return nil
		}
		list = append(list, NewSecret(line))
	}
	return list
}

func (t *table) secretText(key, like string) (i item, name string, text []byte, ok bool) {
	if i, ok = t.get(key); !ok {
		return i, "", nil, false
	}
	if name, ok = i.str(like); !ok {
		return i, "", nil, false
	}
	if name == "" {
		i.errorf("name a file, or leave the key out", "is empty")
		return i, "", nil, false
	}
	path := t.d.inDir(name)
	if i.isElsewhere(path) {
		return i, name, []byte(placeholder), true
	}
	text, ok = i.secretFile(path)
	return i, name, text, ok
}

// placeholder is valid for every key. It replaces a secret that only the other machine has.
const placeholder = "0123456789abcdef"

// isElsewhere reports whether the configuration is for another machine and this one lacks the file.
func (i item) isElsewhere(name string) bool {
	if !i.d.elsewhere {
		return false
	}
	if _, err := os.Stat(name); !errors.Is(err, fs.ErrNotExist) {
		return false
	}
	i.warnf("run steelyard check there", "%s is not on this machine, so its content is not checked", name)
	return true
}

// secretFile reads a secret file. It warns about a file to which every user has access, but accepts it.
func (i item) secretFile(name string) ([]byte, bool) {
	if info, err := os.Stat(name); err == nil && info.Mode().IsRegular() && info.Mode().Perm()&0o007 != 0 {
		i.warnf(fmt.Sprintf("chmod 0640 %s (a Kubernetes Secret volume: defaultMode: 0440)", name),
			"%s is accessible to every user of this machine (mode %04o)", name, info.Mode().Perm())
	}
	return i.file(name, secretMax)
}

// file reads a regular file of at most limit bytes.
func (i item) file(name string, limit int64) ([]byte, bool) {
	refuse := func(err error) ([]byte, bool) {
		var pe *fs.PathError
		if errors.As(err, &pe) {
			err = pe.Err
		}
		i.errorf("create it, readable by the user that runs steelyard", "%s cannot be read: %v", name, err)
		i.d.errs[len(i.d.errs)-1].cause = err
		return nil, false
	}
	info, err := os.Stat(name) // before opening, because opening a named pipe blocks
	if err != nil {
		return refuse(err)
	}
	if !info.Mode().IsRegular() {
		i.errorf("name a file", "%s is not a regular file", name)
		return nil, false
	}
	if info.Size() > limit {
		i.errorf("correct the file name", "%s has %d bytes, more than %d", name, info.Size(), limit)
		return nil, false
	}
	text, err := os.ReadFile(name)
	if err != nil {
		return refuse(err)
	}
	return text, true
}
