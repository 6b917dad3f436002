// Package config reads Steelyard's configuration file: TOML in, a Config out that is typed, valid and has every default
// filled in. After Parse no code sees the text of the file.
//
// Guarantees:
//
//   - All errors are reported at once, each with its line, the path of its key, the problem and a hint. The exception
//     is a text that is not TOML, because only its first error is reliable.
//   - A file whose effect differs from its apparent meaning is rejected: an unknown key, a key without effect where it
//     stands, a missing or empty password file, a check key that the check type does not use.
//   - Legal but useless settings are in Config.Warnings.
//   - Only the operator's addresses can be announced: pools do not overlap and contain no address that the file gives
//     to a machine, an aggregate never covers more addresses than the pools, and a default route cannot be configured.
//   - A Secret never prints its value.
//
// The result depends only on the files. The package reads no interface, route or host name, and opens no file except
// the configuration and the secret files it names. Values to be derived from the machine stay zero. The package imports
// lb for the model's enumerations, so that "allowed: …" in an error is always complete.
//
// # Files
//
// config.go defines the result, section by section. Each section is read by one function in validate_<section>.go, from
// a table (decode.go) of the parsed values and their positions. The reader of a section names each key once, with its
// type, default and range; keys that no reader names are unknown. That is why there are no structs for the raw file:
// they would repeat the keys, and could provide neither lines nor all errors. reference.toml has every key with its
// default; a test compares it with the code.
//
// # Choices
//
// Line numbers come from this package's own scanner (position.go explains why). A fuzz test compares it with the
// parser's keys.
//
// The default timeout is at most the interval, so that a short interval needs no further key.
//
// A service without a TCP port must name the type of its check. The default, a TCP connect, would always fail. So would
// an empty datagram, because most servers do not reply to it. Without a check, a failed service would be announced.
// check = "none" is short for check = { type = "none" }.
//
// A check without a port probes every port of its service that its type can probe: udp ports for udp and dns, all ports
// for exec, tcp ports for every other type. The first of them (lb.CheckSpec.ServicePort) decides about the others.
//
// dsr and tunnel deliver the packet as the client sent it, so they do not allow port mappings.
//
// Relative file names are relative to the directory of the configuration file.
package config
