/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* State that the steps for one packet share. */
#pragma once
#include "parse.h"

/* State of one packet. It does not fit on the stack of 512 bytes. Programs do not interrupt each other on a CPU. */
struct scratch {
	struct pkt p;
	struct verdict v;
	enum reason parsed;
	struct bpf_fib_lookup fib;
	struct decap_ctx in; /* for a decapsulated packet */
	struct client_flow client; /* entries that commit writes */
	struct server_flow server;
	__u32 headers[28]; /* new headers: a tunnel's, or an ICMP error's with its quote */
};

/* State of the current packet, per CPU. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__uint(value_size, sizeof(struct scratch)); /* without a type, because Go does not need it */
	__uint(max_entries, 1);
} sy_scratch SEC(".maps");

/* The verifier checks a global function once rather than per call path. Such a function takes no packet pointers, so it
 * begins with the state that previous steps stored here. */
static __always_inline struct scratch *scratch_get(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&sy_scratch, &zero);
}

/* scratch_begin returns the cleared state for a new packet. */
static __always_inline struct scratch *scratch_begin(__u32 len)
{
	struct scratch *s = scratch_get();

	if (!s)
		return 0;
	__builtin_memset(&s->p, 0, sizeof(s->p));
	/* The addresses of the chain are written before they are read. */
	__builtin_memset(&s->v, 0, __builtin_offsetof(struct verdict, chain));
	s->v.chain.n = s->v.chain.passed = 0;
	s->p.len = len;
	return s;
}
