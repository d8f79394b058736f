/* Building a batch of MLA with weights. */
#include "check/mla_weights_case.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check/case.h"
#include "core/float.h"
#include "reference/reference.h"

#define MAX_SEQS 5

static void random_shape(check_mla_weights *test, check_random *random)
{
    static const fv_dtype dtypes[] = {FV_DTYPE_BF16, FV_DTYPE_F16, FV_DTYPE_F32};
    static const int32_t loras[] = {64, 128, 512}, ropes[] = {16, 32, 64}, head_dims[] = {16, 24, 32, 64};
    static const int32_t block_sizes[] = {1, 7, 16, 64};
    fv_problem *problem = &test->problem;
    *problem = (fv_problem){
        .struct_size = sizeof(*problem),
        .kind = FV_ATTENTION_MLA,
        .mla = {.num_heads = check_random_int(random, 1, 6),
                .kv_lora_rank = CHECK_RANDOM_PICK(random, loras),
                .qk_rope_head_dim = CHECK_RANDOM_PICK(random, ropes),
                .qk_nope_head_dim = CHECK_RANDOM_PICK(random, head_dims),
                .v_head_dim = CHECK_RANDOM_PICK(random, head_dims),
                .rotate_at_reading = check_random_chance(random, 30)},
        .q_dtype = CHECK_RANDOM_PICK(random, dtypes),
        .kv_layout = FV_KV_LAYOUT_LATENT,
        .block_size = CHECK_RANDOM_PICK(random, block_sizes),
        .returns_lse = 1,
    };
    const int32_t cache = check_random_int(random, 0, 9); /* 0..5: as the queries */
    if (cache == 6 || cache == 7) problem->kv_dtype = cache == 6 ? FV_DTYPE_F8_E4M3 : FV_DTYPE_F8_E5M2;
    if (cache == 8) problem->kv_dtype = FV_DTYPE_F8_E4M3;
    if (cache == 6 || cache == 7) problem->kv_scaling = FV_KV_SCALING_PER_TENSOR;
    if (cache == 9) {
        problem->mla.kv_lora_rank = 512;
        problem->mla.qk_rope_head_dim = 64;
        problem->kv_layout = FV_KV_LAYOUT_LATENT_FP8_DS;
        problem->kv_dtype = FV_DTYPE_F8_E4M3;
    }
    if (fv_problem_normalize(problem, problem) == FV_OK) return;
    fprintf(stderr, "fovea check: MLA with weights: %s\n", fv_last_error());
    exit(1);
}

static void random_options(check_mla_weights *test, check_random *random)
{
    static const int32_t thresholds[] = {0, 1, 4, 1000};
    test->options = (fv_plan_options){
        .struct_size = sizeof(fv_plan_options),
        .decode_threshold = CHECK_RANDOM_PICK(random, thresholds),
        .path = (fv_softmax_path)check_random_int(random, 0, 2),
        .static_grid = check_random_chance(random, 15),
    };
    test->tight_workspace = check_random_chance(random, 40);
}

static check_lens random_lens(check_random *random)
{
    const int32_t kind = check_random_int(random, 0, 9), context = check_random_int(random, 0, 150);
    int32_t query_len = 1;
    if (kind == 0) return (check_lens){.query_len = check_random_int(random, 0, 1)}; /* no keys */
    if (kind < 4) query_len = check_random_int(random, 2, 8);
    if (kind >= 7) query_len = check_random_int(random, 9, 50);
    return (check_lens){.query_len = query_len, .seq_len = query_len + (kind == 9 ? 0 : context)};
}

static void build_lengths(check_mla_weights *test, check_random *random)
{
    test->num_seqs = check_random_int(random, 1, MAX_SEQS);
    test->query_start = check_arena_alloc(&test->arena, (size_t)(test->num_seqs + 1) * sizeof(int32_t));
    test->seq_lens = check_arena_alloc(&test->arena, (size_t)test->num_seqs * sizeof(int32_t));
    for (int32_t seq = 0; seq < test->num_seqs; seq++) {
        const check_lens lens = random_lens(random);
        test->query_start[seq + 1] = test->query_start[seq] + lens.query_len;
        test->seq_lens[seq] = lens.seq_len;
        test->max_query_len = fv_max_i32(test->max_query_len, lens.query_len);
        test->max_seq_len = fv_max_i32(test->max_seq_len, lens.seq_len);
    }
    test->num_tokens = test->query_start[test->num_seqs];
}

static int64_t slot_of(const check_mla_weights *test, int32_t seq, int32_t key)
{
    const int32_t bs = test->problem.block_size;
    return (int64_t)test->block_table[seq * test->width + key / bs] * bs + key % bs;
}

/* Blocks dealt out backwards, one of nobody at the end. Returns their number, the null block among them. */
static int32_t build_tables(check_mla_weights *test, check_random *random)
{
    const int32_t bs = test->problem.block_size;
    static const int32_t wild[] = {-1, INT32_MAX, INT32_MIN, 0};
    test->width = (test->max_seq_len + bs - 1) / bs + 1;
    test->block_table = check_arena_alloc(&test->arena, (size_t)(test->num_seqs * test->width) * sizeof(int32_t));
    int32_t num_blocks = 2;
    for (int32_t seq = 0; seq < test->num_seqs; seq++) num_blocks += (test->seq_lens[seq] + bs - 1) / bs;
    int32_t next = num_blocks - 2;
    for (int32_t i = 0; i < test->num_seqs * test->width; i++) {
        const int32_t is_used = i % test->width * bs < test->seq_lens[i / test->width];
        test->block_table[i] = is_used ? next-- : CHECK_RANDOM_PICK(random, wild);
    }
    test->slots = check_arena_alloc(&test->arena, (size_t)test->num_tokens * sizeof(int64_t));
    for (int32_t seq = 0; seq < test->num_seqs; seq++) {
        for (int32_t token = test->query_start[seq]; token < test->query_start[seq + 1]; token++) {
            const int32_t key = test->seq_lens[seq] - (test->query_start[seq + 1] - token);
            test->slots[token] = key < 0 ? -1 : slot_of(test, seq, key);
        }
    }
    return num_blocks;
}

static fv_tensor random_tensor(check_mla_weights *test, check_random *random, fv_dtype dtype, int64_t d0, int64_t d1,
                               int64_t d2, float factor)
{
    const size_t bytes = fv_dtype_bytes(dtype), count = (size_t)(d0 * d1 * d2);
    char *data = check_arena_alloc(&test->arena, count * bytes);
    for (size_t i = 0; i < count; i++) fv_float_store(data + i * bytes, factor * check_random_normal(random), dtype);
    return fv_tensor_3d(data, dtype, d0, d1, d2);
}

static void write_row(const check_mla_weights *test, const char *row, int64_t slot)
{
    const fv_kv_write_params params = {
        .k = row,
        .src_dtype = test->problem.q_dtype,
        .cache = test->view,
        .slot_mapping = &slot,
        .num_tokens = 1,
        .k_scale = test->k_scale,
        .num_kv_scales = test->k_scale != NULL,
    };
    fv_reference_kv_write(NULL, &params);
}

/* The context's keys are written, then cache_after has the new ones too. */
static void build_cache(check_mla_weights *test, check_random *random, int32_t num_blocks)
{
    const fv_problem *problem = &test->problem;
    const int32_t size = problem->mha.head_size;
    fv_kv_view_bytes(&test->cache_bytes, problem->kv_layout, problem->kv_dtype, num_blocks, problem->block_size, 1,
                     size);
    test->cache = check_arena_alloc(&test->arena, test->cache_bytes);
    test->cache_after = check_arena_alloc(&test->arena, test->cache_bytes);
    memset(test->cache, 0xff, test->cache_bytes); /* NaN in every float format */
    fv_kv_view_init(&test->view, test->cache, problem->kv_layout, problem->kv_dtype, num_blocks, problem->block_size, 1,
                    size);
    test->view.v_head_size = problem->mha.v_head_size;
    for (int32_t seq = 0; seq < test->num_seqs; seq++) {
        const int32_t context = test->seq_lens[seq] - (test->query_start[seq + 1] - test->query_start[seq]);
        for (int32_t key = 0; key < context; key++) {
            const fv_tensor row = random_tensor(test, random, problem->q_dtype, 1, 1, size, 1);
            write_row(test, row.data, slot_of(test, seq, key));
        }
    }
    memcpy(test->cache_after, test->cache, test->cache_bytes);
    for (int32_t token = 0; token < test->num_tokens; token++)
        if (test->slots[token] >= 0)
            write_row(test, (char *)test->k.data + token * test->k.stride_bytes[0], test->slots[token]);
    char *before = test->cache_after; /* the two change places */
    for (size_t i = 0; i < test->cache_bytes; i++) {
        const char byte = before[i];
        before[i] = test->cache[i];
        test->cache[i] = byte;
    }
}

static void build_rotation(check_mla_weights *test)
{
    if (!test->problem.mla.rotate_at_reading) return;
    const int32_t half = test->problem.mla.qk_rope_head_dim / 2;
    test->num_positions = test->max_seq_len + 1; /* one to spare: mutants are off by one */
    test->cos = check_arena_alloc(&test->arena, (size_t)(test->num_positions * half) * sizeof(float));
    test->sin = check_arena_alloc(&test->arena, (size_t)(test->num_positions * half) * sizeof(float));
    for (int32_t i = 0; i < test->num_positions * half; i++) {
        const double angle = i / half * pow(10000, -(double)(i % half) / half);
        test->cos[i] = (float)cos(angle);
        test->sin[i] = (float)sin(angle);
    }
}

void check_mla_weights_init(check_mla_weights *test, check_random *random)
{
    *test = (check_mla_weights){0};
    random_shape(test, random);
    random_options(test, random);
    build_lengths(test, random);
    if (test->num_tokens == 0) test->options.static_grid = 0; /* on a device it wants tensors of one row at least */
    const int32_t num_blocks = build_tables(test, random);
    const fv_mla_shape *mla = &test->problem.mla;
    const fv_dtype dtype = test->problem.q_dtype;
    const int64_t rows = test->num_tokens, heads = mla->num_heads;
    test->q = random_tensor(test, random, dtype, rows, heads, mla->qk_nope_head_dim + mla->qk_rope_head_dim, 1);
    test->k = random_tensor(test, random, dtype, rows, 1, test->problem.mha.head_size, 1);
    test->kv_up = random_tensor(test, random, check_random_chance(random, 50) ? FV_DTYPE_F32 : dtype, heads,
                                mla->qk_nope_head_dim + mla->v_head_dim, mla->kv_lora_rank,
                                1 / sqrtf((float)mla->kv_lora_rank));
    test->out = fv_tensor_3d(NULL, test->problem.out_dtype, rows, heads, mla->v_head_dim);
    test->out.data = check_arena_alloc_fenced(&test->arena, (size_t)(rows * test->out.stride_bytes[0]));
    test->lse = fv_tensor_2d(NULL, FV_DTYPE_F32, rows, heads);
    test->lse.data = check_arena_alloc_fenced(&test->arena, (size_t)(rows * test->lse.stride_bytes[0]));
    if (test->problem.kv_scaling == FV_KV_SCALING_PER_TENSOR) {
        test->k_scale = check_arena_alloc(&test->arena, sizeof(float));
        *test->k_scale = (float)(0.03 + 0.3 * check_random_unit(random));
    }
    build_rotation(test);
    build_cache(test, random, num_blocks);
}

void check_mla_weights_deinit(check_mla_weights *test) { check_arena_clear(&test->arena); }
