package healthd

import (
	"context"
	"strings"

	"github.com/miekg/dns"

	"github.com/steelyard-lb/steelyard/lb"
)

// dnsChecker asks for a name, over UDP and again over TCP when the answer is truncated. Without a name it asks for the
// name servers of the root, which any resolver and most authoritative servers answer.
type dnsChecker struct{ lb.Check }

func (c dnsChecker) Probe(ctx context.Context) (Result, error) {
	m := new(dns.Msg)
	if c.Spec.Host == "" {
		m.SetQuestion(".", dns.TypeNS)
	} else if c.Target.Addr().Is4() {
		m.SetQuestion(dns.Fqdn(c.Spec.Host), dns.TypeA)
	} else {
		m.SetQuestion(dns.Fqdn(c.Spec.Host), dns.TypeAAAA)
	}
	answer, _, err := (&dns.Client{Timeout: c.Spec.Timeout}).ExchangeContext(ctx, m, c.Target.String())
	if err == nil && answer.Truncated {
		answer, _, err = (&dns.Client{Net: "tcp", Timeout: c.Spec.Timeout}).ExchangeContext(ctx, m, c.Target.String())
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
