package cli

import (
	"slices"
	"strings"

	ucli "github.com/urfave/cli/v2"
)

// flagsFirst moves the flags of a command before its arguments, because the library takes no flags after an argument.
// As usual, "--" ends the flags.
func flagsFirst(commands []*ucli.Command, args []string) []string {
	n := 0 // words that name the command
	var known []ucli.Flag
	for n < len(args) {
		i := slices.IndexFunc(commands, func(c *ucli.Command) bool { return c.HasName(args[n]) })
		if i < 0 {
			break
		}
		known, commands = commands[i].Flags, commands[i].Subcommands
		n++
	}
	if n == 0 || args[len(args)-1] == "--generate-bash-completion" { // completes the word before it
		return args
	}
	first, rest := slices.Clone(args[:n]), []string{}
	for i := n; i < len(args); i++ {
		switch arg := args[i]; {
		case arg == "--":
			return slices.Concat(first, []string{arg}, rest, args[i+1:])
		case arg == "-" || !strings.HasPrefix(arg, "-"): // "-" is standard input
			rest = append(rest, arg)
		default:
			first = append(first, arg)
			if takesValue(known, arg) {
				if i++; i == len(args) {
					return first // the library says that the value is missing
				}
				first = append(first, args[i])
			}
		}
	}
	return append(first, rest...)
}

// takesValue reports whether the argument after flag is its value.
func takesValue(known []ucli.Flag, flag string) bool {
	i := slices.IndexFunc(known, func(f ucli.Flag) bool {
		return slices.Contains(f.Names(), strings.TrimPrefix(strings.TrimPrefix(flag, "-"), "-"))
	})
	if i < 0 {
		return false
	}
	_, boolean := known[i].(*ucli.BoolFlag)
	return !boolean
}
