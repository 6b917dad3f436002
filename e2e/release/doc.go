// Release builds what a release consists of, from the tree in which it stands: static binaries, lists of their modules
// (CycloneDX), the licences of these, packages (deb and rpm), an image for containers, checksums and their signature.
// "make release" runs it.
//
// The same commit gives the same bytes, in any folder and on any machine: the version of Go is the one in go.mod, paths
// are trimmed, every time is that of the commit, and nothing is taken from the machine, not even the certificates in
// the image.
package main
