/* A captured graph on a GPU: captured once, replayed over steps of growing, joining and leaving sequences, it
 * gives the bits of plain launches, by the static grid and by static lists: every backend that serves the GPU, MLA absorbed by the caller and with its weights
 * (whose products are the device's own GEMM, captured too), query lengths 1 and 4. Skipped where there is no GPU; the
 * null device has a test of its own. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "fovea/fovea.h"

enum {
    BLOCK_SIZE = 16,
    TABLE_WIDTH = 16,
    MAX_SEQS = 6,
    MAX_QUERY = 4,
    MAX_TOKENS = MAX_SEQS * MAX_QUERY,
    MAX_SEQ_LEN = TABLE_WIDTH * BLOCK_SIZE,
    NUM_BLOCKS = 1 + MAX_SEQS * TABLE_WIDTH,
    NUM_STEPS = 200,
};

/* What a step brings, on the host and at one place of the device; behind it q, k and v, bf16. */
typedef struct step_arrays {
    int64_t slot_mapping[MAX_TOKENS];
    int32_t query_start[MAX_SEQS + 1];
    int32_t seq_lens[MAX_SEQS];
    int32_t block_table[MAX_SEQS * TABLE_WIDTH];
    uint16_t numbers[];
} step_arrays;

/* The sequences that are there: lengths by id, 0 = not there. */
typedef struct step_traffic {
    int32_t lens[MAX_SEQS];
    int32_t query_len;
    uint32_t random;
} step_traffic;

/* Rows of a layer: heads and elements of each tensor. */
typedef struct row_sizes {
    int64_t heads, kv_heads, q_size, k_size, v_size, out_size; /* v_size 0: MLA */
} row_sizes;

typedef struct gpu_side {
    fv_device *device;
    fv_plan *plan;
    fv_stream stream;
    row_sizes sizes;
    size_t step_bytes, out_bytes;
    step_arrays *host, *arrays;
    uint16_t *plain, *replayed, *out; /* out on the device */
    void *cache, *workspace, *kv_up;
    fv_layer layer;
    int32_t has_list; /* static_list: updates bring the lengths on the host */
} gpu_side;

static void must(fv_status status)
{
    if (status != FV_OK) fail_msg("%s: %s", fv_status_name(status), fv_last_error());
}

static uint32_t next_random(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

/* In [-factor, factor]. */
static uint16_t next_bf16(uint32_t *state, float factor)
{
    const float value = factor * ((float)(next_random(state) % 2001) / 1000.0f - 1.0f);
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return (uint16_t)(bits >> 16);
}

/* Everybody grows; some leave and others take their place, with an empty context. */
static int32_t next_step(gpu_side *side, step_traffic *traffic)
{
    int32_t num_seqs = 0;
    step_arrays *step = side->host;
    memset(step, 0, sizeof(*step));
    for (int32_t id = 0; id < MAX_SEQS; id++) {
        int32_t *len = &traffic->lens[id];
        if (*len + traffic->query_len > MAX_SEQ_LEN || next_random(&traffic->random) % 50 == 0) *len = 0;
        if (*len == 0 && next_random(&traffic->random) % 8 != 0) continue;
        *len += traffic->query_len;
        const int32_t seq = num_seqs++, start = step->query_start[seq];
        step->query_start[seq + 1] = start + traffic->query_len;
        step->seq_lens[seq] = *len;
        for (int32_t i = 0; i < TABLE_WIDTH; i++)
            step->block_table[seq * TABLE_WIDTH + i] = 1 + id * TABLE_WIDTH + (i * 5) % TABLE_WIDTH;
        for (int32_t t = 0; t < traffic->query_len; t++) {
            const int32_t position = *len - traffic->query_len + t;
            const int64_t block = step->block_table[seq * TABLE_WIDTH + position / BLOCK_SIZE];
            step->slot_mapping[start + t] = block * BLOCK_SIZE + position % BLOCK_SIZE;
        }
    }
    const size_t count = (side->step_bytes - sizeof(*step)) / sizeof(uint16_t);
    for (size_t i = 0; i < count; i++) step->numbers[i] = next_bf16(&traffic->random, 1);
    return num_seqs;
}

static row_sizes sizes_of(const fv_problem *problem)
{
    const fv_mla_shape *mla = &problem->mla;
    const int64_t entry = mla->kv_lora_rank + mla->qk_rope_head_dim;
    if (problem->kind == FV_ATTENTION_MHA) {
        const int64_t size = problem->mha.head_size;
        return (row_sizes){problem->mha.num_heads, problem->mha.num_kv_heads, size, size, size, size};
    }
    if (mla->absorbed) return (row_sizes){mla->num_heads, 1, entry, entry, 0, mla->kv_lora_rank};
    return (row_sizes){mla->num_heads, 1, mla->qk_nope_head_dim + mla->qk_rope_head_dim, entry, 0, mla->v_head_dim};
}

static void open_weights(gpu_side *side, const fv_mla_shape *mla)
{
    const int64_t rows = mla->qk_nope_head_dim + mla->v_head_dim;
    const size_t count = (size_t)(mla->num_heads * rows * mla->kv_lora_rank);
    uint16_t *weights = malloc(count * sizeof(uint16_t));
    uint32_t random = 3;
    assert_non_null(weights);
    for (size_t i = 0; i < count; i++) weights[i] = next_bf16(&random, 0.0625f);
    must(fv_device_alloc(&side->kv_up, side->device, count * sizeof(uint16_t)));
    must(fv_device_copy_in(side->device, side->kv_up, weights, count * sizeof(uint16_t), side->stream));
    must(fv_stream_synchronize(side->device, side->stream));
    free(weights);
    side->layer.kv_up = fv_tensor_3d(side->kv_up, FV_DTYPE_BF16, mla->num_heads, rows, mla->kv_lora_rank);
    side->layer.gemm = fv_device_gemm;
    side->layer.gemm_user = side->device;
}

static void open_memory(gpu_side *side, size_t cache_bytes)
{
    fv_device *device = side->device;
    const row_sizes *sizes = &side->sizes;
    const int64_t row = sizes->heads * sizes->q_size + sizes->kv_heads * (sizes->k_size + sizes->v_size);
    side->step_bytes = sizeof(step_arrays) + (size_t)(MAX_TOKENS * row) * sizeof(uint16_t);
    side->out_bytes = (size_t)(MAX_TOKENS * sizes->heads * sizes->out_size) * sizeof(uint16_t);
    must(fv_device_alloc((void **)&side->arrays, device, side->step_bytes));
    must(fv_device_alloc((void **)&side->out, device, side->out_bytes));
    must(fv_device_alloc(&side->cache, device, cache_bytes));
    must(fv_device_alloc(&side->workspace, device, fv_plan_workspace_bytes(side->plan)));
    must(fv_device_alloc_host((void **)&side->host, device, side->step_bytes));
    must(fv_device_alloc_host((void **)&side->plain, device, side->out_bytes));
    must(fv_device_alloc_host((void **)&side->replayed, device, side->out_bytes));
    must(fv_device_fill(device, side->cache, 0xff, cache_bytes, side->stream)); /* NaN */
}

static void open_side(gpu_side *side, fv_context *context, const fv_problem *given, const char *backend)
{
    fv_problem problem;
    must(fv_problem_normalize(&problem, given));
    const fv_bounds bounds = {sizeof(bounds), MAX_SEQS, MAX_TOKENS, MAX_QUERY, MAX_SEQ_LEN};
    const fv_plan_options options = {
        .struct_size = sizeof(options),
        .device = side->device,
        .backend = backend,
        .static_grid = !side->has_list,
        .static_list = side->has_list,
    };
    size_t cache_bytes;
    must(fv_plan_create(&side->plan, context, given, &bounds, &options));
    const fv_kv_layout layout = fv_plan_kv_layout(side->plan);
    const row_sizes sizes = side->sizes = sizes_of(&problem);
    must(fv_kv_view_bytes(&cache_bytes, layout, FV_DTYPE_BF16, NUM_BLOCKS, BLOCK_SIZE, (int32_t)sizes.kv_heads,
                          (int32_t)sizes.k_size));
    must(fv_stream_create(&side->stream, side->device));
    open_memory(side, cache_bytes);
    uint16_t *q = side->arrays->numbers, *k = q + MAX_TOKENS * sizes.heads * sizes.q_size;
    uint16_t *v = k + MAX_TOKENS * sizes.kv_heads * sizes.k_size;
    side->layer = (fv_layer){
        .struct_size = sizeof(side->layer),
        .q = fv_tensor_3d(q, FV_DTYPE_BF16, MAX_TOKENS, sizes.heads, sizes.q_size),
        .k = fv_tensor_3d(k, FV_DTYPE_BF16, MAX_TOKENS, sizes.kv_heads, sizes.k_size),
        .out = fv_tensor_3d(side->out, FV_DTYPE_BF16, MAX_TOKENS, sizes.heads, sizes.out_size),
    };
    if (sizes.v_size > 0) side->layer.v = fv_tensor_3d(v, FV_DTYPE_BF16, MAX_TOKENS, sizes.kv_heads, sizes.v_size);
    if (problem.kind == FV_ATTENTION_MLA && !problem.mla.absorbed) open_weights(side, &problem.mla);
    must(fv_kv_view_init(&side->layer.kv_cache, side->cache, layout, FV_DTYPE_BF16, NUM_BLOCKS, BLOCK_SIZE,
                         (int32_t)sizes.kv_heads, (int32_t)sizes.k_size));
}

static void close_side(gpu_side *side)
{
    fv_device *device = side->device;
    fv_plan_destroy(side->plan);
    void *const memory[] = {side->arrays, side->out, side->cache, side->workspace, side->kv_up};
    for (size_t i = 0; i < sizeof(memory) / sizeof(memory[0]); i++) fv_device_free(device, memory[i]);
    fv_device_free_host(device, side->host);
    fv_device_free_host(device, side->plain);
    fv_device_free_host(device, side->replayed);
    fv_stream_destroy(device, side->stream);
    *side = (gpu_side){.device = device, .has_list = side->has_list};
}

static fv_batch batch_of(const gpu_side *side, int32_t num_seqs)
{
    const step_arrays *at = side->arrays;
    return (fv_batch){
        .struct_size = sizeof(fv_batch),
        .num_seqs = num_seqs,
        .num_tokens = side->host->query_start[num_seqs],
        .query_start = at->query_start,
        .seq_lens = at->seq_lens,
        .block_table = at->block_table,
        .block_table_stride = TABLE_WIDTH,
        .block_table_width = TABLE_WIDTH,
        .slot_mapping = at->slot_mapping,
        .host_query_start = side->has_list ? side->host->query_start : NULL,
        .host_seq_lens = side->has_list ? side->host->seq_lens : NULL,
    };
}

static void send_step(gpu_side *side, int32_t num_seqs)
{
    const fv_batch batch = batch_of(side, num_seqs);
    must(fv_device_copy_in(side->device, side->arrays, side->host, side->step_bytes, side->stream));
    must(fv_plan_update(side->plan, &batch, side->stream));
    must(fv_device_fill(side->device, side->out, 0xff, side->out_bytes, side->stream));
}

static void fetch(uint16_t *out, gpu_side *side)
{
    must(fv_device_copy_out(side->device, out, side->out, side->out_bytes, side->stream));
    must(fv_stream_synchronize(side->device, side->stream));
}

static void compare(const gpu_side *side, int32_t num_tokens, const char *what, int32_t step)
{
    const size_t row = (size_t)(side->sizes.heads * side->sizes.out_size), used = (size_t)num_tokens * row;
    if (memcmp(side->plain, side->replayed, used * sizeof(uint16_t)) != 0) {
        fail_msg("%s: the graph's bits differ in step %d", what, step);
    }
    for (size_t i = 0; i < used; i++)
        if ((side->plain[i] & 0x7fff) >= 0x7f80) fail_msg("%s: not finite in step %d", what, step);
    if (side->kv_up) return; /* W_UV is multiplied with all rows that there may be, padding too */
    for (size_t i = used; i < MAX_TOKENS * row; i++)
        if (side->replayed[i] != 0xffff) fail_msg("%s: padding is written in step %d", what, step);
}

static void replay_steps(gpu_side *side, int32_t query_len, const char *what)
{
    step_traffic traffic = {.query_len = query_len, .random = 7};
    fv_graph graph = NULL;
    uint64_t key = 0;
    for (int32_t i = 0; i < NUM_STEPS; i++) {
        const int32_t num_seqs = next_step(side, &traffic);
        send_step(side, num_seqs);
        must(fv_plan_run(side->plan, &side->layer, side->workspace, side->stream));
        fetch(side->plain, side);
        if (i == 0) {
            must(fv_graph_begin(side->device, side->stream));
            must(fv_plan_run(side->plan, &side->layer, side->workspace, side->stream));
            must(fv_graph_end(&graph, side->device, side->stream));
            key = fv_plan_graph_key(side->plan);
        }
        assert_true(fv_plan_graph_key(side->plan) == key);
        send_step(side, num_seqs);
        must(fv_graph_launch(side->device, graph, side->stream));
        fetch(side->replayed, side);
        compare(side, side->host->query_start[num_seqs], what, i);
    }
    fv_graph_destroy(side->device, graph);
}

/* Decode and prefill kernels of both kinds of head sizes; MLA with a rank's heads and with all, absorbed and not. */
static const fv_problem problems[] = {
    {.kind = FV_ATTENTION_MHA, .mha = {8, 2, 64, 0}},
    {.kind = FV_ATTENTION_MHA, .mha = {32, 8, 128, 0}, .window = 40},
    {.kind = FV_ATTENTION_MLA, .mla = {16, 512, 64, 128, 128, 0, 1}},
    {.kind = FV_ATTENTION_MLA, .mla = {128, 512, 64, 128, 128, 0, 1}},
    {.kind = FV_ATTENTION_MLA, .mla = {16, 512, 64, 128, 128, 0, 0}},
};

static void replay_problems(int32_t has_list)
{
    fv_context *context = NULL;
    gpu_side side = {.has_list = has_list};
    int32_t num_served = 0;
    must(fv_context_create(&context, NULL));
    if (fv_device_find(&side.device, context, "cuda") != FV_OK) {
        fv_context_destroy(context);
        skip();
    }
    for (size_t i = 0; i < sizeof(problems) / sizeof(problems[0]); i++) {
        fv_problem problem = problems[i];
        problem.struct_size = sizeof(problem);
        problem.q_dtype = FV_DTYPE_BF16;
        problem.block_size = BLOCK_SIZE;
        problem.kv_layout_any = 1;
        for (int32_t b = 0; b < fv_backend_count(); b++) {
            char reasons[1024], what[128];
            const char *backend = fv_backend_name(b);
            must(fv_backend_why_not(reasons, sizeof(reasons), backend, side.device, &problem));
            if (reasons[0]) continue;
            num_served++;
            for (int32_t query_len = 1; query_len <= MAX_QUERY; query_len += MAX_QUERY - 1) {
                snprintf(what, sizeof(what), "problem %zu, %s, query length %d", i, backend, query_len);
                open_side(&side, context, &problem, backend);
                replay_steps(&side, query_len, what);
                close_side(&side);
            }
        }
    }
    assert_in_range(num_served, 2 * 4 + 3 * 4, 1000); /* 4 of MHA, 4 of MLA at least */
    fv_context_destroy(context);
}

static void test_static_grids(void **state)
{
    (void)state;
    replay_problems(0);
}

static void test_static_lists(void **state)
{
    (void)state;
    replay_problems(1);
}

/* An update would be a copy in the graph, and its event one that the host can never wait for. */
static void test_updates_are_not_captured(void **state)
{
    (void)state;
    fv_context *context = NULL;
    fv_graph graph = NULL;
    gpu_side side = {0};
    fv_problem problem = problems[0];
    must(fv_context_create(&context, NULL));
    if (fv_device_find(&side.device, context, "cuda") != FV_OK) {
        fv_context_destroy(context);
        skip();
    }
    problem.struct_size = sizeof(problem);
    problem.q_dtype = FV_DTYPE_BF16;
    problem.block_size = BLOCK_SIZE;
    problem.kv_layout_any = 1;
    open_side(&side, context, &problem, "TRITON_ATTN");
    step_traffic traffic = {.query_len = 1, .random = 7};
    const int32_t num_seqs = next_step(&side, &traffic);
    const fv_batch batch = batch_of(&side, num_seqs);
    send_step(&side, num_seqs);
    must(fv_graph_begin(side.device, side.stream));
    for (int32_t i = 0; i < 4; i++) assert_int_equal(fv_plan_update(side.plan, &batch, side.stream), FV_ERR_INVALID);
    assert_non_null(strstr(fv_last_error(), "a stream that is being captured"));
    must(fv_device_fill(side.device, side.out, 0, side.out_bytes, side.stream));
    must(fv_graph_end(&graph, side.device, side.stream));
    fv_graph_destroy(side.device, graph);
    replay_steps(&side, 1, "after refusals");
    close_side(&side);
    fv_context_destroy(context);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_updates_are_not_captured),
        cmocka_unit_test(test_static_grids),
        cmocka_unit_test(test_static_lists),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
