/* Checks of the two operations that join partial results. */
#include "check/merges.h"

#include <math.h>
#include <string.h>

#include "check/arena.h"
#include "check/row_rule.h"
#include "core/float.h"
#include "reference/attend_row.h"

/* A merge with its memory: rows of a, b and out have `gap` elements between them. */
typedef struct merge_case {
    check_arena arena;
    fv_merge_params params;
    char *a, *b; /* copies of the sides, since out may be one of them */
    float *lse_a, *lse_b;
    int64_t token_stride, head_stride; /* of the sides */
    size_t bytes;
} merge_case;

static float random_lse(check_random *random)
{
    static const float empties[] = {-INFINITY, INFINITY, NAN};
    if (check_random_chance(random, 15)) return CHECK_RANDOM_PICK(random, empties);
    return 20 * check_random_normal(random);
}

static fv_merge_side build_side(merge_case *test, char **copy, float **lse_copy, check_random *random)
{
    const fv_merge_params *p = &test->params;
    const size_t element = fv_dtype_bytes(p->dtype), rows = (size_t)(p->num_tokens * p->num_heads);
    char *out = check_arena_alloc_fenced(&test->arena, test->bytes);
    float *lse = check_arena_alloc(&test->arena, rows * sizeof(float));
    for (int32_t token = 0; token < p->num_tokens; token++) {
        for (int32_t head = 0; head < p->num_heads; head++) {
            char *row = out + token * test->token_stride + head * test->head_stride;
            float *at = &lse[head * p->num_tokens + token]; /* [H, T], as vLLM has it */
            *at = random_lse(random);
            for (int32_t d = 0; d < p->head_size; d++)
                fv_float_store(row + (size_t)d * element, isfinite(*at) ? check_random_normal(random) : NAN, p->dtype);
        }
    }
    *copy = memcpy(check_arena_alloc(&test->arena, test->bytes), out, test->bytes);
    *lse_copy = lse;
    return (fv_merge_side){out, test->token_stride, test->head_stride, lse, 4, 4 * p->num_tokens};
}

/* In the place of a side, or elsewhere and then perhaps of another dtype. */
static void build_out(merge_case *test, check_random *random)
{
    static const fv_dtype dtypes[] = {FV_DTYPE_F32, FV_DTYPE_F16, FV_DTYPE_BF16};
    fv_merge_params *p = &test->params;
    p->out_dtype = p->dtype;
    p->head_stride = test->head_stride;
    p->token_stride = test->token_stride;
    const int32_t place = check_random_int(random, 0, 3);
    if (place < 2) {
        p->out = (void *)(uintptr_t)(place == 0 ? p->a.out : p->b.out);
        return;
    }
    if (place == 3) p->out_dtype = CHECK_RANDOM_PICK(random, dtypes);
    p->head_stride = p->head_size * (int64_t)fv_dtype_bytes(p->out_dtype);
    p->token_stride = p->head_stride * p->num_heads;
    p->out = check_arena_alloc_fenced(&test->arena, (size_t)(p->token_stride * p->num_tokens));
}

static float *build_sinks(check_arena *arena, check_random *random, int32_t num_heads)
{
    float *sinks = check_arena_alloc(arena, (size_t)num_heads * sizeof(float));
    for (int32_t head = 0; head < num_heads; head++) sinks[head] = 15 * check_random_normal(random);
    return sinks;
}

static void build_merge(merge_case *test, check_random *random)
{
    static const int32_t tokens[] = {1, 3, 64, 256, 613}, heads[] = {1, 4, 8, 16, 48};
    static const int32_t sizes[] = {32, 40, 48, 64, 96, 128, 256, 512};
    static const fv_dtype dtypes[] = {FV_DTYPE_F32, FV_DTYPE_F16, FV_DTYPE_BF16};
    *test = (merge_case){.params = {.dtype = CHECK_RANDOM_PICK(random, dtypes),
                                    .num_tokens = CHECK_RANDOM_PICK(random, tokens),
                                    .num_heads = CHECK_RANDOM_PICK(random, heads),
                                    .head_size = CHECK_RANDOM_PICK(random, sizes)}};
    fv_merge_params *p = &test->params;
    if (p->num_tokens * p->num_heads > 2048) p->num_tokens = 2048 / p->num_heads;
    test->head_stride = (p->head_size + check_random_int(random, 0, 3)) * (int64_t)fv_dtype_bytes(p->dtype);
    test->token_stride = test->head_stride * p->num_heads;
    test->bytes = (size_t)(test->token_stride * p->num_tokens);
    p->a = build_side(test, &test->a, &test->lse_a, random);
    p->b = build_side(test, &test->b, &test->lse_b, random);
    build_out(test, random);
    if (check_random_chance(random, 70)) {
        p->lse = check_arena_alloc_fenced(&test->arena, (size_t)(p->num_tokens * p->num_heads) * sizeof(float));
        p->lse_token_stride = 4 * p->num_heads;
        p->lse_head_stride = 4;
    }
    if (check_random_chance(random, 40)) p->sinks = build_sinks(&test->arena, random, p->num_heads);
    p->nan_stays = check_random_chance(random, 30);
}

/* The exact row in double. Returns its LSE and, for the floor, the size of what was added. */
static double exact_merge(double *exact, double *size, const merge_case *test, int32_t token, int32_t head)
{
    const fv_merge_params *p = &test->params;
    const int64_t at = token * test->token_stride + head * test->head_stride;
    const float lse_a = test->lse_a[head * p->num_tokens + token], lse_b = test->lse_b[head * p->num_tokens + token];
    const double a = isfinite(lse_a) ? lse_a : -INFINITY, b = isfinite(lse_b) ? lse_b : -INFINITY;
    *size = 0;
    memset(exact, 0, (size_t)p->head_size * sizeof(*exact));
    if (a == -INFINITY && b == -INFINITY) return -INFINITY; /* sink or not */
    const double sink = p->sinks ? p->sinks[head] : -INFINITY;
    const double max = fmax(fmax(a, b), sink);
    const double weights[2] = {exp(a - max), exp(b - max)};
    const char *sides[2] = {test->a + at, test->b + at};
    const double sum = weights[0] + weights[1] + exp(sink - max);
    double row[512];
    for (int32_t side = 0; side < 2; side++) {
        if (weights[side] == 0) continue;
        for (int32_t d = 0; d < p->head_size; d++) {
            row[d] = weights[side] / sum * fv_float_load(sides[side] + (size_t)d * fv_dtype_bytes(p->dtype), p->dtype);
            exact[d] += row[d];
        }
        *size += check_row_norm(row, p->head_size) * (1 + fabs(side == 0 ? a - max : b - max));
    }
    return max + log(sum);
}

static int32_t stays_nan(const merge_case *test, int32_t token, int32_t head)
{
    const int32_t at = head * test->params.num_tokens + token;
    return test->params.nan_stays && (isnan(test->lse_a[at]) || isnan(test->lse_b[at]));
}

static int32_t row_is_nan(const fv_merge_params *p, const char *row)
{
    for (int32_t d = 0; d < p->head_size; d++)
        if (!isnan(fv_float_load(row + (size_t)d * fv_dtype_bytes(p->out_dtype), p->out_dtype))) return 0;
    return 1;
}

static void judge_merge(check_result *result, const merge_case *test)
{
    const fv_merge_params *p = &test->params;
    double exact[512], size;
    for (int32_t token = 0; token < p->num_tokens; token++) {
        for (int32_t head = 0; head < p->num_heads; head++) {
            const char *row = (const char *)p->out + token * p->token_stride + head * p->head_stride;
            if (stays_nan(test, token, head)) {
                if (row_is_nan(p, row) && (!p->lse || isnan(p->lse[token * p->num_heads + head]))) continue;
                check_result_fail(result, "token %d, head %d, of which a side is NaN, is not", token, head);
                return;
            }
            const double lse = exact_merge(exact, &size, test, token, head);
            const int32_t good = check_row_good(&result->worst, row, exact, p->head_size, p->out_dtype,
                                                8 * CHECK_UNIT * size);
            if (good && (!p->lse || check_lse_good(p->lse[token * p->num_heads + head], lse, 2))) continue;
            check_result_fail(result, "%s of token %d, head %d, is wrong (%d elements, %s)", good ? "lse" : "out",
                              token, head, p->head_size, fv_dtype_name(p->out_dtype));
            return;
        }
    }
    if (!check_arena_fences_whole(&test->arena)) check_result_fail(result, "written beyond the end");
}

void check_run_merge_states(check_result *result, const check_lane *lane, const fv_kernel_table *table, uint64_t seed,
                            int32_t index)
{
    check_random random = check_random_of(seed ^ 0x3e46e, (uint64_t)index);
    check_result_init(result, "merge_states", "%s/merge_states", table->name);
    merge_case test;
    build_merge(&test, &random);
    const fv_launch launch = check_lane_launch(lane);
    if (check_lane_ran(lane, table->merge_states(&launch, &test.params)) != FV_OK)
        check_result_fail(result, "%s", fv_last_error());
    else
        judge_merge(result, &test);
    check_arena_clear(&test.arena);
}

/* Partial results of a few Q blocks, cut unevenly. */
typedef struct reduce_case {
    check_arena arena;
    fv_reduce_params params;
    fv_reduce_item *items;
    float *out_partial, *max_partial, *sum_partial;
    int32_t num_tokens;
} reduce_case;

static void fill_slot(reduce_case *test, int64_t slot, check_random *random)
{
    const fv_reduce_params *p = &test->params;
    for (int32_t head = 0; head < p->num_heads; head++) {
        const int64_t at = slot * p->num_heads + head;
        const int32_t empty = check_random_chance(random, 20);
        test->max_partial[at] = empty ? -INFINITY : 15 * check_random_normal(random);
        test->sum_partial[at] = empty ? 0 : (float)(1 + 30 * check_random_unit(random));
        for (int32_t d = 0; d < p->v_head_size; d++)
            test->out_partial[at * p->v_head_size + d] = empty ? 0
                                                               : test->sum_partial[at] * check_random_normal(random);
    }
}

static void build_reduce(reduce_case *test, check_random *random)
{
    static const fv_dtype dtypes[] = {FV_DTYPE_F32, FV_DTYPE_F16, FV_DTYPE_BF16};
    const int32_t num_items = check_random_int(random, 1, 5);
    *test = (reduce_case){.params = {.out_dtype = CHECK_RANDOM_PICK(random, dtypes),
                                     .num_heads = check_random_int(random, 1, 12),
                                     .v_head_size = 8 * check_random_int(random, 4, 64)}};
    fv_reduce_params *p = &test->params;
    test->items = check_arena_alloc(&test->arena, (size_t)num_items * sizeof(fv_reduce_item));
    int32_t num_slots = 0;
    for (int32_t i = 0; i < num_items; i++) {
        const int32_t are_many = check_random_chance(random, 15); /* segments */
        const int32_t tokens = are_many ? 1 : check_random_int(random, 1, 5);
        const int32_t segments = check_random_int(random, 1, are_many ? 150 : 16);
        const int32_t apart = check_random_chance(random, 30) ? check_random_int(random, 1, 4) : 0;
        test->items[i] = (fv_reduce_item){.first_token = test->num_tokens,
                                          .num_tokens = tokens,
                                          .partial = num_slots,
                                          .num_segments = segments,
                                          .segment_slots = apart ? tokens + apart : 0};
        test->num_tokens += tokens;
        p->most_segments = fv_max_i32(p->most_segments, segments);
        num_slots += fv_reduce_segment_slots(&test->items[i]) * segments;
    }
    if (check_random_chance(random, 30)) p->most_segments = 0; /* not to be asked */
    const size_t rows = (size_t)(num_slots * p->num_heads);
    test->out_partial = check_arena_alloc(&test->arena, rows * (size_t)p->v_head_size * sizeof(float));
    test->max_partial = check_arena_alloc(&test->arena, rows * sizeof(float));
    test->sum_partial = check_arena_alloc(&test->arena, rows * sizeof(float));
    for (int32_t slot = 0; slot < num_slots; slot++) fill_slot(test, slot, random);

    p->out_head_stride = p->v_head_size * (int64_t)fv_dtype_bytes(p->out_dtype);
    p->out_token_stride = p->out_head_stride * p->num_heads;
    p->out = check_arena_alloc_fenced(&test->arena, (size_t)(p->out_token_stride * test->num_tokens));
    p->lse_token_stride = 4 * p->num_heads;
    p->lse_head_stride = 4;
    p->lse = check_arena_alloc_fenced(&test->arena, (size_t)(p->lse_token_stride * test->num_tokens));
    p->items = test->items;
    p->num_items = num_items;
    p->partial_out = test->out_partial;
    p->partial_max = test->max_partial;
    p->partial_sum = test->sum_partial;
    if (check_random_chance(random, 50)) p->sinks = build_sinks(&test->arena, random, p->num_heads);
}

static int32_t reduced_good(check_result *result, const reduce_case *test, const fv_reduce_item *item, int32_t token,
                            int32_t head)
{
    const fv_reduce_params *p = &test->params;
    double exact[512];
    fv_softmax_state state;
    fv_softmax_state_init(&state, exact, p->v_head_size);
    double size = 0; /* of what is added, as for the merge */
    const int32_t segment_slots = fv_reduce_segment_slots(item);
    for (int32_t segment = 0; segment < item->num_segments; segment++) {
        const int64_t at = ((int64_t)item->partial + segment * segment_slots + token) * p->num_heads + head;
        fv_softmax_state_merge(&state, p->partial_max[at], p->partial_sum[at], p->partial_out + at * p->v_head_size);
    }
    const double max = state.max;
    const double lse = fv_softmax_state_finish(&state, p->sinks ? &p->sinks[head] : NULL);
    for (int32_t segment = 0; segment < item->num_segments; segment++) {
        const int64_t at = ((int64_t)item->partial + segment * segment_slots + token) * p->num_heads + head;
        if (p->partial_max[at] == -INFINITY) continue;
        double row[512];
        for (int32_t d = 0; d < p->v_head_size; d++) row[d] = p->partial_out[at * p->v_head_size + d];
        size += exp(p->partial_max[at] - lse) * check_row_norm(row, p->v_head_size) *
                (1 + fabs(p->partial_max[at] - max));
    }
    if (p->sinks && isfinite(lse)) size += (1 + fabs(p->sinks[head] - max)) * check_row_norm(exact, p->v_head_size);
    const int64_t row = (int64_t)item->first_token + token;
    const char *out = (const char *)p->out + row * p->out_token_stride + head * p->out_head_stride;
    return check_row_good(&result->worst, out, exact, p->v_head_size, p->out_dtype, 8 * CHECK_UNIT * size) &&
           check_lse_good(p->lse[row * p->num_heads + head], lse, 2);
}

static void judge_reduce(check_result *result, const reduce_case *test)
{
    for (int32_t i = 0; i < test->params.num_items; i++) {
        for (int32_t token = 0; token < test->items[i].num_tokens; token++) {
            for (int32_t head = 0; head < test->params.num_heads; head++) {
                if (reduced_good(result, test, &test->items[i], token, head)) continue;
                check_result_fail(result, "token %d, head %d, of %d segments is wrong (%d elements, %s)",
                                  test->items[i].first_token + token, head, test->items[i].num_segments,
                                  test->params.v_head_size, fv_dtype_name(test->params.out_dtype));
                return;
            }
        }
    }
    if (!check_arena_fences_whole(&test->arena)) check_result_fail(result, "written beyond the end");
}

void check_run_reduce_segments(check_result *result, const check_lane *lane, const fv_kernel_table *table,
                               uint64_t seed, int32_t index)
{
    check_random random = check_random_of(seed ^ 0x4ed5ce, (uint64_t)index);
    check_result_init(result, "reduce_segments", "%s/reduce_segments", table->name);
    reduce_case test;
    build_reduce(&test, &random);
    const fv_launch launch = check_lane_launch(lane);
    if (check_lane_ran(lane, table->reduce_segments(&launch, &test.params)) != FV_OK)
        check_result_fail(result, "%s", fv_last_error());
    else
        judge_reduce(result, &test);
    check_arena_clear(&test.arena);
}
