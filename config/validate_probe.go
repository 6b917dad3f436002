package config

import (
	"fmt"
	"net/url"
	"time"
)

const (
	intervalMin = 10 * time.Millisecond
	intervalMax = time.Hour
	timeoutMin  = time.Millisecond
	countMax    = 100 // for rise and fall
)

func (d *decoder) probe(t *table) {
	p := &d.config.Probe
	p.Interval, p.Timeout = t.rhythm(p.Interval, p.Timeout)
	p.Fall = integer(t, "fall", p.Fall, 1, countMax)
	p.Rise = integer(t, "rise", p.Rise, 1, countMax)
	p.OnAllDown = word(t, "on_all_down", "value", p.OnAllDown, []string{OnAllDownKeep, OnAllDownWithdraw})
	p.Hold = t.duration("hold", p.Hold, 0, intervalMax)
	if i, ok := t.get("proxy_healthz"); ok {
		const like = "http://127.0.0.1:10256/healthz"
		if s, ok := i.str(like); ok {
			u, err := url.Parse(s)
			if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
				i.errorf(fmt.Sprintf("write one like %q", like), "%q is not an http URL", s)
			}
			p.ProxyHealthz = s
		}
	}
}

// rhythm reads interval and timeout. The default timeout is at most the interval, so that a short interval needs no
// further key.
func (t *table) rhythm(interval, timeout time.Duration) (time.Duration, time.Duration) {
	before := len(t.d.errs)
	interval = t.duration("interval", interval, intervalMin, intervalMax)
	known := len(t.d.errs) == before
	given := t.duration("timeout", timeout, timeoutMin, intervalMax)
	if !t.has("timeout") {
		return interval, min(given, interval)
	}
	if given > interval && known {
		t.at("timeout").errorf(fmt.Sprintf("write at most %q, or a longer interval", short(interval)),
			"%q is longer than the interval, %q", short(given), short(interval))
	}
	return interval, given
}
