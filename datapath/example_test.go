package datapath_test

import (
	"context"
	"log/slog"
	"net/netip"
	"os/signal"
	"syscall"

	"github.com/steelyard-lb/steelyard/datapath"
	"github.com/steelyard-lb/steelyard/lb"
)

// Forwards connections to 203.0.113.10:80 to two servers until interrupted. The kernel continues forwarding when the
// program has ended; Cleanup removes everything.
func Example() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	log := slog.Default()
	d, err := datapath.Open(datapath.Options{
		Interfaces: []string{"eth0"}, Mode: datapath.ModeAuto, MaxFlows: 1_000_000,
		SNATPorts:  []datapath.PortRange{{First: 1024, Last: 32767}, {First: 61000, Last: 65535}},
		TunnelPort: 6090, Timeouts: datapath.DefaultTimeouts,
		PinPath: datapath.DefaultPinPath, StateDir: datapath.DefaultStateDir, Log: log,
	})
	if err != nil {
		log.Error("datapath not opened", "err", err)
		return
	}
	defer d.Close()

	backends := []lb.Backend{
		{Addr: netip.MustParseAddr("192.0.2.21"), Weight: 1},
		{Addr: netip.MustParseAddr("192.0.2.22"), Weight: 1},
	}
	service := &lb.Service{
		Name:      "web",
		VIPs:      []netip.Addr{netip.MustParseAddr("203.0.113.10")},
		Ports:     lb.PortsOn(backends, lb.Port{Port: 80, Target: 8080, Protocol: lb.TCP}),
		Algorithm: lb.AlgorithmMaglev,
		Method:    lb.MethodNAT,
		Check:     lb.CheckSpec{Type: lb.CheckNone},
	}
	plan := lb.Build(service, nil, lb.Drains{})
	for frontend, err := range d.Apply(ctx, lb.Delta{Put: plan.Frontends}) {
		log.Error("frontend not installed", "frontend", frontend, "err", err)
	}
	if err := d.Run(ctx); err != nil {
		log.Error("datapath stopped", "err", err)
	}
}
