package members

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"time"
)

// report contains claims of a member: changes, or all. Its encoding is the version, flags, the member's address, epoch,
// seq and the number of claims. For each claim, VIP, flags, term and seq follow. Numbers are big-endian.
type report struct {
	member     netip.Addr
	epoch, seq uint64
	whole      bool // claims are complete up to seq
	claims     map[netip.Addr]entry
}

const (
	reportVersion = 1
	headerSize    = 1 + 1 + 16 + 8 + 8 + 4
	claimSize     = 16 + 1 + 4 + 8
	// changesMax is the maximum number of changes in one datagram.
	changesMax = 36
)

// epochMax returns the highest accepted epoch, from a clock 50 years ahead, because some clocks were never set. It
// grows with time, so a member can always follow with a higher epoch when another member reports this one for it.
func epochMax() uint64 {
	now := time.Now()
	if set := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC); now.Before(set) {
		now = set
	}
	return uint64(now.AddDate(50, 0, 0).UnixNano())
}

const (
	flagWhole    = 1
	flagEligible = 1
	flagHolds    = 2
	flagLocal    = 4
)

// isAfter reports whether a report has claims later than seq.
func (r report) isAfter(seq uint64) bool {
	for _, e := range r.claims {
		if e.seq > seq {
			return true
		}
	}
	return false
}

var errReport = errors.New("not a report")

func (r report) append(b []byte) []byte {
	flags := byte(0)
	if r.whole {
		flags = flagWhole
	}
	b = append(b, reportVersion, flags)
	b = appendAddr(b, r.member)
	b = binary.BigEndian.AppendUint64(b, r.epoch)
	b = binary.BigEndian.AppendUint64(b, r.seq)
	b = binary.BigEndian.AppendUint32(b, uint32(len(r.claims)))
	for vip, e := range r.claims {
		flags := byte(0)
		for flag, set := range map[byte]bool{flagEligible: e.Eligible, flagHolds: e.Holds, flagLocal: e.Local} {
			if set {
				flags |= flag
			}
		}
		b = append(appendAddr(b, vip), flags)
		b = binary.BigEndian.AppendUint32(b, e.Term)
		b = binary.BigEndian.AppendUint64(b, e.seq)
	}
	return b
}

func appendAddr(b []byte, a netip.Addr) []byte {
	x := a.As16()
	return append(b, x[:]...)
}

// parseReport returns the first report in b, and the rest.
func parseReport(b []byte) (r report, rest []byte, err error) {
	if len(b) < headerSize || b[0] != reportVersion {
		return r, nil, errReport
	}
	r.whole, r.member = b[1]&flagWhole != 0, addrAt(b[2:])
	r.epoch, r.seq = binary.BigEndian.Uint64(b[18:]), binary.BigEndian.Uint64(b[26:])
	n := uint64(binary.BigEndian.Uint32(b[34:]))
	b = b[headerSize:]
	if r.epoch > epochMax() || n > claimsMax || n*claimSize > uint64(len(b)) {
		return r, nil, errReport
	}
	r.claims = make(map[netip.Addr]entry, n)
	for ; n > 0; n-- {
		flags := b[16]
		r.claims[addrAt(b)] = entry{
			Claim: Claim{
				Eligible: flags&flagEligible != 0, Holds: flags&flagHolds != 0, Local: flags&flagLocal != 0,
				Term: binary.BigEndian.Uint32(b[17:]),
			},
			seq: binary.BigEndian.Uint64(b[21:]),
		}
		b = b[claimSize:]
	}
	return r, b, nil
}

func addrAt(b []byte) netip.Addr { return netip.AddrFrom16([16]byte(b)).Unmap() }
