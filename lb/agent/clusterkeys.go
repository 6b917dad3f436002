package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/google/renameio/v2"

	"github.com/steelyard-lb/steelyard/datapath"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/kube"
)

// How long startup waits for an API server that does not answer: longer if this node has no stored keys.
const (
	firstKeysTimeout = 20 * time.Second
	// makeKeysTimeout is how much longer a node that may not create keys waits for an agent that may, whose pod may be
	// starting at the same time. Startup stays within the limits of systemd and of the manifest's liveness probe.
	makeKeysTimeout  = 40 * time.Second
	knownKeysTimeout = 3 * time.Second
)

// clusterKeys are the tunnel keys and the hash seed of the cluster. They are read before the datapath opens, because
// the seed cannot change later. The latest keys are stored in a file, for a start without the API server.
type clusterKeys struct {
	keeper *kube.KeyKeeper
	path   string
	seed   [32]byte // the datapath's seed
	keys   *datapath.TunnelKeys
	known  *kube.Keys // at startup; nil if there were none
	// changed is called with keys that are active in the datapath.
	changed func(kube.Keys)
	log     *slog.Logger
	stale   atomic.Bool // the Secret has another seed
}

// openClusterKeys reads the keys. It returns nil if there is no cluster, or if a file has the keys. The agent also
// starts without keys, because a previous one may have set some.
func openClusterKeys(o Options) (*clusterKeys, error) {
	if o.Config.Kubernetes == nil || len(o.Config.Datapath.TunnelKeys) > 0 {
		return nil, nil
	}
	c := &clusterKeys{
		changed: func(kube.Keys) {}, path: filepath.Join(o.KeepDir, "tunnel-keys.json"),
		log: component(o.Log, "kubernetes"),
	}
	known, err := c.load()
	if err != nil {
		c.log.Warn("tunnel keys of the previous run not read", "err", err)
	}
	client, err := newClient(o.Config.Kubernetes.Kubeconfig, o.Version, 0, o.api.dial)
	if err != nil {
		return nil, fmt.Errorf("kubernetes: %w", err)
	}
	c.keeper = kube.NewKeyKeeper(kube.KeyOptions{
		Client: client, Namespace: ownNamespace(), Boundary: o.boundary, Log: c.log,
	}, known)
	var keys kube.Keys
	if known != nil {
		keys, err = within(knownKeysTimeout, c.keeper.Resume)
	} else {
		keys, err = within(firstKeysTimeout, c.keeper.First)
	}
	if errors.Is(err, kube.ErrNoKeys) && known == nil {
		c.log.Info("waiting for the tunnel keys", "err", err)
		keys, err = within(makeKeysTimeout, c.keeper.First)
	}
	switch {
	case err == nil:
		known = &keys
		c.save(keys)
	case known == nil:
		c.log.Warn("no tunnel keys; packets between nodes are not authenticated, and the hash seed is not secret",
			"err", err)
	}
	if known != nil {
		keys := tunnelKeys(*known)
		c.keys, c.seed, c.known = &keys, known.Seed, known
	}
	return c, nil
}

// within returns the Secret's keys, read within timeout.
func within(timeout time.Duration, read func(context.Context) (kube.Keys, error)) (kube.Keys, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	return read(ctx)
}

// close ends what openClusterKeys started, if the task has not run.
func (c *clusterKeys) close() {
	if c != nil {
		c.keeper.Close()
	}
}

// tunnelKeys converts the cluster's keys for the datapath.
func tunnelKeys(k kube.Keys) datapath.TunnelKeys {
	keys := datapath.TunnelKeys{Send: k.Current, Accept: [][]byte{k.Current, k.Next}, Required: k.Required}
	if len(k.Previous) > 0 {
		keys.Accept = append(keys.Accept, k.Previous)
	}
	return keys
}

// task returns the task that follows the keys; set activates them.
func (c *clusterKeys) task(set func(datapath.TunnelKeys) error) task {
	return task{"tunnel keys", func(ctx context.Context) error {
		return c.keeper.Run(ctx, func(k kube.Keys) error {
			if err := set(tunnelKeys(k)); err != nil {
				return err
			}
			c.save(k)
			c.changed(k)
			if stale := k.Seed != c.seed; c.stale.Swap(stale) != stale && stale {
				c.log.Warn("the cluster has a different hash seed; restart the agent to use it")
			}
			return nil
		})
	}}
}

// findings returns what is wrong with the keys, for the status.
func (c *clusterKeys) findings() (all []lb.Finding) {
	if c == nil {
		return nil
	}
	if p := c.keeper.Problem(); p != "" {
		all = append(all, lb.FoundTunnelKeys.About("", "tunnel keys of the cluster: %s", p))
	}
	if c.stale.Load() {
		all = append(all, lb.FoundHashSeed.About("",
			"the cluster's hash seed differs from this node's; restart the agent"))
	}
	return all
}

func (c *clusterKeys) load() (*kube.Keys, error) {
	text, err := os.ReadFile(c.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var data map[string][]byte
	if err == nil {
		err = json.Unmarshal(text, &data)
	}
	if err != nil {
		return nil, err
	}
	keys, err := kube.ParseKeys(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", c.path, err)
	}
	return &keys, nil
}

// save stores keys for the next start. Only root can read them.
func (c *clusterKeys) save(k kube.Keys) {
	text, err := json.Marshal(k.Data())
	dir := filepath.Dir(c.path)
	if err == nil {
		err = os.MkdirAll(dir, 0o700)
	}
	if err == nil {
		err = renameio.WriteFile(c.path, text, 0o600, renameio.WithTempDir(dir))
	}
	if err != nil {
		c.log.Warn("tunnel keys not stored; a start without the API server will have none", "err", err)
	}
}
