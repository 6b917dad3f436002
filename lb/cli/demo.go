package cli

import (
	"fmt"
	"os"
	"time"

	ucli "github.com/urfave/cli/v2"

	"github.com/steelyard-lb/steelyard/lb/cli/demo"
)

// readingTime is how long the demo leaves what it has shown before it goes on, when a person watches.
const readingTime = 1500 * time.Millisecond

func (e *env) demo(c *ucli.Context) error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this binary: %w", err)
	}
	return demo.Run(c.Context, e.out, self, demo.Options{Pace: readingTime})
}

func (e *env) demoRouter(c *ucli.Context) error { return demo.Router(c.Context, e.err) }
