package agent

import (
	"errors"
	"fmt"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/kube/proxy"
	"github.com/steelyard-lb/steelyard/lb/state"
)

// The operator's orders about who serves this node's Services. An order counts until the next one, and over reboots if
// the state does. Without one, the agent serves unless another service proxy does.
const (
	orderTake     = "take"
	orderGiveBack = "give back"
)

// orders returns the file with the operator's last order.
func (o Options) orders() *state.File { return state.New(o.KeepDir, "service-proxy", 1) }

// ordered returns the operator's last order, or "".
func (o Options) ordered() (order string) {
	if _, err := o.orders().Load(&order); err != nil {
		o.Log.Warn("the last order about the service proxy was not read", "err", err)
		return ""
	}
	return order
}

// serviceProxy answers the requests about this node's service proxy.
type serviceProxy struct {
	diff     func() ([]lb.Change, error)
	wanted   bool        // by the configuration
	inside   insider     // nil if the agent has no part of it
	draining bool        // the agent has given back
	serves   func() bool // whether this agent has the port of a service proxy's health
	orders   *state.File
	restart  func() error
	present  func() (string, error) // proxy.Present, but in tests
	permit   func() error           // permitBeside, but in tests
	watched  func() (bool, error)   // inside.Watched, but in tests
}

// Diff implements admin.Proxy.
func (p *serviceProxy) Diff() ([]lb.Change, error) { return p.diff() }

// State implements admin.Proxy.
func (p *serviceProxy) State() (s admin.ProxyState, err error) {
	if s.Other, err = p.present(); err != nil {
		return s, err
	}
	if s.Watched, err = p.watched(); err != nil {
		return s, err
	}
	beside := false
	if p.inside != nil {
		now := p.inside.State()
		s.Older, s.Flows, beside = now.Older, now.Flows, now.Beside
	}
	switch {
	case p.inside != nil && p.draining && s.Flows > 0:
		s.State = "drain"
	case p.inside == nil || p.draining:
		s.State, s.Next = "theirs", "steelyard proxy take"
		if err := p.permit(); err != nil {
			s.Next = err.Error()
		} else if !p.wanted {
			s.Next = `set proxy = "replace" in [kubernetes], and run "steelyard restart"`
		}
	case s.Other != "" && !p.serves():
		s.State, s.Next = "both", `stop kube-proxy on this node, and run "steelyard proxy take" again`
	case s.Other != "":
		s.State = "both"
		s.Next = `once kube-proxy has stopped, run "steelyard proxy take" again, which removes the rules of ` + s.Other
	case beside:
		s.State = "both"
	default:
		s.State = "ours"
	}
	return s, nil
}

// Take implements admin.Proxy.
func (p *serviceProxy) Take() (c admin.ProxyChange, err error) {
	if !p.wanted {
		return c, errors.New(`set proxy = "replace" in [kubernetes] first, and run "steelyard restart"`)
	}
	if p.inside == nil || p.draining {
		if err := p.permit(); err != nil {
			return c, err
		}
		c.Restarting = true
		return c, p.order(orderTake)
	}
	other, err := p.present()
	if err != nil || other == "" {
		return c, err
	}
	if !p.serves() {
		return c, fmt.Errorf("%s may still run, because another program listens on port %s: stop it on this node, and "+
			"try again", other, proxyHealthPort)
	}
	c.Removed, err = proxy.Remove()
	return c, err
}

// GiveBack implements admin.Proxy.
func (p *serviceProxy) GiveBack() (c admin.ProxyChange, err error) {
	if p.inside == nil || p.draining {
		return c, errors.New("the agent is not the service proxy of this node")
	}
	other, err := p.present()
	if err == nil && other == "" {
		err = errors.New("kube-proxy has no rules on this node: start it, and try again")
	}
	if err != nil {
		return c, err
	}
	// Only the rules of nftables mode can be compared.
	if changes, err := p.diff(); err == nil && len(changes) > 0 {
		return c, fmt.Errorf("the rules of %s are not those of the Services (%s): start it, and try again", other,
			changes[0])
	}
	c.Restarting = true
	return c, p.order(orderGiveBack)
}

// order stores an order and restarts the agent. If the agent refuses to restart, the order does not count.
func (p *serviceProxy) order(text string) error {
	var before string
	found, err := p.orders.Load(&before)
	if err != nil && !errors.Is(err, state.ErrDamaged) {
		return err
	}
	if err := p.orders.Save(text); err != nil {
		return err
	}
	err = p.restart()
	switch {
	case err == nil:
		return nil
	case found:
		return errors.Join(err, p.orders.Save(before))
	}
	return errors.Join(err, p.orders.Remove())
}
