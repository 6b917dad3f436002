package kube

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/e2e/lab"
)

// Image is a container image of one static program, "/NAME" in it.
type Image struct {
	Name    string // with its tag
	Program string // the file
}

// kubeletDir is the directory of the files of the kubelet and the container runtime, on a tmpfs of the node.
const kubeletDir = "/run/steelyard-lab/kubelet"

// containerdTOML configures a CNI network, without which the node does not become ready. Its plugin is never called:
// all pods here use the host network.
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
bin_dir = "` + kubeletDir + `/cni"
`

const cniConf = `{"cniVersion": "0.4.0", "name": "lab", "plugins": [{"type": "none"}]}`

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
localStorageCapacityIsolation: false
evictionHard: {memory.available: 1Mi}
resolvConf: ""
`

// kubeletScript runs containerd and the kubelet in one PID namespace. The end of that namespace kills every process in
// it.
const kubeletScript = `set -e
cd ` + kubeletDir + `
containerd --config containerd.toml &
for i in $(seq 100); do ctr -a containerd.sock version >/dev/null 2>&1 && break; sleep 0.1; done
for image in *.tar; do ctr -a containerd.sock -n k8s.io images import "$image"; done
"$@" &
wait
`

// StartKubelet starts a kubelet with a container runtime of its own on a node and imports these images.
func (c *ControlPlane) StartKubelet(n lab.Node, images ...Image) (*lab.Process, error) {
	group := fmt.Sprintf("steelyard-lab-%d-%s", os.Getpid(), n.Name())
	if err := n.Own(cgroup(group)); err != nil {
		return nil, err
	}
	if err := n.Do(func() error { return makeCgroup(group) }); err != nil {
		return nil, err
	}
	for name, text := range map[string]string{
		"containerd.toml": containerdTOML, "cni/lab.conflist": cniConf,
		"kubelet.yaml": fmt.Sprintf(kubeletYAML, group), "kubeconfig": c.Kubeconfig(),
	} {
		if err := n.WriteFile(filepath.Join(kubeletDir, name), text, 0o600); err != nil {
			return nil, err
		}
	}
	for i, image := range append(images, Image{Name: "pause:lab", Program: filepath.Join(c.dir, "pause")}) {
		archive, err := image.archive()
		if err != nil {
			return nil, fmt.Errorf("image %s: %w", image.Name, err)
		}
		if err := n.WriteFile(fmt.Sprintf("%s/%d.tar", kubeletDir, i), archive, 0o600); err != nil {
			return nil, err
		}
	}
	// The kubelet writes to /var/log.
	err := n.Do(func() error { return unix.Mount("steelyard-lab", "/var/log", "tmpfs", 0, "mode=755") })
	if err != nil {
		return nil, fmt.Errorf("mount /var/log in host %s: %w", n.Name(), err)
	}
	return n.Start(lab.Command{Abrupt: true, Path: "unshare", Args: []string{
		"--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", kubeletScript, "kubelet",
		filepath.Join(c.dir, "kubelet"), "--config=" + kubeletDir + "/kubelet.yaml",
		"--kubeconfig=" + kubeletDir + "/kubeconfig",
		"--root-dir=" + kubeletDir + "/root", "--cert-dir=" + kubeletDir + "/pki", "--hostname-override=" + n.Name(),
		fmt.Sprintf("--node-ip=%s,%s", n.V4, n.V6), "--v=2",
	}})
}

// StartControllers starts the DaemonSet controller, the controllers that it needs, and the scheduler.
func (c *ControlPlane) StartControllers(ctx context.Context) error {
	if err := c.WriteFile(KubeconfigPath, c.Kubeconfig(), 0o600); err != nil {
		return err
	}
	for _, cmd := range []lab.Command{
		{Abrupt: true, Path: filepath.Join(c.dir, "kube-controller-manager"), Args: []string{
			"--kubeconfig=" + KubeconfigPath, "--leader-elect=false",
			"--root-ca-file=" + filepath.Join(controlPlaneDir, "certs", "apiserver.crt"),
			"--controllers=daemonset-controller,garbage-collector-controller," +
				"root-ca-certificate-publisher-controller,serviceaccount-controller",
			"--v=1",
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

// RuntimeAvailable returns an error when a program that StartKubelet needs is missing.
func RuntimeAvailable() error {
	for _, name := range []string{"containerd", "ctr", "runc", "unshare"} {
		if _, err := exec.LookPath(name); err != nil {
			return err
		}
	}
	return nil
}

// archive returns the image in the format of "docker save".
func (i Image) archive() (string, error) {
	program, err := os.ReadFile(i.Program)
	if err != nil {
		return "", err
	}
	path := filepath.Base(i.Program)
	layer, err := tarOf(map[string][]byte{path: program}, 0o755)
	if err != nil {
		return "", err
	}
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH, "os": "linux", "config": map[string]any{"Entrypoint": []string{"/" + path}},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{digest(layer)}},
	})
	if err != nil {
		return "", err
	}
	manifest, err := json.Marshal([]map[string]any{{
		"Config": "config.json", "RepoTags": []string{i.Name}, "Layers": []string{"layer.tar"},
	}})
	if err != nil {
		return "", err
	}
	all, err := tarOf(map[string][]byte{"manifest.json": manifest, "config.json": config, "layer.tar": layer}, 0o644)
	return string(all), err
}

func tarOf(files map[string][]byte, mode int64) ([]byte, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for name, content := range files {
		if err := w.WriteHeader(&tar.Header{Name: name, Mode: mode, Size: int64(len(content))}); err != nil {
			return nil, err
		}
		if _, err := w.Write(content); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// cgroup is a control group in every hierarchy. Close removes it with its children; no process may be in it then.
type cgroup string

// cgroupRoot has the hierarchies of cgroup v1, and cgroup v2 as "unified".
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

// Close implements io.Closer.
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

// removeTree removes the directories of control groups, children first; their files need not be removed.
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

func digest(b []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(b)) }

// PodLogs is the directory of the container logs in the file system of the node: NAMESPACE_POD_UID/CONTAINER/N.log.
const PodLogs = kubeletDir + "/logs"
