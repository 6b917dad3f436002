package admin

import (
	"errors"
	"net/http"

	"github.com/steelyard-lb/steelyard/lb"
)

// Proxy answers the requests about the service proxy of this node.
type Proxy interface {
	// Diff returns where the agent would choose other endpoints of the cluster's Services than kube-proxy.
	Diff() ([]lb.Change, error)
	State() (ProxyState, error)
	// Take makes the agent the service proxy, beside kube-proxy, or completes that when kube-proxy has been stopped.
	Take() (ProxyChange, error)
	// GiveBack leaves new connections to kube-proxy, whose rules must be in the kernel.
	GiveBack() (ProxyChange, error)
}

// ProxyState is the response of /v1/proxy.
type ProxyState struct {
	// State is "ours", "both" (ours, with the connections or the rules of another), "drain" (given back; our
	// connections go on), or "theirs".
	State string `json:"state"`
	Other string `json:"other,omitempty"` // the other service proxy that has rules in the kernel
	Flows int    `json:"flows"`           // of this agent
	Older int    `json:"older_flows"`     // of the other, according to connection tracking
	// Watched is whether "steelyard proxy watch" runs, so that pods are served that start while the agent is away.
	Watched bool   `json:"watched"`
	Next    string `json:"next,omitempty"` // what the operator should do
}

// ProxyChange is the response to a change of the service proxy.
type ProxyChange struct {
	Removed    []string `json:"removed"`    // what another service proxy had left
	Restarting bool     `json:"restarting"` // the change is in force when the agent has restarted
}

// proxy responds with 422 if f fails, because the request is valid, but not in this state.
func (s *Server) proxy(f func(Proxy) (any, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		if s.o.Proxy == nil {
			writeError(w, http.StatusUnprocessableEntity, errors.New("the configuration has no section [kubernetes]"))
			return
		}
		result, err := f(s.o.Proxy)
		if err != nil {
			writeError(w, http.StatusUnprocessableEntity, err)
			return
		}
		write(w, http.StatusOK, result)
	}
}

func proxyDiff(p Proxy) (any, error) {
	changes, err := p.Diff()
	return listOf(changes), err
}

func proxyState(p Proxy) (any, error) { return p.State() }

func proxyTake(p Proxy) (any, error) {
	c, err := p.Take()
	c.Removed = listOf(c.Removed)
	return c, err
}

func proxyGiveBack(p Proxy) (any, error) {
	c, err := p.GiveBack()
	c.Removed = listOf(c.Removed)
	return c, err
}
