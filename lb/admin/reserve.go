package admin

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// reserved is a unix socket that accepts a client even when the process is out of file descriptors, because the status
// says why the node does not work. It reserves a descriptor for that client, and takes it back when the client has
// gone.
type reserved struct {
	*net.UnixListener
	made  os.FileInfo // of the path when it was created
	mu    sync.Mutex  // guards spare
	spare *os.File    // nil if a client has it, or if there was no descriptor to take
}

func newReserved(l *net.UnixListener, made os.FileInfo) *reserved {
	r := &reserved{UnixListener: l, made: made}
	r.take()
	return r
}

// Accept implements net.Listener. After a temporary error the server retries within a second.
func (r *reserved) Accept() (net.Conn, error) {
	c, err := r.UnixListener.Accept()
	if !errors.Is(err, syscall.EMFILE) && !errors.Is(err, syscall.ENFILE) {
		return c, err
	}
	r.take()
	// accept(2) also fails for lack of descriptors when nobody connects.
	if !r.pending() || !r.give() {
		return nil, err
	}
	if c, err = r.UnixListener.Accept(); err != nil {
		r.take()
		return nil, err
	}
	return &reservedConn{c, r.take}, nil
}

// pending reports whether a client is waiting to be accepted.
func (r *reserved) pending() (is bool) {
	raw, err := r.SyscallConn()
	if err != nil {
		return false
	}
	err = raw.Control(func(fd uintptr) {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, _ := unix.Poll(p, 0) // without a result the server retries
		is = n > 0
	})
	return is && err == nil
}

// take reserves a descriptor if one is free.
func (r *reserved) take() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.spare == nil {
		r.spare, _ = os.Open(os.DevNull) // retried at the next shortage
	}
}

// give frees the reserved descriptor, and returns false if there is none.
func (r *reserved) give() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.spare == nil {
		return false
	}
	r.spare.Close()
	r.spare = nil
	return true
}

// lost says why clients cannot find the socket by its path, or returns nil if they can. An inode number is not reused
// while the socket is open.
func (r *reserved) lost() error {
	now, err := os.Lstat(r.Addr().String())
	switch {
	case err != nil:
		return fmt.Errorf("the socket was removed: %w", err)
	case !os.SameFile(r.made, now):
		return errors.New("the socket was replaced")
	}
	return nil
}

// Close implements net.Listener. It removes the path, but not another agent's socket.
func (r *reserved) Close() error {
	r.give()
	r.SetUnlinkOnClose(r.lost() == nil)
	return r.UnixListener.Close()
}

// reservedConn is the connection of a client that uses the reserved descriptor.
type reservedConn struct {
	net.Conn
	take func()
}

func (c *reservedConn) Close() error {
	defer c.take()
	return c.Conn.Close()
}
