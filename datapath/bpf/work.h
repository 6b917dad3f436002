/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What the steps of one packet's way hand to each other. */
#pragma once
#include "parse.h"

/* What one packet is worked on with. It is too much for the stack, which ends at 512 bytes; programs of one CPU do not
 * interrupt each other. */
struct work {
	struct pkt p;
	struct verdict v;
	enum reason parsed;
	struct bpf_fib_lookup fib;
	struct inside in; /* of a packet that came out of a tunnel */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__uint(value_size, sizeof(struct work)); /* Go need not know it */
	__uint(max_entries, 1);
} works SEC(".maps");

/* Functions that are not static are verified once, and not again for each way that leads to them. They cannot be given
 * pointers into the packet, so they begin with what the others have left here. */
static __always_inline struct work *work(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&works, &zero);
}

/* begin returns the work on a new packet. */
static __always_inline struct work *begin(__u32 len)
{
	struct work *w = work();

	if (!w)
		return 0;
	__builtin_memset(w, 0, sizeof(w->p) + sizeof(w->v));
	w->p.len = len;
	return w;
}
