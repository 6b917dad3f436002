package lb_test

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest"
)

// web returns a service with one port, and two backends that are probed by TCP.
func web() *lb.Service {
	port := lb.Port{Port: 80, Target: 8080, Protocol: lb.TCP}
	backends := []lb.Backend{
		{Addr: netip.MustParseAddr("10.0.0.1"), Weight: 1},
		{Addr: netip.MustParseAddr("10.0.0.2"), Weight: 3},
	}
	return &lb.Service{
		Name: "web", Source: "file", VIPs: []netip.Addr{netip.MustParseAddr("203.0.113.10")},
		Ports:  lb.PortsOn(backends, port),
		Policy: lb.PolicyCluster, Algorithm: lb.AlgorithmMaglev, Method: lb.MethodNAT, MinHealthy: 2,
		Check: lb.CheckSpec{Type: lb.CheckTCP, ServicePort: port},
	}
}

// A plan follows from a service, the health of its backends, and the drains.
func ExampleBuild() {
	s := web()
	states := map[lb.CheckKey]lb.Health{}
	for i, c := range lb.Checks(s) {
		states[c.Key] = lb.Health{Key: c.Key, State: []lb.State{lb.StateHealthy, lb.StateUnhealthy}[i]}
	}
	plan := lb.Build(s, states, lb.Drains{})
	for _, f := range plan.Frontends {
		fmt.Println(f.Frontend, f.Method, "targets", f.Targets, "down", f.Down)
	}
	for _, v := range plan.VIPs {
		fmt.Println(v.VIP, "healthy", v.Healthy, "reason", v.Reason)
	}
	// Output:
	// 203.0.113.10:80/tcp nat targets [{10.0.0.1:8080 1 false}] down [10.0.0.2:8080]
	// 203.0.113.10 healthy 1 reason 1 of 2 backends healthy, min_healthy is 2
}

// A Maglev table gives each target a share of the slots in proportion to its weight.
func ExampleMaglev() {
	targets := []lb.Target{
		{Addr: netip.MustParseAddrPort("10.0.0.1:8080"), Weight: 1},
		{Addr: netip.MustParseAddrPort("10.0.0.2:8080"), Weight: 3},
	}
	slots := make([]int, len(targets))
	for _, target := range lb.Maglev(targets, lb.TableSize(len(targets))) {
		slots[target]++
	}
	fmt.Println(slots)
	// Output: [252 757]
}

// Once the checks have results, the engine serves a VIP and then announces it. When it ends, it withdraws the routes.
func ExampleEngine() {
	fixture := lbtest.New() // datapath, announcer and prober in memory
	engine, err := lb.NewEngine(lb.EngineOptions{
		Datapath: fixture, Announcer: fixture, Prober: fixture, Sources: []string{"file"},
		Settle: time.Minute, Retry: time.Second, Withdraw: time.Second, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		panic(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- engine.Run(ctx) }()

	s := web()
	engine.Put(s)
	for _, c := range lb.Checks(s) { // as the prober reports
		engine.Health(lb.Health{Key: c.Key, State: lb.StateHealthy})
	}
	engine.Complete("file")
	<-engine.Settled()
	for len(fixture.Announced()) == 0 {
		time.Sleep(time.Millisecond)
	}
	plan, _ := fixture.Served(s.Ports[0].On(s.VIPs[0]))
	fmt.Println("served:", plan.Frontend, plan.Targets)
	fmt.Println("announced:", fixture.Announced())
	stop()
	fmt.Println("ended:", <-ended, fixture.Announced())
	// Output:
	// served: 203.0.113.10:80/tcp [{10.0.0.1:8080 1 false} {10.0.0.2:8080 3 false}]
	// announced: [203.0.113.10]
	// ended: <nil> []
}

// Two services get addresses, one of them in both families. A third shares the first one's address with another port.
func ExampleAllocator_Assign() {
	addr := netip.MustParseAddr
	allocator := lb.NewAllocator([]lb.Pool{{
		Name: "public", AutoAssign: true, AvoidBuggy: true,
		Ranges: []lb.AddrRange{
			{From: addr("203.0.113.0"), To: addr("203.0.113.2")},
			{From: addr("2001:db8::"), To: addr("2001:db8::ffff:ffff:ffff:ffff")},
		},
	}})
	v4, v6 := lb.FamilyRequest{Family: lb.IPv4}, lb.FamilyRequest{Family: lb.IPv6, Optional: true}
	for _, r := range []lb.Request{
		{
			Holder:   lb.Holder{Service: "web", ShareKey: "site", Ports: []lb.Port{{Port: 443, Protocol: lb.TCP}}},
			Families: []lb.FamilyRequest{v4, v6},
		},
		{Holder: lb.Holder{Service: "mail"}, Families: []lb.FamilyRequest{v4}},
		{
			Holder:   lb.Holder{Service: "dns", ShareKey: "site", Ports: []lb.Port{{Port: 53, Protocol: lb.UDP}}},
			Families: []lb.FamilyRequest{v4},
		},
		{Holder: lb.Holder{Service: "ftp"}, Families: []lb.FamilyRequest{v4}},
	} {
		addrs, err := allocator.Assign(r)
		fmt.Println(r.Service, addrs, err)
	}
	// Output:
	// web [203.0.113.1 2001:db8::] <nil>
	// mail [203.0.113.2] <nil>
	// dns [203.0.113.1] <nil>
	// ftp [] no free IPv4 address in public
}
