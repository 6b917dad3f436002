package cli

import (
	"fmt"
	"runtime"
	"runtime/debug"

	ucli "github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"
)

// version prints the program's version on the first line, and then what a bug report needs.
func (e *env) version(*ucli.Context) error {
	commit := map[string]string{"vcs.revision": "unknown", "vcs.time": "unknown"}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			commit[s.Key] = s.Value
		}
	}
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return err
	}
	_, err := fmt.Fprintf(e.out, "%s\ncommit %s of %s\n%s %s/%s\nschema %s\nkernel %s\n",
		version, commit["vcs.revision"], commit["vcs.time"], runtime.Version(), runtime.GOOS, runtime.GOARCH,
		e.programs.Schema, unix.ByteSliceToString(u.Release[:]))
	return err
}

// bashCompletion asks the program for the words that may follow. zsh runs it with bashcompinit.
const bashCompletion = `_steelyard() {
	local word="${COMP_WORDS[COMP_CWORD]}" words
	words="$("${COMP_WORDS[@]:0:COMP_CWORD}" $([[ $word == -* ]] && echo -) --generate-bash-completion 2>/dev/null)"
	COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o bashdefault -o default -F _steelyard steelyard
`

// completion prints the script of a shell.
func (e *env) completion(c *ucli.Context) error {
	script := bashCompletion
	switch shell := c.Args().First(); shell {
	case "bash":
	case "zsh":
		script = "autoload -U +X bashcompinit && bashcompinit\n" + bashCompletion
	case "fish":
		var err error
		// urfave/cli adds the command "help" to a running App, and then recurses without end, so this takes a new App.
		if script, err = newApp(e).ToFishCompletion(); err != nil {
			return err
		}
	default:
		return fmt.Errorf("%w: no completion for %q; want bash, zsh or fish", errUsage, shell)
	}
	_, err := fmt.Fprint(e.out, script)
	return err
}

// man prints the manual page. Like completion for fish, it needs an App that does not run.
func (e *env) man(*ucli.Context) error {
	page, err := newApp(e).ToMan()
	if err != nil {
		return err
	}
	_, err = fmt.Fprint(e.out, page)
	return err
}
