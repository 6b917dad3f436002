package datapath

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/lb"
)

// converters open what an agent of another schema pinned in a directory, by schema. A change of the schema adds one.
var converters = map[string]func(dir string) (earlierState, error){
	"v5": openV5,
}

// earlierState is what an agent of another schema pinned, in terms that do not change with the schema.
type earlierState interface {
	// plans are the frontends. Their tables have the same shares, but a flow may have another slot.
	plans() ([]*lb.FrontendPlan, error)
	// tunnelSources are the prefixes from which tunnel packets are accepted.
	tunnelSources() ([]netip.Prefix, error)
	// flows calls visit for each flow.
	flows(ctx context.Context, visit func(earlierFlow)) error
	// affinities calls visit for the last backend of each client of a frontend.
	affinities(ctx context.Context, visit func(earlierAffinity)) error
	close()
}

// earlierFlow is a flow of an earlier schema. Addresses and ports are in the order of the network.
type earlierFlow struct {
	key     syFlowKey // packets of the client as they arrive
	method  lb.Method
	encap   lb.Encap
	backend lb.Target
	state   syFlowState
	// NAT
	to                     syTuple // what packets of the client become
	ack                    uint32  // last acknowledgement (TCP) or tag (SCTP) of the client; 0: unknown
	clientFin, serverFin   bool    // this side has sent FIN
	answered               bool
	clientSeen, serverSeen time.Duration // last packet; serverSeen is that of the client with direct return
}

type earlierAffinity struct {
	client   syAddr
	frontend lb.Frontend
	backend  lb.Target
	seen     uint64
}

// conversion takes over the state of an agent of another schema. Its programs forward until those of this binary
// replace them, so flows are read twice: before, and again after, for those that opened or changed meanwhile.
type conversion struct {
	d    *Datapath
	from earlierState
	dir  string

	frontends map[lb.Frontend]*frontend // without those for decapsulated packets
	ranges    map[netip.Addr][]lb.Frontend
	done      conversionCounts
}

// conversionCounts are for the log.
type conversionCounts struct{ flows, lost, frontends int }

// convert reads the state of the older schema, if there is one, into the maps of this one. The caller closes the
// conversion, which is nil when there is nothing to convert.
func (d *Datapath) convert(ctx context.Context) (*conversion, error) {
	if d.pins.older == "" || !d.pins.first() {
		return nil, nil
	}
	c := &conversion{d: d, dir: d.pins.older, frontends: map[lb.Frontend]*frontend{},
		ranges: map[netip.Addr][]lb.Frontend{}}
	from, err := converters[filepath.Base(c.dir)](c.dir)
	if err != nil {
		return nil, c.explain(err)
	}
	c.from = from
	err = errors.Join(c.setConverting(1), c.convertConfig(), c.convertFlows(ctx), c.convertAffinities(ctx),
		c.shareLinks())
	if err != nil {
		from.close()
		return nil, c.explain(err)
	}
	return c, nil
}

// explain adds what was converted, and the way out.
func (c *conversion) explain(err error) error {
	return fmt.Errorf("convert the state of schema %s to %s: %w; run \"steelyard cleanup\", which ends its flows, "+
		"or the version that left it", filepath.Base(c.dir), schema, err)
}

// close closes the maps of the earlier agent.
func (c *conversion) close() {
	if c != nil {
		c.from.close()
	}
}

// finish converts what changed before the programs of this binary were in force.
func (c *conversion) finish(ctx context.Context) error {
	if c == nil {
		return nil
	}
	defer c.from.close()
	c.done.flows, c.done.lost = 0, 0
	if err := errors.Join(c.convertFlows(ctx), c.setConverting(0)); err != nil {
		return c.explain(err)
	}
	c.d.log.Info("state of an earlier schema converted", "from", filepath.Base(c.dir), "to", schema,
		"frontends", c.done.frontends, "flows", c.done.flows, "flows_lost", c.done.lost)
	return nil
}

// setConverting makes the programs drop packets of unknown flows in place of an answer that would end them.
func (c *conversion) setConverting(on uint32) error {
	if err := c.d.objects.SyConverting.Put(uint32(0), on); err != nil {
		return fmt.Errorf("set sy_converting: %w", err)
	}
	return nil
}

// convertConfig puts the frontends of the earlier agent; they serve until there are plans.
func (c *conversion) convertConfig() error {
	plans, err := c.from.plans()
	if err != nil {
		return err
	}
	for _, u := range c.d.services.putConverted(plans) {
		if u.err != nil {
			c.d.log.Error("frontend not converted; its flows end", "frontend", u.plan.Frontend, "err", u.err)
			continue
		}
		c.done.frontends++
		c.frontends[u.plan.Frontend] = u.f
		if u.plan.Last != 0 {
			c.ranges[u.plan.VIP] = append(c.ranges[u.plan.VIP], u.plan.Frontend)
		}
	}
	sources, err := c.from.tunnelSources()
	if err != nil {
		return err
	}
	for _, p := range sources {
		if err := c.d.objects.SyTunnelSrc.Put(toAllowKey(0, p), uint32(1)); err != nil {
			return fmt.Errorf("allow tunnels: %w", err)
		}
	}
	return nil
}

// shareLinks gives the links of the earlier agent a second pin, where the programs are exchanged. The first one stays
// until all is done, so that neither a failure nor a crash detaches anything.
func (c *conversion) shareLinks() error {
	entries, err := os.ReadDir(filepath.Join(c.dir, "links"))
	if err != nil {
		return fmt.Errorf("list the links: %w", err)
	}
	for _, e := range entries {
		if err := os.Link(filepath.Join(c.dir, "links", e.Name()), c.d.pins.link(e.Name())); err != nil {
			return fmt.Errorf("pin the link %s: %w", e.Name(), err)
		}
	}
	return nil
}

// frontendOf returns the frontend of packets to an address and port.
func (c *conversion) frontendOf(k syFlowKey) *frontend {
	f := lb.Frontend{VIP: fromAddr(k.T.Dst), Port: swap(k.T.Dport), Protocol: lb.Protocol(k.Proto)}
	if known := c.frontends[f]; known != nil {
		return known
	}
	for _, r := range c.ranges[f.VIP] {
		if r.Protocol == f.Protocol && r.Port <= f.Port && f.Port <= r.Last {
			return c.frontends[r]
		}
	}
	f.Decap = true
	return c.frontends[f]
}

func (c *conversion) convertFlows(ctx context.Context) error {
	open, udp := map[uint32]uint32{}, map[uint32]uint32{}
	var failed error
	err := c.from.flows(ctx, func(f earlierFlow) {
		fe := c.frontendOf(f.key)
		if fe == nil || failed != nil {
			c.done.lost++
			return
		}
		backend, err := c.d.services.backendOf(f.backend)
		switch {
		case err != nil:
		case f.method == lb.MethodNAT:
			err = c.putNAT(f, fe, backend)
		default:
			err = c.putDSR(f, fe, backend)
		}
		if errors.Is(err, unix.E2BIG) { // max_flows is lower than before
			c.done.lost++
			return
		}
		if failed = err; err != nil {
			return
		}
		c.done.flows++
		if f.state < syFlowStateFLOW_CLOSED {
			open[backend.id]++
		}
		if f.method == lb.MethodNAT && f.key.Proto == unix.IPPROTO_UDP {
			udp[fe.id]++
		}
	})
	return errors.Join(err, failed, c.d.services.setLoads(open), c.d.services.setUDPFlows(udp))
}

// putNAT writes the entries of a flow by nat. The older schemas do not have the sequence numbers of both sides, so its
// next packets set them. A half-open flow is among the established ones, because in the table of half-open ones it is
// found by a source port that an earlier version chose in another way.
func (c *conversion) putNAT(f earlierFlow, fe *frontend, b *backend) error {
	server, err := c.d.services.backends.servers.get(b.at.Addr())
	if err != nil {
		return err
	}
	ck := syClientKey{Client: f.key.T.Src, Frontend: fe.id, Sport: f.key.T.Sport, Dport: f.key.T.Dport}
	sk := syServerKey{To: f.to.Src, Server: server<<8 | uint32(f.key.Proto), Dport: f.to.Sport, Sport: f.to.Dport}
	side := syFlow{State: uint8(f.state), Answered: truth(f.answered)}
	if f.key.Proto != unix.IPPROTO_UDP {
		side.Doubt = uint8(syFlowDoubtDOUBT_NUMBERS)
	}
	client := syClientFlow{F: side, Source: f.to.Src, Backend: b.id, Sport: f.to.Sport, Dport: f.to.Dport}
	client.F.Ack, client.F.Seen = f.ack, flowClock(f.clientSeen)
	reply := syServerFlow{F: side, Client: ck, Backend: b.id}
	reply.F.End, reply.F.Seen = f.ack, flowClock(f.serverSeen)
	if f.state == syFlowStateFLOW_CLOSING {
		client.F.Fin = truth(f.clientFin) * uint8(syFinFIN_FIRST)
		reply.F.Fin = truth(f.serverFin) * uint8(syFinFIN_FIRST)
	}
	clients, servers := c.d.objects.SyStreamClients, c.d.objects.SyStreamServers
	if f.key.Proto == unix.IPPROTO_UDP {
		clients, servers = c.d.objects.SyUdpClients, c.d.objects.SyUdpServers
	}
	if port := swap(f.to.Sport); !b.local {
		if err := addPorts(c.d.objects, []PortRange{{port, port}}); err != nil {
			return err
		}
	}
	var known syClientFlow
	if clients.Lookup(&ck, &known) == nil {
		newer := int32(known.F.Seen - client.F.Seen)
		if newer > 0 || newer == 0 && known.F.State >= client.F.State {
			return nil // converted before
		}
	}
	if err := servers.Put(&sk, &reply); err != nil {
		return fmt.Errorf("put a flow: %w", err)
	}
	if err := clients.Put(&ck, &client); err != nil {
		return errors.Join(fmt.Errorf("put a flow: %w", err), ignoreMissing(servers.Delete(&sk)))
	}
	return nil
}

// putDSR writes the entry of a flow by direct return.
func (c *conversion) putDSR(f earlierFlow, fe *frontend, b *backend) error {
	method, err := encodeMethod(f.method, f.encap)
	if err != nil {
		return err
	}
	m := c.d.objects.SyDsrFlows
	if f.state == syFlowStateFLOW_HALF_OPEN {
		m = c.d.objects.SyDsrHalfopen
	}
	value := syDsrFlow{Frontend: fe.id, Backend: b.id, Seen: uint64(f.clientSeen), State: uint8(f.state),
		Method: uint8(method)}
	var known syDsrFlow
	if m.Lookup(&f.key, &known) == nil && known.Seen >= value.Seen {
		return nil
	}
	if err := m.Put(&f.key, &value); err != nil {
		return fmt.Errorf("put a flow: %w", err)
	}
	return nil
}

func (c *conversion) convertAffinities(ctx context.Context) error {
	var failed error
	err := c.from.affinities(ctx, func(a earlierAffinity) {
		fe := c.frontends[a.frontend]
		if fe == nil || failed != nil {
			return
		}
		var b *backend
		if b, failed = c.d.services.backendOf(a.backend); failed != nil {
			return
		}
		key := syAffinityKey{Client: a.client, Frontend: fe.id}
		failed = c.d.objects.SyAffinity.Update(&key, &syAffinity{Backend: b.id, Seen: a.seen}, ebpf.UpdateAny)
	})
	return errors.Join(err, failed)
}
