/* Attention of one work item of many rows: attend_many_tiles.c */
#ifndef FV_KERNELS_CPU_AMX_ATTEND_MANY_TILES_H
#define FV_KERNELS_CPU_AMX_ATTEND_MANY_TILES_H

#include "kernels/cpu/amx/tile_item.h"

/* 1: items of so many strips take this order: enough rows meet each key, and factors are no extremes. */
int32_t FV_ISA_SYMBOL(fv_many_tiles_serve)(const fv_attend_job *job, int32_t num_strips, fv_rescaling rescaling);

/* One KV head of such an item, configured, with its scratch. 0: as fv_attend_tiles. */
int32_t FV_ISA_SYMBOL(fv_attend_many_tiles)(fv_tile_item *item);

#endif
