package healthd

import (
	"context"
	"strings"

	"github.com/miekg/dns"
)

// dnsChecker sends a query for a name over UDP, and repeats it over TCP if the response is truncated. Without a name it
// queries the root's NS records, which resolvers and most authoritative servers answer.
type dnsChecker struct{ target }

func (c dnsChecker) Probe(ctx context.Context) (Result, error) {
	m := new(dns.Msg)
	if c.Spec.Host == "" {
		m.SetQuestion(".", dns.TypeNS)
	} else if c.Target.Addr().Is4() {
		m.SetQuestion(dns.Fqdn(c.Spec.Host), dns.TypeA)
	} else {
		m.SetQuestion(dns.Fqdn(c.Spec.Host), dns.TypeAAAA)
	}
	resp, err := c.exchange(ctx, m, "udp")
	if err == nil && resp.Truncated {
		resp, err = c.exchange(ctx, m, "tcp")
	}
	if err != nil {
		return Result{}, err
	}
	if resp.Rcode != dns.RcodeSuccess {
		return fail("DNS %s", dns.RcodeToString[resp.Rcode])
	}
	if c.Spec.Body == "" {
		return ok("DNS NOERROR")
	}
	for _, rr := range resp.Answer {
		if strings.Contains(rr.String(), c.Spec.Body) {
			return ok("DNS NOERROR")
		}
	}
	return fail("DNS answer does not contain %q", c.Spec.Body)
}

func (c dnsChecker) exchange(ctx context.Context, m *dns.Msg, network string) (*dns.Msg, error) {
	d, to, err := c.dialer(network)
	if err != nil {
		return nil, err
	}
	d.Timeout = c.Spec.Timeout
	client := &dns.Client{Net: network, Timeout: c.Spec.Timeout, Dialer: d}
	resp, _, err := client.ExchangeContext(ctx, m, to.String())
	return resp, err
}
