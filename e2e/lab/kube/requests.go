package kube

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// auditPolicy makes the API server record each request once, on arrival, except node heartbeats.
const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [ResponseStarted, ResponseComplete]
rules:
- {level: None, namespaces: [kube-node-lease], resources: [{group: coordination.k8s.io, resources: [leases]}]}
- {level: None, resources: [{resources: [nodes/status]}]}
- {level: Metadata}
`

// request is a line in the audit log.
type request struct {
	Verb, UserAgent          string
	User                     struct{ Username string }
	SourceIPs                []netip.Addr
	RequestReceivedTimestamp time.Time
	ObjectRef                struct{ Resource, Subresource, Name string }
}

// what returns the verb and the resource.
func (r request) what() string {
	return strings.TrimSuffix(r.Verb+" "+r.ObjectRef.Resource+"/"+r.ObjectRef.Subresource, "/")
}

// requests returns the requests that the API server has received.
func (c *ControlPlane) requests() (all []request, err error) {
	text, err := c.ReadFile(auditLog)
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(text) {
		var r request
		switch err := json.Unmarshal([]byte(line), &r); {
		case !strings.HasSuffix(line, "\n"): // still being written
		case err != nil:
			return nil, fmt.Errorf("%w in %s", err, line)
		default:
			all = append(all, r)
		}
	}
	return all, nil
}

// Requests counts the requests that the API server has received from a program on a host since a given time, by verb
// and resource.
func (c *ControlPlane) Requests(since time.Time, program string, from ...netip.Addr) (map[string]int, error) {
	all, err := c.requests()
	sum := map[string]int{}
	for _, r := range all {
		if strings.HasPrefix(r.UserAgent, program+"/") && !r.RequestReceivedTimestamp.Before(since) &&
			len(r.SourceIPs) > 0 && slices.Contains(from, r.SourceIPs[0]) {
			sum[r.what()]++
		}
	}
	return sum, err
}

// Objects returns the names of the objects for which a ServiceAccount in namespace steelyard has sent a request, such
// as "patch services/status".
func (c *ControlPlane) Objects(account, what string) ([]string, error) {
	all, err := c.requests()
	names := map[string]bool{}
	for _, r := range all {
		if r.User.Username == "system:serviceaccount:steelyard:"+account && r.what() == what {
			names[r.ObjectRef.Name] = true
		}
	}
	return slices.Sorted(maps.Keys(names)), err
}
