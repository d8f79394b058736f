/* What a plan accepts and refuses, and what it says. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "fovea/fovea.h"

enum { TOKENS = 4, HEADS = 4, KV_HEADS = 2, D = 64, BS = 16, NB = 32, WIDTH = 8 };

/* A small step that works; tests break one thing at a time. */
typedef struct fixture {
    fv_context *context;
    fv_problem problem;
    fv_bounds bounds;
    fv_plan *plan;
    int32_t query_start[3], seq_lens[2], block_table[2 * WIDTH];
    int64_t slot_mapping[TOKENS];
    uint8_t causal[2];
    float q[TOKENS * HEADS * D], k[TOKENS * KV_HEADS * D], v[TOKENS * KV_HEADS * D];
    float out[TOKENS * HEADS * D], lse[TOKENS * HEADS], slopes[HEADS];
    float cache[NB * 2 * BS * KV_HEADS * D];
    fv_batch batch;
    fv_layer layer;
    void *workspace;
} fixture;

static int make(void **state)
{
    fixture *f = calloc(1, sizeof(*f));
    if (fv_context_create(&f->context, NULL) != FV_OK) return -1;
    f->problem = (fv_problem){.struct_size = sizeof(fv_problem),
                              .kind = FV_ATTENTION_MHA,
                              .mha = {HEADS, KV_HEADS, D, 0},
                              .q_dtype = FV_DTYPE_F32,
                              .block_size = BS,
                              .kv_layout = FV_KV_LAYOUT_NB_2_BS_H_D,
                              .returns_lse = 1};
    f->bounds = (fv_bounds){sizeof(f->bounds), 2, TOKENS, 0, WIDTH * BS};
    f->query_start[1] = 3;
    f->query_start[2] = 4;
    f->seq_lens[0] = 3;
    f->seq_lens[1] = 100;
    f->causal[0] = f->causal[1] = 1;
    for (int32_t i = 0; i < 2 * WIDTH; i++) f->block_table[i] = 1 + i;
    for (int32_t i = 0; i < 3; i++) f->slot_mapping[i] = BS + i;
    f->slot_mapping[3] = (int64_t)f->block_table[WIDTH + 99 / BS] * BS + 99 % BS;
    for (int32_t i = 0; i < TOKENS * HEADS * D; i++) f->q[i] = (float)(i % 17) / 17.0f;
    for (int32_t i = 0; i < TOKENS * KV_HEADS * D; i++) f->k[i] = f->v[i] = (float)(i % 13) / 13.0f;
    f->batch = (fv_batch){.struct_size = sizeof(fv_batch),
                          .num_seqs = 2,
                          .num_tokens = TOKENS,
                          .query_start = f->query_start,
                          .seq_lens = f->seq_lens,
                          .block_table = f->block_table,
                          .block_table_stride = WIDTH,
                          .block_table_width = WIDTH,
                          .slot_mapping = f->slot_mapping};
    f->layer = (fv_layer){.struct_size = sizeof(fv_layer),
                          .q = fv_tensor_3d(f->q, FV_DTYPE_F32, TOKENS, HEADS, D),
                          .k = fv_tensor_3d(f->k, FV_DTYPE_F32, TOKENS, KV_HEADS, D),
                          .v = fv_tensor_3d(f->v, FV_DTYPE_F32, TOKENS, KV_HEADS, D),
                          .out = fv_tensor_3d(f->out, FV_DTYPE_F32, TOKENS, HEADS, D),
                          .lse = fv_tensor_2d(f->lse, FV_DTYPE_F32, TOKENS, HEADS)};
    if (fv_kv_view_init(&f->layer.kv_cache, f->cache, f->problem.kv_layout, FV_DTYPE_F32, NB, BS, KV_HEADS, D) !=
        FV_OK) {
        return -1;
    }
    if (fv_plan_create(&f->plan, f->context, &f->problem, &f->bounds, NULL) != FV_OK) return -1;
    f->workspace = aligned_alloc(256, (fv_plan_workspace_bytes(f->plan) + 511) / 256 * 256);
    *state = f;
    return 0;
}

static int destroy(void **state)
{
    fixture *f = *state;
    fv_plan_destroy(f->plan);
    fv_context_destroy(f->context);
    free(f->workspace);
    free(f);
    return 0;
}

static void assert_refused(fv_status status, fv_status expected, const char *says)
{
    if (status != expected) {
        fail_msg("status %s, expected %s (%s)", fv_status_name(status), fv_status_name(expected), fv_last_error());
    }
    if (!strstr(fv_last_error(), says)) fail_msg("'%s' lacks '%s'", fv_last_error(), says);
}

static void test_a_step_runs(void **state)
{
    fixture *f = *state;
    assert_int_equal(fv_plan_update(f->plan, &f->batch, NULL), FV_OK);
    assert_int_equal(fv_plan_run(f->plan, &f->layer, f->workspace, NULL), FV_OK);
    /* Token 0 sees only itself: its output is its value, its LSE its score. */
    double score = 0;
    for (int32_t d = 0; d < D; d++) score += (double)f->q[d] * f->k[d] / 8.0;
    assert_float_equal(f->lse[0], score, 1e-5);
    for (int32_t d = 0; d < D; d++) assert_float_equal(f->out[d], f->v[d], 1e-6);
    assert_non_null(strstr(fv_plan_describe(f->plan), "TRITON_ATTN"));
    assert_non_null(strstr(fv_plan_describe(f->plan), "2 sequences, 4 tokens"));
    assert_true(fv_plan_buffer_bytes(f->plan) > 0);
}

/* What a captured launch keeps is in the key: its sizes, and where the tree mask lies. */
static void test_graph_keys(void **state)
{
    fixture *f = *state;
    assert_int_equal(fv_plan_update(f->plan, &f->batch, NULL), FV_OK);
    const uint64_t key = fv_plan_graph_key(f->plan);
    assert_int_equal(fv_plan_update(f->plan, &f->batch, NULL), FV_OK);
    assert_true(fv_plan_graph_key(f->plan) == key);
    f->query_start[1] = 2;
    f->query_start[2] = f->batch.num_tokens = 3;
    assert_int_equal(fv_plan_update(f->plan, &f->batch, NULL), FV_OK);
    assert_true(fv_plan_graph_key(f->plan) != key);

    const uint64_t trees[2][TOKENS] = {{1, 2, 4, 1}, {1, 3, 7, 1}};
    const fv_plan_options options = {.struct_size = sizeof(options), .static_grid = 1};
    fv_plan *plan = NULL;
    f->problem.tree_mask = 1;
    assert_int_equal(fv_plan_create(&plan, f->context, &f->problem, &f->bounds, &options), FV_OK);
    uint64_t keys[2];
    for (int32_t i = 0; i < 2; i++) {
        f->batch.tree_mask = trees[i];
        assert_int_equal(fv_plan_update(plan, &f->batch, NULL), FV_OK);
        keys[i] = fv_plan_graph_key(plan);
    }
    assert_true(keys[0] != keys[1]);
    fv_plan_destroy(plan);
}

/* A plan where another one was, whose memory it got: its graphs are others. */
static void test_keys_are_of_one_plan(void **state)
{
    fixture *f = *state;
    enum { ROUNDS = 200 };
    static uint64_t keys[ROUNDS];
    const fv_plan_options options = {.struct_size = sizeof(options), .static_grid = 1};
    f->seq_lens[1] = 20;
    for (int32_t i = 0; i < ROUNDS; i++) {
        fv_plan *plan = NULL;
        if (i % 20 == 19) { /* nor are a context's those of the next one */
            fv_plan_destroy(f->plan);
            f->plan = NULL;
            fv_context_destroy(f->context);
            const fv_context_options two = {.struct_size = sizeof(two), .num_threads = 2};
            assert_int_equal(fv_context_create(&f->context, &two), FV_OK);
        }
        f->problem.window = i % 2 ? 32 : 0;
        f->bounds.max_num_seqs = 2 << i % 3;
        f->bounds.max_num_tokens = TOKENS << i % 3;
        assert_int_equal(fv_plan_create(&plan, f->context, &f->problem, &f->bounds, &options), FV_OK);
        assert_int_equal(fv_plan_update(plan, &f->batch, NULL), FV_OK);
        keys[i] = fv_plan_graph_key(plan);
        fv_plan_destroy(plan);
        for (int32_t j = 0; j < i; j++) assert_true(keys[j] != keys[i]);
    }
}

static void test_problems_are_refused(void **state)
{
    fixture *f = *state;
    fv_plan *plan = NULL;
    fv_problem problem;
#define REFUSED(change, expected, says)                                                            \
    problem = f->problem;                                                                          \
    problem.change;                                                                                \
    assert_refused(fv_plan_create(&plan, f->context, &problem, &f->bounds, NULL), expected, says); \
    assert_null(plan)
    REFUSED(struct_size = 7, FV_ERR_INVALID, "struct_size is 7");
    REFUSED(kind = (fv_attention_kind)9, FV_ERR_INVALID, "kind is 9");
    REFUSED(mha.num_heads = 5, FV_ERR_INVALID, "num_heads 5 is not a multiple of num_kv_heads 2");
    REFUSED(mha.num_kv_heads = 0, FV_ERR_INVALID, "num_kv_heads is 0");
    REFUSED(block_size = -1, FV_ERR_INVALID, "block_size is -1");
    REFUSED(q_dtype = FV_DTYPE_F8_E4M3, FV_ERR_INVALID, "q_dtype is fp8_e4m3 (4)");
    REFUSED(q_dtype = (fv_dtype)77, FV_ERR_INVALID, "q_dtype is none (77)");
    REFUSED(out_dtype = (fv_dtype)-5, FV_ERR_INVALID, "out_dtype is none (-5)");
    REFUSED(soft_cap = NAN, FV_ERR_INVALID, "soft_cap is nan");
    REFUSED(scale = INFINITY, FV_ERR_INVALID, "scale is inf");
    REFUSED(window = -3, FV_ERR_INVALID, "window is -3");
    REFUSED(context_parallel.rank = 4, FV_ERR_INVALID, "context_parallel.rank is 4");
    REFUSED(mha.head_size = 36, FV_ERR_UNSUPPORTED, "head_size not supported");
    REFUSED(mha.head_size = 520, FV_ERR_UNSUPPORTED, "head_size not supported");
    REFUSED(kv_dtype = FV_DTYPE_I8, FV_ERR_INVALID, "kv_dtype is int8 with kv_scaling 0");
    REFUSED(kv_scaling = FV_KV_SCALING_PER_TOKEN_HEAD, FV_ERR_INVALID, "kv_dtype is float32 with kv_scaling 3");
    REFUSED(kv_scaling = FV_KV_SCALING_PER_TOKEN_HEAD;
            problem.kv_dtype = FV_DTYPE_BF16, FV_ERR_INVALID, "accepted: int8, fp8_e4m3, fp8_e5m2");
    REFUSED(kv_layout = FV_KV_LAYOUT_LATENT, FV_ERR_UNSUPPORTED, "layout latent not supported");
    REFUSED(type = FV_ATTENTION_CROSS;
            problem.window = 8, FV_ERR_UNSUPPORTED, "sliding window not supported with attention type cross");
    REFUSED(type = FV_ATTENTION_ENCODER; problem.context_parallel.world = 2, FV_ERR_UNSUPPORTED,
                                         "context parallelism not supported with attention type encoder");
#undef REFUSED
    problem = f->problem;
    problem.kind = FV_ATTENTION_MLA;
    problem.mla = (fv_mla_shape){16, 512, 64, 128, 128, 0, 0};
    assert_refused(fv_plan_create(&plan, f->context, &problem, &f->bounds, NULL), FV_ERR_UNSUPPORTED,
                   "layout nb_2_bs_h_d not supported (accepted: latent, latent_fp8_ds)");

    fv_plan_options options = {.struct_size = sizeof(options), .backend = "FLASHINFER"};
    assert_refused(fv_plan_create(&plan, f->context, &f->problem, &f->bounds, &options), FV_ERR_INVALID,
                   "Unknown attention backend: 'FLASHINFER'. Valid options are: auto, TRITON_ATTN");
    options = (fv_plan_options){.struct_size = sizeof(options), .kernels = "sse"};
    assert_refused(fv_plan_create(&plan, f->context, &f->problem, &f->bounds, &options), FV_ERR_INVALID, "reference");
    options = (fv_plan_options){.struct_size = sizeof(options), .variant = "huge"};
    assert_refused(fv_plan_create(&plan, f->context, &f->problem, &f->bounds, &options), FV_ERR_INVALID,
                   "no variant 'huge'");
    options = (fv_plan_options){.struct_size = sizeof(options), .cascade = (fv_cascade)3};
    assert_refused(fv_plan_create(&plan, f->context, &f->problem, &f->bounds, &options), FV_ERR_INVALID,
                   "cascade is 3");
    options = (fv_plan_options){.struct_size = sizeof(options), .decode_threshold = -2};
    assert_refused(fv_plan_create(&plan, f->context, &f->problem, &f->bounds, &options), FV_ERR_INVALID,
                   "decode_threshold is -2");
    fv_context *other = NULL; /* a device goes with its context */
    options = (fv_plan_options){.struct_size = sizeof(options)};
    assert_int_equal(fv_context_create(&other, NULL), FV_OK);
    assert_int_equal(fv_device_find(&options.device, other, "cpu"), FV_OK);
    assert_refused(fv_plan_create(&plan, f->context, &f->problem, &f->bounds, &options), FV_ERR_INVALID,
                   "fv_plan_options.device is cpu of another context");
    fv_context_destroy(other);
    problem = f->problem;
    problem.kind = FV_ATTENTION_MLA;
    problem.kv_layout = FV_KV_LAYOUT_LATENT;
    problem.mla = (fv_mla_shape){16, 1024, 64, 128, 128, 0, 0};
    options = (fv_plan_options){.struct_size = sizeof(options), .kernels = "reference"};
    assert_refused(fv_plan_create(&plan, f->context, &problem, &f->bounds, &options), FV_ERR_UNSUPPORTED, "up to 1024");
    options = (fv_plan_options){.struct_size = sizeof(options), .static_grid = 1};
    fv_bounds bounds = {sizeof(bounds), 1 << 30, 1 << 30, 1, 64};
    assert_refused(fv_plan_create(&plan, f->context, &f->problem, &bounds, &options), FV_ERR_INVALID,
                   "accepted: 67108864");
    bounds = (fv_bounds){sizeof(bounds), 0, TOKENS, 0, 64};
    assert_refused(fv_plan_create(&plan, f->context, &f->problem, &bounds, NULL), FV_ERR_INVALID, "max_num_seqs is 0");
    bounds.struct_size = 3;
    assert_refused(fv_plan_create(&plan, f->context, &f->problem, &bounds, NULL), FV_ERR_INVALID,
                   "fv_bounds.struct_size is 3; this library knows");
    assert_refused(fv_plan_create(&plan, f->context, &f->problem, NULL, NULL), FV_ERR_INVALID, "bounds is NULL");
}

/* So that a caller's clean-up may destroy it. */
static void test_a_plan_that_fails_is_null(void **state)
{
    fixture *f = *state;
    fv_plan *plan = f->plan;
    const fv_plan_options options = {.struct_size = sizeof(options), .backend = "TRITON"};
    assert_refused(fv_plan_create(&plan, f->context, &f->problem, &f->bounds, &options), FV_ERR_INVALID, "'TRITON'");
    assert_null(plan);
    plan = f->plan;
    assert_refused(fv_plan_create(&plan, NULL, &f->problem, &f->bounds, NULL), FV_ERR_INVALID, "context is NULL");
    assert_null(plan);
    assert_int_equal(fv_plan_workspace_bytes(plan), 0);
    assert_int_equal(fv_plan_buffer_bytes(plan), 0);
    assert_int_equal(fv_plan_kv_layout(plan), FV_KV_LAYOUT_STRIDED);
    assert_int_equal(fv_plan_graph_key(plan), 0);
    assert_string_equal(fv_plan_describe(plan), "no plan");
    assert_int_equal(fv_mla_workspace_bytes(plan, 1536), 0);
}

/* A list that no step within the bounds leaves is refused where it is made, not by the step that comes to need it. */
static void test_large_bounds_are_refused(void **state)
{
    fixture *f = *state;
    fv_plan *plan = NULL;
    const fv_plan_options options = {.struct_size = sizeof(options), .kernels = "portable"};
    fv_bounds bounds = {sizeof(bounds), 1, 1 << 20, 0, 1 << 20};
    f->problem.mha = (fv_mha_shape){65536, 65536, 32, 0};
    assert_refused(fv_plan_create(&plan, f->context, &f->problem, &bounds, &options), FV_ERR_INVALID,
                   "work items; accepted: 67108864");
    bounds = (fv_bounds){sizeof(bounds), 1 << 30, 1 << 30, 0, 1 << 30};
    assert_refused(fv_plan_create(&plan, f->context, &f->problem, &bounds, &options), FV_ERR_INVALID,
                   "bounds of 1073741824 tokens, 1073741824 sequences of 1073741824 need 1073741823 work items");
    f->problem = (fv_problem){.struct_size = sizeof(fv_problem),
                              .kind = FV_ATTENTION_MLA,
                              .mla = {65536, 64, 0, 32, 32, 0, 0},
                              .q_dtype = FV_DTYPE_F32,
                              .block_size = BS,
                              .kv_layout = FV_KV_LAYOUT_LATENT};
    assert_refused(fv_plan_create(&plan, f->context, &f->problem, &bounds, &options), FV_ERR_INVALID, "work items");
    assert_null(plan);
}

static void test_batches_are_refused(void **state)
{
    fixture *f = *state;
    fv_batch batch;
#define REFUSED(change, expected, says)                                    \
    batch = f->batch;                                                      \
    change;                                                                \
    assert_refused(fv_plan_update(f->plan, &batch, NULL), expected, says); \
    assert_refused(fv_plan_run(f->plan, &f->layer, f->workspace, NULL), FV_ERR_INVALID, "before a successful")
    REFUSED(batch.num_seqs = 3, FV_NEEDS_PLAN, "num_seqs is 3; the plan was made for up to 2");
    REFUSED(batch.num_tokens = 5, FV_NEEDS_PLAN, "num_tokens is 5");
    REFUSED(batch.num_tokens = 3, FV_ERR_INVALID, "query_start ends at 4; the batch has 3 tokens");
    REFUSED(batch.max_seq_len = 4000, FV_NEEDS_PLAN, "max_seq_len is 4000");
    REFUSED(batch.num_seqs = -1, FV_ERR_INVALID, "-1 sequences");
    REFUSED(batch.num_seqs = 0, FV_ERR_INVALID, "a batch of no sequences has 4 tokens; accepted: 0");
    REFUSED(batch.block_table = NULL, FV_ERR_INVALID, "block_table is NULL");
    REFUSED(batch.block_table_width = 3, FV_ERR_INVALID,
            "sequence 1 has 100 keys in 7 blocks of 16; the block table has 3 a row");
    REFUSED(batch.block_table_stride = 2, FV_ERR_INVALID, "block_table_stride 2");
    REFUSED(batch.causal = f->causal; f->causal[1] = 0, FV_ERR_INVALID, "causal[1] is 0");
    f->causal[1] = 1;
    REFUSED(f->seq_lens[1] = 999, FV_NEEDS_PLAN, "a sequence length is 999");
    REFUSED(f->seq_lens[1] = 0;
            f->seq_lens[0] = 2, FV_ERR_INVALID, "seq_lens[0] is 2; accepted: 0, or from its query length 3");
    f->seq_lens[0] = 3;
    f->seq_lens[1] = 100;
    REFUSED(f->query_start[2] = 2, FV_ERR_INVALID, "query_start[2] is 2 after 3; it must not fall");
    f->query_start[2] = 4;
    REFUSED(f->query_start[0] = 1, FV_ERR_INVALID, "query_start[0] is 1");
    f->query_start[0] = 0;
    REFUSED(f->block_table[WIDTH + 2] = -7, FV_ERR_INVALID, "block_table[1][2] is -7");
    REFUSED(f->block_table[WIDTH + 2] = 0, FV_ERR_INVALID,
            "block_table[1][2] is 0, and keys in it are seen; accepted: from 1");
    f->block_table[WIDTH + 2] = 1 + WIDTH + 2;
    const uint64_t tree[TOKENS] = {1, 3, 7, 1};
    REFUSED(batch.tree_mask = tree, FV_ERR_INVALID, "tree_mask is given; the problem says tree_mask 0");
#undef REFUSED
}

/* The null block stands where no key is seen: before a window, past the sequence, and in rows without keys. */
static void test_null_blocks(void **state)
{
    fixture *f = *state;
    fv_plan *plan = NULL;
    f->problem.window = 2 * BS;
    assert_int_equal(fv_plan_create(&plan, f->context, &f->problem, &f->bounds, NULL), FV_OK);
    const int32_t first_seen = (100 - 2 * BS) / BS;
    for (int32_t i = 0; i < first_seen; i++) f->block_table[WIDTH + i] = 0;
    for (int32_t i = 1; i < WIDTH; i++) f->block_table[i] = 0;
    assert_int_equal(fv_plan_update(plan, &f->batch, NULL), FV_OK);
    f->block_table[WIDTH + first_seen] = 0;
    assert_refused(fv_plan_update(plan, &f->batch, NULL), FV_ERR_INVALID, "block_table[1][4] is 0");
    f->seq_lens[1] = 0;
    assert_int_equal(fv_plan_update(plan, &f->batch, NULL), FV_OK);
    fv_plan_destroy(plan);
}

static void test_layers_are_refused(void **state)
{
    fixture *f = *state;
    assert_int_equal(fv_plan_update(f->plan, &f->batch, NULL), FV_OK);
    fv_layer layer;
#define REFUSED(change, says) \
    layer = f->layer;         \
    layer.change;             \
    assert_refused(fv_plan_run(f->plan, &layer, f->workspace, NULL), FV_ERR_INVALID, says)
    REFUSED(struct_size = 1, "struct_size is 1");
    REFUSED(q.data = NULL, "q has no data");
    REFUSED(q.dtype = FV_DTYPE_F16, "q is float16; the problem says float32");
    REFUSED(q.shape[0] = 3, "accepted: 3, [4 or more, 4, 64]");
    REFUSED(q.shape[1] = 5, "q has 3 dimensions [4, 5, 64]");
    REFUSED(out.stride_bytes[2] = 8, "the last stride of out is 8 bytes");
    REFUSED(v.data = NULL, "only one of k and v");
    REFUSED(kv_cache.layout = FV_KV_LAYOUT_SHUFFLED, "layout shuffled; the plan was made for nb_2_bs_h_d");
    REFUSED(kv_cache.block_size = 8, "the KV cache is float32, 8 slots");
    REFUSED(kv_cache.num_blocks = 10, "the block table names block");
    REFUSED(kv_cache.k.data = NULL, "the KV cache has no data");
    REFUSED(lse.dtype = FV_DTYPE_F16, "lse is float16");
    REFUSED(sinks = f->slopes, "fv_layer.sinks is given; the problem says sinks 0");
    REFUSED(alibi_slopes = f->slopes, "fv_layer.alibi_slopes is given; the problem says alibi 0");
    REFUSED(k_scale = f->slopes, "fv_layer.k_scale is given; the problem says kv_scaling 0");
    REFUSED(v_scale = f->slopes, "fv_layer.v_scale is given; the problem says kv_scaling 0");
    REFUSED(kv_cache.k_scales.data = f->slopes, "fv_kv_view.k_scales is given; the problem says kv_scaling 0, not 3");
    REFUSED(kv_cache.v_scales.data = f->slopes, "fv_kv_view.v_scales is given; the problem says kv_scaling 0, not 3");
    f->slot_mapping[1] = NB * BS;
    assert_int_equal(fv_plan_update(f->plan, &f->batch, NULL), FV_OK);
    REFUSED(struct_size = sizeof(layer), "slot_mapping[1] is 512; accepted: up to 511, the KV cache's last slot");
    layer.k.data = layer.v.data = NULL; /* nothing is written */
    assert_int_equal(fv_plan_run(f->plan, &layer, f->workspace, NULL), FV_OK);
    f->slot_mapping[1] = BS + 1;
#undef REFUSED
    assert_refused(fv_plan_run(f->plan, &f->layer, NULL, NULL), FV_ERR_INVALID, "workspace is NULL");
    assert_refused(fv_plan_run(f->plan, &f->layer, (char *)f->workspace + 16, NULL), FV_ERR_INVALID,
                   "accepted: multiples of 256");
    f->batch.slot_mapping = NULL;
    assert_int_equal(fv_plan_update(f->plan, &f->batch, NULL), FV_OK);
    assert_refused(fv_plan_run(f->plan, &f->layer, f->workspace, NULL), FV_ERR_INVALID, "slot_mapping is NULL");
}

/* Latents have no values of their own, so a plan for strides of the caller's own does not take them either. */
static void test_latents_are_of_mla(void **state)
{
    fixture *f = *state;
    fv_plan *plan = NULL;
    f->problem.kv_layout = FV_KV_LAYOUT_STRIDED;
    assert_int_equal(fv_plan_create(&plan, f->context, &f->problem, &f->bounds, NULL), FV_OK);
    assert_int_equal(fv_plan_update(plan, &f->batch, NULL), FV_OK);
    void *workspace = aligned_alloc(256, (fv_plan_workspace_bytes(plan) + 511) / 256 * 256);
    assert_int_equal(fv_plan_run(plan, &f->layer, workspace, NULL), FV_OK);
    f->layer.kv_cache.layout = FV_KV_LAYOUT_LATENT;
    assert_refused(fv_plan_run(plan, &f->layer, workspace, NULL), FV_ERR_INVALID, "the KV cache has layout latent;");
    f->layer.kv_cache.layout = FV_KV_LAYOUT_LATENT_FP8_DS;
    assert_refused(fv_plan_run(plan, &f->layer, workspace, NULL), FV_ERR_INVALID, "layout latent_fp8_ds;");
    free(workspace);
    fv_plan_destroy(plan);
}

/* A variant that is there and cannot. */
static void test_variants_are_refused(void **state)
{
    fixture *f = *state;
    fv_plan *plan = NULL;
    const fv_plan_options options = {.struct_size = sizeof(options), .variant = "amla", .kernels = "portable"};
    f->problem = (fv_problem){.struct_size = sizeof(fv_problem),
                              .kind = FV_ATTENTION_MLA,
                              .mla = {16, 512, 64, 128, 128, 0, 0},
                              .q_dtype = FV_DTYPE_BF16,
                              .out_dtype = FV_DTYPE_F32,
                              .block_size = BS,
                              .kv_layout = FV_KV_LAYOUT_LATENT};
    assert_refused(fv_plan_create(&plan, f->context, &f->problem, &f->bounds, &options), FV_ERR_UNSUPPORTED,
                   "variant 'amla' of mla_decode does not serve the problem: AMLA compensates");
    assert_non_null(strstr(fv_last_error(), "that do: rows128_keys64"));
    assert_null(strstr(strstr(fv_last_error(), "that do"), "amla,"));
}

/* What no kernel would survive, or would answer wrongly. */
static void test_lengths_are_refused(void **state)
{
    fixture *f = *state;
    enum { QUERY = 65 };
    static const uint64_t masks[QUERY];
    static int64_t slots[QUERY];
    fv_plan *plan = NULL;
    fv_bounds bounds = {sizeof(bounds), 1, QUERY, 0, WIDTH * BS};
    f->problem.tree_mask = 1;
    assert_int_equal(fv_plan_create(&plan, f->context, &f->problem, &bounds, NULL), FV_OK);
    f->batch.num_seqs = 1;
    f->batch.slot_mapping = slots;
    f->batch.tree_mask = masks;
    for (int32_t query_len = QUERY - 1; query_len <= QUERY; query_len++) {
        f->batch.num_tokens = f->query_start[1] = f->seq_lens[0] = query_len;
        if (query_len < QUERY) assert_int_equal(fv_plan_update(plan, &f->batch, NULL), FV_OK);
    }
    assert_refused(fv_plan_update(plan, &f->batch, NULL), FV_ERR_INVALID,
                   "65 tokens with a tree mask; accepted: up to 64");
    fv_plan_destroy(plan);

    f->problem.tree_mask = 0;
    f->batch.tree_mask = NULL;
    f->problem.type = FV_ATTENTION_CROSS;
    assert_int_equal(fv_plan_create(&plan, f->context, &f->problem, &bounds, NULL), FV_OK);
    f->seq_lens[0] = -5;
    assert_refused(fv_plan_update(plan, &f->batch, NULL), FV_ERR_INVALID, "seq_lens[0] is -5");
    fv_plan_destroy(plan);
}

static void test_gathers_are_refused(void **state)
{
    fixture *f = *state;
    fv_device *cpu = NULL;
    assert_int_equal(fv_device_find(&cpu, f->context, "cpu"), FV_OK);
    enum { ROWS = 4 };
    const fv_tensor k = fv_tensor_3d(f->k, FV_DTYPE_F32, ROWS, KV_HEADS, D);
    const fv_tensor v = fv_tensor_3d(f->v, FV_DTYPE_F32, ROWS, KV_HEADS, D);
    int32_t key_start[2] = {14, 0}, out_start[3] = {0, 4, 4};
#define GATHER() \
    fv_kv_gather(cpu, &k, &v, &f->layer.kv_cache, &f->batch, key_start, out_start, ROWS, NULL, NULL, 0, NULL)
#define REFUSED(place, value, says)                     \
    {                                                   \
        const __typeof__(place) kept = place;           \
        place = value;                                  \
        assert_refused(GATHER(), FV_ERR_INVALID, says); \
        place = kept;                                   \
    }
    assert_int_equal(GATHER(), FV_OK);
    REFUSED(f->block_table[0], NB, "block_table[0][0] is 32; accepted: 1 to 31")
    REFUSED(f->block_table[0], 0, "block_table[0][0] is 0; accepted: 1 to 31 (0 is the null block)")
    REFUSED(f->block_table[1], -1, "block_table[0][1] is -1")
    REFUSED(key_start[0], -1, "keys -1 to 3 of sequence 0")
    REFUSED(key_start[0], WIDTH * BS, "in 8 blocks of 16 tokens")
    REFUSED(out_start[2], 3, "out_start goes from 0 to 3; accepted: from 0 to the 4 rows")
    REFUSED(out_start[1], 5, "out_start[2] is 4 after 5")
    REFUSED(f->batch.struct_size, 5, "fv_batch.struct_size is 5; this library knows")
    REFUSED(f->batch.num_seqs, -1, "-1 sequences")
    REFUSED(f->layer.kv_cache.block_size, 0, "32 blocks of 0 tokens")
#undef REFUSED
#undef GATHER
}

static void test_reasons_are_listed(void **state)
{
    fixture *f = *state;
    char reasons[256];
    assert_int_equal(fv_backend_why_not(reasons, sizeof(reasons), "TRITON_ATTN", NULL, &f->problem), FV_OK);
    assert_string_equal(reasons, "");
    fv_problem problem = f->problem;
    problem.mha.head_size = 20;
    problem.kv_layout = FV_KV_LAYOUT_X_PACKED;
    assert_int_equal(fv_backend_why_not(reasons, sizeof(reasons), "TRITON_ATTN", NULL, &problem), FV_OK);
    assert_non_null(strstr(reasons, "layout x_packed not supported"));
    assert_non_null(strstr(reasons, "; head_size not supported"));
    assert_int_equal(fv_backend_why_not(reasons, 10, "TRITON_ATTN", NULL, &problem), FV_ERR_NO_SPACE);
    assert_refused(fv_backend_why_not(reasons, sizeof(reasons), "NOPE", NULL, &problem), FV_ERR_INVALID,
                   "Unknown attention backend: 'NOPE'. Valid options are: TRITON_ATTN, ");
    assert_refused(fv_backend_why_not(reasons, sizeof(reasons), "auto", NULL, &problem), FV_ERR_INVALID,
                   "Valid options are: TRITON_ATTN, ");
    assert_string_equal(fv_backend_name(0), "TRITON_ATTN");
    assert_null(fv_backend_name(-1));
    assert_null(fv_backend_name(fv_backend_count()));
}

/* An empty batch, and one with sequences but no tokens, are steps like any other. */
static void test_empty_steps(void **state)
{
    fixture *f = *state;
    fv_batch batch = {.struct_size = sizeof(batch)};
    assert_int_equal(fv_plan_update(f->plan, &batch, NULL), FV_OK);
    assert_int_equal(fv_plan_run(f->plan, &f->layer, f->workspace, NULL), FV_OK);
    f->query_start[1] = f->query_start[2] = 0;
    f->batch.num_tokens = 0;
    assert_int_equal(fv_plan_update(f->plan, &f->batch, NULL), FV_OK);
    assert_int_equal(fv_plan_run(f->plan, &f->layer, f->workspace, NULL), FV_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_a_step_runs, make, destroy),
        cmocka_unit_test_setup_teardown(test_graph_keys, make, destroy),
        cmocka_unit_test_setup_teardown(test_keys_are_of_one_plan, make, destroy),
        cmocka_unit_test_setup_teardown(test_problems_are_refused, make, destroy),
        cmocka_unit_test_setup_teardown(test_a_plan_that_fails_is_null, make, destroy),
        cmocka_unit_test_setup_teardown(test_large_bounds_are_refused, make, destroy),
        cmocka_unit_test_setup_teardown(test_batches_are_refused, make, destroy),
        cmocka_unit_test_setup_teardown(test_null_blocks, make, destroy),
        cmocka_unit_test_setup_teardown(test_layers_are_refused, make, destroy),
        cmocka_unit_test_setup_teardown(test_latents_are_of_mla, make, destroy),
        cmocka_unit_test_setup_teardown(test_variants_are_refused, make, destroy),
        cmocka_unit_test_setup_teardown(test_lengths_are_refused, make, destroy),
        cmocka_unit_test_setup_teardown(test_gathers_are_refused, make, destroy),
        cmocka_unit_test_setup_teardown(test_reasons_are_listed, make, destroy),
        cmocka_unit_test_setup_teardown(test_empty_steps, make, destroy),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
