/* The backends there are, and why one cannot serve a problem. */
#include <stdio.h>
#include <string.h>

#include "backends/backend.h"
#include "core/error.h"
#include "fovea/backend.h"

static const fv_backend *const backends[] = {
    &fv_triton_attn,    &fv_rocm_aiter_unified_attn, &fv_rocm_attn, &fv_rocm_aiter_fa, &fv_triton_mla,
    &fv_rocm_aiter_mla, &fv_rocm_aiter_triton_mla,   &fv_amla};

int32_t fv_backend_count(void) { return FV_ARRAY_LEN(backends); }

const fv_backend *fv_backend_at(int32_t index)
{
    return index >= 0 && index < fv_backend_count() ? backends[index] : NULL;
}

const char *fv_backend_name(int32_t index)
{
    const fv_backend *backend = fv_backend_at(index);
    return backend ? backend->name : NULL;
}

const char *fv_backend_summary(int32_t index)
{
    const fv_backend *backend = fv_backend_at(index);
    return backend ? backend->summary : NULL;
}

const fv_backend *fv_backend_find(const char *name, int32_t takes_auto)
{
    char names[256] = "";
    size_t used = takes_auto ? (size_t)snprintf(names, sizeof(names), "auto") : 0;
    for (int32_t i = 0; i < fv_backend_count(); i++) {
        if (strcmp(backends[i]->name, name) == 0) return backends[i];
        if (used < sizeof(names)) {
            used += (size_t)snprintf(names + used, sizeof(names) - used, "%s%s", used ? ", " : "", backends[i]->name);
        }
    }
    fv_fail(FV_ERR_INVALID, "Unknown attention backend: '%.64s'. Valid options are: %s", name, names);
    return NULL;
}

fv_status fv_backend_why_not(char *text, size_t text_bytes, const char *name, fv_device *device,
                             const fv_problem *problem)
{
    if (!text || text_bytes == 0 || !name) return fv_fail(FV_ERR_INVALID, "reasons or backend is NULL");
    fv_problem normal;
    const fv_status status = fv_problem_normalize(&normal, problem);
    if (status != FV_OK) return status;
    const fv_backend *backend = fv_backend_find(name, 0);
    if (!backend) return FV_ERR_INVALID;
    text[0] = 0;
    fv_reasons reasons = {text, text_bytes, 0};
    backend->why_not(&reasons, device, &normal);
    return reasons.used < reasons.capacity
               ? FV_OK
               : fv_fail(FV_ERR_NO_SPACE, "the reasons need more than %zu bytes", text_bytes);
}
