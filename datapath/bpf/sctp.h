/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Updates the checksum of SCTP (CRC32c, RFC 9260, appendix A) when the ports change. A CRC is linear, so the change
 * follows from the difference in the first four bytes and the length, and the packet is not read. */
#pragma once
#include <linux/types.h>

#define CRC32C 0x82f63b78 /* reflected */

/* crc32c_multiply multiplies two polynomials modulo the CRC's. The functions are not inlined, so that the verifier
 * checks their loops once. */
__attribute__((noinline)) __u32 crc32c_multiply(__u32 a, __u32 b)
{
	__u32 product = 0;

	for (int i = 0; i < 32; i++) {
		product ^= b & -(a >> 31);
		a <<= 1;
		b = (b >> 1) ^ (CRC32C & -(b & 1));
	}
	return product;
}

/* x to the power of 8 · 2^i */
static const __u32 crc32c_powers[16] = {
	0x00800000, 0x00008000, 0x82f63b78, 0x6ea2d55c, 0x18b8ea18, 0x510ac59a, 0xb82be955, 0xb8fdb1e7,
	0x88e56f72, 0x74c360a4, 0xe4172b16, 0x0d65762a, 0x35d73a62, 0x28461564, 0xbf455269, 0xe2ea32dc,
};

/* crc32c_change returns what to XOR into the checksum of a packet of this many bytes whose
 * first four changed by diff. */
__attribute__((noinline)) __u32 crc32c_change(__u32 diff, __u32 bytes)
{
	for (int i = 0; i < 16; i++)
		if (bytes >> i & 1)
			diff = crc32c_multiply(crc32c_powers[i], diff);
	return diff;
}
