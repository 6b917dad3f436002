package cli

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// trace prints packets and what was left out, ends after --count, and writes files that only root can read.
func TestTrace(t *testing.T) {
	var asked lb.TraceFilter
	socket := serve(t, lb.Status{}, func(o *admin.Options) {
		o.Trace = func(ctx context.Context, f lb.TraceFilter, emit func([]lb.TraceEvent) error) error {
			asked = f
			p := lb.TraceEvent{Packet: &lb.TracedPacket{
				Interface: "eth0", Hook: "tc", Action: "drop", Reason: "no_flow", Meaning: "unknown\x1b[2J",
				Before: lb.Frame{Bytes: make([]byte, 14)},
			}}
			batches := [][]lb.TraceEvent{nil, {p, {OverLimit: 7, NotRead: 2}, p}, {p}}
			for _, batch := range batches {
				if err := emit(batch); err != nil {
					return err
				}
			}
			<-ctx.Done()
			return nil
		}
	})
	file := filepath.Join(t.TempDir(), "p.pcapng")
	for _, more := range [][]string{nil, {"-w", file}} {
		args := append([]string{"trace", "--socket", socket, "--count", "3", "--drops"}, more...)
		code, out, errOut := steelyard(t, args...)
		must.Equal(t, 0, code)
		must.Equal(t, "tracing; Ctrl-C ends it\n"+
			"7 packets left out: more than 20,000 per second\n"+
			"2 packets left out: not read in time\n3 packets\n", errOut)
		must.Equal(t, lb.TraceFilter{Drops: true}, asked)
		lines := strings.Count(out, " eth0 tc: drop: ethertype 0x0000; no_flow: unknown�[2J\n")
		want := map[bool]int{true: 3, false: 0}[more == nil]
		must.True(t, lines == want && strings.Count(out, "\n") == want, "%v printed\n%s", args, out)
	}
	info := must.Get(os.Stat(file))(t)
	must.True(t, info.Size() > 200 && info.Mode() == 0o600, "%d bytes with mode %s", info.Size(), info.Mode())
	// The file is emptied only when the trace begins, and is private even if it was not.
	must.Do(t, os.Chmod(file, 0o644))
	code, _, _ := steelyard(t, "trace", "--socket", "/nowhere.sock", "-w", file)
	must.True(t, code == 1 && must.Get(os.Stat(file))(t).Size() == info.Size(), "code %d, the old file is lost", code)
	code, _, errOut := steelyard(t, "trace", "--socket", socket, "--count", "1", "-w", file)
	shorter := must.Get(os.Stat(file))(t)
	must.True(t, code == 0 && shorter.Size() < info.Size() && shorter.Mode() == 0o600 &&
		strings.HasSuffix(errOut, "\n1 packet\n"), "code %d, %d bytes with mode %s, %s", code, shorter.Size(),
		shorter.Mode(), errOut)
	code, out, _ := steelyard(t, "trace", "--socket", socket, "--count", "1", "-w", "-")
	must.True(t, code == 0 && out == string(must.Get(os.ReadFile(file))(t)), "code %d, standard output %q", code, out)
	link := filepath.Join(t.TempDir(), "link")
	must.Do(t, os.Symlink(file, link))
	for name, want := range map[string]string{
		"/dev/full": "no space left on device", link: link + " is a symbolic link; name a file",
	} {
		code, _, errOut := steelyard(t, "trace", "--socket", socket, "--count", "3", "-w", name)
		must.True(t, code == 1 && strings.Contains(errOut, want), "-w %s: code %d, %s", name, code, errOut)
	}
	for _, args := range [][]string{{"--client", "web"}, {"--vip", "10"}, {"--count", "-1"}, {"web"}} {
		code, _, errOut := steelyard(t, append([]string{"trace", "--socket", socket}, args...)...)
		must.True(t, code == 2 && errOut != "", "%v: code %d, %q", args, code, errOut)
	}
}
