// Steelyard announces load-balancer addresses, forwards their traffic in the kernel and checks the servers' health.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/steelyard-lb/steelyard/lb/agent"
	"github.com/steelyard-lb/steelyard/lb/cli"
	"github.com/steelyard-lb/steelyard/lb/demo"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	os.Exit(cli.Main(ctx, os.Args[1:], os.Stdout, os.Stderr, cli.Programs{
		Run: agent.Main, Allocate: agent.Allocate, Watch: agent.Watch, Check: agent.Check,
		Demo: demo.Main, DemoRouter: demo.Router,
		DemoShell: demo.Shell, Incidents: demo.Incidents(),
		Schema: agent.Schema, Events: agent.Events,
		Cleanup: agent.Cleanup, Remains: agent.Remains, Left: agent.Left,
		Network: agent.Network, CleanupCluster: agent.CleanupCluster,
	}))
}
