package preflight

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/healthd/program"
	"github.com/steelyard-lb/steelyard/lb"
)

// Programs returns the rule that calls fail for exec checks whose program the agent would not run.
func Programs(fail func(r *config.Report, key, hint, problem string, args ...any)) config.Rule {
	return func(c *config.Config, r *config.Report) {
		for i, s := range c.Services {
			if s.Check.Type != lb.CheckExec || !filepath.IsAbs(s.Check.Path) { // the latter is an error
				continue
			}
			u, err := program.Lookup(s.Check.User)
			if err != nil {
				fail(r, config.KeyOf("service", i, "check.user"), "name a user of this machine", "%v", err)
				continue
			}
			_, err = program.Find(s.Check.Path, u)
			key := config.KeyOf("service", i, "check.path")
			switch {
			case errors.Is(err, fs.ErrNotExist):
				fail(r, key, "name a program of this machine", "there is no file %s", s.Check.Path)
			case errors.Is(err, fs.ErrPermission) && os.Geteuid() != 0: // this user cannot check; the agent can
			case err != nil:
				const hint = "the program and the directories above it must belong to root, nobody else may write to " +
					"them, and check.user must be able to execute it"
				fail(r, key, hint, "%v", err)
			}
		}
	}
}
