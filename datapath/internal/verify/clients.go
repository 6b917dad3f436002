package verify

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/internal/flow"
	"github.com/steelyard-lb/steelyard/lb"
)

// LostClients returns a text about the sampled clients that would not get a reply, or "" if all would. It checks lost
// clients again until they get replies, or for flow.KeepClients, because they are not in later samples.
func (v *Verifier) LostClients(sample []lb.Question, now time.Time) string {
	was := v.warned.lostSince
	v.warned.lostSince = map[lb.Question]time.Time{}
	all := map[lb.Question]time.Time{}
	for q, since := range was {
		if now.Sub(since) < flow.KeepClients {
			all[q] = since
		}
	}
	for _, q := range sample {
		if _, ok := all[q]; !ok {
			all[q] = now
		}
	}
	first, text := netip.Addr{}, ""
	for q, since := range all {
		fault := v.clientFault(q)
		if fault == "" {
			continue
		}
		v.warned.lostSince[q] = since
		if a := q.Client.Addr(); !first.IsValid() || a.Less(first) {
			first, text = a, fmt.Sprintf("%s: %s", a, fault)
		}
	}
	if text == "" {
		return ""
	}
	return fmt.Sprintf("replies do not get to %d of %d sampled clients, such as %s",
		len(v.warned.lostSince), len(all), text)
}

// clientFault returns why a client would not get a reply although its packets are forwarded, or "" if it would.
func (v *Verifier) clientFault(q lb.Question) string {
	if !q.To.Addr().IsValid() {
		return "" // the frontend was removed
	}
	x, ok := v.run(opening(q))
	if !ok || v.Names.Actions[x.V.Action] != "forward" {
		return ""
	}
	return v.replyFault(q, x, x.V.Local == 1)
}
