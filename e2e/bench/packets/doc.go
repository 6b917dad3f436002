// Package packets measures the programs of the datapath with packets of its own.
//
// Cost measures the time that a program takes for a packet, by BPF_PROG_TEST_RUN. The programs are those that
// datapath.Open attaches, with flows that packets of both sides opened. Before each packet a wrapper program restores
// the packet and gives it the addresses of the next flow; its own cost is measured in the same rounds and subtracted.
// The floor is a program that parses a packet, looks up the VIP, chooses a backend by a hash and encapsulates: the
// least that a load balancer without flows does.
//
// Live sends packets through hosts that forward them in different ways, and counts those that arrive.
package packets
