package cli

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"

	ucli "github.com/urfave/cli/v2"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/capture"
	"github.com/steelyard-lb/steelyard/lb/printable"
)

// trace returns the command that shows packets as the datapath sees them.
func (e *env) trace() *ucli.Command {
	return &ucli.Command{
		Name: "trace", Usage: "show packets before and after the datapath, with its verdict and reason",
		UsageText: "steelyard trace --client 192.0.2.7 --count 20\nsteelyard trace --drops -w drops.pcapng",
		Flags: []ucli.Flag{
			&ucli.StringFlag{Name: "client", Usage: "print only packets from or to the client `ADDRESS`"},
			&ucli.StringFlag{Name: "vip", Usage: "print only packets to or from the VIP `ADDRESS`"},
			&ucli.StringFlag{Name: "service", Usage: "print only packets of the service `NAME`"},
			&ucli.BoolFlag{Name: "drops", Usage: "print only packets that are dropped or refused"},
			&ucli.UintFlag{Name: "count", Usage: "end after `N` packets", DefaultText: "no limit"},
			&ucli.StringFlag{
				Name: "write", Aliases: []string{"w"},
				Usage: "write a pcapng `FILE` instead of printing, or with - to the standard output",
			},
			socketFlag(),
		},
		Action: func(c *ucli.Context) error {
			query := url.Values{}
			var f lb.TraceFilter
			for _, name := range []string{"client", "vip", "service", "drops"} {
				if c.IsSet(name) {
					query.Set(name, fmt.Sprint(c.Value(name)))
					if err := f.Set(name, query.Get(name)); err != nil {
						return fmt.Errorf("%w: --%w", errUsage, err)
					}
				}
			}
			t := tracer{most: c.Uint("count"), out: e.out, file: c.String("write")}
			if t.file == "-" && e.terminal != nil {
				return fmt.Errorf("%w: -w -: a capture is not text; send the output to a program or a file", errUsage)
			}
			t.say = func(format string, args ...any) { fmt.Fprintf(e.err, format+"\n", args...) }
			return t.run(c, admin.NewClient(c.String("socket")), "/v1/trace?"+query.Encode())
		},
	}
}

// tracer prints or writes the packets of a trace, and counts them.
type tracer struct {
	n, most uint // most, 0: no limit
	out     io.Writer
	file    string // of the capture, "-" for out, or "" to print
	say     func(format string, args ...any)
	// packet and close are nil until the agent has begun the trace, so that no file is lost if it refuses.
	packet func(lb.TracedPacket) error
	close  func() error
}

// errCounted ends a trace that has reached its number of packets.
var errCounted = errors.New("counted")

func (t *tracer) run(c *ucli.Context, client *admin.Client, path string) error {
	err := client.Follow(c.Context, path, func(data []byte) error {
		var x lb.TraceEvent
		if err := json.Unmarshal(data, &x); err != nil {
			return fmt.Errorf("read the response: %w", err)
		}
		return t.event(x)
	})
	if errors.Is(err, errCounted) {
		err = nil
	}
	if t.close != nil {
		err = errors.Join(err, t.close())
	}
	if err == nil {
		t.say("%s", counted(int(t.n), "packet"))
	}
	return err
}

func (t *tracer) event(x lb.TraceEvent) error {
	if t.packet == nil {
		if err := t.open(); err != nil {
			return err
		}
		t.say("tracing; Ctrl-C ends it")
	}
	if x.Error != "" {
		return errors.New(x.Error)
	}
	if x.OverLimit > 0 {
		t.say("%s left out: more than %d,000 per second", counted(int(x.OverLimit), "packet"), lb.TraceLimit/1000)
	}
	if x.NotRead > 0 {
		t.say("%s left out: not read in time", counted(int(x.NotRead), "packet"))
	}
	if x.Packet == nil {
		return nil
	}
	if err := t.packet(*x.Packet); err != nil {
		return err
	}
	if t.n++; t.n == t.most {
		return errCounted
	}
	return nil
}

// open sets packet and close.
func (t *tracer) open() error {
	out := t.out
	switch t.file {
	case "":
		t.packet = func(p lb.TracedPacket) error {
			_, err := fmt.Fprintln(out, printable.Text(capture.Line(p)))
			return err
		}
		return nil
	case "-":
	default:
		file, err := openPrivate(t.file)
		if err != nil {
			return err
		}
		out, t.close = file, file.Close
	}
	buffer := bufio.NewWriter(out)
	file, err := capture.NewFile(buffer)
	if err != nil {
		return err
	}
	t.packet = func(p lb.TracedPacket) error {
		return errors.Join(file.Write(p), buffer.Flush()) // whoever reads a pipe sees the packet at once
	}
	return buffer.Flush() // the header, even if no packet follows
}
