/* What `auto` prefers, for each kind of device and of layer. The first of a row whose why_not is empty is
 * taken. docs/backends.md has the measurements behind the order. */
#include <string.h>

#include "backends/backend.h"
#include "core/compiler.h"
#include "fovea/backend.h"

static const char *const kind_names[] = {"full_attention", "sliding_window", "mla_attention", "encoder_only_attention",
                                         "cross_attention"};

typedef struct preference {
    const char *device; /* first characters of the device's name */
    fv_layer_kind kind;
    const fv_backend *order[8];
} preference;

static const preference preferences[] = {
    {"cpu", FV_LAYER_FULL, {&fv_rocm_aiter_unified_attn, &fv_triton_attn, &fv_rocm_aiter_fa, &fv_rocm_attn}},
    {"cpu", FV_LAYER_SLIDING_WINDOW, {&fv_rocm_aiter_unified_attn, &fv_triton_attn, &fv_rocm_aiter_fa, &fv_rocm_attn}},
    {"cpu", FV_LAYER_ENCODER, {&fv_triton_attn, &fv_rocm_aiter_unified_attn, &fv_rocm_attn}},
    {"cpu", FV_LAYER_MLA, {&fv_rocm_aiter_mla, &fv_triton_mla, &fv_rocm_aiter_triton_mla, &fv_amla}},
    {"cpu", FV_LAYER_CROSS, {&fv_rocm_aiter_unified_attn, &fv_triton_attn}},
    {"cuda", FV_LAYER_FULL, {&fv_rocm_aiter_unified_attn, &fv_triton_attn, &fv_rocm_aiter_fa, &fv_rocm_attn}},
    {"cuda", FV_LAYER_SLIDING_WINDOW, {&fv_rocm_aiter_unified_attn, &fv_triton_attn, &fv_rocm_aiter_fa, &fv_rocm_attn}},
    {"cuda", FV_LAYER_ENCODER, {&fv_triton_attn, &fv_rocm_aiter_unified_attn, &fv_rocm_attn}},
    {"cuda", FV_LAYER_MLA, {&fv_rocm_aiter_mla, &fv_triton_mla, &fv_rocm_aiter_triton_mla}},
    {"cuda", FV_LAYER_CROSS, {&fv_rocm_aiter_unified_attn, &fv_triton_attn}},
};

fv_layer_kind fv_problem_layer_kind(const fv_problem *problem)
{
    if (problem->kind == FV_ATTENTION_MLA) return FV_LAYER_MLA;
    if (problem->type == FV_ATTENTION_ENCODER) return FV_LAYER_ENCODER;
    if (problem->type == FV_ATTENTION_CROSS) return FV_LAYER_CROSS;
    return problem->window > 0 ? FV_LAYER_SLIDING_WINDOW : FV_LAYER_FULL;
}

const char *fv_layer_kind_name(fv_layer_kind kind)
{
    const int32_t index = (int32_t)kind;
    return index >= 0 && index < FV_ARRAY_LEN(kind_names) ? kind_names[index] : "unknown";
}

const fv_backend *fv_backend_preferred(int32_t rank, const fv_device *device, const fv_problem *problem)
{
    const char *name = device ? device->name : "cpu";
    for (int32_t i = 0; i < FV_ARRAY_LEN(preferences); i++) {
        const preference *row = &preferences[i];
        if (strncmp(name, row->device, strlen(row->device)) != 0) continue;
        if (row->kind != fv_problem_layer_kind(problem)) continue;
        return rank >= 0 && rank < FV_ARRAY_LEN(row->order) ? row->order[rank] : NULL;
    }
    return fv_backend_at(rank); /* no preference is known */
}

const char *fv_backend_preferred_name(int32_t rank, const fv_device *device, const fv_problem *problem)
{
    const fv_backend *backend = problem ? fv_backend_preferred(rank, device, problem) : NULL;
    return backend ? backend->name : NULL;
}
