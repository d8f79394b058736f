/* mla_query: queries against their formula in double, the keys against the table's rope_kv_write. */
#include <math.h>
#include <string.h>

#include "check/cache_case.h"
#include "check/cache_ops.h"
#include "check/row_rule.h"
#include "core/float.h"
#include "reference/reference.h"

enum { NOPE = 128, ROPE = 64, LATENT = 512, MAX_DEPTH = 448, MAX_POSITIONS = 300, NUM_JUDGED = 12 /* tokens */ };

typedef struct query_case {
    check_arena arena;
    fv_mla_query_params params;
    check_cache cache;
    char *k, *k_given;
    size_t k_bytes;
} query_case;

/* Rows [num_rows, size] with gaps of a multiple of 16 bytes. */
static char *build_matrix(int64_t *row_stride, query_case *test, int64_t num_rows, int32_t size, float factor,
                          check_random *random)
{
    const fv_dtype dtype = test->params.dtype;
    *row_stride = (int64_t)size * 2 + 16 * check_random_int(random, 0, 3);
    char *rows = check_arena_alloc(&test->arena, (size_t)(num_rows * *row_stride));
    for (int64_t row = 0; row < num_rows; row++)
        for (int32_t i = 0; i < size; i++)
            fv_float_store(rows + row * *row_stride + i * 2, factor * check_random_normal(random), dtype);
    return rows;
}

static void build_rotation(query_case *test, check_random *random)
{
    fv_rope_params *rope = &test->params.keys.rope;
    const int32_t num_rows = test->params.num_rows;
    rope->row_stride = ROPE / 2 + check_random_int(random, 0, 4);
    rope->max_position = check_random_int(random, 1, MAX_POSITIONS);
    const size_t count = (size_t)(rope->row_stride * rope->max_position);
    float *cosines = check_arena_alloc(&test->arena, count * sizeof(float));
    float *sines = check_arena_alloc(&test->arena, count * sizeof(float));
    for (size_t i = 0; i < count; i++) {
        cosines[i] = (float)cos((double)i);
        sines[i] = (float)sin((double)i);
    }
    int32_t *positions = check_arena_alloc(&test->arena, (size_t)num_rows * sizeof(int32_t));
    for (int32_t token = 0; token < num_rows; token++)
        positions[token] = check_random_int(random, check_random_chance(random, 10) ? -3 : 0,
                                            (int32_t)rope->max_position - 1);
    rope->cos = cosines;
    rope->sin = sines;
    rope->positions_32 = positions;
}

/* New keys, of which some have no slot. */
static void build_keys(query_case *test, check_random *random)
{
    fv_mla_query_params *p = &test->params;
    const int32_t is_narrow = check_random_chance(random, 30), bs = check_random_int(random, 1, 64);
    const check_cache_shape shape = {.layout = FV_KV_LAYOUT_LATENT,
                                     .dtype = is_narrow ? FV_DTYPE_F8_E4M3 : p->dtype,
                                     .block_size = bs,
                                     .num_kv_heads = 1,
                                     .head_size = LATENT + ROPE,
                                     .v_head_size = LATENT};
    check_cache_init(&test->cache, &test->arena, &shape, fv_ceil_div(p->num_rows, bs) + 1, random);
    int64_t stride;
    test->k = build_matrix(&stride, test, p->num_rows, LATENT + ROPE, 1, random);
    test->k_bytes = (size_t)(p->num_rows * stride);
    test->k_given = memcpy(check_arena_alloc(&test->arena, test->k_bytes), test->k, test->k_bytes);
    int64_t *slots = check_arena_alloc(&test->arena, (size_t)p->num_rows * sizeof(int64_t));
    const int64_t first = test->cache.first_block * bs;
    for (int32_t token = 0; token < p->num_rows; token++)
        slots[token] = check_random_chance(random, 10) ? -1 : first + p->num_rows - 1 - token;
    if (check_random_chance(random, 70)) p->keys.rope.k = (fv_rope_rows){test->k + LATENT * 2, stride, 0, 1};
    p->keys.write = (fv_kv_write_params){
        .k = test->k,
        .k_token_stride = stride,
        .src_dtype = p->dtype,
        .cache = test->cache.view,
        .slot_mapping = slots,
        .num_tokens = p->num_rows,
        .num_tokens_at = p->keys.rope.num_tokens_at,
    };
}

static void build_case(query_case *test, check_random *random)
{
    *test = (query_case){.params = {.dtype = check_random_chance(random, 50) ? FV_DTYPE_BF16 : FV_DTYPE_F16,
                                    .num_rows = check_random_int(random, 1, 140),
                                    .num_heads = check_random_int(random, 1, 3),
                                    .depth = 64 * check_random_int(random, 1, MAX_DEPTH / 64),
                                    .nope_size = NOPE,
                                    .rope_size = ROPE,
                                    .latent_size = LATENT}};
    fv_mla_query_params *p = &test->params;
    const int64_t kv_rows = NOPE + check_random_int(random, 0, 40);
    p->x = build_matrix(&p->x_row_stride, test, p->num_rows, p->depth, 1, random);
    p->q_up = build_matrix(&p->q_up_row_stride, test, p->num_heads * (NOPE + ROPE), p->depth,
                           1 / sqrtf((float)p->depth), random);
    p->kv_up = build_matrix(&p->kv_up_row_stride, test, p->num_heads * kv_rows, LATENT, 1 / sqrtf(NOPE), random);
    p->kv_up_head_stride = kv_rows * p->kv_up_row_stride;
    p->out = check_arena_alloc_fenced(&test->arena, (size_t)p->num_rows * (size_t)p->num_heads * (LATENT + ROPE) * 2);
    fv_rope_params *rope = &p->keys.rope;
    rope->dtype = p->dtype;
    rope->style = check_random_chance(random, 50) ? FV_ROPE_HALF : FV_ROPE_INTERLEAVED;
    rope->rope_dim = ROPE;
    rope->num_tokens = p->num_rows;
    if (check_random_chance(random, 40)) {
        int32_t *count = check_arena_alloc(&test->arena, sizeof(int32_t));
        *count = check_random_int(random, 0, p->num_rows + 3);
        rope->num_tokens_at = count;
    }
    build_rotation(test, random);
    build_keys(test, random);
}

/* --- judging ------------------------------------------------------------------------------------------------ */

static double element(const void *row, int32_t i, fv_dtype dtype)
{
    return fv_float_load((const char *)row + (int64_t)i * 2, dtype);
}

/* q of a head of a token. */
static void exact_query(double *q, const fv_mla_query_params *p, int32_t token, int32_t head)
{
    const char *x = (const char *)p->x + token * p->x_row_stride;
    for (int32_t i = 0; i < NOPE + ROPE; i++) {
        const char *up = (const char *)p->q_up + (head * (int64_t)(NOPE + ROPE) + i) * p->q_up_row_stride;
        q[i] = 0;
        for (int32_t d = 0; d < p->depth; d++) q[i] += element(x, d, p->dtype) * element(up, d, p->dtype);
    }
}

/* Of q_nope as it is rounded between the products. */
static void exact_absorbed(double *absorbed, const double *q, const fv_mla_query_params *p, int32_t head)
{
    const char *weights = (const char *)p->kv_up + head * p->kv_up_head_stride;
    for (int32_t i = 0; i < LATENT; i++) absorbed[i] = 0;
    for (int32_t d = 0; d < NOPE; d++) {
        uint32_t rounded;
        fv_float_store(&rounded, (float)q[d], p->dtype);
        const double factor = fv_float_load(&rounded, p->dtype);
        for (int32_t i = 0; i < LATENT; i++)
            absorbed[i] += factor * element(weights + d * p->kv_up_row_stride, i, p->dtype);
    }
}

static void exact_rotated(double *rotated, const double *q, const fv_rope_params *rope, int32_t token)
{
    const int64_t position = fv_rope_position(rope, token);
    const int32_t is_half = rope->style == FV_ROPE_HALF;
    memcpy(rotated, q, ROPE * sizeof(*q));
    for (int32_t i = 0; i < ROPE / 2 && position >= 0; i++) {
        const int32_t a = is_half ? i : 2 * i, b = is_half ? i + ROPE / 2 : 2 * i + 1;
        const double c = rope->cos[position * rope->row_stride + i], s = rope->sin[position * rope->row_stride + i];
        rotated[a] = q[a] * c - q[b] * s;
        rotated[b] = q[b] * c + q[a] * s;
    }
}

/* Sums of fp32 in any order. */
static double sum_floor(const double *row, int32_t size, int32_t depth)
{
    return CHECK_UNIT * (sqrt(depth) + 8) * check_row_norm(row, size);
}

static int32_t query_good(check_result *result, const fv_mla_query_params *p, int32_t token, int32_t head)
{
    double q[NOPE + ROPE], absorbed[LATENT], rotated[ROPE];
    const char *row = (const char *)p->out + ((int64_t)token * p->num_heads + head) * (LATENT + ROPE) * 2;
    exact_query(q, p, token, head);
    exact_absorbed(absorbed, q, p, head);
    exact_rotated(rotated, q + NOPE, &p->keys.rope, token);
    return check_row_good(&result->worst, row, absorbed, LATENT, p->dtype, sum_floor(absorbed, LATENT, NOPE)) &&
           check_row_good(&result->worst, row + LATENT * 2, rotated, ROPE, p->dtype,
                          sum_floor(rotated, ROPE, p->depth));
}

/* k and the cache as rope_kv_write of the same table, if it has one, makes them of what was given. */
static int32_t same_keys(query_case *test, const check_lane *lane, const fv_kernel_table *table)
{
    const fv_launch launch = check_lane_launch(lane);
    const fv_rope_kv_write_fn rope_kv_write = table->rope_kv_write ? table->rope_kv_write : fv_reference_rope_kv_write;
    char *k = memcpy(check_arena_alloc(&test->arena, test->k_bytes), test->k, test->k_bytes);
    char *cache = memcpy(check_arena_alloc(&test->arena, test->cache.bytes), test->cache.memory, test->cache.bytes);
    memcpy(test->k, test->k_given, test->k_bytes);
    memcpy(test->cache.memory, test->cache.given, test->cache.bytes);
    return check_lane_ran(lane, rope_kv_write(&launch, &test->params.keys)) == FV_OK &&
           memcmp(k, test->k, test->k_bytes) == 0 && memcmp(cache, test->cache.memory, test->cache.bytes) == 0;
}

static void judge(check_result *result, query_case *test, const check_lane *lane, const fv_kernel_table *table,
                  check_random *random)
{
    const fv_mla_query_params *p = &test->params;
    const int32_t num_tokens = fv_rope_tokens(&p->keys.rope);
    if (!check_arena_fences_whole(&test->arena)) {
        check_result_fail(result, "written beyond the end");
        return;
    }
    for (int32_t i = 0; i < NUM_JUDGED && num_tokens > 0; i++) {
        const int32_t token = i == 0 ? 0 : i == 1 ? num_tokens - 1 : check_random_int(random, 0, num_tokens - 1);
        const int32_t head = (i + 1) % p->num_heads;
        if (query_good(result, p, token, head)) continue;
        check_result_fail(result, "token %d of %d, head %d of %d, depth %d, %s: the query is wrong", token, num_tokens,
                          head, p->num_heads, p->depth, fv_dtype_name(p->dtype));
        return;
    }
    if (!same_keys(test, lane, table)) check_result_fail(result, "k or the cache is not what rope_kv_write makes");
}

void check_run_mla_query(check_result *result, const check_lane *lane, const fv_kernel_table *table, uint64_t seed,
                         int32_t index)
{
    check_random random = check_random_of(seed ^ 0x31a90, (uint64_t)index);
    check_result_init(result, "mla_query", "%s/mla_query", table->name);
    check_arena memory = {0}; /* of the case itself, whose arrays the kernel reads */
    query_case *test = check_arena_alloc(&memory, sizeof(*test));
    build_case(test, &random);
    const fv_launch launch = check_lane_launch(lane);
    const char *reason = table->mla_query->why_not(&launch, &test->params);
    if (reason)
        check_result_skip(result, "%s", reason);
    else if (check_lane_ran(lane, table->mla_query->run(&launch, &test->params)) != FV_OK)
        check_result_fail(result, "%s", fv_last_error());
    else
        judge(result, test, lane, table, &random);
    check_arena_clear(&test->arena);
    check_arena_clear(&memory);
}
