package cluster

import (
	"context"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/miekg/dns"
	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// serveNames resolves Services' names, SERVICE.NAMESPACE.svc.cluster.local, like a cluster's DNS server.
func (u *upstream) serveNames(t *testing.T) {
	t.Helper()
	at := u.Servers[0]
	conn := must.Get(at.ListenPacket(t.Context(), "udp", netip.AddrPortFrom(at.V4, 53).String()))(t)
	server := &dns.Server{PacketConn: conn, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		r := new(dns.Msg)
		r.SetReply(q)
		r.Authoritative = true
		if len(q.Question) != 1 || !u.resolve(r, q.Question[0].Name, q.Question[0].Qtype) {
			r.Rcode = dns.RcodeNameError
		}
		w.WriteMsg(r)
	})}
	go server.ActivateAndServe()
	t.Cleanup(func() { server.Shutdown() })
}

// resolve adds a name's records, and returns false if there is no such name.
func (u *upstream) resolve(r *dns.Msg, name string, kind uint16) bool {
	labels := strings.Split(strings.TrimSuffix(name, "."), ".")
	if len(labels) != 5 || strings.Join(labels[2:], ".") != "svc.cluster.local" {
		return false
	}
	s, err := u.api.CoreV1().Services(labels[1]).Get(context.Background(), labels[0], meta.GetOptions{})
	if err != nil {
		return false
	}
	head := func(kind uint16) dns.RR_Header {
		return dns.RR_Header{Name: name, Rrtype: kind, Class: dns.ClassINET, Ttl: 1}
	}
	if s.Spec.Type == core.ServiceTypeExternalName {
		target := dns.Fqdn(s.Spec.ExternalName)
		r.Answer = append(r.Answer, &dns.CNAME{Hdr: head(dns.TypeCNAME), Target: target})
		u.resolve(r, target, kind)
		return true
	}
	for _, text := range s.Spec.ClusterIPs {
		a, err := netip.ParseAddr(text)
		switch {
		case err != nil:
		case a.Is4() && kind == dns.TypeA:
			r.Answer = append(r.Answer, &dns.A{Hdr: head(kind), A: net.IP(a.AsSlice())})
		case a.Is6() && kind == dns.TypeAAAA:
			r.Answer = append(r.Answer, &dns.AAAA{Hdr: head(kind), AAAA: net.IP(a.AsSlice())})
		}
	}
	return true
}
