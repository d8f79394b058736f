/* Attention of one work item whose strips share each step of keys and each run of columns: attend_shared_tiles.c */
#ifndef FV_KERNELS_CPU_AMX_ATTEND_SHARED_TILES_H
#define FV_KERNELS_CPU_AMX_ATTEND_SHARED_TILES_H

#include "kernels/cpu/amx/key_shares.h"

/* Strips of an item of so many rows that take this order, with the scratch for it; 0: none. By sizes alone: an item
 * whose keys do not lie in rows of bf16 takes the other order. */
int32_t FV_ISA_SYMBOL(fv_shared_strips)(const fv_attend_params *params, int32_t num_strips);

/* One KV head of such an item, configured, with its scratch. 0: as fv_attend_tiles. */
int32_t FV_ISA_SYMBOL(fv_attend_shared_tiles)(fv_tile_item *item, fv_key_shares *shares);

#endif
