/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Removal of NAT flows that the agent selected from copies of the entries. By the time the agent deletes a key, the key
 * may belong to another flow. So the program compares the entry with the copy right before deleting it. */
#pragma once
#include "flow.h"

static __always_inline int gc_remove(void *clients, void *servers, const struct gc_list *l, const struct gc_item *item)
{
	struct server_key k = item->key;
	struct server_flow *s = bpf_map_lookup_elem(servers, &k);

	if (!s || s->backend != item->backend || s->f.generation != item->generation ||
	    (!l->ended && s->f.seen != item->seen))
		return 0;
	struct client_key client = s->client;
	struct client_flow *c = bpf_map_lookup_elem(clients, &client);

	if (c && c->backend == s->backend && c->sport == k.dport && c->dport == k.sport &&
	    addr_equal(c->source.w, k.to.w)) {
		if (!l->ended && l->table == GC_UDP && (__s32)(c->f.seen - l->since) > 0)
			return 0;
		bpf_map_delete_elem(clients, &client);
	}
	return !bpf_map_delete_elem(servers, &k);
}

/* gc_remove_all returns the number of removed flows. */
static __always_inline int gc_remove_all(const struct gc_list *l)
{
	int n = 0;

	for (int i = 0; i < GC_ITEMS; i++) {
		const struct gc_item *item = &l->item[i];

		if ((__u32)i >= l->items)
			break;
		if (l->table == GC_HALF_OPEN)
			n += gc_remove(&sy_halfopen_clients, &sy_halfopen_servers, l, item);
		else if (l->table == GC_UDP)
			n += gc_remove(&sy_udp_clients, &sy_udp_servers, l, item);
		else
			n += gc_remove(&sy_stream_clients, &sy_stream_servers, l, item);
	}
	return n;
}
