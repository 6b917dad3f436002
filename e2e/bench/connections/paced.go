package connections

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"
)

// Clients open pace connections per second to one backend, whose host keeps TIME_WAIT state. A connect that takes
// longer than late has lost a packet, because a SYN is repeated after one second.
const (
	pace = 400
	late = 300 * time.Millisecond
)

// paced opens connections at a constant rate, and records the share that neither was late nor failed.
func (s *site) paced(d time.Duration) error {
	const keep = "net.ipv4.tcp_max_tw_buckets"
	if err := s.servers.Sysctl(map[string]string{keep: "262144"}); err != nil {
		return err
	}
	var (
		wg    sync.WaitGroup
		quick atomic.Int64
		tick  = time.NewTicker(time.Second / pace)
		n     = int(d.Seconds() * pace)
	)
	defer tick.Stop()
	for range n {
		<-tick.C
		wg.Go(func() {
			if took, err := s.request(); err == nil && took <= late {
				quick.Add(1)
			}
		})
	}
	wg.Wait()
	s.values[Quick] = append(s.values[Quick], float64(quick.Load())/float64(n))
	return s.servers.Sysctl(map[string]string{keep: "0"})
}

// request requests a page from a server that closes the connection first. It returns how long the connect took.
func (s *site) request() (took time.Duration, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	start := time.Now()
	c, err := s.client.Dial(ctx, "tcp", s.way.one+":80")
	if err != nil {
		return 0, err
	}
	took = time.Since(start)
	defer func() { err = errors.Join(err, c.Close()) }()
	if err := c.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
		return took, err
	}
	if _, err := fmt.Fprint(c, "GET / HTTP/1.0\r\n\r\n"); err != nil {
		return took, err
	}
	_, err = io.Copy(io.Discard, c)
	return took, err
}
