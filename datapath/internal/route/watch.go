package route

import (
	"fmt"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/netwatch"
	"golang.org/x/sys/unix"
)

// Changes says what may have changed in this node's network.
type Changes struct{ Links, Routes bool }

func (c *Changes) Add(more Changes) {
	c.Links, c.Routes = c.Links || more.Links, c.Routes || more.Routes
}

// Groups lists the notifications to subscribe to: links, addresses, routes and their next hops, rules, and interface
// settings.
var Groups = []uint{
	unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_IPV4_ROUTE,
	unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE, unix.RTNLGRP_IPV4_NETCONF,
	unix.RTNLGRP_IPV6_NETCONF, unix.RTNLGRP_NEXTHOP,
}

// ChangesOf says what a notification is about. nil, for lost ones, is about everything.
func ChangesOf(m *netwatch.Message) Changes {
	if m == nil {
		return Changes{Links: true, Routes: true}
	}
	link := m.Header.Type == unix.RTM_NEWLINK || m.Header.Type == unix.RTM_DELLINK
	return Changes{Links: link, Routes: !link}
}

// Tick is the interval between checks of the network when no change is reported.
const Tick = 250 * time.Millisecond

// Shortage returns an error if this process lacks the descriptors or memory to read the state of the network. In that
// case a verification would report faults that do not exist, so the previous results stay.
func Shortage() error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("read the network state: %w", err)
	}
	return unix.Close(fd)
}
