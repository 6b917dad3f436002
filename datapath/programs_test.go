package datapath

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/datapath/internal/hook"
	"github.com/steelyard-lb/steelyard/datapath/internal/pin"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// The next agent takes the pinned programs over, and loads and pins what is missing. It loads all of them if their
// constants or maps are others.
func TestProgramsAreTakenOver(t *testing.T) {
	t.Parallel()
	fx := newFixture(t, hookXDP, false, nil)
	established(fx)
	dir := filepath.Join(fx.o.PinPath, pin.Schema)
	programs := func() map[string]string { // the ids by name
		all := map[string]string{}
		for path, id := range fx.inForce() {
			if file, ok := strings.CutPrefix(path, filepath.Join(dir, "programs")+"/"); ok {
				name, _, _ := strings.Cut(file, ":")
				must.True(t, all[name] == "", "%s is pinned twice", name)
				all[name] = id
			}
		}
		must.Row(t, "programs", len(must.Get(bpf.LoadSy())(t).Programs), len(all))
		return all
	}
	remove := func(pattern string) func() {
		return func() {
			fx.do(func() error {
				found, err := filepath.Glob(filepath.Join(dir, pattern))
				must.Row(t, "files named "+pattern, 1, len(found))
				return errors.Join(err, os.Remove(found[0]))
			})
		}
	}
	all := len(programs())
	for _, c := range []struct {
		name   string
		change func()
		loaded int
	}{
		{"the same", func() {}, 0},
		{"a missing program", remove("programs/sy_xdp:*"), 1},
		{"another constant", func() { fx.o.Timeouts.UDP++ }, all},
		{"another map", remove("sy_verdicts"), all},
		{"no XDP", func() { fx.o.Mode = ModeTC }, all},
		{"XDP", func() { fx.o.Mode = ModeXDP }, all},
	} {
		before := programs()
		fx.close()
		c.change()
		fx.open()
		loaded := 0
		for name, id := range programs() {
			if id != before[name] {
				loaded++
			}
		}
		must.Row(t, c.name+": programs loaded", c.loaded, loaded)
		must.Do(t, fx.flows().want(1, 1))
		if fx.o.Mode == ModeXDP {
			must.Row(t, c.name+": a packet of the flow was", "sent", fx.runAttached(tcp(dptest.ACK)(fx).Frame()))
		}
	}
}

// A chunk that a killed agent has pinned but not added to its array is added.
func TestChunksAreCompleted(t *testing.T) {
	t.Parallel()
	fx := newFixture(t, hookXDP, false, nil)
	established(fx)
	fx.close()
	fx.do(func() error {
		slots, err := ebpf.LoadPinnedMap(filepath.Join(fx.o.PinPath, pin.Schema, "sy_slots"), nil)
		if err != nil {
			return err
		}
		defer slots.Close()
		return slots.Delete(uint32(0))
	})
	fx.open()
	var chunk uint32
	must.Do(t, fx.d.objects.SySlots.Lookup(uint32(0), &chunk))
	info := must.Get(fx.d.chunks.Slots.Maps()[0].Info())(t)
	id, _ := info.ID()
	must.Row(t, "chunk", uint32(id), chunk)
}

// While no pin changes, a round compares only a stamp, which changes with each pin.
func TestStampOfThePins(t *testing.T) {
	t.Parallel()
	fx := newFixture(t, hookXDP, false, nil)
	fx.service(lb.TCP, "b1")
	stamp := func() (s pin.Stamp) {
		fx.do(func() error {
			var settled bool
			labtest.Until(t, "the timestamps are settled", func() error {
				s, settled = fx.d.pins.Stamp()
				return labtest.ErrorIf(!settled, "not yet")
			})
			return nil
		})
		return s
	}
	was := stamp()
	must.True(t, was == stamp(), "the stamp changed by itself")
	for name, change := range map[string]func() error{
		"a link's pin removed":  func() error { return os.Remove(fx.d.pins.Link(hook.PinName("eth0", "xdp"))) },
		"a map's pin removed":   func() error { return os.Remove(filepath.Join(fx.d.pins.Dir, "sy_verdicts")) },
		"a chunk's pin removed": func() error { return os.Remove(fx.d.pins.Chunk("sy_slots-0")) },
	} {
		fx.do(change)
		settled := true
		fx.do(func() error { _, settled = fx.d.pins.Stamp(); return nil })
		must.True(t, !settled, "%s: settled at once", name)
		now := stamp()
		must.True(t, now != was, "%s: the stamp is the same", name)
		was = now
	}
}

func idOf(p *ebpf.Program) ebpf.ProgramID {
	info, err := p.Info()
	if err != nil {
		return 0
	}
	id, _ := info.ID()
	return id
}
