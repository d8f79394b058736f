/* Backends: strategies under the names that users know from vLLM. */
#ifndef FOVEA_BACKEND_H
#define FOVEA_BACKEND_H

#include "fovea/device.h"
#include "fovea/problem.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How many there are, of any kind; the same in every process. */
FV_API int32_t fv_backend_count(void);

/* Name of backend `index` in [0, fv_backend_count()), e.g. "TRITON_ATTN"; NULL outside. */
FV_API const char *fv_backend_name(int32_t index);

/* One line on its strategy. NULL outside. */
FV_API const char *fv_backend_summary(int32_t index);

/* Kinds of layers, for which the choice may differ. */
typedef enum fv_layer_kind {
    FV_LAYER_FULL = 0,
    FV_LAYER_SLIDING_WINDOW = 1,
    FV_LAYER_MLA = 2,
    FV_LAYER_ENCODER = 3,
    FV_LAYER_CROSS = 4,
} fv_layer_kind;

/* The kind of a problem's layers, from kind, type and window. */
FV_API fv_layer_kind fv_problem_layer_kind(const fv_problem *problem);

/* "full_attention", "sliding_window", "mla_attention", "encoder_only_attention", "cross_attention" (vLLM's
 * names); "unknown" for a value that is no kind. */
FV_API const char *fv_layer_kind_name(fv_layer_kind kind);

/* The backend that `auto` asks at place `rank` (from 0) for the problem on the device (NULL = CPU); NULL
 * past the last. The first whose fv_backend_why_not is "" is taken. */
FV_API const char *fv_backend_preferred_name(int32_t rank, const fv_device *device, const fv_problem *problem);

/* Writes to `reasons` why the named backend cannot serve the problem on the device (NULL = CPU),
 * separated by "; ", or "" if it can. FV_OK in both cases; FV_ERR_INVALID: no such backend (the text
 * lists those there are), or a malformed problem; FV_ERR_NO_SPACE: `reasons` is cut short. */
FV_API fv_status fv_backend_why_not(char *reasons, size_t reasons_bytes, const char *backend, fv_device *device,
                                    const fv_problem *problem);

#ifdef __cplusplus
}
#endif
#endif
