/* rms_norm against its formula in double, copy_rows against a copy byte by byte. */
#include <math.h>
#include <string.h>

#include "check/arena.h"
#include "check/row_ops.h"
#include "check/row_rule.h"
#include "core/float.h"

#define MAX_SIZE 2100
#define MAX_ROWS 12

static char *random_bytes(check_arena *arena, size_t bytes, check_random *random)
{
    char *memory = check_arena_alloc_fenced(arena, bytes);
    for (size_t i = 0; i < bytes; i++) memory[i] = (char)check_random_next(random);
    return memory;
}

/* --- rms_norm ----------------------------------------------------------------------------------------------- */

typedef struct norm_case {
    check_arena arena;
    fv_rms_norm_params params;
    char *memory, *given; /* rows with gaps */
    size_t bytes;
} norm_case;

/* Numbers near 1, and so small or large that the epsilon is most of the mean, or nothing of it; some rows of zeros. */
static void fill_rows(norm_case *test, check_random *random)
{
    static const float factors[] = {1, 1, 0x1p-12f, 0x1p10f};
    const fv_rms_norm_params *p = &test->params;
    const size_t element = fv_dtype_bytes(p->dtype);
    for (int32_t row = 0; row < p->num_rows; row++) {
        const int32_t is_zero = p->epsilon > 0 && check_random_chance(random, 10);
        const float factor = is_zero ? 0 : CHECK_RANDOM_PICK(random, factors);
        char *at = (char *)p->rows + row * p->row_stride;
        for (int32_t i = 0; i < p->size; i++)
            fv_float_store(at + (size_t)i * element, factor * check_random_normal(random), p->dtype);
    }
}

static void build_norm(norm_case *test, check_random *random)
{
    static const fv_dtype dtypes[] = {FV_DTYPE_F32, FV_DTYPE_F16, FV_DTYPE_BF16};
    static const int32_t sizes[] = {512, 1536, 128, 2048};
    static const float epsilons[] = {1e-6f, 1e-5f, 0};
    *test = (norm_case){.params = {.dtype = CHECK_RANDOM_PICK(random, dtypes),
                                   .weight_dtype = CHECK_RANDOM_PICK(random, dtypes),
                                   .epsilon = CHECK_RANDOM_PICK(random, epsilons),
                                   .num_rows = check_random_int(random, 0, MAX_ROWS)}};
    fv_rms_norm_params *p = &test->params;
    p->size = check_random_chance(random, 50) ? CHECK_RANDOM_PICK(random, sizes)
                                              : check_random_int(random, 1, MAX_SIZE);
    const int64_t element = (int64_t)fv_dtype_bytes(p->dtype), base = check_random_int(random, 0, 3) * element;
    p->row_stride = (p->size + check_random_int(random, 0, 9)) * element;
    test->bytes = (size_t)(base + p->num_rows * p->row_stride);
    test->memory = random_bytes(&test->arena, test->bytes, random);
    p->rows = test->memory + base;
    fill_rows(test, random);
    test->given = memcpy(check_arena_alloc(&test->arena, test->bytes), test->memory, test->bytes);

    const size_t weight_bytes = fv_dtype_bytes(p->weight_dtype);
    char *weight = check_arena_alloc(&test->arena, (size_t)(p->size + 3) * weight_bytes);
    weight += (size_t)check_random_int(random, 0, 3) * weight_bytes;
    for (int32_t i = 0; i < p->size; i++)
        fv_float_store(weight + (size_t)i * weight_bytes, 1 + 0.5f * check_random_normal(random), p->weight_dtype);
    p->weight = weight;
}

static void exact_norm(double *exact, const char *given, const fv_rms_norm_params *p)
{
    double squares = 0;
    for (int32_t i = 0; i < p->size; i++) {
        exact[i] = fv_float_load(given + (size_t)i * fv_dtype_bytes(p->dtype), p->dtype);
        squares += exact[i] * exact[i];
    }
    for (int32_t i = 0; i < p->size; i++) {
        const char *weight = (const char *)p->weight + (size_t)i * fv_dtype_bytes(p->weight_dtype);
        exact[i] *= fv_float_load(weight, p->weight_dtype) / sqrt(squares / p->size + p->epsilon);
    }
}

/* The sum of squares rounds `size` times, like a walk; the rest of the formula a few times. */
static double norm_floor(const double *exact, int32_t size)
{
    return CHECK_UNIT * (sqrt(size) + 8) * check_row_norm(exact, size);
}

static void judge_norm(check_result *result, norm_case *test)
{
    const fv_rms_norm_params *p = &test->params;
    const int64_t base = (char *)p->rows - test->memory;
    double exact[MAX_SIZE];
    for (int32_t row = 0; row < p->num_rows; row++) {
        char *at = (char *)p->rows + row * p->row_stride;
        char *given = test->given + base + row * p->row_stride;
        exact_norm(exact, given, p);
        if (!check_row_good(&result->worst, at, exact, p->size, p->dtype, norm_floor(exact, p->size))) {
            check_result_fail(result, "row %d of %d elements of %s, weight %s, is wrong", row, p->size,
                              fv_dtype_name(p->dtype), fv_dtype_name(p->weight_dtype));
            return;
        }
        memcpy(at, given, (size_t)p->size * fv_dtype_bytes(p->dtype));
    }
    if (memcmp(test->memory, test->given, test->bytes) != 0) check_result_fail(result, "written between the rows");
    if (!check_arena_fences_whole(&test->arena)) check_result_fail(result, "written beyond the end");
}

void check_run_rms_norm(check_result *result, const check_lane *lane, const fv_kernel_table *table, uint64_t seed,
                        int32_t index)
{
    check_random random = check_random_of(seed ^ 0x4504a, (uint64_t)index);
    check_result_init(result, "rms_norm", "%s/rms_norm", table->name);
    norm_case test;
    build_norm(&test, &random);
    const fv_launch launch = check_lane_launch(lane);
    if (check_lane_ran(lane, table->rms_norm(&launch, &test.params)) != FV_OK)
        check_result_fail(result, "%s", fv_last_error());
    else
        judge_norm(result, &test);
    check_arena_clear(&test.arena);
}

/* --- copy_rows ---------------------------------------------------------------------------------------------- */

typedef struct rows_case {
    check_arena arena;
    fv_copy_rows_params params;
    char *dst, *src, *expected, *src_given;
    size_t dst_bytes, src_bytes;
} rows_case;

/* Pieces [num_tokens, num_heads] of row_bytes somewhere in *memory, with gaps. */
static char *build_pieces(char **memory, size_t *bytes, int64_t *token_stride, int64_t *head_stride, rows_case *test,
                          check_random *random)
{
    static const int32_t units[] = {1, 2, 4, 16};
    const int32_t unit = CHECK_RANDOM_PICK(random, units); /* what addresses and strides are multiples of */
    const fv_copy_rows_params *p = &test->params;
    const int64_t base = (int64_t)unit * check_random_int(random, 0, 3);
    *head_stride = (p->row_bytes + unit - 1) / unit * unit + (int64_t)unit * check_random_int(random, 0, 5);
    *token_stride = p->num_heads * *head_stride + (int64_t)unit * check_random_int(random, 0, 9);
    *bytes = (size_t)(base + p->num_tokens * *token_stride);
    *memory = random_bytes(&test->arena, *bytes, random);
    return *memory + base;
}

static void build_copy_rows(rows_case *test, check_random *random)
{
    static const int32_t sizes[] = {128, 64, 256, 16, 1024};
    *test = (rows_case){
        .params = {.num_tokens = check_random_int(random, 0, 20), .num_heads = check_random_int(random, 1, 9)}};
    fv_copy_rows_params *p = &test->params;
    p->row_bytes = check_random_chance(random, 50) ? CHECK_RANDOM_PICK(random, sizes)
                                                   : check_random_int(random, 1, 700);
    p->src = build_pieces(&test->src, &test->src_bytes, &p->src_token_stride, &p->src_head_stride, test, random);
    p->dst = build_pieces(&test->dst, &test->dst_bytes, &p->dst_token_stride, &p->dst_head_stride, test, random);
    test->src_given = memcpy(check_arena_alloc(&test->arena, test->src_bytes), test->src, test->src_bytes);
    test->expected = memcpy(check_arena_alloc(&test->arena, test->dst_bytes), test->dst, test->dst_bytes);
    char *expected = test->expected + ((char *)p->dst - test->dst);
    for (int32_t piece = 0; piece < p->num_tokens * p->num_heads; piece++) {
        const int64_t token = piece / p->num_heads, head = piece % p->num_heads;
        memcpy(expected + token * p->dst_token_stride + head * p->dst_head_stride,
               (const char *)p->src + token * p->src_token_stride + head * p->src_head_stride, (size_t)p->row_bytes);
    }
}

static void judge_copy_rows(check_result *result, const rows_case *test)
{
    const fv_copy_rows_params *p = &test->params;
    if (memcmp(test->dst, test->expected, test->dst_bytes) != 0) {
        check_result_fail(result, "%d x %d pieces of %lld bytes are not copied as they are, or more is", p->num_tokens,
                          p->num_heads, (long long)p->row_bytes);
    } else if (memcmp(test->src, test->src_given, test->src_bytes) != 0) {
        check_result_fail(result, "the source is changed");
    } else if (!check_arena_fences_whole(&test->arena)) {
        check_result_fail(result, "written beyond the end");
    }
}

void check_run_copy_rows(check_result *result, const check_lane *lane, const fv_kernel_table *table, uint64_t seed,
                         int32_t index)
{
    check_random random = check_random_of(seed ^ 0xc0b440, (uint64_t)index);
    check_result_init(result, "copy_rows", "%s/copy_rows", table->name);
    rows_case test;
    build_copy_rows(&test, &random);
    const fv_launch launch = check_lane_launch(lane);
    if (check_lane_ran(lane, table->copy_rows(&launch, &test.params)) != FV_OK)
        check_result_fail(result, "%s", fv_last_error());
    else
        judge_copy_rows(result, &test);
    check_arena_clear(&test.arena);
}
