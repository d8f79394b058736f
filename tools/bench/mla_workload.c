/* Weights, cache and batch; a plan at a time. */
#include "bench/mla_workload.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bench/bench_memory.h"
#include "bench/random_data.h"
#include "core/compiler.h"
#include "core/device.h"
#include "core/error.h"

#define ALIGNMENT 256
#define ROPE_BASE 10000.0

/* Memory of the host; the caller frees. */
static fv_status allocate(void *memory, size_t bytes)
{
    void *allocated = aligned_alloc(ALIGNMENT, (bytes + ALIGNMENT) / ALIGNMENT * ALIGNMENT);
    memcpy(memory, &allocated, sizeof(allocated));
    return allocated ? FV_OK : fv_fail(FV_ERR_NO_MEMORY, "no memory for %zu bytes", bytes);
}

/* Memory of the device with normal numbers of `dtype` times `factor`, made on the host. */
static fv_status make_random(void **data, fv_mla_workload *w, fv_dtype dtype, size_t bytes, float factor)
{
    void *host = NULL;
    fv_random_pool pool = {0};
    fv_status status = allocate(&host, bytes);
    if (status == FV_OK) status = fv_random_pool_init(&pool, dtype);
    if (status == FV_OK) {
        if (factor != 1) fv_random_pool_scale(&pool, dtype, factor);
        pool.state += (uint64_t)w->num_tensors;
        status = fv_random_fill(&pool, host, bytes);
    }
    if (status == FV_OK && w->device->host_is_device) {
        *data = host;
        host = NULL;
    } else if (status == FV_OK) {
        status = fv_bench_send(data, w->device, host, bytes);
    }
    fv_random_pool_deinit(&pool);
    free(host);
    return status;
}

/* A dense matrix. */
static fv_status make_matrix(fv_tensor *tensor, fv_mla_workload *w, int64_t rows, int64_t columns, float factor)
{
    const fv_dtype dtype = w->sizes.dtype;
    void **data = &w->tensors[w->num_tensors++];
    const fv_status status = make_random(data, w, dtype, (size_t)(rows * columns) * fv_dtype_bytes(dtype), factor);
    *tensor = fv_tensor_2d(*data, dtype, rows, columns);
    return status;
}

/* Weights that keep the variance. */
static fv_status make_weights(fv_tensor *tensor, fv_mla_workload *w, int64_t outputs, int64_t inputs)
{
    return make_matrix(tensor, w, outputs, inputs, 1 / sqrtf((float)inputs));
}

static fv_status make_tensors(fv_mla_workload *w)
{
    const fv_mla_sizes *sizes = &w->sizes;
    const fv_mla_shape *mla = &sizes->mla;
    const int64_t heads = mla->num_heads, head = mla->qk_nope_head_dim + mla->qk_rope_head_dim;
    fv_mla_layer *layer = &w->layer;
    fv_status status = make_matrix(&layer->x, w, sizes->batch, sizes->dim, 1);
    if (status == FV_OK) status = make_matrix(&layer->out, w, sizes->batch, sizes->dim, 1);
    const int64_t entry = mla->kv_lora_rank + mla->qk_rope_head_dim;
    fv_tensor down; /* q_down, then kv_down: engines keep them as one matrix */
    if (status == FV_OK) status = make_weights(&down, w, sizes->q_lora + entry, sizes->dim);
    if (status == FV_OK) {
        char *kv_down = (char *)down.data + sizes->q_lora * down.stride_bytes[0];
        layer->q_down = fv_tensor_2d(down.data, sizes->dtype, sizes->q_lora, sizes->dim);
        layer->kv_down = fv_tensor_2d(kv_down, sizes->dtype, entry, sizes->dim);
        status = make_weights(&layer->q_up, w, heads * head, sizes->q_lora);
    }
    fv_tensor kv_up;
    const int64_t up_rows = mla->qk_nope_head_dim + mla->v_head_dim;
    if (status == FV_OK) status = make_weights(&kv_up, w, heads * up_rows, mla->kv_lora_rank);
    if (status == FV_OK) layer->kv_up = fv_tensor_3d(kv_up.data, sizes->dtype, heads, up_rows, mla->kv_lora_rank);
    return status == FV_OK ? make_weights(&layer->o, w, sizes->dim, heads * mla->v_head_dim) : status;
}

/* Angles position * theta_i, theta_i = 10000^(-i / 32), by `function`. */
static fv_status make_table(void **table, const fv_mla_workload *w, double (*function)(double))
{
    const int32_t half = w->sizes.mla.qk_rope_head_dim / 2;
    const size_t bytes = sizeof(float) * (size_t)w->max_keys * (size_t)half;
    float *host = NULL;
    fv_status status = allocate(&host, bytes);
    if (status != FV_OK) return status;
    for (int64_t position = 0; position < w->max_keys; position++) {
        for (int32_t i = 0; i < half; i++) {
            host[position * half + i] = (float)function((double)position * pow(ROPE_BASE, -(double)i / half));
        }
    }
    status = fv_bench_send(table, w->device, host, bytes);
    free(host);
    return status;
}

/* Blocks in random order, as an engine that has run for a while has them; block 0 is the null block. */
static void shuffle_blocks(fv_mla_workload *w)
{
    const int64_t num_blocks = (int64_t)w->sizes.batch * w->width;
    uint64_t state = 1;
    for (int64_t i = 0; i < num_blocks; i++) w->block_table[i] = (int32_t)i + 1;
    for (int64_t i = num_blocks - 1; i > 0; i--) {
        const int64_t other = (int64_t)(fv_random_next(&state) % (uint64_t)(i + 1));
        const int32_t block = w->block_table[i];
        w->block_table[i] = w->block_table[other];
        w->block_table[other] = block;
    }
}

static fv_status make_cache(fv_mla_workload *w)
{
    const fv_mla_sizes *sizes = &w->sizes;
    const int32_t entry = sizes->mla.kv_lora_rank + sizes->mla.qk_rope_head_dim;
    const int64_t num_blocks = (int64_t)sizes->batch * w->width + 1;
    size_t bytes = 0;
    fv_status status = fv_kv_view_bytes(&bytes, FV_KV_LAYOUT_LATENT, sizes->kv_dtype, num_blocks, FV_MLA_BLOCK_SIZE, 1,
                                        entry);
    if (status == FV_OK) status = make_random(&w->cache, w, sizes->kv_dtype, bytes, 1);
    if (status != FV_OK) return status;
    return fv_kv_view_init(&w->layer.kv_cache, w->cache, FV_KV_LAYOUT_LATENT, sizes->kv_dtype, num_blocks,
                           FV_MLA_BLOCK_SIZE, 1, entry);
}

/* The arrays of the batch. */
enum { QUERY_START, SEQ_LENS, POSITIONS, SLOTS, BLOCK_TABLE };

static fv_status make_batch(fv_mla_workload *w)
{
    const size_t batch = (size_t)w->sizes.batch;
    w->width = (int32_t)fv_ceil_div(w->max_keys, FV_MLA_BLOCK_SIZE);
    w->arrays[QUERY_START].bytes = sizeof(int32_t) * (batch + 1);
    w->arrays[SEQ_LENS].bytes = w->arrays[POSITIONS].bytes = sizeof(int32_t) * batch;
    w->arrays[SLOTS].bytes = sizeof(int64_t) * batch;
    w->arrays[BLOCK_TABLE].bytes = sizeof(int32_t) * batch * (size_t)w->width;
    fv_status status = FV_OK;
    for (int32_t i = 0; i < FV_MLA_NUM_ARRAYS && status == FV_OK; i++) {
        status = allocate(&w->arrays[i].host, w->arrays[i].bytes);
        if (w->device->host_is_device)
            w->arrays[i].on_device = w->arrays[i].host;
        else if (status == FV_OK)
            status = fv_bench_alloc(&w->arrays[i].on_device, w->device, w->arrays[i].bytes);
    }
    if (status != FV_OK) return status;
    w->query_start = w->arrays[QUERY_START].host;
    w->seq_lens = w->arrays[SEQ_LENS].host;
    w->positions = w->arrays[POSITIONS].host;
    w->slots = w->arrays[SLOTS].host;
    w->block_table = w->arrays[BLOCK_TABLE].host;
    shuffle_blocks(w);
    return FV_OK;
}

/* Rotation by halves. */
static fv_status make_tables(fv_mla_workload *w)
{
    fv_status status = make_table(&w->cos, w, cos);
    if (status == FV_OK) status = make_table(&w->sin, w, sin);
    w->layer.rotation = (fv_rotation){
        .struct_size = sizeof(fv_rotation),
        .style = FV_ROPE_HALF,
        .rope_dim = w->sizes.mla.qk_rope_head_dim,
        .cos = w->cos,
        .sin = w->sin,
        .max_position = w->max_keys,
        .positions_32 = w->arrays[POSITIONS].on_device,
    };
    return status;
}

static fv_status find_gemm(fv_mla_workload *w, const fv_mla_machine *machine)
{
    w->timer = (fv_mla_timer){.layer = &w->layer, .device = w->device, .gemm = fv_mla_plain_gemm};
    w->layer.struct_size = sizeof(w->layer);
    w->layer.gemm = fv_mla_timer_gemm;
    w->layer.gemm_user = &w->timer;
    if (machine->plain_products) return FV_OK;
    return fv_mla_products_create(&w->products, &w->timer.gemm, &w->timer.gemm_user, w->device);
}

fv_status fv_mla_workload_init(fv_mla_workload *w, const fv_mla_sizes *sizes, int32_t max_length,
                               const fv_mla_machine *machine)
{
    const fv_context_options options = {.struct_size = sizeof(options), .num_threads = machine->num_threads};
    *w = (fv_mla_workload){.sizes = *sizes, .max_keys = max_length + 1};
    fv_status status = fv_context_create(&w->context, &options);
    if (status == FV_OK) status = fv_device_find(&w->device, w->context, machine->device);
    if (status == FV_OK) status = find_gemm(w, machine);
    if (status == FV_OK) status = make_batch(w);
    if (status == FV_OK) status = make_tensors(w);
    if (status == FV_OK) status = make_tables(w);
    return status == FV_OK ? make_cache(w) : status;
}

void fv_mla_workload_deinit(fv_mla_workload *w)
{
    fv_plan_destroy(w->plan);
    for (int32_t i = 0; i < w->num_tensors; i++) fv_bench_free(w->device, w->tensors[i]);
    void *const memory[] = {w->cos, w->sin, w->cache, w->workspace};
    for (int32_t i = 0; i < FV_ARRAY_LEN(memory); i++) fv_bench_free(w->device, memory[i]);
    for (int32_t i = 0; i < FV_MLA_NUM_ARRAYS; i++) {
        if (w->arrays[i].on_device != w->arrays[i].host) fv_bench_free(w->device, w->arrays[i].on_device);
        free(w->arrays[i].host);
    }
    if (w->device) fv_mla_timer_deinit(&w->timer);
    fv_mla_products_destroy(w->products);
    fv_context_destroy(w->context);
}

/* Lengths, positions and slots of a step whose sequences have `length` cached tokens. */
static fv_status set_length(fv_mla_workload *w, int32_t length)
{
    w->query_start[0] = 0;
    for (int32_t seq = 0; seq < w->sizes.batch; seq++) {
        w->query_start[seq + 1] = seq + 1;
        w->seq_lens[seq] = length + 1;
        w->positions[seq] = length;
        const int64_t block = w->block_table[(int64_t)seq * w->width + length / FV_MLA_BLOCK_SIZE];
        w->slots[seq] = block * FV_MLA_BLOCK_SIZE + length % FV_MLA_BLOCK_SIZE;
    }
    fv_status status = FV_OK;
    for (int32_t i = 0; i < FV_MLA_NUM_ARRAYS && status == FV_OK && !w->device->host_is_device; i++) {
        status = fv_bench_copy_in(w->device, w->arrays[i].on_device, w->arrays[i].host, w->arrays[i].bytes);
    }
    return status;
}

static fv_status update_plan(fv_mla_workload *w)
{
    const fv_batch batch = {
        .struct_size = sizeof(batch),
        .num_seqs = w->sizes.batch,
        .num_tokens = w->sizes.batch,
        .query_start = w->arrays[QUERY_START].on_device,
        .seq_lens = w->arrays[SEQ_LENS].on_device,
        .block_table = w->arrays[BLOCK_TABLE].on_device,
        .block_table_stride = w->width,
        .block_table_width = w->width,
        .slot_mapping = w->arrays[SLOTS].on_device,
        .host_query_start = w->query_start,
        .host_seq_lens = w->seq_lens,
    };
    const fv_status status = fv_plan_update(w->plan, &batch, NULL);
    return status == FV_OK ? fv_stream_synchronize(w->device, NULL) : status;
}

fv_status fv_mla_workload_plan(fv_mla_workload *w, int32_t length, const char *backend, int32_t static_grid)
{
    const fv_mla_sizes *sizes = &w->sizes;
    const fv_problem problem = {
        .struct_size = sizeof(problem),
        .kind = FV_ATTENTION_MLA,
        .mla = sizes->mla,
        .q_dtype = sizes->dtype,
        .kv_dtype = sizes->kv_dtype,
        .kv_layout = FV_KV_LAYOUT_LATENT,
        .block_size = FV_MLA_BLOCK_SIZE,
    };
    const fv_bounds bounds = {sizeof(bounds), sizes->batch, sizes->batch, 1, length + 1};
    const fv_plan_options plan_options = {
        .struct_size = sizeof(plan_options), .device = w->device, .backend = backend, .static_grid = static_grid};
    fv_plan_destroy(w->plan);
    fv_bench_free(w->device, w->workspace);
    w->plan = NULL;
    w->workspace = NULL;
    fv_status status = fv_plan_create(&w->plan, w->context, &problem, &bounds, &plan_options);
    if (status == FV_OK) status = set_length(w, length);
    if (status == FV_OK) status = update_plan(w);
    if (status != FV_OK) return status;
    return fv_bench_alloc(&w->workspace, w->device, fv_mla_workspace_bytes(w->plan, sizes->q_lora));
}
