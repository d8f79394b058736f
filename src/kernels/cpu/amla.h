/* AMLA, a strategy of mla_decode: see amla.c. */
#ifndef FV_KERNELS_CPU_AMLA_H
#define FV_KERNELS_CPU_AMLA_H

#include "kernels/cpu/attend_item.h"

/* Any number of rows: items have at most max(FV_DECODE_ROWS, block_q * Hq). */
size_t FV_BASE_SYMBOL(fv_amla_scratch)(const fv_attend_params *params);
void FV_BASE_SYMBOL(fv_amla_rows)(const fv_attend_job *job, void *scratch, fv_rescaling rescaling);

#endif
