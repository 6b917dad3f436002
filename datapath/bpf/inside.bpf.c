// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//go:build ignore
/* Entry points of the service proxy, an object of its own. They contain no logic. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include "inside_act.h"
#include "inside_sock.h"

/* Types that Go reads from BTF but no map uses. Their layout does not matter. */
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpadded"
volatile const struct in_exported {
	enum in_scope scope;
	enum in_place place;
	enum in_way way;
	enum in_kind kind;
	enum in_mode mode;
} in_exported = {};
#pragma clang diagnostic pop

/* Ingress of the devices that lead to pods and to other machines. */
SEC("tc")
int sy_in_arrive(struct __sk_buff *skb)
{
	return in_steps_arrive(skb, in_device_of(skb->ifindex));
}

/* Egress of these devices. */
SEC("tc")
int sy_in_leave(struct __sk_buff *skb)
{
	return in_steps_leave(skb, in_device_of(skb->ifindex));
}

/* Egress of the routed device. */
SEC("tc")
int sy_in_send(struct __sk_buff *skb)
{
	return in_steps_send(skb);
}

/* System calls of this node's processes, by their names. */
SEC("cgroup/connect4")
int sy_in_connect4(struct bpf_sock_addr *ctx)
{
	return in_sock_send4(ctx);
}

SEC("cgroup/connect6")
int sy_in_connect6(struct bpf_sock_addr *ctx)
{
	return in_sock_send6(ctx);
}

SEC("cgroup/sendmsg4")
int sy_in_sendmsg4(struct bpf_sock_addr *ctx)
{
	return in_sock_send4(ctx);
}

SEC("cgroup/sendmsg6")
int sy_in_sendmsg6(struct bpf_sock_addr *ctx)
{
	return in_sock_send6(ctx);
}

SEC("cgroup/recvmsg4")
int sy_in_recvmsg4(struct bpf_sock_addr *ctx)
{
	return in_sock_receive4(ctx);
}

SEC("cgroup/recvmsg6")
int sy_in_recvmsg6(struct bpf_sock_addr *ctx)
{
	return in_sock_receive6(ctx);
}

SEC("cgroup/getpeername4")
int sy_in_peer4(struct bpf_sock_addr *ctx)
{
	return in_sock_receive4(ctx);
}

SEC("cgroup/getpeername6")
int sy_in_peer6(struct bpf_sock_addr *ctx)
{
	return in_sock_receive6(ctx);
}

char _license[] SEC("license") = "Dual BSD/GPL";
