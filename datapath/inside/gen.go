package inside

// The object is committed, like the one of package datapath.
//go:generate go tool bpf2go -cc clang-14 -strip llvm-strip-14 -target bpfel -output-dir internal/prog -go-package prog -output-stem in -type in_service_key -type in_service -type in_endpoint_key -type in_endpoint -type in_member_key -type in_affinity_key -type in_affinity -type in_flow_key -type in_flow -type in_device -type in_source -type in_ranges -type in_allow_key -type in_sock_key -type in_scope -type in_place -type in_way -type in_kind -type in_mode -type addr -type tuple In ../bpf/inside.bpf.c -- -nostdinc -isystem ../bpf/include -O2 -g -Wall -Werror -Wpadded -mcpu=v3 -fdebug-prefix-map=$PWD=.
