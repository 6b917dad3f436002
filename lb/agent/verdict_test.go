package agent

import (
	"context"
	"fmt"
	"log/slog"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// systemd gets the current verdict. Each change is logged, as a warning unless the verdict is OK.
func TestVerdictIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var now atomic.Pointer[admin.Info]
		now.Store(new(admin.Info))
		var out strings.Builder
		must.Run(t, verdictLog{
			info:   func(context.Context) (admin.Info, error) { return *now.Load(), nil },
			status: func(line string) { fmt.Fprintf(&out, "STATUS=%s\n", line) },
			log:    slog.New(slog.NewTextHandler(&out, nil)),
		}.run)
		full := admin.Info{Verdict: admin.Degraded, Reasons: []string{"full"},
			Findings: []lb.Finding{{Code: "c", Text: "full"}}}
		for _, i := range []admin.Info{{Verdict: admin.OK}, full, full, {Verdict: admin.OK}} {
			now.Store(&i)
			time.Sleep(verdictEvery)
			synctest.Wait()
		}
		const changed = ` msg="verdict changed" verdict=`
		must.Equal(t, "STATUS=OK\n"+
			"STATUS=DEGRADED: full\nlevel=WARN"+changed+"DEGRADED was=OK code=c reason=full remedy=\"\"\n"+
			"STATUS=DEGRADED: full\n"+
			"STATUS=OK\nlevel=INFO"+changed+"OK was=DEGRADED code=\"\" reason=\"\" remedy=\"\"\n",
			regexp.MustCompile(`time=\S+ `).ReplaceAllString(out.String(), ""))
	})
}
