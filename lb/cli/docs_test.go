package cli

import (
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/config"
)

var discard = slog.New(slog.DiscardHandler)

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

// pages returns every page of the documentation, by name.
func pages(t *testing.T) map[string]string {
	out := map[string]string{}
	for _, pattern := range []string{"docs/*.md", "docs/development/*.md", "README.md"} {
		names, err := filepath.Glob("../../" + pattern)
		if err != nil || len(names) == 0 {
			t.Fatalf("%s: %d pages, %v", pattern, len(names), err)
		}
		for _, name := range names {
			text, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			out[strings.TrimPrefix(name, "../../")] = string(text)
		}
	}
	return out
}

var tomlBlock = regexp.MustCompile("(?s)```toml\n(.*?)```")

func TestDocumentedConfigurationsAreValid(t *testing.T) {
	n := 0
	for page, text := range pages(t) {
		for _, block := range tomlBlock.FindAllStringSubmatch(text, -1) {
			n++
			if _, err := config.Parse(page, []byte(withoutSecrets(block[1]))); err != nil {
				t.Errorf("%s has a configuration that is refused:\n%s\n%v", page, block[1], err)
			}
		}
	}
	if n == 0 {
		t.Error("no configuration found in README or docs")
	}
}

var commandLine = regexp.MustCompile("(?m)(?:^(?:sudo )?(?:\\./)?|`)steelyard ([a-z-]+)((?: -[a-z-]+)*)")

func TestDocumentedCommandsExist(t *testing.T) {
	known := map[string]bool{"help": true}
	for _, c := range commands(&env{}) {
		known[c.Name] = true
	}
	n := 0
	for page, text := range pages(t) {
		for _, m := range commandLine.FindAllStringSubmatch(text, -1) {
			n++
			if !known[m[1]] {
				t.Errorf("%s has the command %q, which does not exist", page, m[1])
			}
		}
	}
	if n == 0 {
		t.Error("no command found in README or docs")
	}
}

var (
	secretKey = regexp.MustCompile(`(?m)(^|, )(password_file|tunnel_key_file) *= *"[^"]*"[^\n,}]*`)
	memberKey = regexp.MustCompile(`(?m)^secret_file *=.*`)
)

// withoutSecrets removes the keys that name files of the reader.
func withoutSecrets(text string) string {
	if strings.Contains(text, "unencrypted") {
		text = memberKey.ReplaceAllString(text, "")
	}
	return secretKey.ReplaceAllString(memberKey.ReplaceAllString(text, "unencrypted = true"), "")
}
