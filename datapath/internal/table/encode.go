package table

import (
	"fmt"
	"slices"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb"
)

// EncodeMethod returns the value of enum method (bpf/types.h) for a method and encapsulation.
func EncodeMethod(m lb.Method, e lb.Encap) (bpf.Method, error) {
	switch {
	case m == lb.MethodNAT:
		return bpf.MethodNAT, nil
	case m == lb.MethodDSR:
		return bpf.MethodDSR, nil
	case m == lb.MethodTunnel && e == lb.EncapIPIP:
		return bpf.MethodIPIP, nil
	case m == lb.MethodTunnel && e == lb.EncapGUE:
		return bpf.MethodGUE, nil
	}
	return 0, fmt.Errorf("forward = %q with tunnel = %q is not supported by the datapath", m, e)
}

// DecodeMethod is the inverse of EncodeMethod but does not return the encapsulation.
func DecodeMethod(word bpf.Method) lb.Method {
	switch word {
	case bpf.MethodNAT:
		return lb.MethodNAT
	case bpf.MethodDSR:
		return lb.MethodDSR
	}
	return lb.MethodTunnel
}

// encodeFrontend returns the fields of p that the programs read.
func encodeFrontend(p *lb.FrontendPlan, id uint32) (f bpf.Frontend, err error) {
	method, err := EncodeMethod(p.Method, p.Encap)
	if err != nil {
		return f, err
	}
	algorithm := map[lb.Algorithm]bpf.Algorithm{
		lb.AlgorithmMaglev:           bpf.AlgorithmFlowHash,
		lb.AlgorithmSourceHash:       bpf.AlgorithmSourceHash,
		lb.AlgorithmRandom:           bpf.AlgorithmRandom,
		lb.AlgorithmRoundRobin:       bpf.AlgorithmRoundRobin,
		lb.AlgorithmLeastConnections: bpf.AlgorithmLeastConn,
	}[p.Algorithm]
	if algorithm == 0 {
		return f, fmt.Errorf("algorithm = %q is not supported by the datapath", p.Algorithm)
	}
	if p.Affinity != 0 && p.Algorithm == lb.AlgorithmMaglev {
		algorithm = bpf.AlgorithmSourceHash // all balancers select the same first backend for a client
	}
	if p.Method != lb.MethodNAT && p.Algorithm == lb.AlgorithmRandom {
		algorithm = bpf.AlgorithmFlowHash // equally even, and no flow needs an entry that a flood can evict
	}
	return bpf.Frontend{
		Id: id, Method: uint8(method), Algorithm: uint8(algorithm), FirstPort: bpf.Swap(p.Port),
		Affinity: uint32(p.Affinity.Seconds()), Restricted: bpf.Truth(len(p.Allow) > 0),
		DropWhenEmpty: bpf.Truth(p.DropWhenEmpty), Chained: bpf.Truth(p.NodeForwarding.Enabled),
		Local: bpf.Truth(allLocal(p)), KeepSource: bpf.Truth(p.KeepSource),
		LocalClients: bpf.Truth(BalancesSockets(p)),
	}, nil
}

// BalancesSockets reports whether this machine's own connections to a frontend are balanced.
func BalancesSockets(p *lb.FrontendPlan) bool {
	return p.LocalClients && p.Method == lb.MethodNAT && p.Protocol == lb.TCP
}

// allLocal reports whether all of a plan's backends are on this node, and only this node delivers its packets.
func allLocal(p *lb.FrontendPlan) bool {
	remote := func(t lb.Target) bool { return !t.Local }
	return len(p.Targets) > 0 && !p.NodeForwarding.Enabled && !slices.ContainsFunc(p.Targets, remote)
}
