package admin

import (
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

var colour = regexp.MustCompile(`--(\w+): #([0-9a-f]{6});`)

// Text is legible in both themes: its contrast with the page is at least 4.5 (WCAG 2.2, success criterion 1.4.3).
func TestContrast(t *testing.T) {
	_, style, _ := strings.Cut(page, "<style>")
	style, _, _ = strings.Cut(style, "</style>")
	light, rest, ok := strings.Cut(style, "@media (prefers-color-scheme: dark)")
	must.Need(t, ok, "there is no dark theme")
	dark, rest, _ := strings.Cut(rest, "\n}\n")
	themes := map[string]map[string]float64{"light": luminances(t, light), "dark": luminances(t, dark)}
	for theme, colours := range themes {
		for name, l := range colours {
			if name == "page" || name == "line" { // lines separate, and are not needed to understand anything
				continue
			}
			contrast := (max(l, colours["page"]) + .05) / (min(l, colours["page"]) + .05)
			t.Logf("%s %s: %.2f", theme, name, contrast)
			must.True(t, contrast >= 4.5, "%s: the contrast of --%s is %.2f", theme, name, contrast)
		}
	}
	names := slices.Sorted(maps.Keys(themes["light"]))
	must.Equal(t, names, slices.Sorted(maps.Keys(themes["dark"])))
	used := regexp.MustCompile(`var\(--(\w+)\)`).FindAllStringSubmatch(rest, -1)
	must.True(t, len(used) > 10, "the style uses %d colours", len(used))
	for _, use := range used {
		must.True(t, slices.Contains(names, use[1]), "--%s has no colour", use[1])
	}
	unknown := regexp.MustCompile(`#[0-9a-f]{3,8}\b|rgba?\(|opacity`)
	other := unknown.FindAllString(colour.ReplaceAllString(style, ""), -1)
	must.True(t, other == nil, "colours that this test does not know: %v", other)
}

// luminances returns the relative luminance of each colour of a theme by its name, as WCAG 2.2 defines it.
func luminances(t *testing.T, theme string) map[string]float64 {
	all := map[string]float64{}
	for _, found := range colour.FindAllStringSubmatch(theme, -1) {
		for i, weight := range []float64{.2126, .7152, .0722} {
			n := must.Get(strconv.ParseUint(found[2][2*i:2*i+2], 16, 8))(t)
			c := float64(n) / 255
			if c <= .04045 {
				c /= 12.92
			} else {
				c = math.Pow((c+.055)/1.055, 2.4)
			}
			all[found[1]] += weight * c
		}
	}
	must.Need(t, len(all) > 5, "%d colours in %s", len(all), theme)
	return all
}

// The page is one file: it names no other, and no address on another host.
func TestPageIsOneFile(t *testing.T) {
	text := regexp.MustCompile(`http://www\.w3\.org/(2000/svg|1999/xhtml)`).ReplaceAllString(page, "")
	for _, bad := range []string{"://", "src=", "<link", "@import", "url(", "HTML(", "HTML =", "eval("} {
		must.True(t, !strings.Contains(text, bad), "the page has %s", bad)
	}
	for i, line := range strings.Split(page, "\n") {
		must.True(t, len([]rune(line)) <= 120, "line %d has more than 120 columns", i+1)
	}
}
