package agent

import (
	"fmt"
	"slices"
	"testing"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/datapath"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// The defaults are written where they are documented and where they are tested in the kernel.
func TestDefaultsAgree(t *testing.T) {
	if got := datapath.Timeouts(config.Default().Datapath.Timeouts); got != datapath.DefaultTimeouts {
		t.Errorf("config has the timeouts %+v; the datapath %+v", got, datapath.DefaultTimeouts)
	}
}

// An agent of a cluster follows its configuration if that is mounted.
func TestMountedConfigurationIsATask(t *testing.T) {
	text := fmt.Sprintf("[kubernetes]\nkubeconfig = %q\n", apiServer(t, keysInCluster(keysOf(7, "A"))))
	for _, mounted := range []string{"", "..1"} {
		a, _, err := newInMemory(t, text, func(o *Options) { o.mounted = mounted })
		must.Do(t, err)
		t.Cleanup(a.close)
		follows := slices.ContainsFunc(a.tasks, func(x task) bool { return x.name == "mounted configuration" })
		if follows != (mounted != "") {
			t.Errorf("mounted %q: followed: %t", mounted, follows)
		}
	}
}
