package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/e2e/lab"
)

// Kubelet has the settings for StartKubelet.
type Kubelet struct {
	Images []Image
	// Pods are the prefixes of the pods' addresses, one per family. Without them, pods can only use the host network.
	Pods []netip.Prefix
	// CNI connects the pods; empty means PTP. With Flannel, the node is not ready until StartFlannel.
	CNI CNI
	// OnlyIPv4 means that the Node has no IPv6 address.
	OnlyIPv4 bool
	// DNS is the DNS server for pods. It may be zero.
	DNS netip.Addr
	// Kubeconfig is the administrator's by default.
	Kubeconfig string
	// LeaseSeconds is four times the interval at which the kubelet renews its Lease; 0 means the default of 40.
	LeaseSeconds int
}

// kubeletDir is the directory of the kubelet's and the container runtime's files, on a tmpfs of the node.
const kubeletDir = "/run/steelyard-lab/kubelet"

// containerdTOML names the directory of the CNI plugin's configuration, without which the node does not become ready.
const containerdTOML = `version = 2
root = "` + kubeletDir + `/containerd"
state = "` + kubeletDir + `/containerd-state"
oom_score = 0
[grpc]
address = "` + kubeletDir + `/containerd.sock"
[ttrpc]
address = "` + kubeletDir + `/containerd.ttrpc"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "pause:lab"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "native"
[plugins."io.containerd.grpc.v1.cri".cni]
conf_dir = "` + kubeletDir + `/cni"
bin_dir = "/usr/lib/cni"
`

const kubeletYAML = `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
containerRuntimeEndpoint: unix://` + kubeletDir + `/containerd.sock
failCgroupV1: false
cgroupDriver: cgroupfs
cgroupRoot: /%s
failSwapOn: false
makeIPTablesUtilChains: false
podLogsDir: ` + PodLogs + `
localStorageCapacityIsolation: true
evictionHard: {memory.available: 1Mi}
resolvConf: ""
clusterDomain: cluster.local
clusterDNS: %s
nodeLeaseDurationSeconds: %d
`

// kubeletScript runs containerd and the kubelet in one PID namespace. When the namespace ends, the kernel kills every
// process in it.
const kubeletScript = `set -e
cd ` + kubeletDir + `
hostname "$1"
shift
containerd --config containerd.toml &
for i in $(seq 100); do ctr -a containerd.sock version >/dev/null 2>&1 && break; sleep 0.1; done
for image in *.tar; do ctr -a containerd.sock -n k8s.io images import "$image"; done
"$@" &
wait
`

// kubelets is how many kubelets the process has started.
var kubelets atomic.Int32

// StartKubelet starts a kubelet with its own container runtime on a node and imports the images.
func (c *ControlPlane) StartKubelet(n lab.Node, k Kubelet) (*lab.Process, error) {
	// Several labs of a process may have a host of this name.
	group := fmt.Sprintf("steelyard-lab-%d-%d", os.Getpid(), kubelets.Add(1))
	if err := n.Own(cgroup(group)); err != nil {
		return nil, err
	}
	if err := n.Do(func() error { return makeCgroup(group) }); err != nil {
		return nil, err
	}
	network, err := k.CNI.conf(k.Pods, 0)
	if err != nil {
		return nil, err
	}
	dns := "[]"
	if k.DNS.IsValid() {
		dns = fmt.Sprintf("[%q]", k.DNS)
	}
	files := map[string]string{
		kubeletDir + "/containerd.toml": containerdTOML, cniConf: network,
		kubeletDir + "/kubelet.yaml": fmt.Sprintf(kubeletYAML, group, dns, k.LeaseSeconds),
		kubeletDir + "/kubeconfig":   cmp.Or(k.Kubeconfig, c.Kubeconfig()),
	}
	if k.CNI == Flannel {
		delete(files, cniConf)
	}
	for path, text := range files {
		if err := n.WriteFile(path, text, 0o600); err != nil {
			return nil, err
		}
	}
	pause := Image{Names: []string{"pause:lab"}, Programs: []string{filepath.Join(c.dir, "pause")}}
	for i, image := range append(k.Images, pause) {
		archive, err := image.archive()
		if err != nil {
			return nil, fmt.Errorf("image %s: %w", image.Names, err)
		}
		if err := n.WriteFile(fmt.Sprintf("%s/%d.tar", kubeletDir, i), archive, 0o600); err != nil {
			return nil, err
		}
	}
	// Whatever its --root-dir, the kubelet writes to /var/log and listens in a directory of /var/lib/kubelet.
	err = n.Do(func() error {
		for _, dir := range []string{"/var/log", "/var/lib/kubelet"} {
			if err := os.MkdirAll(dir, 0o755); err != nil {
				return err
			}
			if err := unix.Mount("steelyard-lab", dir, "tmpfs", 0, "mode=755"); err != nil {
				return fmt.Errorf("mount %s: %w", dir, err)
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("host %s: %w", n.Name(), err)
	}
	addresses := n.V4.String()
	if !k.OnlyIPv4 {
		addresses += "," + n.V6.String()
	}
	return n.Start(lab.Command{Abrupt: true, Path: "unshare", Args: []string{
		"--pid", "--fork", "--mount-proc", "--kill-child", "--uts", "sh", "-c", kubeletScript, "kubelet", n.Name(),
		filepath.Join(c.dir, "kubelet"), "--config=" + kubeletDir + "/kubelet.yaml",
		"--kubeconfig=" + kubeletDir + "/kubeconfig",
		"--root-dir=" + kubeletDir + "/root", "--cert-dir=" + kubeletDir + "/pki", "--hostname-override=" + n.Name(),
		"--node-ip=" + addresses, "--node-labels=topology.kubernetes.io/zone=" + n.Name(), "--v=2",
	}})
}

// ManifestControllers are the controllers that the objects of "steelyard manifest" need.
const ManifestControllers = "daemonset-controller,deployment-controller,replicaset-controller," +
	"garbage-collector-controller,namespace-controller," +
	"root-ca-certificate-publisher-controller,serviceaccount-controller"

// StartControllers starts these controllers, or all of them if "*", and the scheduler.
func (c *ControlPlane) StartControllers(controllers string) error {
	if err := c.WriteFile(KubeconfigPath, c.Kubeconfig(), 0o600); err != nil {
		return err
	}
	for _, cmd := range []lab.Command{
		{Abrupt: true, Path: filepath.Join(c.dir, "kube-controller-manager"), Args: []string{
			"--kubeconfig=" + KubeconfigPath, "--leader-elect=false",
			"--root-ca-file=" + filepath.Join(controlPlaneDir, "certs", "apiserver.crt"),
			"--service-account-private-key-file=" + filepath.Join(controlPlaneDir, "sa.key"),
			"--controllers=" + controllers, "--v=1",
		}},
		{Abrupt: true, Path: filepath.Join(c.dir, "kube-scheduler"), Args: []string{
			"--kubeconfig=" + KubeconfigPath, "--leader-elect=false", "--v=1",
		}},
	} {
		p, err := c.Start(cmd)
		if err != nil {
			return err
		}
		c.Processes = append(c.Processes, p)
	}
	return nil
}

// RuntimeAvailable returns an error if a program that StartKubelet needs is missing.
func RuntimeAvailable() error {
	for _, name := range []string{"containerd", "ctr", "runc", "unshare"} {
		if _, err := exec.LookPath(name); err != nil {
			return err
		}
	}
	return nil
}

// cgroup is a control group in every hierarchy. Close removes it with its children, which must not contain processes.
type cgroup string

// cgroupRoot contains the cgroup v1 hierarchies, and cgroup v2 as "unified".
const cgroupRoot = "/sys/fs/cgroup"

func makeCgroup(name string) error {
	hierarchies, err := os.ReadDir(cgroupRoot)
	if err != nil {
		return err
	}
	for _, h := range hierarchies {
		dir := filepath.Join(cgroupRoot, h.Name(), name)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		if h.Name() != "cpuset" {
			continue
		}
		for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
			all, err := os.ReadFile(filepath.Join(cgroupRoot, "cpuset", file))
			if err != nil {
				return err
			}
			if err := os.WriteFile(filepath.Join(dir, file), all, 0o644); err != nil {
				return err
			}
		}
	}
	return nil
}

func (g cgroup) Close() error {
	dirs, err := filepath.Glob(filepath.Join(cgroupRoot, "*", string(g)))
	if err != nil {
		return err
	}
	_, err = lab.Until(context.Background(), 5*time.Second, "the control groups are empty", func() error {
		var errs []error
		for _, dir := range dirs {
			errs = append(errs, removeTree(dir))
		}
		return errors.Join(errs...)
	})
	return err
}

// removeTree removes control groups, children first. Their files need not be removed.
func removeTree(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeTree(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	return os.Remove(dir)
}

// PodLogs is the directory of container logs in the node's file system: NAMESPACE_POD_UID/CONTAINER/N.log.
const PodLogs = kubeletDir + "/logs"
