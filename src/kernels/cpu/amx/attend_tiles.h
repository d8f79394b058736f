/* Attention of one work item with bf16 tiles: what attend_paged, attend_dense and mla_decode share. attend_tiles.c */
#ifndef FV_KERNELS_CPU_AMX_ATTEND_TILES_H
#define FV_KERNELS_CPU_AMX_ATTEND_TILES_H

#include "kernels/cpu/amx/key_shares.h"

/* NULL: tiles serve problems of these sizes and dtypes; else why not. */
const char *FV_ISA_SYMBOL(fv_tiles_why_not)(const fv_problem *problem);

/* 1: they serve the call's items; its cache may be one of latents. */
int32_t FV_ISA_SYMBOL(fv_tiles_serve)(const fv_attend_params *params);

/* Of a worker, for items of up to block_q tokens, or FV_DECODE_ROWS rows. */
size_t FV_ISA_SYMBOL(fv_tiles_scratch)(const fv_attend_params *params);

/* Writes the item's result. 0: it is not to be used, for values that some rows must not see are infinite or NaN, and a
 * product with weight 0 would spread them, or something of fp16 is; the caller takes another kernel. How sums are
 * rescaled: tile_scale.h. `shares` of the launch. */
int32_t FV_ISA_SYMBOL(fv_attend_tiles)(const fv_attend_job *job, void *scratch, fv_rescaling rescaling,
                                       fv_key_shares *shares);

#endif
