package l2

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// A standby that receives nothing, and so hears no member, takes nothing from an owner, which is well. When it hears a
// host again, it takes over what nobody has.
func TestDeafStandby(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := newSegment(t, 2)
		x.run()
		for _, h := range x.hosts {
			h.set(shared...)
		}
		x.pass(2 * time.Second)
		standby := x.hosts[1]
		was := standby.a.all()
		standby.f.change(func() { standby.f.deaf = true })
		x.change(func() { x.separated = true })
		x.pass(10 * time.Second)
		if got := standby.a.all(); !slices.Equal(got, was) {
			t.Errorf("it has %v; it had %v", got, was)
		}
		for vip, w := range standby.a.Waiting() {
			if !strings.Contains(w.Reason, "no other host is heard on eth0") || w.Intended {
				t.Errorf("%s waits: %+v", vip, w)
			}
		}
		x.change(func() { x.hosts[0].down = true })
		standby.f.change(func() { standby.f.deaf = false })
		x.pass(time.Second)
		if got := standby.a.all(); len(got) != len(shared) {
			t.Errorf("alone and not deaf, it has %v", got)
		}
	})
}
