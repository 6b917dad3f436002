package agent

import (
	"log/slog"
	"os"
	"strings"
	"testing"
)

// The status says when the file on disk is not the one in force, unless it was rejected, and what is in force is kept.
func TestFileIsNotInForce(t *testing.T) {
	l, _ := newTestReloader(t, new(slog.LevelVar), discard)
	other := strings.Replace(webTOML, "web", "mail", 1)
	for _, tt := range []struct {
		name, text    string // "": the file is removed
		reload        bool
		want, inForce string // part of the finding; "": none
	}{
		{"at the start", webTOML, false, "", webTOML},
		{"edited", other, false, "has changed since it was loaded", webTOML},
		{"reloaded", other, true, "", other},
		{"removed", "", false, "cannot be read: no such file", other},
		{"rejected", "[no]", true, "", other},
		{"edited after it was rejected", webTOML, false, "has changed since it was loaded", other},
		{"as in force after it was rejected", other, false, "", other},
		{"removed and rejected", "", true, "", other},
	} {
		if tt.text != "" {
			writeConfig(t, l.file, tt.text)
		} else if err := os.Remove(l.file); err != nil {
			t.Fatal(err)
		}
		if tt.reload {
			_, _ = l.reload("") // its error is the matter of other tests
		}
		found := l.findings()
		if len(found) > 1 || (len(found) == 0) != (tt.want == "") ||
			len(found) == 1 && (found[0].Code != "file-changed" || !strings.Contains(found[0].Text, tt.want)) {
			t.Errorf("%s: %+v; want %q", tt.name, found, tt.want)
		}
		last, _, err := l.history.Last()
		if l.text() != tt.inForce || last != tt.inForce || err != nil {
			t.Errorf("%s: in force is %q, kept is %q, %v; want %q", tt.name, l.text(), last, err, tt.inForce)
		}
	}
}
