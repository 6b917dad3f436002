package healthd_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"time"

	"github.com/steelyard-lb/steelyard/healthd"
	"github.com/steelyard-lb/steelyard/lb"
)

// The first probe determines the backend's state. Each change of its health is reported.
func ExampleProber() {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer l.Close()
	backend := netip.MustParseAddrPort(l.Addr().String())

	reports := make(chan lb.Health, 1)
	p := healthd.New(healthd.Options{Report: func(h lb.Health) { reports <- h }, Log: slog.New(slog.DiscardHandler)})
	p.Put("web", []lb.Check{{
		Key: lb.CheckKey{Service: "web", Backend: backend}, Target: backend,
		Spec: lb.CheckSpec{Type: lb.CheckTCP, Interval: 2 * time.Second, Timeout: time.Second, Rise: 2, Fall: 3},
	}})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- p.Run(ctx) }()
	h := <-reports
	fmt.Println(h.Key.Service, h.State, h.Reason)
	cancel()
	fmt.Println(<-done)
	// Output:
	// web healthy connected
	// <nil>
}

// A node without ready endpoints of a Service responds with 503 at its health check node port.
func ExampleNodePorts() {
	upToDate := func() (time.Time, error) { return time.Time{}, nil }
	n := healthd.NewNodePorts(upToDate, func(string) bool { return true }, slog.New(slog.DiscardHandler))
	l, err := net.Listen("tcp", ":0")
	if err != nil {
		fmt.Println(err)
		return
	}
	port := l.Addr().(*net.TCPAddr).AddrPort().Port()
	l.Close()
	for _, endpoints := range []int{2, 0} {
		if err := n.Serve("default/web", port, endpoints, false); err != nil {
			fmt.Println(err)
		}
		resp, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d", port))
		if err != nil {
			fmt.Println(err)
			return
		}
		resp.Body.Close()
		fmt.Println(resp.StatusCode, resp.Header.Get("X-Load-Balancing-Endpoint-Weight"))
	}
	n.Stop("default/web")
	// Output:
	// 200 2
	// 503 0
}
