// Package metallb translates the configuration of MetalLB (v0.16) to Steelyard's.
//
// It reads IPAddressPool, L2Advertisement, BGPAdvertisement, BGPPeer, BFDProfile and Community objects and writes TOML.
// What has no equivalent becomes a comment beside the object that it concerns, which says what happens instead. Each
// field of these objects is known: another one becomes a comment as well, so nothing is lost unnoticed.
package metallb
