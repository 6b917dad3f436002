package config

import (
	"strings"
	"testing"
	"time"
)

func TestRestartTime(t *testing.T) {
	for _, tt := range []struct {
		line string
		want time.Duration
		err  string
	}{
		{"", 30 * time.Second, ""},
		{`restart_time = "0s"`, 0, ""},
		{`restart_time = "4095s"`, 4095 * time.Second, ""},
		{`restart_time = "1500ms"`, 0, `"1500ms" is not whole seconds; write "2s"`},
		{`restart_time = "4096s"`, 0, "restart_time"},
	} {
		c, err := Parse("f", []byte("[bgp]\nasn = 64512\n"+tt.line))
		switch {
		case tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)):
			t.Errorf("%s: error %v; want %s", tt.line, err, tt.err)
		case tt.err == "" && (err != nil || c.BGP.RestartTime != tt.want):
			t.Errorf("%s: %v; want %s", tt.line, err, tt.want)
		}
	}
}
