package lb

import (
	"fmt"
	"net/netip"
	"strings"
)

// AssignCause says why an address is not assigned.
type AssignCause uint8

const (
	NoSuchPool         AssignCause = iota + 1 // Pools[0] does not exist
	PoolNotAllowed                            // the service may not use Pools[0], which it requests
	NoPool                                    // the service requests no pool and may not use any AutoAssign pool
	NoFreeAddress                             // Pools have no free address of Family
	AddrInNoPool                              // the requested Addr is in no pool
	AddrNotAllowed                            // Addr is in Pools[0], which the service may not use
	AddrInUse                                 // Service holds Addr and shares it only with services with its ShareKey
	NotSharedWith                             // Service holds Addr and does not share it with this namespace
	PortInUse                                 // Service holds Addr and also has Port, so they can never share it
	FamilyNotRequested                        // the service does not need an address of Addr's family
)

// AssignError says why a request fails. Fields that its Cause does not mention are zero.
type AssignError struct {
	Cause   AssignCause
	Addr    netip.Addr
	Family  Family
	Pools   []string
	Service string
	Port    Port
}

func (e *AssignError) Error() string {
	switch e.Cause {
	case NoSuchPool:
		return fmt.Sprintf("there is no pool %.200q", e.Pools[0])
	case PoolNotAllowed:
		return fmt.Sprintf("the pool %q does not permit this service", e.Pools[0])
	case NoPool:
		return "no pool has auto_assign = true"
	case NoFreeAddress:
		return fmt.Sprintf("no free %s address in %s", e.Family, strings.Join(e.Pools, ", "))
	case AddrInNoPool:
		return fmt.Sprintf("%s is in no pool", e.Addr)
	case AddrNotAllowed:
		return fmt.Sprintf("%s is in the pool %q, which does not permit this service", e.Addr, e.Pools[0])
	case AddrInUse, NotSharedWith:
		return fmt.Sprintf("%s belongs to %s", e.Addr, e.Service)
	case PortInUse:
		return fmt.Sprintf("%s belongs to %s, and cannot be shared with it because both have port %s",
			e.Addr, e.Service, e.Port.Name())
	case FamilyNotRequested:
		return fmt.Sprintf("%s is requested, but the service has no such family", e.Addr)
	}
	panic(fmt.Sprintf("lb: unknown cause %d of an assignment error", e.Cause))
}
