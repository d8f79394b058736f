/* The MLA backends through the public plan: absorbed decodes and expanded extends of one batch against
 * DeepSeek-V2's attention written out in double, not absorbed: k = [W_UK c, R r], v = W_UV c. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "core/compiler.h"
#include "core/float.h"
#include "fovea/fovea.h"

enum { MAX_SEQS = 16, MAX_POSITIONS = 2048, MAX_WORLD = 4 };

typedef struct lens {
    int32_t query_len, seq_len;
} lens;

typedef struct scene {
    fv_context *context;
    fv_problem problem;
    int32_t num_seqs, num_tokens, max_query_len, max_seq_len, width, num_blocks;
    int32_t query_start[MAX_SEQS + 1], seq_lens[MAX_SEQS];
    int32_t *block_table;
    int64_t *slots;
    float *latents[MAX_SEQS]; /* [seq_len, L + R], as numbers of q_dtype, plain */
    float *kv_up;             /* [H, P + V, L] */
    float *cos, *sin;         /* [MAX_POSITIONS, R / 2] */
    char *q, *new_latents, *out;
    float *lse;
    fv_plan *plan;
    char *workspace, *cache;
    fv_kv_view view;
    fv_layer layer;
    fv_batch batch;
    int32_t num_gemms;
} scene;

static uint64_t random_state = 1;

static float number(fv_dtype dtype)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    uint32_t stored;
    fv_float_store(&stored, (float)(random_state >> 40) * 0x1p-23f - 1.0f, dtype);
    return fv_float_load(&stored, dtype);
}

static void *allocate(size_t bytes)
{
    void *memory = aligned_alloc(256, (bytes + 511) / 256 * 256);
    assert_non_null(memory);
    return memory;
}

/* What an engine brings: here three loops. */
static fv_status plain_gemm(void *user, const fv_gemm *g, fv_stream stream)
{
    (void)stream;
    ++*(int32_t *)user;
    const size_t a_bytes = fv_dtype_bytes(g->a_dtype), b_bytes = fv_dtype_bytes(g->b_dtype);
    for (int64_t i = 0; i < g->num_matrices; i++) {
        for (int64_t row = 0; row < g->m; row++) {
            const char *a = (const char *)g->a + i * g->a_matrix_stride + row * g->a_row_stride;
            char *c = (char *)g->c + i * g->c_matrix_stride + row * g->c_row_stride;
            for (int64_t column = 0; column < g->n; column++) {
                const char *b = (const char *)g->b + i * g->b_matrix_stride +
                                (g->b_is_transposed ? column * g->b_row_stride : column * (int64_t)b_bytes);
                const int64_t b_step = g->b_is_transposed ? (int64_t)b_bytes : g->b_row_stride;
                double sum = 0;
                for (int64_t k = 0; k < g->k; k++) {
                    sum += (double)fv_float_load(a + k * (int64_t)a_bytes, g->a_dtype) *
                           fv_float_load(b + k * b_step, g->b_dtype);
                }
                fv_float_store(c + column * (int64_t)fv_dtype_bytes(g->c_dtype), (float)sum, g->c_dtype);
            }
        }
    }
    return FV_OK;
}

static int32_t entry_size(const scene *s) { return s->problem.mla.kv_lora_rank + s->problem.mla.qk_rope_head_dim; }

static int32_t query_size(const scene *s) { return s->problem.mla.qk_nope_head_dim + s->problem.mla.qk_rope_head_dim; }

/* The rope part of a key or query at its position. */
static void rotate(const scene *s, float *rope, int32_t position)
{
    const int32_t half = s->problem.mla.qk_rope_head_dim / 2;
    for (int32_t i = 0; i < half; i++) {
        const float cosine = s->cos[position * half + i], sine = s->sin[position * half + i];
        const float low = rope[i], high = rope[i + half];
        rope[i] = low * cosine - high * sine;
        rope[i + half] = high * cosine + low * sine;
    }
}

static void fill_tables(scene *s)
{
    const int32_t half = s->problem.mla.qk_rope_head_dim / 2;
    s->cos = allocate(sizeof(float) * MAX_POSITIONS * (size_t)half);
    s->sin = allocate(sizeof(float) * MAX_POSITIONS * (size_t)half);
    for (int32_t position = 0; position < MAX_POSITIONS; position++) {
        for (int32_t i = 0; i < half; i++) {
            const double angle = position * pow(10000, -(double)i / half);
            s->cos[position * half + i] = (float)cos(angle);
            s->sin[position * half + i] = (float)sin(angle);
        }
    }
}

/* -1: the key is another rank's. */
static int64_t slot_of(const scene *s, int32_t seq, int32_t key)
{
    int64_t slot = -1;
    const fv_status status = fv_context_parallel_slot(&slot, key, s->block_table + seq * s->width, s->width,
                                                      s->problem.block_size, &s->problem.context_parallel);
    assert_int_equal(status, FV_OK);
    return slot;
}

static void fill_sequences(scene *s, const lens *all)
{
    const int32_t bs = s->problem.block_size;
    for (int32_t seq = 0; seq < s->num_seqs; seq++) {
        s->query_start[seq + 1] = s->query_start[seq] + all[seq].query_len;
        s->seq_lens[seq] = all[seq].seq_len;
        s->max_query_len = fv_max_i32(s->max_query_len, all[seq].query_len);
        s->max_seq_len = fv_max_i32(s->max_seq_len, all[seq].seq_len);
        const size_t elements = (size_t)all[seq].seq_len * (size_t)entry_size(s);
        s->latents[seq] = allocate(elements * sizeof(float));
        for (size_t i = 0; i < elements; i++) s->latents[seq][i] = number(s->problem.q_dtype);
    }
    s->num_tokens = s->query_start[s->num_seqs];
    s->width = (s->max_seq_len + bs - 1) / bs + 1;
    s->block_table = allocate(sizeof(int32_t) * (size_t)(s->num_seqs * s->width));
    s->slots = allocate(sizeof(int64_t) * (size_t)s->num_tokens);
    s->num_blocks = 1;
    for (int32_t seq = 0; seq < s->num_seqs; seq++) {
        int32_t *row = s->block_table + seq * s->width;
        const int32_t local_len = fv_context_parallel_local_len(s->seq_lens[seq], &s->problem.context_parallel);
        for (int32_t i = 0; i < s->width; i++) row[i] = i * bs < local_len ? s->num_blocks++ : 1 << 30;
        for (int32_t token = s->query_start[seq]; token < s->query_start[seq + 1]; token++) {
            const int32_t position = s->seq_lens[seq] - (s->query_start[seq + 1] - token);
            s->slots[token] = position < 0 ? -1 : slot_of(s, seq, position);
        }
    }
}

/* The entry of a key as the cache has it. */
static void entry_of(float *entry, const scene *s, int32_t seq, int32_t key)
{
    memcpy(entry, s->latents[seq] + (size_t)key * (size_t)entry_size(s), sizeof(float) * (size_t)entry_size(s));
    if (!s->problem.mla.rotate_at_reading) rotate(s, entry + s->problem.mla.kv_lora_rank, key);
}

static void fill_tensors(scene *s)
{
    const fv_mla_shape *mla = &s->problem.mla;
    const fv_dtype dtype = s->problem.q_dtype;
    const size_t bytes = fv_dtype_bytes(dtype), tokens = (size_t)s->num_tokens, heads = (size_t)mla->num_heads;
    const size_t weights = heads * (size_t)((mla->qk_nope_head_dim + mla->v_head_dim) * mla->kv_lora_rank);
    s->kv_up = allocate(weights * sizeof(float));
    for (size_t i = 0; i < weights; i++) s->kv_up[i] = 0.2f * number(FV_DTYPE_F32);
    s->q = allocate(tokens * heads * (size_t)query_size(s) * bytes);
    s->out = allocate(tokens * heads * (size_t)mla->v_head_dim * bytes);
    s->lse = allocate(tokens * heads * sizeof(float));
    s->new_latents = allocate(tokens * (size_t)entry_size(s) * bytes);
    for (size_t i = 0; i < tokens * heads * (size_t)query_size(s); i++) {
        fv_float_store(s->q + i * bytes, number(dtype), dtype);
    }
    float *entry = allocate(sizeof(float) * (size_t)entry_size(s));
    for (int32_t seq = 0; seq < s->num_seqs; seq++) {
        for (int32_t token = s->query_start[seq]; token < s->query_start[seq + 1]; token++) {
            const int32_t key = s->seq_lens[seq] - (s->query_start[seq + 1] - token);
            if (key < 0) continue;
            entry_of(entry, s, seq, key);
            for (int32_t d = 0; d < entry_size(s); d++) {
                fv_float_store(s->new_latents + (size_t)(token * entry_size(s) + d) * bytes, entry[d], dtype);
            }
        }
    }
    free(entry);
}

static void setup_scene(scene *s, const fv_problem *problem, const lens *all, int32_t num_seqs)
{
    *s = (scene){.problem = *problem, .num_seqs = num_seqs};
    s->problem.struct_size = sizeof(fv_problem);
    s->problem.kind = FV_ATTENTION_MLA;
    s->problem.kv_layout_any = 1;
    s->problem.returns_lse = 1;
    assert_int_equal(fv_context_create(&s->context, NULL), FV_OK);
    fill_tables(s);
    fill_sequences(s, all);
    fill_tensors(s);
}

static void drop_plan(scene *s)
{
    fv_plan_destroy(s->plan);
    free(s->workspace);
    free(s->cache);
    s->plan = NULL;
    s->workspace = s->cache = NULL;
}

static void teardown_scene(scene *s)
{
    drop_plan(s);
    for (int32_t seq = 0; seq < s->num_seqs; seq++) free(s->latents[seq]);
    void *const memory[] = {s->block_table, s->slots, s->kv_up, s->cos, s->sin, s->q, s->new_latents, s->out, s->lse};
    for (int32_t i = 0; i < FV_ARRAY_LEN(memory); i++) free(memory[i]);
    fv_context_destroy(s->context);
}

static void write_context(scene *s)
{
    const fv_dtype dtype = s->problem.q_dtype;
    const int32_t size = entry_size(s);
    float *entry = allocate(sizeof(float) * (size_t)size);
    char *row = allocate((size_t)size * 4);
    fv_device *device = NULL;
    assert_int_equal(fv_device_find(&device, s->context, "cpu"), FV_OK);
    for (int32_t seq = 0; seq < s->num_seqs; seq++) {
        const int32_t context = s->seq_lens[seq] - (s->query_start[seq + 1] - s->query_start[seq]);
        for (int32_t key = 0; key < context; key++) {
            entry_of(entry, s, seq, key);
            for (int32_t d = 0; d < size; d++) fv_float_store(row + (size_t)d * fv_dtype_bytes(dtype), entry[d], dtype);
            const int64_t slot = slot_of(s, seq, key);
            const fv_tensor k = fv_tensor_3d(row, dtype, 1, 1, size),
                            v = fv_tensor_3d(row, dtype, 1, 1, s->problem.mla.kv_lora_rank);
            assert_int_equal(fv_kv_write(device, &s->view, &k, &v, &slot, 1, NULL, NULL, 0, NULL), FV_OK);
        }
    }
    free(entry);
    free(row);
}

static fv_layer layer_of(scene *s)
{
    const fv_mla_shape *mla = &s->problem.mla;
    const fv_dtype dtype = s->problem.q_dtype;
    return (fv_layer){
        .struct_size = sizeof(fv_layer),
        .q = fv_tensor_3d(s->q, dtype, s->num_tokens, mla->num_heads, query_size(s)),
        .k = fv_tensor_3d(s->new_latents, dtype, s->num_tokens, 1, entry_size(s)),
        .kv_cache = s->view,
        .out = fv_tensor_3d(s->out, dtype, s->num_tokens, mla->num_heads, mla->v_head_dim),
        .lse = fv_tensor_2d(s->lse, FV_DTYPE_F32, s->num_tokens, mla->num_heads),
        .kv_up = fv_tensor_3d(s->kv_up, FV_DTYPE_F32, mla->num_heads, mla->qk_nope_head_dim + mla->v_head_dim,
                              mla->kv_lora_rank),
        .gemm = plain_gemm,
        .gemm_user = &s->num_gemms,
        .rope_cos = mla->rotate_at_reading ? s->cos : NULL,
        .rope_sin = mla->rotate_at_reading ? s->sin : NULL,
        .num_rope_positions = MAX_POSITIONS,
    };
}

static fv_status make_plan(scene *s, const char *backend, const fv_plan_options *options)
{
    const fv_bounds bounds = {sizeof(bounds), s->num_seqs, s->num_tokens, s->max_query_len, s->max_seq_len};
    fv_plan_options complete = options ? *options : (fv_plan_options){0};
    complete.struct_size = sizeof(complete);
    complete.backend = backend;
    drop_plan(s);
    fv_status status = fv_plan_create(&s->plan, s->context, &s->problem, &bounds, &complete);
    if (status != FV_OK) return status;
    size_t bytes = 0;
    const fv_kv_layout layout = fv_plan_kv_layout(s->plan);
    status = fv_kv_view_bytes(&bytes, layout, s->problem.q_dtype, s->num_blocks, s->problem.block_size, 1,
                              entry_size(s));
    assert_int_equal(status, FV_OK);
    s->cache = allocate(bytes);
    s->workspace = allocate(fv_plan_workspace_bytes(s->plan));
    memset(s->cache, 0xff, bytes);
    memset(s->workspace, 0xff, fv_plan_workspace_bytes(s->plan));
    status = fv_kv_view_init(&s->view, s->cache, layout, s->problem.q_dtype, s->num_blocks, s->problem.block_size, 1,
                             entry_size(s));
    assert_int_equal(status, FV_OK);
    s->view.v_head_size = s->problem.mla.kv_lora_rank; /* the helper of the view knows ropes of 64 only */
    write_context(s);
    return FV_OK;
}

static void run(scene *s, const char *backend, const fv_plan_options *options)
{
    fv_status status = make_plan(s, backend, options);
    s->num_gemms = 0;
    s->layer = layer_of(s);
    s->batch = (fv_batch){
        .struct_size = sizeof(fv_batch),
        .num_seqs = s->num_seqs,
        .num_tokens = s->num_tokens,
        .query_start = s->query_start,
        .seq_lens = s->seq_lens,
        .block_table = s->block_table,
        .block_table_stride = s->width,
        .block_table_width = s->width,
        .slot_mapping = s->slots,
    };
    if (status == FV_OK) status = fv_plan_update(s->plan, &s->batch, NULL);
    if (status == FV_OK) status = fv_plan_run(s->plan, &s->layer, s->workspace, NULL);
    if (status != FV_OK) fail_msg("%s: %s", backend, fv_last_error());
}

/* The row in double; returns its LSE. */
static double expect(double *out, const scene *s, int32_t seq, int32_t token, int32_t head)
{
    const fv_mla_shape *mla = &s->problem.mla;
    const int32_t nope = mla->qk_nope_head_dim, lora = mla->kv_lora_rank;
    const int32_t row = s->query_start[seq] + token;
    const int32_t position = s->seq_lens[seq] - (s->query_start[seq + 1] - s->query_start[seq]) + token;
    const float *w_uk = s->kv_up + (size_t)head * (size_t)((nope + mla->v_head_dim) * lora);
    const float *w_uv = w_uk + nope * lora;
    const size_t bytes = fv_dtype_bytes(s->problem.q_dtype);
    const char *q = s->q + (size_t)((row * mla->num_heads + head) * query_size(s)) * bytes;
    double absorbed[1024] = {0}, mixed[1024] = {0}, sum = 0;
    float entry[1024];
    for (int32_t d = 0; d < nope; d++) {
        for (int32_t l = 0; l < lora; l++) {
            absorbed[l] += (double)fv_float_load(q + (size_t)d * bytes, s->problem.q_dtype) * w_uk[d * lora + l];
        }
    }
    for (int32_t key = 0; key <= position; key++) {
        memcpy(entry, s->latents[seq] + (size_t)key * (size_t)entry_size(s), sizeof(float) * (size_t)entry_size(s));
        rotate(s, entry + lora, key);
        double score = 0;
        for (int32_t l = 0; l < lora; l++) score += absorbed[l] * entry[l];
        for (int32_t d = 0; d < mla->qk_rope_head_dim; d++) {
            score += (double)fv_float_load(q + (size_t)(nope + d) * bytes, s->problem.q_dtype) * entry[lora + d];
        }
        const double weight = exp(score / sqrt(query_size(s)));
        sum += weight;
        for (int32_t l = 0; l < lora; l++) mixed[l] += weight * entry[l];
    }
    for (int32_t d = 0; d < mla->v_head_dim; d++) {
        out[d] = 0;
        for (int32_t l = 0; l < lora; l++) out[d] += sum > 0 ? mixed[l] / sum * w_uv[d * lora + l] : 0;
    }
    return log(sum);
}

static void check_rows(const scene *s, const char *what)
{
    const fv_mla_shape *mla = &s->problem.mla;
    const int32_t is_bf16 = s->problem.q_dtype == FV_DTYPE_BF16;
    for (int32_t seq = 0; seq < s->num_seqs; seq++) {
        const int32_t query_len = s->query_start[seq + 1] - s->query_start[seq];
        for (int32_t token = 0; token < query_len; token += fv_max_i32(1, query_len / 5)) {
            const int32_t head = (seq + token) % mla->num_heads, row = s->query_start[seq] + token;
            double expected[1024], error = 0, norm = 0;
            const double lse = expect(expected, s, seq, token, head);
            for (int32_t d = 0; d < mla->v_head_dim; d++) {
                const size_t at = (size_t)((row * mla->num_heads + head) * mla->v_head_dim + d);
                const double found = fv_float_load(s->out + at * fv_dtype_bytes(s->problem.q_dtype),
                                                   s->problem.q_dtype);
                error += (found - expected[d]) * (found - expected[d]);
                norm += expected[d] * expected[d];
            }
            const double found_lse = s->lse[row * mla->num_heads + head];
            const int32_t same_lse = isinf(lse) ? found_lse == lse : fabs(found_lse - lse) <= (is_bf16 ? 2e-2 : 1e-4);
            if (!(sqrt(error) <= (is_bf16 ? 2e-2 : 2e-5) * sqrt(norm) + 1e-7) || !same_lse) {
                fail_msg("%s: sequence %d, token %d, head %d: error %g of %g, lse %g for %g", what, seq, token, head,
                         sqrt(error), sqrt(norm), found_lse, lse);
            }
        }
    }
}

static const char *const backends[] = {"TRITON_MLA", "ROCM_AITER_MLA", "ROCM_AITER_TRITON_MLA", "AMLA"};

static int32_t is_amla(int32_t backend) { return strcmp(backends[backend], "AMLA") == 0; }

/* Decodes, verifications, extends, prefills and an empty sequence, in no order. */
static const lens mixed[] = {{1, 700}, {90, 300}, {2, 33}, {40, 40}, {0, 0}, {1, 1}, {17, 600}, {4, 1100}};

static const fv_problem small = {.mla = {4, 64, 16, 24, 40, 0, 0}, .q_dtype = FV_DTYPE_F32, .block_size = 16};

/* AMLA rounds its probabilities to bf16, so it is checked with bf16 tensors. */
static fv_problem for_backend(int32_t backend, const fv_problem *problem)
{
    fv_problem chosen = *problem;
    if (is_amla(backend)) chosen.q_dtype = FV_DTYPE_BF16;
    return chosen;
}

static void check_backends(const fv_problem *problem, const lens *all, int32_t num_seqs, const fv_plan_options *options)
{
    for (int32_t b = 0; b < FV_ARRAY_LEN(backends); b++) {
        const fv_problem chosen = for_backend(b, problem);
        scene s;
        setup_scene(&s, &chosen, all, num_seqs);
        run(&s, backends[b], options);
        check_rows(&s, backends[b]);
        teardown_scene(&s);
    }
}

static void test_mixed_batch(void **state)
{
    (void)state;
    fv_problem problem = small;
    check_backends(&problem, mixed, FV_ARRAY_LEN(mixed), NULL);
    problem.q_dtype = FV_DTYPE_BF16;
    problem.block_size = 7;
    check_backends(&problem, mixed, FV_ARRAY_LEN(mixed), NULL);
    problem.mla = (fv_mla_shape){16, 512, 64, 128, 128, 0, 0};
    problem.block_size = 1;
    static const lens few[] = {{1, 300}, {20, 50}, {3, 90}};
    check_backends(&problem, few, FV_ARRAY_LEN(few), NULL);
}

static void test_rotation_at_reading(void **state)
{
    (void)state;
    fv_problem problem = small;
    problem.mla.rotate_at_reading = 1;
    check_backends(&problem, mixed, FV_ARRAY_LEN(mixed), NULL);
}

/* The same numbers whichever way a query goes. */
static void test_thresholds_and_grid(void **state)
{
    (void)state;
    const fv_plan_options options[] = {
        {.decode_threshold = 1}, {.decode_threshold = 100}, {.static_grid = 1},
        {.batch_invariant = 1},  {.path = FV_PATH_3D},      {.path = FV_PATH_2D},
    };
    for (int32_t i = 0; i < FV_ARRAY_LEN(options); i++) {
        check_backends(&small, mixed, FV_ARRAY_LEN(mixed), &options[i]);
    }
}

/* Tokens behind the last sequence are padding, whatever is in the workspace. */
static void test_tokens_of_no_sequence(void **state)
{
    (void)state;
    const fv_plan_options options[] = {{.decode_threshold = 1}, {.decode_threshold = 100}, {.static_grid = 1}};
    for (int32_t i = 0; i < FV_ARRAY_LEN(backends) * FV_ARRAY_LEN(options); i++) {
        const int32_t backend = i / FV_ARRAY_LEN(options);
        const fv_problem problem = for_backend(backend, &small);
        scene s;
        setup_scene(&s, &problem, mixed, FV_ARRAY_LEN(mixed));
        run(&s, backends[backend], &options[i % FV_ARRAY_LEN(options)]);
        const size_t row_bytes = (size_t)s.layer.out.stride_bytes[0];
        memset(s.workspace, 0xff, fv_plan_workspace_bytes(s.plan));
        memset(s.out, 0x5a, (size_t)s.num_tokens * row_bytes);
        s.batch.num_seqs = --s.num_seqs;
        assert_int_equal(fv_plan_update(s.plan, &s.batch, NULL), FV_OK);
        assert_int_equal(fv_plan_run(s.plan, &s.layer, s.workspace, NULL), FV_OK);
        check_rows(&s, backends[backend]);
        for (size_t at = (size_t)s.query_start[s.num_seqs] * row_bytes; at < (size_t)s.num_tokens * row_bytes; at++)
            assert_int_equal(s.out[at], 0x5a);
        s.num_seqs++;
        teardown_scene(&s);
    }
}

/* The least workspace: many rounds and chunks, the same numbers. */
static void test_least_workspace(void **state)
{
    (void)state;
    for (int32_t b = 0; b < FV_ARRAY_LEN(backends); b++) {
        const fv_problem chosen = for_backend(b, &small);
        scene s;
        setup_scene(&s, &chosen, mixed, FV_ARRAY_LEN(mixed));
        run(&s, backends[b], NULL);
        const int32_t roomy_gemms = s.num_gemms;
        const size_t roomy = fv_plan_workspace_bytes(s.plan);
        fv_plan_options options = {.max_workspace_bytes = 1};
        assert_int_equal(make_plan(&s, backends[b], &options), FV_ERR_INVALID);
        const char *least = strstr(fv_last_error(), "or from ");
        assert_non_null(least);
        options.max_workspace_bytes = strtoull(least + strlen("or from "), NULL, 10);
        run(&s, backends[b], &options);
        assert_true(fv_plan_workspace_bytes(s.plan) <= options.max_workspace_bytes);
        assert_true(fv_plan_workspace_bytes(s.plan) < roomy);
        assert_true(s.num_gemms > roomy_gemms);
        check_rows(&s, backends[b]);
        teardown_scene(&s);
    }
}

/* The ranks' results, each over its own cache, into out and lse of rank 0. */
static void merge_ranks(scene *ranks, int32_t world)
{
    const scene *first = &ranks[0];
    fv_tensor rank_out = {.dtype = first->layer.out.dtype, .num_dims = 4, .shape = {world}};
    fv_tensor rank_lse = fv_tensor_3d(NULL, FV_DTYPE_F32, world, first->num_tokens, first->problem.mla.num_heads);
    const size_t out_bytes = (size_t)(first->num_tokens * first->layer.out.stride_bytes[0]);
    const size_t lse_bytes = (size_t)rank_lse.stride_bytes[0];
    rank_out.stride_bytes[0] = (int64_t)out_bytes;
    memcpy(rank_out.shape + 1, first->layer.out.shape, 3 * sizeof(int64_t));
    memcpy(rank_out.stride_bytes + 1, first->layer.out.stride_bytes, 3 * sizeof(int64_t));
    rank_out.data = allocate((size_t)world * out_bytes);
    rank_lse.data = allocate((size_t)world * lse_bytes);
    for (int32_t rank = 0; rank < world; rank++) {
        memcpy((char *)rank_out.data + (size_t)rank * out_bytes, ranks[rank].out, out_bytes);
        memcpy((char *)rank_lse.data + (size_t)rank * lse_bytes, ranks[rank].lse, lse_bytes);
    }
    fv_device *device = NULL;
    assert_int_equal(fv_device_find(&device, first->context, "cpu"), FV_OK);
    const fv_status status = fv_merge_ranks(device, &first->layer.out, &first->layer.lse, &rank_out, &rank_lse, NULL,
                                            NULL);
    if (status != FV_OK) fail_msg("%s", fv_last_error());
    free(rank_out.data);
    free(rank_lse.data);
}

/* Context parallelism: the formula of one rank with all keys holds for what the ranks make together. */
static void test_context_parallel(void **state)
{
    (void)state;
    static const fv_context_parallel groups[] = {{2, 0, 1}, {3, 0, 16}, {4, 0, 5}};
    for (int32_t i = 0; i < FV_ARRAY_LEN(backends) * FV_ARRAY_LEN(groups); i++) {
        const int32_t backend = i / FV_ARRAY_LEN(groups), world = groups[i % FV_ARRAY_LEN(groups)].world;
        fv_problem problem = for_backend(backend, &small);
        scene ranks[MAX_WORLD];
        problem.mla.rotate_at_reading = i & 1;
        problem.context_parallel = groups[i % FV_ARRAY_LEN(groups)];
        for (int32_t rank = 0; rank < world; rank++) {
            problem.context_parallel.rank = rank;
            random_state = 1;
            setup_scene(&ranks[rank], &problem, mixed, FV_ARRAY_LEN(mixed));
            run(&ranks[rank], backends[backend], &(fv_plan_options){.path = i & 2 ? FV_PATH_3D : FV_PATH_AUTO});
        }
        merge_ranks(ranks, world);
        check_rows(&ranks[0], backends[backend]);
        for (int32_t rank = 0; rank < world; rank++) teardown_scene(&ranks[rank]);
    }
}

static void test_refusals(void **state)
{
    (void)state;
    scene s;
    setup_scene(&s, &small, mixed, FV_ARRAY_LEN(mixed));
    run(&s, "TRITON_MLA", NULL);
    fv_layer layer = s.layer;
    layer.gemm = NULL;
    assert_int_equal(fv_plan_run(s.plan, &layer, s.workspace, NULL), FV_ERR_INVALID);
    assert_non_null(strstr(fv_last_error(), "fv_layer.gemm is NULL"));
    layer = s.layer;
    layer.kv_up.shape[1]++;
    assert_int_equal(fv_plan_run(s.plan, &layer, s.workspace, NULL), FV_ERR_INVALID);
    assert_non_null(strstr(fv_last_error(), "kv_up has 3 dimensions [4, 65, 64]; accepted: 3, [4, 64, 64]"));
    fv_problem problem = s.problem;
    problem.soft_cap = 10;
    char reasons[512];
    assert_int_equal(fv_backend_why_not(reasons, sizeof(reasons), "TRITON_MLA", NULL, &problem), FV_OK);
    assert_non_null(strstr(reasons, "MLA does not support logits_soft_cap"));
    assert_int_equal(fv_backend_why_not(reasons, sizeof(reasons), "TRITON_ATTN", NULL, &s.problem), FV_OK);
    assert_string_equal(reasons, "MLA not supported");
    teardown_scene(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mixed_batch),
        cmocka_unit_test(test_rotation_at_reading),
        cmocka_unit_test(test_thresholds_and_grid),
        cmocka_unit_test(test_least_workspace),
        cmocka_unit_test(test_context_parallel),
        cmocka_unit_test(test_tokens_of_no_sequence),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
