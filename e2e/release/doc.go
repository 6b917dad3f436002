// Release builds the files of a release from the tree it is in: static binaries, lists of their modules (CycloneDX) and
// the modules' licences, packages (deb and rpm), a container image, checksums and their signature. "make release" runs
// it.
//
// The same commit gives the same bytes, in any directory and on any machine: the version of Go is the one in go.mod,
// paths are trimmed, every time is the commit's, and nothing is taken from the machine, not even the certificates in
// the image.
package main
