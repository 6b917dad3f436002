// Release builds the files of a release from its source tree: static binaries, lists of their modules (CycloneDX) and
// the modules' licences, packages (deb and rpm), a container image, checksums and their signature. "make release" runs
// it.
//
// The same commit gives the same bytes, in any directory and on any machine: the Go version comes from go.mod, paths
// are trimmed, every time is the commit's, and nothing comes from the machine, not even the image's certificates.
package main
