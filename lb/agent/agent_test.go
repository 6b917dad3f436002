package agent

import (
	"testing"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/datapath"
)

// The defaults are written where they are documented and where they are tested in the kernel.
func TestDefaultsAgree(t *testing.T) {
	if got := datapath.Timeouts(config.Default().Datapath.Timeouts); got != datapath.DefaultTimeouts {
		t.Errorf("config has the timeouts %+v; the datapath %+v", got, datapath.DefaultTimeouts)
	}
}
