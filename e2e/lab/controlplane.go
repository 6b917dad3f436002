package lab

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"time"
)

// ControlPlane is a real Kubernetes control plane in a host: etcd and kube-apiserver.
type ControlPlane struct {
	*Host
	Address   netip.Addr
	Processes []*Process
	dir       string // with the binaries
	apiserver Command
}

// The token of everybody in the lab, who may do everything.
const controlPlaneToken = "lab-admin"

// controlPlaneDir is where a control plane has its files, as its host sees it.
const controlPlaneDir = "/run/steelyard-lab/controlplane"

// StartControlPlane starts one in h, reachable at an address of h. The programs are in dir.
func StartControlPlane(ctx context.Context, h *Host, address netip.Addr, dir string) (*ControlPlane, error) {
	c := &ControlPlane{Host: h, Address: address, dir: dir}
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return nil, err
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	file := func(name string) string { return filepath.Join(controlPlaneDir, name) }
	for name, text := range map[string]string{
		"sa.key": string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})), "tokens": controlPlaneToken + ",admin,1,system:masters\n",
	} {
		if err := h.WriteFile(file(name), text, 0o600); err != nil {
			return nil, err
		}
	}
	etcd := Command{Abrupt: true, Path: filepath.Join(dir, "etcd"), Args: []string{
		"--data-dir=" + file("etcd"), "--listen-client-urls=http://127.0.0.1:2379", "--advertise-client-urls=http://127.0.0.1:2379",
		"--listen-peer-urls=http://127.0.0.1:2380", "--unsafe-no-fsync", "--log-level=warn",
	}}
	c.apiserver = Command{Abrupt: true, Path: filepath.Join(dir, "kube-apiserver"), Args: []string{
		"--etcd-servers=http://127.0.0.1:2379", "--bind-address=" + address.String(), "--advertise-address=" + address.String(), "--secure-port=6443",
		"--cert-dir=" + file("certs"), "--token-auth-file=" + file("tokens"), "--authorization-mode=RBAC",
		"--service-cluster-ip-range=10.96.0.0/16,fd00:96::/112", "--service-account-issuer=https://lab", "--service-account-key-file=" + file("sa.key"),
		"--service-account-signing-key-file=" + file("sa.key"), "--v=1",
	}}
	for _, cmd := range []Command{etcd, c.apiserver} {
		p, err := h.Start(cmd)
		if err != nil {
			return nil, err
		}
		c.Processes = append(c.Processes, p)
	}
	return c, c.WaitReady(ctx, 60*time.Second)
}

// WaitReady waits until the API server is.
func (c *ControlPlane) WaitReady(ctx context.Context, within time.Duration) error {
	client := c.httpClient()
	client.Transport.(*http.Transport).TLSClientConfig = &tls.Config{InsecureSkipVerify: true} // it signs its own certificate
	defer client.CloseIdleConnections()
	_, err := Until(ctx, within, "the API server is ready", func() error {
		for _, p := range c.Processes {
			if !p.Running() {
				return Hopeless(fmt.Errorf("%s ended: %s", p.Name(), p.Log.Tail(5)))
			}
		}
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.URL()+"/readyz", nil)
		if err != nil {
			return err
		}
		req.Header.Set("Authorization", "Bearer "+controlPlaneToken)
		resp, err := client.Do(req)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return fmt.Errorf("/readyz: %s", resp.Status)
		}
		return nil
	})
	return err
}

// StopAPI kills the API server; StartAPI starts it again.
func (c *ControlPlane) StopAPI() { c.Processes[1].Kill() }

// StartAPI starts the API server again and waits until it is ready.
func (c *ControlPlane) StartAPI(ctx context.Context) error {
	p, err := c.Start(c.apiserver)
	if err != nil {
		return err
	}
	c.Processes[1] = p
	return c.WaitReady(ctx, 60*time.Second)
}

// URL is that of the API server.
func (c *ControlPlane) URL() string {
	return fmt.Sprintf("https://%s", netip.AddrPortFrom(c.Address, 6443))
}

// Kubeconfig is a file for a client that may do everything.
func (c *ControlPlane) Kubeconfig() string { return c.KubeconfigFor(controlPlaneToken) }

// KubeconfigFor is a file for a client with this token.
func (c *ControlPlane) KubeconfigFor(token string) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Config
current-context: lab
contexts: [{name: lab, context: {cluster: lab, user: admin}}]
clusters: [{name: lab, cluster: {server: %q, insecure-skip-tls-verify: true}}]
users: [{name: admin, user: {token: %q}}]
`, c.URL(), token)
}

// Where the agent and kube-proxy of a node find theirs.
const (
	KubeconfigPath      = "/run/steelyard-lab/kubeconfig"
	ProxyKubeconfigPath = "/run/steelyard-lab/kubeconfig-proxy"
)

// PodRanges are where the addresses of all pods are to be from: kube-proxy leaves what they send as it is.
const PodRanges = "10.244.0.0/16,fd00:244::/32"

// StartKubeProxy starts Kubernetes' own service proxy on a node.
func (c *ControlPlane) StartKubeProxy(node *Host) (*Process, error) {
	if err := node.WriteFile(ProxyKubeconfigPath, c.Kubeconfig(), 0o600); err != nil {
		return nil, err
	}
	return node.Start(Command{Abrupt: true, Path: filepath.Join(c.dir, "kube-proxy"), Args: []string{
		"--kubeconfig=" + ProxyKubeconfigPath, "--hostname-override=" + node.Name(), "--proxy-mode=nftables",
		"--conntrack-max-per-core=0", "--conntrack-min=0", "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0",
		"--healthz-bind-address=0.0.0.0:10256", "--cluster-cidr=" + PodRanges, "--v=2",
	}})
}

// ControlPlanePrograms are the programs that the lab needs of Kubernetes.
var ControlPlanePrograms = []string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet", "pause"}

// HaveControlPlane says what is missing in dir.
func HaveControlPlane(dir string) error {
	for _, name := range ControlPlanePrograms {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			return fmt.Errorf("%w; build it with: make controlplane", err)
		}
	}
	return nil
}
