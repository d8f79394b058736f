/* The level below: its kernels take what tiles do not serve. FV_BASE_ISA names it, as FV_ISA names the level. */
#ifndef FV_KERNELS_CPU_AMX_BASE_H
#define FV_KERNELS_CPU_AMX_BASE_H

#include "kernels/cpu/isa.h"
#include "kernels/cpu/kernels.h"

#ifndef FV_BASE_ISA
#error "compile the AMX kernels with FV_BASE_ISA, the level that they fall back to"
#endif

#define FV_BASE_SYMBOL(name) FV_ISA_EXPAND(name, FV_BASE_ISA)

#endif
