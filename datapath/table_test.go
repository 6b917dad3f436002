package datapath

import (
	"testing"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
)

// A table has the BTF of the template of sy_tables. Linux before 6.2 compares them when the table is installed, and
// returns EINVAL for a table without BTF.
func TestTableHasTheTypesOfItsTemplate(t *testing.T) {
	labtest.Root(t)
	w := newFixture(t, hookTC, false, nil)
	w.service(lb.TCP, "b1")
	m, err := newTable(w.d.services.tableSpec, table{slots: make([]sySlot, 2)})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	info, err := m.Info()
	if err != nil {
		t.Fatal(err)
	}
	if id, ok := info.BTFID(); !ok || id == 0 {
		t.Errorf("the table has no BTF (%d, %t)", id, ok)
	}
	if m.MaxEntries() != 3 {
		t.Errorf("%d elements; want the header and two slots", m.MaxEntries())
	}
}
