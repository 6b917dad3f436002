package cli

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/google/renameio/v2"
	ucli "github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/events"
)

// bundled are the responses of the agent in a bundle, by file name.
var bundled = []struct{ name, path string }{
	{"status.json", "/v1/status"}, {"services.json", "/v1/services"}, {"backends.json", "/v1/backends"},
	{"routes.json", "/v1/routes"}, {"peers.json", "/v1/peers"},
	{"members.json", "/v1/members"}, {"events.json", "/v1/events"},
}

// bundle writes a tar.gz with all that a report of a problem needs. It contains names and addresses, but no secrets:
// the agent never prints the content of a secret file. What is missing, and why, is in the file errors.txt. Without an
// examination, why says why there is none, and the bundle has what needs no agent.
func (e *env) bundle(c *ucli.Context, x *examination, why error) error {
	files := &archive{at: time.Now()}
	if x != nil {
		e.addAnswers(c, files, x)
	} else {
		files.add("doctor.txt", nil, why)
		for _, f := range bundled {
			files.add(f.name, nil, why)
		}
		list, err := e.programs.Events(events.Filter{})
		text, _ := json.MarshalIndent(list, "", "  ") // of strings and times: never fails
		files.add("events-stored.json", text, err)
		text, err = os.ReadFile(c.String("config"))
		files.addConfig(string(text), err)
	}
	files.write("version.txt", func(w io.Writer) error { return (&env{out: w, programs: e.programs}).version(c) })
	files.write("kernel.txt", kernel)
	files.write("network.txt", e.programs.Network)
	if _, err := exec.LookPath("nft"); err == nil {
		files.write("nft.txt", func(w io.Writer) error { return ruleset(c.Context, w) })
	}
	if c.Context.Err() != nil {
		return context.Cause(c.Context)
	}
	if err := files.save(c.String("bundle")); err != nil {
		return fmt.Errorf("write the bundle: %w", err)
	}
	_, err := fmt.Fprintf(e.err, "wrote %s; it contains addresses and names, but no passwords or keys\n",
		c.String("bundle"))
	return err
}

// addAnswers adds what the agent says.
func (e *env) addAnswers(c *ucli.Context, files *archive, x *examination) {
	files.add("doctor.txt", []byte(x.text()), nil)
	text, err := json.MarshalIndent(x, "", "  ")
	files.add("doctor.json", text, err)
	client := admin.NewClient(c.String("socket"))
	for _, f := range bundled {
		var answer json.RawMessage
		err := client.Get(c.Context, f.path, &answer)
		files.add(f.name, answer, err)
	}
	var now admin.Text
	err = client.Get(c.Context, "/v1/config", &now)
	files.addConfig(now.Text, err)
}

// kernel writes the full version of the kernel.
func kernel(w io.Writer) error {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "%s\n%s\n%s\n", unix.ByteSliceToString(u.Release[:]),
		unix.ByteSliceToString(u.Version[:]), unix.ByteSliceToString(u.Machine[:]))
	return err
}

// ruleset writes the rules of nftables. Large sets take it a while.
func ruleset(ctx context.Context, w io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, "nft", "--stateless", "list", "ruleset")
	var stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = w, &stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("nft list ruleset: %w: %s", err, bytes.TrimSpace(stderr.Bytes()))
	}
	return nil
}

// archive is the content of a tar file in memory.
type archive struct {
	at     time.Time
	files  []archived
	failed bytes.Buffer // what could not be read
}

type archived struct {
	name string
	text []byte
}

func (a *archive) add(name string, text []byte, err error) {
	if err != nil {
		fmt.Fprintf(&a.failed, "%s: %v\n", name, err)
		return
	}
	a.files = append(a.files, archived{name, text})
}

// addConfig adds a configuration, without secrets.
func (a *archive) addConfig(text string, err error) {
	if err == nil {
		text, err = config.Shareable(text)
	}
	a.add("steelyard.toml", []byte(text), err)
}

// write adds a file with the output of f, even if f fails.
func (a *archive) write(name string, f func(io.Writer) error) {
	var text bytes.Buffer
	err := f(&text)
	a.add(name, text.Bytes(), nil)
	if err != nil {
		a.add(name, nil, err)
	}
}

// save writes the archive to a file that only its owner can read. If it fails, an earlier file is as it was.
func (a *archive) save(name string) error {
	if info, err := os.Lstat(name); err == nil && !info.Mode().IsRegular() { // others may own what a link names
		return fmt.Errorf("%s is a link, a device or a directory; name a file", name)
	}
	out, err := renameio.NewPendingFile(name, renameio.WithTempDir(filepath.Dir(name)),
		renameio.WithStaticPermissions(0o600))
	if err != nil {
		return err
	}
	defer out.Cleanup()
	if a.failed.Len() > 0 {
		a.files = append(a.files, archived{"errors.txt", a.failed.Bytes()})
	}
	zipped := gzip.NewWriter(out)
	tarred := tar.NewWriter(zipped)
	for _, f := range a.files {
		header := &tar.Header{Name: "steelyard/" + f.name, Mode: 0o600, Size: int64(len(f.text)), ModTime: a.at}
		if err := tarred.WriteHeader(header); err != nil {
			return err
		}
		if _, err := tarred.Write(f.text); err != nil {
			return err
		}
	}
	if err := errors.Join(tarred.Close(), zipped.Close()); err != nil {
		return err
	}
	return out.CloseAtomicallyReplace()
}
