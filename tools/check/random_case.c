/* Random small cases: any mixture of the features, each small enough for the oracle to see every row. */
#include <stdio.h>
#include <stdlib.h>

#include "check/case.h"
#include "check/random.h"
#include "core/compiler.h"

#define MAX_SEQS 6
#define MAX_COST 3e6                   /* (row, key, element) steps */
#define MAX_BLOCK_ELEMENTS (256 << 10) /* K and V of a block */

/* Small lengths are as likely as large ones. */
static int32_t random_len(check_random *random, int32_t max)
{
    int32_t limit = 1;
    while (limit < max && check_random_chance(random, 80)) limit *= 2;
    return check_random_int(random, 1, fv_min_i32(limit, max));
}

static const fv_dtype dtypes[] = {FV_DTYPE_F32, FV_DTYPE_F16, FV_DTYPE_BF16};

static void random_shape(fv_problem *problem, check_random *random)
{
    static const int32_t block_sizes[] = {1, 3, 8, 16, 16, 16, 17, 32, 64, 128, 544};
    static const int32_t common_sizes[] = {64, 80, 96, 128, 128, 256};
    const int32_t group = check_random_int(random, 1, 16);
    const int32_t num_kv_heads = check_random_int(random, 1, group > 8 ? 2 : 4);
    problem->mha.num_heads = group * num_kv_heads;
    problem->mha.num_kv_heads = num_kv_heads;
    problem->mha.head_size = check_random_chance(random, 50) ? CHECK_RANDOM_PICK(random, common_sizes)
                                                             : 8 * check_random_int(random, 4, 64);
    problem->block_size = CHECK_RANDOM_PICK(random, block_sizes);
    while (2 * problem->block_size * num_kv_heads * problem->mha.head_size > MAX_BLOCK_ELEMENTS)
        problem->block_size /= 2;
    problem->q_dtype = CHECK_RANDOM_PICK(random, dtypes);
    problem->out_dtype = check_random_chance(random, 90) ? problem->q_dtype : CHECK_RANDOM_PICK(random, dtypes);
    problem->kv_dtype = problem->q_dtype;
    if (check_random_chance(random, 35)) {
        static const fv_dtype small[] = {FV_DTYPE_F8_E4M3, FV_DTYPE_F8_E4M3, FV_DTYPE_F8_E5M2, FV_DTYPE_F8_E5M2,
                                         FV_DTYPE_I8};
        problem->kv_dtype = CHECK_RANDOM_PICK(random, small);
        static const fv_kv_scaling scalings[] = {FV_KV_SCALING_NONE,       FV_KV_SCALING_PER_TENSOR,
                                                 FV_KV_SCALING_PER_TENSOR, FV_KV_SCALING_PER_HEAD,
                                                 FV_KV_SCALING_PER_HEAD,   FV_KV_SCALING_PER_TOKEN_HEAD};
        problem->kv_scaling = CHECK_RANDOM_PICK(random, scalings);
        if (problem->kv_dtype == FV_DTYPE_I8 && problem->kv_scaling == FV_KV_SCALING_NONE)
            problem->kv_scaling = FV_KV_SCALING_PER_TOKEN_HEAD;
    }
}

/* Another layout where pieces of 16 bytes do not fill heads and blocks. */
static void fit_pieces(fv_problem *problem)
{
    const int32_t x = 16 / (int32_t)fv_dtype_bytes(problem->kv_dtype);
    const int32_t head_fits = problem->mha.head_size % x == 0, block_fits = problem->block_size % x == 0;
    if ((problem->kv_layout == FV_KV_LAYOUT_X_PACKED && !head_fits) ||
        (problem->kv_layout == FV_KV_LAYOUT_SHUFFLED && !(head_fits && block_fits))) {
        problem->kv_layout = FV_KV_LAYOUT_2_NB_BS_H_D;
    }
}

/* The layouts that backends have as their own in most cases, since the plan takes no other of some. */
static void random_layout(fv_problem *problem, check_random *random)
{
    static const fv_kv_layout own[] = {FV_KV_LAYOUT_NB_2_BS_H_D, FV_KV_LAYOUT_2_NB_BS_H_D, FV_KV_LAYOUT_X_PACKED,
                                       FV_KV_LAYOUT_SHUFFLED};
    problem->kv_layout = CHECK_RANDOM_PICK(random, own);
    if (check_random_chance(random, 8)) {
        problem->mha.v_head_size = 8 * check_random_int(random, 4, 40);
        problem->kv_layout = FV_KV_LAYOUT_STRIDED;
    } else if (check_random_chance(random, 30)) {
        problem->kv_layout = (fv_kv_layout)check_random_int(random, 0, FV_KV_LAYOUT_PACKED_HND);
    }
    fit_pieces(problem);
}

/* A cache of numbers that queries do not have, of a stream of its own: the engine's is fp16 under fp32 queries. */
static void random_mixed(fv_problem *problem, check_random random)
{
    if (problem->kv_dtype != problem->q_dtype || !check_random_chance(&random, 15)) return;
    problem->kv_dtype = CHECK_RANDOM_PICK(&random, dtypes);
    fit_pieces(problem);
}

static void random_features(fv_problem *problem, check_random *random)
{
    if (check_random_chance(random, 25)) problem->soft_cap = (float)check_random_int(random, 1, 50);
    if (check_random_chance(random, 30))
        problem->window = check_random_int(random, 1, check_random_chance(random, 50) ? 8 : 300);
    if (check_random_chance(random, 20))
        problem->alibi = check_random_chance(random, 70) ? FV_ALIBI_LINEAR : FV_ALIBI_SQRT;
    if (check_random_chance(random, 25)) problem->sinks = 1;
    if (check_random_chance(random, 60)) problem->returns_lse = 1;
    if (check_random_chance(random, 20)) problem->not_causal = 1;
    if (check_random_chance(random, 6)) problem->tree_mask = 1;
    if (check_random_chance(random, 20)) problem->scale = (float)(0.02 + 0.3 * check_random_unit(random));
    if (check_random_chance(random, 8)) {
        static const int32_t interleaves[] = {1, 1, 2, 16, 64};
        const int32_t world = check_random_int(random, 2, 4);
        problem->context_parallel = (fv_context_parallel){world, check_random_int(random, 0, world - 1),
                                                          CHECK_RANDOM_PICK(random, interleaves)};
        problem->sinks = 0; /* fv_merge_ranks takes them */
    }
}

/* Encoders and cross attention: no masks by position. */
static void random_type(check_case *test, check_random *random)
{
    fv_problem *problem = &test->problem;
    if (!check_random_chance(random, 7)) return;
    problem->type = check_random_chance(random, 50) ? FV_ATTENTION_ENCODER : FV_ATTENTION_CROSS;
    problem->not_causal = 1;
    problem->tree_mask = 0;
    problem->context_parallel = (fv_context_parallel){0};
    test->in_cache = problem->type == FV_ATTENTION_CROSS;
    if (problem->type == FV_ATTENTION_ENCODER) return;
    problem->window = 0;
    problem->alibi = FV_ALIBI_NONE;
}

/* MLA, absorbed: some cases, of a stream of their own, become one. */
static void random_latents(check_case *test, check_random random)
{
    static const int32_t num_heads[] = {1, 2, 3, 8, 16, 24, 64, 128};
    static const int32_t loras[] = {64, 128, 256, 512, 512}, ropes[] = {8, 16, 64, 64};
    if (!check_random_chance(&random, 15)) return;
    fv_problem *problem = &test->problem;
    problem->kind = FV_ATTENTION_MLA;
    problem->mla = (fv_mla_shape){
        .num_heads = CHECK_RANDOM_PICK(&random, num_heads),
        .kv_lora_rank = CHECK_RANDOM_PICK(&random, loras),
        .qk_rope_head_dim = CHECK_RANDOM_PICK(&random, ropes),
        .qk_nope_head_dim = 128,
        .v_head_dim = 128,
        .absorbed = 1,
    };
    problem->type = FV_ATTENTION_DECODER;
    problem->kv_layout = FV_KV_LAYOUT_LATENT;
    problem->soft_cap = 0;
    problem->alibi = FV_ALIBI_NONE;
    problem->sinks = 0;
    if (problem->kv_dtype == FV_DTYPE_I8) problem->kv_dtype = FV_DTYPE_F8_E4M3;
    if (problem->kv_scaling != FV_KV_SCALING_NONE) problem->kv_scaling = FV_KV_SCALING_PER_TENSOR;
    const int32_t fits_ds = problem->mla.kv_lora_rank == 512 && problem->mla.qk_rope_head_dim == 64;
    if (!fits_ds || !check_random_chance(&random, 30)) return;
    problem->kv_layout = FV_KV_LAYOUT_LATENT_FP8_DS;
    problem->kv_dtype = FV_DTYPE_F8_E4M3;
    problem->kv_scaling = FV_KV_SCALING_NONE;
    if (test->spread == CHECK_SPREAD_LOW) test->spread = CHECK_SPREAD_PEAKED;
}

static check_lens random_lens(const check_case *test, check_random *random)
{
    static const int32_t longest = 1500, longest_query = 200;
    const int32_t kind = check_random_int(random, 0, 99);
    check_lens lens = {.seq_len = random_len(random, longest)};
    if (test->problem.type == FV_ATTENTION_ENCODER) {
        lens.seq_len = fv_min_i32(lens.seq_len, longest_query);
        return (check_lens){lens.seq_len, lens.seq_len, 1};
    }
    if (kind < 4) return (check_lens){0};                       /* no tokens at all */
    if (kind < 7) return (check_lens){.query_len = 1};          /* padding under a captured graph: a token, no keys */
    if (kind < 9) return (check_lens){.seq_len = lens.seq_len}; /* keys, but no new token */
    if (kind < 40)
        lens.query_len = 1;
    else if (kind < 65)
        lens.query_len = check_random_int(random, 2, 16);
    else if (kind < 85)
        lens.query_len = random_len(random, longest_query);
    else
        lens.query_len = lens.seq_len;
    if (test->problem.tree_mask) lens.query_len = fv_min_i32(lens.query_len, 64);
    lens.query_len = fv_min_i32(lens.query_len, fv_min_i32(lens.seq_len, longest_query));
    lens.not_causal = test->problem.not_causal && check_random_chance(random, 50);
    if (test->problem.type == FV_ATTENTION_CROSS) lens = (check_lens){lens.query_len, random_len(random, longest), 1};
    return lens;
}

static void random_schedule(check_case *test, check_random *random)
{
    test->schedule = (check_schedule)check_random_int(random, 0, 3);
    test->spread = check_random_chance(random, 60) ? CHECK_SPREAD_NORMAL
                                                   : (check_spread)check_random_int(random, 0, CHECK_SPREAD_LOW);
    /* Low scores need a key element beyond the range of the scaled fp8 formats. */
    if (test->problem.kv_dtype != test->problem.q_dtype || test->problem.soft_cap > 0) {
        if (test->spread == CHECK_SPREAD_LOW) test->spread = CHECK_SPREAD_PEAKED;
    }
    test->in_cache = check_random_chance(random, 25);
    fv_plan_options *options = &test->options;
    options->struct_size = sizeof(*options);
    options->batch_invariant = check_random_chance(random, 20);
    options->static_grid = check_random_chance(random, 20);
    options->path = (fv_softmax_path)check_random_int(random, 0, 2);
    if (check_random_chance(random, 30)) options->segment_keys = 16 * check_random_int(random, 1, 8);
    options->cascade = (fv_cascade)check_random_int(random, 0, 2);
    if (check_random_chance(random, 40)) options->decode_threshold = check_random_int(random, 1, 20);
    test->tight_workspace = check_random_chance(random, 30);
    if (check_random_chance(random, 30)) test->shared_keys = random_len(random, 1000);
}

/* What AMX tiles of few rows take: few cases are such by chance. */
static void suit_tiles(fv_problem *problem, check_random *random)
{
    static const int32_t sizes[] = {64, 96, 128, 256};
    problem->mha.head_size = CHECK_RANDOM_PICK(random, sizes);
    problem->mha.v_head_size = 0;
    problem->q_dtype = problem->kv_dtype = problem->out_dtype = FV_DTYPE_BF16;
    problem->kv_scaling = FV_KV_SCALING_NONE;
    problem->kv_layout = FV_KV_LAYOUT_NB_2_BS_H_D;
    problem->soft_cap = 0;
    problem->alibi = FV_ALIBI_NONE;
    problem->tree_mask = 0;
}

/* What is rare, of streams of its own: what other cases are does not hang on it. First the shape. */
static void rare_shape(fv_problem *problem, check_random *random)
{
    static const int32_t groups[] = {17, 24, 31, 32, 33, 48, 64, 71, 128};
    const int32_t kind = check_random_int(random, 0, 99), any_size = check_random_chance(random, 8);
    const int32_t block_size = check_random_chance(random, 60) ? check_random_int(random, 1, 100)
                                                               : 16 * check_random_int(random, 1, 20);
    if (problem->kind == FV_ATTENTION_MLA) {
        if (kind < 30) problem->mla.num_heads = check_random_int(random, 4, kind < 15 ? 7 : 130);
    } else if (kind < 3) {
        problem->mha.num_kv_heads = check_random_int(random, 1, 2);
        problem->mha.num_heads = problem->mha.num_kv_heads * CHECK_RANDOM_PICK(random, groups);
    } else if (kind < 6) {
        problem->mha.num_kv_heads = check_random_int(random, 17, 20);
        problem->mha.num_heads = problem->mha.num_kv_heads * check_random_int(random, 1, 4);
    }
    if (problem->kind == FV_ATTENTION_MHA && kind >= 3 && kind < 9) suit_tiles(problem, random);
    if (problem->kv_layout == FV_KV_LAYOUT_SHUFFLED) return; /* whose blocks are whole pieces of keys */
    if (any_size) problem->block_size = block_size;
    while (problem->block_size > 1 &&
           2 * problem->block_size * problem->mha.num_kv_heads * problem->mha.head_size > MAX_BLOCK_ELEMENTS)
        problem->block_size /= 2;
}

/* Then the numbers: far from 1, not finite, beyond fp32. */
static void rare_numbers(check_case *test, check_random *random)
{
    fv_problem *problem = &test->problem;
    const int32_t is_stored = problem->kv_dtype == problem->q_dtype;
    const int32_t kind = check_random_int(random, 0, 99), other = check_random_int(random, 0, 99);
    static const float negative[] = {-0.1f, -1, -4};
    if (kind < 3) {
        problem->scale = CHECK_RANDOM_PICK(random, negative);
    } else if (kind < 5) {
        test->huge_scores = 1;
        problem->scale = 1e38f;
    } else if (kind < 9) {
        test->spread = CHECK_SPREAD_FLAT;
    } else if (kind < 15) {
        test->spoilt_keys = is_stored && !test->nan_queries;
    }
    if (test->huge_scores && test->spread == CHECK_SPREAD_LOW) test->spread = CHECK_SPREAD_NORMAL;
    static const float caps[] = {1e-3f, 0.1f, 0.37f, 0.9f, 7.3f, 300, 1e4f};
    if (problem->soft_cap > 0 && other < 30 && !test->huge_scores) problem->soft_cap = CHECK_RANDOM_PICK(random, caps);
    static const int32_t windows[] = {1 << 30, INT32_MAX - 1, INT32_MAX};
    if (problem->type == FV_ATTENTION_DECODER && other < 4) problem->window = CHECK_RANDOM_PICK(random, windows);
    test->odd_heads = check_random_chance(random, 15);
    test->odd_scales = check_random_chance(random, 25);
    test->odd_rows = check_random_chance(random, 5);
    static const int32_t bytes[] = {0x7f, 0x7c, 0x78}; /* halves: NaN and infinity, large numbers */
    if (check_random_chance(random, 20)) test->unused_byte = CHECK_RANDOM_PICK(random, bytes);
}

static void fit_cost(const check_case *test, check_lens *lens)
{
    while (check_case_cost(test) > MAX_COST && lens->seq_len > 1) { /* halve it until the case fits */
        lens->seq_len /= 2;
        if (test->problem.type != FV_ATTENTION_CROSS) lens->query_len = fv_min_i32(lens->query_len, lens->seq_len);
    }
}

/* Last the lengths: about multiples of the kernels' tiles, more rows than a decode has. */
static void rare_lens(check_case *test, check_random *random)
{
    static const int32_t tiles[] = {16, 32, 64, 128, 256, 512};
    if (test->problem.type != FV_ATTENTION_DECODER || !check_random_chance(random, 8)) return;
    for (int32_t r = 0; r < test->num_seqs; r++) {
        check_lens *lens = &test->lens[r];
        if (lens->seq_len == 0 || lens->query_len == 0) continue;
        lens->seq_len = CHECK_RANDOM_PICK(random, tiles) * check_random_int(random, 1, 2) +
                        check_random_int(random, -1, 1);
        if (check_random_chance(random, 50)) lens->query_len = check_random_int(random, 17, 64);
        lens->query_len = fv_min_i32(lens->query_len, lens->seq_len);
        fit_cost(test, lens);
    }
}

void check_case_random(check_case *test, uint64_t seed, int32_t index)
{
    check_random random = check_random_of(seed, (uint64_t)index);
    *test = (check_case){.problem = {.struct_size = sizeof(fv_problem), .kind = FV_ATTENTION_MHA}};
    snprintf(test->id, sizeof(test->id), "random.%d", index);
    random_shape(&test->problem, &random);
    random_layout(&test->problem, &random);
    random_mixed(&test->problem, check_random_of(seed ^ 0x3157, (uint64_t)index));
    random_features(&test->problem, &random);
    random_schedule(test, &random);
    random_type(test, &random);
    random_latents(test, check_random_of(seed ^ 0x317a, (uint64_t)index));
    test->seed = check_random_next(&random);
    check_random other = check_random_of(seed ^ 0x4a4, (uint64_t)index);
    test->nan_queries = check_random_chance(&other, 10);
    check_random rare = check_random_of(seed ^ 0x4a4e, (uint64_t)index);
    rare_shape(&test->problem, &rare);
    rare_numbers(test, &rare);
    test->lens = malloc(MAX_SEQS * sizeof(check_lens));
    if (!test->lens || fv_problem_normalize(&test->problem, &test->problem) != FV_OK) {
        fprintf(stderr, "fovea check: case %s: %s\n", test->id, test->lens ? fv_last_error() : "no memory");
        exit(1);
    }
    const int32_t num_seqs = check_random_int(&random, 1, MAX_SEQS);
    for (int32_t r = 0; r < num_seqs; r++) {
        test->lens[test->num_seqs++] = random_lens(test, &random);
        fit_cost(test, &test->lens[r]);
    }
    rare_lens(test, &rare);
}
