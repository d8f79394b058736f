/* Reasons why a backend cannot serve a problem, in vLLM's words where it has them. */
#ifndef FV_BACKENDS_REASONS_H
#define FV_BACKENDS_REASONS_H

#include "core/compiler.h"
#include "core/device.h"
#include "fovea/problem.h"

/* "reason; reason" */
typedef struct fv_reasons {
    char *text;
    size_t capacity, used; /* used >= capacity: cut short */
} fv_reasons;

void fv_reasons_add(fv_reasons *reasons, const char *format, ...) FV_PRINTF(2, 3);

/* What an MHA backend takes. */
typedef struct fv_mha_support {
    uint32_t types;      /* bit fv_attention_type */
    uint32_t layouts;    /* bit fv_kv_layout */
    fv_kv_layout layout; /* where the problem leaves it open */
    int32_t min_head_size;
    const char *head_sizes; /* in words */
    int32_t needs_dense;    /* 1: attend_dense of the device's kernels */
    int32_t needs_gather;   /* 1: also kv_gather and merge_states */
} fv_mha_support;

/* The kernels that a plan takes by default; NULL device: this CPU's. NULL: there are none. */
const struct fv_kernel_table *fv_default_kernels(const fv_device *device);

/* Checks the problem against `support` and against the kernels of the device (NULL: this CPU). */
void fv_mha_why_not(fv_reasons *reasons, const fv_mha_support *support, const fv_device *device,
                    const fv_problem *problem);

#endif
