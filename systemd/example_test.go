package systemd_test

import (
	"os"
	"regexp"
	"testing"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	"github.com/steelyard-lb/steelyard/systemd"
)

// The example is valid as installed, and with every line uncommented.
func TestExampleIsValid(t *testing.T) {
	text := must.Get(os.ReadFile("steelyard.toml"))(t)
	if _, err := config.Parse("steelyard.toml", text); err != nil {
		t.Errorf("as installed: %v", err)
	}
	on := regexp.MustCompile(`(?m)^# (\[|\w+ *=)`).ReplaceAll(text, []byte("$1"))
	c, err := config.Parse("steelyard.toml", on)
	if err != nil {
		t.Fatalf("uncommented: %v\n%s", err, on)
	}
	if c.BGP == nil || len(c.BGP.Peers) != 1 || len(c.Services) != 1 || len(c.Services[0].Backends) != 2 {
		t.Errorf("uncommented: want one peer and one service of two backends in:\n%s", on)
	}
}

var toml = regexp.MustCompile(`(?s)steelyard.toml: \|\n(.*?)\n---`)

// The configuration of the DaemonSet is valid, also with every line uncommented.
func TestManifestConfigurationIsValid(t *testing.T) {
	text := toml.FindStringSubmatch(systemd.Manifest("steelyard:test", ""))
	if text == nil {
		t.Fatal("the manifest has no configuration")
	}
	plain := regexp.MustCompile(`(?m)^    `).ReplaceAllString(text[1], "")
	for _, x := range []string{plain, regexp.MustCompile(`(?m)^# `).ReplaceAllString(plain, "")} {
		c, err := config.Parse("steelyard.toml", []byte(x))
		if err != nil || c.Kubernetes == nil || c.Kubernetes.Forward != lb.MethodTunnel {
			t.Errorf("%v in\n%s", err, x)
		}
	}
}
