package agent

import (
	"errors"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/datapath/inside"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	"github.com/steelyard-lb/steelyard/lb/state"
)

// inState is a service proxy in a state.
type inState struct {
	*fakeInside
	state inside.State
}

func (s inState) State() inside.State { return s.state }

func TestProxyState(t *testing.T) {
	const kubeProxy = "kube-proxy in nftables mode"
	none := func(p *serviceProxy) { p.inside = nil }
	for _, tt := range []struct {
		now        inside.State
		change     func(*serviceProxy)
		want, next string
	}{
		{inside.State{}, nil, "ours", ""},
		{inside.State{Beside: true}, nil, "both", ""},
		{inside.State{Other: kubeProxy, Beside: true}, nil, "both", "which removes the rules"},
		{inside.State{Other: kubeProxy}, func(p *serviceProxy) { p.serves = no }, "both", "stop kube-proxy"},
		{inside.State{Flows: 1}, func(p *serviceProxy) { p.draining = true }, "drain", ""},
		{inside.State{}, func(p *serviceProxy) { p.draining = true }, "theirs", "proxy take"},
		{inside.State{Other: kubeProxy}, none, "theirs", "proxy take"},
		{inside.State{}, func(p *serviceProxy) { p.inside, p.wanted = nil, false }, "theirs", "replace"},
		{inside.State{}, func(p *serviceProxy) { p.inside, p.permit = nil, refuse }, "theirs", "in ipvs mode"},
	} {
		p := &serviceProxy{
			wanted: true, inside: inState{newFakeInside(), tt.now}, serves: func() bool { return true },
			present: func() (string, error) { return tt.now.Other, nil }, permit: func() error { return nil },
			watched: func() (bool, error) { return true, nil },
		}
		if tt.change != nil {
			tt.change(p)
		}
		s := must.Get(p.State())(t)
		must.True(t, s.Watched, "%+v: not watched", tt.now)
		must.True(t, s.State == tt.want && strings.Contains(s.Next, tt.next) && (tt.next == "") == (s.Next == ""),
			"%+v: %s, next %q; want %s, %q", tt.now, s.State, s.Next, tt.want, tt.next)
	}
}

func no() bool { return false }

func refuse() error { return errors.New("kube-proxy in ipvs mode serves this node") }

// An order counts only if the agent restarts. Without a program that would serve, the node is not given back.
func TestProxyOrders(t *testing.T) {
	orders := state.New(t.TempDir(), "service-proxy", 1)
	broken, other, differs := errors.New("the configuration is broken"), "", []lb.Change(nil)
	var restart error
	p := &serviceProxy{
		wanted: true, inside: inState{newFakeInside(), inside.State{}}, serves: no, orders: orders,
		restart: func() error { return restart }, permit: func() error { return nil },
		present: func() (string, error) { return other, nil },
		diff:    func() ([]lb.Change, error) { return differs, nil },
	}
	last := func() (order string) {
		must.Get(orders.Load(&order))(t)
		return order
	}
	_, err := p.GiveBack()
	must.True(t, err != nil && last() == "", "given back to nobody: %v", err)
	other, differs = "kube-proxy", []lb.Change{{}}
	_, err = p.GiveBack()
	must.True(t, err != nil && last() == "", "given back to rules of the past: %v", err)
	differs, restart = nil, broken
	_, err = p.GiveBack()
	must.True(t, errors.Is(err, broken) && last() == "", "an order without a restart: %v, %q", err, last())
	restart = nil
	c := must.Get(p.GiveBack())(t)
	must.True(t, c.Restarting && last() == orderGiveBack, "%+v, %q", c, last())
	p.inside, restart = nil, broken
	_, err = p.Take()
	must.True(t, errors.Is(err, broken) && last() == orderGiveBack, "an order without a restart: %v, %q", err, last())
	p.permit, restart = refuse, nil
	_, err = p.Take()
	must.True(t, err != nil && last() == orderGiveBack, "taken over from what it cannot: %v", err)
}
