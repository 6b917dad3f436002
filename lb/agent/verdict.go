package agent

import (
	"context"
	"log/slog"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
)

// verdictEvery is how often the log and "systemctl status" are updated with the verdict.
const verdictEvery = 5 * time.Second

// verdictLog logs each change of the verdict, and of the finding that it names first.
type verdictLog struct {
	info   func(context.Context) (admin.Info, error)
	status func(line string) // of systemd
	log    *slog.Logger
}

func (v verdictLog) run(ctx context.Context) error {
	tick := time.NewTicker(verdictEvery)
	defer tick.Stop()
	was, code := admin.OK, ""
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		i, err := v.info(ctx)
		if err != nil {
			continue // the watchdog handles an engine that does not respond
		}
		v.status(i.Headline())
		var first lb.Finding
		if i.Verdict != admin.OK {
			first = i.Findings[0]
		}
		if i.Verdict == was && first.Code == code {
			continue
		}
		level := slog.LevelWarn
		if i.Verdict == admin.OK {
			level = slog.LevelInfo
		}
		v.log.Log(ctx, level, "verdict changed", "verdict", i.Verdict, "was", was, "code", first.Code,
			"reason", first.Text, "remedy", first.Remedy)
		was, code = i.Verdict, first.Code
	}
}
