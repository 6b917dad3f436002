package packets

import (
	"encoding/binary"
	"fmt"
	"runtime"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
)

// vary says what differs between a run's packets, as in bpf/wrap.bpf.c.
type vary uint32

const (
	varyNone vary = iota
	varyClient
	varyServer
	varyRecorded
)

const (
	xdpDrop, xdpPass, xdpTX      = 1, 2, 3
	tcUnspec, tcShot, tcRedirect = 0xffffffff, 2, 7
	strideOpen, strideMeasure    = 0x85ebca6b, 0x9e3779b1 // odd, so that each flow occurs
)

// packets describes the packets of a run.
type packets struct {
	frame    dptest.Packet
	ipAt     int // offset of the IP header whose addresses vary; 0 for the first
	vary     vary
	services int // if more than 1, packets for as many VIPs
	record   bool
}

// wrapper runs a program with a sequence of packets.
type wrapper struct {
	n     *node // nil if the program accesses no maps of a node
	hook  string
	objs  wrapObjects
	frame []byte
}

// newWrapper loads the wrapper program. recorded may be nil.
func newWrapper(n *node, hook string, p packets, recorded *ebpf.Map) (*wrapper, error) {
	spec, err := loadWrap()
	if err != nil {
		return nil, err
	}
	frame := padded(p.frame)
	words := make([]uint64, 16)
	for i := range len(frame) / 8 {
		words[i] = binary.NativeEndian.Uint64(frame[8*i:])
	}
	if p.ipAt == 0 {
		p.ipAt = outerAt
	}
	for name, value := range map[string]any{
		"frame": words, "frame_words": uint32(len(frame) / 8), "frame_len": uint32(len(frame)),
		"ip_at": uint32(p.ipAt), "csum_at": checksumAt(p), "vary": uint32(p.vary), "services": uint32(p.services),
		"is_v6": p.frame.Src.Addr().Is6(), "record": p.record,
	} {
		if err := spec.Variables[name].Set(value); err != nil {
			return nil, fmt.Errorf("set %s: %w", name, err)
		}
	}
	o := &ebpf.CollectionOptions{}
	if recorded != nil {
		spec.Maps["recorded"].MaxEntries = recorded.MaxEntries()
		o.MapReplacements = map[string]*ebpf.Map{"recorded": recorded}
	}
	w := &wrapper{n: n, hook: hook, frame: frame}
	if err := spec.LoadAndAssign(&w.objs, o); err != nil {
		return nil, fmt.Errorf("load the wrapper: %w", err)
	}
	return w, nil
}

// checksumAt returns the offset of the checksum that depends on the varying addresses. Tunnelled packets are TCP.
func checksumAt(p packets) uint32 {
	if p.frame.Proto == dptest.UDP && p.ipAt == outerAt {
		return 6
	}
	return 16
}

// padded returns p's frame, padded to a multiple of 8 bytes. It adds no payload, because data that repeats counts as a
// retransmission.
func padded(p dptest.Packet) []byte {
	frame := p.Frame()
	for len(frame)%8 != 0 {
		frame = append(frame, 0)
	}
	return frame
}

// flows selects the flows of the next run.
type flows struct{ base, within, stride, mask uint32 }

func (w *wrapper) set(f flows) error {
	for v, value := range map[*ebpf.Variable]uint32{
		w.objs.Base: f.base, w.objs.Within: f.within, w.objs.Stride: f.stride, w.objs.Mask: f.mask, w.objs.N: 0,
		w.objs.Last: ^uint32(0),
	} {
		if err := v.Set(value); err != nil {
			return err
		}
	}
	return nil
}

// null returns a program that does nothing.
func (w *wrapper) null() *ebpf.Program {
	if w.hook == hookXDP {
		return w.objs.NullXdp
	}
	return w.objs.NullTc
}

// run runs a program with n packets. It returns the time per packet in nanoseconds, the last result, and the last
// packet.
func (w *wrapper) run(prog *ebpf.Program, n int) (ns float64, ret uint32, out []byte, err error) {
	chain := w.objs.MeasuredTc
	if w.hook == hookXDP {
		chain = w.objs.MeasuredXdp
	}
	if err := chain.Put(uint32(0), prog); err != nil {
		return 0, 0, nil, fmt.Errorf("tail-call the program: %w", err)
	}
	if w.n == nil {
		return w.testRun(0, n)
	}
	err = w.n.host.Do(func() (err error) {
		ns, ret, out, err = w.testRun(w.n.index, n)
		return err
	})
	return ns, ret, out, err
}

// testRun measures this thread's CPU time, which excludes other threads. The kernel's own result is in whole
// nanoseconds.
func (w *wrapper) testRun(ingress uint32, n int) (ns float64, ret uint32, out []byte, err error) {
	o := ebpf.RunOptions{Data: w.frame, DataOut: make([]byte, len(w.frame)+256), Repeat: uint32(n)}
	wrap := w.objs.WrapTc
	if w.hook == hookXDP {
		wrap = w.objs.WrapXdp
		o.Context = xdpContext(w.frame, ingress)
	} else {
		skb := make([]byte, 192) // struct __sk_buff
		const ifindex = 40
		binary.NativeEndian.PutUint32(skb[ifindex:], ingress)
		o.Context = skb
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	before := threadTime()
	ret, err = wrap.Run(&o)
	took := threadTime() - before
	return float64(took) / float64(n), ret, o.DataOut, err
}

// xdpMd is struct xdp_md.
type xdpMd struct{ Data, DataEnd, DataMeta, Ingress, Queue, Egress uint32 }

func xdpContext(frame []byte, ingress uint32) xdpMd {
	return xdpMd{DataEnd: uint32(len(frame)), Ingress: ingress}
}

func threadTime() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		panic(err) // the arguments are constant
	}
	return time.Duration(t.Nano())
}
