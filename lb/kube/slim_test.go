package kube

import (
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"testing"

	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// fill sets every field of a value, so that no field is missing only because it was empty.
func fill(v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem())
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[meta.Time]() {
			v.Set(reflect.ValueOf(meta.Now()))
			return
		}
		for i := range v.NumField() {
			if v.Field(i).CanSet() {
				fill(v.Field(i))
			}
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0))
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
	case reflect.String:
		v.SetString("text")
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int32, reflect.Int64:
		v.SetInt(7)
	}
}

// paths lists the fields that are set, including the fields of nested structs and of the first element of each slice.
func paths(v reflect.Value, name string, add func(string)) {
	switch {
	case v.IsZero():
	case v.Kind() == reflect.Pointer:
		paths(v.Elem(), name, add)
	case v.Kind() == reflect.Slice:
		if v.Len() > 0 {
			paths(v.Index(0), name, add)
		}
	case v.Kind() == reflect.Struct && v.Type() != reflect.TypeFor[meta.Time]():
		for i := range v.NumField() {
			f := v.Type().Field(i)
			if f.Anonymous {
				paths(v.Field(i), name, add)
			} else if f.IsExported() {
				paths(v.Field(i), strings.TrimPrefix(name+"."+f.Name, "."), add)
			}
		}
	default:
		add(name)
	}
}

// The caches keep exactly the parts of an object that the rules read. If a rule starts to read a field, add it here.
func TestSlim(t *testing.T) {
	const object = "Name Namespace UID ResourceVersion DeletionTimestamp Labels Annotations Finalizers"
	annotations := map[string]string{wantPool[0]: "a", "kubectl.kubernetes.io/last-applied-configuration": "{}"}
	for _, tt := range []struct {
		object any
		want   string
	}{
		{&core.Node{}, object + " Spec.Unschedulable Spec.Taints.Key Spec.Taints.Value Spec.Taints.Effect " +
			"Spec.Taints.TimeAdded Status.Conditions.Type Status.Conditions.Status " +
			"Status.Conditions.LastHeartbeatTime Status.Conditions.LastTransitionTime Status.Conditions.Reason " +
			"Status.Conditions.Message Status.Addresses.Type Status.Addresses.Address"},
	} {
		fill(reflect.ValueOf(tt.object).Elem())
		o := tt.object.(meta.Object)
		o.SetAnnotations(annotations)
		o.SetLabels(map[string]string{discovery.LabelServiceName: "web", labelExclude: "", "other": "x"})
		if n, ok := o.(*core.Node); ok {
			n.Spec.Taints[0].Key, n.Status.Conditions[0].Type = taintAutoscaler, core.NodeReady
			n.Status.Addresses[0].Type = core.NodeInternalIP
			n.Spec.Taints = append(n.Spec.Taints, core.Taint{Key: "other"})
			n.Status.Addresses = append(n.Status.Addresses, core.NodeAddress{Type: core.NodeHostName})
			n.Status.Conditions = append(n.Status.Conditions, core.NodeCondition{Type: core.NodeDiskPressure})
		}
		var got []string
		once := must.Get(slim(tt.object))(t)
		paths(reflect.ValueOf(once), "", func(path string) {
			if !strings.HasPrefix(path, "TypeMeta") && path != "Kind" && path != "APIVersion" {
				got = append(got, path)
			}
		})
		must.Row(t, fmt.Sprintf("%T keeps", tt.object), tt.want, strings.Join(got, " "))
		must.True(t, len(o.GetAnnotations()) == 1 && len(o.GetLabels()) == 1,
			"%T keeps %v, %v", tt.object, o.GetAnnotations(), o.GetLabels())
		if n, ok := o.(*core.Node); ok && len(n.Spec.Taints)+len(n.Status.Addresses)+len(n.Status.Conditions) != 3 {
			t.Errorf("the node keeps %+v", n)
		}
		before := once.(interface{ String() string }).String()
		twice, _ := slim(once)
		must.Row(t, fmt.Sprintf("%T, the second time", tt.object), before,
			twice.(interface{ String() string }).String())
	}
	x, err := slim("tombstone")
	must.True(t, x == "tombstone" && err == nil, "slim: %v, %v", x, err)
}

// An EndpointSlice becomes another type: in a large cluster endpoints take most of the memory.
func TestSlimSlice(t *testing.T) {
	s := &discovery.EndpointSlice{}
	fill(reflect.ValueOf(s).Elem())
	s.Labels = map[string]string{discovery.LabelServiceName: "web", "other": "x"}
	s.Endpoints[0].Addresses = []string{"10.0.0.1", "10.0.0.2"}
	s.Endpoints = append(s.Endpoints, discovery.Endpoint{}, discovery.Endpoint{Addresses: []string{"web.example"}},
		discovery.Endpoint{Addresses: []string{"10.0.0.3"}})
	s.Ports = append(s.Ports, discovery.EndpointPort{}, discovery.EndpointPort{Port: new(int32)},
		discovery.EndpointPort{Port: new(int32(8))})
	want := &endpointSlice{
		ObjectMeta: meta.ObjectMeta{Name: "text", Namespace: "text", ResourceVersion: "text"},
		service:    "text/web", family: "text",
		ports: []slicePort{{name: "text", protocol: "text", port: 7}, {protocol: core.ProtocolTCP, port: 8}},
		endpoints: []endpoint{
			{at: netip.MustParseAddrPort("10.0.0.1:0"), node: "text", ready: true, serving: true, terminating: true,
				hints: &hints{nodes: []string{"text"}, zones: []string{"text"}}},
			{at: netip.MustParseAddrPort("10.0.0.3:0"), ready: true, serving: true},
		},
	}
	once, err := slim(s)
	must.True(t, reflect.DeepEqual(once, want) && err == nil, "%+v, %v; want %+v", once, err, want)
	twice, _ := slim(once)
	must.True(t, twice == once, "the second time slim changes %+v to %+v", once, twice)
}

// A Service loses what is large and not read; its spec is read by the rules of addresses and endpoints.
func TestSlimService(t *testing.T) {
	s := &core.Service{}
	fill(reflect.ValueOf(s).Elem())
	want := s.DeepCopy()
	x, err := slim(s)
	got := x.(*core.Service)
	must.True(t, err == nil && got.Spec.Selector == nil && got.ManagedFields == nil, "%+v, %v", got, err)
	want.Spec.Selector = nil
	must.True(t, reflect.DeepEqual(got.Spec, want.Spec) && reflect.DeepEqual(got.Status, want.Status) &&
		reflect.DeepEqual(got.Finalizers, want.Finalizers),
		"%+v; want the spec, the addresses and the finalizers of %+v", got, want)
}

// Each port has the endpoints of its name, wherever the port is in a slice.
func TestPortsOfASlice(t *testing.T) {
	s := slice(8080, ep("10.0.0.1", "n1", "rs"))
	s.Ports = append([]discovery.EndpointPort{
		{Name: new("metrics"), Port: new(int32(9090)), Protocol: new(core.ProtocolTCP)},
		{Name: new("http"), Port: new(int32(5353)), Protocol: new(core.ProtocolUDP)},
	}, s.Ports...)
	all := slimmed([]*discovery.EndpointSlice{slice(8081), s})
	for name, want := range map[string]uint16{"http": 8080, "metrics": 9090} {
		got := endpointsOf(byPort(all)[portOf{name, core.ProtocolTCP, discovery.AddressTypeIPv4}])
		must.True(t, len(got) == 1 && got[0].at.Port() == want,
			"%s: %+v; want one endpoint with port %d", name, got, want)
	}
}
