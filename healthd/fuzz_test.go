package healthd

import (
	"context"
	"net"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	"github.com/steelyard-lb/steelyard/lb/printable"
)

// fuzzServer responds to each request on loopback, over TCP and UDP, with stored data.
type fuzzServer struct {
	at     netip.AddrPort
	answer atomic.Pointer[[]byte]
}

func newFuzzServer(f *testing.F) *fuzzServer {
	l := must.Get(net.Listen("tcp4", "127.0.0.1:0"))(f)
	s := &fuzzServer{at: targetOf(l.Addr())}
	u := must.Get(net.ListenUDP("udp4", net.UDPAddrFromAddrPort(s.at)))(f)
	f.Cleanup(func() { l.Close(); u.Close() })
	go func() {
		var request [4096]byte
		for c, err := l.Accept(); err == nil; c, err = l.Accept() {
			_, _ = c.Read(request[:])
			_, _ = c.Write(*s.answer.Load())
			c.Close()
		}
	}()
	go func() {
		var request [4096]byte
		for {
			_, from, err := u.ReadFromUDPAddrPort(request[:])
			if err != nil {
				return
			}
			answer := slices.Clone(*s.answer.Load())
			copy(answer[:min(2, len(answer))], request[:]) // the ID, because a DNS client ignores others
			_, _ = u.WriteToUDPAddrPort(answer, from)
		}
	}()
	return s
}

// probe checks the result of a probe that receives answer.
func (s *fuzzServer) probe(t *testing.T, kind lb.CheckType, body string) {
	t.Helper()
	const timeout = 10 * time.Second
	c := lb.Check{Target: s.at, Spec: lb.CheckSpec{
		Type: kind, Path: "/", Body: body, Timeout: timeout, Status: []lb.StatusRange{{From: 200, To: 299}},
	}}
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	r, err := checkers[kind](target{Check: c}).Probe(ctx)
	if err != nil {
		r = Result{Reason: reason(err, timeout)}
	}
	must.True(t, r.Reason != "" && printable.Cut(r.Reason) == r.Reason && r.Weight >= -1 && r.Weight <= lb.MaxWeight,
		"%s: %+v, %v", kind, r, err)
	must.True(t, !isTimeout(err), "%s: waits for another answer", kind)
}

// Whatever an HTTP server responds, the probe ends with a short reason.
func FuzzHTTP(f *testing.F) {
	a := newFuzzServer(f)
	const ok, weight = "HTTP/1.1 200 OK\r\n", "X-Load-Balancing-Endpoint-Weight: "
	for _, answer := range []string{
		"", "220 smtp ready\r\n", "HTTP/1.0 503 Service Unavailable\r\n\r\n",
		ok + "Content-Length: 2\r\n\r\nok", ok + "Transfer-Encoding: chunked\r\n\r\nffff\r\n",
		ok + weight + "7\r\n\r\n" + `{"service":{"namespace":"a","name":"b"}}`,
		ok + weight + "9223372036854775807\r\n\r\n" + `{"service":{"namespace":"a","name":"b"}}`,
		"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 301 Moved\r\nLocation: http://127.0.0.1/\r\n\r\n",
	} {
		f.Add([]byte(answer))
	}
	f.Fuzz(func(t *testing.T, answer []byte) {
		a.answer.Store(&answer)
		a.probe(t, lb.CheckHTTP, "ok")
		a.probe(t, lb.CheckNodePort, "a/b")
	})
}

// Whatever a DNS server responds, the probe ends with a short reason.
func FuzzDNS(f *testing.F) {
	a := newFuzzServer(f)
	question := new(dns.Msg)
	question.SetQuestion("www.example.net.", dns.TypeA)
	answer := new(dns.Msg)
	answer.SetReply(question)
	for _, text := range []string{"www.example.net. 60 IN A 192.0.2.1", `www.example.net. 60 IN TXT "x\027y"`} {
		rr := must.Get(dns.NewRR(text))(f)
		answer.Answer = append(answer.Answer, rr)
	}
	for _, change := range []func(){
		func() {}, func() { answer.Rcode = dns.RcodeServerFailure }, func() { answer.Truncated = true },
	} {
		change()
		b := must.Get(answer.Pack())(f)
		f.Add(b)
		f.Add(b[:len(b)-5])
	}
	f.Fuzz(func(t *testing.T, answer []byte) {
		if len(answer) < 12 || answer[2]&0x80 == 0 {
			return // the client waits for a response
		}
		a.answer.Store(&answer)
		a.probe(t, lb.CheckDNS, "192.0.2.1")
	})
}
