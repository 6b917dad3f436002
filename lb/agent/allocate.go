package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/steelyard-lb/steelyard/lb/agent/preflight"
	"github.com/steelyard-lb/steelyard/lb/kube"
)

// Allocate is "steelyard allocate": it takes part in the election of who assigns addresses, and keeps the keys of the
// tunnels, until ctx ends. It needs nothing of the machine, and reads the configuration of the nodes.
func Allocate(ctx context.Context, configFile, version string, w io.Writer) error {
	cfg, err := preflight.Load(configFile)
	if err != nil {
		return err
	}
	if cfg.Kubernetes == nil {
		return errors.New("the configuration has no section [kubernetes]")
	}
	log := newLogger(w, cfg.Log, new(slog.LevelVar))
	klog.SetSlogLogger(log)
	pools, err := poolsOf(cfg)
	if err != nil {
		return err
	}
	client, err := newClient(cfg.Kubernetes.Kubeconfig, version, 0, nil)
	if err != nil {
		return fmt.Errorf("kubernetes: %w", err)
	}
	lease, err := newClient(cfg.Kubernetes.Kubeconfig, version, leaseTimeout, nil)
	if err != nil {
		return fmt.Errorf("kubernetes: %w", err)
	}
	name, err := allocatorName()
	if err != nil {
		return err
	}
	problems := newProblems(log)
	allocator := kube.NewAllocator(kube.AllocatorOptions{
		Client: client, Lease: lease, Node: name, Namespace: ownNamespace(), Class: cfg.Kubernetes.LoadBalancerClass,
		Pools: pools, Log: log, Problem: func(err error) { problems.set("addresses cannot be assigned", err) },
	})
	keys := kube.NewKeyKeeper(kube.KeyOptions{Client: client, Namespace: ownNamespace(), Log: log}, nil)
	log.Info("started", "version", version, "config", configFile, "name", name)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return allocator.Run(ctx) })
	if len(cfg.Datapath.TunnelKeys) == 0 {
		g.Go(func() error { return keys.Run(ctx, func(kube.Keys) error { return nil }) })
	}
	err = g.Wait()
	log.Info("stopped", "err", err)
	return err
}

// allocatorName is the identity in the election. Two pods may be on one node.
func allocatorName() (string, error) {
	host, err := os.Hostname()
	if err != nil {
		return "", fmt.Errorf("host name: %w", err)
	}
	return cmp.Or(os.Getenv("POD_NAME"), fmt.Sprintf("%s-%d", host, os.Getpid())), nil
}
