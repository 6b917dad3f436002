package packets

//go:generate go tool bpf2go -cc clang-14 -strip llvm-strip-14 -target bpfel floor bpf/floor.bpf.c -- -nostdinc -isystem ../../../datapath/bpf/include -I ../../../datapath/bpf -O2 -g -Wall -Werror -mcpu=v3 -fdebug-prefix-map=$PWD=.
//go:generate go tool bpf2go -cc clang-14 -strip llvm-strip-14 -target bpfel wrap bpf/wrap.bpf.c -- -nostdinc -isystem ../../../datapath/bpf/include -I ../../../datapath/bpf -O2 -g -Wall -Werror -mcpu=v3 -fdebug-prefix-map=$PWD=.
