/* merge_ranks on random results of up to 256 ranks, and against a total LSE that is given. */
#include <math.h>
#include <string.h>

#include "check/arena.h"
#include "check/merges.h"
#include "check/row_rule.h"
#include "core/float.h"

#define MAX_ROWS 600 /* of all ranks together */

/* Rows of all ranks with gaps between them, in one of two orders: rank, token, head or token, head, rank. */
typedef struct ranks_case {
    check_arena arena;
    fv_merge_ranks_params params;
    char *rows, *given; /* of the ranks; out may be one of them */
    float *lse;         /* [token][head][rank] or [rank][token][head] */
    size_t row_bytes, bytes;
    int32_t out_rank; /* whose rows out is in the place of; -1: elsewhere */
} ranks_case;

static float lse_at(const ranks_case *test, int32_t rank, int32_t token, int32_t head)
{
    const fv_merge_side side = fv_merge_rank(&test->params, rank);
    float value;
    memcpy(&value, (const char *)side.lse + token * side.lse_token_stride + head * side.lse_head_stride, sizeof(value));
    return isfinite(value) ? value : -INFINITY;
}

static int64_t row_at(const fv_merge_ranks_params *p, int32_t rank, int32_t token, int32_t head)
{
    return rank * p->rank_stride + token * p->ranks.token_stride + head * p->ranks.head_stride;
}

static float total_at(const fv_merge_ranks_params *p, int32_t token, int32_t head)
{
    const float total = p->total_lse[head * p->num_tokens + token];
    return isfinite(total) ? total : -INFINITY;
}

/* Ranks without keys are common, and so are rows that no rank has keys for. */
static float random_lse(check_random *random, int32_t row_is_empty)
{
    static const float empties[] = {-INFINITY, INFINITY, NAN};
    if (row_is_empty || check_random_chance(random, 20)) return CHECK_RANDOM_PICK(random, empties);
    return 10 * check_random_normal(random);
}

static void set_strides(ranks_case *test, int32_t rank_is_last, int32_t gap)
{
    fv_merge_ranks_params *p = &test->params;
    const int64_t row = (p->head_size + gap) * (int64_t)fv_dtype_bytes(p->dtype);
    test->row_bytes = (size_t)p->head_size * fv_dtype_bytes(p->dtype);
    if (rank_is_last) {
        p->rank_stride = row;
        p->ranks.head_stride = row * p->num_ranks;
        p->ranks.token_stride = p->ranks.head_stride * p->num_heads;
        p->lse_rank_stride = 4;
        p->ranks.lse_head_stride = 4 * p->num_ranks;
        p->ranks.lse_token_stride = p->ranks.lse_head_stride * p->num_heads;
    } else {
        p->ranks.head_stride = row;
        p->ranks.token_stride = row * p->num_heads;
        p->rank_stride = p->ranks.token_stride * p->num_tokens;
        p->ranks.lse_head_stride = 4 * p->num_tokens; /* [H, T], as vLLM has it */
        p->ranks.lse_token_stride = 4;
        p->lse_rank_stride = 4 * p->num_tokens * p->num_heads;
    }
    test->bytes = (size_t)(row * p->num_ranks * p->num_tokens * p->num_heads);
}

/* Rows without keys are NaN, and so is what lies between rows. */
static void build_rows(ranks_case *test, check_random *random)
{
    fv_merge_ranks_params *p = &test->params;
    const size_t element = fv_dtype_bytes(p->dtype);
    for (int32_t token = 0; token < p->num_tokens; token++) {
        for (int32_t head = 0; head < p->num_heads; head++) {
            const int32_t row_is_empty = check_random_chance(random, 10);
            for (int32_t rank = 0; rank < p->num_ranks; rank++) {
                const float lse = random_lse(random, row_is_empty);
                memcpy((char *)test->lse + rank * p->lse_rank_stride + token * p->ranks.lse_token_stride +
                           head * p->ranks.lse_head_stride,
                       &lse, sizeof(lse));
                char *row = test->rows + row_at(p, rank, token, head);
                for (int32_t d = 0; d < p->head_size && isfinite(lse); d++)
                    fv_float_store(row + (size_t)d * element, check_random_normal(random), p->dtype);
            }
        }
    }
}

static void build_out(ranks_case *test, check_random *random)
{
    static const fv_dtype dtypes[] = {FV_DTYPE_F32, FV_DTYPE_F16, FV_DTYPE_BF16};
    fv_merge_ranks_params *p = &test->params;
    test->out_rank = -1;
    p->out_dtype = p->dtype;
    if (check_random_chance(random, 40)) {
        test->out_rank = check_random_int(random, 0, p->num_ranks - 1);
        p->out = test->rows + test->out_rank * p->rank_stride;
        p->token_stride = p->ranks.token_stride;
        p->head_stride = p->ranks.head_stride;
        return;
    }
    if (check_random_chance(random, 50)) p->out_dtype = CHECK_RANDOM_PICK(random, dtypes);
    p->head_stride = p->head_size * (int64_t)fv_dtype_bytes(p->out_dtype);
    p->token_stride = p->head_stride * p->num_heads;
    p->out = check_arena_alloc_fenced(&test->arena, (size_t)(p->token_stride * p->num_tokens));
}

static void build_lse(ranks_case *test)
{
    fv_merge_ranks_params *p = &test->params;
    p->lse = check_arena_alloc_fenced(&test->arena, (size_t)(p->num_tokens * p->num_heads) * sizeof(float));
    p->lse_token_stride = 4 * p->num_heads;
    p->lse_head_stride = 4;
}

static void build_sinks(ranks_case *test, check_random *random)
{
    float *sinks = check_arena_alloc(&test->arena, (size_t)test->params.num_heads * sizeof(float));
    for (int32_t head = 0; head < test->params.num_heads; head++) sinks[head] = 10 * check_random_normal(random);
    test->params.sinks = sinks;
}

/* A total that is a little above the rank's own LSE, or marks a row without keys. */
static void build_total(ranks_case *test, check_random *random)
{
    fv_merge_ranks_params *p = &test->params;
    float *total = check_arena_alloc(&test->arena, (size_t)(p->num_tokens * p->num_heads) * sizeof(float));
    for (int32_t token = 0; token < p->num_tokens; token++) {
        for (int32_t head = 0; head < p->num_heads; head++) {
            const float own = lse_at(test, 0, token, head), more = 2 * fabsf(check_random_normal(random));
            total[head * p->num_tokens + token] = own == -INFINITY ? random_lse(random, 0) : own + more;
            if (check_random_chance(random, 10)) total[head * p->num_tokens + token] = random_lse(random, 1);
        }
    }
    p->total_lse = total;
    p->total_token_stride = 4;
    p->total_head_stride = 4 * p->num_tokens;
}

static void build_ranks(ranks_case *test, check_random *random)
{
    static const int32_t worlds[] = {1, 2, 2, 3, 4, 8, 16, FV_MAX_MERGE_RANKS}, sizes[] = {8, 32, 40, 64, 128, 512};
    static const fv_dtype dtypes[] = {FV_DTYPE_F32, FV_DTYPE_F16, FV_DTYPE_BF16};
    *test = (ranks_case){.params = {.dtype = CHECK_RANDOM_PICK(random, dtypes),
                                    .num_ranks = CHECK_RANDOM_PICK(random, worlds),
                                    .num_tokens = check_random_int(random, 1, 70),
                                    .num_heads = check_random_int(random, 1, 12),
                                    .head_size = CHECK_RANDOM_PICK(random, sizes)}};
    fv_merge_ranks_params *p = &test->params;
    const int32_t scales_one = check_random_chance(random, 20); /* fv_scale_by_lse */
    if (scales_one) p->num_ranks = 1;
    p->num_tokens = fv_max_i32(1, fv_min_i32(p->num_tokens, MAX_ROWS / (p->num_heads * p->num_ranks)));
    set_strides(test, check_random_chance(random, 50), check_random_int(random, 0, 3));
    test->rows = check_arena_alloc_fenced(&test->arena, test->bytes);
    memset(test->rows, 0xff, test->bytes);
    test->lse = check_arena_alloc(&test->arena, (size_t)(p->num_ranks * p->num_tokens * p->num_heads) * sizeof(float));
    p->ranks.out = test->rows;
    p->ranks.lse = test->lse;
    build_rows(test, random);
    test->given = memcpy(check_arena_alloc(&test->arena, test->bytes), test->rows, test->bytes);
    const int32_t what = check_random_int(random, 0, 9); /* 0: only the LSE, 1 and 2: only out */
    if (what > 0 || scales_one)
        build_out(test, random);
    else
        p->ranks.out = NULL;
    if (scales_one) {
        build_total(test, random);
        return;
    }
    if (what == 0 || what > 2) build_lse(test);
    if (check_random_chance(random, 40)) build_sinks(test, random);
}

/* ln of the sum over the ranks and the sink, in double. */
static double exact_lse(const ranks_case *test, int32_t token, int32_t head)
{
    const fv_merge_ranks_params *p = &test->params;
    if (p->total_lse) return total_at(p, token, head);
    double max = -INFINITY, sum = 0;
    for (int32_t rank = 0; rank < p->num_ranks; rank++) max = fmax(max, lse_at(test, rank, token, head));
    if (max == -INFINITY) return max; /* sink or not */
    if (p->sinks) max = fmax(max, p->sinks[head]);
    for (int32_t rank = 0; rank < p->num_ranks; rank++) sum += exp(lse_at(test, rank, token, head) - max);
    return max + log(sum + (p->sinks ? exp(p->sinks[head] - max) : 0));
}

/* The exact row of total LSE `lse`. Returns, for the floor, the size of what was added. */
static double exact_row(double *exact, const ranks_case *test, int32_t token, int32_t head, double lse)
{
    const fv_merge_ranks_params *p = &test->params;
    double row[512], size = 0;
    memset(exact, 0, (size_t)p->head_size * sizeof(*exact));
    for (int32_t rank = 0; rank < p->num_ranks; rank++) {
        const double own = lse_at(test, rank, token, head);
        if (own == -INFINITY || lse == -INFINITY) continue;
        const char *from = test->given + row_at(p, rank, token, head);
        for (int32_t d = 0; d < p->head_size; d++) {
            row[d] = exp(own - lse) * fv_float_load(from + (size_t)d * fv_dtype_bytes(p->dtype), p->dtype);
            exact[d] += row[d];
        }
        size += check_row_norm(row, p->head_size) * (1 + fabs(own - lse));
    }
    return size;
}

static int32_t merged_good(check_result *result, const ranks_case *test, int32_t token, int32_t head)
{
    const fv_merge_ranks_params *p = &test->params;
    const double lse = exact_lse(test, token, head);
    double exact[512];
    if (p->out) {
        const double size = exact_row(exact, test, token, head, lse);
        const char *row = (const char *)p->out + token * p->token_stride + head * p->head_stride;
        const double floor = (8 + p->num_ranks) * CHECK_UNIT * size;
        if (!check_row_good(&result->worst, row, exact, p->head_size, p->out_dtype, floor)) return 0;
    }
    return !p->lse || check_lse_good(p->lse[token * p->num_heads + head], lse, p->num_ranks);
}

/* What the ranks gave, but for the rows that out took the place of. */
static int32_t sides_untouched(ranks_case *test)
{
    const fv_merge_ranks_params *p = &test->params;
    for (int32_t token = 0; token < p->num_tokens && test->out_rank >= 0; token++) {
        for (int32_t head = 0; head < p->num_heads; head++) {
            const int64_t at = row_at(p, test->out_rank, token, head);
            memcpy(test->rows + at, test->given + at, test->row_bytes);
        }
    }
    return memcmp(test->rows, test->given, test->bytes) == 0;
}

static void judge_ranks(check_result *result, ranks_case *test)
{
    const fv_merge_ranks_params *p = &test->params;
    for (int32_t token = 0; token < p->num_tokens; token++) {
        for (int32_t head = 0; head < p->num_heads; head++) {
            if (merged_good(result, test, token, head)) continue;
            check_result_fail(result, "token %d, head %d, of %d ranks is wrong (%d elements, %s to %s)", token, head,
                              p->num_ranks, p->head_size, fv_dtype_name(p->dtype), fv_dtype_name(p->out_dtype));
            return;
        }
    }
    if (!sides_untouched(test))
        check_result_fail(result, "a rank's rows are changed, or written between");
    else if (!check_arena_fences_whole(&test->arena))
        check_result_fail(result, "written beyond the end");
}

void check_run_merge_ranks(check_result *result, const check_lane *lane, const fv_kernel_table *table, uint64_t seed,
                           int32_t index)
{
    check_random random = check_random_of(seed ^ 0x4a4c5, (uint64_t)index);
    check_result_init(result, "merge_ranks", "%s/merge_ranks", table->name);
    ranks_case test;
    build_ranks(&test, &random);
    const fv_launch launch = check_lane_launch(lane);
    if (check_lane_ran(lane, table->merge_ranks(&launch, &test.params)) != FV_OK)
        check_result_fail(result, "%s", fv_last_error());
    else
        judge_ranks(result, &test);
    check_arena_clear(&test.arena);
}
