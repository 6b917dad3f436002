package kube

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	core "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/steelyard-lb/steelyard/lb"
)

// Annotations of a Service: ours, then MetalLB's.
var (
	wantAddresses = []string{
		"steelyard.dev/addresses", "metallb.io/loadBalancerIPs", "metallb.universe.tf/loadBalancerIPs",
	}
	wantPool  = []string{"steelyard.dev/pool", "metallb.io/address-pool", "metallb.universe.tf/address-pool"}
	wantShare = []string{"steelyard.dev/share", "metallb.io/allow-shared-ip", "metallb.universe.tf/allow-shared-ip"}
	shareWith = []string{"steelyard.dev/share-with"} // the other namespaces that may use the key
	perNode   = []string{"steelyard.dev/address-per-node"}

	algorithm     = []string{"steelyard.dev/algorithm"} // of the choice of pods
	from          = []string{"steelyard.dev/announce-from"}
	portRanges    = []string{"steelyard.dev/port-ranges"}
	probeInterval = []string{"steelyard.dev/probe-interval"} // of its health check node port, as are these:
	probeTimeout  = []string{"steelyard.dev/probe-timeout"}
	probeRise     = []string{"steelyard.dev/probe-rise"}
	probeFall     = []string{"steelyard.dev/probe-fall"}
)

// annotations lists all of these. No other annotation that begins with ourPrefix is valid.
var annotations = [][]string{
	wantAddresses, wantPool, wantShare, shareWith, perNode,
	algorithm, from, portRanges, probeInterval, probeTimeout, probeRise, probeFall,
}

const ourPrefix = "steelyard.dev/"

// unknownAnnotations returns annotations that look like ours but are not.
func unknownAnnotations(s *core.Service) (names []string) {
	for name := range s.Annotations {
		known := slices.ContainsFunc(annotations, func(all []string) bool { return all[0] == name })
		if strings.HasPrefix(name, ourPrefix) && !known {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// annotation returns the first non-empty value of these annotations.
func annotation(s *core.Service, names []string) string {
	for _, n := range names {
		if v := strings.TrimSpace(s.Annotations[n]); v != "" {
			return v
		}
	}
	return ""
}

// settings are what the annotations of a Service ask of each node.
type settings struct {
	of        types.UID    // of the Service
	algorithm lb.Algorithm // or the zero value for the default
	// fromEndpoints means that nodes without endpoints should attract no packets under the policy Cluster.
	fromEndpoints bool
	// ranges has the last port of each range, by the Service's port with which it begins.
	ranges map[lb.Port]uint16
	// How to probe the health check node port. A zero field means the value of [probe].
	interval, timeout time.Duration
	rise, fall        int
}

// settingsOf returns a Service's settings. An annotation with a wrong value does not change old, the previous settings.
// The error names every wrong value.
func settingsOf(s *core.Service, old settings) (now settings, err error) {
	var errs []error
	if now.of = s.UID; old.of != s.UID {
		old = settings{}
	}
	now.algorithm = setting(&errs, old.algorithm)(algorithmOf(s))
	now.fromEndpoints = setting(&errs, old.fromEndpoints)(fromEndpoints(s))
	now.ranges = setting(&errs, old.ranges)(rangesOf(s))
	now.interval = setting(&errs, old.interval)(durationIn(s, probeInterval, intervalMin))
	now.timeout = setting(&errs, old.timeout)(durationIn(s, probeTimeout, timeoutMin))
	now.rise = setting(&errs, old.rise)(countIn(s, probeRise))
	now.fall = setting(&errs, old.fall)(countIn(s, probeFall))
	if now.interval > 0 && now.timeout > now.interval {
		errs = append(errs, fmt.Errorf("%s is longer than %s", probeTimeout[0], probeInterval[0]))
		now.interval, now.timeout = old.interval, old.timeout
	}
	return now, errors.Join(errs...)
}

// setting returns a function that returns value or, with an error, old.
func setting[T any](errs *[]error, old T) func(value T, err error) T {
	return func(value T, err error) T {
		if err != nil {
			*errs = append(*errs, err)
			return old
		}
		return value
	}
}

// probe returns the check of a health check node port, given the node's.
func (x settings) probe(node lb.CheckSpec) lb.CheckSpec {
	node.Interval = cmp.Or(x.interval, node.Interval)
	node.Timeout = min(cmp.Or(x.timeout, node.Timeout), node.Interval)
	node.Rise, node.Fall = cmp.Or(x.rise, node.Rise), cmp.Or(x.fall, node.Fall)
	return node
}

// algorithmOf returns the algorithm that a Service asks for, or the zero value, and an error if there is none of this
// name.
func algorithmOf(s *core.Service) (a lb.Algorithm, err error) {
	if text := annotation(s, algorithm); text != "" {
		if err = a.UnmarshalText([]byte(text)); err != nil {
			err = fmt.Errorf("%s: %w", algorithm[0], err)
		}
	}
	return a, err
}

// fromEndpoints reports whether nodes without endpoints should attract no packets. The value "endpoints" says so; the
// error names another value.
func fromEndpoints(s *core.Service) (bool, error) {
	switch text := annotation(s, from); text {
	case "", "endpoints":
		return text != "", nil
	default:
		return false, fmt.Errorf(`%s is %.200q; write "endpoints"`, from[0], text)
	}
}

// Bounds of the annotations. A range takes up to 30 entries in the kernel's table, and as many for packets from other
// nodes.
const (
	timeoutMin               = 10 * time.Millisecond
	intervalMin, intervalMax = 200 * time.Millisecond, time.Minute
	countMax                 = 10
	rangesMax, rangePortsMax = 16, 20_000
	rangePlaces              = 60
)

// durationIn returns the duration in an annotation, which is at least least.
func durationIn(s *core.Service, names []string, least time.Duration) (time.Duration, error) {
	text := annotation(s, names)
	if text == "" {
		return 0, nil
	}
	d, err := time.ParseDuration(text)
	if err != nil || d < least || d > intervalMax {
		return 0, fmt.Errorf("%s is %.50q; write a duration from %s to %s", names[0], text, least, intervalMax)
	}
	return d, nil
}

func countIn(s *core.Service, names []string) (int, error) {
	text := annotation(s, names)
	if text == "" {
		return 0, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 || n > countMax {
		return 0, fmt.Errorf("%s is %.50q; write a number from 1 to %d", names[0], text, countMax)
	}
	return n, nil
}

// rangesOf returns the last port of each range that a Service asks for, by the Service's port with which it begins.
// Packets to the other ports of a range go to the ports of the same distance from the target port.
func rangesOf(s *core.Service) (map[lb.Port]uint16, error) {
	text := annotation(s, portRanges)
	if text == "" {
		return nil, nil
	}
	ranges, ports := map[lb.Port]uint16{}, 0
	for one := range strings.FieldsFuncSeq(text, isListSeparator) {
		r, ok := parseRange(one)
		if !ok {
			return nil, fmt.Errorf("%s: %.50q is not a range; write one such as 10000-10999/UDP", portRanges[0], one)
		}
		if ports += int(r.Last-r.Port) + 1; len(ranges) == rangesMax || ports > rangePortsMax {
			return nil, fmt.Errorf("%s: a Service can have %d ranges with %d ports together", portRanges[0], rangesMax,
				rangePortsMax)
		}
		first := lb.Port{Port: r.Port, Protocol: r.Protocol}
		_, twice := ranges[first]
		if err := checkRange(s, r); err != nil || twice {
			return nil, fmt.Errorf("%s: %s %w", portRanges[0], one, cmp.Or(err, errors.New("occurs twice")))
		}
		ranges[first] = r.Last
	}
	if annotation(s, wantShare) != "" {
		return nil, fmt.Errorf("%s: a Service with ranges cannot share addresses; remove %s", portRanges[0],
			wantShare[0])
	}
	return ranges, nil
}

// checkRange returns an error if a range does not begin with a port of the Service, contains another one, or ends after
// the last target port.
func checkRange(s *core.Service, r lb.Port) error {
	begins := false
	for _, p := range s.Spec.Ports {
		port, ok := portOfSpec(p)
		first := port.Port == r.Port && port.Protocol == r.Protocol
		switch {
		case ok && first && p.TargetPort.IntValue()+int(r.Last-r.Port) > math.MaxUint16:
			return fmt.Errorf("ends after port %d of the pods", math.MaxUint16)
		case ok && first:
			begins = true
		case ok && port.Overlaps(r):
			return fmt.Errorf("contains port %s of the Service", portText(port))
		}
	}
	if !begins {
		return errors.New("does not begin with a port of the Service")
	}
	return nil
}

// portOfSpec returns a port of a Service, or false if its protocol is unknown.
func portOfSpec(p core.ServicePort) (port lb.Port, ok bool) {
	port.Port = uint16(p.Port)
	return port, port.Protocol.UnmarshalText([]byte(strings.ToLower(string(protocolOf(&p.Protocol))))) == nil
}

// parseRange parses text such as "8000-8999/UDP".
func parseRange(text string) (r lb.Port, ok bool) {
	ports, protocol, _ := strings.Cut(text, "/")
	first, last, _ := strings.Cut(ports, "-")
	from, err := strconv.ParseUint(first, 10, 16)
	to, errTo := strconv.ParseUint(last, 10, 16)
	r.Port, r.Last = uint16(from), uint16(to)
	return r, errors.Join(err, errTo, r.Protocol.UnmarshalText([]byte(strings.ToLower(protocol)))) == nil && to > from
}
