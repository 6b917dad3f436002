package datapath

import (
	"fmt"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// outdated is a client's acknowledgement that is much older than its last one.
const outdated = 1<<32 + 5001 - 100_000

// onePort leaves a service with one server only one source port.
func onePort(o *Options) { o.SNATPorts = []PortRange{{61000, 61000}} }

// taken reports whether another client's SYN fails to get the only source port.
func (fx *fixture) taken() bool {
	fx.t.Helper()
	fx.clear("sy_snat_used") // programs rely on hints for a second
	syn := fx.on(1, dptest.TCP, dptest.SYN)
	syn.Seq, syn.Payload = 1, nil
	return fx.run(syn.Frame()).reason == "snat_exhausted"
}

// bare returns the segment without data and with these numbers.
func bare(p dptest.Packet, seq, ack uint32) dptest.Packet {
	p.Seq, p.Ack, p.Payload = seq, ack, nil
	return p
}

// A UDP flow lives as long as either side sends, and a TCP flow as long as the server does, both in the kernel and for
// the garbage collection.
func TestWhoKeepsAFlow(t *testing.T) {
	t.Parallel()
	fx := shared(t, hookTC, false, onePort)
	for _, proto := range []lb.Protocol{lb.TCP, lb.UDP} {
		for _, old := range [][2]time.Duration{{3 * time.Hour, 0}, {0, 3 * time.Hour}, {3 * time.Hour, 3 * time.Hour}} {
			for _, agent := range []bool{true, false} {
				fx.reset()
				fx.service(proto, "b1")
				live, other := old[1] == 0 || old[0] == 0 && proto == lb.UDP, fx.on(1, dptest.UDP, 0)
				if proto == lb.UDP {
					with(func(*fixture) {}, udp, replies(0), udp)(fx)
				} else {
					connect(fx)
					other = bare(fx.on(1, dptest.TCP, dptest.SYN), 1, 0)
				}
				fx.age(old[0], old[1])
				if live {
					in := fx.fromClient(fx.last.Proto, dptest.ACK*bpf.Truth(proto == lb.TCP))
					fx.wantReason(fmt.Sprintf("%s: idle for %s", proto, old), in, forwarded)
					fx.age(old[0], old[1])
				}
				if agent {
					fx.collect()
				}
				kept := fx.run(other.Frame()).reason == "snat_exhausted"
				must.True(t, kept == live, "%s, agent %t: idle for %s: kept %t", proto, agent, old, kept)
			}
		}
	}
}

// A datagram from either side keeps a UDP flow for another timeout.
func TestDatagramsKeepTheirFlow(t *testing.T) {
	t.Parallel()
	for _, h := range []hookName{hookXDP, hookTC} {
		fx := shared(t, h, false, onePort)
		opened := with(func(fx *fixture) { fx.service(lb.UDP, "b1") }, udp, replies(0), udp)
		for name, send := range map[string]func(*fixture) dptest.Packet{
			"the client": udp, "the server": replies(0), "nobody": nil,
		} {
			for _, agent := range []bool{true, false} {
				fx.reset()
				opened(fx)
				fx.age(2*time.Minute, 2*time.Minute)
				if send != nil {
					with(func(*fixture) {}, send)(fx)
				}
				fx.age(2*time.Minute, 2*time.Minute)
				if agent {
					fx.collect()
				}
				reason := fx.run(fx.on(1, dptest.UDP, 0).Frame()).reason
				must.True(t, (reason == "snat_exhausted") == (send != nil),
					"%s, agent %t: after a datagram of %s another client gets: %s", h, agent, name, reason)
			}
		}
	}
}

// A client alone cannot keep a source port. Old or current acknowledgements do not keep the port of a connection that
// the server has closed or lost. Neither does a SYN, which a server that has lost the connection answers.
func TestAClientKeepsNoPortOfALostConnection(t *testing.T) {
	t.Parallel()
	open := func(*fixture) {}
	byServer := func(fx *fixture) { fx.run(bare(fx.reply(dptest.FIN|dptest.ACK), 5001, 1005).Frame()) }
	byBoth := func(fx *fixture) { fx.closedBy(false) }
	for _, x := range []struct {
		name  string
		close func(fx *fixture)
		every time.Duration
		send  func(fx *fixture) []dptest.Packet
	}{
		{"old ACKs after FIN", byServer, 3 * time.Minute, func(fx *fixture) []dptest.Packet {
			return []dptest.Packet{bare(fx.fromClient(dptest.TCP, dptest.ACK), 1005, outdated)}
		}},
		{"ACKs after FIN", byServer, 3 * time.Minute, func(fx *fixture) []dptest.Packet {
			return []dptest.Packet{bare(fx.fromClient(dptest.TCP, dptest.ACK), 1005, 5002)}
		}},
		{"ACKs after both FINs", byBoth, 9 * time.Second, func(fx *fixture) []dptest.Packet {
			return []dptest.Packet{bare(fx.fromClient(dptest.TCP, dptest.ACK), 1000, 1<<31)}
		}},
		{"old ACKs that the server resets", open, 2 * time.Hour, func(fx *fixture) []dptest.Packet {
			return []dptest.Packet{bare(fx.fromClient(dptest.TCP, dptest.ACK), 1005, outdated),
				bare(fx.reply(dptest.RST), outdated, 0)}
		}},
		{"SYNs that the server answers", open, 2 * time.Hour, func(fx *fixture) []dptest.Packet {
			return []dptest.Packet{bare(fx.fromClient(dptest.TCP, dptest.SYN), 1<<30, 0),
				bare(fx.reply(dptest.SYN|dptest.ACK), 1<<31, 1<<30+1)}
		}},
	} {
		t.Run(x.name, func(t *testing.T) {
			fx := shared(t, hookTC, false, onePort)
			for _, agent := range []bool{true, false} {
				fx.reset()
				fx.service(lb.TCP, "b1")
				connect(fx)
				first := fx.last
				x.close(fx)
				for range max(3, 3*time.Minute/x.every) {
					fx.age(x.every, x.every)
					fx.last = first
					for _, p := range x.send(fx) {
						fx.run(p.Frame())
					}
					if agent {
						fx.collect()
					}
				}
				n := len(fx.confirmed().servers)
				must.True(t, !agent || n == 0, "%d flows are left", n)
				must.True(t, !fx.taken(), "agent %t: another client does not get the port", agent)
			}
		})
	}
}

// An SCTP client cannot either: a server without an association answers a stale cookie with ERROR (RFC 9260, 5.2.6).
// The answer to a HEARTBEAT keeps the flow.
func TestAnOldCookieKeepsNoPort(t *testing.T) {
	t.Parallel()
	const initiate, initAck, heartbeatAck, failure, cookieEcho = 1, 2, 5, 9, 10
	const client, server = 1000, 5000 // verification tags
	for _, h := range []hookName{hookXDP, hookTC} {
		fx := shared(t, h, false, onePort)
		chunk := func(p dptest.Packet, kind uint8, seq, tag uint32) string {
			p.Type, p.Seq, p.Ack = kind, seq, tag
			return fx.run(p.Frame()).reason
		}
		for kind, kept := range map[uint8]bool{failure: false, heartbeatAck: true} {
			fx.reset()
			fx.service(lb.SCTP, "b1")
			echo := func() string { return chunk(fx.fromClient(dptest.SCTP, 0), cookieEcho, 0, server) }
			chunk(fx.fromClient(dptest.SCTP, 0), initiate, client, 0)
			first := fx.last
			chunk(fx.reply(0), initAck, server, client)
			must.Row(t, h+": the cookie", forwarded, echo())
			for range 3 {
				fx.age(2*time.Hour, 2*time.Hour)
				echo()
				fx.last = first
				must.Row(t, h+": the chunk of the server", forwarded, chunk(fx.reply(0), kind, 0, client))
			}
			fx.clear("sy_snat_used") // programs rely on hints for a second
			reason := chunk(fx.on(1, dptest.SCTP, 0), initiate, client, 0)
			must.True(t, (reason == "snat_exhausted") == kept,
				"%s: while the server sends chunk %d another client gets: %s", h, kind, reason)
		}
	}
}

// A connection is kept if one side sends from time to time and the other acknowledges.
func TestIdleConnectionsAreKept(t *testing.T) {
	t.Parallel()
	for _, h := range []hookName{hookXDP, hookTC} {
		fx := shared(t, h, false, onePort)
		for name, send := range map[string]func(fx *fixture) []dptest.Packet{
			"keepalives of the client": func(fx *fixture) []dptest.Packet {
				return []dptest.Packet{bare(fx.fromClient(dptest.TCP, dptest.ACK), 1004, 5001),
					bare(fx.reply(dptest.ACK), 5001, 1005)}
			},
			"keepalives of the server": func(fx *fixture) []dptest.Packet {
				return []dptest.Packet{bare(fx.reply(dptest.ACK), 5000, 1005),
					bare(fx.fromClient(dptest.TCP, dptest.ACK), 1005, 5001)}
			},
			"keepalives of a server whose client is lost": func(fx *fixture) []dptest.Packet {
				return []dptest.Packet{bare(fx.reply(dptest.ACK), 5000, 1005)}
			},
		} {
			fx.reset()
			fx.service(lb.TCP, "b1")
			connect(fx)
			first := fx.last
			for range 5 {
				fx.age(2*time.Hour, 2*time.Hour)
				fx.last = first
				for _, p := range send(fx) {
					fx.wantReason(name, p, forwarded)
				}
				fx.collect()
			}
			must.True(t, len(fx.confirmed().servers) == 1 && fx.taken(), "%s: %s: the flow is gone", h, name)
		}
	}
}

// The timeout of a closed connection begins with the packet that closes it, even if the connection was idle before, and
// even if the server has not acknowledged the packet.
func TestTimeoutsBeginWithTheClose(t *testing.T) {
	t.Parallel()
	fx := shared(t, hookTC, false, onePort)
	for name, closing := range map[string]func() dptest.Packet{
		"FIN of the client": func() dptest.Packet {
			return bare(fx.fromClient(dptest.TCP, dptest.FIN|dptest.ACK), 1005, 5001)
		},
		"RST of the client": func() dptest.Packet { return bare(fx.fromClient(dptest.TCP, dptest.RST), 1005, 0) },
		"RST of the server": func() dptest.Packet { return bare(fx.reply(dptest.RST), 5001, 0) },
	} {
		fx.reset()
		fx.service(lb.TCP, "b1")
		connect(fx)
		fx.age(time.Hour, time.Hour)
		fx.run(closing().Frame())
		fx.collect()
		must.True(t, len(fx.confirmed().servers) == 1 && fx.taken(), "%s: the flow is gone at once", name)
	}
}

// A server that closed first keeps the connection in TIME_WAIT from the client's FIN on, however late that comes.
func TestAPortRestsFromTheLastFIN(t *testing.T) {
	t.Parallel()
	fx := shared(t, hookTC, false, onePort)
	fx.service(lb.TCP, "b1")
	connect(fx)
	fx.run(bare(fx.reply(dptest.FIN|dptest.ACK), 5001, 1005).Frame())
	fx.age(200*time.Second, 200*time.Second)
	fx.run(bare(fx.fromClient(dptest.TCP, dptest.FIN|dptest.ACK), 1005, 5002).Frame())
	fx.age(50*time.Second, 50*time.Second)
	fx.collect()
	must.True(t, fx.taken(), "after 50 s another client got the port")
}

// A RST of the server that its client challenges does not shorten the timeout for long.
func TestAChallengedRSTOfTheServer(t *testing.T) {
	t.Parallel()
	for _, h := range []hookName{hookXDP, hookTC} {
		fx := shared(t, h, false, onePort)
		fx.service(lb.TCP, "b1")
		connect(fx)
		fx.run(bare(fx.reply(dptest.RST), 6001, 0).Frame())
		fx.run(bare(fx.fromClient(dptest.TCP, dptest.ACK), 1005, 5001).Frame())
		fx.age(time.Hour, time.Hour)
		fx.collect()
		must.True(t, len(fx.confirmed().servers) == 1 && fx.taken(), "%s: the flow is gone after an hour", h)
	}
}
