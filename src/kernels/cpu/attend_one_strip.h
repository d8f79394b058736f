/* attend_paged for rows that are one strip (attend_one_strip.c): at all levels but the portable one. */
#ifndef FV_KERNELS_CPU_ATTEND_ONE_STRIP_H
#define FV_KERNELS_CPU_ATTEND_ONE_STRIP_H

#include "kernels/cpu/attend_item.h"

#if defined(FV_HAS_PAIRS) || defined(__AVX2__)
#define FV_HAS_ONE_STRIP 1

size_t FV_ISA_SYMBOL(fv_attend_one_strip_scratch)(const fv_attend_params *params);

/* 1: the items of a query of num_rows rows of a KV head, by the parameters of the call alone, so that no item of it differs. */
int32_t FV_ISA_SYMBOL(fv_attend_one_strip_serves)(const fv_attend_job *job, int64_t num_rows);

/* Rows of a KV head, at most, for whose sake an item has several KV heads: fv_attend_variant.shared_rows. */
int32_t FV_ISA_SYMBOL(fv_attend_one_strip_shared_rows)(const fv_problem *problem);

/* As fv_attend_few_rows. */
void FV_ISA_SYMBOL(fv_attend_one_strip)(const fv_attend_job *job, const fv_attend_job *next, void *scratch);
#else
#define FV_HAS_ONE_STRIP 0
#endif

/* 1: the level below has one, too, for what pairs do not serve. */
#if defined(FV_HAS_PAIRS) && !defined(FV_PAIRS_EMULATED)
#define FV_BASE_HAS_ONE_STRIP 1

size_t FV_BASE_SYMBOL(fv_attend_one_strip_scratch)(const fv_attend_params *params);
int32_t FV_BASE_SYMBOL(fv_attend_one_strip_serves)(const fv_attend_job *job, int64_t num_rows);
int32_t FV_BASE_SYMBOL(fv_attend_one_strip_shared_rows)(const fv_problem *problem);
void FV_BASE_SYMBOL(fv_attend_one_strip)(const fv_attend_job *job, const fv_attend_job *next, void *scratch);
#else
#define FV_BASE_HAS_ONE_STRIP 0
#endif

#endif
