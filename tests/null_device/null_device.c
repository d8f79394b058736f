/* The null device: a plugin without hardware that behaves like a GPU where the API could go wrong.
 *
 *   own address space   device pointers are host pointers with a high bit set, which no CPU can follow:
 *                       host code that reads a device array crashes
 *   deferred streams    nothing runs before a stream or event is waited for, and copies read host memory
 *                       only then: a staging buffer that is filled again too early gives wrong results
 *   graphs              capture records, launch replays the same functions with the same parameters
 *   probes              a clock that counts the events recorded, and a gate that must be open when its turn comes
 *   strictness          allocation or waiting while a stream is captured is an error, and both are counted,
 *                       so that a test can see that a run does neither
 *
 * Its kernels are the reference kernels, and for AMLA, which has none there, the portable ones of the CPU. Loaded as
 * libfovea-null.so, which proves the plugin route. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/device_probes.h"
#include "core/plugin.h"
#include "kernels/cpu/kernels.h"
#include "reference/reference.h"
#include "tests/null_device/null_device.h"

#define DEVICE_BIT (UINT64_C(1) << 62)

typedef struct command command;

/* One command of a stream: a function and a copy of its parameters. */
struct command {
    void (*execute)(fv_device *device, void *params);
    void *params;
    size_t params_bytes;
    command *next;
};

typedef struct queue {
    command *first;
    command **last;
    int32_t capturing;
    struct queue *next_stream; /* list of all streams */
} queue;

typedef struct null_event {
    queue *stream; /* of the last record, NULL: never */
    int64_t recorded, reached;
} null_event;

typedef struct null_state {
    fv_null_counters counters; /* first: tests read it through device->state */
    fv_plugin_host host;
    fv_executor serial;
    queue default_stream;
    queue *streams;
    int64_t next_event;
    char name[32];
} null_state;

static void *to_device(void *host) { return (void *)((uintptr_t)host | DEVICE_BIT); }
static void *to_host(const void *device) { return (void *)((uintptr_t)device & ~DEVICE_BIT); }

static null_state *state_of(fv_device *device) { return device->state; }

/* Several threads may copy and wait, each on a stream of its own. */
static void count(int64_t *counter) { (void)__atomic_add_fetch(counter, 1, __ATOMIC_RELAXED); }

static queue *stream_of(fv_device *device, fv_stream stream)
{
    return stream ? (queue *)stream : &state_of(device)->default_stream;
}

/* --- commands ------------------------------------------------------------------------------------ */

static void queue_init(queue *stream)
{
    *stream = (queue){0};
    stream->last = &stream->first;
}

static void command_free(command *head)
{
    while (head) {
        command *next = head->next;
        free(head->params);
        free(head);
        head = next;
    }
}

static fv_status send(fv_device *device, queue *stream, void (*execute)(fv_device *, void *), const void *params,
                      size_t params_bytes)
{
    command *added = calloc(1, sizeof(*added));
    void *copy = malloc(params_bytes);
    if (!added || !copy) {
        free(added);
        free(copy);
        return state_of(device)->host.fail(FV_ERR_NO_MEMORY, "null device: no memory for a command");
    }
    memcpy(copy, params, params_bytes);
    *added = (command){execute, copy, params_bytes, NULL};
    *stream->last = added;
    stream->last = &added->next;
    return FV_OK;
}

/* Runs what the stream holds, up to and with the command after which *done is set. */
static void drain(fv_device *device, queue *stream, const int64_t *reached, int64_t until)
{
    while (stream->first && !(reached && *reached >= until)) {
        command *head = stream->first;
        stream->first = head->next;
        if (!stream->first) stream->last = &stream->first;
        head->next = NULL;
        head->execute(device, head->params);
        command_free(head);
    }
}

/* --- memory -------------------------------------------------------------------------------------- */

static int32_t any_capture(const null_state *state)
{
    int32_t capturing = state->default_stream.capturing;
    for (const queue *stream = state->streams; stream; stream = stream->next_stream) capturing |= stream->capturing;
    return capturing;
}

static fv_status null_alloc(void **memory, fv_device *device, size_t bytes)
{
    null_state *state = state_of(device);
    if (any_capture(state)) return state->host.fail(FV_ERR_DEVICE, "null device: allocation during capture");
    state->counters.num_allocations++;
    void *host = NULL;
    if (posix_memalign(&host, 256, bytes ? bytes : 1) != 0) {
        return state->host.fail(FV_ERR_NO_MEMORY, "null device: no memory for %zu bytes", bytes);
    }
    memset(host, 0xa5, bytes); /* nobody may count on zeros */
    *memory = to_device(host);
    return FV_OK;
}

static void null_free(fv_device *device, void *memory)
{
    (void)device;
    free(to_host(memory));
}

static fv_status null_alloc_host(void **memory, fv_device *device, size_t bytes)
{
    null_state *state = state_of(device);
    if (any_capture(state)) return state->host.fail(FV_ERR_DEVICE, "null device: allocation during capture");
    state->counters.num_allocations++;
    *memory = malloc(bytes ? bytes : 1);
    return *memory ? FV_OK : state->host.fail(FV_ERR_NO_MEMORY, "null device: no memory for %zu bytes", bytes);
}

static void null_free_host(fv_device *device, void *memory)
{
    (void)device;
    free(memory);
}

typedef struct copy_params {
    void *dst;
    const void *src;
    size_t bytes;
} copy_params;

static void execute_copy(fv_device *device, void *params)
{
    (void)device;
    const copy_params *copy = params;
    memcpy(to_host(copy->dst), to_host(copy->src), copy->bytes);
}

static fv_status null_copy(fv_device *device, void *dst, const void *src, size_t bytes, fv_stream stream)
{
    const copy_params copy = {dst, src, bytes};
    count(&state_of(device)->counters.num_copies);
    __atomic_fetch_add(&state_of(device)->counters.num_copied_bytes, (int64_t)bytes, __ATOMIC_RELAXED);
    return send(device, stream_of(device, stream), execute_copy, &copy, sizeof(copy));
}

typedef struct fill_params {
    void *dst;
    size_t bytes;
    uint8_t value;
} fill_params;

static void execute_fill(fv_device *device, void *params)
{
    (void)device;
    const fill_params *fill = params;
    memset(to_host(fill->dst), fill->value, fill->bytes);
}

static fv_status null_fill(fv_device *device, void *dst, uint8_t value, size_t bytes, fv_stream stream)
{
    const fill_params fill = {dst, bytes, value};
    return send(device, stream_of(device, stream), execute_fill, &fill, sizeof(fill));
}

/* --- streams, events, graphs --------------------------------------------------------------------- */

static fv_status null_stream_create(fv_stream *stream, fv_device *device)
{
    null_state *state = state_of(device);
    queue *created = malloc(sizeof(*created));
    if (!created) return state->host.fail(FV_ERR_NO_MEMORY, "null device: no memory for a stream");
    queue_init(created);
    created->next_stream = state->streams;
    state->streams = created;
    *stream = created;
    return FV_OK;
}

static void null_stream_destroy(fv_device *device, fv_stream stream)
{
    null_state *state = state_of(device);
    queue **link = &state->streams;
    while (*link && *link != stream) link = &(*link)->next_stream;
    if (!*link) return;
    queue *gone = *link;
    *link = gone->next_stream;
    drain(device, gone, NULL, 0);
    free(gone);
}

static fv_status null_stream_synchronize(fv_device *device, fv_stream stream)
{
    null_state *state = state_of(device);
    if (any_capture(state)) return state->host.fail(FV_ERR_DEVICE, "null device: synchronisation during capture");
    count(&state->counters.num_synchronizations);
    drain(device, stream_of(device, stream), NULL, 0);
    return FV_OK;
}

static fv_status null_event_create(fv_event *event, fv_device *device)
{
    *event = calloc(1, sizeof(null_event));
    return *event ? FV_OK : state_of(device)->host.fail(FV_ERR_NO_MEMORY, "null device: no memory for an event");
}

static void null_event_destroy(fv_device *device, fv_event event)
{
    /* A queued record may still point to it. */
    const null_event *ending = event;
    if (ending->stream && ending->reached < ending->recorded) drain(device, ending->stream, NULL, 0);
    free(event);
}

typedef struct record_params {
    null_event *event;
    int64_t number;
} record_params;

static void execute_record(fv_device *device, void *params)
{
    (void)device;
    const record_params *record = params;
    record->event->reached = record->number;
}

static fv_status null_event_record(fv_device *device, fv_event event, fv_stream stream)
{
    null_event *recorded = event;
    recorded->stream = stream_of(device, stream);
    recorded->recorded = ++state_of(device)->next_event;
    const record_params record = {recorded, recorded->recorded};
    return send(device, recorded->stream, execute_record, &record, sizeof(record));
}

static fv_status null_event_synchronize(fv_device *device, fv_event event)
{
    null_state *state = state_of(device);
    null_event *waited = event;
    if (any_capture(state)) return state->host.fail(FV_ERR_DEVICE, "null device: synchronisation during capture");
    state->counters.num_event_waits++;
    if (waited->stream) drain(device, waited->stream, &waited->reached, waited->recorded);
    return FV_OK;
}

static fv_status null_graph_begin(fv_device *device, fv_stream stream)
{
    null_state *state = state_of(device);
    queue *captured = stream_of(device, stream);
    if (captured->capturing) return state->host.fail(FV_ERR_DEVICE, "null device: the stream is being captured");
    drain(device, captured, NULL, 0);
    captured->capturing = 1;
    return FV_OK;
}

static fv_status null_graph_end(fv_graph *graph, fv_device *device, fv_stream stream)
{
    null_state *state = state_of(device);
    queue *captured = stream_of(device, stream);
    if (!captured->capturing) return state->host.fail(FV_ERR_DEVICE, "null device: the stream is not being captured");
    captured->capturing = 0;
    *graph = captured->first;
    captured->first = NULL;
    captured->last = &captured->first;
    return *graph ? FV_OK : state->host.fail(FV_ERR_DEVICE, "null device: nothing was captured");
}

static fv_status null_graph_launch(fv_device *device, fv_graph graph, fv_stream stream)
{
    for (const command *at = graph; at; at = at->next) {
        const fv_status status = send(device, stream_of(device, stream), at->execute, at->params, at->params_bytes);
        if (status != FV_OK) return status;
    }
    return FV_OK;
}

static void null_graph_destroy(fv_device *device, fv_graph graph)
{
    (void)device;
    command_free(graph);
}

static int32_t null_is_capturing(fv_device *device, fv_stream stream) { return stream_of(device, stream)->capturing; }

/* --- kernels: the reference ones on translated pointers ------------------------------------------- */

#define TO_HOST(pointer) ((pointer) = (pointer) ? to_host(pointer) : NULL)

static fv_launch serial_launch(fv_device *device) { return (fv_launch){device, &state_of(device)->serial, NULL}; }

static void cache_to_host(fv_kv_view *cache)
{
    TO_HOST(cache->k.data);
    TO_HOST(cache->v.data);
    TO_HOST(cache->k_scales.data);
    TO_HOST(cache->v_scales.data);
}

static void attend_to_host(fv_attend_params *params)
{
    cache_to_host(&params->cache);
    TO_HOST(params->dense.k);
    TO_HOST(params->dense.v);
    TO_HOST(params->dense.k_shared);
    TO_HOST(params->dense.key_row);
    TO_HOST(params->rotation.cos);
    TO_HOST(params->rotation.sin);
    TO_HOST(params->q);
    TO_HOST(params->out);
    TO_HOST(params->lse);
    TO_HOST(params->sinks);
    TO_HOST(params->alibi_slopes);
    TO_HOST(params->k_scale);
    TO_HOST(params->v_scale);
    TO_HOST(params->num_seqs_at);
    TO_HOST(params->query_start);
    TO_HOST(params->seq_lens);
    TO_HOST(params->block_table);
    TO_HOST(params->causal);
    TO_HOST(params->tree_mask);
    TO_HOST(params->items);
    TO_HOST(params->partial_out);
    TO_HOST(params->partial_max);
    TO_HOST(params->partial_sum);
    TO_HOST(params->scratch);
}

static void execute_attend(fv_device *device, void *params)
{
    fv_attend_params attend = *(fv_attend_params *)params; /* a graph may run it again */
    attend_to_host(&attend);
    const fv_launch launch = serial_launch(device);
    (void)fv_reference_kernels.attend_paged[0].launch(&launch, &attend);
}

static void execute_reduce(fv_device *device, void *params)
{
    fv_reduce_params reduce = *(fv_reduce_params *)params;
    TO_HOST(reduce.out);
    TO_HOST(reduce.lse);
    TO_HOST(reduce.sinks);
    TO_HOST(reduce.items);
    TO_HOST(reduce.num_seqs_at);
    TO_HOST(reduce.query_start);
    TO_HOST(reduce.partial_out);
    TO_HOST(reduce.partial_max);
    TO_HOST(reduce.partial_sum);
    const fv_launch launch = serial_launch(device);
    (void)fv_reference_kernels.reduce_segments(&launch, &reduce);
}

static void write_to_host(fv_kv_write_params *write)
{
    cache_to_host(&write->cache);
    TO_HOST(write->k);
    TO_HOST(write->v);
    TO_HOST(write->slot_mapping);
    TO_HOST(write->num_tokens_at);
    TO_HOST(write->k_scale);
    TO_HOST(write->v_scale);
}

static void execute_write(fv_device *device, void *params)
{
    fv_kv_write_params write = *(fv_kv_write_params *)params;
    write_to_host(&write);
    const fv_launch launch = serial_launch(device);
    (void)fv_reference_kernels.kv_write(&launch, &write);
}

static void execute_gather(fv_device *device, void *params)
{
    fv_kv_gather_params gather = *(fv_kv_gather_params *)params;
    cache_to_host(&gather.cache);
    TO_HOST(gather.k);
    TO_HOST(gather.v);
    TO_HOST(gather.block_table);
    TO_HOST(gather.key_start);
    TO_HOST(gather.out_start);
    TO_HOST(gather.k_scale);
    TO_HOST(gather.v_scale);
    const fv_launch launch = serial_launch(device);
    (void)fv_reference_kernels.kv_gather(&launch, &gather);
}

static void execute_merge(fv_device *device, void *params)
{
    fv_merge_params merge = *(fv_merge_params *)params;
    TO_HOST(merge.out);
    TO_HOST(merge.lse);
    TO_HOST(merge.a.out);
    TO_HOST(merge.a.lse);
    TO_HOST(merge.b.out);
    TO_HOST(merge.b.lse);
    TO_HOST(merge.sinks);
    const fv_launch launch = serial_launch(device);
    (void)fv_reference_kernels.merge_states(&launch, &merge);
}

static void execute_merge_ranks(fv_device *device, void *params)
{
    fv_merge_ranks_params merge = *(fv_merge_ranks_params *)params;
    TO_HOST(merge.out);
    TO_HOST(merge.lse);
    TO_HOST(merge.ranks.out);
    TO_HOST(merge.ranks.lse);
    TO_HOST(merge.total_lse);
    TO_HOST(merge.sinks);
    const fv_launch launch = serial_launch(device);
    (void)fv_reference_kernels.merge_ranks(&launch, &merge);
}

static void execute_kv_copy(fv_device *device, void *params)
{
    fv_kv_copy_params copy = *(fv_kv_copy_params *)params;
    cache_to_host(&copy.dst);
    cache_to_host(&copy.src);
    TO_HOST(copy.dst_blocks);
    TO_HOST(copy.src_blocks);
    const fv_launch launch = serial_launch(device);
    (void)fv_reference_kernels.kv_copy(&launch, &copy);
}

static void rope_to_host(fv_rope_params *rope)
{
    TO_HOST(rope->q.data);
    TO_HOST(rope->k.data);
    TO_HOST(rope->cos);
    TO_HOST(rope->sin);
    TO_HOST(rope->positions_32);
    TO_HOST(rope->positions_64);
    TO_HOST(rope->num_tokens_at);
}

static void execute_rope(fv_device *device, void *params)
{
    fv_rope_params rope = *(fv_rope_params *)params;
    rope_to_host(&rope);
    const fv_launch launch = serial_launch(device);
    (void)fv_reference_kernels.rope(&launch, &rope);
}

static void execute_rope_kv_write(fv_device *device, void *params)
{
    fv_rope_kv_write_params fused = *(fv_rope_kv_write_params *)params;
    rope_to_host(&fused.rope);
    write_to_host(&fused.write);
    TO_HOST(fused.q_copy.data);
    const fv_launch launch = serial_launch(device);
    (void)fv_reference_kernels.rope_kv_write(&launch, &fused);
}

static void execute_attend_dense(fv_device *device, void *params)
{
    fv_attend_params attend = *(fv_attend_params *)params;
    attend_to_host(&attend);
    const fv_launch launch = serial_launch(device);
    (void)fv_reference_kernels.attend_dense[0].launch(&launch, &attend);
}

static void execute_rms_norm(fv_device *device, void *params)
{
    fv_rms_norm_params norm = *(fv_rms_norm_params *)params;
    TO_HOST(norm.rows);
    TO_HOST(norm.weight);
    const fv_launch launch = serial_launch(device);
    (void)fv_reference_kernels.rms_norm(&launch, &norm);
}

static void execute_copy_rows(fv_device *device, void *params)
{
    fv_copy_rows_params copy = *(fv_copy_rows_params *)params;
    TO_HOST(copy.dst);
    TO_HOST(copy.src);
    const fv_launch launch = serial_launch(device);
    (void)fv_reference_kernels.copy_rows(&launch, &copy);
}

static void execute_mla_decode(fv_device *device, void *params)
{
    fv_attend_params attend = *(fv_attend_params *)params;
    attend_to_host(&attend);
    const fv_launch launch = serial_launch(device);
    (void)fv_reference_kernels.mla_decode[0].launch(&launch, &attend);
}

/* The portable variant that rescales so. */
static const fv_attend_variant *find_amla(fv_rescaling rescaling)
{
    const fv_attend_variant *variant = fv_mla_decode_portable;
    while (variant->rescaling != rescaling) variant++;
    return variant;
}

typedef struct amla_params {
    fv_attend_params attend;
    fv_rescaling rescaling;
} amla_params;

static void execute_amla(fv_device *device, void *params)
{
    amla_params amla = *(amla_params *)params;
    attend_to_host(&amla.attend);
    const fv_launch launch = serial_launch(device);
    (void)find_amla(amla.rescaling)->launch(&launch, &amla.attend);
}

static void execute_gemm(fv_device *device, void *params)
{
    (void)device;
    fv_gemm gemm = *(fv_gemm *)params;
    TO_HOST(gemm.a);
    TO_HOST(gemm.b);
    TO_HOST(gemm.c);
    fv_reference_gemm(&gemm);
}

/* --- the layers of an engine, the same way --------------------------------------------------------- */

static void execute_embed(fv_device *device, void *params)
{
    fv_embed_params embed = *(fv_embed_params *)params;
    TO_HOST(embed.hidden);
    TO_HOST(embed.weights);
    TO_HOST(embed.tokens);
    const fv_launch launch = serial_launch(device);
    (void)fv_reference_layers.embed(&launch, &embed);
}

static void execute_add_norm(fv_device *device, void *params)
{
    fv_add_norm_params norm = *(fv_add_norm_params *)params;
    TO_HOST(norm.hidden);
    TO_HOST(norm.added);
    TO_HOST(norm.added_norm);
    TO_HOST(norm.weight);
    TO_HOST(norm.rows);
    TO_HOST(norm.normed);
    TO_HOST(norm.normed_f32);
    const fv_launch launch = serial_launch(device);
    (void)fv_reference_layers.add_norm(&launch, &norm);
}

static void execute_split_heads(fv_device *device, void *params)
{
    fv_split_heads_params heads = *(fv_split_heads_params *)params;
    TO_HOST(heads.out);
    TO_HOST(heads.qkv);
    TO_HOST(heads.q_norm);
    TO_HOST(heads.k_norm);
    TO_HOST(heads.cos);
    TO_HOST(heads.sin);
    TO_HOST(heads.positions);
    const fv_launch launch = serial_launch(device);
    (void)fv_reference_layers.split_heads(&launch, &heads);
}

static void execute_activate(fv_device *device, void *params)
{
    fv_activate_params activate = *(fv_activate_params *)params;
    TO_HOST(activate.out);
    TO_HOST(activate.gate_up);
    const fv_launch launch = serial_launch(device);
    (void)fv_reference_layers.activate(&launch, &activate);
}

static void execute_route(fv_device *device, void *params)
{
    fv_route_params route = *(fv_route_params *)params;
    TO_HOST(route.experts);
    TO_HOST(route.weights);
    TO_HOST(route.scratch);
    TO_HOST(route.x);
    TO_HOST(route.router);
    TO_HOST(route.bias);
    const fv_launch launch = serial_launch(device);
    (void)fv_reference_layers.route(&launch, &route);
}

/* The weights of an expert are found through a table of device pointers. */
static void execute_run_experts(fv_device *device, void *params)
{
    fv_run_experts_params experts = *(fv_run_experts_params *)params;
    TO_HOST(experts.out);
    TO_HOST(experts.x);
    TO_HOST(experts.experts);
    TO_HOST(experts.gate_up);
    TO_HOST(experts.down);
    const size_t count = (size_t)experts.num_experts;
    const void **tables = calloc(2 * count, sizeof(*tables));
    if (!tables) abort();
    for (size_t i = 0; i < count; i++) {
        tables[i] = to_host(experts.gate_up[i]);
        tables[count + i] = to_host(experts.down[i]);
    }
    experts.gate_up = tables;
    experts.down = tables + count;
    const fv_launch launch = serial_launch(device);
    (void)fv_reference_layers.run_experts(&launch, &experts);
    free(tables);
}

static void execute_add_experts(fv_device *device, void *params)
{
    fv_add_experts_params add = *(fv_add_experts_params *)params;
    TO_HOST(add.sum);
    TO_HOST(add.parts);
    TO_HOST(add.weights);
    const fv_launch launch = serial_launch(device);
    (void)fv_reference_layers.add_experts(&launch, &add);
}

static void execute_fill_random(fv_device *device, void *params)
{
    fv_fill_random_params fill = *(fv_fill_random_params *)params;
    TO_HOST(fill.out);
    const fv_launch launch = serial_launch(device);
    (void)fv_reference_layers.fill_random(&launch, &fill);
}

static void execute_read_memory(fv_device *device, void *params)
{
    fv_read_memory_params read = *(fv_read_memory_params *)params;
    TO_HOST(read.data);
    TO_HOST(read.sum);
    const fv_launch launch = serial_launch(device);
    (void)fv_reference_layers.read_memory(&launch, &read);
}

static fv_status launch_kernel(const fv_launch *launch, void (*execute)(fv_device *, void *), const void *params,
                               size_t params_bytes)
{
    state_of(launch->device)->counters.num_launches++;
    return send(launch->device, stream_of(launch->device, launch->stream), execute, params, params_bytes);
}

static fv_status null_attend_paged(const fv_launch *launch, const fv_attend_params *params)
{
    return launch_kernel(launch, execute_attend, params, sizeof(*params));
}

static fv_status null_reduce_segments(const fv_launch *launch, const fv_reduce_params *params)
{
    return launch_kernel(launch, execute_reduce, params, sizeof(*params));
}

static fv_status null_kv_write(const fv_launch *launch, const fv_kv_write_params *params)
{
    return launch_kernel(launch, execute_write, params, sizeof(*params));
}

static fv_status null_kv_gather(const fv_launch *launch, const fv_kv_gather_params *params)
{
    return launch_kernel(launch, execute_gather, params, sizeof(*params));
}

static fv_status null_merge_states(const fv_launch *launch, const fv_merge_params *params)
{
    return launch_kernel(launch, execute_merge, params, sizeof(*params));
}

static fv_status null_merge_ranks(const fv_launch *launch, const fv_merge_ranks_params *params)
{
    return launch_kernel(launch, execute_merge_ranks, params, sizeof(*params));
}

static fv_status null_kv_copy(const fv_launch *launch, const fv_kv_copy_params *params)
{
    return launch_kernel(launch, execute_kv_copy, params, sizeof(*params));
}

static fv_status null_rope(const fv_launch *launch, const fv_rope_params *params)
{
    return launch_kernel(launch, execute_rope, params, sizeof(*params));
}

static fv_status null_rope_kv_write(const fv_launch *launch, const fv_rope_kv_write_params *params)
{
    return launch_kernel(launch, execute_rope_kv_write, params, sizeof(*params));
}

static fv_status null_rms_norm(const fv_launch *launch, const fv_rms_norm_params *params)
{
    return launch_kernel(launch, execute_rms_norm, params, sizeof(*params));
}

static fv_status null_copy_rows(const fv_launch *launch, const fv_copy_rows_params *params)
{
    return launch_kernel(launch, execute_copy_rows, params, sizeof(*params));
}

static fv_status null_attend_dense(const fv_launch *launch, const fv_attend_params *params)
{
    return launch_kernel(launch, execute_attend_dense, params, sizeof(*params));
}

static fv_status null_mla_decode(const fv_launch *launch, const fv_attend_params *params)
{
    return launch_kernel(launch, execute_mla_decode, params, sizeof(*params));
}

static fv_status launch_amla(const fv_launch *launch, const fv_attend_params *params, fv_rescaling rescaling)
{
    const amla_params amla = {*params, rescaling};
    return launch_kernel(launch, execute_amla, &amla, sizeof(amla));
}

static fv_status null_amla(const fv_launch *launch, const fv_attend_params *params)
{
    return launch_amla(launch, params, FV_RESCALING_ADD);
}

static fv_status null_amla_uncompensated(const fv_launch *launch, const fv_attend_params *params)
{
    return launch_amla(launch, params, FV_RESCALING_ADD_UNCOMPENSATED);
}

static fv_status null_amla_multiply(const fv_launch *launch, const fv_attend_params *params)
{
    return launch_amla(launch, params, FV_RESCALING_MULTIPLY_BF16);
}

static fv_status null_gemm(fv_device *device, const fv_gemm *gemm, fv_stream stream)
{
    const fv_launch launch = {device, NULL, stream};
    return launch_kernel(&launch, execute_gemm, gemm, sizeof(*gemm));
}

static fv_status null_embed(const fv_launch *launch, const fv_embed_params *params)
{
    return launch_kernel(launch, execute_embed, params, sizeof(*params));
}

static fv_status null_add_norm(const fv_launch *launch, const fv_add_norm_params *params)
{
    return launch_kernel(launch, execute_add_norm, params, sizeof(*params));
}

static fv_status null_split_heads(const fv_launch *launch, const fv_split_heads_params *params)
{
    return launch_kernel(launch, execute_split_heads, params, sizeof(*params));
}

static fv_status null_activate(const fv_launch *launch, const fv_activate_params *params)
{
    return launch_kernel(launch, execute_activate, params, sizeof(*params));
}

static fv_status null_route(const fv_launch *launch, const fv_route_params *params)
{
    return launch_kernel(launch, execute_route, params, sizeof(*params));
}

static fv_status null_run_experts(const fv_launch *launch, const fv_run_experts_params *params)
{
    return launch_kernel(launch, execute_run_experts, params, sizeof(*params));
}

static fv_status null_add_experts(const fv_launch *launch, const fv_add_experts_params *params)
{
    return launch_kernel(launch, execute_add_experts, params, sizeof(*params));
}

static fv_status null_fill_random(const fv_launch *launch, const fv_fill_random_params *params)
{
    return launch_kernel(launch, execute_fill_random, params, sizeof(*params));
}

static fv_status null_read_memory(const fv_launch *launch, const fv_read_memory_params *params)
{
    return launch_kernel(launch, execute_read_memory, params, sizeof(*params));
}

static const fv_layer_table null_layers = {
    .embed = null_embed,
    .add_norm = null_add_norm,
    .split_heads = null_split_heads,
    .activate = null_activate,
    .route = null_route,
    .run_experts = null_run_experts,
    .add_experts = null_add_experts,
    .fill_random = null_fill_random,
    .read_memory = null_read_memory,
};

static const char *serves_all(const fv_problem *problem)
{
    (void)problem;
    return NULL;
}

static size_t reference_scratch(const fv_attend_params *params)
{
    return fv_reference_kernels.attend_paged[0].scratch_bytes(params);
}

static const char *why_not_amla(const fv_problem *problem) { return find_amla(FV_RESCALING_ADD)->why_not(problem); }

static size_t amla_scratch(const fv_attend_params *params)
{
    return find_amla(FV_RESCALING_ADD)->scratch_bytes(params);
}

static const fv_attend_variant null_variants[] = {
    {"null", 16, 32, serves_all, reference_scratch, null_attend_paged, .rescaling = FV_RESCALING_MULTIPLY},
};

static const fv_attend_variant null_dense_variants[] = {
    {"null", 16, 32, serves_all, reference_scratch, null_attend_dense, .rescaling = FV_RESCALING_MULTIPLY},
};

static const fv_attend_variant null_mla_variants[] = {
    {"null", 16, 32, serves_all, reference_scratch, null_mla_decode, .rescaling = FV_RESCALING_MULTIPLY},
    {"amla", 128, 512, why_not_amla, amla_scratch, null_amla, .rescaling = FV_RESCALING_ADD},
    {"amla_uncompensated", 128, 512, why_not_amla, amla_scratch, null_amla_uncompensated,
     .rescaling = FV_RESCALING_ADD_UNCOMPENSATED},
    {"amla_multiply", 128, 512, why_not_amla, amla_scratch, null_amla_multiply,
     .rescaling = FV_RESCALING_MULTIPLY_BF16},
};

static const fv_kernel_table null_kernels = {
    .name = "null",
    .attend_paged = null_variants,
    .num_attend_paged = 1,
    .attend_dense = null_dense_variants,
    .num_attend_dense = 1,
    .mla_decode = null_mla_variants,
    .num_mla_decode = FV_ARRAY_LEN(null_mla_variants),
    .reduce_segments = null_reduce_segments,
    .kv_write = null_kv_write,
    .kv_gather = null_kv_gather,
    .kv_copy = null_kv_copy,
    .copy_rows = null_copy_rows,
    .rms_norm = null_rms_norm,
    .rope = null_rope,
    .rope_kv_write = null_rope_kv_write,
    .merge_states = null_merge_states,
    .merge_ranks = null_merge_ranks,
};

static const fv_kernel_table *const null_tables[] = {&null_kernels};

/* --- the probes ------------------------------------------------------------------------------------ */

static fv_status null_cache_bytes(int64_t *bytes, fv_device *device)
{
    (void)device;
    *bytes = 4096;
    return FV_OK;
}

static fv_status null_timer_elapsed(double *us, fv_device *device, fv_event start, fv_event end)
{
    const null_event *from = start, *to = end;
    if (from->reached == 0 || from->reached != from->recorded || to->reached != to->recorded) {
        return state_of(device)->host.fail(FV_ERR_DEVICE, "null device: time of an event that has not passed");
    }
    *us = (double)(to->reached - from->reached);
    return FV_OK;
}

/* A closed gate would hold a GPU's stream while the host waits for it. */
static void execute_gate(fv_device *device, void *params)
{
    (void)device;
    const int32_t *open = *(const int32_t **)params;
    if (*open == 0) abort();
}

static fv_status null_gate(fv_device *device, const int32_t *open, fv_stream stream)
{
    return send(device, stream_of(device, stream), execute_gate, &open, sizeof(open));
}

static void execute_empty(fv_device *device, void *params) { (void)device, (void)params; }

static fv_status null_empty(fv_device *device, fv_stream stream)
{
    const int32_t nothing = 0;
    return send(device, stream_of(device, stream), execute_empty, &nothing, sizeof(nothing));
}

typedef struct pool_params {
    char *memory;
    const char *pool;
    size_t bytes, pool_bytes;
} pool_params;

static void execute_fill_from_pool(fv_device *device, void *params)
{
    (void)device;
    const pool_params *fill = params;
    char *memory = to_host(fill->memory);
    const char *pool = to_host(fill->pool);
    for (size_t at = 0; at < fill->bytes; at += fill->pool_bytes) {
        const size_t size = fill->bytes - at < fill->pool_bytes ? fill->bytes - at : fill->pool_bytes;
        memcpy(memory + at, pool, size);
    }
}

static fv_status null_fill_from_pool(fv_device *device, void *memory, size_t bytes, const void *pool, size_t pool_bytes,
                                     size_t unit, uint64_t seed, fv_stream stream)
{
    (void)unit;
    (void)seed;
    const pool_params fill = {memory, pool, bytes, pool_bytes};
    return send(device, stream_of(device, stream), execute_fill_from_pool, &fill, sizeof(fill));
}

static void execute_probe_read(fv_device *device, void *params)
{
    (void)device;
    const fv_probe_read *read = params;
    const fv_probe_range *ranges = to_host(read->ranges);
    uint64_t sum = 0;
    for (int64_t i = 0; i < read->num_ranges; i++) {
        const unsigned char *data = (const unsigned char *)to_host(read->base) + ranges[i].offset;
        for (int64_t at = 0; at < ranges[i].bytes; at++) sum += data[at];
    }
    *(uint64_t *)to_host(read->sink) = sum;
}

static fv_status null_probe_read(fv_device *device, const fv_probe_read *read, fv_stream stream)
{
    return send(device, stream_of(device, stream), execute_probe_read, read, sizeof(*read));
}

static const fv_device_probes null_probes = {
    .large_bytes = 1 << 20,
    .gemm_size = 64,
    .cache_bytes = null_cache_bytes,
    .timer_create = null_event_create,
    .timer_elapsed = null_timer_elapsed,
    .gate = null_gate,
    .empty = null_empty,
    .fill_random = null_fill_from_pool,
    .read = null_probe_read,
    .copy = null_copy,
};

/* --- the device ----------------------------------------------------------------------------------- */

static void null_destroy(fv_device *device)
{
    null_state *state = state_of(device);
    while (state->streams) null_stream_destroy(device, state->streams);
    drain(device, &state->default_stream, NULL, 0);
    free(state);
    free(device);
}

static const fv_device_ops null_ops = {
    .alloc = null_alloc,
    .free = null_free,
    .alloc_host = null_alloc_host,
    .free_host = null_free_host,
    .copy_in = null_copy,
    .copy_out = null_copy,
    .fill = null_fill,
    .stream_create = null_stream_create,
    .stream_destroy = null_stream_destroy,
    .stream_synchronize = null_stream_synchronize,
    .event_create = null_event_create,
    .event_destroy = null_event_destroy,
    .event_record = null_event_record,
    .event_synchronize = null_event_synchronize,
    .graph_begin = null_graph_begin,
    .graph_end = null_graph_end,
    .graph_launch = null_graph_launch,
    .graph_destroy = null_graph_destroy,
    .is_capturing = null_is_capturing,
    .gemm = null_gemm,
    .destroy = null_destroy,
};

static fv_status null_device_open(fv_device **out, const fv_plugin_host *host, int32_t index)
{
    if (index > 0) return host->fail(FV_ERR_UNSUPPORTED, "no device 'null:%d'; there is one null device", index);
    fv_device *device = calloc(1, sizeof(*device));
    null_state *state = calloc(1, sizeof(*state));
    if (!device || !state) {
        free(device);
        free(state);
        return host->fail(FV_ERR_NO_MEMORY, "null device: no memory");
    }
    state->host = *host;
    state->serial.num_workers = 1;
    queue_init(&state->default_stream);
    snprintf(state->name, sizeof(state->name), "null:%d", index);
    *device = (fv_device){
        .name = state->name,
        .ops = &null_ops,
        .tables = null_tables,
        .num_tables = 1,
        .layers = &null_layers,
        .num_workers = 4, /* so that schedules have something to fill */
        .probes = &null_probes,
        .context = host->context,
        .state = state,
    };
    snprintf(device->description, sizeof(device->description), "null device: reference kernels, deferred streams");
    *out = device;
    return FV_OK;
}

#ifndef FV_NULL_BUILD_ID
#define FV_NULL_BUILD_ID FV_BUILD_ID
#endif

__attribute__((visibility("default"))) const fv_plugin *fv_plugin_entry(void);

const fv_plugin *fv_plugin_entry(void)
{
    static const fv_plugin plugin = {FV_PLUGIN_ABI, FV_NULL_BUILD_ID, null_device_open};
    return &plugin;
}
