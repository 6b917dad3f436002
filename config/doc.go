// Package config reads the configuration file of Steelyard: TOML in, a Config out that is typed, valid and has every
// default filled in. After Parse nobody sees what was written, only what it means.
//
// What holds:
//
//   - Everything that is wrong is told at once, each with its line, the path of its key, what is wrong and what would
//     be right. Only a text that is not TOML is an exception: its first error is the last that can be relied on.
//   - A file that would do something else than it seems to say is refused: an unknown key, a key that has no effect
//     where it is, a password file that is missing or empty, a check that looks at less than was asked for.
//   - What is legal and cannot have been meant is in Config.Warnings.
//   - Nothing is announced that was not given to us: pools do not overlap, contain no address of a machine named in
//     the file, and an aggregate never has more addresses than the pools; there is no way to write a default route.
//   - A Secret does not print.
//
// It does not know what runs: it reads no interface, route or host name, and opens no file but the configuration and
// the secret files it names. What is to be found out from the machine is left zero and says so. It imports lb for the
// words of the model, so that "allowed: …" in an error is always the real list.
//
// # Files
//
// config.go has the result, section by section. Each section is read by one function in validate_<section>.go, from a
// table (decode.go), which is what was written together with where it was written. The reader of a section names each
// key once, with its type, default and range; so the keys it names are the keys that exist, and what is left over is
// unknown. That is why there are no structs for the raw file beside those of the result: they would say the names a
// second time and could say neither the line nor all errors. reference.toml has every key with its default, and a test
// holds it to that.
//
// # Choices
//
// Lines come from an own scanner (position.go says why). Its answer is compared with the parser's list of keys by a
// fuzz test.
//
// A timeout that is not given is at most the interval, so that a short interval is enough.
//
// A service without a TCP port must say how it is checked. The default, a TCP connect, would find all its backends dead;
// to send it an empty datagram would too, for most servers do not answer that; and to take all for alive unasked would
// announce what is dead. One word decides: check = "none" is short for check = { type = "none" }.
//
// A check without a port probes the first port of its service that its type can probe (lb.CheckSpec.ServicePort): the
// first udp port for udp and dns, the first tcp port for every other type.
//
// dsr and tunnel deliver the packet as the client sent it, so they refuse a port mapping rather than ignore it.
//
// File names that are not absolute are relative to the directory of the configuration file.
package config
