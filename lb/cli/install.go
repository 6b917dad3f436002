package cli

import (
	ucli "github.com/urfave/cli/v2"

	"github.com/steelyard-lb/steelyard/systemd"
)

func (e *env) install(*ucli.Context) error { return systemd.Install(e.out, "/") }

func (e *env) uninstall(*ucli.Context) error { return systemd.Uninstall(e.out, "/") }
