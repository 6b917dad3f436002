package kube

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// auditPolicy makes the API server record each request once, when it arrives, but no heartbeats of nodes.
const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [ResponseStarted, ResponseComplete]
rules:
- {level: None, namespaces: [kube-node-lease], resources: [{group: coordination.k8s.io, resources: [leases]}]}
- {level: None, resources: [{resources: [nodes/status]}]}
- {level: Metadata}
`

// Requests returns the number of requests that the API server has received from a program on a host since a time, by
// verb and resource.
func (c *ControlPlane) Requests(since time.Time, program string, from ...netip.Addr) (map[string]int, error) {
	text, err := c.ReadFile(auditLog)
	if err != nil {
		return nil, err
	}
	sum := map[string]int{}
	for line := range strings.Lines(text) {
		var r struct {
			Verb, UserAgent          string
			SourceIPs                []netip.Addr
			RequestReceivedTimestamp time.Time
			ObjectRef                struct{ Resource, Subresource string }
		}
		switch err := json.Unmarshal([]byte(line), &r); {
		case !strings.HasSuffix(line, "\n"): // it is being written
		case err != nil:
			return nil, fmt.Errorf("%w in %s", err, line)
		case strings.HasPrefix(r.UserAgent, program+"/") && !r.RequestReceivedTimestamp.Before(since) &&
			len(r.SourceIPs) > 0 && slices.Contains(from, r.SourceIPs[0]):
			sum[strings.TrimSuffix(r.Verb+" "+r.ObjectRef.Resource+"/"+r.ObjectRef.Subresource, "/")]++
		}
	}
	return sum, nil
}
