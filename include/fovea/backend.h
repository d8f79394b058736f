/* Backends: strategies under the names that users know from vLLM. */
#ifndef FOVEA_BACKEND_H
#define FOVEA_BACKEND_H

#include "fovea/device.h"
#include "fovea/problem.h"

#ifdef __cplusplus
extern "C" {
#endif

FV_API int32_t fv_backend_count(void);

/* Name of backend `index` in [0, fv_backend_count()), e.g. "TRITON_ATTN"; NULL outside. */
FV_API const char *fv_backend_name(int32_t index);

/* One line on its strategy. NULL outside. */
FV_API const char *fv_backend_summary(int32_t index);

/* Writes to `reasons` why the named backend cannot serve the problem on the device (NULL = CPU),
 * separated by "; ", or "" if it can. FV_OK in both cases; FV_ERR_INVALID: no such backend (the text
 * lists those there are), or a malformed problem; FV_ERR_NO_SPACE: `reasons` is cut short. */
FV_API fv_status fv_backend_why_not(char *reasons, size_t reasons_bytes, const char *backend, fv_device *device,
                                    const fv_problem *problem);

#ifdef __cplusplus
}
#endif
#endif
