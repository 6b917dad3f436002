package healthd

import (
	"context"
	"strings"

	"github.com/miekg/dns"
)

// dnsChecker asks for a name, over UDP and again over TCP when the answer is truncated. Without a name it asks for the
// name servers of the root, which any resolver and most authoritative servers answer.
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
	answer, err := c.ask(ctx, m, "udp")
	if err == nil && answer.Truncated {
		answer, err = c.ask(ctx, m, "tcp")
	}
	if err != nil {
		return Result{Weight: -1}, err
	}
	if answer.Rcode != dns.RcodeSuccess {
		return fail("DNS %s", dns.RcodeToString[answer.Rcode])
	}
	if c.Spec.Body == "" {
		return ok("DNS NOERROR")
	}
	for _, rr := range answer.Answer {
		if strings.Contains(rr.String(), c.Spec.Body) {
			return ok("DNS NOERROR")
		}
	}
	return fail("DNS answer does not contain %q", c.Spec.Body)
}

func (c dnsChecker) ask(ctx context.Context, m *dns.Msg, network string) (*dns.Msg, error) {
	d, to, err := c.dialer(network)
	if err != nil {
		return nil, err
	}
	d.Timeout = c.Spec.Timeout
	answer, _, err := (&dns.Client{Net: network, Timeout: c.Spec.Timeout, Dialer: d}).ExchangeContext(ctx, m, to.String())
	return answer, err
}
