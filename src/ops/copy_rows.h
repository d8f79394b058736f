/* copy_rows: pieces of rows from one strided place to another, as MLA puts the rope part of a query behind
 * its absorbed part. */
#ifndef FV_OPS_COPY_ROWS_H
#define FV_OPS_COPY_ROWS_H

#include "core/device.h"

typedef struct fv_copy_rows_params {
    void *dst; /* [num_tokens, num_heads] pieces of row_bytes; strides in bytes; overlaps nothing */
    int64_t dst_token_stride, dst_head_stride;
    const void *src;
    int64_t src_token_stride, src_head_stride;
    int32_t num_tokens, num_heads;
    int64_t row_bytes;
} fv_copy_rows_params;

typedef fv_status (*fv_copy_rows_fn)(const fv_launch *launch, const fv_copy_rows_params *params);

#endif
