package cluster

import (
	"os"
	"testing"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
)

var binary string // the program under test

func TestMain(m *testing.M) { os.Exit(labtest.Main(m, &binary)) }
