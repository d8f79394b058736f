/* What the strategies for few rows ask of their products, few_rows.h and others: the rows of a tile's keys as they take
 * them, and one compiled form for each dtype and R = 1, 2, 3, 4.
 *
 * Whoever includes this defines, always inline,
 *
 *   fv_few_dot(scores, q, rows, first, end, head_size, num_rows, dtype, order)
 *   fv_few_accumulate(sums, weights, rescale, rows, first, end, v_head_size, num_rows, dtype, masked, order) */
#ifndef FV_KERNELS_CPU_FEW_KERNELS_H
#define FV_KERNELS_CPU_FEW_KERNELS_H

#include "kernels/cpu/prefetch_stream.h"
#include "kernels/cpu/row_group.h"

/* 1: there is a form for each order in which lines are asked for (prefetch_stream.h); 0: streams are in order. */
#ifndef FV_FEW_HAS_ORDERS
#define FV_FEW_HAS_ORDERS 0
#endif

/* 1: there is a form of its own for 3 rows (as three query heads for each KV head, one token, are); 0: they are served as 4. */
#ifndef FV_FEW_HAS_3_ROWS
#define FV_FEW_HAS_3_ROWS 0
#endif

/* Keys taken together in the product with V. They are added up by themselves before they join the sums of a row: one after the
 * other onto a large sum many roundings go one way where weights and values are nearly equal (docs/numerics.md). */
#define FV_FEW_ACCUMULATE_KEYS 16

/* The end of the run of key: runs have their places in a tile, so that no row's depend on the keys of others. */
FV_ALWAYS_INLINE int32_t fv_few_end_of_run(int32_t key, int32_t end)
{
    return fv_min_i32(key / FV_FEW_ACCUMULATE_KEYS * FV_FEW_ACCUMULATE_KEYS + FV_FEW_ACCUMULATE_KEYS, end);
}

/* 1: rows of the next tile may be shorter than a portion (latents in blocks of one token), so each line is found by
 * itself; 0: portions of several keys, which may pass the end of a run. */
#ifndef FV_FEW_ASKS_BY_LINE
#define FV_FEW_ASKS_BY_LINE 0
#endif

/* Scores of a key: one for each row; of 3 rows the last is there twice, so that vectors have whole keys. */
FV_ALWAYS_INLINE int32_t fv_few_scores_of_key(const int32_t num_rows) { return num_rows == 3 ? 4 : num_rows; }

/* R of a KV head's rows: 3 where as many groups of 4 would have more rows than there are, with 3, 5, 6 and 9. */
static inline int32_t fv_few_rows_in_group(int32_t num_rows)
{
    const int32_t takes_3 = FV_FEW_HAS_3_ROWS && num_rows >= 3 && (num_rows + 2) / 3 == (num_rows + 3) / 4;
    return takes_3 ? 3 : fv_rows_in_group(num_rows);
}

/* Elements of a row of queries or sums: whole vectors, of any level. */
static inline int32_t fv_few_padded(int32_t size) { return (int32_t)fv_round_up(size, 16); }

#define FV_FEW_SCORES_AHEAD 64 /* scores behind a tile's, which loads of whole vectors reach */

/* Rows of a tile's keys, for one head. */
typedef struct fv_key_rows {
    const char *const *k;      /* element 0 of each key's row, less the offset; entries from first / 8 * 8 to the */
    const char *const *v;      /* next multiple of 8 behind end are valid */
    fv_prefetch_stream *ahead; /* memory that the next tile will want */
    int64_t k_offset, v_offset;
    int64_t v_stride;       /* bytes from each row of v to the next of its run, where it is the same for all; else 0 */
    int32_t stored_bytes;   /* of an element in memory */
    int64_t k_piece_stride; /* bytes from 8 elements of a key to the next, 16 in rows */
    int64_t v_element_stride; /* from an element of a value to the next */
} fv_key_rows;

/* The distance of the rows [first, end), 0 where it varies. */
static inline int64_t fv_few_row_stride(const char *const *rows, int32_t first, int32_t end)
{
    if (first + 2 > end) return 0;
    const int64_t stride = rows[first + 1] - rows[first];
    for (int32_t i = first + 2; i < end; i++) {
        if (rows[i] - rows[i - 1] != stride) return 0;
    }
    return stride;
}

FV_ALWAYS_INLINE int64_t fv_few_element_bytes(const fv_dtype dtype)
{
    return dtype == FV_DTYPE_F32 ? 4 : dtype == FV_DTYPE_F16 || dtype == FV_DTYPE_BF16 ? 2 : 1;
}

FV_ALWAYS_INLINE int32_t fv_few_is_fp8(const fv_dtype dtype)
{
    return dtype == FV_DTYPE_F8_E4M3 || dtype == FV_DTYPE_F8_E5M2;
}

/* A dtype of the kernels alone: e4m3 by its bits, moved into the place of a bf16's, which is 2^-120 of it. Half as many
 * instructions as by way of fp16, but where e4m3 is subnormal so is fp32, and not all CPUs take that at full speed. */
#define FV_FEW_E4M3_BITS ((fv_dtype)(FV_DTYPE_I8 + 1))

/* Sixteen elements in lane order, or eight, times 1 / (fv_few_factor * fv_few_rest): e4m3 comes out of fp16 as 2^-8 of
 * itself, and it is cheaper to multiply scores and weights, by the factor, and queries and a run's sums, by the rest.
 * Products of pairs have it whole. */
#if defined(__AVX2__) && defined(__F16C__) && !defined(FV_HAS_PAIRS)
FV_ALWAYS_INLINE float fv_few_rest(const fv_dtype dtype) { return dtype == FV_FEW_E4M3_BITS ? 0x1p60f : 1.0f; }

FV_ALWAYS_INLINE float fv_few_factor(const fv_dtype dtype)
{
    return dtype == FV_FEW_E4M3_BITS ? 0x1p60f : dtype == FV_DTYPE_F8_E4M3 ? 256.0f : 1.0f;
}

FV_ALWAYS_INLINE fv_f32x16 fv_few_load16(const void *from, const fv_dtype dtype)
{
    if (dtype == FV_FEW_E4M3_BITS) return fv_load16_e4m3_tiny(from);
    return dtype == FV_DTYPE_F8_E4M3 ? fv_load16_e4m3_small(from) : fv_load16(from, dtype);
}
#else
FV_ALWAYS_INLINE float fv_few_rest(const fv_dtype dtype) { return (void)dtype, 1.0f; }
FV_ALWAYS_INLINE float fv_few_factor(const fv_dtype dtype) { return (void)dtype, 1.0f; }

FV_ALWAYS_INLINE fv_f32x16 fv_few_load16(const void *from, const fv_dtype dtype) { return fv_load16(from, dtype); }
#endif

FV_ALWAYS_INLINE fv_f32x8 fv_few_load8(const void *from, const fv_dtype dtype)
{
    const fv_f32x8 value = fv_load8(from, dtype == FV_FEW_E4M3_BITS ? FV_DTYPE_F8_E4M3 : dtype);
    const float factor = fv_few_factor(dtype) * fv_few_rest(dtype);
    return factor == 1.0f ? value : value * (1.0f / factor);
}

/* Takes the factor into the scale of scores, but where the scale would be beyond fp32: then it returns the factor, and dot
 * products are to be multiplied by it (fv_few_grow_dots), else 1. */
static inline float fv_few_take_factor(fv_score_scale *scale, float factor)
{
    if (fabsf(scale->dot) > FLT_MAX / factor) return factor;
    scale->dot *= factor;
    return 1.0f;
}

/* Dot products of the keys [first, end), and of those that share a vector with them. */
static inline void fv_few_grow_dots(float *scores, float factor, int32_t first, int32_t end, int32_t num_rows)
{
    const int32_t num_scores = fv_few_scores_of_key(num_rows), num_keys = FV_LANES / num_scores;
    float *to = scores + end * num_scores;
    for (float *at = scores + first / num_keys * FV_LANES; at < to; at += FV_LANES)
        fv_store_f32(at, fv_load_f32(at) * factor);
}

/* A portion to be asked for bit by bit; of a stream in tracks there is none. */
FV_ALWAYS_INLINE fv_prefetch_portion fv_few_portion(fv_prefetch_cursor *cursor, int64_t bytes)
{
    return FV_FEW_ASKS_BY_LINE || cursor->order == FV_PREFETCH_IN_TRACKS ? cursor->last
                                                                         : fv_prefetch_step(cursor, bytes);
}

/* Asks for some bytes of it, in order `asks` times in all, or for as many lines, once. */
FV_ALWAYS_INLINE void fv_few_ask(fv_prefetch_cursor *cursor, fv_prefetch_portion portion, int64_t offset,
                                 const int64_t bytes, const int32_t asks)
{
    if (FV_FEW_ASKS_BY_LINE) {
        FV_UNROLL
        for (int64_t i = 0; i < bytes; i += FV_CACHE_LINE) fv_prefetch_line(cursor);
        return;
    }
    if (cursor->order == FV_PREFETCH_NEAR) {
        FV_UNROLL
        for (int32_t i = 0; i < FV_PREFETCH_NEAR_ASKS; i++) fv_prefetch_near(portion.at[i] + offset, bytes);
    } else if (cursor->order == FV_PREFETCH_IN_ORDER) {
        fv_prefetch_part(portion, offset, bytes, asks);
    } else if (cursor->stream->num_tracks > 0) {
        FV_UNROLL
        for (int64_t i = 0; i < bytes; i += FV_CACHE_LINE)
            __builtin_prefetch(fv_prefetch_take_turn(cursor->stream, &cursor->turn), 0, 2);
    }
}

/* --- one compiled form for each dtype and R -------------------------------------------------------------- */

typedef void (*fv_few_accumulate_fn)(float *sums, const float *weights, const float *rescale, const fv_key_rows *rows,
                                     int32_t first, int32_t end, int32_t v_head_size);

typedef void (*fv_few_dot_fn)(float *scores, const float *q, const fv_key_rows *rows, int32_t first, int32_t end,
                              int32_t head_size);

typedef struct fv_few_kernels {
    fv_few_dot_fn dot[FV_PREFETCH_NUM_ORDERS];
    int32_t (*softmax)(fv_row_group *group, float *scores, float rescale[FV_LANES], const fv_softmax_span *span);
    fv_few_accumulate_fn accumulate[FV_PREFETCH_NUM_ORDERS];
    fv_few_accumulate_fn accumulate_masked; /* of a stream in order */
} fv_few_kernels;

#define FV_FEW_DEFINE_DOT(NAME, DTYPE, ROWS, ORDER)                                                                  \
    static void dot_##NAME##_##ROWS##_##ORDER(float *scores, const float *q, const fv_key_rows *rows, int32_t first, \
                                              int32_t end, int32_t head_size)                                        \
    {                                                                                                                \
        fv_few_dot(scores, q, rows, first, end, head_size, ROWS, DTYPE, FV_PREFETCH_##ORDER);                        \
    }
#define FV_FEW_DEFINE_ACCUMULATE(NAME, DTYPE, ROWS, FORM, MASKED, ORDER)                                     \
    static void accumulate_##NAME##_##ROWS##_##FORM(float *sums, const float *weights, const float *rescale, \
                                                    const fv_key_rows *rows, int32_t first, int32_t end,     \
                                                    int32_t v_head_size)                                     \
    {                                                                                                        \
        fv_few_accumulate(sums, weights, rescale, rows, first, end, v_head_size, ROWS, DTYPE, MASKED,        \
                          FV_PREFETCH_##ORDER);                                                              \
    }
#define FV_FEW_DEFINE_ORDER(NAME, DTYPE, ROWS, ORDER) \
    FV_FEW_DEFINE_DOT(NAME, DTYPE, ROWS, ORDER)       \
    FV_FEW_DEFINE_ACCUMULATE(NAME, DTYPE, ROWS, ORDER, 0, ORDER)
#if FV_FEW_HAS_ORDERS
#define FV_FEW_DEFINE_ORDERS(NAME, DTYPE, ROWS)       \
    FV_FEW_DEFINE_ORDER(NAME, DTYPE, ROWS, IN_ORDER)  \
    FV_FEW_DEFINE_ORDER(NAME, DTYPE, ROWS, IN_TRACKS) \
    FV_FEW_DEFINE_ORDER(NAME, DTYPE, ROWS, NEAR)
#define FV_FEW_ORDERS_OF(FN, NAME, ROWS)                                                               \
    {                                                                                                  \
        FN##_##NAME##_##ROWS##_IN_ORDER, FN##_##NAME##_##ROWS##_IN_TRACKS, FN##_##NAME##_##ROWS##_NEAR \
    }
#else
#define FV_FEW_DEFINE_ORDERS(NAME, DTYPE, ROWS) FV_FEW_DEFINE_ORDER(NAME, DTYPE, ROWS, IN_ORDER)
#define FV_FEW_ORDERS_OF(FN, NAME, ROWS) \
    {                                    \
        FN##_##NAME##_##ROWS##_IN_ORDER  \
    }
#endif
#define FV_FEW_DEFINE_KERNELS(NAME, DTYPE, ROWS) \
    FV_FEW_DEFINE_ORDERS(NAME, DTYPE, ROWS)      \
    FV_FEW_DEFINE_ACCUMULATE(NAME, DTYPE, ROWS, masked, 1, IN_ORDER)
#define FV_FEW_DEFINE_SOFTMAX(ROWS)                                                            \
    static int32_t softmax_##ROWS(fv_row_group *group, float *scores, float rescale[FV_LANES], \
                                  const fv_softmax_span *span)                                 \
    {                                                                                          \
        return fv_row_group_softmax(group, scores, rescale, span, ROWS);                       \
    }
#if FV_FEW_HAS_3_ROWS
#define FV_FEW_DEFINE_3_ROWS(NAME, DTYPE) FV_FEW_DEFINE_KERNELS(NAME, DTYPE, 3)
#define FV_FEW_3_ROWS_OF(NAME) [3] = FV_FEW_KERNELS_OF(NAME, 3, 4),
#else
#define FV_FEW_DEFINE_3_ROWS(NAME, DTYPE)
#define FV_FEW_3_ROWS_OF(NAME)
#endif
#define FV_FEW_DEFINE_DTYPE(NAME, DTYPE)  \
    FV_FEW_DEFINE_KERNELS(NAME, DTYPE, 1) \
    FV_FEW_DEFINE_KERNELS(NAME, DTYPE, 2) \
    FV_FEW_DEFINE_3_ROWS(NAME, DTYPE)     \
    FV_FEW_DEFINE_KERNELS(NAME, DTYPE, 4)

/* Once in a file: defines the functions of FV_FEW_KERNEL_TABLE_FP8. */
#define FV_FEW_DEFINE_FP8                       \
    FV_FEW_DEFINE_SOFTMAX(1)                    \
    FV_FEW_DEFINE_SOFTMAX(2)                    \
    FV_FEW_DEFINE_SOFTMAX(4)                    \
    FV_FEW_DEFINE_DTYPE(e4m3, FV_DTYPE_F8_E4M3) \
    FV_FEW_DEFINE_DTYPE(e5m2, FV_DTYPE_F8_E5M2)

/* The same of FV_FEW_KERNEL_TABLE_PAIRS, what bf16 has exactly. */
#define FV_FEW_DEFINE_PAIRS                  \
    FV_FEW_DEFINE_FP8                        \
    FV_FEW_DEFINE_DTYPE(bf16, FV_DTYPE_BF16) \
    FV_FEW_DEFINE_DTYPE(i8, FV_DTYPE_I8)

/* And of FV_FEW_KERNEL_TABLE. */
#define FV_FEW_DEFINE_ALL                  \
    FV_FEW_DEFINE_PAIRS                    \
    FV_FEW_DEFINE_DTYPE(f32, FV_DTYPE_F32) \
    FV_FEW_DEFINE_DTYPE(f16, FV_DTYPE_F16)

#define FV_FEW_KERNELS_OF(NAME, ROWS, LANES)                                                          \
    {                                                                                                 \
        FV_FEW_ORDERS_OF(dot, NAME, ROWS), softmax_##LANES, FV_FEW_ORDERS_OF(accumulate, NAME, ROWS), \
            accumulate_##NAME##_##ROWS##_masked                                                       \
    }
#define FV_FEW_KERNELS_OF_DTYPE(NAME)                                             \
    {                                                                             \
        [1] = FV_FEW_KERNELS_OF(NAME, 1, 1), [2] = FV_FEW_KERNELS_OF(NAME, 2, 2), \
        FV_FEW_3_ROWS_OF(NAME)[4] = FV_FEW_KERNELS_OF(NAME, 4, 4)                 \
    }

/* [dtype][R] */
#define FV_FEW_KERNELS_OF_FP8 \
    [FV_DTYPE_F8_E4M3] = FV_FEW_KERNELS_OF_DTYPE(e4m3), [FV_DTYPE_F8_E5M2] = FV_FEW_KERNELS_OF_DTYPE(e5m2)
#define FV_FEW_KERNELS_OF_PAIRS \
    FV_FEW_KERNELS_OF_FP8, [FV_DTYPE_BF16] = FV_FEW_KERNELS_OF_DTYPE(bf16), [FV_DTYPE_I8] = FV_FEW_KERNELS_OF_DTYPE(i8)
#define FV_FEW_KERNELS_OF_ALL                                                                     \
    [FV_DTYPE_F32] = FV_FEW_KERNELS_OF_DTYPE(f32), [FV_DTYPE_F16] = FV_FEW_KERNELS_OF_DTYPE(f16), \
    FV_FEW_KERNELS_OF_PAIRS
#define FV_FEW_KERNEL_TABLE_FP8 \
    {                           \
        FV_FEW_KERNELS_OF_FP8,  \
    }
#define FV_FEW_KERNEL_TABLE_PAIRS \
    {                             \
        FV_FEW_KERNELS_OF_PAIRS,  \
    }
#define FV_FEW_KERNEL_TABLE    \
    {                          \
        FV_FEW_KERNELS_OF_ALL, \
    }

#endif
