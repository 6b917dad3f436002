package config

import (
	"net/netip"
	"time"
)

func defaultL2() *L2 { return &L2{Port: 7946, SpreadLocal: true, ProbeOwn: 15 * time.Second} }

// l2SecretsMax is what a rotation needs: the previous, the current and the next secret.
const l2SecretsMax = 3

// l2 reads [l2]. In a cluster the members already have keys.
func (d *decoder) l2(t *table, cluster bool) *L2 {
	l := defaultL2()
	l.Interfaces = t.interfaces("interfaces")
	l.Members = distinct(t.list("members", "192.0.2.12"), func(i item) (netip.Addr, bool) {
		a, ok := i.host()
		if ok {
			d.isOwn(a, i)
		}
		return a, ok
	})
	l.Port = integer(t, "port", l.Port, 1, 65535)
	l.Secrets = t.secrets("secret_file", "/etc/steelyard/gossip.key", 16, 80, l2SecretsMax)
	l.Unencrypted = t.boolean("unencrypted", false)
	l.SpreadLocal = t.boolean("spread_local", l.SpreadLocal)
	l.ProbeOwn = t.seconds("probe_own", l.ProbeOwn, time.Hour)
	keyed := t.has("secret_file") || len(d.config.Datapath.TunnelKeys) > 0 || cluster
	switch {
	case l.Unencrypted && (keyed || len(l.Members) == 0):
		t.at("unencrypted").warnf("leave it out", "has no effect: there is a key, or no member")
		l.Unencrypted = false
	case l.Unencrypted:
		t.at("unencrypted").warnf("share a secret through secret_file",
			"any host that can send with a member's address to port %d can take over addresses", l.Port)
	case len(l.Members) > 0 && !keyed:
		t.at("members").errorf("write the same secret into secret_file on all, or unencrypted = true",
			"without a secret, other hosts can take over addresses")
	}
	return l
}
