package flow

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/datapath/internal/table"
	"github.com/steelyard-lb/steelyard/lb"
)

// EndStrays makes the next walk end this machine's connections to VIPs that opened before they were balanced. They go
// through another balancer or nowhere, and would hang once this machine receives the VIP's packets.
func (g *Collector) EndStrays() {
	g.strays.Store(true)
	g.Wake()
}

// isStray reports whether a connection goes to a VIP although it should be balanced.
func (g *Collector) isStray(s *netlink.Socket) bool {
	to, ok := netip.AddrFromSlice(s.ID.Destination)
	if !ok {
		return false
	}
	f, ok := g.services.Find(lb.Question{To: netip.AddrPortFrom(to.Unmap(), s.ID.DestinationPort), Protocol: lb.TCP})
	if !ok {
		return false
	}
	subject, ok := g.services.Subject(f)
	return ok && table.BalancesSockets(subject.Plan)
}

// collectSockets ends this machine's connections to backends that are down, and counts the others (bpf/sock.h). If it
// fails, the next walk tries again.
func (g *Collector) collectSockets(ctx context.Context, w *walk) error {
	over, all := map[uint64]bool{}, map[uint64]bool{}
	err := WalkMap(ctx, g.objects.SySockets, chunkPause, func(cookie uint64, s bpf.SockFlow) {
		g.visit(w, s.Backend)
		all[cookie] = true
		if w.ends(s.Frontend, s.Backend, s.Generation, bpf.MethodNAT) {
			over[cookie] = true
		} else {
			w.open[s.Backend]++
		}
	})
	strays := g.strays.Swap(false)
	// sy_sock_release does not run for sockets that the kernel opens itself, for example for MPTCP.
	if sweep := len(all) > 0 && time.Since(g.swept) > sweepEvery; err == nil && len(over) == 0 && !strays && !sweep {
		return nil
	}
	g.swept = time.Now()
	if err == nil {
		err = g.endSockets(w, over, all, strays)
	}
	if err != nil {
		g.strays.Store(true)
		return err
	}
	maps.Copy(over, all)
	for cookie := range over {
		if err := table.IgnoreMissing(g.objects.SySockets.Delete(cookie)); err != nil {
			return fmt.Errorf("forget a connection: %w", err)
		}
	}
	return nil
}

// sweepEvery is the time between searches for entries without a socket.
const sweepEvery = time.Minute

// endSockets ends the connections in over and, if asked, strays. It removes those that exist from all.
func (g *Collector) endSockets(w *walk, over, all map[uint64]bool, strays bool) (err error) {
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		sockets, errList := netlink.SocketDiagTCP(family)
		if errList != nil {
			return fmt.Errorf("list the TCP connections: %w", errList)
		}
		for _, s := range sockets {
			if s.INode == 0 || s.State == netlink.TCP_LISTEN { // it is no longer a connection of a process
				continue
			}
			cookie := uint64(s.ID.Cookie[1])<<32 | uint64(s.ID.Cookie[0])
			delete(all, cookie)
			if !over[cookie] && !(strays && g.isStray(s)) {
				continue
			}
			switch errEnd := DestroySocket(s); {
			case errEnd == nil:
				w.ended++
			case errors.Is(errEnd, unix.EOPNOTSUPP):
				g.log.Error("connections of this machine to failed servers do not end", "err", errEnd,
					"fix", "use a kernel with CONFIG_INET_DIAG_DESTROY")
			case !errors.Is(errEnd, unix.ENOENT):
				err = fmt.Errorf("end a connection to %s: %w", s.ID.Destination, errEnd)
			}
		}
	}
	return err
}

// destroyRequest is struct inet_diag_req_v2 of linux/inet_diag.h.
type destroyRequest []byte

func (r destroyRequest) Len() int          { return len(r) }
func (r destroyRequest) Serialize() []byte { return r }

// DestroySocket aborts a TCP connection of this network namespace (SOCK_DESTROY of sock_diag(7)). It returns EOPNOTSUPP
// on a kernel without CONFIG_INET_DIAG_DESTROY, and ENOENT if there is no such socket. The netlink package does so for
// IPv4 only.
func DestroySocket(s *netlink.Socket) error {
	r := destroyRequest{s.Family, unix.IPPROTO_TCP, 0, 0}
	r = binary.NativeEndian.AppendUint32(r, 1<<s.State)
	r = binary.BigEndian.AppendUint16(r, s.ID.SourcePort)
	r = binary.BigEndian.AppendUint16(r, s.ID.DestinationPort)
	for _, ip := range [][]byte{s.ID.Source, s.ID.Destination} {
		field := make([]byte, 16)
		if s.Family == unix.AF_INET {
			copy(field, ip[len(ip)-4:])
		} else {
			copy(field, ip)
		}
		r = append(r, field...)
	}
	for _, n := range []uint32{s.ID.Interface, s.ID.Cookie[0], s.ID.Cookie[1]} {
		r = binary.NativeEndian.AppendUint32(r, n)
	}
	request := nl.NewNetlinkRequest(nl.SOCK_DESTROY, unix.NLM_F_ACK)
	request.AddData(r)
	_, err := request.Execute(unix.NETLINK_INET_DIAG, 0)
	return err
}
