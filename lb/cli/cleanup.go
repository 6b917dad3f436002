package cli

import (
	"fmt"
	"log/slog"

	ucli "github.com/urfave/cli/v2"

	"github.com/steelyard-lb/steelyard/datapath"
)

// cleanup removes programs, links, maps, filters and sysctl changes. It needs no running agent, and refuses beside one.
func (e *env) cleanup(*ucli.Context) error {
	log := slog.New(slog.NewTextHandler(e.err, &slog.HandlerOptions{Level: slog.LevelWarn}))
	if err := datapath.Cleanup(datapath.DefaultPinPath, datapath.DefaultStateDir, log); err != nil {
		return err
	}
	_, err := fmt.Fprintln(e.out, "nothing of Steelyard is left in the kernel")
	return err
}
