package agent

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/datapath"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// The defaults are written where they are documented and where they are tested in the kernel.
func TestDefaultsAgree(t *testing.T) {
	must.Equal(t, datapath.DefaultTimeouts, datapath.Timeouts(config.Default().Datapath.Timeouts))
}

// An agent of a cluster follows its configuration if that is mounted.
func TestMountedConfigurationIsATask(t *testing.T) {
	text := fmt.Sprintf("[kubernetes]\nkubeconfig = %q\n", apiServer(t, keysInCluster(keysOf(7, "A"))))
	for _, mounted := range []string{"", "..1"} {
		a, _, err := newInMemory(t, text, func(o *Options) { o.mounted = mounted })
		must.Do(t, err)
		t.Cleanup(a.close)
		follows := slices.ContainsFunc(a.tasks, func(x task) bool { return x.name == "mounted configuration" })
		must.True(t, follows == (mounted != ""), "mounted %q: followed: %t", mounted, follows)
	}
}

// refusing is an announcer whose neighbours have no route, for a reason.
type refusing string

func (refusing) Set(context.Context, []lb.Announcement) error { return nil }
func (refusing) Carried(netip.Addr) bool                      { return false }
func (r refusing) NotAccepted(netip.Addr) string              { return string(r) }

// The reason of a route that nobody receives names what the neighbours do not accept, if that is known.
func TestNotReceived(t *testing.T) {
	for text, want := range map[refusing]string{
		"":                   "no BGP peer has it: no session that carries it is established",
		"192.0.2.1: no IPv6": "no BGP peer has it: 192.0.2.1: no IPv6",
	} {
		r := lb.RouteStatus{Address: netip.MustParseAddr("2001:db8::10")}
		must.Equal(t, want, notReceived(r, map[lb.AnnouncerKind]lb.Announcer{lb.AnnounceBGP: text}))
	}
}

// Memory is released when the datapath has all services, not before, and again when they are stored.
func TestMemoryIsReleasedAfterTheStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start, took := time.Now(), 20*time.Second
		behind := func() time.Time {
			if time.Since(start) < took {
				return start
			}
			return time.Time{}
		}
		var released []time.Duration
		releaseAfterStart(t.Context(), behind, func() { released = append(released, time.Since(start)) })
		must.Equal(t, []time.Duration{took, took + storeDelay}, released)
	})
}
