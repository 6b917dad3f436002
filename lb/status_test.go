package lb_test

import (
	"net/netip"
	"testing"
	"testing/synctest"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest"
)

// The policy of a frontend is that of its service.
func TestStatusHasThePolicy(t *testing.T) {
	for _, policy := range lb.Policies {
		t.Run(string(policy), func(t *testing.T) {
			inEngine(t, lbtest.New(), func(t *testing.T, e *lb.Engine) {
				s := service("web", []netip.Addr{vip1}, "10.0.0.1")
				s.Policy = policy
				e.Put(s)
				synctest.Wait()
				st, err := e.Status(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				if len(st.Services) != 1 || st.Services[0].Policy != policy {
					t.Errorf("services %+v; want one with policy %s", st.Services, policy)
				}
			})
		})
	}
}
