/* The order of a step, as the planner prices it:
 *
 *   for each group of `rows` rows
 *     for each KV block: unpack its keys twice, as stripes of keys (for Q K^T) and of columns (for P V)
 *       both products: for each stripe of depth, for each tile of columns, for each tile of rows: a base tile
 *
 * No softmax: S serves as P. Values are small enough for that. */
#include "info/tile_measure.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/error.h"

#define CONTEXT_KEYS 1024
#define RUNS 3

#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

typedef void (*tile_product)(float *sums, int64_t sums_stride, const float *a, int64_t a_stride, const float *b,
                             int32_t depth);

typedef struct tile_shape {
    int32_t m, n;
    tile_product run;
} tile_shape;

/* clang-format off */
#if defined(__x86_64__)
#define LOOPS avx2
#define LOOPS_TARGET __attribute__((target("avx2,fma")))
#define LOOPS_LANES 8
#define LOOPS_SHAPES \
    TILE(10, 1) TILE(11, 1) TILE(12, 1) TILE(13, 1) TILE(14, 1) TILE(5, 2) TILE(6, 2) TILE(4, 3) TILE(2, 5)
#include "info/tile_loops.h"

#define LOOPS avx512
#define LOOPS_TARGET __attribute__((target("avx512f")))
#define LOOPS_LANES 16
#define LOOPS_SHAPES \
    TILE(10, 1) TILE(11, 1) TILE(12, 1) TILE(13, 1) TILE(14, 1) TILE(5, 2) TILE(6, 2) TILE(7, 2) TILE(8, 2) \
    TILE(9, 2) TILE(10, 2) TILE(11, 2) TILE(12, 2) TILE(13, 2) TILE(14, 2) TILE(4, 3) TILE(5, 3) TILE(6, 3) \
    TILE(7, 3) TILE(8, 3) TILE(9, 3) TILE(3, 4) TILE(4, 4) TILE(5, 4) TILE(6, 4) TILE(2, 5) TILE(3, 5) \
    TILE(4, 5) TILE(5, 5) TILE(2, 6) TILE(3, 6) TILE(4, 6) TILE(2, 7) TILE(3, 7) TILE(2, 8) TILE(2, 9) \
    TILE(2, 10)
#include "info/tile_loops.h"
#endif
/* clang-format on */

struct fv_tile_measure {
    const tile_shape *shapes;
    int32_t num_shapes;
    fv_tiling_problem problem;
    uint16_t *cache; /* [CONTEXT_KEYS][qk_size] bf16 */
    float *q;        /* [rows][qk_size] */
};

/* What a tiling needs; rows and columns padded to whole base tiles. */
typedef struct step {
    const fv_tile_measure *measure;
    const fv_tiling *tiling;
    tile_product product;
    int32_t padded_rows, padded_keys, padded_v;
    float *s, *o;         /* [padded_rows][padded_keys], [padded_rows][padded_v] */
    float *keys, *values; /* [tile of keys][qk_size][n], [tile of columns][kv_block][n] */
} step;

static int32_t round_up(int32_t a, int32_t multiple) { return (int32_t)fv_round_up(a, multiple); }

fv_status fv_tile_measure_create(fv_tile_measure **measure, fv_isa isa, const fv_tiling_problem *problem)
{
    fv_tile_measure *m = calloc(1, sizeof(*m));
    if (!m) return fv_fail(FV_ERR_NO_MEMORY, "no memory to measure tilings");
    m->problem = *problem;
    /* Shapes of the base tiles that fit, level by level; the portable one is not worth the time. */
#if defined(__x86_64__)
    if (isa == FV_ISA_AVX2) m->shapes = shapes_avx2, m->num_shapes = FV_ARRAY_LEN(shapes_avx2);
    if (isa >= FV_ISA_AVX512) m->shapes = shapes_avx512, m->num_shapes = FV_ARRAY_LEN(shapes_avx512);
#endif
    if (m->num_shapes == 0) {
        free(m);
        return fv_fail(FV_ERR_UNSUPPORTED, "no loops to measure %s with; accepted: avx2, avx512", fv_isa_name(isa));
    }
    const size_t cache_size = (size_t)CONTEXT_KEYS * (size_t)problem->qk_size;
    /* Groups are padded to whole tiles of rows: room for the largest tile behind the last row. */
    const size_t q_size = (size_t)(problem->rows + 16) * (size_t)problem->qk_size;
    m->cache = malloc(cache_size * sizeof(*m->cache));
    m->q = malloc(q_size * sizeof(*m->q));
    if (!m->cache || !m->q) {
        fv_tile_measure_destroy(m);
        return fv_fail(FV_ERR_NO_MEMORY, "no memory to measure tilings");
    }
    for (size_t i = 0; i < cache_size; i++) m->cache[i] = (uint16_t)(0x3a00 + i * 2654435761u % 256); /* about 0.001 */
    for (size_t i = 0; i < q_size; i++) m->q[i] = 1e-3f * (float)(i % 17);
    *measure = m;
    return FV_OK;
}

void fv_tile_measure_destroy(fv_tile_measure *measure)
{
    if (!measure) return;
    free(measure->cache);
    free(measure->q);
    free(measure);
}

static float float_of(uint16_t bf16)
{
    const uint32_t bits = (uint32_t)bf16 << 16;
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static void unpack(const step *s, int32_t first_key)
{
    const int32_t n = s->tiling->qk.base.n, num_keys = s->tiling->kv_block;
    const int32_t qk_size = s->measure->problem.qk_size, v_size = s->measure->problem.v_size;
    for (int32_t key = 0; key < num_keys; key++) {
        const uint16_t *from = s->measure->cache + (int64_t)((first_key + key) % CONTEXT_KEYS) * qk_size;
        float *to = s->keys + (int64_t)(key / n) * qk_size * n + key % n;
        for (int32_t i = 0; i < qk_size; i++) to[(int64_t)i * n] = float_of(from[i]);
        for (int32_t i = 0; i < v_size; i += n) {
            float *row = s->values + ((int64_t)(i / n) * num_keys + key) * n;
            const int32_t width = fv_min_i32(n, v_size - i);
            for (int32_t j = 0; j < width; j++) row[j] = float_of(from[i + j]);
        }
    }
}

/* sums [rows][columns] += a [rows][depth] b, where b is [tile of columns][depth][n]. */
static void multiply(const step *s, const fv_product_tiling *tiling, float *sums, int64_t sums_stride, const float *a,
                     int64_t a_stride, const float *b, int32_t rows, int32_t columns, int32_t depth)
{
    const int32_t m = tiling->base.m, n = tiling->base.n;
    for (int32_t first = 0; first < depth; first += tiling->stripe) {
        const int32_t stripe = fv_min_i32(tiling->stripe, depth - first);
        for (int32_t column = 0; column < columns; column += n) {
            const float *b_stripe = b + ((int64_t)(column / n) * depth + first) * n;
            for (int32_t row = 0; row < rows; row += m) {
                s->product(sums + row * sums_stride + column, sums_stride, a + row * a_stride + first, a_stride,
                           b_stripe, stripe);
            }
        }
    }
}

static void run_group(const step *s, int32_t first_row, int32_t num_rows)
{
    const fv_tiling *t = s->tiling;
    const fv_tiling_problem *problem = &s->measure->problem;
    const int32_t rows = round_up(num_rows, t->qk.base.m);
    const float *q = s->measure->q + (int64_t)first_row * problem->qk_size;
    memset(s->o, 0, (size_t)s->padded_rows * (size_t)s->padded_v * sizeof(float));
    for (int32_t key = 0; key < CONTEXT_KEYS; key += t->kv_block) { /* the last block wraps around */
        unpack(s, key);
        memset(s->s, 0, (size_t)s->padded_rows * (size_t)s->padded_keys * sizeof(float));
        multiply(s, &t->qk, s->s, s->padded_keys, q, problem->qk_size, s->keys, rows, s->padded_keys, problem->qk_size);
        multiply(s, &t->pv, s->o, s->padded_v, s->s, s->padded_keys, s->values, rows, s->padded_v, t->kv_block);
    }
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double time_step(const step *s)
{
    const int32_t num_rows = s->measure->problem.rows;
    double best = -1;
    for (int32_t run = 0; run < RUNS; run++) {
        const double start = now();
        for (int32_t row = 0; row < num_rows; row += s->tiling->rows) {
            run_group(s, row, fv_min_i32(s->tiling->rows, num_rows - row));
        }
        const double time = now() - start;
        if (best < 0 || time < best) best = time;
    }
    return best / num_rows / (double)fv_round_up(CONTEXT_KEYS, s->tiling->kv_block);
}

static float *floats(int64_t rows, int64_t columns)
{
    const int64_t bytes = fv_round_up(rows * columns * 4, 64);
    float *memory = aligned_alloc(64, (size_t)bytes);
    if (memory) memset(memory, 0, (size_t)bytes);
    return memory;
}

/* NULL: there are no loops for the tile. */
static tile_product find_product(const fv_tile_measure *measure, const fv_tile *base)
{
    for (int32_t i = 0; i < measure->num_shapes; i++) {
        const tile_shape *shape = &measure->shapes[i];
        if (shape->m == base->m && shape->n == base->n) return shape->run;
    }
    return NULL;
}

fv_status fv_tile_measure_check(const fv_tile_measure *measure, const fv_tiling *tiling)
{
    const fv_tile *base = &tiling->qk.base;
    if (find_product(measure, base)) return FV_OK;
    return fv_fail(FV_ERR_UNSUPPORTED,
                   "no loops to measure a base tile of %d x %d with, the one for %d rows; accepted: "
                   "other --rows, or no --measure",
                   base->m, base->n, measure->problem.rows);
}

double fv_tile_measure_run(void *user, const fv_tiling *tiling)
{
    const fv_tile_measure *m = user;
    const fv_tile *base = &tiling->qk.base;
    step s = {.measure = m, .tiling = tiling, .product = find_product(m, base)};
    if (!s.product) return -1;
    s.padded_rows = round_up(fv_min_i32(tiling->rows, m->problem.rows), base->m);
    s.padded_keys = round_up(tiling->kv_block, base->n);
    s.padded_v = round_up(m->problem.v_size, base->n);
    s.s = floats(s.padded_rows, s.padded_keys);
    s.o = floats(s.padded_rows, s.padded_v);
    s.keys = floats(s.padded_keys, m->problem.qk_size);
    s.values = floats(s.padded_v, tiling->kv_block);
    const double time = s.s && s.o && s.keys && s.values ? time_step(&s) : -1;
    free(s.s);
    free(s.o);
    free(s.keys);
    free(s.values);
    return time;
}
