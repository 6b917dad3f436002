package route

import (
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Kernel keeps a netlink socket open for requests that are repeated each second. Opening and closing one for each
// request takes more time than the request. The zero value is ready to use; a nil Kernel opens a socket for each
// request.
type Kernel struct {
	mu     sync.Mutex // guards handle
	handle *netlink.Handle
}

// Handle returns the handle of the network namespace in which it was called first. If no socket can be opened, the
// handle opens one for each request.
func (k *Kernel) Handle() *netlink.Handle {
	if k == nil {
		return new(netlink.Handle)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.handle == nil {
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err == nil {
			err = h.SetSocketTimeout(netlink.GetSocketTimeout())
		}
		if err != nil {
			return new(netlink.Handle)
		}
		k.handle = h
	}
	return k.handle
}

// Close closes the socket.
func (k *Kernel) Close() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.handle != nil {
		k.handle.Close()
		k.handle = nil
	}
}
