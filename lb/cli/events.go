package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	ucli "github.com/urfave/cli/v2"

	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/events"
	"github.com/steelyard-lb/steelyard/lb/printable"
)

// events returns a command that prints the history. Without an agent, it reads what the last one has stored.
func (e *env) events() *ucli.Command {
	return &ucli.Command{
		Name: "events", Usage: "print the events of this node, including those before a restart",
		UsageText: "steelyard events --since 10m --kind health\nsteelyard events --service web -f",
		Flags: []ucli.Flag{
			&ucli.DurationFlag{Name: "since", Usage: "print only the events of the last `DURATION`, such as 10m"},
			&ucli.StringFlag{Name: "service", Usage: "print only events about the service `NAME`"},
			&ucli.StringFlag{
				Name: "kind", Usage: "print only events of this `KIND` (third column), such as health or bgp",
			},
			&ucli.BoolFlag{Name: "follow", Aliases: []string{"f"}, Usage: "print new events as they occur"},
			outputFlag("text"), socketFlag(),
		},
		Action: func(c *ucli.Context) error {
			asJSON, err := wantJSON(c, "text")
			if err != nil {
				return err
			}
			print := func(x events.Event) { fmt.Fprintln(e.out, eventLine(x)) }
			if asJSON { // one object per line, so that the output of -f can be read as it arrives
				print = func(x events.Event) {
					line, _ := json.Marshal(x) // of strings and a time: never fails
					fmt.Fprintln(e.out, string(printable.JSON(line)))
				}
			}
			query := url.Values{"follow": {strconv.FormatBool(c.Bool("follow"))}}
			for _, name := range []string{"since", "service", "kind"} {
				if c.IsSet(name) {
					query.Set(name, fmt.Sprint(c.Value(name)))
				}
			}
			client, path := admin.NewClient(c.String("socket")), "/v1/events?"+query.Encode()
			if c.Bool("follow") {
				return client.Follow(c.Context, path, func(data []byte) error {
					var x events.Event
					if err := json.Unmarshal(data, &x); err != nil {
						return fmt.Errorf("read the response: %w", err)
					}
					print(x)
					return nil
				})
			}
			var list []events.Event
			err = client.Get(c.Context, path, &list)
			if errors.Is(err, admin.ErrNoAgent) {
				f := events.Filter{Service: c.String("service"), Kind: c.String("kind")}
				if c.IsSet("since") {
					f.Since = time.Now().Add(-c.Duration("since"))
				}
				fmt.Fprintln(e.err, "no agent is running; these are the events that the last one stored")
				list, err = e.programs.Events(f)
			}
			for _, x := range list {
				print(x)
			}
			return err
		},
	}
}

// eventLine returns an event as one printable line.
func eventLine(x events.Event) string {
	line := fmt.Sprintf("%s  %-5s  %-10s  %s", x.Time.Local().Format(time.DateTime), printable.Text(x.Level),
		printable.Text(x.Kind), printable.Text(x.Text))
	for _, name := range slices.Sorted(maps.Keys(x.Fields)) {
		value := printable.Text(x.Fields[name])
		if value == "" || strings.ContainsAny(value, " \"=") {
			value = strconv.Quote(value)
		}
		line += "  " + printable.Text(name) + "=" + value
	}
	return line
}
