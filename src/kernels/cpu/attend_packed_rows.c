/* attend_paged for few rows over a cache whose K has its elements, and whose V has its slots, in pieces of
 * 16 bytes: the x-packed and the shuffled layout.
 *
 *   K   [D / x][slot][x]      scores [key][row] = K q:   pieces of x elements, one for each key
 *   V   [slot / x][D][x]      sums     [d][row] = V w:   pieces of x keys, one for each d
 *       [D][slot]
 *
 * So both products are one: outputs, each the sum over its pieces of a dot product of x elements with x
 * factors, which each of R rows has of its own. Eight accumulators hold 8 / R outputs for R rows, or twice
 * as many for bf16, where a load of 32 bytes takes two pieces: lanes 0 to 3 belong to the first output,
 * lanes 4 to 7 to the second. They are reduced once for a tile. Factors (queries once for a KV head,
 * weights once for a tile) are laid out as the pieces are.
 *
 * Heads are served one after the other. While K of a tile is multiplied, its V is prefetched, and during V
 * the next tile's K, a line for each line: a head has only its share of the sets of the L2 cache, for
 * blocks are a power of two apart, and whole tiles ahead would drive one another out. */
#include "kernels/cpu/attend_packed_rows.h"

#include "kernels/cpu/piece_rows.h"
#include "kernels/cpu/prefetch_stream.h"
#include "kernels/cpu/row_group.h"

enum {
    TILE_KEYS = 64,      /* of a tile, which starts at a multiple of it */
    GROUP_KEYS = 8,      /* keys of one block whose pieces lie side by side */
    MAX_STEP = 16,       /* outputs of a step */
    MAX_ROWS = 4,        /* R */
    MAX_FACTOR_WORDS = 2 /* floats of a factor */
};

/* Memory that lies in `num` runs of `bytes`, `stride` apart. */
typedef struct packed_area {
    const char *at;
    int64_t stride, bytes;
    int32_t num;
} packed_area;

/* The keys of one tile and head; `first` and `end` count from its first key. */
typedef struct packed_tile {
    const char *k[TILE_KEYS / GROUP_KEYS + 1]; /* first piece of each 8 keys; the last one is there twice */
    const char *v[TILE_KEYS / GROUP_KEYS];     /* first piece of each x keys */
    packed_area k_areas[TILE_KEYS / GROUP_KEYS];
    packed_area v_areas[TILE_KEYS / GROUP_KEYS];
    int32_t num_areas; /* of K, and of V */
    int32_t head;
    int32_t first_key;
    int32_t first, end;
} packed_tile;

/* Goes through the areas of the next tile, for the prefetches. */
typedef struct area_cursor {
    const char *at, *run_end;
    const packed_area *area, *areas_end;
    int32_t run;
} area_cursor;

/* Pieces of a tile that a product with V takes: those of [first, end), masked outside [all_first, all_end). */
typedef struct piece_range {
    int32_t first, end;
    int32_t all_first, all_end;
} piece_range;

typedef struct packed_scratch {
    fv_row_group *groups; /* [num_groups] */
    float *q;             /* [num_groups] factors */
    float *sums;          /* [num_groups][padded Dv][R] */
    float *scores;        /* [TILE_KEYS][R] */
    float *weights;       /* factors */
    float *k_scales;      /* [TILE_KEYS] */
    float *v_scales;
    float *row; /* [Dv] */
    size_t bytes;
} packed_scratch;

static packed_scratch packed_scratch_of(const fv_attend_params *params, int32_t num_rows, void *memory)
{
    const size_t rows = (size_t)fv_round_up(num_rows, fv_rows_in_group(num_rows));
    const size_t k_size = (size_t)params->head_size, v_size = (size_t)fv_round_up(params->v_head_size, MAX_STEP);
    packed_scratch scratch = {0};
    scratch.groups = fv_scratch_take(memory, &scratch.bytes, rows * sizeof(fv_row_group));
    scratch.q = fv_scratch_take(memory, &scratch.bytes, rows * k_size * MAX_FACTOR_WORDS * sizeof(float));
    scratch.sums = fv_scratch_take(memory, &scratch.bytes, rows * v_size * sizeof(float));
    scratch.scores = fv_scratch_take(memory, &scratch.bytes, TILE_KEYS * MAX_ROWS * sizeof(float));
    scratch.weights = fv_scratch_take(memory, &scratch.bytes, TILE_KEYS * MAX_ROWS * MAX_FACTOR_WORDS * sizeof(float));
    scratch.k_scales = fv_scratch_take(memory, &scratch.bytes, TILE_KEYS * sizeof(float));
    scratch.v_scales = fv_scratch_take(memory, &scratch.bytes, TILE_KEYS * sizeof(float));
    scratch.row = fv_scratch_take(memory, &scratch.bytes, v_size * sizeof(float));
    return scratch;
}

size_t FV_ISA_SYMBOL(fv_attend_packed_scratch)(const fv_attend_params *params)
{
    return packed_scratch_of(params, FV_DECODE_ROWS, NULL).bytes;
}

int32_t FV_ISA_SYMBOL(fv_attend_packed_serves)(const fv_attend_params *params)
{
    if (params->dense.k || !fv_cache_is_in_pieces(&params->cache)) return 0;
    return params->head_size * (int64_t)fv_dtype_bytes(params->cache.dtype) % FV_PIECE_BYTES == 0;
}

/* --- factors ------------------------------------------------------------------------------------------- */

/* bf16 comes in pairs of pieces. */
FV_ALWAYS_INLINE int32_t is_paired(const fv_dtype dtype) { return dtype == FV_DTYPE_BF16; }

/* Vectors of factors for a piece and row: even and odd elements, each twice, for a pair of pieces of 8
 * bf16; one for 8 fp16; two for 16 elements of a byte. */
FV_ALWAYS_INLINE int32_t factor_vectors(const fv_dtype dtype) { return dtype == FV_DTYPE_F16 ? 1 : 2; }

/* Elements of a piece. */
FV_ALWAYS_INLINE int32_t piece_elements(const fv_dtype dtype)
{
    return dtype == FV_DTYPE_BF16 || dtype == FV_DTYPE_F16 ? 8 : 16;
}

/* Outputs of a step. */
FV_ALWAYS_INLINE int32_t step_outputs(const int32_t num_rows, const fv_dtype dtype)
{
    return (is_paired(dtype) ? 2 : 1) * FV_LANES / num_rows;
}

/* Floats from one piece's factors to the next piece's: [piece][vector][R][8]. */
FV_ALWAYS_INLINE int32_t factor_stride(const int32_t num_rows, const fv_dtype dtype)
{
    return factor_vectors(dtype) * num_rows * FV_LANES;
}

/* Stores 8 successive factors of one row, of which the first has the index `first`. */
FV_ALWAYS_INLINE void store_factors(float *factors, fv_f32x8 natural, int32_t first, int32_t row,
                                    const int32_t num_rows, const fv_dtype dtype)
{
    float *to = factors + first / piece_elements(dtype) * factor_stride(num_rows, dtype) + row * FV_LANES;
    if (is_paired(dtype)) {
        fv_store_f32(to, __builtin_shufflevector(natural, natural, 0, 2, 4, 6, 0, 2, 4, 6));
        fv_store_f32(to + num_rows * FV_LANES, __builtin_shufflevector(natural, natural, 1, 3, 5, 7, 1, 3, 5, 7));
    } else {
        fv_store_f32(to + first % piece_elements(dtype) * num_rows, natural);
    }
}

/* Eight keys' weights of each row, from [key][R] to [R][key]. */
FV_ALWAYS_INLINE void transpose_weights(fv_f32x8 *rows, const float *weights, const int32_t num_rows)
{
    fv_f32x8 in[MAX_ROWS];
    FV_UNROLL
    for (int32_t i = 0; i < num_rows; i++) in[i] = fv_load_f32(weights + i * FV_LANES);
    if (num_rows == 1) {
        rows[0] = in[0];
    } else if (num_rows == 2) {
        rows[0] = __builtin_shufflevector(in[0], in[1], 0, 2, 4, 6, 8, 10, 12, 14);
        rows[1] = __builtin_shufflevector(in[0], in[1], 1, 3, 5, 7, 9, 11, 13, 15);
    } else {
        const fv_f32x8 low_a = __builtin_shufflevector(in[0], in[1], 0, 8, 1, 9, 4, 12, 5, 13);
        const fv_f32x8 low_b = __builtin_shufflevector(in[2], in[3], 0, 8, 1, 9, 4, 12, 5, 13);
        const fv_f32x8 high_a = __builtin_shufflevector(in[0], in[1], 2, 10, 3, 11, 6, 14, 7, 15);
        const fv_f32x8 high_b = __builtin_shufflevector(in[2], in[3], 2, 10, 3, 11, 6, 14, 7, 15);
        rows[0] = __builtin_shufflevector(low_a, low_b, 0, 4, 1, 5, 8, 12, 9, 13);
        rows[1] = __builtin_shufflevector(low_a, low_b, 2, 6, 3, 7, 10, 14, 11, 15);
        rows[2] = __builtin_shufflevector(high_a, high_b, 0, 4, 1, 5, 8, 12, 9, 13);
        rows[3] = __builtin_shufflevector(high_a, high_b, 2, 6, 3, 7, 10, 14, 11, 15);
    }
}

/* Weights [key][R] of the keys [first, end), multiples of 8, as factors. */
FV_ALWAYS_INLINE void pack_weights(float *factors, const float *weights, int32_t first, int32_t end,
                                   const int32_t num_rows, const fv_dtype dtype)
{
    for (int32_t key = first; key < end; key += FV_LANES) {
        fv_f32x8 rows[MAX_ROWS];
        transpose_weights(rows, weights + key * num_rows, num_rows);
        FV_UNROLL
        for (int32_t r = 0; r < num_rows; r++) store_factors(factors, rows[r], key, r, num_rows, dtype);
    }
}

/* --- the product ----------------------------------------------------------------------------------------- */

typedef uint32_t piece_bits __attribute__((vector_size(FV_PIECE_BYTES)));

/* One piece for two outputs `stride` apart (bf16), or for one. */
FV_ALWAYS_INLINE fv_f32x16 load_piece(const char *at, int64_t stride, const fv_dtype dtype)
{
    if (dtype == FV_DTYPE_F16) return (fv_f32x16){.a = fv_load8_f16(at)};
    if (!is_paired(dtype) || stride == FV_PIECE_BYTES) return fv_load16(at, dtype);
    piece_bits low, high;
    memcpy(&low, at, sizeof(low));
    memcpy(&high, at + stride, sizeof(high));
    const fv_u32x8 pairs = __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7);
    return (fv_f32x16){(fv_f32x8)(pairs << 16), (fv_f32x8)(pairs & 0xffff0000u)};
}

/* acc[j * R + r] += piece of output j x factors of row r. low: outputs 0 to 7 of the step, high: 8 to 15.
 * masked: a factor of 0 adds nothing, whatever the piece holds. */
FV_ALWAYS_INLINE void add_piece(fv_f32x8 *acc, const char *low, const char *high, int64_t stride, const float *factors,
                                const int32_t num_rows, const fv_dtype dtype, const int32_t masked)
{
    const int32_t num = FV_LANES / num_rows;
    const int32_t outputs = is_paired(dtype) ? 2 : 1;
    fv_f32x16 pieces[FV_LANES];
    FV_UNROLL
    for (int32_t j = 0; j < num; j++) {
        const int32_t output = j * outputs;
        pieces[j] = load_piece(output < 8 ? low + output * stride : high + (output - 8) * stride, stride, dtype);
    }
    FV_UNROLL
    for (int32_t r = 0; r < num_rows; r++) {
        const fv_f32x8 factor = fv_load_f32(factors + r * FV_LANES);
        const fv_i32x8 seen = (fv_i32x8)(factor != 0.0f);
        FV_UNROLL
        for (int32_t j = 0; j < num; j++) {
            const fv_f32x8 piece = masked ? (fv_f32x8)((fv_i32x8)pieces[j].a & seen) : pieces[j].a;
            acc[j * num_rows + r] = fv_fma(factor, piece, acc[j * num_rows + r]);
        }
    }
    if (factor_vectors(dtype) == 1) return;
    FV_UNROLL
    for (int32_t r = 0; r < num_rows; r++) {
        const fv_f32x8 factor = fv_load_f32(factors + (num_rows + r) * FV_LANES);
        const fv_i32x8 seen = (fv_i32x8)(factor != 0.0f);
        FV_UNROLL
        for (int32_t j = 0; j < num; j++) {
            const fv_f32x8 piece = masked ? (fv_f32x8)((fv_i32x8)pieces[j].b & seen) : pieces[j].b;
            acc[j * num_rows + r] = fv_fma(factor, piece, acc[j * num_rows + r]);
        }
    }
}

/* Four accumulators, whose halves belong to two outputs, to the sums of their halves. */
FV_ALWAYS_INLINE fv_f32x8 reduce_halves(fv_f32x8 a, fv_f32x8 b, fv_f32x8 c, fv_f32x8 d)
{
    const fv_f32x8 ab = __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13) +
                        __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
    const fv_f32x8 cd = __builtin_shufflevector(c, d, 0, 8, 1, 9, 4, 12, 5, 13) +
                        __builtin_shufflevector(c, d, 2, 10, 3, 11, 6, 14, 7, 15);
    return __builtin_shufflevector(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) +
           __builtin_shufflevector(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
}

/* The accumulators of a step to [output][R]. Returns the number of vectors. */
FV_ALWAYS_INLINE int32_t reduce_step(fv_f32x8 reduced[2], const fv_f32x8 *acc, const int32_t num_rows,
                                     const fv_dtype dtype)
{
    if (!is_paired(dtype)) {
        reduced[0] = fv_reduce8(acc);
        return 1;
    }
    FV_UNROLL
    for (int32_t i = 0; i < 2; i++) {
        const fv_f32x8 value = reduce_halves(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
        if (num_rows == 1) reduced[i] = __builtin_shufflevector(value, value, 0, 4, 1, 5, 2, 6, 3, 7);
        if (num_rows == 2) reduced[i] = __builtin_shufflevector(value, value, 0, 1, 4, 5, 2, 3, 6, 7);
        if (num_rows == 4) reduced[i] = value;
    }
    return 2;
}

static void next_run(area_cursor *cursor)
{
    if (cursor->area == cursor->areas_end) {
        cursor->run_end = cursor->at;
        return;
    }
    cursor->at = cursor->area->at + cursor->run * cursor->area->stride;
    cursor->run_end = cursor->at + cursor->area->bytes;
    if (++cursor->run < cursor->area->num) return;
    cursor->run = 0;
    cursor->area++;
}

FV_ALWAYS_INLINE const char *take_ahead(area_cursor *cursor, int64_t bytes)
{
    if (FV_UNLIKELY(cursor->at >= cursor->run_end)) next_run(cursor);
    const char *at = cursor->at;
    if (at < cursor->run_end) cursor->at += bytes;
    return at;
}

/* Scores of the keys [first, end), and of those that share a step with them. */
FV_ALWAYS_INLINE void dot(float *scores, const float *q, const packed_tile *tile, area_cursor *ahead,
                          int64_t chunk_stride, int32_t num_pieces, int32_t first, int32_t end, const int32_t num_rows,
                          const fv_dtype dtype)
{
    const int32_t step = step_outputs(num_rows, dtype);
    for (int32_t key = first / step * step; key < end; key += step) {
        const char *low = tile->k[key / GROUP_KEYS] + key % GROUP_KEYS * FV_PIECE_BYTES;
        const char *high = tile->k[key / GROUP_KEYS + 1];
        const char *next = take_ahead(ahead, num_pieces * step * FV_PIECE_BYTES);
        fv_f32x8 acc[FV_LANES];
        FV_UNROLL
        for (int32_t i = 0; i < FV_LANES; i++) acc[i] = fv_splat(0.0f);
        for (int32_t p = 0; p < num_pieces; p++) {
            fv_prefetch_bytes(next + p * step * FV_PIECE_BYTES, step * FV_PIECE_BYTES);
            add_piece(acc, low + p * chunk_stride, high + p * chunk_stride, FV_PIECE_BYTES,
                      q + p * factor_stride(num_rows, dtype), num_rows, dtype, 0);
        }
        fv_f32x8 reduced[2];
        const int32_t num = reduce_step(reduced, acc, num_rows, dtype);
        FV_UNROLL
        for (int32_t i = 0; i < num; i++) fv_store_f32(scores + key * num_rows + i * FV_LANES, reduced[i]);
    }
}

FV_ALWAYS_INLINE void add_pieces(fv_f32x8 *acc, const char *const *v, int64_t low, int64_t high, int64_t stride,
                                 const float *weights, int32_t first, int32_t end, const char *next,
                                 const int32_t num_rows, const fv_dtype dtype, const int32_t masked)
{
    const int32_t step_bytes = step_outputs(num_rows, dtype) * FV_PIECE_BYTES;
    for (int32_t p = first; p < end; p++) {
        fv_prefetch_bytes(next + p * step_bytes, step_bytes);
        add_piece(acc, v[p] + low, v[p] + high, stride, weights + p * factor_stride(num_rows, dtype), num_rows, dtype,
                  masked);
    }
}

/* sums = sums * rescale + V weights, with sums [d][R] up to the end of the last step. rescale NULL: all 1. */
FV_ALWAYS_INLINE void accumulate(float *sums, const float *weights, const float *rescale, const packed_tile *tile,
                                 area_cursor *ahead, int64_t stride, piece_range range, int32_t v_head_size,
                                 const int32_t num_rows, const fv_dtype dtype)
{
    const int32_t step = step_outputs(num_rows, dtype);
    const fv_f32x8 shrink = rescale ? fv_load_f32(rescale) : fv_splat(1.0f);
    for (int32_t d = 0; d < v_head_size; d += step) {
        const int64_t low = d * stride;
        const int64_t high = d + 8 < v_head_size ? low + 8 * stride : low; /* past the end: anything */
        const char *next = take_ahead(ahead, (range.end - range.first) * step * FV_PIECE_BYTES) -
                           range.first * step * FV_PIECE_BYTES;
        fv_f32x8 acc[FV_LANES];
        FV_UNROLL
        for (int32_t i = 0; i < FV_LANES; i++) acc[i] = fv_splat(0.0f);
        add_pieces(acc, tile->v, low, high, stride, weights, range.first, range.all_first, next, num_rows, dtype, 1);
        add_pieces(acc, tile->v, low, high, stride, weights, range.all_first, range.all_end, next, num_rows, dtype, 0);
        add_pieces(acc, tile->v, low, high, stride, weights, range.all_end, range.end, next, num_rows, dtype, 1);
        fv_f32x8 reduced[2];
        const int32_t num = reduce_step(reduced, acc, num_rows, dtype);
        FV_UNROLL
        for (int32_t i = 0; i < num; i++) {
            float *to = sums + d * num_rows + i * FV_LANES;
            fv_store_f32(to, fv_fma(fv_load_f32(to), shrink, reduced[i]));
        }
    }
}

/* --- one compiled form for each dtype and R -------------------------------------------------------------- */

typedef struct packed_kernels {
    void (*store_query)(float *factors, fv_f32x8 natural, int32_t first, int32_t row);
    void (*dot)(float *scores, const float *q, const packed_tile *tile, area_cursor *ahead, int64_t chunk_stride,
                int32_t num_pieces, int32_t first, int32_t end);
    int32_t (*softmax)(fv_row_group *group, float *scores, float rescale[FV_LANES], const fv_softmax_span *span);
    void (*pack_weights)(float *factors, const float *weights, int32_t first, int32_t end);
    void (*accumulate)(float *sums, const float *weights, const float *rescale, const packed_tile *tile,
                       area_cursor *ahead, int64_t stride, piece_range range, int32_t v_head_size);
} packed_kernels;

#define DEFINE_KERNELS(NAME, DTYPE, ROWS)                                                                       \
    static void store_query_##NAME##_##ROWS(float *factors, fv_f32x8 natural, int32_t first, int32_t row)       \
    {                                                                                                           \
        store_factors(factors, natural, first, row, ROWS, DTYPE);                                               \
    }                                                                                                           \
    static void dot_##NAME##_##ROWS(float *scores, const float *q, const packed_tile *tile, area_cursor *ahead, \
                                    int64_t chunk_stride, int32_t num_pieces, int32_t first, int32_t end)       \
    {                                                                                                           \
        dot(scores, q, tile, ahead, chunk_stride, num_pieces, first, end, ROWS, DTYPE);                         \
    }                                                                                                           \
    static void pack_weights_##NAME##_##ROWS(float *factors, const float *weights, int32_t first, int32_t end)  \
    {                                                                                                           \
        pack_weights(factors, weights, first, end, ROWS, DTYPE);                                                \
    }                                                                                                           \
    static void accumulate_##NAME##_##ROWS(float *sums, const float *weights, const float *rescale,             \
                                           const packed_tile *tile, area_cursor *ahead, int64_t stride,         \
                                           piece_range range, int32_t v_head_size)                              \
    {                                                                                                           \
        if (stride == FV_PIECE_BYTES)                                                                           \
            accumulate(sums, weights, rescale, tile, ahead, FV_PIECE_BYTES, range, v_head_size, ROWS, DTYPE);   \
        else                                                                                                    \
            accumulate(sums, weights, rescale, tile, ahead, stride, range, v_head_size, ROWS, DTYPE);           \
    }
#define DEFINE_SOFTMAX(ROWS)                                                                   \
    static int32_t softmax_##ROWS(fv_row_group *group, float *scores, float rescale[FV_LANES], \
                                  const fv_softmax_span *span)                                 \
    {                                                                                          \
        return fv_row_group_softmax(group, scores, rescale, span, ROWS);                       \
    }
#define DEFINE_DTYPE(NAME, DTYPE)  \
    DEFINE_KERNELS(NAME, DTYPE, 1) \
    DEFINE_KERNELS(NAME, DTYPE, 2) \
    DEFINE_KERNELS(NAME, DTYPE, 4)

DEFINE_SOFTMAX(1)
DEFINE_SOFTMAX(2)
DEFINE_SOFTMAX(4)
DEFINE_DTYPE(f16, FV_DTYPE_F16)
DEFINE_DTYPE(bf16, FV_DTYPE_BF16)
DEFINE_DTYPE(e4m3, FV_DTYPE_F8_E4M3)
DEFINE_DTYPE(e5m2, FV_DTYPE_F8_E5M2)
DEFINE_DTYPE(i8, FV_DTYPE_I8)

#define KERNELS_OF(NAME, ROWS)                                                                          \
    {                                                                                                   \
        store_query_##NAME##_##ROWS, dot_##NAME##_##ROWS, softmax_##ROWS, pack_weights_##NAME##_##ROWS, \
            accumulate_##NAME##_##ROWS                                                                  \
    }
#define KERNELS_OF_DTYPE(NAME)                                                          \
    {                                                                                   \
        [1] = KERNELS_OF(NAME, 1), [2] = KERNELS_OF(NAME, 2), [4] = KERNELS_OF(NAME, 4) \
    }

static const packed_kernels kernels_of[][5] = {
    [FV_DTYPE_F16] = KERNELS_OF_DTYPE(f16),      [FV_DTYPE_BF16] = KERNELS_OF_DTYPE(bf16),
    [FV_DTYPE_F8_E4M3] = KERNELS_OF_DTYPE(e4m3), [FV_DTYPE_F8_E5M2] = KERNELS_OF_DTYPE(e5m2),
    [FV_DTYPE_I8] = KERNELS_OF_DTYPE(i8),
};

/* --- one tile, one item ------------------------------------------------------------------------------------ */

typedef struct packed_item {
    const fv_attend_job *job;
    packed_scratch scratch;
    int32_t num_groups;
    int32_t num_rows; /* R */
    int32_t x;        /* elements of a piece */
    int32_t first_tile, end_tile;
    const packed_kernels *kernels;
} packed_item;

static float *group_q(const packed_item *packed, int32_t g)
{
    return packed->scratch.q + (int64_t)g * packed->num_rows * packed->job->params->head_size * MAX_FACTOR_WORDS;
}

static float *group_sums(const packed_item *packed, int32_t g)
{
    return packed->scratch.sums + g * packed->num_rows * fv_round_up(packed->job->params->v_head_size, MAX_STEP);
}

static void head_init(const packed_item *packed, int32_t kv_head)
{
    const fv_attend_job *job = packed->job;
    const fv_attend_params *params = job->params;
    const int32_t num_rows = packed->num_rows;
    const size_t q_bytes = fv_dtype_bytes(params->q_dtype);
    for (int32_t g = 0; g < packed->num_groups; g++) {
        fv_row_group_init(&packed->scratch.groups[g], job, kv_head, g * num_rows, num_rows);
        for (int32_t r = 0; r < num_rows; r++) {
            const char *from = fv_attend_q_row(job, kv_head, fv_min_i32(g * num_rows + r, job->num_rows - 1));
            for (int32_t d = 0; d < params->head_size; d += FV_LANES) {
                const fv_f32x8 natural = fv_load8(from + (size_t)d * q_bytes, params->q_dtype);
                packed->kernels->store_query(group_q(packed, g), natural, d, r);
            }
        }
    }
    const int64_t num_sums = packed->num_groups * num_rows * fv_round_up(params->v_head_size, MAX_STEP);
    memset(packed->scratch.sums, 0, (size_t)num_sums * sizeof(float));
}

static packed_area area_of(const char *at, int64_t num, int64_t stride, int64_t bytes)
{
    if (num > 1 && stride == bytes) return (packed_area){at, 0, num * bytes, 1};
    return (packed_area){at, stride, bytes, (int32_t)num};
}

/* Looks up tile `index` of a KV head. */
static void find_tile(packed_tile *tile, const packed_item *packed, int32_t kv_head, int32_t index)
{
    const fv_attend_job *job = packed->job;
    const fv_kv_view *cache = &job->params->cache;
    const fv_kv_plane *k = &cache->k, *v = &cache->v;
    const int32_t x = packed->x;
    tile->head = kv_head;
    tile->first_key = index * TILE_KEYS;
    tile->first = fv_max_i32(job->keys.first - tile->first_key, 0);
    tile->end = fv_min_i32(job->keys.end - tile->first_key, TILE_KEYS);
    tile->num_areas = 0;
    const int32_t end = (int32_t)fv_round_up(tile->end, x);
    for (int32_t key = tile->first / x * x; key < end;) {
        const int32_t slot = (tile->first_key + key) % cache->block_size;
        const int32_t num = fv_min_i32(cache->block_size - slot, end - key);
        const int64_t block = job->table[(tile->first_key + key) / cache->block_size];
        const char *k_at = (const char *)k->data + fv_kv_row_offset(k, block, kv_head, slot);
        const char *v_at = (const char *)v->data + fv_kv_row_offset(v, block, kv_head, 0);
        for (int32_t i = 0; i < num; i += GROUP_KEYS) tile->k[(key + i) / GROUP_KEYS] = k_at + i * FV_PIECE_BYTES;
        for (int32_t i = 0; i < num; i += x) tile->v[(key + i) / x] = v_at + fv_kv_slot_offset(v, slot + i);
        tile->k_areas[tile->num_areas] = area_of(k_at, job->params->head_size / x, k->element_chunk_stride,
                                                 (int64_t)num * FV_PIECE_BYTES);
        tile->v_areas[tile->num_areas++] =
            v->element_stride == FV_PIECE_BYTES
                ? area_of(tile->v[key / x], num / x, v->slot_chunk_stride, job->params->v_head_size * FV_PIECE_BYTES)
                : area_of(tile->v[key / x], job->params->v_head_size, v->element_stride, num / x * FV_PIECE_BYTES);
        key += num;
    }
    /* A step may reach over 16 keys. */
    const int32_t first_group = tile->first / x * x / GROUP_KEYS;
    if (first_group % 2 != 0) tile->k[first_group - 1] = tile->k[first_group];
    tile->k[end / GROUP_KEYS] = tile->k[end / GROUP_KEYS - 1];
}

/* Weights beyond the vectors that the softmax has seen, to the ends of the pieces, become 0. */
static void clear_rest(float *weights, int32_t first, int32_t end, int32_t num_rows, int32_t x)
{
    const int32_t num_keys = FV_LANES / num_rows;
    for (int32_t i = first / x * x * num_rows; i < first / num_keys * num_keys * num_rows; i++) weights[i] = 0.0f;
    for (int32_t i = (int32_t)fv_round_up(end, num_keys) * num_rows; i < (int32_t)fv_round_up(end, x) * num_rows; i++) {
        weights[i] = 0.0f;
    }
}

static void attend_group(const packed_item *packed, const packed_tile *tile, area_cursor *v_ahead, area_cursor *k_ahead,
                         int32_t g)
{
    const fv_attend_params *params = packed->job->params;
    const packed_scratch *scratch = &packed->scratch;
    const int32_t num_rows = packed->num_rows, x = packed->x;
    fv_row_group *group = &scratch->groups[g];
    const int32_t first = fv_max_i32(group->some.first - tile->first_key, tile->first);
    const int32_t end = fv_min_i32(group->some.end - tile->first_key, tile->end);
    if (first >= end) return;

    const int32_t num_keys = FV_LANES / num_rows;
    const int32_t all_first = fv_max_i32(group->all.first - tile->first_key, first);
    const int32_t all_end = fv_min_i32(group->all.end - tile->first_key, end);
    const fv_softmax_span span = {
        .job = packed->job,
        .k_scales = params->cache.k_scales.data ? scratch->k_scales : NULL,
        .v_scales = params->cache.v_scales.data ? scratch->v_scales : NULL,
        .first_key = tile->first_key,
        .first = first,
        .end = end,
        .first_row = g * num_rows,
        .weight_factor = 1.0f,
        .is_edge = all_first > first || all_end < end || first % num_keys != 0 || end % num_keys != 0,
        .scale = fv_attend_score_scale(packed->job, tile->head),
    };
    float rescale[FV_LANES];
    packed->kernels->dot(scratch->scores, group_q(packed, g), tile, v_ahead, params->cache.k.element_chunk_stride,
                         params->head_size / x, first, end);
    const int32_t max_grew = packed->kernels->softmax(group, scratch->scores, rescale, &span);

    piece_range range = {first / x, (end + x - 1) / x, (all_first + x - 1) / x, all_end / x};
    if (range.all_first >= range.all_end) range.all_first = range.all_end = range.end;
    clear_rest(scratch->scores, first, end, num_rows, x);
    packed->kernels->pack_weights(scratch->weights, scratch->scores, range.first * x, range.end * x);
    packed->kernels->accumulate(group_sums(packed, g), scratch->weights, max_grew ? rescale : NULL, tile, k_ahead,
                                params->cache.v.element_stride, range, params->v_head_size);
}

/* Scales of the tile's keys, with 1 up to whole vectors. */
static void find_scales(float *scales, const fv_attend_job *job, const fv_scale_plane *plane, const packed_tile *tile)
{
    if (!plane->data) return;
    for (int32_t i = tile->first / FV_LANES * FV_LANES; i < tile->first; i++) scales[i] = 1.0f;
    fv_attend_find_scales(scales + tile->first, job, plane, NULL, tile->head, tile->first_key + tile->first,
                          tile->first_key + tile->end);
    for (int32_t i = tile->end; i % FV_LANES != 0; i++) scales[i] = 1.0f;
}

/* `next` NULL: this is the last tile. */
static void attend_tile(const packed_item *packed, const packed_tile *tile, const packed_tile *next)
{
    const fv_kv_view *cache = &packed->job->params->cache;
    const char *q = (const char *)packed->scratch.q;
    area_cursor v_ahead = {.at = q, .run_end = q, .area = tile->v_areas, .areas_end = tile->v_areas + tile->num_areas};
    area_cursor k_ahead = {.at = q, .run_end = q};
    if (next) {
        k_ahead.area = next->k_areas;
        k_ahead.areas_end = next->k_areas + next->num_areas;
    }
    find_scales(packed->scratch.k_scales, packed->job, &cache->k_scales, tile);
    find_scales(packed->scratch.v_scales, packed->job, &cache->v_scales, tile);
    for (int32_t g = 0; g < packed->num_groups; g++) attend_group(packed, tile, &v_ahead, &k_ahead, g);
}

static void finish_head(const packed_item *packed, int32_t kv_head)
{
    const int32_t v_head_size = packed->job->params->v_head_size;
    const int32_t num_rows = packed->num_rows;
    float *out = packed->scratch.row;
    for (int32_t row = 0; row < packed->job->num_rows; row++) {
        const int32_t g = row / num_rows, lane = row % num_rows;
        const float *sums = group_sums(packed, g) + lane;
        for (int32_t d = 0; d < v_head_size; d++) out[d] = sums[d * num_rows];
        fv_row_load_lanes(out, out, v_head_size, FV_DTYPE_F32, packed->job->lane_dtype);
        const fv_row_group *group = &packed->scratch.groups[g];
        const fv_f32x8 sum = fv_sum_by_period(group->sum, num_rows);
        fv_attend_finish_row(packed->job, kv_head, row, out, group->max[lane], sum[lane]);
    }
}

void FV_ISA_SYMBOL(fv_attend_packed_rows)(const fv_attend_job *job, void *memory)
{
    const fv_attend_params *params = job->params;
    const int32_t num_rows = fv_rows_in_group(job->num_rows);
    const packed_item packed = {
        .job = job,
        .scratch = packed_scratch_of(params, job->num_rows, memory),
        .num_groups = (job->num_rows + num_rows - 1) / num_rows,
        .num_rows = num_rows,
        .x = FV_PIECE_BYTES / (int32_t)fv_dtype_bytes(params->cache.dtype),
        .first_tile = job->keys.first / TILE_KEYS,
        .end_tile = (int32_t)fv_ceil_div(job->keys.end, TILE_KEYS),
        .kernels = &kernels_of[params->cache.dtype][num_rows],
    };
    const int32_t first_head = job->item->first_kv_head, end_head = first_head + job->item->num_kv_heads;
    const int32_t has_keys = packed.first_tile < packed.end_tile;
    packed_tile tiles[2];
    int32_t now = 0;
    if (has_keys) find_tile(&tiles[now], &packed, first_head, packed.first_tile);
    for (int32_t head = first_head; head < end_head; head++) {
        head_init(&packed, head);
        for (int32_t index = packed.first_tile; index < packed.end_tile; index++, now ^= 1) {
            const int32_t is_last = index + 1 == packed.end_tile;
            const int32_t next_head = is_last ? head + 1 : head;
            packed_tile *next = next_head < end_head ? &tiles[now ^ 1] : NULL;
            if (next) find_tile(next, &packed, next_head, is_last ? packed.first_tile : index + 1);
            attend_tile(&packed, &tiles[now], next);
        }
        finish_head(&packed, head);
    }
}
