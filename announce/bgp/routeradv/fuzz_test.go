package routeradv

import (
	"log/slog"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/mdlayher/ndp"
	"golang.org/x/net/ipv6"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// fuzzConn has messages, each after its length, the last byte of its sender, its hop limit and its interface.
type fuzzConn struct {
	b       []byte
	hear    func(from netip.Addr) // of each valid advertisement
	between func()
}

func (c *fuzzConn) ReadFrom() (ndp.Message, *ipv6.ControlMessage, netip.Addr, error) {
	for len(c.b) >= 4 {
		c.between()
		n, cm := min(int(c.b[0]), len(c.b)-4), &ipv6.ControlMessage{HopLimit: int(c.b[2]), IfIndex: int(c.b[3] % 4)}
		from := netip.AddrFrom16([16]byte{0: 0xfe, 1: 0x80, 15: c.b[1]})
		if c.b[3] > 250 {
			from = netip.AddrFrom16([16]byte{0: 0x20, 1: 1, 15: c.b[1]})
		}
		m, err := ndp.ParseMessage(c.b[4 : 4+n])
		c.b = c.b[4+n:]
		if err != nil {
			continue // as an *ndp.Conn does
		}
		_, advertises := m.(*ndp.RouterAdvertisement)
		if advertises && cm.HopLimit == 255 && cm.IfIndex == 1 && from.IsLinkLocalUnicast() {
			c.hear(from)
		}
		if len(c.b)%7 == 0 {
			cm = nil
		}
		return m, cm, from, nil
	}
	return nil, nil, netip.Addr{}, os.ErrClosed
}

// A router is one that has sent a valid advertisement over the link, and no flood of them takes more than its places.
func FuzzAdvertisements(f *testing.F) {
	advertisement, err := ndp.MarshalMessage(&ndp.RouterAdvertisement{RouterLifetime: time.Hour, Options: []ndp.Option{
		&ndp.LinkLayerAddress{Direction: ndp.Source, Addr: []byte{2, 0, 0, 0, 0, 1}}, ndp.NewMTU(1500),
	}})
	must.Do(f, err)
	message := func(from, hops, index byte) []byte {
		return append([]byte{byte(len(advertisement)), from, hops, index}, advertisement...)
	}
	seed := append(message(1, 255, 1), message(2, 64, 1)...)
	f.Add(append(seed, message(3, 255, 253)...))
	var flood []byte
	for from := range 100 {
		flood = append(flood, message(byte(from), 255, 1)...)
	}
	f.Add(flood)
	f.Fuzz(func(t *testing.T, b []byte) {
		heard := map[netip.Addr]bool{}
		found := func(_ string, router netip.Addr) {
			if !heard[router] {
				t.Errorf("%v has sent no valid advertisement", router)
			}
		}
		l := &link{name: "eth0", o: &Options{Log: slog.New(slog.DiscardHandler), Found: found}}
		conn := &fuzzConn{b: b, hear: func(from netip.Addr) { heard[from] = true }, between: func() { l.turn() }}
		if err := l.receive(conn, 1, make(chan struct{}, 1)); err == nil || len(l.candidates.all) > maxCandidates {
			t.Errorf("%v, %d candidates", err, len(l.candidates.all))
		}
	})
}
