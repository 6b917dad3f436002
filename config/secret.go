package config

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"unicode/utf8"
	"unique"
)

const redacted = "[redacted]"

// Secret is a password or key that came from a file. However it is printed, logged or marshalled, it says [redacted];
// only Reveal gives it away. The zero Secret is "none". Equal secrets are equal with ==, so that a reload can compare.
type Secret struct {
	// A handle and not a string: fmt prints the fields of a struct that is itself in an unexported field without
	// calling its methods, and would then print the string.
	handle unique.Handle[string]
}

// NewSecret is for tests and for secrets that do not come from the configuration; "" gives the zero Secret.
func NewSecret(value string) Secret {
	if value == "" {
		return Secret{}
	}
	return Secret{handle: unique.Make(value)}
}

// Reveal returns the secret itself; "" when there is none.
func (s Secret) Reveal() string {
	if !s.IsSet() {
		return ""
	}
	return s.handle.Value()
}

// IsSet says whether there is a secret.
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

// Format prints the same whatever the verb.
func (s Secret) Format(f fmt.State, _ rune) { fmt.Fprint(f, s.String()) }

// secretMax is far above what any use allows; it keeps a wrong file name from reading a disk.
const secretMax = 4096

// secret reads the secret whose file a key names. A file that is there in name only is an error, for to go on without
// a password is the worst answer to a wrong password file. low and high bound its length in bytes.
func (t *table) secret(key, like string, low, high int) Secret {
	i, ok := t.get(key)
	if !ok {
		return Secret{}
	}
	name, ok := i.str(like)
	if !ok {
		return Secret{}
	}
	if name == "" {
		i.errorf("name a file, or leave the key out to have none", "is empty")
		return Secret{}
	}
	text, ok := i.secretFile(t.d.inDir(name))
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

// secretFile reads a file that only those who may should be able to read: one that is open to all works, with a warning.
func (i item) secretFile(name string) ([]byte, bool) {
	refuse := func(err error) ([]byte, bool) {
		var pe *fs.PathError
		if errors.As(err, &pe) {
			err = pe.Err
		}
		i.errorf("create it, readable for the user that runs steelyard", "%s cannot be read: %v", name, err)
		i.d.errs[len(i.d.errs)-1].cause = err
		return nil, false
	}
	info, err := os.Stat(name) // before opening: to open a named pipe would wait for its writer
	if err != nil {
		return refuse(err)
	}
	if !info.Mode().IsRegular() {
		i.errorf("name a file", "%s is not a regular file", name)
		return nil, false
	}
	if info.Mode().Perm()&0o007 != 0 {
		i.warnf(fmt.Sprintf("chmod 0640 %s (a Kubernetes Secret volume: defaultMode: 0440)", name),
			"%s is open to every user of this machine (mode %04o)", name, info.Mode().Perm())
	}
	if info.Size() > secretMax {
		i.errorf("name the right file", "%s has %d bytes, too many for a secret", name, info.Size())
		return nil, false
	}
	text, err := os.ReadFile(name)
	if err != nil {
		return refuse(err)
	}
	return text, true
}
