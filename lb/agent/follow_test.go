package agent

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/steelyard-lb/steelyard/lb/kube"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// mount writes a configuration as the kubelet writes a ConfigMap: into a new directory, to which the link ..data is
// switched.
func mount(t *testing.T, dir, version, text string) string {
	t.Helper()
	link, file := filepath.Join(dir, "..data"), filepath.Join(dir, "steelyard.toml")
	err := os.Mkdir(filepath.Join(dir, version), 0o755)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, version, "steelyard.toml"), []byte(text), 0o600)
	}
	if err == nil {
		err = os.Symlink(version, link+"_tmp")
	}
	if err == nil {
		err = os.Rename(link+"_tmp", link)
	}
	if _, missing := os.Lstat(file); err == nil && missing != nil {
		err = os.Symlink("..data/steelyard.toml", file)
	}
	must.Do(t, err)
	return file
}

// A changed ConfigMap is in force without a restart; a wrong one changes nothing, and an Event on the pod says why.
func TestMountedConfigurationIsFollowed(t *testing.T) {
	t.Parallel()
	l, services := newTestReloader(t, new(slog.LevelVar), discard)
	dir := t.TempDir()
	l.file = mount(t, dir, "..1", webTOML)
	client := fake.NewClientset()
	m := &mounted{l.file, mountedVersion(l.file), l.follow, kube.Self{
		Client: client, Node: "n1", Namespace: "ns", Pod: "steelyard-x", UID: "uid-1",
	}}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { m.run(ctx); close(done) }()
	defer func() { cancel(); <-done }()
	events := func() (all []string) {
		list := must.Get(client.CoreV1().Events("ns").List(t.Context(), meta.ListOptions{}))(t)
		for _, e := range list.Items {
			on := e.InvolvedObject
			all = append(all, fmt.Sprintf("%s %s on %s %s/%s %s: %s", e.Type, e.Reason, on.Kind, on.Namespace, on.Name,
				on.UID, e.Message))
		}
		return all
	}
	has := func(prefix, text string) func() bool {
		return func() bool {
			return slices.ContainsFunc(events(), func(e string) bool {
				return strings.HasPrefix(e, prefix+" on Pod ns/steelyard-x uid-1: ") && strings.Contains(e, text)
			})
		}
	}
	mount(t, dir, "..2", strings.Replace(webTOML, `"web"`, `"mail"`, 1))
	eventually(t, "mail instead of web", func() bool { return services.has("mail") && !services.has("web") })
	eventually(t, "an Event", has(core.EventTypeNormal+" ConfigurationReloaded", l.file))
	mount(t, dir, "..3", strings.Replace(webTOML, "ports", "prots", 1))
	eventually(t, "an Event with the error", has(core.EventTypeWarning+" ConfigurationRejected", "prots"))
	must.True(t, services.has("mail"), "the service of the configuration before is not in force")
	mount(t, dir, "..4", webTOML+"[node]\nname = \"other\"\n")
	eventually(t, "an Event with the section", has(core.EventTypeWarning+" ConfigurationNeedsRestart", "(node)"))
	eventually(t, "web again", func() bool { return services.has("web") })
}

// Files elsewhere are read when the administrator says so.
func TestOtherFilesAreNotFollowed(t *testing.T) {
	must.Equal(t, "", mountedVersion(writeConfig(t, "", webTOML)))
}
