package cli

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// "import metallb" reads several files.
func TestImportMetalLB(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		must.Do(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	pool := file("pool.yaml", "apiVersion: metallb.io/v1beta1\nkind: IPAddressPool\nmetadata: {name: a}\n"+
		"spec: {addresses: [192.0.2.0/28]}\n")
	l2 := file("l2.yaml", "apiVersion: metallb.io/v1beta1\nkind: L2Advertisement\nmetadata: {name: b}\n"+
		"spec: {serviceSelectors: [{}]}\n")
	run := func(args ...string) (code int, out, errOut string) {
		var o, e bytes.Buffer
		code = Main(t.Context(), append([]string{"import", "metallb"}, args...), &o, &e, Programs{})
		return code, o.String(), e.String()
	}
	code, out, errOut := run(pool, l2)
	must.True(t, code == 0 && strings.Contains(out, "[l2]\n") && strings.Contains(out, "[[pool]]\n") &&
		strings.Contains(errOut, "1 line with"), "%d\n%s\n%s", code, out, errOut)
	for _, tt := range []struct {
		args []string
		code int
		want string
	}{
		{nil, 2, "takes 1 argument"},
		{[]string{filepath.Join(dir, "none")}, 1, "no such file"},
		{[]string{file("other.yaml", "kind: Service\n")}, 1, "no IPAddressPool and no BGPPeer found"},
		{[]string{pool, "--quiet"}, 2, "there is no flag -quiet"},
	} {
		code, out, errOut := run(tt.args...)
		ok := code == tt.code && out == "" && strings.Contains(errOut, tt.want)
		must.True(t, ok, "%v: %d\n%s", tt.args, code, errOut)
	}
}
