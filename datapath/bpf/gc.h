/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Removal of NAT flows that the agent selected from copies of the entries. By the time the agent deletes a key, the key
 * may belong to another flow. So the program compares the entry with the copy right before deleting it. */
#pragma once
#include "flow.h"

static __always_inline int gc_remove_from(void *clients, void *servers, const struct gc_item *item, int udp,
					  __u32 ended, __u32 since)
{
	struct server_key k = item->key; /* Linux 6.1 wants a key on the stack */
	struct server_flow *s = bpf_map_lookup_elem(servers, &k);

	if (!s || s->backend != item->backend || s->f.generation != item->generation ||
	    (!ended && s->f.seen != item->seen))
		return 0;
	struct client_key client = s->client;
	struct client_flow *c = bpf_map_lookup_elem(clients, &client);

	if (c && c->backend == s->backend && c->sport == k.dport && c->dport == k.sport &&
	    addr_equal(c->source.w, k.to.w)) {
		if (!ended && udp && (__s32)(c->f.seen - since) > 0)
			return 0;
		bpf_map_delete_elem(clients, &client);
	}
	return !bpf_map_delete_elem(servers, &k);
}

/* gc_remove is not inlined, so that the verifier checks it once, and not for each item. */
__noinline int gc_remove(const struct gc_item *item, __u32 table, __u32 ended, __u32 since)
{
	if (!item)
		return 0;
	if (table == GC_HALF_OPEN)
		return gc_remove_from(&sy_halfopen_clients, &sy_halfopen_servers, item, 0, ended, since);
	if (table == GC_UDP)
		return gc_remove_from(&sy_udp_clients, &sy_udp_servers, item, 1, ended, since);
	return gc_remove_from(&sy_stream_clients, &sy_stream_servers, item, 0, ended, since);
}

/* gc_remove_all returns the number of removed flows. */
static __always_inline int gc_remove_all(const struct gc_list *l)
{
	int n = 0;

	for (int i = 0; i < GC_ITEMS; i++) {
		struct gc_item item = l->item[i];

		if ((__u32)i >= l->items)
			break;
		n += gc_remove(&item, l->table, l->ended, l->since);
	}
	return n;
}
