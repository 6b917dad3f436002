package agent

import (
	"cmp"
	"context"
	"os"
	"path/filepath"
	"strings"
	"time"

	core "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/kube"
)

// mountCheck is the interval between reads of a mounted configuration's version. The kubelet takes up to a minute to
// write a changed ConfigMap.
const mountCheck = time.Second

// mountedVersion returns the version of a configuration file in a Kubernetes volume, or "" for any other file. The
// files of such a volume are behind the symbolic link ..data, which the kubelet replaces once it has written all of
// them.
func mountedVersion(configFile string) string {
	target, err := os.Readlink(filepath.Join(filepath.Dir(configFile), "..data"))
	if err != nil {
		return ""
	}
	return target
}

// mounted follows a configuration file in a Kubernetes volume.
type mounted struct {
	file    string
	version string // active
	apply   func() (admin.Reloaded, error)
	self    kube.Self
}

// run applies each new version until ctx ends, and emits an Event with the result.
func (m *mounted) run(ctx context.Context) error {
	emit, end := m.self.Events(ctx)
	defer end()
	tick := time.NewTicker(mountCheck)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		now := mountedVersion(m.file)
		if now == "" || now == m.version {
			continue
		}
		m.version = now
		emit(m.describe(m.apply()))
	}
}

// describe returns the Event for the result of a reload.
func (m *mounted) describe(done admin.Reloaded, err error) (kind, reason, text string) {
	switch {
	case err != nil:
		return core.EventTypeWarning, "ConfigurationRejected", "the previous configuration stays active: " + err.Error()
	case len(done.NeedRestart) > 0:
		return core.EventTypeWarning, "ConfigurationNeedsRestart", "active, except for sections that are read at the " +
			"start (" + strings.Join(done.NeedRestart, ", ") + "): kubectl rollout restart -n " + ownNamespace() +
			" daemonset/steelyard deployment/steelyard"
	}
	return core.EventTypeNormal, "ConfigurationReloaded", m.file + " is active"
}

// self returns the object that Events about this agent refer to. The manifest sets the variables.
func self(client kubernetes.Interface, node string) kube.Self {
	return kube.Self{
		Client: client, Node: cmp.Or(os.Getenv("NODE_NAME"), node),
		Namespace: ownNamespace(), Pod: os.Getenv("POD_NAME"), UID: types.UID(os.Getenv("POD_UID")),
	}
}
