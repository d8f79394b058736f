/* The MLA layer against its definition written out in double and not absorbed: k = [W_UK c, R r], v = W_UV c, each
 * key rotated at its own position. The updated cache is what the latents become in its dtype, and the output is what
 * follows from the cache as it is stored; with raw and with rotated keys. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backends/mla_layer_scene.h"
#include "core/compiler.h"
#include "planner/plan.h"
#include "support/thinned.h"

enum { MAX_WORLD = 3 };

static void check(const mla_layer_setting *set)
{
    mla_layer_scene s;
    mla_layer_scene_init(&s, set);
    mla_layer_must(fv_mla_run(s.plan, &s.layer, s.workspace, NULL));
    if (set->decode_threshold > 0) assert_true(s.plan->num_chunks > set->tight_workspace);
    mla_layer_expect_keys(&s);
    mla_layer_check_cache(&s);
    mla_layer_read_back(&s, &s);
    mla_layer_check_outputs(&s);
    mla_layer_scene_deinit(&s);
}

static const char *const backends[] = {"TRITON_MLA", "ROCM_AITER_MLA", "ROCM_AITER_TRITON_MLA", "AMLA"};

/* One new token for each sequence, and a first one. */
static const mla_layer_lens decodes[] = {{1, 33}, {1, 1}, {1, 17}, {1, 100}};

/* The public problem made small: raw keys, no norms. */
static const mla_layer_setting small = {
    .mla = {8, 64, 16, 24, 40, 1, 0},
    .hidden = 64,
    .q_lora = 48,
    .dtype = FV_DTYPE_F32,
    .kv_dtype = FV_DTYPE_F32,
    .block_size = 16,
    .seqs = decodes,
    .num_seqs = FV_ARRAY_LEN(decodes),
};

/* AMLA rounds to bf16: no fp32 tolerance fits it. */
static void check_each_backend(mla_layer_setting set)
{
    for (int32_t i = 0; i < FV_ARRAY_LEN(backends); i++) {
        set.backend = backends[i];
        if (strcmp(set.backend, "AMLA") != 0 || set.dtype == FV_DTYPE_BF16) check(&set);
    }
}

/* fp32, bf16, and fp32 over a bf16 cache, by every backend. */
static void check_backends(mla_layer_setting set)
{
    static const fv_dtype dtypes[][2] = {
        {FV_DTYPE_F32, FV_DTYPE_F32}, {FV_DTYPE_BF16, FV_DTYPE_BF16}, {FV_DTYPE_F32, FV_DTYPE_BF16}};
    for (int32_t i = 0; i < FV_ARRAY_LEN(dtypes); i++) {
        set.dtype = dtypes[i][0];
        set.kv_dtype = dtypes[i][1];
        check_each_backend(set);
    }
}

static void test_raw_keys(void **state)
{
    (void)state;
    check_backends(small);
}

static void test_rotated_keys_and_norms(void **state)
{
    (void)state;
    mla_layer_setting set = small;
    set.mla.rotate_at_reading = 0;
    set.has_norms = 1;
    check_backends(set);
    set.style = FV_ROPE_INTERLEAVED;
    check_backends(set);
}

static void test_norms_over_raw_keys(void **state)
{
    (void)state;
    mla_layer_setting set = small;
    set.has_norms = 1;
    check_backends(set);
}

/* As DeepSeek-V2-Lite has it. */
static void test_queries_without_latents(void **state)
{
    (void)state;
    mla_layer_setting set = small;
    set.q_lora = 0;
    set.has_norms = 1;
    set.mla.rotate_at_reading = 0;
    check_backends(set);
}

static fv_status count_products(void *user, const fv_gemm *gemm, fv_stream stream)
{
    ++*(int32_t *)user;
    return mla_layer_gemm(NULL, gemm, stream);
}

static int32_t products_of(const mla_layer_setting *set)
{
    mla_layer_scene s;
    mla_layer_scene_init(&s, set);
    int32_t count = 0;
    s.layer.gemm = count_products;
    s.layer.gemm_user = &count;
    mla_layer_must(fv_mla_run(s.plan, &s.layer, s.workspace, NULL));
    mla_layer_scene_deinit(&s);
    return count;
}

/* One product instead of two, where the queries' latents end at 256 bytes. */
static void test_down_matrices_that_lie_together(void **state)
{
    (void)state;
    for (int32_t q_lora = 48; q_lora <= 64; q_lora += 16) {
        mla_layer_setting set = small;
        set.q_lora = q_lora;
        set.has_norms = 1;
        const int32_t apart = products_of(&set);
        set.joins_down = 1;
        assert_int_equal(products_of(&set), q_lora == 64 ? apart - 1 : apart);
        check_backends(set);
    }
}

static void test_prefill_and_extend(void **state)
{
    (void)state;
    static const mla_layer_lens mixed[] = {{1, 50}, {30, 30}, {2, 9}, {25, 70}};
    mla_layer_setting set = small;
    set.seqs = mixed;
    set.num_seqs = FV_ARRAY_LEN(mixed);
    set.block_size = 7;
    check_backends(set);
    set.mla.rotate_at_reading = 0;
    set.has_norms = 1;
    check_backends(set);
}

/* Decodes, extends and a prefill: absorbed all, expanded all but single tokens, and that in small chunks. */
static void check_paths(mla_layer_setting set)
{
    static const mla_layer_lens mixed[] = {{1, 50}, {30, 30}, {2, 9}, {25, 70}, {4, 100}};
    set.seqs = mixed;
    set.num_seqs = FV_ARRAY_LEN(mixed);
    check_each_backend(set);
    set.decode_threshold = 1;
    check_each_backend(set);
    set.tight_workspace = 1;
    check_each_backend(set);
}

static void test_fp8_latents(void **state)
{
    (void)state;
    mla_layer_setting set = small;
    set.has_norms = 1;
    set.block_size = 7;
    for (int32_t i = 0; i < 4; i++) {
        set.dtype = i & 1 ? FV_DTYPE_F32 : FV_DTYPE_BF16;
        set.kv_dtype = i == 1 || i == 2 ? FV_DTYPE_F8_E5M2 : FV_DTYPE_F8_E4M3;
        set.k_scale = i < 2 ? 0.05f : 0;
        set.mla.rotate_at_reading = i == 0 || i == 2;
        check_paths(set);
    }
}

static void test_entries_of_656_bytes(void **state)
{
    (void)state;
    mla_layer_setting set = small;
    set.mla = (fv_mla_shape){4, 512, 64, 24, 40, 0, 0};
    set.kv_dtype = FV_DTYPE_F8_E4M3;
    set.layout = FV_KV_LAYOUT_LATENT_FP8_DS;
    set.has_norms = 1;
    for (int32_t i = 0; i < 2; i++) {
        set.dtype = i ? FV_DTYPE_F32 : FV_DTYPE_BF16;
        set.mla.rotate_at_reading = i;
        check_paths(set);
    }
}

/* --- context parallelism ---------------------------------------------------------------------------------------- */

/* What the ranks attended, [world, T, H, V] of the activations' dtype and [world, T, H] fp32. */
typedef struct rank_results {
    char *attended;
    float *lse;
} rank_results;

/* One rank of a group: all tokens, its own keys. */
static void run_rank(mla_layer_scene *s, const mla_layer_setting *set, const rank_results *results)
{
    mla_layer_scene_init(s, set);
    const int64_t heads = set->mla.num_heads, v_size = set->mla.v_head_dim, rank = set->context_parallel.rank;
    const int64_t rank_elements = s->num_tokens * heads * v_size;
    fv_mla_layer layer = s->layer;
    layer.out = layer.o = (fv_tensor){0};
    layer.attended = fv_tensor_3d(results->attended + rank * rank_elements * (int64_t)fv_dtype_bytes(set->dtype),
                                  set->dtype, s->num_tokens, heads, v_size);
    layer.lse = fv_tensor_2d(results->lse + rank * s->num_tokens * heads, FV_DTYPE_F32, s->num_tokens, heads);
    mla_layer_must(fv_mla_run(s->plan, &layer, s->workspace, NULL));
    mla_layer_expect_keys(s);
    mla_layer_check_cache(s);
}

/* Merges in place of rank 0, and multiplies by o into the output of `s`. */
static void merge_ranks(mla_layer_scene *s, const rank_results *results, int32_t world)
{
    const int64_t heads = s->set.mla.num_heads, v_size = s->set.mla.v_head_dim;
    fv_tensor out = fv_tensor_3d(results->attended, s->set.dtype, s->num_tokens, heads, v_size);
    const fv_tensor rank_lse = fv_tensor_3d(results->lse, FV_DTYPE_F32, world, s->num_tokens, heads);
    fv_tensor rank_out = {.data = out.data, .dtype = out.dtype, .num_dims = 4, .shape = {world}};
    rank_out.stride_bytes[0] = s->num_tokens * out.stride_bytes[0];
    memcpy(rank_out.shape + 1, out.shape, 3 * sizeof(int64_t));
    memcpy(rank_out.stride_bytes + 1, out.stride_bytes, 3 * sizeof(int64_t));
    fv_device *device = NULL;
    mla_layer_must(fv_device_find(&device, s->context, "cpu"));
    mla_layer_must(fv_merge_ranks(device, &out, NULL, &rank_out, &rank_lse, NULL, NULL));
    const fv_gemm gemm = {
        .struct_size = sizeof(gemm),
        .num_matrices = 1,
        .m = s->num_tokens,
        .n = s->set.hidden,
        .k = (int32_t)(heads * v_size),
        .b_is_transposed = 1,
        .a_dtype = out.dtype,
        .b_dtype = s->set.dtype,
        .c_dtype = s->set.dtype,
        .a = out.data,
        .a_row_stride = out.stride_bytes[0],
        .b = s->o,
        .b_row_stride = heads * v_size * (int64_t)fv_dtype_bytes(s->set.dtype),
        .c = s->out,
        .c_row_stride = s->layer.out.stride_bytes[0],
    };
    mla_layer_must(mla_layer_gemm(NULL, &gemm, NULL));
}

static void check_group(mla_layer_setting set, int32_t world, int32_t interleave)
{
    mla_layer_scene ranks[MAX_WORLD];
    const size_t rows = (size_t)(MLA_LAYER_MAX_POSITIONS * set.mla.num_heads);
    rank_results results = {mla_layer_alloc((size_t)world * rows * (size_t)set.mla.v_head_dim * sizeof(float)),
                            mla_layer_alloc((size_t)world * rows * sizeof(float))};
    for (int32_t rank = 0; rank < world; rank++) {
        set.context_parallel = (fv_context_parallel){world, rank, interleave};
        run_rank(&ranks[rank], &set, &results);
    }
    for (int32_t rank = 0; rank < world; rank++) mla_layer_read_back(&ranks[0], &ranks[rank]);
    merge_ranks(&ranks[0], &results, world);
    mla_layer_check_outputs(&ranks[0]);
    for (int32_t rank = 0; rank < world; rank++) mla_layer_scene_deinit(&ranks[rank]);
    free(results.attended);
    free(results.lse);
}

/* Sequences of which a rank holds nothing, prefills and extends among them. */
static void test_context_parallel(void **state)
{
    (void)state;
    static const mla_layer_lens mixed[] = {{1, 50}, {30, 30}, {2, 9}, {25, 70}, {1, 1}, {4, 100}};
    mla_layer_setting set = small;
    set.seqs = mixed;
    set.num_seqs = FV_ARRAY_LEN(mixed);
    set.has_norms = 1;
    set.block_size = 7;
    for (int32_t i = 0; i < 4 * FV_ARRAY_LEN(backends); i += thinned) {
        set.backend = backends[i / 4];
        set.dtype = set.kv_dtype = strcmp(set.backend, "AMLA") == 0 ? FV_DTYPE_BF16 : FV_DTYPE_F32;
        set.mla.rotate_at_reading = i & 1;
        check_group(set, 2 + (i & 1), i & 2 ? 16 : 1);
    }
}

static void test_reference_kernels(void **state)
{
    (void)state;
    mla_layer_setting set = small;
    set.backend = "TRITON_MLA";
    set.kernels = "reference";
    set.has_norms = 1;
    check(&set);
}

/* DeepSeek-V3's sizes. */
static void test_full_size(void **state)
{
    (void)state;
    static const mla_layer_lens one[] = {{1, 12}};
    const mla_layer_setting set = {
        .mla = {128, 512, 64, 128, 128, 1, 0},
        .hidden = 7168,
        .q_lora = 1536,
        .dtype = FV_DTYPE_BF16,
        .kv_dtype = FV_DTYPE_BF16,
        .block_size = 64,
        .backend = "ROCM_AITER_MLA",
        .seqs = one,
        .num_seqs = 1,
    };
    if (thinned > 1) skip();
    check(&set);
}

static void refused(mla_layer_scene *s, const fv_mla_layer *layer, fv_status expected, const char *says)
{
    assert_int_equal(fv_mla_run(s->plan, layer, s->workspace, NULL), expected);
    if (!strstr(fv_last_error(), says)) fail_msg("'%s' lacks '%s'", fv_last_error(), says);
}

static void test_refusals(void **state)
{
    (void)state;
    mla_layer_scene s;
    mla_layer_setting set = small;
    set.backend = "TRITON_MLA";
    mla_layer_scene_init(&s, &set);
    fv_mla_layer layer = s.layer;
    layer.gemm = NULL;
    refused(&s, &layer, FV_ERR_INVALID, "fv_mla_layer.gemm is NULL");
    layer = s.layer;
    layer.x.shape[0]--;
    refused(&s, &layer, FV_ERR_INVALID, "x has 2 dimensions [3, 64]; accepted: 2, [4 or more, 64], dense rows");
    layer = s.layer;
    layer.o.shape[1]--;
    refused(&s, &layer, FV_ERR_INVALID, "o has 2 dimensions [64, 319]; accepted: 2, [64, 320], dense rows");
    layer = s.layer;
    layer.out.dtype = FV_DTYPE_BF16;
    layer.out.stride_bytes[1] = 2;
    refused(&s, &layer, FV_ERR_INVALID, "out is bfloat16; the problem says float32");
    layer = s.layer;
    layer.kv_norm = fv_tensor_1d(s.kv_norm, FV_DTYPE_F32, 63);
    refused(&s, &layer, FV_ERR_INVALID, "kv_norm is float32 with 1 dimensions [63]; accepted");
    layer = s.layer;
    layer.rotation.style = FV_ROPE_INTERLEAVED;
    refused(&s, &layer, FV_ERR_UNSUPPORTED, "rotated at reading by halves");
    layer = s.layer;
    layer.rotation.max_position = 50;
    refused(&s, &layer, FV_ERR_INVALID, "max_position is 50");
    layer = s.layer;
    layer.attended = layer.out;
    refused(&s, &layer, FV_ERR_INVALID, "only one of attended and lse is given");
    layer.lse = layer.attended;
    refused(&s, &layer, FV_ERR_INVALID, "attended is float32 [4, 64, 0]; accepted: float32 [4 or more, 8, 40]");
    mla_layer_scene_deinit(&s);
    set.context_parallel = (fv_context_parallel){2, 1, 1};
    mla_layer_scene_init(&s, &set);
    refused(&s, &s.layer, FV_ERR_INVALID, "context_parallel.world is 2 and attended has no data");
    mla_layer_scene_deinit(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_raw_keys),
        cmocka_unit_test(test_rotated_keys_and_norms),
        cmocka_unit_test(test_norms_over_raw_keys),
        cmocka_unit_test(test_queries_without_latents),
        cmocka_unit_test(test_down_matrices_that_lie_together),
        cmocka_unit_test(test_prefill_and_extend),
        cmocka_unit_test(test_fp8_latents),
        cmocka_unit_test(test_entries_of_656_bytes),
        cmocka_unit_test(test_context_parallel),
        cmocka_unit_test(test_reference_kernels),
        cmocka_unit_test(test_full_size),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
