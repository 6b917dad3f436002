package lab

import (
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/mdlayher/packet"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// delayQueue is how many frames may be queued in each direction; others are lost.
const delayQueue = 1 << 14

// Delay adds a round-trip time to a client's link. It takes frames from the client's switch port and sends them half
// that time later, without netem. It can handle thousands of frames per second, but no floods.
func (t *Topology) Delay(client Node, roundTrip time.Duration) error {
	if err := t.delay(client, roundTrip/2); err != nil {
		return fmt.Errorf("delay the frames of %s: %w", client, err)
	}
	return nil
}

func (t *Topology) delay(client Node, d time.Duration) error {
	sw := t.ClientSwitch
	port, err := sw.nl.LinkByName(client.Port)
	if err != nil {
		return err
	}
	if err := sw.nl.LinkSetNoMaster(port); err != nil {
		return err
	}
	near, far := "near-"+client.Port, "far-"+client.Port
	err = t.Link(End{Host: sw, Name: near}, End{Host: sw, Name: far, Bridge: "switch"}, LinkOptions{})
	if err != nil {
		return err
	}
	// Frames from a packet socket need complete checksums.
	if err := errors.Join(client.SoftwareChecksums("eth0"), sw.SoftwareChecksums(far)); err != nil {
		return err
	}
	a, errA := sw.listenFrames(client.Port)
	b, errB := sw.listenFrames(near)
	if err := errors.Join(errA, errB); err != nil {
		return err
	}
	go copyFrames(b, a, d)
	go copyFrames(a, b, d)
	return nil
}

// listenFrames receives all frames that arrive on an interface. The socket is closed with the host.
func (h *Host) listenFrames(dev string) (c *packet.Conn, err error) {
	received, err := bpf.Assemble([]bpf.Instruction{
		bpf.LoadExtension{Num: bpf.ExtType},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.PACKET_OUTGOING, SkipTrue: 1},
		bpf.RetConstant{Val: 1 << 16},
		bpf.RetConstant{Val: 0},
	})
	if err != nil {
		return nil, err
	}
	err = h.Do(func() error {
		nic, err := net.InterfaceByName(dev)
		if err != nil {
			return err
		}
		if c, err = packet.Listen(nic, packet.Raw, unix.ETH_P_ALL, &packet.Config{Filter: received}); err != nil {
			return err
		}
		return c.SetPromiscuous(true)
	})
	if err != nil {
		return nil, err
	}
	return c, h.Own(c)
}

// copyFrames sends each frame d after its arrival, until a socket is closed.
func copyFrames(to, from *packet.Conn, d time.Duration) {
	type delayed struct {
		due   time.Time
		frame []byte
	}
	queue := make(chan delayed, delayQueue)
	go func() {
		defer close(queue)
		buf := make([]byte, 1<<16)
		for {
			n, _, err := from.ReadFrom(buf)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil {
				time.Sleep(10 * time.Millisecond) // the interface is down
				continue
			}
			select {
			case queue <- delayed{time.Now().Add(d), append([]byte(nil), buf[:n]...)}:
			default:
			}
		}
	}()
	for f := range queue {
		time.Sleep(time.Until(f.due))
		// A frame that cannot be sent is lost, as on a wire.
		_, _ = to.WriteTo(f.frame, &packet.Addr{HardwareAddr: net.HardwareAddr(f.frame[:6])})
	}
}
