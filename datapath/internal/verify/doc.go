// Package verify checks with synthetic packets that clients of each VIP are answered, repairs what others changed, and
// says what it cannot repair. It also explains what happens to a packet.
package verify
