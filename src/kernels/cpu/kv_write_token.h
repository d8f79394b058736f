/* One token of kv_write, for the kernels that fuse something with the write. */
#ifndef FV_KERNELS_CPU_KV_WRITE_TOKEN_H
#define FV_KERNELS_CPU_KV_WRITE_TOKEN_H

#include "kernels/cpu/isa.h"
#include "ops/kv_write.h"

/* Writes the rows of `token` to (block, slot) of the cache, all heads. */
void FV_ISA_SYMBOL(fv_kv_write_token)(const fv_kv_write_params *params, int64_t token, int64_t block, int64_t slot);

#endif
