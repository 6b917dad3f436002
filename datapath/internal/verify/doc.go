// Package verify checks with synthetic packets that clients of each VIP are answered. It repairs what other software
// changed, and reports what it cannot repair. It also explains what happens to a packet.
package verify
