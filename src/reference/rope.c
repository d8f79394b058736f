/* rope: each pair rotated in double, rounded once; rope_kv_write: rope, then kv_write, then the copy of q. */
#include <string.h>

#include "core/float.h"
#include "reference/attend_row.h"
#include "reference/reference.h"

static void rotate_head(char *row, const fv_rope_params *params, int64_t position)
{
    const int32_t half = params->rope_dim / 2;
    const size_t bytes = fv_dtype_bytes(params->dtype);
    const int32_t interleaved = params->style == FV_ROPE_INTERLEAVED;
    for (int32_t i = 0; i < half; i++) {
        char *first = row + (size_t)(interleaved ? 2 * i : i) * bytes;
        char *second = row + (size_t)(interleaved ? 2 * i + 1 : i + half) * bytes;
        const double a = fv_float_load(first, params->dtype), b = fv_float_load(second, params->dtype);
        const double c = params->cos[position * params->row_stride + i],
                     s = params->sin[position * params->row_stride + i];
        const double rotated[2] = {a * c - b * s, b * c + a * s};
        fv_row_store(first, &rotated[0], 1, params->dtype);
        fv_row_store(second, &rotated[1], 1, params->dtype);
    }
}

static void rotate_token(const fv_rope_rows *rows, const fv_rope_params *params, int32_t token, int64_t position)
{
    if (!rows->data) return;
    for (int32_t head = 0; head < rows->num_heads; head++)
        rotate_head((char *)rows->data + token * rows->token_stride + head * rows->head_stride, params, position);
}

fv_status fv_reference_rope(const fv_launch *launch, const fv_rope_params *params)
{
    (void)launch;
    const int32_t num_tokens = fv_rope_tokens(params);
    for (int32_t token = 0; token < num_tokens; token++) {
        const int64_t position = fv_rope_position(params, token);
        if (position < 0) continue;
        rotate_token(&params->q, params, token, position);
        rotate_token(&params->k, params, token, position);
    }
    return FV_OK;
}

static void copy_q(const fv_rope_kv_write_params *params)
{
    const fv_rope_rows *q = &params->rope.q, *copy = &params->q_copy;
    const int32_t num_tokens = q->data && copy->data ? fv_rope_tokens(&params->rope) : 0;
    const size_t bytes = (size_t)params->rope.rope_dim * fv_dtype_bytes(params->rope.dtype);
    for (int64_t token = 0; token < num_tokens; token++) {
        for (int64_t head = 0; head < q->num_heads; head++) {
            memcpy((char *)copy->data + token * copy->token_stride + head * copy->head_stride,
                   (const char *)q->data + token * q->token_stride + head * q->head_stride, bytes);
        }
    }
}

fv_status fv_reference_rope_kv_write(const fv_launch *launch, const fv_rope_kv_write_params *params)
{
    const fv_status status = fv_reference_rope(launch, &params->rope);
    copy_q(params);
    return status == FV_OK ? fv_reference_kv_write(launch, &params->write) : status;
}
