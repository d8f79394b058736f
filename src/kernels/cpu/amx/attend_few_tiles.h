/* Attention of one work item of few rows with bf16 tiles: attend_few_tiles.c */
#ifndef FV_KERNELS_CPU_AMX_ATTEND_FEW_TILES_H
#define FV_KERNELS_CPU_AMX_ATTEND_FEW_TILES_H

#include "kernels/cpu/amx/key_shares.h"

/* 1: the item has up to FV_FEW_TILE_ROWS rows for each KV head, of values as large as MLA's up to 16, and scores that are
 * multiples of dot products or, with a soft cap, of their tanh. */
int32_t FV_ISA_SYMBOL(fv_few_tiles_serve)(const fv_attend_job *job);

/* As fv_attend_tiles, with the same scratch; of items that the above says yes to. Siblings deal out their keys. */
int32_t FV_ISA_SYMBOL(fv_attend_few_tiles)(const fv_attend_job *job, void *scratch, fv_rescaling rescaling,
                                           fv_key_shares *shares);

#endif
