package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"syscall"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
)

// offer makes a Service with these endpoints, and waits until the router sends its addresses to these nodes.
func (c *cluster) startService(t *testing.T, name string, change func(*core.Service), nodes []int, pods ...*pod) []netip.Addr {
	t.Helper()
	c.createService(t, name, change)
	t.Cleanup(func() { c.deleteService(t, name) })
	vips := c.waitAddresses(t, name)
	c.setEndpoints(t, name, pods...)
	c.waitRouted(t, 20*time.Second, vips, nodes...)
	c.waitAnswered(t, vips...)
	return vips
}

// withdraw deletes a Service and waits until it is gone; a finalizer that nobody takes away would keep it.
func (c *cluster) deleteService(t *testing.T, name string) {
	t.Helper()
	ctx, api := context.Background(), c.api.CoreV1().Services("default") // the test is over
	err := api.Delete(ctx, name, meta.DeleteOptions{})
	for range 600 { // another leader may have to be elected first
		if _, err = api.Get(ctx, name, meta.GetOptions{}); err != nil {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	t.Errorf("%s is still there: %v", name, err)
}

// change updates a Service.
func (c *cluster) updateService(t *testing.T, name string, change func(*core.Service)) *core.Service {
	t.Helper()
	api := c.api.CoreV1().Services("default")
	var s *core.Service
	labtest.Until(t, 5*time.Second, "the Service is changed", func() (err error) {
		if s, err = api.Get(t.Context(), name, meta.GetOptions{}); err != nil {
			return err
		}
		change(s)
		s, err = api.Update(t.Context(), s, meta.UpdateOptions{})
		return err
	})
	return s
}

// answers waits until requests to all these addresses are answered.
func (c *cluster) waitAnswered(t *testing.T, vips ...netip.Addr) {
	t.Helper()
	for _, vip := range vips {
		labtest.Until(t, 10*time.Second, vip.String()+" answers", func() error { return c.load(t, vip, 60).Err() })
	}
}

// silent waits until connections to all these addresses end as they should.
func (c *cluster) waitUnserved(t *testing.T, vips []netip.Addr, ends func(error) bool) {
	t.Helper()
	for _, vip := range vips {
		labtest.Until(t, 10*time.Second, vip.String()+" is not served", func() error {
			ctx, cancel := context.WithTimeout(t.Context(), 700*time.Millisecond)
			defer cancel()
			conn, err := c.client().Dial(ctx, "tcp", netip.AddrPortFrom(vip, 80).String())
			if err == nil {
				conn.Close()
			}
			if !ends(err) {
				return fmt.Errorf("it ended with %v", err)
			}
			return nil
		})
	}
}

func refusedAtOnce(err error) bool { return errors.Is(err, syscall.ECONNREFUSED) }

func timesOut(err error) bool { return errors.Is(err, context.DeadlineExceeded) || isTimeout(err) }

func isTimeout(err error) bool {
	var t interface{ Timeout() bool }
	return errors.As(err, &t) && t.Timeout()
}

func anyError(err error) bool { return err != nil }

// from makes a set of pods count anew.
func (c *cluster) allAnswered(t *testing.T, vip netip.Addr, n int) traffic.Result {
	t.Helper()
	r := c.load(t, vip, n)
	if r.Err() != nil {
		t.Errorf("%s: %v", vip, r.Err())
	}
	return r
}

// sendsTo makes the router send addresses to one node, whatever is announced.
func (c *cluster) overrideRoutes(t *testing.T, vips []netip.Addr, node int) {
	t.Helper()
	for _, vip := range vips {
		// More specific than anything announced is not possible; a table of its own comes before what BGP says.
		via := hops(vip, c.Balancers[node:node+1])[0].String()
		family := "-4"
		if vip.Is6() {
			family = "-6"
		}
		for _, args := range [][]string{
			{family, "route", "replace", host(vip).String(), "via", via, "table", "77"},
			{family, "rule", "add", "to", host(vip).String(), "lookup", "77", "priority", "77"},
		} {
			if out, err := c.Topology.Router.Run(t.Context(), "ip", args...); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
		}
		t.Cleanup(func() {
			c.Topology.Router.Run(context.Background(), "ip", family, "rule", "del", "to", host(vip).String(), "priority", "77")
		})
	}
}

func (c *cluster) patchNode(t *testing.T, node int, patch string) {
	t.Helper()
	if _, err := c.api.CoreV1().Nodes().Patch(t.Context(), c.Balancers[node].Name(), types.MergePatchType, []byte(patch), meta.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
}
