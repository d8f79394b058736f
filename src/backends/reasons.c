/* The checks that all MHA backends share. */
#include "backends/reasons.h"

#include <stdarg.h>
#include <stdio.h>

#include "core/context.h"
#include "core/cpu.h"
#include "ops/kernel_table.h"

#define MAX_HEAD_SIZE 512
#define HEAD_SIZE_STEP 8

void fv_reasons_add(fv_reasons *reasons, const char *format, ...)
{
    if (reasons->used >= reasons->capacity) return;
    if (reasons->used > 0) {
        reasons->used += (size_t)snprintf(reasons->text + reasons->used, reasons->capacity - reasons->used, "; ");
        if (reasons->used >= reasons->capacity) return;
    }
    va_list args;
    va_start(args, format);
    const int written = vsnprintf(reasons->text + reasons->used, reasons->capacity - reasons->used, format, args);
    va_end(args);
    if (written > 0) reasons->used += (size_t)written;
}

const fv_kernel_table *fv_default_kernels(const fv_device *device)
{
    const fv_kernel_table *const *tables = device ? device->tables : NULL;
    const int32_t num_tables = device ? device->num_tables : fv_cpu_tables(&tables, fv_cpu_isa());
    return num_tables > 0 ? tables[num_tables - 1] : NULL;
}

static int32_t head_size_fits(const fv_mha_support *support, int32_t head_size)
{
    return head_size >= support->min_head_size && head_size <= MAX_HEAD_SIZE && head_size % HEAD_SIZE_STEP == 0;
}

static void check_layout(fv_reasons *reasons, const fv_mha_support *support, const fv_problem *problem)
{
    if (problem->type == FV_ATTENTION_ENCODER) return; /* no cache */
    if (!problem->kv_layout_any && !(support->layouts >> problem->kv_layout & 1)) {
        char names[160] = "";
        size_t used = 0;
        for (int32_t i = 0; i <= FV_KV_LAYOUT_LATENT_FP8_DS && used < sizeof(names); i++) {
            if (!(support->layouts >> i & 1)) continue;
            used += (size_t)snprintf(names + used, sizeof(names) - used, "%s%s", used ? ", " : "",
                                     fv_kv_layout_name((fv_kv_layout)i));
        }
        fv_reasons_add(reasons, "layout %s not supported (accepted: %s)", fv_kv_layout_name(problem->kv_layout), names);
    }
}

/* The x-packed and the shuffled layout come in runs of 16 bytes. */
static void check_packing(fv_reasons *reasons, fv_kv_layout layout, const fv_problem *problem)
{
    if (layout != FV_KV_LAYOUT_X_PACKED && layout != FV_KV_LAYOUT_SHUFFLED) return;
    const int32_t x = 16 / (int32_t)fv_dtype_bytes(problem->kv_dtype);
    if (problem->mha.head_size % x != 0 || problem->mha.v_head_size != problem->mha.head_size) {
        fv_reasons_add(reasons, "head_size not supported (%d, values %d; layout %s wants both equal, a multiple of %d)",
                       problem->mha.head_size, problem->mha.v_head_size, fv_kv_layout_name(layout), x);
    }
    if (layout == FV_KV_LAYOUT_SHUFFLED && problem->block_size % x != 0) {
        fv_reasons_add(reasons, "block_size not supported (%d; layout shuffled wants a multiple of %d)",
                       problem->block_size, x);
    }
}

static void check_kernels(fv_reasons *reasons, const fv_mha_support *support, const fv_device *device,
                          const fv_problem *problem)
{
    const fv_kernel_table *kernels = fv_default_kernels(device);
    if (!kernels || kernels->num_attend_paged == 0) {
        fv_reasons_add(reasons, "the device has no attend_paged kernel");
        return;
    }
    const int32_t dense = support->needs_dense || problem->type == FV_ATTENTION_ENCODER;
    if (dense && kernels->num_attend_dense == 0) {
        fv_reasons_add(reasons, "the device has no attend_dense kernel");
        return;
    }
    if (support->needs_gather && (!kernels->kv_gather || !kernels->merge_states)) {
        fv_reasons_add(reasons, "the device has no kv_gather or no merge_states kernel");
    }
    const char *paged_reason = kernels->attend_paged[0].why_not(problem);
    const char *dense_reason = dense ? kernels->attend_dense[0].why_not(problem) : NULL;
    if (paged_reason) fv_reasons_add(reasons, "%s", paged_reason);
    if (dense_reason && dense_reason != paged_reason) fv_reasons_add(reasons, "%s", dense_reason);
}

/* Features that speak of positions, which queries and keys of two sequences do not share. */
static void check_cross(fv_reasons *reasons, const fv_problem *problem)
{
    const struct {
        const char *feature;
        int32_t is_used;
    } features[] = {
        {"sliding window", problem->window > 0},
        {"ALiBi", problem->alibi != FV_ALIBI_NONE},
        {"tree mask", problem->tree_mask},
        {"context parallelism", problem->context_parallel.world > 1},
    };
    if (problem->type != FV_ATTENTION_CROSS) return;
    for (int32_t i = 0; i < FV_ARRAY_LEN(features); i++) {
        if (!features[i].is_used) continue;
        fv_reasons_add(reasons, "%s not supported with attention type cross", features[i].feature);
    }
}

void fv_mha_why_not(fv_reasons *reasons, const fv_mha_support *support, const fv_device *device,
                    const fv_problem *problem)
{
    static const char *const types[] = {"decoder", "encoder", "cross"};
    if (problem->kind != FV_ATTENTION_MHA) {
        fv_reasons_add(reasons, "MLA not supported");
        return;
    }
    check_layout(reasons, support, problem);
    if (!(support->types >> problem->type & 1)) {
        fv_reasons_add(reasons, "attention type %s not supported", types[problem->type]);
    }
    if (!head_size_fits(support, problem->mha.head_size) || !head_size_fits(support, problem->mha.v_head_size)) {
        fv_reasons_add(reasons, "head_size not supported (%d, values %d; accepted: %s)", problem->mha.head_size,
                       problem->mha.v_head_size, support->head_sizes);
        return;
    }
    check_cross(reasons, problem);
    check_kernels(reasons, support, device, problem);
    if (problem->type == FV_ATTENTION_ENCODER && problem->context_parallel.world > 1) {
        fv_reasons_add(reasons, "context parallelism not supported with attention type encoder");
    }
    if (problem->type != FV_ATTENTION_ENCODER)
        check_packing(reasons, problem->kv_layout_any ? support->layout : problem->kv_layout, problem);
}
