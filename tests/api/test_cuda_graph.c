/* A captured graph on a GPU: captured once, replayed over steps of growing, joining and leaving sequences, it
 * gives the bits of plain launches. Skipped where there is no GPU; the null device has a test of its own. */
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
    HEADS = 8,
    KV_HEADS = 2,
    HEAD_SIZE = 64,
    BLOCK_SIZE = 16,
    TABLE_WIDTH = 16,
    MAX_SEQS = 6,
    MAX_QUERY = 4,
    MAX_TOKENS = MAX_SEQS * MAX_QUERY,
    MAX_SEQ_LEN = TABLE_WIDTH * BLOCK_SIZE,
    NUM_BLOCKS = 1 + MAX_SEQS * TABLE_WIDTH,
    ROW = HEADS * HEAD_SIZE,
    KV_ROW = KV_HEADS * HEAD_SIZE,
    NUM_STEPS = 200,
};

/* What a step brings, on the host and at one place of the device. */
typedef struct step_arrays {
    int64_t slot_mapping[MAX_TOKENS];
    int32_t query_start[MAX_SEQS + 1];
    int32_t seq_lens[MAX_SEQS];
    int32_t block_table[MAX_SEQS * TABLE_WIDTH];
    uint16_t q[MAX_TOKENS * ROW]; /* bf16 */
    uint16_t k[MAX_TOKENS * KV_ROW];
    uint16_t v[MAX_TOKENS * KV_ROW];
} step_arrays;

/* The sequences that are there: lengths by id, 0 = not there. */
typedef struct step_traffic {
    int32_t lens[MAX_SEQS];
    int32_t query_len;
    uint32_t random;
} step_traffic;

typedef struct gpu_side {
    fv_device *device;
    fv_plan *plan;
    fv_stream stream;
    step_arrays *arrays;
    uint16_t *out;
    void *cache, *workspace;
    fv_layer layer;
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

static uint16_t next_bf16(uint32_t *state)
{
    const float value = (float)(next_random(state) % 2001) / 1000.0f - 1.0f;
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return (uint16_t)(bits >> 16);
}

/* Everybody grows; some leave and others take their place, with an empty context. */
static int32_t next_step(step_arrays *step, step_traffic *traffic)
{
    int32_t num_seqs = 0;
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
    for (int32_t i = 0; i < MAX_TOKENS * ROW; i++) step->q[i] = next_bf16(&traffic->random);
    for (int32_t i = 0; i < MAX_TOKENS * KV_ROW; i++) step->k[i] = next_bf16(&traffic->random);
    for (int32_t i = 0; i < MAX_TOKENS * KV_ROW; i++) step->v[i] = next_bf16(&traffic->random);
    return num_seqs;
}

static void open_side(gpu_side *side, fv_context *context, const char *backend)
{
    const fv_problem problem = {
        .struct_size = sizeof(problem),
        .kind = FV_ATTENTION_MHA,
        .mha = {HEADS, KV_HEADS, HEAD_SIZE, 0},
        .q_dtype = FV_DTYPE_BF16,
        .block_size = BLOCK_SIZE,
        .kv_layout_any = 1,
    };
    const fv_bounds bounds = {sizeof(bounds), MAX_SEQS, MAX_TOKENS, MAX_QUERY, MAX_SEQ_LEN};
    const fv_plan_options options = {
        .struct_size = sizeof(options), .device = side->device, .backend = backend, .static_grid = 1};
    size_t cache_bytes;
    must(fv_plan_create(&side->plan, context, &problem, &bounds, &options));
    const fv_kv_layout layout = fv_plan_kv_layout(side->plan);
    must(fv_kv_view_bytes(&cache_bytes, layout, FV_DTYPE_BF16, NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_SIZE));
    must(fv_stream_create(&side->stream, side->device));
    must(fv_device_alloc((void **)&side->arrays, side->device, sizeof(step_arrays)));
    must(fv_device_alloc((void **)&side->out, side->device, MAX_TOKENS * ROW * sizeof(uint16_t)));
    must(fv_device_alloc(&side->cache, side->device, cache_bytes));
    must(fv_device_alloc(&side->workspace, side->device, fv_plan_workspace_bytes(side->plan)));
    must(fv_device_fill(side->device, side->cache, 0xff, cache_bytes, side->stream)); /* NaN */
    side->layer = (fv_layer){
        .struct_size = sizeof(side->layer),
        .q = fv_tensor_3d(side->arrays->q, FV_DTYPE_BF16, MAX_TOKENS, HEADS, HEAD_SIZE),
        .k = fv_tensor_3d(side->arrays->k, FV_DTYPE_BF16, MAX_TOKENS, KV_HEADS, HEAD_SIZE),
        .v = fv_tensor_3d(side->arrays->v, FV_DTYPE_BF16, MAX_TOKENS, KV_HEADS, HEAD_SIZE),
        .out = fv_tensor_3d(side->out, FV_DTYPE_BF16, MAX_TOKENS, HEADS, HEAD_SIZE),
    };
    must(fv_kv_view_init(&side->layer.kv_cache, side->cache, layout, FV_DTYPE_BF16, NUM_BLOCKS, BLOCK_SIZE, KV_HEADS,
                         HEAD_SIZE));
}

static void close_side(gpu_side *side)
{
    fv_plan_destroy(side->plan);
    fv_device_free(side->device, side->arrays);
    fv_device_free(side->device, side->out);
    fv_device_free(side->device, side->cache);
    fv_device_free(side->device, side->workspace);
    fv_stream_destroy(side->device, side->stream);
}

static void send_step(gpu_side *side, const step_arrays *host, int32_t num_seqs)
{
    const step_arrays *at = side->arrays;
    const fv_batch batch = {
        .struct_size = sizeof(batch),
        .num_seqs = num_seqs,
        .num_tokens = host->query_start[num_seqs],
        .query_start = at->query_start,
        .seq_lens = at->seq_lens,
        .block_table = at->block_table,
        .block_table_stride = TABLE_WIDTH,
        .block_table_width = TABLE_WIDTH,
        .slot_mapping = at->slot_mapping,
    };
    must(fv_device_copy_in(side->device, side->arrays, host, sizeof(*host), side->stream));
    must(fv_plan_update(side->plan, &batch, side->stream));
    must(fv_device_fill(side->device, side->out, 0xff, MAX_TOKENS * ROW * sizeof(uint16_t), side->stream));
}

static void fetch(uint16_t *out, gpu_side *side)
{
    must(fv_device_copy_out(side->device, out, side->out, MAX_TOKENS * ROW * sizeof(uint16_t), side->stream));
    must(fv_stream_synchronize(side->device, side->stream));
}

static void replay_steps(gpu_side *side, int32_t query_len)
{
    static uint16_t plain[MAX_TOKENS * ROW], replayed[MAX_TOKENS * ROW];
    static step_arrays step;
    step_traffic traffic = {.query_len = query_len, .random = 7};
    fv_graph graph = NULL;
    uint64_t key = 0;
    for (int32_t i = 0; i < NUM_STEPS; i++) {
        const int32_t num_seqs = next_step(&step, &traffic);
        send_step(side, &step, num_seqs);
        must(fv_plan_run(side->plan, &side->layer, side->workspace, side->stream));
        fetch(plain, side);
        if (i == 0) {
            must(fv_graph_begin(side->device, side->stream));
            must(fv_plan_run(side->plan, &side->layer, side->workspace, side->stream));
            must(fv_graph_end(&graph, side->device, side->stream));
            key = fv_plan_graph_key(side->plan);
        }
        assert_true(fv_plan_graph_key(side->plan) == key);
        send_step(side, &step, num_seqs);
        must(fv_graph_launch(side->device, graph, side->stream));
        fetch(replayed, side);
        const int32_t num_elements = step.query_start[num_seqs] * ROW;
        assert_memory_equal(plain, replayed, (size_t)num_elements * sizeof(uint16_t));
        for (int32_t at = 0; at < num_elements; at++) assert_true((plain[at] & 0x7fff) < 0x7f80); /* finite */
        for (int32_t at = num_elements; at < MAX_TOKENS * ROW; at++) assert_int_equal(replayed[at], 0xffff);
    }
    fv_graph_destroy(side->device, graph);
}

static void test_replays_equal_plain_launches(void **state)
{
    (void)state;
    static const char *const backends[] = {"TRITON_ATTN", "ROCM_AITER_UNIFIED_ATTN", "ROCM_ATTN", "ROCM_AITER_FA"};
    fv_context *context = NULL;
    gpu_side side = {0};
    must(fv_context_create(&context, NULL));
    if (fv_device_find(&side.device, context, "cuda") != FV_OK) {
        fv_context_destroy(context);
        skip();
    }
    for (int32_t i = 0; i < 4; i++) {
        for (int32_t query_len = 1; query_len <= MAX_QUERY; query_len += MAX_QUERY - 1) {
            open_side(&side, context, backends[i]);
            replay_steps(&side, query_len);
            close_side(&side);
        }
    }
    fv_context_destroy(context);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_replays_equal_plain_launches)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
