package cli

import (
	"fmt"
	"io"
	"os"

	ucli "github.com/urfave/cli/v2"

	"github.com/steelyard-lb/steelyard/lb/kube/metallb"
)

func (e *env) importCommand() *ucli.Command {
	return &ucli.Command{
		Name: "import", Usage: "translate the configuration of another program", Action: func(*ucli.Context) error {
			return fmt.Errorf("%w: want \"steelyard import metallb\"", errUsage)
		},
		Subcommands: []*ucli.Command{{
			Name: "metallb", Usage: "print the configuration that corresponds to MetalLB's objects", ArgsUsage: "FILE…",
			Description: "Example: kubectl get -A -o yaml ipaddresspools,l2advertisements,bgpadvertisements,bgppeers," +
				"bfdprofiles,communities | steelyard import metallb -",
			Action: e.importMetalLB,
		}},
	}
}

// importMetalLB prints the configuration for the objects in the files, or in standard input for "-".
func (e *env) importMetalLB(c *ucli.Context) error {
	var files []io.Reader
	for _, name := range c.Args().Slice() {
		if name == "-" {
			files = append(files, os.Stdin)
			continue
		}
		f, err := os.Open(name)
		if err != nil {
			return err
		}
		defer f.Close()
		files = append(files, f)
	}
	text, comments, err := metallb.Convert(files...)
	if err != nil {
		return fmt.Errorf("MetalLB's objects: %w", err)
	}
	if _, err := fmt.Fprint(e.out, text); err != nil {
		return err
	}
	if comments > 0 {
		fmt.Fprintf(e.err, "what has no equivalent: %s with \"# MetalLB:\"\n", counted(comments, "line"))
	}
	return nil
}
