// Package config parses Steelyard's configuration file from TOML into a Config, which is typed, valid and has every
// default filled in. No other code parses the text.
//
// Guarantees:
//
//   - All errors are reported at once, each with its line, the path of its key, the problem and a hint. If the text is
//     not TOML, only the first error is reported, because nothing after it is reliable.
//   - A file that would not do what it seems to say is rejected: an unknown key, a key without effect in its section, a
//     missing or empty password file, a check key that the check type does not use.
//   - Legal but useless settings are reported in Config.Warnings.
//   - Only the operator's addresses can be announced: pools neither overlap nor contain addresses of machines in the
//     file, an aggregate covers only addresses of pools, and a default route cannot be configured.
//   - A Secret never prints its value.
//
// The result depends only on the files. The package reads no interface, route or host name, and opens no file except
// the configuration and the secret files it names. Values to be derived from the machine stay zero. Enumerations come
// from lb, so "allowed: …" in an error is always complete.
//
// # Files
//
// config.go defines the result, section by section. One function in validate_<section>.go reads each section from a
// table (decode.go) of parsed values with their positions. It names each key once, with its type, default and range;
// any other key is unknown. There are no structs for the raw file: they would repeat the keys and could provide neither
// line numbers nor all errors. reference.toml has every key with its default; a test compares it with the code.
//
// # Choices
//
// Line numbers come from this package's own scanner (position.go explains why). A fuzz test compares its keys with the
// parser's.
//
// A reload decodes only the services whose text has changed (after.go), because TOML takes 50 µs per service. This is
// correct only if the text is cut where the parser would see a table, so whatever is unusual is decoded as a whole, and
// a fuzz test compares the results.
//
// The default timeout is at most the interval, so that a short interval needs no further key.
//
// A service without a TCP port must name the type of its check. The default, a TCP connection, would always fail, and
// so would an empty datagram, because most servers do not reply to it. Without a check, a failed service would stay
// announced. check = "none" is short for check = { type = "none" }.
//
// A check without a port probes every port of its service that its type can probe: udp ports for udp and dns, all ports
// for exec, tcp ports for every other type. lb.CheckSpec.ServicePort is the first of them; the others are secondary.
//
// dsr and tunnel deliver packets as clients sent them, so they do not allow port mappings.
//
// Relative file names are relative to the directory of the configuration file.
package config
