/* The strategy of attend_paged for few rows over packed caches: attend_packed_rows.c. */
#ifndef FV_KERNELS_CPU_ATTEND_PACKED_ROWS_H
#define FV_KERNELS_CPU_ATTEND_PACKED_ROWS_H

#include "kernels/cpu/attend_item.h"

/* 1: K and V of all keys lie in pieces of 16 bytes, of elements of K and of slots of V, and have 8 or 16 bits. */
int32_t FV_BASE_SYMBOL(fv_attend_packed_serves)(const fv_attend_params *params);

/* As for the other strategies: an item of up to FV_DECODE_ROWS rows. */
size_t FV_BASE_SYMBOL(fv_attend_packed_scratch)(const fv_attend_params *params);
void FV_BASE_SYMBOL(fv_attend_packed_rows)(const fv_attend_job *job, void *scratch);

#endif
