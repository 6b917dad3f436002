// Package packets measures the datapath's programs with generated packets.
//
// Cost measures a program's time per packet with BPF_PROG_TEST_RUN. The programs are those that datapath.Open attaches,
// with flows opened by packets from both sides. Before each packet, a wrapper program restores the packet and sets the
// addresses of the next flow. The wrapper's own cost is measured in the same rounds and subtracted. The floor is a
// program that parses a packet, looks up the VIP, chooses a backend by hash and encapsulates, the minimum for a load
// balancer without flows.
//
// Live sends packets through hosts that forward them in different ways, and counts the arrivals.
package packets
