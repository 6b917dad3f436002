package cli

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// The exit code and the first line follow from the worst finding of the status and of the checks.
func TestDoctor(t *testing.T) {
	lost := lb.FoundMTU.About("10.0.0.21", "large packets are lost")
	reachable := func(o *admin.Options) { o.Peers = func() []lb.PeerStatus { return nil } }
	for _, tt := range []struct {
		name   string
		checks []lb.Diagnosis
		status []func(*admin.Options)
		code   int
		want   []string // lines, without repeated spaces
	}{
		{"nothing", []lb.Diagnosis{
			{Check: "mtu", Expects: "large packets arrive"}, {Check: "routers", NotAsked: "there are none"},
		}, []func(*admin.Options){reachable}, 0,
			[]string{"OK", "ok mtu large packets arrive", "not asked routers there are none"}},
		{"a warning", []lb.Diagnosis{{Check: "mtu", Findings: []lb.Finding{lost.As(lb.SeverityWarning)}}},
			[]func(*admin.Options){reachable}, 0, []string{"OK", "warning mtu large packets are lost"}},
		{"a check finds something", []lb.Diagnosis{{Check: "mtu", Findings: []lb.Finding{lost}}},
			[]func(*admin.Options){reachable}, 1,
			[]string{"DEGRADED: large packets are lost", "degraded mtu large packets are lost", "-> " + lost.Remedy}},
		{"the status knows something", []lb.Diagnosis{{Check: "mtu", Expects: "large packets arrive"}}, nil, 1,
			[]string{"DEGRADED: 1 of 1 BGP sessions are not established: 192.0.2.1: connection refused"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			change := append(tt.status, func(o *admin.Options) {
				o.Examine = func(context.Context, lb.Status) []lb.Diagnosis { return tt.checks }
			})
			code, out, errOut := steelyard(t, "doctor", "--socket", serve(t, lb.Status{Settled: true}, change...))
			out = strings.Join(strings.Fields(out), " ")
			must.True(t, code == tt.code && errOut == "", "code %d, stderr %q", code, errOut)
			for i, line := range tt.want {
				line = strings.Join(strings.Fields(line), " ")
				at := strings.Index(out, line)
				must.True(t, at >= 0 && (i > 0 || at == 0), "%q is not at its place in %q", line, out)
			}
		})
	}
}

// While the agent waits for its network, it has no checks.
func TestDoctorOfAWaitingAgent(t *testing.T) {
	_, out, _ := steelyard(t, "doctor", "--socket", serve(t, lb.Status{Settled: true}))
	must.True(t, strings.Contains(out, "not asked"), "%s", out)
}

// An agent that does not know a request, such as an older one, responds without a reason.
func TestDoctorOfAnOlderAgent(t *testing.T) {
	old := http.NewServeMux()
	old.HandleFunc("/v1/status", func(w http.ResponseWriter, _ *http.Request) { w.Write([]byte(`{"verdict":"OK"}`)) })
	_, out, _ := steelyard(t, "doctor", "--socket", listen(t, old))
	must.True(t, strings.Contains(out, "not asked  all  the agent responded 404 Not Found"), "%s", out)
}

// Without an agent, the bundle has what needs none, and says what is missing and why.
func TestDoctorWithoutAgent(t *testing.T) {
	name := filepath.Join(t.TempDir(), "report.tar.gz")
	code, out, errOut := steelyard(t, "doctor", "--socket", "/nowhere.sock", "--bundle", name,
		"-c", write(t, good+"# s3cret\n"))
	must.True(t, code == 2 && strings.HasPrefix(out, "DOWN: no agent listens"), "code %d, %q, %q", code, out, errOut)
	must.Equal(t, os.FileMode(0o600), must.Get(os.Stat(name))(t).Mode())
	files := unpack(t, name)
	for _, missing := range []string{"doctor.txt", "status.json", "services.json", "events.json"} {
		must.True(t, strings.Contains(files["errors.txt"], missing+": no agent listens"), "%s: %s", missing,
			files["errors.txt"])
	}
	text := files["steelyard.toml"]
	must.True(t, strings.Contains(text, "192.0.2.1") && !strings.Contains(text, "s3cret"), "%s", text)
	must.Equal(t, "route\n", files["network.txt"])
}

// An interrupt is no verdict, and what it interrupts is no report.
func TestDoctorInterrupted(t *testing.T) {
	name := filepath.Join(t.TempDir(), "report.tar.gz")
	ctx, stop := context.WithCancelCause(t.Context())
	socket := serve(t, lb.Status{Settled: true}, func(o *admin.Options) {
		o.Examine = func(ctx context.Context, _ lb.Status) []lb.Diagnosis {
			stop(errors.New("interrupt signal received"))
			<-ctx.Done()
			return nil
		}
	})
	var out, errOut strings.Builder
	code := Main(ctx, []string{"doctor", "--socket", socket, "--bundle", name}, &out, &errOut, programs)
	must.True(t, code == 1 && out.String() == "" && errOut.String() == "steelyard: interrupt signal received\n",
		"code %d, %q, %q", code, out.String(), errOut.String())
	must.True(t, errors.Is(second(os.Stat(name)), fs.ErrNotExist), "it has written a bundle")
}

// A bundle that would go through a link leaves what exists as it was.
func TestBundleThroughLink(t *testing.T) {
	dir := t.TempDir()
	name, link := filepath.Join(dir, "report.tar.gz"), filepath.Join(dir, "link")
	must.Do(t, errors.Join(os.WriteFile(name, []byte("earlier"), 0o600), os.Symlink(name, link)))
	code, _, errOut := steelyard(t, "doctor", "--socket", "/nowhere.sock", "--bundle", link)
	must.True(t, code == 1 && strings.Contains(errOut, "is a link"), "code %d, %q", code, errOut)
	must.Equal(t, "earlier", string(must.Get(os.ReadFile(name))(t)))
	must.Equal(t, 2, len(must.Get(os.ReadDir(dir))(t)))
}

func second[T any](_ T, err error) error { return err }

// listen serves on a unix socket, and returns its name.
func listen(t *testing.T, h http.Handler) string {
	name := filepath.Join(t.TempDir(), "s")
	l := must.Get(net.Listen("unix", name))(t)
	t.Cleanup(func() { l.Close() })
	go http.Serve(l, h)
	return name
}

// unpack returns the files of a bundle by name.
func unpack(t *testing.T, name string) map[string]string {
	f := must.Get(os.Open(name))(t)
	defer f.Close()
	files := map[string]string{}
	for r := tar.NewReader(must.Get(gzip.NewReader(f))(t)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		must.Do(t, err)
		files[strings.TrimPrefix(h.Name, "steelyard/")] = string(must.Get(io.ReadAll(r))(t))
	}
}
