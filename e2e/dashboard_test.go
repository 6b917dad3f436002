//go:build browser

package e2e

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/browser"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

var pictures = flag.String("pictures", "", "write pictures of the dashboard into this `directory`")

// dashboard is the page at [admin] listen in a browser.
type dashboard struct {
	t *testing.T
	*browser.Page
}

// openDashboard starts a browser on a host. Without one, it skips the test, or fails it with STEELYARD_CI set.
func openDashboard(t *testing.T, h *lab.Host, url string) dashboard {
	t.Helper()
	path, err := browser.Path()
	if err != nil && os.Getenv("STEELYARD_CI") == "" {
		t.Skip(err)
	}
	must.Do(t, err)
	d := dashboard{t, must.Get(browser.Start(t.Context(), path, t.TempDir(), h.Do))(t)}
	t.Cleanup(func() { must.Do(t, d.Close()) })
	must.Do(t, d.Look(t.Context(), 1280, "light"))
	must.Do(t, d.Call(t.Context(), "Page.navigate", map[string]string{"url": url}, nil))
	return d
}

// text returns the texts of the elements that a selector matches, one per line.
func (d dashboard) text(selector string) (text string) {
	d.t.Helper()
	const all = `[...document.querySelectorAll(%q)].
		map(e => [...e.children].map(child => child.innerText).join("\t")).join("\n")`
	must.Do(d.t, d.Eval(d.t.Context(), fmt.Sprintf(all, selector), &text))
	return text
}

// until waits until an expression is true.
func (d dashboard) until(expression string) {
	d.t.Helper()
	labtest.Until(d.t, expression, func() error {
		var ok bool
		err := d.Eval(d.t.Context(), expression, &ok)
		return labtest.ErrorIf(err != nil || !ok, "%v; the page shows: %s", err, d.text("#verdict"))
	})
}

// untilVerdict waits until the verdict is this word, and the findings contain this text.
func (d dashboard) untilVerdict(word, finding string) {
	d.t.Helper()
	d.until(fmt.Sprintf(`document.querySelector("#verdict h2").textContent == %q &&
		document.querySelector("#verdict ul").innerText.includes(%q)`, word, finding))
}

// write replaces the text of an input field, as the keyboard would.
func (d dashboard) write(selector, text string) {
	d.t.Helper()
	focus := fmt.Sprintf("document.querySelector(%q).focus(), document.activeElement.select()", selector)
	must.Do(d.t, d.Eval(d.t.Context(), focus, nil))
	must.Do(d.t, d.Call(d.t.Context(), "Input.insertText", map[string]string{"text": text}, nil))
}

// press presses a key.
func (d dashboard) press(key string, code int, text string) {
	d.t.Helper()
	for _, kind := range []string{"keyDown", "keyUp"} {
		must.Do(d.t, d.Call(d.t.Context(), "Input.dispatchKeyEvent", map[string]any{
			"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code, "text": text,
		}, nil))
	}
}

// checkWidths checks that the page needs no horizontal scrolling on phones, tablets and desktops, and takes pictures.
func (d dashboard) checkWidths(name string) {
	d.t.Helper()
	for _, x := range []struct {
		suffix, scheme string
		width          int
	}{{"-phone", "light", 390}, {"-tablet", "dark", 800}, {"-dark", "dark", 1280}, {"", "light", 1280}} {
		must.Do(d.t, d.Look(d.t.Context(), x.width, x.scheme))
		var width int
		must.Do(d.t, d.Eval(d.t.Context(), "document.documentElement.scrollWidth", &width))
		must.True(d.t, width <= x.width, "%s: the page is %d pixels wide; the window %d", name, width, x.width)
		d.picture(name+x.suffix, 1600)
	}
}

// picture writes a picture of the top of the page, with this height in pixels, if pictures are wanted.
func (d dashboard) picture(name string, height int) {
	d.t.Helper()
	if *pictures != "" {
		picture := must.Get(d.Picture(d.t.Context(), height))(d.t)
		must.Do(d.t, os.WriteFile(filepath.Join(*pictures, name+".png"), picture, 0o644))
	}
}

const dashboardToken = "a token of a test"

// newDashboardSite builds a site with the services web and mail, whose agent serves the page.
func newDashboardSite(t *testing.T) *site {
	s := newBareSite(t, lab.Shape{Clients: 1, Servers: 3})
	for _, n := range s.Servers {
		s.web = append(s.web, labtest.HTTP(t, n, 8080))
	}
	s.check.Interval, s.check.Timeout, s.check.Fall = time.Second, time.Second, 2
	s.Daemon = labtest.Router(t, s.Topology.Router, peers.BIRD, s.RouterConfig())
	b := s.Balancers[0]
	c := lab.BGPAgent(b, labtest.ASN, labtest.RouterASN,
		lab.AgentService{Name: "web", Addresses: vips, Ports: []string{"80:8080"}, Check: s.check,
			Backends: lab.Backends(s.Servers...)},
		lab.AgentService{Name: "mail", Addresses: []netip.Addr{vip4.Next()}, Ports: []string{"25:8080"}, Check: s.check,
			Backends: lab.Backends(s.Servers[1])[:1]})
	file := filepath.Join(t.TempDir(), "token")
	must.Do(t, os.WriteFile(file, []byte(dashboardToken), 0o600))
	c.LogLevel = "info"
	c.Extra = fmt.Sprintf("[admin]\nlisten = \"127.0.0.1:9911\"\ntoken_file = %q\n", file)
	s.Config = append(s.Config, c)
	s.Agents = append(s.Agents, labtest.Agent(t, b.Host, binary, c))
	s.waitRoutes(t, b)
	return s
}

// TestDashboard operates a site and checks what the page of its load balancer shows.
func TestDashboard(t *testing.T) {
	t.Parallel()
	s := newDashboardSite(t)
	a := s.Agents[0]
	d := openDashboard(t, s.Balancers[0].Host, "http://127.0.0.1:9911/")

	for _, token := range []string{"another token", dashboardToken} {
		d.until(`!document.querySelector("#login").hidden`)
		d.write("#login input", token)
		d.press("Enter", 13, "\r")
	}
	d.untilVerdict("OK", "")
	d.Problems() // the browser reports requests without a token
	for _, name := range []string{"services", "backends", "routes", "peers"} {
		d.checkColumns(name, must.Get(a.CLI(t.Context(), name))(t))
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	go func() {
		for n := 0; ctx.Err() == nil; n++ {
			s.Client().Load(ctx, traffic.Load{URL: labtest.URL(vips[n%2]), Requests: 50})
			time.Sleep(100 * time.Millisecond) // the other tests need the CPUs
		}
	}()
	d.checkPlots()
	d.until(`document.querySelector("#events tbody").innerText.includes("bgp session up")`)
	d.checkWidths("ok")
	d.checkFilter()

	must.Do(t, s.web[0].Stop())
	d.untilVerdict("DEGRADED", s.Servers[0].V4.String())
	d.until(`document.querySelector("#backends tbody tr").innerText.includes("refused")`)
	d.until(`document.querySelector("#backends tbody .bad").textContent == "unhealthy"`)
	d.checkWidths("degraded")
	d.write("#filter input", "web")
	d.picture("dashboard", 800)
	d.write("#filter input", " ")
	must.Do(t, s.web[0].Start())
	d.untilVerdict("OK", "")

	must.Get(a.CLI(t.Context(), "drain", "mail"))(t)
	d.untilVerdict("DEGRADED", "drained: mail")
	d.until(`[...document.querySelectorAll("#services tr, #routes tr")].
		filter(row => row.innerText.includes("drained") && row.querySelector(".dim")).length == 2`)
	d.until(`document.querySelectorAll("#services .bad, #routes .bad").length == 0`)
	d.checkWidths("drained")
	must.Get(a.CLI(t.Context(), "undrain", "mail"))(t)

	must.Do(t, a.Configure(strings.Replace(s.Config[0].TOML(), "listen =", "lisen =", 1)))
	must.Do(t, a.Reload())
	d.untilVerdict("DEGRADED", "did you mean listen")

	d.checkMany(s)
	d.checkUnanswered(a)
}

// checkPlots checks that the rates of the running traffic are plotted.
func (d dashboard) checkPlots() {
	d.t.Helper()
	d.until(`document.querySelector("#totals b").textContent > "0"`)
	if *pictures != "" {
		time.Sleep(5 * time.Minute) // half a plot
	}
	const lines = `[...document.querySelectorAll("%s path")].filter(p => p.getAttribute("d").includes("L")).length`
	d.until(fmt.Sprintf(lines, "#totals") + " == 3")
	d.until(fmt.Sprintf(lines, "#services") + " == 3")
	d.until(fmt.Sprintf(lines, "#backends") + " == 7")
}

// checkMany checks that a table of many rows is cut, and that the filter finds those that it does not show.
func (d dashboard) checkMany(s *site) {
	d.t.Helper()
	many := s.Config[0]
	for i := range 300 {
		many.Services = append(many.Services, lab.AgentService{
			Name: fmt.Sprintf("tenant-%d", i), Addresses: []netip.Addr{vip4},
			Ports:    []string{fmt.Sprintf("%d:8080", 100+i)},
			Backends: []lab.AgentBackend{{Address: s.Servers[i%3].V4}}, Check: s.check,
		})
	}
	must.Do(d.t, errors.Join(s.Agents[0].Configure(many.TOML()), s.Agents[0].Reload()))
	d.until(`document.querySelectorAll("#services tbody tr").length == 200`)
	d.until(`document.querySelector("#services > p").textContent == "and 103 more: use the filter"`)
	d.write("#filter input", "tenant-99 tcp")
	d.until(`document.querySelectorAll("#services tbody tr").length == 1`)
	d.write("#filter input", " ")
	d.checkWidths("many")
}

// checkUnanswered checks that the page says when the agent is stopped or killed, and when it answers again.
func (d dashboard) checkUnanswered(a *lab.Agent) {
	d.t.Helper()
	stopped := time.Now()
	must.Do(d.t, a.Process().Signal(syscall.SIGSTOP))
	d.untilVerdict("NO ANSWER", "The agent has not answered since")
	took := time.Since(stopped) // the last answer is up to a round, about two seconds, older
	must.True(d.t, took > 2*time.Second && took < 15*time.Second, "the page says it after %s", took)
	must.Do(d.t, a.Process().Signal(syscall.SIGCONT))
	d.until(`document.querySelector("#verdict h2").textContent != "NO ANSWER"`)
	must.Equal(d.t, nil, d.Problems())
	a.Kill()
	d.untilVerdict("NO ANSWER", "Failed to fetch")
	d.checkWidths("gone")
}

// checkColumns checks that a table of the page has the columns of the command's table, besides plots, and its rows.
func (d dashboard) checkColumns(name, table string) {
	d.t.Helper()
	header, rows, _ := strings.Cut(table, "\n")
	want := regexp.MustCompile(`  +`).Split(strings.ToLower(header), -1)
	got := strings.Split(strings.Replace(d.text("#"+name+" thead tr"), "last 10 min\t", "", 1), "\t")
	must.Row(d.t, "columns of "+name, want, got)
	shown := d.text("#" + name + " tbody tr")
	for row := range strings.Lines(rows) {
		for _, word := range strings.Fields(row)[:2] {
			must.True(d.t, strings.Contains(shown, word), "the page lacks %s of\n%s:\n%s", word, table, shown)
		}
	}
}

// checkFilter checks that the keyboard reaches the filter, and that it selects rows by their words.
func (d dashboard) checkFilter() {
	d.t.Helper()
	const focused = `document.activeElement == document.querySelector("#filter input")`
	must.Do(d.t, d.Eval(d.t.Context(), "document.activeElement.blur()", nil))
	var reached bool
	for n := 0; n < 12 && !reached; n++ {
		d.press("Tab", 9, "")
		must.Do(d.t, d.Eval(d.t.Context(), focused, &reached))
	}
	must.True(d.t, reached, "the keyboard does not reach the filter")
	d.write("#filter input", "WEB ["+vip6.String()+"]")
	d.until(`document.querySelectorAll("#services tbody tr").length == 1`)
	got := d.text("#services tbody tr")
	must.True(d.t, strings.Contains(got, "["+vip6.String()+"]:80/tcp"), "the filter leaves %s", got)
	d.until(`document.querySelector("#peers > p").textContent == "none passes the filter"`)
	d.write("#filter input", " ")
	d.until(`document.querySelectorAll("#services tbody tr").length == 3`)
}
