package kube

import (
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/steelyard-lb/steelyard/lb"
)

// filler fills values of any type from bytes. Strings are mostly from a dictionary, so that objects refer to each
// other.
type filler struct{ b []byte }

var dictionary = slices.Concat(slices.Concat(annotations...), []string{
	"", "web", "mail", "default", "n1", "n2", "http", "TCP", "UDP", "SCTP", "Cluster", "Local", "LoadBalancer", "None",
	"ClusterIP", "ClientIP", "VIP", "Proxy", "true", "false", "x", "IPv4", "IPv6", "FQDN", "SingleStack",
	"PreferDualStack", "RequireDualStack", "203.0.113.1", "203.0.113.9", "192.0.2.1", "10.0.0.1", "::", "0.0.0.0",
	"2001:db8::1", "fe80::1%1", "::ffff:203.0.113.1", "224.0.0.1", "203.0.113.1,203.0.113.2",
	"2001:db8::1, 203.0.113.1", "10.0.0.0/8", "::/0", "1/2/3", "public", "InternalIP", "Ready", "Unknown", finalizer,
	labelHeadless, labelProxyName, labelExclude,
	core.LabelTopologyZone, discovery.LabelServiceName, taintAutoscaler, "\xff", strings.Repeat("9", 300),
})

func (f *filler) next() byte {
	if len(f.b) == 0 {
		return 0
	}
	n := f.b[0]
	f.b = f.b[1:]
	return n
}

func (f *filler) text() string {
	n := int(f.next())
	if n < 240 {
		return dictionary[n%len(dictionary)]
	}
	n = min(n-240, len(f.b))
	s := string(f.b[:n])
	f.b = f.b[n:]
	return s
}

func (f *filler) number() int64 {
	n := f.next()
	special := []int64{-1, math.MaxInt32, math.MinInt32, math.MaxInt64, math.MinInt64, 65535, 65536}
	if int(n) < len(special) {
		return special[n]
	}
	return int64(n)
}

// fill sets v. A pointer is nil, and a list ends, when the byte for it is 0, and thus at the end of the bytes.
func (f *filler) fill(v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		if f.next()%3 > 0 {
			v.Set(reflect.New(v.Type().Elem()))
			f.fill(v.Elem())
		}
	case reflect.Slice:
		for n := f.next() % 4; n > 0; n-- {
			v.Set(reflect.Append(v, reflect.Zero(v.Type().Elem())))
			f.fill(v.Index(v.Len() - 1))
		}
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		for n := f.next() % 4; n > 0; n-- {
			key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
			f.fill(key)
			f.fill(value)
			v.SetMapIndex(key, value)
		}
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[meta.Time]() {
			v.Set(reflect.ValueOf(meta.Unix(f.number()%1e9, 0)))
			return
		}
		for i := range v.NumField() {
			f.fill(v.Field(i))
		}
	case reflect.String:
		v.SetString(f.text())
	case reflect.Bool:
		v.SetBool(f.next()%2 == 1)
	case reflect.Int, reflect.Int32, reflect.Int64:
		v.SetInt(f.number() % (1 << (8*v.Type().Size() - 1)))
	}
}

// meta fills the metadata fields that are read.
func (f *filler) meta(m *meta.ObjectMeta) {
	m.Namespace, m.Name, m.ResourceVersion = "default", []string{"web", "mail"}[f.next()%2], fmt.Sprint(f.next())
	for _, x := range []any{&m.Labels, &m.Annotations, &m.Finalizers, &m.DeletionTimestamp} {
		f.fill(reflect.ValueOf(x).Elem())
	}
}

// service fills a Service, and makes it one that nodes serve, unless the bytes say otherwise.
func (f *filler) service() *core.Service {
	s, change := &core.Service{}, f.next()
	f.meta(&s.ObjectMeta)
	f.fill(reflect.ValueOf(&s.Spec).Elem())
	f.fill(reflect.ValueOf(&s.Status).Elem())
	if change&1 == 0 {
		s.Spec.Type, s.Spec.LoadBalancerClass, s.Spec.ClusterIP, s.Labels = core.ServiceTypeLoadBalancer, nil, "", nil
	}
	if change&2 == 0 {
		s.Spec.Ports = []core.ServicePort{{Name: "http", Port: 80}}
	}
	if change&4 == 0 {
		s.Spec.ExternalTrafficPolicy = core.ServiceExternalTrafficPolicyLocal
	}
	switch addr := "203.0.113.1"; change >> 6 {
	case 0:
		s.Status.LoadBalancer.Ingress = []core.LoadBalancerIngress{{IP: addr}}
	case 1:
		s.Status.LoadBalancer.Ingress, s.Spec.ExternalIPs = nil, []string{addr}
	}
	return s
}

// A node makes a plan, and an allocator decides, whatever objects the API server has. It validates most fields that are
// filled here, but not annotations, and not objects stored by an older version or another writer.
func FuzzTranslate(f *testing.F) {
	f.Add([]byte{})
	for seed := range uint64(100) {
		f.Add(noise(seed))
	}
	// A Service whose address another one has, in its status or as an externalIP, has none under the policy Local.
	x := &filler{make([]byte, 1000)}
	x.service()
	holder := make([]byte, 1001-len(x.b))
	for _, change := range []byte{0, 64} {
		later := slices.Clone(holder)
		later[1], later[2] = change, 1 // the name
		f.Add(slices.Concat([]byte{7}, holder, later))
	}
	pools := []Pool{poolFrom("public", "203.0.113.1", "203.0.113.8", forExternalIPs)}
	client := fake.NewClientset()
	f.Fuzz(func(t *testing.T, b []byte) {
		x := &filler{b}
		options := x.next()
		fix := newFixture(t, func(o *Options) {
			o.Client, o.Forward = client, lb.MethodNAT
			if options&1 > 0 {
				o.Pools = pools
			}
			if options&2 > 0 {
				o.Forward = lb.MethodTunnel
			}
			if options&4 > 0 {
				o.SpreadLocal = func([]lb.AnnouncerKind) bool { return true }
			}
		})
		var all []*core.Service
		for len(x.b) > 0 {
			switch x.next() % 4 {
			case 0, 1:
				s := x.service()
				fix.have(t, s)
				all = append(all, s)
			case 2:
				s := &discovery.EndpointSlice{AddressType: discovery.AddressType(x.text())}
				x.meta(&s.ObjectMeta)
				x.fill(reflect.ValueOf(&s.Ports).Elem())
				x.fill(reflect.ValueOf(&s.Endpoints).Elem())
				s.Labels = map[string]string{discovery.LabelServiceName: s.Name}
				fix.have(t, s)
			default:
				n := node([]string{"n1", "n2"}[x.next()%2])
				x.fill(reflect.ValueOf(&n.Spec).Elem())
				x.fill(reflect.ValueOf(&n.Status.Addresses).Elem())
				x.fill(reflect.ValueOf(&n.Status.Conditions).Elem())
				slimNode(n)
				fix.have(t, n)
			}
			for _, s := range all {
				fix.reconcile(nameOf(s), fakeSink{fix.recorded})
				if v := fix.put[nameOf(s)]; v != nil {
					checkPlan(t, lb.Build(v, nil, lb.Drains{}))
				}
			}
		}
		a := newAssigner(nil, pools)
		for _, s := range all {
			a.settle(s, a.decide(s, pending{}, options&8 > 0))
		}
	})
}

// noise returns the same bytes in all runs.
func noise(seed uint64) []byte {
	b := make([]byte, 400)
	_, _ = rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)}).Read(b)
	return b
}

func checkPlan(t *testing.T, p *lb.Plan) {
	t.Helper()
	for _, f := range p.Frontends {
		if table := f.Table(); len(table) > 0 && int(slices.Max(table)) >= len(f.Targets) {
			t.Fatalf("%s: a slot of target %d of %d", p.Service.Name, slices.Max(table), len(f.Targets))
		}
	}
}
