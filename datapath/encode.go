package datapath

import (
	"fmt"
	"slices"

	"github.com/steelyard-lb/steelyard/lb"
)

// encodeMethod returns the value of enum method (bpf/types.h).
func encodeMethod(m lb.Method, e lb.Encap) (syMethod, error) {
	switch {
	case m == lb.MethodNAT:
		return syMethodMETHOD_NAT, nil
	case m == lb.MethodDSR:
		return syMethodMETHOD_DSR, nil
	case m == lb.MethodTunnel && e == lb.EncapIPIP:
		return syMethodMETHOD_IPIP, nil
	case m == lb.MethodTunnel && e == lb.EncapGUE:
		return syMethodMETHOD_GUE, nil
	}
	return 0, fmt.Errorf("forward = %q with tunnel = %q is not supported by the datapath", m, e)
}

// decodeMethod is the inverse of encodeMethod, without the encapsulation.
func decodeMethod(word syMethod) lb.Method {
	switch word {
	case syMethodMETHOD_NAT:
		return lb.MethodNAT
	case syMethodMETHOD_DSR:
		return lb.MethodDSR
	}
	return lb.MethodTunnel
}

// encodeFrontend returns what the programs read of p.
func encodeFrontend(p *lb.FrontendPlan, id uint32) (f syFrontend, err error) {
	method, err := encodeMethod(p.Method, p.Encap)
	if err != nil {
		return f, err
	}
	algorithm := map[lb.Algorithm]syAlgorithm{
		lb.AlgorithmMaglev:           syAlgorithmALGORITHM_FLOW_HASH,
		lb.AlgorithmSourceHash:       syAlgorithmALGORITHM_SOURCE_HASH,
		lb.AlgorithmRandom:           syAlgorithmALGORITHM_RANDOM,
		lb.AlgorithmRoundRobin:       syAlgorithmALGORITHM_ROUND_ROBIN,
		lb.AlgorithmLeastConnections: syAlgorithmALGORITHM_LEAST_CONN,
	}[p.Algorithm]
	if algorithm == 0 {
		return f, fmt.Errorf("algorithm = %q is not supported by the datapath", p.Algorithm)
	}
	if p.Affinity != 0 && p.Algorithm == lb.AlgorithmMaglev {
		algorithm = syAlgorithmALGORITHM_SOURCE_HASH // all balancers select the same first backend for a client
	}
	if p.Method != lb.MethodNAT && p.Algorithm == lb.AlgorithmRandom {
		algorithm = syAlgorithmALGORITHM_FLOW_HASH // as even, and no flow depends on an entry that a flood can evict
	}
	return syFrontend{
		Id: id, Method: uint8(method), Algorithm: uint8(algorithm), FirstPort: swap(p.Port),
		Affinity: uint32(p.Affinity.Seconds()), Restricted: truth(len(p.Allow) > 0),
		DropWhenEmpty: truth(p.DropWhenEmpty), Chained: truth(p.NodeForwarding.Enabled),
		Local: truth(allLocal(p)), KeepSource: truth(p.KeepSource),
	}, nil
}

// allLocal reports whether all backends of a plan are on this node, and this node alone delivers.
func allLocal(p *lb.FrontendPlan) bool {
	remote := func(t lb.Target) bool { return !t.Local }
	return len(p.Targets) > 0 && !p.NodeForwarding.Enabled && !slices.ContainsFunc(p.Targets, remote)
}
