/* rope against its formula in double; rope_kv_write against rope and the reference's kv_write. */
#include <math.h>
#include <string.h>

#include "check/cache_case.h"
#include "check/cache_ops.h"
#include "core/float.h"
#include "reference/reference.h"

#define MAX_TOKENS 40
#define MAX_PADDING 3

/* Rows [T', H, size] with gaps, full of numbers, also in padding; random bytes between. */
typedef struct rows_case {
    char *memory, *given;
    size_t bytes;
    int64_t token_stride, head_stride;
    int64_t rope_at; /* bytes of a head before what is rotated */
    int32_t num_heads, size;
} rows_case;

typedef struct rope_case {
    check_arena arena;
    rows_case q, k, v, q_copy;
    int64_t *slots; /* [tokens and padding] */
    check_cache cache;
    fv_rope_kv_write_params params; /* rope: only those of rope */
} rope_case;

static void build_rows(rows_case *rows, check_arena *arena, fv_dtype dtype, int32_t num_rows, int32_t num_heads,
                       int32_t size, check_random *random)
{
    const int64_t element = (int64_t)fv_dtype_bytes(dtype), base = check_random_int(random, 0, 3) * element;
    *rows = (rows_case){.num_heads = num_heads, .size = size};
    rows->head_stride = (size + check_random_int(random, 0, 5)) * element;
    rows->token_stride = num_heads * rows->head_stride + check_random_int(random, 0, 9) * element;
    const size_t bytes = (size_t)(base + num_rows * rows->token_stride);
    char *memory = check_arena_alloc_fenced(arena, bytes);
    for (size_t i = 0; i < bytes; i++) memory[i] = (char)check_random_next(random);
    rows->memory = memory + base;
    rows->bytes = bytes - (size_t)base;
    for (int32_t token = 0; token < num_rows; token++)
        for (int32_t head = 0; head < num_heads; head++)
            for (int32_t d = 0; d < size; d++)
                fv_float_store(rows->memory + token * rows->token_stride + head * rows->head_stride + d * element,
                               2 * check_random_normal(random), dtype);
    rows->given = memcpy(check_arena_alloc(arena, rows->bytes), rows->memory, rows->bytes);
}

static fv_rope_rows rope_rows_of(const rows_case *rows)
{
    return (fv_rope_rows){rows->memory + rows->rope_at, rows->token_stride, rows->head_stride, rows->num_heads};
}

/* Tables apart or cos beside sin, as vLLM has them; NaN in gaps. */
static void build_tables(rope_case *test, check_random *random)
{
    fv_rope_params *p = &test->params.rope;
    const int32_t half = p->rope_dim / 2, beside = check_random_chance(random, 50);
    p->max_position = check_random_int(random, 1, 300);
    p->row_stride = (beside ? 2 : 1) * half + check_random_int(random, 0, 4);
    const size_t count = (size_t)(p->row_stride * p->max_position);
    float *cosines = check_arena_alloc(&test->arena, count * sizeof(float)), *sines = cosines + half;
    if (!beside) sines = check_arena_alloc(&test->arena, count * sizeof(float));
    for (size_t i = 0; i < count; i++) cosines[i] = NAN;
    for (size_t i = 0; i < count && !beside; i++) sines[i] = NAN;
    for (int64_t position = 0; position < p->max_position; position++) {
        for (int32_t i = 0; i < half; i++) {
            const double angle = (double)position * pow(10000, -2.0 * i / p->rope_dim);
            cosines[position * p->row_stride + i] = (float)cos(angle);
            sines[position * p->row_stride + i] = (float)sin(angle);
        }
    }
    p->cos = cosines;
    p->sin = sines;
}

/* In 32 or 64 bits, some outside the tables. */
static void build_positions(rope_case *test, int32_t num_rows, check_random *random)
{
    fv_rope_params *p = &test->params.rope;
    const int32_t wide = check_random_chance(random, 50);
    const int64_t outside[] = {-1,        p->max_position,       INT32_MAX,
                               INT32_MIN, wide ? INT64_MAX : -7, wide ? (1ll << 32) : -9};
    int64_t *positions = check_arena_alloc(&test->arena, (size_t)num_rows * sizeof(int64_t));
    int32_t *positions_32 = check_arena_alloc(&test->arena, (size_t)num_rows * sizeof(int32_t));
    for (int32_t token = 0; token < num_rows; token++) {
        positions[token] = check_random_int(random, 0, (int32_t)p->max_position - 1);
        if (check_random_chance(random, 10)) positions[token] = CHECK_RANDOM_PICK(random, outside);
        positions_32[token] = (int32_t)positions[token];
    }
    p->positions_32 = wide ? NULL : positions_32;
    p->positions_64 = wide ? positions : NULL;
}

/* The number of tokens may be read where the kernel runs, and be smaller or (which the kernel cuts) larger. */
static void build_count(rope_case *test, check_random *random)
{
    fv_rope_params *p = &test->params.rope;
    p->num_tokens = check_random_int(random, 0, MAX_TOKENS);
    if (!check_random_chance(random, 40)) return;
    int32_t *count = check_arena_alloc(&test->arena, sizeof(int32_t));
    *count = check_random_int(random, 0, p->num_tokens + MAX_PADDING);
    p->num_tokens_at = count;
}

/* q and k of sizes that are not that of the cache; each may be absent, not both. */
static void build_rope(rope_case *test, check_random *random)
{
    static const fv_dtype dtypes[] = {FV_DTYPE_F32, FV_DTYPE_F16, FV_DTYPE_BF16};
    static const int32_t common_dims[] = {32, 64, 128};
    *test = (rope_case){.params.rope = {.dtype = CHECK_RANDOM_PICK(random, dtypes),
                                        .style = (fv_rope_style)check_random_int(random, 0, 1)}};
    fv_rope_params *p = &test->params.rope;
    build_count(test, random);
    p->rope_dim = check_random_chance(random, 50) ? CHECK_RANDOM_PICK(random, common_dims)
                                                  : 2 * check_random_int(random, 1, 70);
    const int32_t num_rows = p->num_tokens + check_random_int(random, 0, MAX_PADDING);
    const int32_t size = p->rope_dim + (check_random_chance(random, 50) ? check_random_int(random, 0, 70) : 0);
    const int32_t which = check_random_int(random, 0, 9); /* 0: only k, 1: only q */
    build_rows(&test->q, &test->arena, p->dtype, num_rows, check_random_int(random, 1, 9), size, random);
    build_rows(&test->k, &test->arena, p->dtype, num_rows, check_random_int(random, 1, 3), size, random);
    if (which != 0) p->q = rope_rows_of(&test->q);
    if (which != 1) p->k = rope_rows_of(&test->k);
    build_tables(test, random);
    build_positions(test, num_rows, random);
}

/* --- judging -------------------------------------------------------------------------------------------- */

/* 1: `got` is as near to `exact` as the nearest number of the type, but for what the fp32 arithmetic on terms of
 * that size may err. */
static int32_t is_near(double got, double exact, double size, fv_dtype dtype)
{
    uint32_t nearest;
    fv_float_store(&nearest, (float)exact, dtype);
    return fabs(got - exact) <= fabs(fv_float_load(&nearest, dtype) - exact) + 0x1p-22 * size;
}

/* One head against the formula. What is good is copied to `given`, so that the rest can be compared whole. */
static int32_t head_rotated(char *given, const char *got, const fv_rope_params *p, int64_t position)
{
    const size_t bytes = fv_dtype_bytes(p->dtype);
    const int32_t half = p->rope_dim / 2, step = p->style == FV_ROPE_HALF ? 1 : 2;
    const int32_t apart = p->style == FV_ROPE_HALF ? half : 1;
    for (int32_t i = 0; i < half; i++) {
        const size_t first = (size_t)(i * step) * bytes, second = first + (size_t)apart * bytes;
        const double a = fv_float_load(given + first, p->dtype), b = fv_float_load(given + second, p->dtype);
        const double c = p->cos[position * p->row_stride + i], s = p->sin[position * p->row_stride + i];
        if (!is_near(fv_float_load(got + first, p->dtype), a * c - b * s, fabs(a * c) + fabs(b * s), p->dtype) ||
            !is_near(fv_float_load(got + second, p->dtype), b * c + a * s, fabs(b * c) + fabs(a * s), p->dtype)) {
            return 0;
        }
        memcpy(given + first, got + first, bytes);
        memcpy(given + second, got + second, bytes);
    }
    return 1;
}

/* All rows, and every byte that no rotation reaches. `is_used`: the operation got these rows. */
static int32_t rows_rotated(rows_case *rows, const rope_case *test, int32_t is_used)
{
    const fv_rope_params *p = &test->params.rope;
    const int32_t num_tokens = is_used ? fv_rope_tokens(p) : 0;
    for (int32_t token = 0; token < num_tokens; token++) {
        const int64_t position = fv_rope_position(p, token);
        for (int32_t head = 0; head < rows->num_heads && position >= 0; head++) {
            const int64_t at = token * rows->token_stride + head * rows->head_stride + rows->rope_at;
            if (!head_rotated(rows->given + at, rows->memory + at, p, position)) return 0;
        }
    }
    return memcmp(rows->memory, rows->given, rows->bytes) == 0;
}

static void judge_rope(check_result *result, rope_case *test)
{
    const fv_rope_params *p = &test->params.rope;
    const int32_t q_good = rows_rotated(&test->q, test, p->q.data != NULL);
    if (!q_good || !rows_rotated(&test->k, test, p->k.data != NULL)) {
        check_result_fail(result, "%s is wrong, or written where it should not (%d tokens, rope_dim %d of %d, %s, %s)",
                          q_good ? "k" : "q", fv_rope_tokens(p), p->rope_dim, test->q.size, fv_dtype_name(p->dtype),
                          p->style == FV_ROPE_HALF ? "half" : "interleaved");
    } else if (!check_arena_fences_whole(&test->arena)) {
        check_result_fail(result, "written beyond the end");
    }
}

void check_run_rope(check_result *result, const check_lane *lane, const fv_kernel_table *table, uint64_t seed,
                    int32_t index)
{
    check_random random = check_random_of(seed ^ 0x40be, (uint64_t)index);
    check_result_init(result, "rope", "%s/rope", table->name);
    check_arena memory = {0}; /* of the case itself, whose arrays the kernel reads */
    rope_case *test = check_arena_alloc(&memory, sizeof(*test));
    build_rope(test, &random);
    const fv_launch launch = check_lane_launch(lane);
    if (check_lane_ran(lane, table->rope(&launch, &test->params.rope)) != FV_OK)
        check_result_fail(result, "%s", fv_last_error());
    else
        judge_rope(result, test);
    check_arena_clear(&test->arena);
    check_arena_clear(&memory);
}

/* --- rope_kv_write ----------------------------------------------------------------------------------------- */

/* Slots of the cache in a random order, none twice, some that must be skipped. */
static void build_slots(rope_case *test, int32_t num_rows, check_random *random)
{
    const fv_kv_view *view = &test->cache.view;
    const int64_t there = test->cache.num_blocks * view->block_size, all = view->num_blocks * view->block_size;
    const int64_t skipped[] = {-1, INT64_MIN, all, all + 5, INT64_MAX};
    const int64_t start = check_random_int(random, 0, 1 << 20);
    test->slots = check_arena_alloc(&test->arena, (size_t)num_rows * sizeof(int64_t));
    for (int32_t token = 0; token < num_rows; token++) {
        test->slots[token] = all - 1 - (start + token) % there;
        if (check_random_chance(random, 10)) test->slots[token] = CHECK_RANDOM_PICK(random, skipped);
    }
    for (int32_t i = num_rows - 1; i > 0; i--) {
        const int32_t other = check_random_int(random, 0, i);
        const int64_t kept = test->slots[i];
        test->slots[i] = test->slots[other];
        test->slots[other] = kept;
    }
}

static void build_scales(rope_case *test, check_random *random)
{
    fv_kv_write_params *write = &test->params.write;
    const int32_t num_kv_heads = write->cache.num_kv_heads;
    if (check_random_chance(random, 50)) return;
    write->num_kv_scales = check_random_chance(random, 50) ? 1 : num_kv_heads;
    float *scales = check_arena_alloc(&test->arena, 2 * (size_t)num_kv_heads * sizeof(float));
    for (int32_t i = 0; i < 2 * num_kv_heads; i++) scales[i] = (float)(0.03 + 0.3 * check_random_unit(random));
    write->k_scale = scales;
    write->v_scale = scales + num_kv_heads;
}

static void build_rope_kv_write(rope_case *test, check_random *random)
{
    static const fv_dtype dtypes[] = {FV_DTYPE_F32, FV_DTYPE_F16, FV_DTYPE_BF16};
    check_cache_shape shape;
    check_cache_shape_random(&shape, random, 1);
    *test = (rope_case){.params.rope = {.dtype = CHECK_RANDOM_PICK(random, dtypes),
                                        .style = (fv_rope_style)check_random_int(random, 0, 1)}};
    fv_rope_params *p = &test->params.rope;
    build_count(test, random);
    p->rope_dim = check_random_chance(random, 50) ? shape.head_size / 2 * 2
                                                  : 2 * check_random_int(random, 1, shape.head_size / 2);
    const int32_t num_rows = p->num_tokens + check_random_int(random, 0, MAX_PADDING);
    const int64_t num_blocks = fv_ceil_div(num_rows, shape.block_size) + check_random_int(random, 1, 3);
    const int64_t element = (int64_t)fv_dtype_bytes(p->dtype);
    check_cache_init(&test->cache, &test->arena, &shape, num_blocks, random);
    build_rows(&test->q, &test->arena, p->dtype, num_rows, check_random_int(random, 1, 9), shape.head_size, random);
    build_rows(&test->k, &test->arena, p->dtype, num_rows, shape.num_kv_heads, shape.head_size, random);
    build_rows(&test->v, &test->arena, p->dtype, num_rows, shape.num_kv_heads, shape.v_head_size, random);
    if (check_random_chance(random, 85)) p->q = rope_rows_of(&test->q);
    if (check_random_chance(random, 30)) test->k.rope_at = (shape.head_size - p->rope_dim) * element;
    p->k = rope_rows_of(&test->k);
    build_rows(&test->q_copy, &test->arena, p->dtype, num_rows, test->q.num_heads, p->rope_dim, random);
    if (p->q.data && check_random_chance(random, 50)) test->params.q_copy = rope_rows_of(&test->q_copy);
    build_tables(test, random);
    build_positions(test, num_rows, random);
    build_slots(test, num_rows, random);
    test->params.write = (fv_kv_write_params){
        .k = test->k.memory,
        .k_token_stride = test->k.token_stride,
        .k_head_stride = test->k.head_stride,
        .v = test->v.memory,
        .v_token_stride = test->v.token_stride,
        .v_head_stride = test->v.head_stride,
        .src_dtype = p->dtype,
        .cache = test->cache.view,
        .slot_mapping = test->slots,
        .num_tokens = p->num_tokens,
        .num_tokens_at = p->num_tokens_at,
    };
    build_scales(test, random);
}

/* Bits of q and k as the table's rope makes them of what was given. */
static int32_t same_as_rope(rope_case *test, const check_lane *lane, const fv_kernel_table *table)
{
    const fv_launch launch = check_lane_launch(lane);
    fv_rope_params rope = test->params.rope;
    char *q = memcpy(check_arena_alloc(&test->arena, test->q.bytes), test->q.given, test->q.bytes);
    char *k = memcpy(check_arena_alloc(&test->arena, test->k.bytes), test->k.given, test->k.bytes);
    if (rope.q.data) rope.q.data = q;
    rope.k.data = k + test->k.rope_at;
    return check_lane_ran(lane, table->rope(&launch, &rope)) == FV_OK &&
           memcmp(q, test->q.memory, test->q.bytes) == 0 && memcmp(k, test->k.memory, test->k.bytes) == 0;
}

/* The copy of q as q is now, and every byte around it as it was. */
static int32_t same_copy(rope_case *test)
{
    const fv_rope_params *p = &test->params.rope;
    rows_case *copy = &test->q_copy;
    const int32_t num_tokens = test->params.q_copy.data ? fv_rope_tokens(p) : 0;
    for (int32_t token = 0; token < num_tokens; token++) {
        for (int32_t head = 0; head < copy->num_heads; head++) {
            memcpy(copy->given + token * copy->token_stride + head * copy->head_stride,
                   test->q.memory + token * test->q.token_stride + head * test->q.head_stride,
                   (size_t)p->rope_dim * fv_dtype_bytes(p->dtype));
        }
    }
    return memcmp(copy->memory, copy->given, copy->bytes) == 0;
}

/* The cache as the reference's kv_write makes it of k as it is now: all kernels write the same bits. */
static int32_t same_cache(rope_case *test)
{
    char *got = check_arena_alloc(&test->arena, test->cache.bytes);
    memcpy(got, test->cache.memory, test->cache.bytes);
    memcpy(test->cache.memory, test->cache.given, test->cache.bytes);
    fv_reference_kv_write(NULL, &test->params.write);
    return memcmp(got, test->cache.memory, test->cache.bytes) == 0;
}

static void judge_rope_kv_write(check_result *result, rope_case *test, const check_lane *lane,
                                const fv_kernel_table *table)
{
    const fv_kv_view *view = &test->cache.view;
    if (table->rope && !same_as_rope(test, lane, table)) {
        check_result_fail(result, "q or k has not the bits that rope makes");
    } else if (!same_copy(test)) {
        check_result_fail(result, "the copy of q is not q, or is written where it should not");
    } else if (!same_cache(test)) {
        check_result_fail(result, "the cache is not what kv_write makes of the rotated k (layout %s of %s)",
                          fv_kv_layout_name(view->layout), fv_dtype_name(view->dtype));
    } else if (memcmp(test->v.memory, test->v.given, test->v.bytes) != 0) {
        check_result_fail(result, "v is changed");
    } else {
        judge_rope(result, test);
    }
}

void check_run_rope_kv_write(check_result *result, const check_lane *lane, const fv_kernel_table *table, uint64_t seed,
                             int32_t index)
{
    check_random random = check_random_of(seed ^ 0x40bec, (uint64_t)index);
    check_result_init(result, "rope_kv_write", "%s/rope_kv_write", table->name);
    check_arena memory = {0};
    rope_case *test = check_arena_alloc(&memory, sizeof(*test));
    build_rope_kv_write(test, &random);
    const fv_launch launch = check_lane_launch(lane);
    if (check_lane_ran(lane, table->rope_kv_write(&launch, &test->params)) != FV_OK)
        check_result_fail(result, "%s", fv_last_error());
    else
        judge_rope_kv_write(result, test, lane, table);
    check_arena_clear(&test->arena);
    check_arena_clear(&memory);
}
