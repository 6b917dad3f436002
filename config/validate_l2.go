package config

import "net/netip"

func defaultL2() *L2 { return &L2{Port: 7946, SpreadLocal: true} }

// l2SecretsMax is what a rotation needs: the secret before, the one in use and the next one.
const l2SecretsMax = 3

func (d *decoder) l2(t *table) *L2 {
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
	l.SpreadLocal = t.boolean("spread_local", l.SpreadLocal)
	if len(l.Members) > 0 && !t.has("secret_file") && len(d.config.Datapath.TunnelKeys) == 0 {
		t.at("members").warnf("share a secret by secret_file",
			"any host that can reach port %d can take over addresses", l.Port)
	}
	return l
}
