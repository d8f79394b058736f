/* The files of this folder are compiled once for each ISA level; FV_ISA names the level, and each
 * symbol that leaves a file carries it: FV_ISA_SYMBOL(fv_kv_write) is fv_kv_write_avx2 and so on. */
#ifndef FV_KERNELS_CPU_ISA_H
#define FV_KERNELS_CPU_ISA_H

#ifndef FV_ISA
#error "compile the kernels with FV_ISA=a level's name"
#endif

#define FV_ISA_PASTE(name, isa) name##_##isa
#define FV_ISA_EXPAND(name, isa) FV_ISA_PASTE(name, isa)
#define FV_ISA_SYMBOL(name) FV_ISA_EXPAND(name, FV_ISA)

/* A level of a few files takes what it has not from the level that FV_BASE_ISA names. */
#ifndef FV_BASE_ISA
#define FV_BASE_ISA FV_ISA
#endif
#define FV_BASE_SYMBOL(name) FV_ISA_EXPAND(name, FV_BASE_ISA)

#endif
