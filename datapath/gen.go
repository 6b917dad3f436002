package datapath

// The object is committed, so building needs only Go. Debian's clang-14 compiles it with vendored headers (-nostdinc),
// so it is the same on every host.
//go:generate go tool bpf2go -cc clang-14 -strip llvm-strip-14 -target bpfel -output-dir internal/bpf -go-package bpf -output-stem sy -type frontend_key -type frontend -type range_key -type allow_key -type slot_line -type table -type backend -type next_hop -type member_key -type affinity -type probe -type sock_flow -type pmtu -type uplink -type vip -type tunnel_keys -type addr -type tuple -type flow_key -type flow -type flow_figures -type client_key -type server_key -type client_flow -type server_flow -type dsr_flow -type flow_state -type fin -type flow_doubt -type method -type algorithm -type addr_kind -type collector -type place_line -type gc_list -type gc_item -type gc_table -type relay -type reason -type action -type verdict -type explained -type traffic -type handshakes Sy bpf/steelyard.bpf.c -- -nostdinc -isystem bpf/include -O2 -g -Wall -Werror -Wpadded -mcpu=v3 -fdebug-prefix-map=$PWD=.

// The programs that trace packets.
//go:generate go tool bpf2go -cc clang-14 -strip llvm-strip-14 -target bpfel -output-dir internal/trace -go-package trace -output-stem tr -type trace_head -type trace_at tr bpf/trace.bpf.c -- -nostdinc -isystem bpf/include -O2 -g -Wall -Werror -Wpadded -mcpu=v3 -fdebug-prefix-map=$PWD=.
//go:generate go tool bpf2go -cc clang-14 -strip llvm-strip-14 -target bpfel -output-dir internal/trace -go-package trace -output-stem proxy -no-global-types proxy bpf/inside_trace.bpf.c -- -nostdinc -isystem bpf/include -O2 -g -Wall -Werror -Wpadded -mcpu=v3 -fdebug-prefix-map=$PWD=.
