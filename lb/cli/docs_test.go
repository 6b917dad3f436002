package cli

import (
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	ucli "github.com/urfave/cli/v2"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

var discard = slog.New(slog.DiscardHandler)

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

// pages returns every page of the documentation, by path.
func pages(t *testing.T) map[string]string {
	out := map[string]string{}
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/development/*.md"} {
		names, err := filepath.Glob("../../" + pattern)
		must.Need(t, err == nil && len(names) != 0, "%s: %d pages, %v", pattern, len(names), err)
		for _, name := range names {
			text := must.Get(os.ReadFile(name))(t)
			out[strings.TrimPrefix(name, "../../")] = string(text)
		}
	}
	return out
}

// Everything that the documents tell the reader to type is accepted: commands and flags, targets of the Makefile, and
// every block of TOML, each of which is a complete configuration.
func TestDocumentsRun(t *testing.T) {
	makefile := must.Get(os.ReadFile("../../Makefile"))(t)
	secrets := writeSecrets(t)
	var commands, targets, configurations int
	for page, text := range pages(t) {
		for _, line := range typed(text) {
			switch {
			case line[0] == "make":
				targets++
				must.Row(t, fmt.Sprintf("%s: %s", page, strings.Join(line, " ")), nil,
					makes(line[1:], string(makefile)))
			case filepath.Base(line[0]) == "steelyard":
				commands++
				must.Row(t, fmt.Sprintf("%s: %s", page, strings.Join(line, " ")), nil, parses(line[1:]))
			}
		}
		for _, block := range tomlBlock.FindAllStringSubmatch(text, -1) {
			configurations++
			text := strings.ReplaceAll(block[1], `"/etc/steelyard/`, `"`+secrets+`/`)
			_, err := config.Parse(page, []byte(text))
			must.True(t, err == nil, "%s has a configuration that is refused:\n%s\n%v", page, block[1], err)
		}
	}
	must.True(t, commands >= 100 && targets >= 20 && configurations >= 10,
		"found %d commands, %d targets and %d configurations: this test overlooks some", commands, targets,
		configurations)
}

// writeSecrets returns a directory with the secrets that the documents name.
func writeSecrets(t *testing.T) string {
	dir := t.TempDir()
	for _, name := range []string{"peer.key", "gossip.key", "tunnel.key"} {
		must.Do(t, os.WriteFile(filepath.Join(dir, name), []byte("0123456789abcdef\n"), 0o600))
	}
	return dir
}

var (
	tomlBlock  = regexp.MustCompile("(?s)```toml\n(.*?)```")
	codeFence  = regexp.MustCompile("(?ms)^ *```(\\w*)\n(.*?)^ *```")
	codeSpan   = regexp.MustCompile("`([^`]+)`")
	separator  = regexp.MustCompile(`&&|\||;| -- | > | # `)
	assignment = regexp.MustCompile(`^[A-Z_]+=`)
)

// typed returns the commands in the blocks and in the text of a page, each as its words without sudo.
func typed(page string) (commands [][]string) {
	var lines []string
	for _, fence := range codeFence.FindAllStringSubmatch(page, -1) {
		if fence[1] == "" || fence[1] == "sh" {
			lines = append(lines, strings.Split(fence[2], "\n")...)
		}
	}
	for _, span := range codeSpan.FindAllStringSubmatch(codeFence.ReplaceAllString(page, ""), -1) {
		lines = append(lines, span[1])
	}
	for _, line := range lines {
		for _, command := range separator.Split(line+" ", -1) {
			words := strings.Fields(strings.TrimPrefix(strings.TrimSpace(command), "$ "))
			for len(words) > 0 && (words[0] == "sudo" || assignment.MatchString(words[0])) {
				words = words[1:]
			}
			if len(words) > 1 {
				commands = append(commands, words)
			}
		}
	}
	return commands
}

// makes returns an error if the Makefile has no such target, or does not use a variable.
func makes(words []string, makefile string) error {
	for _, word := range words {
		name, _, variable := strings.Cut(word, "=")
		switch {
		case variable && !strings.Contains(makefile, "$("+name+")"):
			return fmt.Errorf("the Makefile does not use %s", name)
		case !variable && !strings.Contains(makefile, "\n"+name+":"):
			return fmt.Errorf("the Makefile has no target %s", name)
		}
	}
	return nil
}

// parses returns an error if the command line is refused before the command runs. Brackets mark what is optional. A
// command alone may be a mention of it, without its arguments.
func parses(words []string) error {
	for i, word := range words {
		words[i] = strings.Trim(word, "[]")
	}
	if len(words) == 1 {
		words = append(words, "--help")
	}
	app := newApp(&env{out: io.Discard, err: io.Discard})
	app.Commands = commands(&env{})
	disarm(app.Commands)
	return app.Run(append([]string{"steelyard"}, flagsFirst(app.Commands, words)...))
}

// disarm makes commands do nothing but check their arguments.
func disarm(commands []*ucli.Command) {
	for _, c := range commands {
		disarm(c.Subcommands)
		if len(c.Subcommands) == 0 || c.Name == "flows" { // which also lists
			c.Action = func(*ucli.Context) error { return nil }
			strict(c)
		}
	}
}
