package scale

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/steelyard-lb/steelyard/datapath"
	"github.com/steelyard-lb/steelyard/e2e/lab"
)

// Running is Agent's result for a number of services in the configuration file.
type Running struct {
	Services int
	// Start is the time from the process's start until it serves the last service.
	Start time.Duration
	// P50 and P99 are the times from a SIGHUP until one service's new backend is active. CPU is the agent's CPU time
	// per reload.
	P50, P99, CPU time.Duration
	Reloads       int
	Idle          float64 // share of one CPU while nothing changes
	Resident      uint64  // the process's memory, in bytes
	KernelMemory  uint64  // of the maps, in bytes
}

// Agent runs this binary with 1 to 10,000 services, and measures each run.
func Agent(binary string, log io.Writer) (all []Running, err error) {
	for _, n := range []int{1, 100, 1000, 10_000} {
		fmt.Fprintf(log, "agent with %d services\n", n)
		r, err := agent(binary, n)
		if err != nil {
			return nil, fmt.Errorf("%d services: %w", n, err)
		}
		all = append(all, r)
	}
	return all, nil
}

// config returns the configuration file. The last service has one backend, with the number last.
func config(services, last int) string {
	c := lab.AgentConfig{Name: "node", Address: netip.MustParseAddr("192.0.2.1"), Interfaces: []string{"eth0"},
		Mode: "tc"}
	for i := range services {
		s := lab.AgentService{Name: fmt.Sprintf("s%d", i), Addresses: []netip.Addr{addr(firstVIP, i)},
			Ports: []string{"80"}, Forward: "nat", Check: lab.AgentCheck{Type: "none"}}
		for k := range 10 {
			s.Backends = append(s.Backends, lab.AgentBackend{Address: addr(firstBackend, k)})
		}
		if i == services-1 {
			s.Backends = []lab.AgentBackend{{Address: addr(firstBackend, last)}}
		}
		c.Services = append(c.Services, s)
	}
	return c.TOML()
}

func agent(binary string, services int) (r Running, err error) {
	r.Services = services
	l, err := lab.New()
	if err != nil {
		return r, err
	}
	defer l.Close()
	h, err := l.Host("node")
	if err != nil {
		return r, err
	}
	if err := addRouter(l, h); err != nil {
		return r, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	start := time.Now()
	a, err := lab.StartAgent(h, lab.AgentOptions{Binary: binary, Config: config(services, 0)})
	if err != nil {
		return r, err
	}
	if err := inForce(ctx, a, services, 0); err != nil {
		return r, err
	}
	r.Start = time.Since(start)
	if err := r.reload(ctx, a); err != nil {
		return r, err
	}
	err = h.Do(func() (err error) {
		r.KernelMemory, err = kernelMemory(datapath.DefaultPinPath)
		return err
	})
	if err != nil {
		return r, err
	}
	if r.Idle, err = idle(a); err != nil {
		return r, err
	}
	r.Resident, err = Resident(a)
	return r, err
}

// An idle agent is measured for idleTime. It is idle after settleTime, because a second after a reload it returns
// memory.
const (
	settleTime = 5 * time.Second
	idleTime   = 10 * time.Second
)

// idle returns the share of one CPU that an agent uses after nothing has changed for settleTime.
func idle(a *lab.Agent) (float64, error) {
	time.Sleep(settleTime)
	before, err := ProcessTime(a)
	if err != nil {
		return 0, err
	}
	time.Sleep(idleTime)
	after, err := ProcessTime(a)
	return float64(after-before) / float64(idleTime), err
}

// addRouter adds the router in front of the backends.
func addRouter(l *lab.Lab, h *lab.Host) error {
	router, err := l.Host("router")
	if err != nil {
		return err
	}
	err = l.Link(lab.End{Host: h, Name: "eth0", Addresses: []netip.Prefix{netip.MustParsePrefix("192.0.2.1/24")}},
		lab.End{Host: router, Name: "eth0", Addresses: []netip.Prefix{netip.MustParsePrefix("192.0.2.2/24")}},
		lab.LinkOptions{})
	if err != nil {
		return err
	}
	return h.AddRoute(lab.Default, netip.MustParseAddr("192.0.2.2"))
}

// reload repeatedly changes the last service's backend, for at most 10 seconds.
func (r *Running) reload(ctx context.Context, a *lab.Agent) error {
	before, err := ProcessTime(a)
	if err != nil {
		return err
	}
	var times []time.Duration
	for start := time.Now(); len(times) < 50 && (len(times) < 5 || time.Since(start) < 10*time.Second); {
		next := len(times) + 1
		if err := a.Configure(config(r.Services, next)); err != nil {
			return err
		}
		at := time.Now()
		if err := a.Reload(); err != nil {
			return err
		}
		if err := inForce(ctx, a, r.Services, next); err != nil {
			return err
		}
		times = append(times, time.Since(at))
	}
	after, err := ProcessTime(a)
	r.Reloads, r.CPU = len(times), (after-before)/time.Duration(len(times))
	r.P50, r.P99 = Percentile(times, 50), Percentile(times, 99)
	return err
}

// inForce waits until packets to the last service go to this backend. It polls less often the longer it takes, so that
// responses take little of the agent's time.
func inForce(ctx context.Context, a *lab.Agent, services, backend int) error {
	vip := addr(firstVIP, services-1)
	want := addr(firstBackend, backend)
	question := url.Values{"client": {"198.51.100.1:1000"}, "to": {netip.AddrPortFrom(vip, 80).String()}}
	path := "/v1/explain?" + question.Encode()
	for start := time.Now(); ; {
		var got struct{ Backend string }
		err := a.Get(ctx, path, &got)
		if err == nil && strings.HasPrefix(got.Backend, want.String()+":") {
			return nil
		}
		if ctx.Err() != nil || !a.Process().Running() {
			return fmt.Errorf("the agent does not use %s, but %q: %v; its log ends with\n%s", want, got.Backend, err,
				a.Process().Log.Tail(10))
		}
		time.Sleep(max(500*time.Microsecond, time.Since(start)/50))
	}
}

// ProcessTime returns the agent's CPU time (proc_pid_stat(5)).
func ProcessTime(a *lab.Agent) (time.Duration, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", a.Process().Pid()))
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(text), ") ")
	fields := strings.Fields(rest)
	const utime, stime, tick = 11, 12, 10 * time.Millisecond // fields after the name; USER_HZ is 100
	var sum time.Duration
	for _, i := range []int{utime, stime} {
		n, err := strconv.Atoi(fields[i])
		if err != nil {
			return 0, err
		}
		sum += time.Duration(n) * tick
	}
	return sum, nil
}

// Resident returns the agent's VmRSS, in bytes.
func Resident(a *lab.Agent) (uint64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", a.Process().Pid()))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			n, err := strconv.ParseUint(strings.Fields(value)[0], 10, 64)
			return n << 10, err
		}
	}
	return 0, fmt.Errorf("no VmRSS in\n%s", text)
}
