/* How library code reports a failure. */
#ifndef FV_CORE_ERROR_H
#define FV_CORE_ERROR_H

#include "core/compiler.h"
#include "fovea/status.h"

/* Keeps the text for fv_last_error() of this thread and returns `status`:
 *     return fv_fail(FV_ERR_INVALID, "block_size is %d; accepted: 1 or more", block_size);
 * Text beyond 2047 characters is cut. Exported, because libfovea-engine reports the same way. */
FV_API fv_status fv_fail(fv_status status, const char *format, ...) FV_PRINTF(2, 3);

#endif
