package kube

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

	"github.com/steelyard-lb/steelyard/e2e/lab"
)

// ControlPlane is a real Kubernetes control plane on a host: etcd and kube-apiserver.
type ControlPlane struct {
	*lab.Host
	Address   netip.Addr
	Etcd, API *lab.Process   // Etcd is nil after Join
	Processes []*lab.Process // all others
	dir       string         // directory of the programs
	files     map[string]string
	apiserver lab.Command
}

// controlPlaneToken is the bearer token of the cluster administrator.
const controlPlaneToken = "lab-admin"

// controlPlaneDir is the directory of the control plane's files on its host.
const controlPlaneDir = "/run/steelyard-lab/controlplane"

// auditLog contains the requests that the API server has received.
const auditLog = controlPlaneDir + "/audit.log"

// StartControlPlane starts etcd and kube-apiserver in h and waits until the API server is ready. address is an address
// of h; the programs are in dir.
func StartControlPlane(ctx context.Context, h *lab.Host, address netip.Addr, dir string) (*ControlPlane, error) {
	c := &ControlPlane{Host: h, Address: address, dir: dir}
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return nil, err
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	c.files = map[string]string{
		"sa.key": string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})),
		"tokens": controlPlaneToken + ",admin,1,system:masters\n",
		"audit":  auditPolicy,
	}
	etcd := lab.Command{Abrupt: true, Path: filepath.Join(dir, "etcd"), Args: []string{
		"--data-dir=" + file("etcd"), "--listen-client-urls=http://0.0.0.0:2379",
		"--advertise-client-urls=http://127.0.0.1:2379",
		"--listen-peer-urls=http://127.0.0.1:2380", "--unsafe-no-fsync", "--log-level=warn",
	}}
	if c.Etcd, err = h.Start(etcd); err != nil {
		return nil, err
	}
	return c, c.startAPI(ctx, address)
}

// Join starts another API server, of the same control plane, on h and waits until it is ready.
func (c *ControlPlane) Join(ctx context.Context, h *lab.Host, address netip.Addr) (*ControlPlane, error) {
	other := &ControlPlane{Host: h, Address: address, dir: c.dir, files: c.files}
	return other, other.startAPI(ctx, c.Address)
}

// file returns the path of a file of the control plane on its host.
func file(name string) string { return filepath.Join(controlPlaneDir, name) }

// startAPI starts kube-apiserver with the etcd on the host with this address.
func (c *ControlPlane) startAPI(ctx context.Context, etcd netip.Addr) error {
	for name, text := range c.files {
		if err := c.WriteFile(file(name), text, 0o600); err != nil {
			return err
		}
	}
	c.apiserver = lab.Command{Abrupt: true, Path: filepath.Join(c.dir, "kube-apiserver"), Args: []string{
		"--etcd-servers=http://" + netip.AddrPortFrom(etcd, 2379).String(), "--bind-address=" + c.Address.String(),
		"--advertise-address=" + c.Address.String(),
		"--secure-port=6443",
		"--cert-dir=" + file("certs"), "--token-auth-file=" + file("tokens"), "--authorization-mode=RBAC",
		"--service-cluster-ip-range=10.96.0.0/16,fd00:96::/112", "--allow-privileged",
		"--kubelet-preferred-address-types=InternalIP",
		"--service-account-issuer=https://lab", "--service-account-key-file=" + file("sa.key"),
		"--service-account-signing-key-file=" + file("sa.key"), "--v=1",
		"--audit-policy-file=" + file("audit"), "--audit-log-path=" + auditLog,
	}}
	return c.StartAPI(ctx)
}

// WaitReady waits until the API server reports ready.
func (c *ControlPlane) WaitReady(ctx context.Context, within time.Duration) error {
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext:       c.Dial,
		TLSClientConfig:   &tls.Config{InsecureSkipVerify: true}, // its certificate is self-signed
	}}
	defer client.CloseIdleConnections()
	_, err := lab.Until(ctx, within, "the API server is ready", func() error {
		for _, p := range append([]*lab.Process{c.Etcd, c.API}, c.Processes...) {
			if p != nil && !p.Running() {
				return lab.Permanent(fmt.Errorf("%s ended: %s", p.Name(), p.Log.Tail(5)))
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

// StopAPI kills the API server.
func (c *ControlPlane) StopAPI() { c.API.Kill() }

// StartAPI starts the API server, again after StopAPI, and waits until it is ready.
func (c *ControlPlane) StartAPI(ctx context.Context) error {
	var err error
	if c.API, err = c.Start(c.apiserver); err != nil {
		return err
	}
	return c.WaitReady(ctx, 60*time.Second)
}

// URL returns the URL of the API server.
func (c *ControlPlane) URL() string {
	return fmt.Sprintf("https://%s", netip.AddrPortFrom(c.Address, 6443))
}

// Kubeconfig returns the cluster administrator's kubeconfig.
func (c *ControlPlane) Kubeconfig() string { return c.KubeconfigFor(controlPlaneToken) }

// KubeconfigFor returns the kubeconfig of a client with this token.
func (c *ControlPlane) KubeconfigFor(token string) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Config
current-context: lab
contexts: [{name: lab, context: {cluster: lab, user: admin}}]
clusters: [{name: lab, cluster: {server: %q, insecure-skip-tls-verify: true}}]
users: [{name: admin, user: {token: %q}}]
`, c.URL(), token)
}

// The kubeconfig files of the agent and kube-proxy on a node.
const (
	KubeconfigPath      = "/run/steelyard-lab/kubeconfig"
	ProxyKubeconfigPath = "/run/steelyard-lab/kubeconfig-proxy"
)

// PodRanges are the prefixes of all pod addresses. kube-proxy does not masquerade traffic from them.
const PodRanges = "10.244.0.0/16,fd00:244::/32"

// StartKubeProxy starts kube-proxy on a node in this mode. It returns before kube-proxy has written its rules.
func (c *ControlPlane) StartKubeProxy(node *lab.Host, mode string) (*lab.Process, error) {
	if err := node.WriteFile(ProxyKubeconfigPath, c.Kubeconfig(), 0o600); err != nil {
		return nil, err
	}
	return node.Start(lab.Command{Abrupt: true, Path: filepath.Join(c.dir, "kube-proxy"), Args: []string{
		"--kubeconfig=" + ProxyKubeconfigPath, "--hostname-override=" + node.Name(), "--proxy-mode=" + mode,
		"--conntrack-max-per-core=0", "--conntrack-min=0",
		"--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0",
		"--healthz-bind-address=0.0.0.0:10256", "--cluster-cidr=" + PodRanges, "--v=2",
	}})
}

// Programs are the Kubernetes programs that this package runs.
var Programs = []string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy",
	"kubelet", "pause"}

// Available returns an error if one of Programs is missing in dir.
func Available(dir string) error {
	for _, name := range Programs {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			return fmt.Errorf("%w; build it with: make controlplane", err)
		}
	}
	return nil
}
