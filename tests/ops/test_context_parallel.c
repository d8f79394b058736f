/* Context parallelism with the ranks of a group simulated in one process: each writes its share of the
 * keys to its own cache and attends to it through the public plan, and what the public functions combine
 * is what one rank with all keys gives. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "core/float.h"
#include "ops/ops_fixture.h"

enum {
    NUM_SEQS = 10,
    TOKENS = 38,
    HEADS = 4,
    KV_HEADS = 2,
    D = 64,
    BLOCK_SIZE = 16,
    MAX_SEQ_LEN = 112,
    WIDTH = MAX_SEQ_LEN / BLOCK_SIZE + 1,
    NUM_BLOCKS = NUM_SEQS * WIDTH + 1,
    MAX_WORLD = 4,
    ROW = HEADS * D,
    KV_ROW = KV_HEADS * D,
};

/* Query lengths 1 to 8 with long, short and no context, so that with runs of 16 some ranks hold nothing;
 * the last sequence is empty. */
static const int32_t query_lens[NUM_SEQS] = {1, 2, 3, 4, 5, 6, 7, 8, 2, 0};
static const int32_t seq_lens[NUM_SEQS] = {97, 5, 3, 40, 17, 70, 112, 8, 33, 0};

/* All keys and values of the sequences, by global position, and this step's queries. */
typedef struct world_data {
    int32_t query_start[NUM_SEQS + 1];
    int32_t block_table[NUM_SEQS * WIDTH];
    uint8_t causal[NUM_SEQS];
    float sinks[HEADS], slopes[HEADS];
    char q[TOKENS * ROW * 4];
    char k[NUM_SEQS * MAX_SEQ_LEN * KV_ROW * 4]; /* [seq, position, Hkv, D] */
    char v[NUM_SEQS * MAX_SEQ_LEN * KV_ROW * 4];
    char new_k[TOKENS * KV_ROW * 4], new_v[TOKENS * KV_ROW * 4];
    char cache[NUM_BLOCKS * BLOCK_SIZE * KV_ROW * 2 * 4];
} world_data;

/* Results, LSE as [H, T] in memory. */
typedef struct rank_results {
    char out[MAX_WORLD][TOKENS * ROW * 4];
    float lse[MAX_WORLD][HEADS * TOKENS];
} rank_results;

static void fill_world(world_data *w, fv_dtype dtype, int32_t not_causal)
{
    const size_t token_bytes = KV_ROW * fv_dtype_bytes(dtype);
    uint32_t seed = 11;
    fill_random(w->q, dtype, TOKENS * ROW, 1, &seed);
    fill_random(w->k, dtype, NUM_SEQS * MAX_SEQ_LEN * KV_ROW, 1, &seed);
    fill_random(w->v, dtype, NUM_SEQS * MAX_SEQ_LEN * KV_ROW, 1, &seed);
    for (int32_t head = 0; head < HEADS; head++) {
        w->sinks[head] = next_normal(&seed);
        w->slopes[head] = exp2f(-2.0f * (float)(head + 1));
    }
    for (int32_t i = 0; i < NUM_SEQS * WIDTH; i++) w->block_table[i] = NUM_BLOCKS - 1 - i;
    for (int32_t r = 0; r < NUM_SEQS; r++) {
        w->query_start[r + 1] = w->query_start[r] + query_lens[r];
        w->causal[r] = !not_causal || r % 3 == 0;
        const size_t from = (size_t)(r * MAX_SEQ_LEN + seq_lens[r] - query_lens[r]) * token_bytes;
        const size_t to = (size_t)w->query_start[r] * token_bytes;
        memcpy(w->new_k + to, w->k + from, (size_t)query_lens[r] * token_bytes);
        memcpy(w->new_v + to, w->v + from, (size_t)query_lens[r] * token_bytes);
    }
    assert_int_equal(w->query_start[NUM_SEQS], TOKENS);
}

/* Writes the context of every sequence to the rank's cache: what earlier steps have left there. */
static void write_context(world_data *w, fv_device *device, const fv_kv_view *view, const fv_problem *problem)
{
    const fv_dtype dtype = problem->q_dtype;
    for (int32_t r = 0; r < NUM_SEQS; r++) {
        int64_t slots[MAX_SEQ_LEN];
        const int32_t context = seq_lens[r] - query_lens[r];
        for (int32_t position = 0; position < context; position++) {
            must(fv_context_parallel_slot(&slots[position], position, w->block_table + r * WIDTH, WIDTH, BLOCK_SIZE,
                                          &problem->context_parallel));
        }
        const size_t at = (size_t)(r * MAX_SEQ_LEN * KV_ROW) * fv_dtype_bytes(dtype);
        const fv_tensor k = fv_tensor_3d(w->k + at, dtype, MAX_SEQ_LEN, KV_HEADS, D);
        const fv_tensor v = fv_tensor_3d(w->v + at, dtype, MAX_SEQ_LEN, KV_HEADS, D);
        must(fv_kv_write(device, view, &k, &v, slots, context, NULL, NULL, 0, NULL));
    }
}

/* One step of one rank through the plan. */
static void run_rank(rank_results *results, int32_t rank, world_data *w, fv_context *context, const fv_problem *problem,
                     const char *backend)
{
    fv_device *device;
    fv_plan *plan;
    int64_t slots[TOKENS];
    const fv_bounds bounds = {sizeof(bounds), NUM_SEQS, TOKENS, 8, MAX_SEQ_LEN};
    const fv_plan_options options = {.struct_size = sizeof(options), .backend = backend};
    must(fv_device_find(&device, context, "cpu"));
    must(fv_plan_create(&plan, context, problem, &bounds, &options));
    fv_batch batch = {
        .struct_size = sizeof(batch),
        .num_seqs = NUM_SEQS,
        .num_tokens = TOKENS,
        .query_start = w->query_start,
        .seq_lens = seq_lens,
        .block_table = w->block_table,
        .block_table_stride = WIDTH,
        .block_table_width = WIDTH,
        .slot_mapping = slots,
        .causal = problem->not_causal ? w->causal : NULL,
    };
    must(fv_context_parallel_slots(slots, &batch, BLOCK_SIZE, &problem->context_parallel));
    fv_layer layer = {
        .struct_size = sizeof(layer),
        .q = fv_tensor_3d(w->q, problem->q_dtype, TOKENS, HEADS, D),
        .k = fv_tensor_3d(w->new_k, problem->q_dtype, TOKENS, KV_HEADS, D),
        .v = fv_tensor_3d(w->new_v, problem->q_dtype, TOKENS, KV_HEADS, D),
        .out = fv_tensor_3d(results->out[rank], problem->out_dtype, TOKENS, HEADS, D),
        .lse = fv_tensor_2d(results->lse[rank], FV_DTYPE_F32, TOKENS, HEADS),
        .sinks = problem->sinks ? w->sinks : NULL,
        .alibi_slopes = problem->alibi ? w->slopes : NULL,
    };
    layer.lse.stride_bytes[0] = 4;
    layer.lse.stride_bytes[1] = 4 * TOKENS;
    must(fv_kv_view_init(&layer.kv_cache, w->cache, fv_plan_kv_layout(plan), problem->q_dtype, NUM_BLOCKS, BLOCK_SIZE,
                         KV_HEADS, D));
    memset(w->cache, 0xff, sizeof(w->cache)); /* NaN where this rank has no key */
    write_context(w, device, &layer.kv_cache, problem);
    const size_t bytes = fv_plan_workspace_bytes(plan);
    void *workspace = aligned_alloc(256, (bytes + 511) / 256 * 256);
    must(fv_plan_update(plan, &batch, NULL));
    must(fv_plan_run(plan, &layer, workspace, NULL));
    free(workspace);
    fv_plan_destroy(plan);
}

static double value_at(const void *values, fv_dtype dtype, int32_t i)
{
    return fv_float_load((const char *)values + (size_t)i * fv_dtype_bytes(dtype), dtype);
}

static void assert_same(const void *got, fv_dtype got_dtype, const void *whole, fv_dtype dtype, int32_t count,
                        double tolerance, const char *what)
{
    for (int32_t i = 0; i < count; i++) {
        const double value = value_at(got, got_dtype, i), expected = value_at(whole, dtype, i);
        if (fabs(value - expected) <= tolerance * (1 + fabs(expected))) continue;
        fail_msg("%s: number %d is %.9g, expected %.9g", what, i, value, expected);
    }
}

/* All-gather: one merge of all results. All-gather and reduce-scatter: the LSEs first, then each rank's
 * share, added up. */
static void combine_and_compare(rank_results *ranks, const rank_results *whole, const world_data *w,
                                fv_context *context, const fv_problem *problem, int32_t world, double tolerance,
                                const char *what)
{
    static float out[TOKENS * ROW], lse[TOKENS * HEADS], total[TOKENS * HEADS], share[TOKENS * ROW], sum[TOKENS * ROW];
    const int64_t element = (int64_t)fv_dtype_bytes(problem->out_dtype);
    fv_device *device;
    must(fv_device_find(&device, context, "cpu"));
    const fv_tensor rank_out = {ranks->out,
                                problem->out_dtype,
                                4,
                                {world, TOKENS, HEADS, D},
                                {sizeof(ranks->out[0]), ROW * element, D * element, element}};
    const fv_tensor rank_lse = {
        ranks->lse, FV_DTYPE_F32, 3, {world, TOKENS, HEADS}, {sizeof(ranks->lse[0]), 4, 4 * TOKENS}};
    fv_tensor out_at = fv_tensor_3d(out, FV_DTYPE_F32, TOKENS, HEADS, D);
    fv_tensor lse_at = fv_tensor_2d(lse, FV_DTYPE_F32, TOKENS, HEADS);
    lse_at.stride_bytes[0] = 4;
    lse_at.stride_bytes[1] = 4 * TOKENS;
    const float *sinks = problem->sinks ? w->sinks : NULL;
    must(fv_merge_ranks(device, &out_at, &lse_at, &rank_out, &rank_lse, sinks, NULL));
    assert_same(out, FV_DTYPE_F32, whole->out[0], problem->out_dtype, TOKENS * ROW, tolerance, what);
    assert_same(lse, FV_DTYPE_F32, whole->lse[0], FV_DTYPE_F32, TOKENS * HEADS, 2e-5, what);

    fv_tensor total_at = lse_at;
    total_at.data = total;
    must(fv_merge_ranks(device, NULL, &total_at, NULL, &rank_lse, sinks, NULL));
    assert_memory_equal(total, lse, sizeof(lse));
    memset(sum, 0, sizeof(sum));
    for (int32_t rank = 0; rank < world; rank++) {
        const fv_tensor in = fv_tensor_3d(ranks->out[rank], problem->out_dtype, TOKENS, HEADS, D);
        fv_tensor in_lse = total_at;
        in_lse.data = ranks->lse[rank];
        out_at.data = share;
        must(fv_scale_by_lse(device, &out_at, &in, &in_lse, &total_at, NULL));
        for (int32_t i = 0; i < TOKENS * ROW; i++) sum[i] += share[i];
    }
    assert_same(sum, FV_DTYPE_F32, out, FV_DTYPE_F32, TOKENS * ROW, 1e-5, what);
}

/* Every world and interleave of one problem on one backend. Returns the number of groups that ran. */
static int32_t check_problem(world_data *w, fv_context *context, const fv_problem *problem, const char *backend)
{
    static rank_results whole, ranks;
    static const fv_context_parallel groups[] = {{2, 0, 1}, {2, 0, 16}, {3, 0, 1}, {3, 0, 16}, {4, 0, 1}, {4, 0, 16}};
    const double tolerance = problem->out_dtype == FV_DTYPE_F32 ? 2e-5 : 0x1p-7;
    char reasons[512], what[256];
    run_rank(&whole, 0, w, context, problem, backend);
    int32_t num_groups = 0;
    for (size_t i = 0; i < sizeof(groups) / sizeof(groups[0]); i++) {
        fv_problem local = *problem;
        local.sinks = 0; /* the combination counts them */
        local.context_parallel = groups[i];
        must(fv_backend_why_not(reasons, sizeof(reasons), backend, NULL, &local));
        if (reasons[0]) continue;
        memset(&ranks, 0x5a, sizeof(ranks));
        for (; local.context_parallel.rank < groups[i].world; local.context_parallel.rank++) {
            run_rank(&ranks, local.context_parallel.rank, w, context, &local, backend);
        }
        snprintf(what, sizeof(what), "%s, world %d, interleave %d, window %d, alibi %d, sinks %d, not causal %d, %s",
                 backend, groups[i].world, groups[i].interleave, problem->window, (int)problem->alibi, problem->sinks,
                 problem->not_causal, fv_dtype_name(problem->q_dtype));
        combine_and_compare(&ranks, &whole, w, context, problem, groups[i].world, tolerance, what);
        num_groups++;
    }
    return num_groups;
}

static fv_problem base_problem(fv_dtype dtype)
{
    return (fv_problem){
        .struct_size = sizeof(fv_problem),
        .kind = FV_ATTENTION_MHA,
        .mha = {HEADS, KV_HEADS, D, 0},
        .q_dtype = dtype,
        .out_dtype = dtype,
        .kv_layout_any = 1,
        .block_size = BLOCK_SIZE,
        .returns_lse = 1,
    };
}

static fv_context *open_context(void)
{
    fv_context *context;
    const fv_context_options options = {.struct_size = sizeof(options), .num_threads = 1, .no_plugins = 1};
    must(fv_context_create(&context, &options));
    return context;
}

static void test_ranks_equal_the_whole(void **state)
{
    (void)state;
    typedef struct features {
        int32_t window, sinks, not_causal;
        fv_alibi alibi;
    } features;
    static const features sets[] = {
        {0, 0, 0, FV_ALIBI_NONE},   {0, 1, 0, FV_ALIBI_NONE}, {24, 0, 0, FV_ALIBI_NONE}, {9, 1, 0, FV_ALIBI_LINEAR},
        {0, 0, 0, FV_ALIBI_LINEAR}, {0, 1, 0, FV_ALIBI_SQRT}, {0, 0, 1, FV_ALIBI_NONE},  {20, 1, 1, FV_ALIBI_SQRT},
    };
    static const fv_dtype dtypes[] = {FV_DTYPE_F32, FV_DTYPE_BF16};
    fv_context *context = open_context();
    world_data *w = calloc(1, sizeof(*w));
    for (int32_t backend = 0; backend < fv_backend_count(); backend++) {
        const char *name = fv_backend_name(backend);
        int32_t num_groups = 0;
        for (size_t i = 0; i < sizeof(sets) / sizeof(sets[0]); i++) {
            for (int32_t t = 0; t < 2; t++) {
                fv_problem problem = base_problem(dtypes[t]);
                char reasons[512];
                problem.window = sets[i].window;
                problem.sinks = sets[i].sinks;
                problem.not_causal = sets[i].not_causal;
                problem.alibi = sets[i].alibi;
                must(fv_backend_why_not(reasons, sizeof(reasons), name, NULL, &problem));
                if (reasons[0]) continue;
                fill_world(w, dtypes[t], problem.not_causal);
                num_groups += check_problem(w, context, &problem, name);
            }
        }
        print_message("%s: %d groups\n", name, num_groups);
        if (strcmp(name, "TRITON_ATTN") == 0) assert_int_equal(num_groups, 8 * 2 * 6); /* refuses none of them */
    }
    free(w);
    fv_context_destroy(context);
}

/* The public lengths and slots against a plain walk over the positions. */
static void test_lengths_and_slots(void **state)
{
    (void)state;
    enum { LENGTH = 100, BS = 4, TABLE = 32 };
    int32_t table[TABLE], local_lens[LENGTH + 1], lens[LENGTH + 1];
    for (int32_t i = 0; i < TABLE; i++) table[i] = 50 - i;
    for (int32_t i = 0; i <= LENGTH; i++) lens[i] = i;
    for (int32_t world = 1; world <= 5; world++) {
        for (int32_t interleave = 1; interleave <= 16; interleave += 5) {
            for (int32_t rank = 0; rank < world; rank++) {
                const fv_context_parallel cp = {world, rank, interleave};
                must(fv_context_parallel_local_lens(local_lens, lens, LENGTH + 1, &cp));
                int32_t num_keys = 0;
                for (int32_t position = 0; position < LENGTH; position++) {
                    const int32_t mine = position / interleave % world == rank;
                    assert_int_equal(fv_context_parallel_local_len(position, &cp), num_keys);
                    assert_int_equal(local_lens[position], num_keys);
                    int64_t slot;
                    must(fv_context_parallel_slot(&slot, position, table, TABLE, BS, &cp));
                    assert_int_equal(slot, mine ? table[num_keys / BS] * BS + num_keys % BS : -1);
                    num_keys += mine;
                }
                assert_int_equal(local_lens[LENGTH], num_keys);
            }
        }
    }
    assert_int_equal(fv_context_parallel_local_len(7, NULL), 7);
    assert_int_equal(fv_context_parallel_local_len(7, &(fv_context_parallel){0}), 7);
    assert_int_equal(fv_context_parallel_local_len(7, &(fv_context_parallel){.world = 2}), 4); /* interleave 1 */
    assert_int_equal(fv_context_parallel_local_len(-1, NULL), -1);
    assert_int_equal(fv_context_parallel_local_len(7, &(fv_context_parallel){2, 2, 1}), -1);
}

static void test_refusals(void **state)
{
    (void)state;
    const fv_context_parallel bad = {2, 2, 1}, cp = {2, 0, 1};
    const int32_t table[2] = {3, 0}, lens[2] = {4, -1}, start[2] = {0, 3}, too_long[2] = {0, 9}, before[2] = {-5, 1};
    int32_t local_lens[2];
    int64_t slot, slots[16];
    refused(fv_context_parallel_local_lens(local_lens, lens, 2, &bad), FV_ERR_INVALID, "rank 2 of 2, interleave 1");
    refused(fv_context_parallel_local_lens(local_lens, lens, 2, &cp), FV_ERR_INVALID, "seq_lens[1] is -1");
    refused(fv_context_parallel_local_lens(NULL, lens, 2, &cp), FV_ERR_INVALID, "local_lens or seq_lens is NULL");
    refused(fv_context_parallel_slot(&slot, 16, table, 2, 4, &cp), FV_ERR_INVALID,
            "position 16 is key 8 of rank 0, in block 2");
    refused(fv_context_parallel_slot(&slot, -1, table, 2, 4, &cp), FV_ERR_INVALID, "position -1");
    refused(fv_context_parallel_slot(&slot, INT32_MAX - 1, table, 2, 4, &cp), FV_ERR_INVALID, "key 1073741823 of rank");
    refused(fv_context_parallel_slot(&slot, (int64_t)1 << 31, table, 2, 4, NULL), FV_ERR_INVALID,
            "position 2147483648, block_size 4; accepted: 0 to 2147483646");
    refused(fv_context_parallel_slot(&slot, ((int64_t)1 << 32) + 2, table, 2, 4, &cp), FV_ERR_INVALID,
            "position 4294967298");
    must(fv_context_parallel_slot(&slot, 8, table, 2, 4, &cp));
    assert_int_equal(slot, -1); /* the null block */
    fv_batch batch = {.struct_size = sizeof(batch),
                      .num_seqs = 1,
                      .query_start = start,
                      .seq_lens = lens,
                      .block_table = table,
                      .block_table_width = 2};
    must(fv_context_parallel_slots(slots, &batch, 4, &cp)); /* positions 1, 2, 3 */
    assert_true(slots[0] == -1 && slots[1] == 3 * 4 + 1 && slots[2] == -1);
    const int32_t padded[3] = {0, 1, 4}, padded_lens[2] = {1, 0};
    batch.num_seqs = 2;
    batch.query_start = padded;
    batch.seq_lens = padded_lens;
    must(fv_context_parallel_slots(slots, &batch, 4, &cp));
    assert_true(slots[0] == 3 * 4 && slots[1] == -1 && slots[2] == -1 && slots[3] == -1);
    batch.num_seqs = 1;
    batch.seq_lens = lens;
    batch.query_start = before;
    refused(fv_context_parallel_slots(slots, &batch, 4, &cp), FV_ERR_INVALID, "query_start[0] is -5; accepted: 0");
    batch.num_seqs = -3;
    refused(fv_context_parallel_slots(slots, &batch, 4, &cp), FV_ERR_INVALID, "num_seqs is -3 and block_size is 4");
    batch.num_seqs = 1;
    batch.struct_size = 2;
    refused(fv_context_parallel_slots(slots, &batch, 4, &cp), FV_ERR_INVALID, "fv_batch.struct_size is 2");
    batch.struct_size = sizeof(batch);
    batch.query_start = too_long;
    refused(fv_context_parallel_slots(slots, &batch, 4, &cp), FV_ERR_INVALID, "sequence 0 has 4 tokens, 9 of them new");
    refused(fv_context_parallel_slots(slots, &batch, 0, &cp), FV_ERR_INVALID, "block_size is 0");
    refused(fv_context_parallel_slots(NULL, &batch, 4, &cp), FV_ERR_INVALID, "slot_mapping, or");
    fv_problem problem = {.struct_size = sizeof(problem),
                          .kind = FV_ATTENTION_MHA,
                          .mha = {.num_heads = HEADS, .num_kv_heads = KV_HEADS, .head_size = D},
                          .q_dtype = FV_DTYPE_F32,
                          .block_size = BLOCK_SIZE,
                          .returns_lse = 1,
                          .context_parallel = cp};
    must(fv_problem_normalize(&problem, &problem));
    problem.sinks = 1; /* each rank would count them */
    refused(fv_problem_normalize(&problem, &problem), FV_ERR_INVALID, "sinks is 1 with context_parallel.world 2");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ranks_equal_the_whole),
        cmocka_unit_test(test_lengths_and_slots),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
