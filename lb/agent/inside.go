package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/datapath"
	"github.com/steelyard-lb/steelyard/datapath/inside"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/kube"
	"github.com/steelyard-lb/steelyard/lb/kube/proxy"
)

// insider is the datapath for connections that this node and its pods open to Services, and for node ports.
type insider interface {
	kube.NodeRules
	datapath.TracePart
	prometheus.Collector
	io.Closer
	Run(context.Context) error
	Findings() []string
	State() inside.State
	Rules() []lb.NodeRule
	Explain(lb.Question) (e lb.Explanation, ok bool, err error)
	Flows(context.Context, lb.FlowFilter) (flows []lb.FlowStatus, more bool, err error)
}

// proxyProblem is what the agent goes on without if it cannot be the service proxy.
const proxyProblem = `this node's Services (proxy = "replace"); the agent goes on as with "auto"`

// isProxy reports whether the agent is this node's service proxy.
func (o Options) isProxy() bool {
	return o.Config.Kubernetes.Proxy == config.ProxyReplace && !o.notProxy
}

// connectInside opens the service proxy if the agent shall be one, or if it has to drain what an earlier agent served.
func (o *Options) connectInside(uplinks func() []datapath.InterfaceStatus) error {
	if o.openInside == nil {
		return nil
	}
	pins := insidePins(o.PinPath)
	served := inside.Serves(pins)
	if o.Config.Kubernetes == nil {
		if !served {
			return nil
		}
		o.Log.Info("no longer the service proxy of this node; open connections through Services end")
		return inside.Cleanup(pins, o.Log)
	}
	wanted, order := o.isProxy(), o.ordered()
	if !wanted && order != "" { // it does not count for a later "replace"
		if err := o.orders().Remove(); err != nil {
			return err
		}
	}
	var refused error
	switch {
	case wanted && order == orderGiveBack:
		refused = errors.New(`given back to kube-proxy; to undo this, run "steelyard proxy take"`)
	case wanted && order == orderTake:
		refused = permitBeside()
	case wanted && !served:
		refused = permitAlone()
	}
	o.notProxy = wanted && refused != nil
	drain := served && !o.isProxy()
	if !o.isProxy() && !drain {
		return refused
	}
	if !wanted {
		other, err := proxy.Present()
		if err != nil {
			return err
		}
		if other == "" {
			drain = false
			refused = errors.New("nothing else would serve them, so the agent does, although proxy is not " +
				"\"replace\"; start kube-proxy, and restart the agent")
		}
	}
	i, err := o.openInside(*o, uplinks, drain)
	if err != nil {
		o.notProxy = wanted
		return err
	}
	o.inside, o.draining = i, drain
	return refused
}

// openInside opens the service proxy, with the interfaces of the load balancer as uplinks.
func openInside(o Options, uplinks func() []datapath.InterfaceStatus, drain bool) (insider, error) {
	i, err := inside.Open(inside.Options{
		Pins: insidePins(o.PinPath), Log: component(o.Log, "service proxy"),
		Uplinks: func() (names []string) {
			for _, s := range uplinks() {
				names = append(names, s.Name)
			}
			return names
		},
		NodePorts: o.Config.Kubernetes.NodePortAddresses, Other: proxy.Present, Drain: drain,
		NoSocketLB: o.Config.Kubernetes.NoSocketLB,
	})
	if err != nil {
		return nil, err // and not a nil *inside.Inside, which is an insider
	}
	return i, nil
}

// proxyMetrics serves the metrics that kube-proxy serves to programs of its node.
func proxyMetrics(of prometheus.Collector) http.Handler {
	registry := prometheus.NewRegistry()
	registry.MustRegister(
		of, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	return promhttp.HandlerFor(registry, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError})
}

// insidePins returns the directory of the service proxy's maps.
func insidePins(path string) string { return filepath.Join(path, datapath.Schema, "inside") }

// watched reports whether "steelyard proxy watch" runs.
func (o Options) watched() (bool, error) { return inside.Watched(insidePins(o.PinPath)) }

// proxyHealthPort is where every service proxy listens.
const proxyHealthPort = "10256"

// permitAlone returns an error if another service proxy serves the node.
func permitAlone() error {
	if err := permitBeside(); err != nil {
		return err
	}
	other, err := proxy.Present()
	if err == nil && other != "" {
		err = fmt.Errorf(`%s serves this node; to take over, run "steelyard proxy take"`, other)
	}
	return err
}

// permitBeside returns an error if a service proxy serves the node from which the agent cannot take over.
func permitBeside() error {
	if _, err := net.InterfaceByName("kube-ipvs0"); err == nil {
		return errors.New("kube-proxy in ipvs mode serves this node, whose connections the agent cannot continue: " +
			"drain the node, stop kube-proxy, run \"kube-proxy --cleanup\", and restart the agent")
	}
	if other, err := proxy.Present(); err != nil || other != "" {
		return err
	}
	conn, err := net.DialTimeout("tcp", net.JoinHostPort("localhost", proxyHealthPort), time.Second)
	if errors.Is(err, syscall.ECONNREFUSED) {
		return nil
	}
	if err == nil {
		conn.Close()
	}
	return errors.New("another service proxy, which listens on port " + proxyHealthPort + ", serves this node; stop " +
		"it, and restart the agent")
}

// insideFindings returns the findings of the service proxy.
func insideFindings(i insider) (all []lb.Finding) {
	for _, text := range i.Findings() {
		all = append(all, lb.FoundServiceProxy.About("", "%s", text))
	}
	if s := i.State(); s.Other != "" {
		all = append(all, lb.FoundTwoProxies.About("", "%s has rules beside the agent's", s.Other))
	}
	return all
}
