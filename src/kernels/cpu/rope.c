/* rope and rope_kv_write: pairs of eight rotated at a time; runs of tokens in parallel. */
#include <string.h>

#include "core/executor.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/kv_row.h"
#include "kernels/cpu/kv_write_token.h"

#define TOKENS_PER_TASK 4

typedef struct pairs {
    fv_f32x8 a;
    fv_f32x8 b;
} pairs;

static inline pairs rotate_pairs(pairs x, const float *cos, const float *sin)
{
    const fv_f32x8 c = fv_load_f32(cos), s = fv_load_f32(sin);
    return (pairs){x.a * c - x.b * s, x.b * c + x.a * s};
}

static void rotate_rest(char *first, char *second, float c, float s, fv_dtype dtype)
{
    const float a = fv_float_load(first, dtype), b = fv_float_load(second, dtype);
    fv_float_store(first, a * c - b * s, dtype);
    fv_float_store(second, b * c + a * s, dtype);
}

FV_ALWAYS_INLINE void rotate_half(char *row, const float *cos, const float *sin, int32_t half, fv_dtype dtype)
{
    const size_t bytes = fv_dtype_bytes(dtype);
    char *upper = row + (size_t)half * bytes;
    int32_t i = 0;
    for (; i + FV_LANES <= half; i += FV_LANES) {
        const size_t at = (size_t)i * bytes;
        const pairs x = rotate_pairs((pairs){fv_load8(row + at, dtype), fv_load8(upper + at, dtype)}, cos + i, sin + i);
        fv_store8(row + at, x.a, dtype);
        fv_store8(upper + at, x.b, dtype);
    }
    for (; i < half; i++) rotate_rest(row + (size_t)i * bytes, upper + (size_t)i * bytes, cos[i], sin[i], dtype);
}

FV_ALWAYS_INLINE void rotate_interleaved(char *row, const float *cos, const float *sin, int32_t half, fv_dtype dtype)
{
    const size_t bytes = fv_dtype_bytes(dtype);
    int32_t i = 0;
    for (; i + FV_LANES <= half; i += FV_LANES) {
        char *low_at = row + (size_t)(2 * i) * bytes, *high_at = low_at + FV_LANES * bytes;
        const fv_f32x8 low = fv_load8(low_at, dtype), high = fv_load8(high_at, dtype);
        const pairs x = rotate_pairs((pairs){__builtin_shufflevector(low, high, 0, 2, 4, 6, 8, 10, 12, 14),
                                             __builtin_shufflevector(low, high, 1, 3, 5, 7, 9, 11, 13, 15)},
                                     cos + i, sin + i);
        fv_store8(low_at, __builtin_shufflevector(x.a, x.b, 0, 8, 1, 9, 2, 10, 3, 11), dtype);
        fv_store8(high_at, __builtin_shufflevector(x.a, x.b, 4, 12, 5, 13, 6, 14, 7, 15), dtype);
    }
    for (; i < half; i++) {
        char *first = row + (size_t)(2 * i) * bytes;
        rotate_rest(first, first + bytes, cos[i], sin[i], dtype);
    }
}

/* The heads of one token; `dtype` is known to the compiler. */
FV_ALWAYS_INLINE void rotate_rows(char *row, const fv_rope_rows *rows, const fv_rope_params *params, int64_t position,
                                  fv_dtype dtype)
{
    const float *cos = params->cos + position * params->row_stride;
    const float *sin = params->sin + position * params->row_stride;
    const int32_t half = params->rope_dim / 2;
    for (int32_t head = 0; head < rows->num_heads; head++, row += rows->head_stride) {
        if (params->style == FV_ROPE_INTERLEAVED)
            rotate_interleaved(row, cos, sin, half, dtype);
        else
            rotate_half(row, cos, sin, half, dtype);
    }
}

static void rotate_heads(const fv_rope_rows *rows, const fv_rope_params *params, int64_t token, int64_t position)
{
    if (!rows->data) return;
    char *row = (char *)rows->data + token * rows->token_stride;
    switch (params->dtype) {
    case FV_DTYPE_BF16: rotate_rows(row, rows, params, position, FV_DTYPE_BF16); return;
    case FV_DTYPE_F16: rotate_rows(row, rows, params, position, FV_DTYPE_F16); return;
    default: rotate_rows(row, rows, params, position, FV_DTYPE_F32); return;
    }
}

static void rotate_token(const fv_rope_params *params, int64_t token)
{
    const int64_t position = fv_rope_position(params, token);
    if (position < 0) return;
    rotate_heads(&params->q, params, token, position);
    rotate_heads(&params->k, params, token, position);
}

static void rope_task(void *user, int64_t index, int32_t worker)
{
    (void)worker;
    const fv_rope_params *params = user;
    const int64_t end = fv_min_i64((index + 1) * TOKENS_PER_TASK, fv_rope_tokens(params));
    for (int64_t token = index * TOKENS_PER_TASK; token < end; token++) rotate_token(params, token);
}

fv_status FV_ISA_SYMBOL(fv_rope)(const fv_launch *launch, const fv_rope_params *params)
{
    fv_executor_run(launch->executor, fv_ceil_div(fv_rope_tokens(params), TOKENS_PER_TASK), rope_task, (void *)params);
    return FV_OK;
}

static void copy_heads(const fv_rope_kv_write_params *params, int64_t token)
{
    const fv_rope_rows *q = &params->rope.q, *copy = &params->q_copy;
    if (!q->data || !copy->data) return;
    const size_t bytes = (size_t)params->rope.rope_dim * fv_dtype_bytes(params->rope.dtype);
    for (int64_t head = 0; head < q->num_heads; head++) {
        memcpy((char *)copy->data + token * copy->token_stride + head * copy->head_stride,
               (const char *)q->data + token * q->token_stride + head * q->head_stride, bytes);
    }
}

static void rope_kv_write_task(void *user, int64_t index, int32_t worker)
{
    (void)worker;
    const fv_rope_kv_write_params *params = user;
    const fv_kv_write_params *write = &params->write;
    const int64_t block_size = write->cache.block_size, num_slots = write->cache.num_blocks * block_size;
    const int64_t end = fv_min_i64((index + 1) * TOKENS_PER_TASK, fv_rope_tokens(&params->rope));
    for (int64_t token = index * TOKENS_PER_TASK; token < end; token++) {
        rotate_token(&params->rope, token);
        copy_heads(params, token);
        const int64_t slot = write->slot_mapping[token];
        if (slot < 0 || slot >= num_slots) continue;
        FV_ISA_SYMBOL(fv_kv_write_token)(write, token, slot / block_size, slot % block_size);
    }
}

fv_status FV_ISA_SYMBOL(fv_rope_kv_write)(const fv_launch *launch, const fv_rope_kv_write_params *params)
{
    fv_executor_run(launch->executor, fv_ceil_div(fv_rope_tokens(&params->rope), TOKENS_PER_TASK), rope_kv_write_task,
                    (void *)params);
    return FV_OK;
}
