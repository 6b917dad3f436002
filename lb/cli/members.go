package cli

import (
	"fmt"
	"io"
	"math"

	"github.com/steelyard-lb/steelyard/lb"
)

func membersTable(w io.Writer, answer []byte) error {
	return rows(w, answer, "MEMBER\tNAME\tSTATE\tSINCE\tCLOCK", func(m lb.MemberStatus) []any {
		return []any{m.Member, m.Name, m.State, ago(m.Since), clock(m)}
	})
}

// clock returns by how much a member's clock differs, without the part that the round trip makes uncertain.
func clock(m lb.MemberStatus) string {
	switch {
	case m.Within == 0 || m.State != "up":
		return "-"
	case math.Abs(m.Ahead) <= math.Max(m.Within, 0.1):
		return "same"
	case m.Ahead < 0:
		return fmt.Sprintf("%.1fs behind", -m.Ahead)
	}
	return fmt.Sprintf("%.1fs ahead", m.Ahead)
}
