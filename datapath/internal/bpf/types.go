// Package bpf contains the programs and maps of the datapath as the C code defines them. It converts between C and Go
// types.
package bpf

// bpf2go prefixes all names with the stem of its files. These names omit the prefix.
type (
	Addr        = SyAddr
	AddrKind    = SyAddrKind
	Algorithm   = SyAlgorithm
	AllowKey    = SyAllowKey
	Backend     = SyBackend
	ClientFlow  = SyClientFlow
	ClientKey   = SyClientKey
	Collector   = SyCollector
	DSRFlow     = SyDsrFlow
	Explained   = SyExplained
	Figures     = SyFlowFigures
	Fin         = SyFin
	Flow        = SyFlow
	FlowKey     = SyFlowKey
	FlowState   = SyFlowState
	Frontend    = SyFrontend
	FrontendKey = SyFrontendKey
	GCItem      = SyGcItem
	GCList      = SyGcList
	GCTable     = SyGcTable
	Handshakes  = SyHandshakes
	MemberKey   = SyMemberKey
	Method      = SyMethod
	Objects     = SyObjects
	PMTU        = SyPmtu
	PlaceLine   = SyPlaceLine
	Probe       = SyProbe
	SockFlow    = SySockFlow
	RangeKey    = SyRangeKey
	Relay       = SyRelay
	ServerFlow  = SyServerFlow
	ServerKey   = SyServerKey
	Table       = SyTable
	Traffic     = SyTraffic
	TunnelKeys  = SyTunnelKeys
	Tuple       = SyTuple
	Uplink      = SyUplink
	VIP         = SyVip
	Verdict     = SyVerdict
)

// Enumerators of AddrKind.
const (
	AddrBackend = SyAddrKindADDR_BACKEND
	AddrOwn     = SyAddrKindADDR_OWN
	AddrVIP     = SyAddrKindADDR_VIP
)

// Enumerators of Algorithm.
const (
	AlgorithmFlowHash   = SyAlgorithmALGORITHM_FLOW_HASH
	AlgorithmLeastConn  = SyAlgorithmALGORITHM_LEAST_CONN
	AlgorithmRandom     = SyAlgorithmALGORITHM_RANDOM
	AlgorithmRoundRobin = SyAlgorithmALGORITHM_ROUND_ROBIN
	AlgorithmSourceHash = SyAlgorithmALGORITHM_SOURCE_HASH
)

// Enumerators of Fin.
const (
	FinAcknowledged = SyFinFIN_ACKNOWLEDGED
	FinFirst        = SyFinFIN_FIRST
	FinOver         = SyFinFIN_OVER
	FinSecond       = SyFinFIN_SECOND
)

// DoubtReset is an enumerator of SyFlowDoubt.
const DoubtReset = SyFlowDoubtDOUBT_RESET

// Enumerators of FlowState.
const (
	FlowClosed      = SyFlowStateFLOW_CLOSED
	FlowClosing     = SyFlowStateFLOW_CLOSING
	FlowEstablished = SyFlowStateFLOW_ESTABLISHED
	FlowHalfOpen    = SyFlowStateFLOW_HALF_OPEN
)

// Enumerators of GCTable.
const (
	GCHalfOpen = SyGcTableGC_HALF_OPEN
	GCStream   = SyGcTableGC_STREAM
	GCUDP      = SyGcTableGC_UDP
)

// Enumerators of Method.
const (
	MethodDSR  = SyMethodMETHOD_DSR
	MethodGUE  = SyMethodMETHOD_GUE
	MethodIPIP = SyMethodMETHOD_IPIP
	MethodNAT  = SyMethodMETHOD_NAT
)
