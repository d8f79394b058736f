/* How library code reports a failure. */
#ifndef FV_CORE_ERROR_H
#define FV_CORE_ERROR_H

#include "core/compiler.h"
#include "fovea/status.h"

enum { FV_ERROR_BYTES = 2048 }; /* of the text of a failure, with the zero at its end */

/* Keeps the text for fv_last_error() of this thread and returns `status`:
 *     return fv_fail(FV_ERR_INVALID, "block_size is %d; accepted: 1 or more", block_size);
 * Of a text that is longer than FV_ERROR_BYTES the middle is left out: a long path comes first, its cause last.
 * Exported, because libfovea-engine reports the same way. */
FV_API fv_status fv_fail(fv_status status, const char *format, ...) FV_PRINTF(2, 3);

/* FV_ERR_INVALID unless the caller's struct `name` is of the size that this library was built with. */
FV_API fv_status fv_check_struct_size(const char *name, uint32_t given, size_t known);

#endif
