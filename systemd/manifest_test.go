package systemd_test

import (
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	admission "k8s.io/api/admissionregistration/v1"
	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	"github.com/steelyard-lb/steelyard/systemd"
)

// objects returns the objects of the manifest by kind and name. An unknown field is an error.
func objects(t *testing.T) map[string]runtime.Object {
	t.Helper()
	return objectsOf(t, systemd.Manifest("steelyard:test", ""))
}

func objectsOf(t *testing.T, manifest string) map[string]runtime.Object {
	t.Helper()
	all := map[string]runtime.Object{}
	decoder := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()
	for doc := range strings.SplitSeq(manifest, "\n---\n") {
		o, kind, err := decoder.Decode([]byte(doc), nil, nil)
		must.Need(t, err == nil, "%v in\n%s", err, doc)
		name := o.(interface{ GetName() string }).GetName()
		must.True(t, all[kind.Kind+" "+name] == nil, "two objects are %s %s", kind.Kind, name)
		all[kind.Kind+" "+name] = o
	}
	return all
}

// Pods run only on Linux, with the least privileges: agent and watcher have the capabilities of their units; the
// allocator has none and is not root.
func TestManifestPods(t *testing.T) {
	all := objects(t)
	agent := all["DaemonSet steelyard"].(*apps.DaemonSet).Spec.Template.Spec
	allocator := all["Deployment steelyard"].(*apps.Deployment).Spec.Template.Spec
	caps := []core.Capability{"BPF", "NET_ADMIN", "NET_RAW", "NET_BIND_SERVICE", "PERFMON", "SYS_NICE"}
	must.Equal(t, 2, len(agent.Containers))
	must.Equal(t, 1, len(allocator.Containers))
	for name, tt := range map[string]struct {
		pod       core.PodSpec
		container core.Container
		caps      []core.Capability
	}{
		"agent": {agent, agent.Containers[0], caps}, "allocator": {allocator, allocator.Containers[0], nil},
		"watcher": {agent, agent.Containers[1], []core.Capability{"BPF", "NET_ADMIN"}},
	} {
		if got := tt.pod.NodeSelector[core.LabelOSStable]; got != "linux" || len(tt.pod.NodeSelector) != 1 {
			t.Errorf("%s: node selector %v; want %s=linux", name, tt.pod.NodeSelector, core.LabelOSStable)
		}
		must.True(t, !tt.pod.HostPID && !tt.pod.HostIPC && len(tt.pod.InitContainers) == 0,
			"%s: has an init container, or the host's processes or IPC", name)
		must.True(t, !tt.container.Resources.Limits.Memory().IsZero(), "%s: memory has no limit", name)
		s := tt.container.SecurityContext
		switch {
		case s.SeccompProfile == nil || s.SeccompProfile.Type != core.SeccompProfileTypeRuntimeDefault:
			t.Errorf("%s: seccomp profile %v; want the container runtime's", name, s.SeccompProfile)
		case s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation || s.Privileged != nil && *s.Privileged:
			t.Errorf("%s: privilege escalation is allowed", name)
		case s.ReadOnlyRootFilesystem == nil || !*s.ReadOnlyRootFilesystem:
			t.Errorf("%s: the root file system is writable", name)
		case !slices.Equal(s.Capabilities.Drop, []core.Capability{"ALL"}) || !slices.Equal(s.Capabilities.Add, tt.caps):
			t.Errorf("%s: capabilities %+v; want only %v", name, s.Capabilities, tt.caps)
		}
	}
	s := allocator.Containers[0].SecurityContext
	must.True(t, s.RunAsNonRoot != nil && *s.RunAsNonRoot, "the allocator may run as root")
	must.True(t, !allocator.HostNetwork, "the allocator has the network of the node")
	for _, v := range allocator.Volumes {
		must.True(t, v.HostPath == nil, "the allocator has volume %s of the node", v.Name)
	}
	var paths []string
	for _, v := range agent.Volumes {
		if v.HostPath != nil {
			paths = append(paths, v.HostPath.Path)
		}
	}
	must.Equal(t, []string{"/run/steelyard", "/var/lib/steelyard", "/sys/fs/bpf/steelyard", "/sys/fs/cgroup"}, paths)
}

// Probes allow for a busy agent's response time. The agent also has time to start: without a response from the API
// server, it waits one minute for the tunnel keys.
func TestManifestProbes(t *testing.T) {
	// lb/admin: the command waits this long for the agent.
	const answer, start = 5 * time.Second, time.Minute
	seconds := func(n int32) time.Duration { return time.Duration(n) * time.Second }
	c := objects(t)["DaemonSet steelyard"].(*apps.DaemonSet).Spec.Template.Spec.Containers[0]
	ready, live := c.ReadinessProbe, c.LivenessProbe
	for name, p := range map[string]*core.Probe{"readiness": ready, "liveness": live} {
		must.True(t, p != nil && p.Exec != nil && seconds(p.TimeoutSeconds) >= answer,
			"%s probe %+v; want a command that has %s", name, p, answer)
	}
	if ends := seconds(live.InitialDelaySeconds + live.FailureThreshold*live.PeriodSeconds); ends <= start {
		t.Errorf("an agent that does not respond is killed after %s; its start takes up to %s", ends, start)
	}
}

// The nodes' account may write Events and nothing else, so an attacker who takes over a node cannot change the cluster.
// No account may change a Service's spec, or read other Secrets.
func TestManifestRights(t *testing.T) {
	all := objects(t)
	rules := map[string][]rbac.PolicyRule{} // by account
	for _, o := range all {
		var role string
		var subjects []rbac.Subject
		switch o := o.(type) {
		case *rbac.ClusterRoleBinding:
			role, subjects = o.RoleRef.Kind+" "+o.RoleRef.Name, o.Subjects
		case *rbac.RoleBinding:
			role, subjects = o.RoleRef.Kind+" "+o.RoleRef.Name, o.Subjects
		}
		for _, s := range subjects {
			must.True(t, s.Kind == "ServiceAccount" && s.Namespace == "steelyard", "%s has rights", s)
			switch r := all[role].(type) {
			case *rbac.ClusterRole:
				rules[s.Name] = append(rules[s.Name], r.Rules...)
			case *rbac.Role:
				rules[s.Name] = append(rules[s.Name], r.Rules...)
			default:
				t.Errorf("%s is bound to %q, which is not in the manifest", s.Name, role)
			}
		}
	}
	read := []string{"get", "list", "watch"}
	for account, want := range map[string][]string{
		"steelyard": {"events create", "events patch"},
		"steelyard-allocator": {
			"configmaps update steelyard-nodes-*", "events create", "events patch", "leases create", "leases update",
			"secrets update steelyard-tunnel-keys", "services/status patch",
		},
	} {
		var writes []string
		for _, r := range rules[account] {
			for _, resource := range r.Resources {
				if resource == "secrets" && !slices.Equal(r.ResourceNames, []string{"steelyard-tunnel-keys"}) {
					t.Errorf("%s may %v any Secret", account, r.Verbs)
				}
				for _, name := range r.ResourceNames { // the account cannot create these
					kind := map[string]string{
						"secrets": "Secret", "configmaps": "ConfigMap", "daemonsets": "DaemonSet",
					}[resource]
					must.True(t, all[kind+" "+name] != nil, "the manifest has no %s %s", kind, name)
				}
				for _, verb := range r.Verbs {
					if slices.Contains(read, verb) {
						continue
					}
					x := resource + " " + verb
					if n := len(r.ResourceNames); n > 0 {
						name := strings.TrimSuffix(r.ResourceNames[0], "0")
						if n == 16 {
							name += "*"
						}
						x += " " + name
					}
					writes = append(writes, x)
				}
			}
		}
		slices.Sort(writes)
		must.True(t, slices.Equal(writes, want), "%s may %q; want %q", account, writes, want)
	}
}

// The policy about Services' metadata applies to the manifest's accounts, and rejects requests that it cannot evaluate.
func TestManifestPolicy(t *testing.T) {
	all := objects(t)
	policy := all["ValidatingAdmissionPolicy steelyard-allocator"].(*admission.ValidatingAdmissionPolicy).Spec
	binding := all["ValidatingAdmissionPolicyBinding steelyard-allocator"].(*admission.ValidatingAdmissionPolicyBinding)
	deny := []admission.ValidationAction{admission.Deny}
	b := binding.Spec
	must.True(t, b.PolicyName == "steelyard-allocator" && slices.Equal(b.ValidationActions, deny) &&
		b.MatchResources == nil && b.ParamRef == nil, "binding %+v", b)
	if policy.FailurePolicy == nil || *policy.FailurePolicy != admission.Fail || len(policy.MatchConditions) != 1 {
		t.Errorf("failure policy %v, conditions %+v", policy.FailurePolicy, policy.MatchConditions)
	}
	for _, o := range all {
		if a, ok := o.(*core.ServiceAccount); ok {
			group := "'system:serviceaccounts:" + a.Namespace + "' in request.userInfo.groups"
			must.Equal(t, group, policy.MatchConditions[0].Expression)
		}
	}
}

// The nodes' cleanup has the necessary capabilities, no account, and a namespace, even after an uninstall.
func TestCleanupManifest(t *testing.T) {
	all := objectsOf(t, systemd.CleanupManifest("steelyard:test"))
	d := all["DaemonSet steelyard-cleanup"].(*apps.DaemonSet)
	installed := objects(t)["Namespace steelyard"].(*core.Namespace)
	if n, ok := all["Namespace "+d.Namespace].(*core.Namespace); !ok || !maps.Equal(n.Labels, installed.Labels) {
		t.Errorf("its namespace is %+v; want the agents' namespace, which may be gone: %+v", n, installed)
	}
	pod := d.Spec.Template.Spec
	c := pod.Containers[0]
	must.True(t, pod.AutomountServiceAccountToken != nil && !*pod.AutomountServiceAccountToken && pod.HostNetwork &&
		d.Spec.MinReadySeconds != 0 && len(pod.Tolerations) == 1 && c.Image == "steelyard:test", "%+v", d.Spec)
	added := c.SecurityContext.Capabilities.Add
	must.Equal(t, []core.Capability{"BPF", "NET_ADMIN", "PERFMON"}, added)
	agent := objects(t)["DaemonSet steelyard"].(*apps.DaemonSet).Spec.Template.Spec
	for _, v := range pod.Volumes { // a directory of the agent, or its parent, to remove it
		if !slices.ContainsFunc(agent.Volumes, func(a core.Volume) bool {
			return a.HostPath != nil && strings.HasPrefix(a.HostPath.Path+"/", v.HostPath.Path+"/")
		}) {
			t.Errorf("%s contains no directory of the agent", v.HostPath.Path)
		}
	}
}

// The example is valid as installed, and also with every line uncommented.
func TestExampleIsValid(t *testing.T) {
	text := must.Get(os.ReadFile("steelyard.toml"))(t)
	must.Get(config.Parse("steelyard.toml", text))(t)
	on := regexp.MustCompile(`(?m)^# (\[|\w+ *=)`).ReplaceAll(text, []byte("$1"))
	c, err := config.Parse("steelyard.toml", on)
	must.Need(t, err == nil, "uncommented: %v\n%s", err, on)
	must.True(t, c.BGP != nil && len(c.BGP.Peers) == 1 && len(c.Services) == 1 && len(c.Services[0].Backends) == 2,
		"uncommented: want one peer and one service of two backends in:\n%s", on)
}

var toml = regexp.MustCompile(`(?s)steelyard.toml: \|\n(.*?)\n---`)

// The DaemonSet's configuration is valid, even with every line uncommented.
func TestManifestConfigurationIsValid(t *testing.T) {
	text := toml.FindStringSubmatch(systemd.Manifest("steelyard:test", ""))
	must.Need(t, text != nil, "the manifest has no configuration")
	plain := regexp.MustCompile(`(?m)^    `).ReplaceAllString(text[1], "")
	for _, x := range []string{plain, regexp.MustCompile(`(?m)^# `).ReplaceAllString(plain, "")} {
		c, err := config.Parse("steelyard.toml", []byte(x))
		must.True(t, err == nil && c.Kubernetes != nil && c.Kubernetes.Forward == lb.MethodTunnel, "%v in\n%s", err, x)
	}
}
