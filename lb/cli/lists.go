package cli

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"time"

	ucli "github.com/urfave/cli/v2"

	"github.com/steelyard-lb/steelyard/lb"
)

// ofServices returns a list command whose rows belong to services, with filters.
func (e *env) ofServices(name, usage, path string, table func(w io.Writer, answer []byte) error) *ucli.Command {
	cmd := e.list(name, usage, path, table)
	cmd.ArgsUsage = "[SERVICE]"
	cmd.Flags = append(cmd.Flags,
		&ucli.StringFlag{Name: "service", Usage: "list only those of the service `NAME`, like the argument"},
		&ucli.BoolFlag{Name: "unhealthy", Usage: "list only those that are not healthy"})
	cmd.Action = func(c *ucli.Context) error {
		answer, err := e.get(c, path)
		if err == nil {
			answer, err = filtered(answer, cmp.Or(c.Args().First(), c.String("service")), c.Bool("unhealthy"))
		}
		if err != nil {
			return err
		}
		return e.print(c, answer, table)
	}
	return cmd
}

// filtered returns the elements of a list that belong to a service, or to any for "", and that are not healthy.
func filtered(answer json.RawMessage, service string, unhealthy bool) (json.RawMessage, error) {
	var all, wanted []json.RawMessage
	if err := json.Unmarshal(answer, &all); err != nil {
		return nil, fmt.Errorf("read the response: %w", err)
	}
	var rows []lb.ServiceStatus
	for _, x := range all {
		var row struct {
			Service string
			State   string
		}
		if err := json.Unmarshal(x, &row); err != nil {
			return nil, fmt.Errorf("read the response: %w", err)
		}
		rows = append(rows, lb.ServiceStatus{Service: row.Service})
		if (service == "" || row.Service == service) && (!unhealthy || row.State != lb.StateHealthy.String()) {
			wanted = append(wanted, x)
		}
	}
	if service != "" {
		if err := lb.NoService(service, rows); err != nil {
			return nil, err
		}
	}
	if len(wanted) == 0 {
		return json.RawMessage("[]"), nil
	}
	return json.Marshal(wanted)
}

func servicesTable(w io.Writer, answer []byte) error {
	const header = "SERVICE\tADDRESS\tFORWARD\tALGORITHM\tHEALTHY\tANNOUNCED\t" + figuresHeader + "\tREASON"
	return rows(w, answer, header, func(s lb.ServiceStatus) []any {
		announced := yesNo(s.Announced)
		if s.NoneHealthy() {
			announced = "down"
		}
		return append(append([]any{s.Service, frontendOf(s), s.Forward, s.Algorithm, healthyOf(s), announced},
			figures(s.Traffic)...), dash(s.Reason))
	})
}

func backendsTable(w io.Writer, answer []byte) error {
	const header = "SERVICE\tBACKEND\tWEIGHT\tSTATE\tSINCE\t" + figuresHeader + "\tPROBE\tP95\tHANDSHAKE\tREASON"
	return rows(w, answer, header, func(b lb.BackendStatus) []any {
		return append(append([]any{b.Service, backendOf(b), b.Weight, b.State, ago(b.Since)}, figures(b.Traffic)...),
			seconds(b.ProbeTimes.Last), seconds(b.P95), seconds(b.Handshake95), dash(b.Reason))
	})
}

func frontendOf(s lb.ServiceStatus) string {
	if !s.Address.IsValid() { // the service waits for an address
		return fmt.Sprintf("-:%d/%s", s.Port, s.Protocol)
	}
	return s.Frontend().String()
}

func backendOf(b lb.BackendStatus) string { return netip.AddrPortFrom(b.Address, b.Port).String() }

func healthyOf(s lb.ServiceStatus) string {
	up := 0
	for _, b := range s.Backends {
		if b.State == lb.StateHealthy {
			up++
		}
	}
	return fmt.Sprintf("%d/%d", up, len(s.Backends))
}

const figuresHeader = "NEW/S\tPACKETS/S\tBITS/S\tLAST PACKET"

// figures returns the cells of figuresHeader.
func figures(t lb.Traffic) []any {
	return []any{short(t.FlowRate), short(t.PacketRate), short(t.BitRate), ago(t.Last)}
}

// short formats a rate with at most three significant digits and a decimal prefix.
func short(x float64) string {
	const prefixes = "kMGT"
	prefix := ""
	for i := 0; x >= 999.5 && i < len(prefixes); i++ {
		x, prefix = x/1000, prefixes[i:i+1]
	}
	switch {
	case x < 0.05:
		return "0"
	case x < 9.95:
		return fmt.Sprintf("%.1f%s", x, prefix)
	}
	return fmt.Sprintf("%.0f%s", x, prefix)
}

// seconds formats the duration of a probe, or returns "-" for 0.
func seconds(s float64) string {
	switch d := time.Duration(s * float64(time.Second)); {
	case d == 0:
		return "-"
	case d < 10*time.Millisecond:
		return d.Round(10 * time.Microsecond).String()
	default:
		return d.Round(time.Millisecond).String()
	}
}
