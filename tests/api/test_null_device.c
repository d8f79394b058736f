/* The device side of the API on the null device: memory that the host cannot read, streams that run
 * late, captured graphs. The CPU with the same kernels and the same schedule is the yardstick: equal
 * bits. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "core/context.h"
#include "fovea/fovea.h"
#include "null_device/null_device.h"
#include "planner/plan.h"

enum {
    HEADS = 6,
    KV_HEADS = 2,
    HEAD_SIZE = 32,
    BLOCK_SIZE = 5,
    NUM_BLOCKS = 120,
    TABLE_WIDTH = 24,
    MAX_SEQS = 4,
    MAX_TOKENS = 24,
    MAX_SEQ_LEN = TABLE_WIDTH * BLOCK_SIZE,
    Q_FLOATS = MAX_TOKENS * HEADS * HEAD_SIZE,
    KV_FLOATS = MAX_TOKENS * KV_HEADS * HEAD_SIZE,
    CACHE_FLOATS = NUM_BLOCKS * 2 * BLOCK_SIZE * KV_HEADS * HEAD_SIZE,
};

/* One step's inputs on the host. */
typedef struct step_arrays {
    int32_t num_seqs, num_tokens;
    int32_t query_start[MAX_SEQS + 1];
    int32_t seq_lens[MAX_SEQS];
    int32_t block_table[MAX_SEQS * TABLE_WIDTH];
    int64_t slot_mapping[MAX_TOKENS];
    float q[Q_FLOATS];
    float k[KV_FLOATS];
    float v[KV_FLOATS];
} step_arrays;

/* The same on a device, with cache, results and plan. */
typedef struct device_side {
    fv_device *device;
    fv_plan *plan;
    fv_stream stream;
    step_arrays *arrays;
    float *cache;
    float *out;
    void *workspace;
} device_side;

static void must(fv_status status)
{
    if (status != FV_OK) fail_msg("%s: %s", fv_status_name(status), fv_last_error());
}

static uint32_t next_random(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static float next_float(uint32_t *state) { return (float)(next_random(state) % 2001) / 1000.0f - 1.0f; }

/* A step of sequences with the given query and sequence lengths; blocks are dealt out by sequence id. */
static void make_step(step_arrays *step, int32_t num_seqs, const int32_t *ids, const int32_t *query_lens,
                      const int32_t *seq_lens, uint32_t seed)
{
    memset(step, 0, sizeof(*step));
    step->num_seqs = num_seqs;
    for (int32_t i = 0; i < MAX_SEQS * TABLE_WIDTH; i++) step->block_table[i] = -1000000 - i; /* wild padding */
    for (int32_t seq = 0; seq < num_seqs; seq++) {
        step->query_start[seq + 1] = step->query_start[seq] + query_lens[seq];
        step->seq_lens[seq] = seq_lens[seq];
        for (int32_t i = 0; i * BLOCK_SIZE < seq_lens[seq]; i++) {
            step->block_table[seq * TABLE_WIDTH + i] = 1 + ids[seq] * TABLE_WIDTH + (i * 7) % TABLE_WIDTH;
        }
        for (int32_t t = 0; t < query_lens[seq]; t++) {
            const int32_t position = seq_lens[seq] - query_lens[seq] + t;
            const int32_t block = step->block_table[seq * TABLE_WIDTH + position / BLOCK_SIZE];
            step->slot_mapping[step->query_start[seq] + t] = (int64_t)block * BLOCK_SIZE + position % BLOCK_SIZE;
        }
    }
    step->num_tokens = step->query_start[num_seqs];
    for (int32_t i = 0; i < Q_FLOATS; i++) step->q[i] = next_float(&seed);
    for (int32_t i = 0; i < KV_FLOATS; i++) step->k[i] = next_float(&seed);
    for (int32_t i = 0; i < KV_FLOATS; i++) step->v[i] = next_float(&seed);
}

static fv_batch batch_of(const step_arrays *at, const step_arrays *host, int32_t with_host_copies)
{
    return (fv_batch){
        .struct_size = sizeof(fv_batch),
        .num_seqs = host->num_seqs,
        .num_tokens = host->num_tokens,
        .query_start = at->query_start,
        .seq_lens = at->seq_lens,
        .block_table = at->block_table,
        .block_table_stride = TABLE_WIDTH,
        .block_table_width = TABLE_WIDTH,
        .slot_mapping = at->slot_mapping,
        .host_query_start = with_host_copies ? host->query_start : NULL,
        .host_seq_lens = with_host_copies ? host->seq_lens : NULL,
    };
}

static fv_layer layer_of(device_side *side)
{
    fv_layer layer = {
        .struct_size = sizeof(layer),
        .q = fv_tensor_3d(side->arrays->q, FV_DTYPE_F32, MAX_TOKENS, HEADS, HEAD_SIZE),
        .k = fv_tensor_3d(side->arrays->k, FV_DTYPE_F32, MAX_TOKENS, KV_HEADS, HEAD_SIZE),
        .v = fv_tensor_3d(side->arrays->v, FV_DTYPE_F32, MAX_TOKENS, KV_HEADS, HEAD_SIZE),
        .out = fv_tensor_3d(side->out, FV_DTYPE_F32, MAX_TOKENS, HEADS, HEAD_SIZE),
    };
    must(fv_kv_view_init(&layer.kv_cache, side->cache, FV_KV_LAYOUT_NB_2_BS_H_D, FV_DTYPE_F32, NUM_BLOCKS, BLOCK_SIZE,
                         KV_HEADS, HEAD_SIZE));
    return layer;
}

static void open_side(device_side *side, fv_context *context, const char *device, const char *kernels,
                      int32_t static_grid)
{
    const fv_problem problem = {
        .struct_size = sizeof(problem),
        .kind = FV_ATTENTION_MHA,
        .mha = {HEADS, KV_HEADS, HEAD_SIZE, 0},
        .q_dtype = FV_DTYPE_F32,
        .block_size = BLOCK_SIZE,
        .kv_layout = FV_KV_LAYOUT_NB_2_BS_H_D,
    };
    const fv_bounds bounds = {sizeof(bounds), MAX_SEQS, MAX_TOKENS, 0, MAX_SEQ_LEN};
    must(fv_device_find(&side->device, context, device));
    const fv_plan_options options = {.struct_size = sizeof(options),
                                     .device = side->device,
                                     .kernels = kernels,
                                     .static_grid = static_grid,
                                     .path = FV_PATH_3D,
                                     .segment_keys = 32};
    must(fv_plan_create(&side->plan, context, &problem, &bounds, &options));
    must(fv_stream_create(&side->stream, side->device));
    must(fv_device_alloc((void **)&side->arrays, side->device, sizeof(step_arrays)));
    must(fv_device_alloc((void **)&side->cache, side->device, CACHE_FLOATS * sizeof(float)));
    must(fv_device_alloc((void **)&side->out, side->device, Q_FLOATS * sizeof(float)));
    must(fv_device_alloc(&side->workspace, side->device, fv_plan_workspace_bytes(side->plan)));
    must(fv_device_fill(side->device, side->cache, 0, CACHE_FLOATS * sizeof(float), side->stream));
    must(fv_device_fill(side->device, side->out, 0, Q_FLOATS * sizeof(float), side->stream));
    must(fv_stream_synchronize(side->device, side->stream));
}

static void close_side(device_side *side)
{
    fv_plan_destroy(side->plan);
    fv_device_free(side->device, side->arrays);
    fv_device_free(side->device, side->cache);
    fv_device_free(side->device, side->out);
    fv_device_free(side->device, side->workspace);
    fv_stream_destroy(side->device, side->stream);
}

static void send_step(device_side *side, const step_arrays *host, int32_t with_host_copies)
{
    must(fv_device_copy_in(side->device, side->arrays, host, sizeof(*host), side->stream));
    const fv_batch batch = batch_of(side->arrays, host, with_host_copies);
    must(fv_plan_update(side->plan, &batch, side->stream));
}

static void run(device_side *side)
{
    const fv_layer layer = layer_of(side);
    must(fv_plan_run(side->plan, &layer, side->workspace, side->stream));
}

static void fetch(device_side *side, float *out)
{
    must(fv_device_copy_out(side->device, out, side->out, Q_FLOATS * sizeof(float), side->stream));
    must(fv_stream_synchronize(side->device, side->stream));
}

static const fv_null_counters *counters_of(const fv_device *device) { return device->state; }

static const fv_null_counters *counters(const device_side *side) { return counters_of(side->device); }

static fv_context *open_context(void)
{
    fv_context *context = NULL;
    must(fv_context_create(&context, NULL));
    return context;
}

static void assert_same_bits(const float *a, const float *b, int32_t num_tokens)
{
    assert_memory_equal(a, b, (size_t)num_tokens * HEADS * HEAD_SIZE * sizeof(float));
}

/* Lengths known on the device only, and lengths known on both sides. */
static void test_plain_launches_equal_the_cpu(void **state)
{
    (void)state;
    fv_context *context = open_context();
    static step_arrays step;
    static float on_null[Q_FLOATS], on_cpu[Q_FLOATS];
    for (int32_t with_copies = 0; with_copies < 2; with_copies++) {
        device_side null = {0}, cpu = {0};
        open_side(&null, context, "null", NULL, 0);
        open_side(&cpu, context, "cpu", "reference", !with_copies);
        make_step(&step, 3, (int32_t[]){0, 1, 2}, (int32_t[]){1, 9, 0}, (int32_t[]){101, 64, 7}, 1);
        send_step(&null, &step, with_copies);
        send_step(&cpu, &step, with_copies);
        run(&null);
        run(&cpu);
        fetch(&null, on_null);
        fetch(&cpu, on_cpu);
        assert_same_bits(on_null, on_cpu, step.num_tokens);
        assert_true(on_null[0] != 0);
        close_side(&null);
        close_side(&cpu);
    }
    fv_context_destroy(context);
}

/* One captured graph serves steps in which sequences grow, join and leave. */
static void test_graph_replay_over_200_steps(void **state)
{
    (void)state;
    fv_context *context = open_context();
    device_side null = {0}, cpu = {0};
    open_side(&null, context, "null", NULL, 1);
    open_side(&cpu, context, "cpu", "reference", 1);
    static step_arrays step;
    static float on_null[Q_FLOATS], on_cpu[Q_FLOATS];
    make_step(&step, 1, (int32_t[]){0}, (int32_t[]){1}, (int32_t[]){1}, 0);
    send_step(&null, &step, 0);
    must(fv_graph_begin(null.device, null.stream));
    run(&null);
    fv_graph graph = NULL;
    must(fv_graph_end(&graph, null.device, null.stream));
    const uint64_t key = fv_plan_graph_key(null.plan);

    int32_t lens[MAX_SEQS] = {0};
    uint32_t random = 7;
    for (int32_t i = 0; i < 200; i++) {
        int32_t ids[MAX_SEQS], query_lens[MAX_SEQS], seq_lens[MAX_SEQS], num_seqs = 0;
        for (int32_t id = 0; id < MAX_SEQS; id++) {
            if (lens[id] > 0 && next_random(&random) % 16 == 0) lens[id] = 0; /* leaves */
            if (lens[id] == 0 && next_random(&random) % 4 != 0) continue;     /* joins now and then */
            const int32_t query_len = 1 + (int32_t)(next_random(&random) % 5);
            if (lens[id] + query_len > MAX_SEQ_LEN) lens[id] = 0;
            lens[id] += query_len;
            ids[num_seqs] = id;
            query_lens[num_seqs] = query_len;
            seq_lens[num_seqs++] = lens[id];
        }
        make_step(&step, num_seqs, ids, query_lens, seq_lens, (uint32_t)i);
        send_step(&null, &step, 0);
        send_step(&cpu, &step, 0);
        assert_true(fv_plan_graph_key(null.plan) == key);
        must(fv_graph_launch(null.device, graph, null.stream));
        run(&cpu);
        fetch(&null, on_null);
        fetch(&cpu, on_cpu);
        assert_same_bits(on_null, on_cpu, step.num_tokens);
    }
    fv_graph_destroy(null.device, graph);
    close_side(&null);
    close_side(&cpu);
    fv_context_destroy(context);
}

/* A graph would copy staging memory that is another step's by the time it is launched. A refusal costs nothing. */
static void test_updates_are_not_captured(void **state)
{
    (void)state;
    fv_context *context = open_context();
    device_side null = {0}, cpu = {0};
    static step_arrays step;
    static float on_null[Q_FLOATS], on_cpu[Q_FLOATS];
    open_side(&null, context, "null", NULL, 1);
    open_side(&cpu, context, "cpu", "reference", 1);
    make_step(&step, 2, (int32_t[]){0, 1}, (int32_t[]){1, 4}, (int32_t[]){90, 30}, 3);
    const fv_batch batch = batch_of(null.arrays, &step, 0);
    send_step(&null, &step, 0);
    const int64_t num_copies = counters(&null)->num_copies;
    must(fv_graph_begin(null.device, null.stream));
    for (int32_t i = 0; i < FV_STAGING_RING; i++) {
        assert_int_equal(fv_plan_update(null.plan, &batch, null.stream), FV_ERR_INVALID);
        assert_non_null(strstr(fv_last_error(), "a stream that is being captured; accepted: before fv_graph_begin"));
    }
    fv_graph graph = NULL;
    assert_int_equal(fv_graph_end(&graph, null.device, null.stream), FV_ERR_DEVICE); /* nothing was sent */
    assert_int_equal(counters(&null)->num_copies, num_copies);
    for (int32_t i = 0; i < 2 * FV_STAGING_RING; i++) {
        make_step(&step, 2, (int32_t[]){0, 1}, (int32_t[]){1, 4}, (int32_t[]){90 - i, 30 + i}, 3);
        send_step(&null, &step, 0);
        send_step(&cpu, &step, 0);
        run(&null);
        run(&cpu);
        fetch(&null, on_null);
        fetch(&cpu, on_cpu);
        assert_same_bits(on_null, on_cpu, step.num_tokens);
    }
    close_side(&null);
    close_side(&cpu);
    fv_context_destroy(context);
}

/* A host that sends ten steps before any has run: the staging ring must not be filled too early. The
 * schedule of each step must be right, so each writes to an output of its own. */
static void test_host_runs_ahead(void **state)
{
    (void)state;
    enum { NUM_STEPS = 10 };
    fv_context *context = open_context();
    device_side null = {0}, cpu = {0};
    open_side(&null, context, "null", NULL, 0);
    open_side(&cpu, context, "cpu", "reference", 0);
    step_arrays *steps = calloc(NUM_STEPS, sizeof(*steps));
    device_side each[NUM_STEPS];
    const int64_t waits_before = counters(&null)->num_event_waits;
    for (int32_t i = 0; i < NUM_STEPS; i++) {
        each[i] = null;
        must(fv_device_alloc((void **)&each[i].arrays, null.device, sizeof(step_arrays)));
        must(fv_device_alloc((void **)&each[i].out, null.device, Q_FLOATS * sizeof(float)));
        make_step(&steps[i], 1 + i % 3, (int32_t[]){0, 1, 2}, (int32_t[]){1 + i % 2, 3, 2},
                  (int32_t[]){20 + 9 * i, 10 + i, 2 + i}, 100u + (uint32_t)i);
    }
    for (int32_t i = 0; i < NUM_STEPS; i++) {
        send_step(&each[i], &steps[i], 1);
        run(&each[i]);
    }
    assert_true(counters(&null)->num_event_waits > waits_before); /* the ring came round */
    static float on_null[Q_FLOATS], on_cpu[Q_FLOATS];
    for (int32_t i = 0; i < NUM_STEPS; i++) {
        send_step(&cpu, &steps[i], 1);
        run(&cpu);
        fetch(&cpu, on_cpu);
        fetch(&each[i], on_null);
        assert_same_bits(on_null, on_cpu, steps[i].num_tokens);
    }
    for (int32_t i = 0; i < NUM_STEPS; i++) {
        fv_device_free(null.device, each[i].arrays);
        fv_device_free(null.device, each[i].out);
    }
    free(steps);
    close_side(&null);
    close_side(&cpu);
    fv_context_destroy(context);
}

/* A run launches and nothing else; an update whose parts lie near each other makes one copy. */
static void test_run_neither_allocates_nor_waits(void **state)
{
    (void)state;
    fv_context *context = open_context();
    device_side null = {0};
    open_side(&null, context, "null", NULL, 0);
    static step_arrays step;
    make_step(&step, 2, (int32_t[]){0, 1}, (int32_t[]){1, 4}, (int32_t[]){90, 30}, 3);
    must(fv_device_copy_in(null.device, null.arrays, &step, sizeof(step), null.stream));
    const fv_batch batch = batch_of(null.arrays, &step, 1);
    const fv_null_counters before = *counters(&null);
    must(fv_plan_update(null.plan, &batch, null.stream));
    assert_int_equal(counters(&null)->num_copies - before.num_copies, 1);
    const fv_null_counters updated = *counters(&null);
    run(&null);
    const fv_null_counters after = *counters(&null);
    assert_int_equal(after.num_launches - updated.num_launches, 3); /* write, attend, reduce */
    assert_int_equal(after.num_allocations, updated.num_allocations);
    assert_int_equal(after.num_synchronizations, updated.num_synchronizations);
    assert_int_equal(after.num_event_waits, updated.num_event_waits);
    assert_int_equal(after.num_copies, updated.num_copies);
    must(fv_stream_synchronize(null.device, null.stream));
    close_side(&null);
    fv_context_destroy(context);
}

static void assert_sent(const fv_plan *plan, size_t offset, size_t bytes)
{
    const fv_step_buffers *buffers = &plan->buffers;
    const int32_t filled = (buffers->next + FV_STAGING_RING - 1) % FV_STAGING_RING;
    char *sent = malloc(bytes);
    assert_non_null(sent);
    must(fv_device_copy_out(buffers->device, sent, buffers->on_device + offset, bytes, NULL));
    must(fv_stream_synchronize(buffers->device, NULL));
    assert_memory_equal(sent, buffers->ring[filled].host + offset, bytes);
    free(sent);
}

/* Bounds for thousands of items: an update of a few sends no more than these, their reductions and their indices. */
static void test_updates_send_what_is_used(void **state)
{
    (void)state;
    fv_context *context = open_context();
    fv_device *device = NULL;
    fv_plan *plan = NULL;
    must(fv_device_find(&device, context, "null"));
    const fv_problem problem = {.struct_size = sizeof(problem),
                                .kind = FV_ATTENTION_MHA,
                                .mha = {32, 8, 128, 0},
                                .q_dtype = FV_DTYPE_F32,
                                .block_size = 16,
                                .kv_layout_any = 1};
    const fv_bounds bounds = {sizeof(bounds), 256, 8192, 0, 131072};
    const fv_plan_options options = {
        .struct_size = sizeof(options), .device = device, .backend = "ROCM_AITER_FA", .path = FV_PATH_3D};
    must(fv_plan_create(&plan, context, &problem, &bounds, &options));
    static const int32_t query_start[] = {0, 1, 101}, seq_lens[] = {20000, 3000};
    void *memory = NULL;
    must(fv_device_alloc(&memory, device, 4096));
    const fv_batch batch = {.struct_size = sizeof(batch),
                            .num_seqs = 2,
                            .num_tokens = 101,
                            .query_start = memory,
                            .seq_lens = memory,
                            .block_table = memory,
                            .block_table_stride = 8192,
                            .block_table_width = 8192,
                            .slot_mapping = memory,
                            .host_query_start = query_start,
                            .host_seq_lens = seq_lens};
    const int64_t before = counters_of(device)->num_copied_bytes;
    must(fv_plan_update(plan, &batch, NULL));
    const fv_step_sizes *used = &plan->used;
    assert_true(used->num_items > 0 && used->num_reduces > 0 && used->num_indices > 0);
    const size_t items = (size_t)used->num_items * sizeof(fv_work_item);
    const size_t reduces = (size_t)used->num_reduces * sizeof(fv_reduce_item);
    const size_t indices = (size_t)used->num_indices * sizeof(int32_t);
    const size_t sent = (size_t)(counters_of(device)->num_copied_bytes - before);
    assert_in_range(sent, items + reduces + indices, items + reduces + indices + (2 << 16));
    assert_true(plan->buffers.bytes > 1 << 20);
    const fv_step_view view = fv_step_buffers_on_device(&plan->buffers);
    assert_sent(plan, 0, sizeof(fv_step_header) + items);
    assert_sent(plan, (size_t)((char *)view.reduces - plan->buffers.on_device), reduces);
    assert_sent(plan, (size_t)((char *)view.indices - plan->buffers.on_device), indices);
    fv_device_free(device, memory);
    fv_plan_destroy(plan);
    fv_context_destroy(context);
}

/* The single operations on a device: a write, read back by a gather; two states merged. */
static void test_single_operations(void **state)
{
    (void)state;
    fv_context *context = open_context();
    device_side null = {0};
    open_side(&null, context, "null", NULL, 0);
    static step_arrays step;
    static float back[KV_FLOATS], back_v[KV_FLOATS];
    make_step(&step, 1, (int32_t[]){1}, (int32_t[]){11}, (int32_t[]){11}, 5);
    must(fv_device_copy_in(null.device, null.arrays, &step, sizeof(step), null.stream));
    const fv_layer layer = layer_of(&null);
    must(fv_kv_write(null.device, &layer.kv_cache, &layer.k, &layer.v, null.arrays->slot_mapping, 11, NULL, NULL, 0,
                     null.stream));
    float *gathered = NULL;
    int32_t *lengths = NULL; /* key_start[1], out_start[2] */
    must(fv_device_alloc((void **)&gathered, null.device, 2 * KV_FLOATS * sizeof(float)));
    must(fv_device_alloc((void **)&lengths, null.device, 3 * sizeof(int32_t)));
    const int32_t host_lengths[3] = {2, 0, 9};
    must(fv_device_copy_in(null.device, lengths, host_lengths, sizeof(host_lengths), null.stream));
    const fv_tensor k = fv_tensor_3d(gathered, FV_DTYPE_F32, 9, KV_HEADS, HEAD_SIZE);
    const fv_tensor v = fv_tensor_3d(gathered + KV_FLOATS, FV_DTYPE_F32, 9, KV_HEADS, HEAD_SIZE);
    const fv_batch batch = batch_of(null.arrays, &step, 0);
    must(fv_kv_gather(null.device, &k, &v, &layer.kv_cache, &batch, lengths, lengths + 1, 9, NULL, NULL, 0,
                      null.stream));
    const size_t bytes = 9 * KV_HEADS * HEAD_SIZE * sizeof(float);
    must(fv_device_copy_out(null.device, back, gathered, bytes, null.stream));
    must(fv_device_copy_out(null.device, back_v, gathered + KV_FLOATS, bytes, null.stream));
    must(fv_stream_synchronize(null.device, null.stream));
    assert_memory_equal(back, step.k + 2 * KV_HEADS * HEAD_SIZE, bytes);
    assert_memory_equal(back_v, step.v + 2 * KV_HEADS * HEAD_SIZE, bytes);

    const float lse[2] = {0.0f, 0.0f}; /* equal weights: the mean of a and b */
    must(fv_device_copy_in(null.device, null.workspace, lse, sizeof(lse), null.stream));
    const fv_tensor a = fv_tensor_3d(gathered, FV_DTYPE_F32, 1, KV_HEADS, HEAD_SIZE);
    const fv_tensor b = fv_tensor_3d(gathered + KV_FLOATS, FV_DTYPE_F32, 1, KV_HEADS, HEAD_SIZE);
    const fv_tensor lses = fv_tensor_2d(null.workspace, FV_DTYPE_F32, 1, KV_HEADS);
    must(fv_merge_states(null.device, &a, NULL, &a, &lses, &b, &lses, NULL, null.stream));
    must(fv_device_copy_out(null.device, back, gathered, bytes, null.stream));
    must(fv_stream_synchronize(null.device, null.stream));
    assert_float_equal(back[0], (step.k[2 * KV_HEADS * HEAD_SIZE] + step.v[2 * KV_HEADS * HEAD_SIZE]) / 2, 1e-6);
    fv_device_free(null.device, gathered);
    fv_device_free(null.device, lengths);
    close_side(&null);
    fv_context_destroy(context);
}

/* Kernels of a GPU fault at elements that are not whole; those of the CPU take them. */
static void test_elements_are_aligned(void **state)
{
    (void)state;
    fv_context *context = open_context();
    device_side null = {0};
    static step_arrays step;
    open_side(&null, context, "null", NULL, 0);
    make_step(&step, 2, (int32_t[]){0, 1}, (int32_t[]){1, 4}, (int32_t[]){90, 30}, 3);
    send_step(&null, &step, 1);
    fv_layer layer;
#define REFUSED(change, says)                                                                      \
    layer = layer_of(&null);                                                                       \
    layer.change;                                                                                  \
    assert_int_equal(fv_plan_run(null.plan, &layer, null.workspace, null.stream), FV_ERR_INVALID); \
    if (!strstr(fv_last_error(), says)) fail_msg("'%s' lacks '%s'", fv_last_error(), says)
    REFUSED(q.data = (char *)layer.q.data + 2, "accepted on null:0: multiples of 4 bytes");
    REFUSED(out.stride_bytes[0] += 6, "out has a stride of 774 bytes; accepted on null:0: multiples of 4");
    REFUSED(k.stride_bytes[1] = 129, "k has a stride of 129 bytes");
    REFUSED(kv_cache.k.data = (char *)layer.kv_cache.k.data + 1, "K of the KV cache is at ");
    REFUSED(kv_cache.v.slot_stride += 2, "V of the KV cache has a stride of 258 bytes");
    REFUSED(kv_cache.v.block_stride += 1, "V of the KV cache has a stride of 2561 bytes");
#undef REFUSED
    layer = layer_of(&null);
    layer.k.shape[0] = 1; /* its stride does not count */
    layer.k.stride_bytes[0] = layer.v.stride_bytes[1] = 130;
    must(fv_kv_view_init(&layer.kv_cache, null.cache, FV_KV_LAYOUT_NB_2_BS_H_D, FV_DTYPE_F32, 2, 1, KV_HEADS,
                         HEAD_SIZE));
    assert_int_equal(fv_kv_write(null.device, &layer.kv_cache, &layer.k, &layer.v, null.arrays->slot_mapping, 1, NULL,
                                 NULL, 0, null.stream),
                     FV_ERR_INVALID);
    assert_non_null(strstr(fv_last_error(), "v has a stride of 130 bytes"));

    fv_kv_view entries;
    char *at = (char *)null.cache + 4;
    const fv_tensor latents = fv_tensor_3d(null.arrays->k, FV_DTYPE_F32, 0, 1, 576);
    must(fv_kv_view_init(&entries, at, FV_KV_LAYOUT_LATENT_FP8_DS, FV_DTYPE_F8_E4M3, 4, 16, 1, 576));
    must(fv_kv_write(null.device, &entries, &latents, NULL, NULL, 0, NULL, NULL, 0, null.stream));
    entries.k.slot_stride += 2; /* one byte suffices to e4m3, not to the scales beside it */
    assert_int_equal(fv_kv_write(null.device, &entries, &latents, NULL, NULL, 0, NULL, NULL, 0, null.stream),
                     FV_ERR_INVALID);
    assert_non_null(strstr(fv_last_error(), "K of the KV cache has a stride of 658 bytes; accepted on null:0: "
                                            "multiples of 4"));
    fv_device *cpu = NULL;
    must(fv_device_find(&cpu, context, "cpu"));
    must(fv_kv_write(cpu, &entries, &latents, NULL, NULL, 0, NULL, NULL, 0, NULL));
    must(fv_stream_synchronize(null.device, null.stream));
    close_side(&null);
    fv_context_destroy(context);
}

/* MLA of up to `max_num_tokens` tokens; workspace 0: the planner's choice. */
static fv_status make_mla_plan(fv_plan **plan, fv_context *context, fv_device *device, int32_t max_num_tokens,
                               size_t workspace, int32_t static_grid)
{
    const fv_problem problem = {
        .struct_size = sizeof(problem),
        .kind = FV_ATTENTION_MLA,
        .mla = {16, 64, 32, 32, 32, 0, 0},
        .q_dtype = FV_DTYPE_F32,
        .block_size = BLOCK_SIZE,
        .kv_layout = FV_KV_LAYOUT_LATENT,
    };
    const fv_bounds bounds = {sizeof(bounds), 1, max_num_tokens, 0, MAX_SEQ_LEN};
    const fv_plan_options options = {
        .struct_size = sizeof(options), .device = device, .static_grid = static_grid, .max_workspace_bytes = workspace};
    return fv_plan_create(plan, context, &problem, &bounds, &options);
}

/* Without host lengths all tokens are absorbed at once: no more than the workspace has rows for. */
static void test_absorbed_tokens_have_room(void **state)
{
    (void)state;
    enum { TOKENS = 100 };
    fv_context *context = open_context();
    fv_device *device = NULL;
    fv_plan *plan = NULL;
    static step_arrays step;
    must(fv_device_find(&device, context, "null"));
    assert_int_equal(make_mla_plan(&plan, context, device, TOKENS, 1, 0), FV_ERR_INVALID);
    const size_t least = (size_t)strtoull(strstr(fv_last_error(), "or from ") + strlen("or from "), NULL, 10);
    for (int32_t static_grid = 0; static_grid < 2; static_grid++) {
        must(make_mla_plan(&plan, context, device, TOKENS, static_grid ? 0 : least, static_grid));
        const int32_t most = static_grid ? TOKENS : plan->absorb_rows;
        assert_int_equal(plan->absorb_rows, most);
        make_step(&step, 1, (int32_t[]){0}, (int32_t[]){1}, (int32_t[]){TOKENS}, 1);
        step.num_tokens = step.query_start[1] = most;
        fv_batch batch = batch_of(&step, &step, 0);
        must(fv_plan_update(plan, &batch, NULL));
        if (!static_grid) {
            step.query_start[1] = batch.num_tokens = most + 1;
            assert_int_equal(fv_plan_update(plan, &batch, NULL), FV_ERR_INVALID);
            assert_non_null(strstr(fv_last_error(), "a batch of 17 tokens without host_query_start, host_seq_lens"));
            batch.host_query_start = step.query_start;
            batch.host_seq_lens = step.seq_lens;
            must(fv_plan_update(plan, &batch, NULL));
        }
        fv_plan_destroy(plan);
    }
    fv_context_destroy(context);
}

/* NULL, a dtype, a pointer and strides that kernels would follow; all but the last strides count. */
static void test_products_are_refused(void **state)
{
    (void)state;
    fv_context *context = open_context();
    fv_device *device = NULL;
    void *memory = NULL;
    must(fv_device_find(&device, context, "null"));
    must(fv_device_alloc(&memory, device, 4096));
    must(fv_device_fill(device, memory, 0, 4096, NULL));
    const fv_gemm plain = {.struct_size = sizeof(plain),
                           .num_matrices = 2,
                           .m = 2,
                           .n = 4,
                           .k = 8,
                           .b_is_transposed = 1,
                           .a_dtype = FV_DTYPE_BF16,
                           .b_dtype = FV_DTYPE_BF16,
                           .c_dtype = FV_DTYPE_F32,
                           .a = memory,
                           .a_row_stride = 16,
                           .a_matrix_stride = 32,
                           .b = memory,
                           .b_row_stride = 16,
                           .b_matrix_stride = 64,
                           .c = (char *)memory + 1024,
                           .c_row_stride = 16,
                           .c_matrix_stride = 32};
    fv_gemm gemm = plain;
    must(fv_device_gemm(device, &gemm, NULL));
#define REFUSED(change, says)                                              \
    gemm = plain;                                                          \
    gemm.change;                                                           \
    assert_int_equal(fv_device_gemm(device, &gemm, NULL), FV_ERR_INVALID); \
    if (!strstr(fv_last_error(), says)) fail_msg("'%s' lacks '%s'", fv_last_error(), says)
    REFUSED(m = -1, "m -1, n 4, k 8; accepted: 0 or more");
    REFUSED(num_matrices = -3, "fv_gemm of -3 products");
    REFUSED(a = NULL, "accepted: multiples of 2 bytes (bfloat16), not NULL");
    REFUSED(b = (char *)memory + 1, "fv_gemm.b is ");
    REFUSED(c = (char *)memory + 2, "accepted: multiples of 4 bytes (float32)");
    REFUSED(a_dtype = (fv_dtype)77, "fv_gemm.a_dtype is 77");
    REFUSED(b_dtype = FV_DTYPE_NONE, "fv_gemm.b_dtype is 0");
    REFUSED(c_dtype = (fv_dtype)-1, "fv_gemm.c_dtype is -1; accepted: the values of fv_dtype but 0 (none)");
    REFUSED(a_row_stride = 17, "fv_gemm.a_row_stride is 17 and a_matrix_stride 32; accepted: multiples of 2 bytes");
    REFUSED(b_matrix_stride = 65, "b_matrix_stride 65");
    REFUSED(c_row_stride = 18, "fv_gemm.c_row_stride is 18");
#undef REFUSED
    gemm = plain;
    gemm.m = gemm.num_matrices = 1;
    gemm.a_row_stride = gemm.c_row_stride = gemm.a_matrix_stride = gemm.b_matrix_stride = 1;
    must(fv_device_gemm(device, &gemm, NULL));
    gemm = (fv_gemm){.struct_size = sizeof(gemm), .num_matrices = 1, .n = 4, .k = 8};
    must(fv_device_gemm(device, &gemm, NULL)); /* nothing to do */
    must(fv_stream_synchronize(device, NULL));
    fv_device_free(device, memory);
    fv_context_destroy(context);
}

/* A device's buffer and the host's, of which there is a ring. */
static void test_buffers_are_counted(void **state)
{
    (void)state;
    fv_context *context = open_context();
    device_side null = {0}, cpu = {0};
    open_side(&null, context, "null", NULL, 0);
    open_side(&cpu, context, "cpu", "reference", 0);
    assert_true(fv_plan_buffer_bytes(null.plan) > (1 + FV_STAGING_RING) * null.plan->buffers.bytes);
    assert_int_equal(fv_plan_buffer_bytes(cpu.plan) - cpu.plan->buffers.bytes,
                     fv_plan_buffer_bytes(null.plan) - (1 + FV_STAGING_RING) * null.plan->buffers.bytes);
    close_side(&null);
    close_side(&cpu);
    fv_context_destroy(context);
}

/* A context with all the devices that it can hold. */
static void test_no_more_devices(void **state)
{
    (void)state;
    fv_context *context = open_context();
    fv_device *device = context->devices[0];
    for (; context->num_devices < FV_MAX_DEVICES; context->num_devices++)
        context->devices[context->num_devices] = device;
    assert_int_equal(fv_device_find(&device, context, "null"), FV_ERR_NO_SPACE);
    assert_null(device);
    context->num_devices = 1;
    fv_context_destroy(context);
}

static void test_plugins_are_refused_with_a_reason(void **state)
{
    (void)state;
    fv_context *context = open_context();
    fv_device *device = NULL;
    assert_int_equal(fv_device_find(&device, context, "stale"), FV_ERR_UNSUPPORTED);
    assert_non_null(strstr(fv_last_error(), "of another day"));
    assert_int_equal(fv_device_find(&device, context, "null:3"), FV_ERR_UNSUPPORTED);
    assert_int_equal(fv_device_find(&device, context, "nosuch"), FV_ERR_UNSUPPORTED);
    assert_non_null(strstr(fv_last_error(), "libfovea-nosuch.so"));
    assert_int_equal(fv_device_find(&device, context, "../x:0"), FV_ERR_INVALID);
    assert_int_equal(fv_device_find(&device, context, "null:"), FV_ERR_INVALID);
    assert_null(device);
    static const char *const no_names[] = {"null:00", "null:+0", "null: 0", "null:-1", "null:1024", "null:0x", NULL};
    for (const char *const *name = no_names; *name; name++) { /* a device has one name */
        device = (fv_device *)(void *)context;
        if (fv_device_find(&device, context, *name) != FV_ERR_INVALID || device) fail_msg("'%s'", *name);
    }
    must(fv_device_find(&device, context, "cpu"));
    assert_int_equal(fv_graph_begin(device, NULL), FV_ERR_UNSUPPORTED);
    fv_graph graph = (fv_graph)(void *)context;
    assert_int_equal(fv_graph_end(&graph, device, NULL), FV_ERR_UNSUPPORTED);
    assert_null(graph);
    fv_context_destroy(context);
}

static void test_an_empty_capture_leaves_no_graph(void **state)
{
    (void)state;
    fv_context *context = open_context();
    fv_device *device = NULL;
    fv_stream stream = NULL;
    must(fv_device_find(&device, context, "null"));
    must(fv_stream_create(&stream, device));
    fv_graph graph = (fv_graph)(void *)context;
    assert_int_equal(fv_graph_end(&graph, device, stream), FV_ERR_DEVICE); /* no capture */
    assert_null(graph);
    graph = (fv_graph)(void *)context;
    must(fv_graph_begin(device, stream));
    assert_int_equal(fv_graph_end(&graph, device, stream), FV_ERR_DEVICE);
    assert_null(graph);
    fv_stream_destroy(device, stream);
    fv_context_destroy(context);
}

/* More than a launch takes are not planned, whatever segment_keys says. */
static void test_segments_of_a_static_grid(void **state)
{
    (void)state;
    fv_context *context = open_context();
    fv_plan *plan = NULL;
    const fv_problem problem = {.struct_size = sizeof(problem),
                                .kind = FV_ATTENTION_MHA,
                                .mha = {1, 1, 32, 0},
                                .q_dtype = FV_DTYPE_F32,
                                .block_size = 16};
    const fv_bounds bounds = {sizeof(bounds), 1, 1, 1, 70000};
    fv_plan_options options = {.struct_size = sizeof(options), .static_grid = 1, .path = FV_PATH_3D, .segment_keys = 1};
    must(fv_device_find(&options.device, context, "null"));
    must(fv_plan_create(&plan, context, &problem, &bounds, &options));
    assert_int_equal(plan->num_segments, 65535);
    fv_plan_destroy(plan);
    fv_context_destroy(context);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plain_launches_equal_the_cpu),
        cmocka_unit_test(test_graph_replay_over_200_steps),
        cmocka_unit_test(test_updates_are_not_captured),
        cmocka_unit_test(test_host_runs_ahead),
        cmocka_unit_test(test_run_neither_allocates_nor_waits),
        cmocka_unit_test(test_updates_send_what_is_used),
        cmocka_unit_test(test_single_operations),
        cmocka_unit_test(test_elements_are_aligned),
        cmocka_unit_test(test_absorbed_tokens_have_room),
        cmocka_unit_test(test_products_are_refused),
        cmocka_unit_test(test_buffers_are_counted),
        cmocka_unit_test(test_no_more_devices),
        cmocka_unit_test(test_plugins_are_refused_with_a_reason),
        cmocka_unit_test(test_an_empty_capture_leaves_no_graph),
        cmocka_unit_test(test_segments_of_a_static_grid),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
