package agent

import (
	"bytes"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/datapath"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

const keyA, keyB, keyC = "the key A of the tests", "the key B of the tests", "the key C of the tests"

// keyed is a configuration with this text as the file of tunnel keys.
func keyed(t *testing.T, dir, text string) string {
	t.Helper()
	path := writeConfig(t, filepath.Join(dir, "tunnel.key"), text)
	return fmt.Sprintf("%s[datapath]\ntunnel_sources = [\"192.0.2.2\"]\ntunnel_key_file = %q\n", webTOML, path)
}

func sent(keys ...string) datapath.TunnelKeys {
	k := datapath.TunnelKeys{Send: []byte(keys[0]), Required: true}
	for _, x := range keys {
		k.Accept = append(k.Accept, []byte(x))
	}
	return k
}

func TestKeysAndSeedOfTheFile(t *testing.T) {
	none := parse(t, webTOML)
	if k := fileKeys(none); k == nil || !cmp.Equal(*k, datapath.TunnelKeys{}) || fileSeed(none) != [32]byte{} {
		t.Errorf("no file: keys %+v, seed %x; want to remove earlier ones, and the constant", k, fileSeed(none))
	}
	none.Kubernetes = &config.Kubernetes{}
	if k := fileKeys(none); k != nil {
		t.Errorf("a cluster without a file: %+v; want those of the Secret", k)
	}
	two := parse(t, keyed(t, t.TempDir(), keyA+"\n"+keyB+"\nseed: 1234567890123456\n"))
	must.Equal(t, sent(keyA, keyB), *fileKeys(two))
	other := parse(t, keyed(t, t.TempDir(), keyC+"\nseed: 1234567890123456\n"))
	if a, b := fileSeed(two), fileSeed(other); a != b || a == [32]byte{} {
		t.Errorf("seeds %x and %x; want one that does not follow from the keys", a, b)
	}
}

// A rotation needs no restart: nodes first learn the next key, then send it, then forget the previous one.
func TestReloadRotatesTheKeys(t *testing.T) {
	dir, dp := t.TempDir(), newMemoryDatapath()
	var text bytes.Buffer
	l, _ := newTestReloader(t, new(slog.LevelVar), slog.New(slog.NewTextHandler(&text, nil)))
	l.running, l.setKeys = parse(t, keyed(t, dir, keyA)), dp.SetTunnelKeys
	for _, step := range [][]string{{keyA, keyB}, {keyB, keyA}, {keyB}} {
		file := ""
		for _, k := range step {
			file += k + "\n"
		}
		writeConfig(t, l.file, keyed(t, dir, file))
		done, err := l.reload("")
		if err != nil || len(done.NeedRestart) > 0 {
			t.Fatalf("%v, restart %q", err, done.NeedRestart)
		}
		must.Equal(t, sent(step...), *dp.keys.Load())
	}
	for _, next := range []string{webTOML, keyed(t, dir, keyB+"\nseed: 1234567890123456\n")} {
		writeConfig(t, l.file, next)
		done, err := l.reload("")
		must.True(t, err == nil && slices.Equal(done.NeedRestart, []string{"datapath"}),
			"%v, restart %q; want datapath, for no keys and for another seed", err, done.NeedRestart)
	}
	must.Equal(t, sent(keyB), *dp.keys.Load())
	must.True(t, !bytes.Contains(text.Bytes(), []byte("key B")), "a key is in the log:\n%s", &text)
}
