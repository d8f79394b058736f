/* The data of a workload: tensors, copies of the cache, and the pages that a step reads. */
#include "bench/workload.h"

#include <stdlib.h>
#include <unistd.h>

#include "bench/bench_memory.h"
#include "bench/random_data.h"
#include "core/device_probes.h"
#include "core/error.h"
#include "ops/attend_paged.h"

#define RANGE_BYTES (64 << 10) /* longer pages are read in pieces, so that the workers get equal shares */
#define COLD_CACHES 4          /* copies together: this many last-level caches */
#define MAX_COPY_BYTES (2ll << 30)
#define UNKNOWN_CACHE_BYTES (32 << 20)
#define ALIGNMENT 16 /* of the scales behind K and V */

int64_t fv_last_level_cache_bytes(fv_device *device)
{
    int64_t bytes = 0;
    if (!device->host_is_device) {
        return device->probes->cache_bytes(&bytes, device) == FV_OK && bytes > 0 ? bytes : UNKNOWN_CACHE_BYTES;
    }
    const long l3 = sysconf(_SC_LEVEL3_CACHE_SIZE);
    if (l3 > 0) return l3;
    const long l2 = sysconf(_SC_LEVEL2_CACHE_SIZE);
    return l2 > 0 ? l2 : UNKNOWN_CACHE_BYTES;
}

static int32_t is_packed(fv_kv_layout layout)
{
    return layout == FV_KV_LAYOUT_PACKED_NHD || layout == FV_KV_LAYOUT_PACKED_HND;
}

/* Bytes of all heads of one token: of K, and of V where that lies elsewhere (else 0). */
static void token_bytes(int64_t *k_bytes, int64_t *v_bytes, const fv_workload *w, fv_kv_layout layout)
{
    const fv_problem *problem = &w->problem;
    const int64_t element = (int64_t)fv_dtype_bytes(problem->kv_dtype);
    if (problem->kind == FV_ATTENTION_MLA) {
        *k_bytes = layout == FV_KV_LAYOUT_LATENT_FP8_DS
                       ? 656
                       : (problem->mla.kv_lora_rank + problem->mla.qk_rope_head_dim) * element;
        *v_bytes = 0;
        return;
    }
    *k_bytes = problem->mha.num_kv_heads * problem->mha.head_size * element;
    *v_bytes = problem->mha.num_kv_heads * problem->mha.v_head_size * element;
    if (!is_packed(layout)) return;
    *k_bytes += *v_bytes;
    *v_bytes = 0;
}

static int32_t has_token_scales(const fv_workload *w) { return w->problem.kv_scaling == FV_KV_SCALING_PER_TOKEN_HEAD; }

/* Scales of all heads of one token, of K or of V. */
static int64_t token_scale_bytes(const fv_workload *w)
{
    return has_token_scales(w) ? w->problem.mha.num_kv_heads * (int64_t)sizeof(float) : 0;
}

/* Scales of all of K, or of V: [num_blocks, block_size, Hkv]. */
static int64_t scale_plane_bytes(const fv_workload *w)
{
    return token_scale_bytes(w) * w->problem.block_size * w->num_blocks;
}

/* A dense cache whose K and V may differ in size: all K blocks, then all V blocks. */
static void view_strided(fv_kv_view *view, const fv_workload *w, char *data)
{
    const fv_problem *problem = &w->problem;
    const int64_t element = (int64_t)fv_dtype_bytes(problem->kv_dtype);
    const int64_t heads = problem->mha.num_kv_heads, d = problem->mha.head_size, dv = problem->mha.v_head_size;
    *view = (fv_kv_view){
        .struct_size = sizeof(*view),
        .layout = FV_KV_LAYOUT_STRIDED,
        .dtype = problem->kv_dtype,
        .block_size = problem->block_size,
        .num_blocks = w->num_blocks,
        .num_kv_heads = problem->mha.num_kv_heads,
        .head_size = problem->mha.head_size,
        .v_head_size = problem->mha.v_head_size,
        .k = {.data = data,
              .block_stride = problem->block_size * heads * d * element,
              .slot_stride = heads * d * element,
              .head_stride = d * element,
              .element_stride = element},
        .v = {.data = data + w->num_blocks * problem->block_size * heads * d * element,
              .block_stride = problem->block_size * heads * dv * element,
              .slot_stride = heads * dv * element,
              .head_stride = dv * element,
              .element_stride = element},
    };
}

static void view_scales(fv_kv_view *view, const fv_workload *w, char *data)
{
    const fv_scale_plane plane = {
        .data = data + w->kv_bytes,
        .block_stride = token_scale_bytes(w) * w->problem.block_size,
        .slot_stride = token_scale_bytes(w),
        .head_stride = sizeof(float),
    };
    view->k_scales = view->v_scales = plane;
    view->v_scales.data = (char *)plane.data + scale_plane_bytes(w);
}

static fv_status view_cache(fv_kv_view *view, const fv_workload *w, void *data, fv_kv_layout layout)
{
    const fv_problem *problem = &w->problem;
    fv_status status = FV_OK;
    if (layout == FV_KV_LAYOUT_STRIDED) {
        view_strided(view, w, data);
    } else {
        status = fv_kv_view_init(view, data, layout, problem->kv_dtype, w->num_blocks, problem->block_size,
                                 problem->mha.num_kv_heads, problem->mha.head_size);
    }
    if (status == FV_OK && has_token_scales(w)) view_scales(view, w, data);
    return status;
}

fv_status fv_workload_view(fv_layer *layer, const fv_workload *w, int32_t copy, fv_kv_layout layout)
{
    *layer = w->layer;
    if (w->problem.type == FV_ATTENTION_ENCODER) return FV_OK; /* no cache */
    return view_cache(&layer->kv_cache, w, w->caches[copy], layout);
}

/* Appends [offset, offset + bytes) in pieces; counts only where there is no list yet. */
static void add_range(fv_workload *w, int64_t offset, int64_t bytes)
{
    for (int64_t at = 0; at < bytes; at += RANGE_BYTES) {
        const int64_t size = fv_min_i64(RANGE_BYTES, bytes - at);
        if (w->ranges) w->ranges[w->num_ranges] = (fv_read_range){offset + at, size};
        w->num_ranges++;
        w->read_bytes += size;
    }
}

/* Keys of sequence `seq` that any of its new tokens sees. */
static fv_key_range seq_keys(const fv_workload *w, int32_t seq)
{
    const int32_t query_len = w->spec.query_lens[seq], seq_len = w->spec.seq_lens[seq];
    return fv_block_keys(&w->problem.context_parallel, seq_len, seq_len - query_len, 0, query_len,
                         fv_workload_is_causal(w), w->problem.window);
}

/* Keys [slot, slot + count) of a block. In a layout with whole tokens side by side an unused part of the
 * block is left out exactly; in the others the same number of bytes is read from the front of the page. */
static void add_block(fv_workload *w, const fv_kv_view *view, int64_t block, int32_t slot, int32_t count)
{
    int64_t k_bytes, v_bytes;
    token_bytes(&k_bytes, &v_bytes, w, view->layout);
    add_range(w, block * view->k.block_stride + slot * k_bytes, count * k_bytes);
    if (v_bytes) {
        const int64_t v_offset = (char *)view->v.data - (char *)view->k.data;
        add_range(w, v_offset + block * view->v.block_stride + slot * v_bytes, count * v_bytes);
    }
    for (int32_t i = 0; i < 2 && has_token_scales(w); i++) {
        const int64_t token = block * w->problem.block_size + slot;
        add_range(w, (int64_t)w->kv_bytes + i * scale_plane_bytes(w) + token * token_scale_bytes(w),
                  count * token_scale_bytes(w));
    }
}

static void walk_ranges(fv_workload *w, const fv_kv_view *view)
{
    const int32_t block_size = w->problem.block_size;
    w->num_ranges = w->read_bytes = 0;
    for (int32_t seq = 0; seq < w->spec.num_seqs; seq++) {
        const fv_key_range keys = seq_keys(w, seq);
        const int32_t *row = w->block_table + seq * w->batch.block_table_stride;
        const int32_t first = fv_max_i32(keys.first, w->shared_blocks[seq] * block_size); /* shared: read already */
        for (int32_t key = first; key < keys.end;) {
            const int32_t slot = key % block_size;
            const int32_t count = fv_min_i32(block_size - slot, keys.end - key);
            add_block(w, view, row[key / block_size], slot, count);
            key += count;
        }
    }
}

fv_status fv_workload_list_ranges(fv_workload *w, fv_kv_layout layout)
{
    fv_kv_view view;
    const fv_status status = view_cache(&view, w, w->caches[0], layout);
    if (status != FV_OK) return status;
    free(w->ranges);
    w->ranges = NULL;
    walk_ranges(w, &view); /* counts */
    w->ranges = malloc((size_t)fv_max_i64(1, w->num_ranges) * sizeof(*w->ranges));
    if (!w->ranges) return fv_fail(FV_ERR_NO_MEMORY, "no memory for a list of %lld pages", (long long)w->num_ranges);
    walk_ranges(w, &view);
    return FV_OK;
}

/* Sinks, slopes and scales: one array each of Hq (sinks, slopes) or Hkv (scales). */
static fv_status make_per_head(fv_workload *w, fv_layer *layer)
{
    const int32_t heads = w->problem.mha.num_heads;
    const size_t bytes = 4 * (size_t)heads * sizeof(float);
    float *host = malloc(bytes);
    if (!host) return fv_fail(FV_ERR_NO_MEMORY, "no memory for %d heads", heads);
    for (int32_t i = 0; i < heads; i++) {
        host[i] = 0.5f;                                                           /* sinks */
        host[heads + i] = 1.0f / (float)(1 << fv_min_i32(20, 1 + 8 * i / heads)); /* slopes */
        host[2 * heads + i] = host[3 * heads + i] = 0.75f;                        /* scales */
    }
    const fv_status status = fv_bench_send(&w->per_head, w->device, host, bytes);
    free(host);
    const float *values = w->per_head;
    layer->sinks = w->problem.sinks ? values : NULL;
    layer->alibi_slopes = w->problem.alibi ? values + heads : NULL;
    const fv_kv_scaling scaling = w->problem.kv_scaling;
    if (scaling == FV_KV_SCALING_PER_TENSOR || scaling == FV_KV_SCALING_PER_HEAD) {
        layer->k_scale = values + 2 * heads;
        layer->v_scale = values + 3 * heads;
    }
    return status;
}

/* q, k, v, out and kv_up, in this order; those without tokens are not made. */
typedef struct tensor_size {
    fv_dtype dtype;
    int64_t tokens, heads, elements;
} tensor_size;

#define NUM_TENSORS 5

static void size_tensors(tensor_size sizes[NUM_TENSORS], const fv_workload *w, int32_t stored)
{
    const fv_problem *problem = &w->problem;
    const fv_mla_shape *mla = &problem->mla;
    const int32_t is_mla = problem->kind == FV_ATTENTION_MLA, has_weights = is_mla && !mla->absorbed;
    const int32_t has_new = problem->type != FV_ATTENTION_CROSS && !stored; /* else its keys are in the cache already */
    const int64_t tokens = w->spec.num_tokens, heads = problem->mha.num_heads, kv_heads = problem->mha.num_kv_heads;
    const int64_t d = problem->mha.head_size, dv = has_weights ? mla->v_head_dim : problem->mha.v_head_size;
    const int64_t dq = has_weights ? mla->qk_nope_head_dim + mla->qk_rope_head_dim : d;
    sizes[0] = (tensor_size){problem->q_dtype, tokens, heads, dq};
    sizes[1] = (tensor_size){problem->q_dtype, has_new ? tokens : 0, kv_heads, d};
    sizes[2] = (tensor_size){problem->q_dtype, has_new && !is_mla ? tokens : 0, kv_heads, dv};
    sizes[3] = (tensor_size){problem->out_dtype, tokens, heads, dv};
    sizes[4] = (tensor_size){problem->q_dtype, has_weights ? heads : 0, mla->qk_nope_head_dim + mla->v_head_dim,
                             mla->kv_lora_rank};
}

static size_t tensor_bytes(const tensor_size *size)
{
    return (size_t)(size->tokens * size->heads * size->elements) * fv_dtype_bytes(size->dtype);
}

static fv_status make_tensors(fv_workload *w, fv_layer *layer, const tensor_size sizes[NUM_TENSORS])
{
    fv_tensor *const tensors[NUM_TENSORS] = {&layer->q, &layer->k, &layer->v, &layer->out, &layer->kv_up};
    fv_random_pool pool;
    fv_status status = fv_random_pool_init(&pool, w->problem.q_dtype);
    if (status == FV_OK) status = fv_random_pool_send(&pool, w->device);
    for (int32_t i = 0; i < NUM_TENSORS && status == FV_OK; i++) {
        const tensor_size *size = &sizes[i];
        if (size->tokens == 0) continue;
        status = fv_bench_alloc(&w->tensors[i], w->device, tensor_bytes(size));
        *tensors[i] = fv_tensor_3d(w->tensors[i], size->dtype, size->tokens, size->heads, size->elements);
        if (status == FV_OK) status = fv_random_fill(&pool, w->tensors[i], tensor_bytes(size));
    }
    if (status == FV_OK && sizes[4].tokens > 0)
        status = fv_mla_products_create(&w->products, &layer->gemm, &layer->gemm_user, w->device);
    fv_random_pool_deinit(&pool);
    return status;
}

/* Of a copy: a batch may ask for more than an integer holds. */
static double cache_bytes(const fv_workload *w)
{
    int64_t k_bytes, v_bytes;
    token_bytes(&k_bytes, &v_bytes, w, w->problem.kv_layout);
    const double of_token = (double)(k_bytes + v_bytes + 2 * token_scale_bytes(w));
    return of_token * (double)w->num_blocks * w->problem.block_size;
}

/* Before anything is filled. */
static fv_status check_memory(const fv_workload *w, const tensor_size sizes[NUM_TENSORS])
{
    double bytes = 0;
    for (int32_t i = 0; i < NUM_TENSORS; i++) bytes += (double)tensor_bytes(&sizes[i]);
    return fv_workload_check_memory(w, cache_bytes(w), bytes);
}

/* Scales of all tokens and heads, of K and of V: behind these. */
static fv_status send_scales(const fv_workload *w, char *cache)
{
    const int64_t bytes = 2 * scale_plane_bytes(w);
    if (bytes == 0) return FV_OK;
    float *scales = malloc((size_t)bytes);
    if (!scales) return fv_fail(FV_ERR_NO_MEMORY, "no memory for %lld bytes of scales", (long long)bytes);
    for (int64_t i = 0; i < bytes / (int64_t)sizeof(float); i++) scales[i] = 0.5f + (float)(i % 7) * 0.125f;
    const fv_status status = fv_bench_copy_in(w->device, cache + w->kv_bytes, scales, (size_t)bytes);
    free(scales);
    return status;
}

static fv_status make_cache(void **cache, const fv_workload *w, fv_random_pool *pool)
{
    fv_status status = fv_bench_alloc(cache, w->device, w->cache_bytes);
    if (status == FV_OK) status = fv_random_fill(pool, *cache, w->kv_bytes);
    return status == FV_OK ? send_scales(w, *cache) : status;
}

/* On a device three at least: none of a kernel, the read behind it and the kernel behind that have the same one. The
 * read's bytes are the first to leave the cache, so what the kernel left there is still there behind the read. */
static int32_t count_copies(const fv_workload *w, int64_t cold_bytes)
{
    const int64_t copy_bytes = (int64_t)w->cache_bytes;
    const int32_t on_device = !w->device->host_is_device;
    const int64_t most_bytes = on_device ? fv_workload_memory_limit(w->device) : MAX_COPY_BYTES;
    const int64_t wanted = fv_max_i64(on_device ? 3 : 1, fv_ceil_div(cold_bytes, copy_bytes));
    return (int32_t)fv_min_i64(fv_min_i64(wanted, fv_max_i64(1, most_bytes / copy_bytes)), FV_WORKLOAD_MAX_COPIES);
}

static fv_status make_caches(fv_workload *w, int32_t warm)
{
    int64_t k_bytes, v_bytes;
    token_bytes(&k_bytes, &v_bytes, w, w->problem.kv_layout);
    w->kv_bytes = (size_t)fv_round_up((k_bytes + v_bytes) * w->num_blocks * w->problem.block_size, ALIGNMENT);
    w->cache_bytes = w->kv_bytes + 2 * (size_t)scale_plane_bytes(w);
    const int64_t cold_bytes = COLD_CACHES * fv_last_level_cache_bytes(w->device);
    w->num_copies = warm ? 1 : count_copies(w, cold_bytes);
    w->is_cold = !warm && (int64_t)w->cache_bytes * w->num_copies >= cold_bytes / 2;

    fv_random_pool pool;
    fv_status status = fv_random_pool_init_cache(&pool, w->problem.kv_layout, w->problem.kv_dtype);
    if (status == FV_OK) status = fv_random_pool_send(&pool, w->device);
    for (int32_t i = 0; i < w->num_copies && status == FV_OK; i++) status = make_cache(&w->caches[i], w, &pool);
    fv_random_pool_deinit(&pool);
    return status;
}

/* The batch's arrays go to the device; the host keeps those that a schedule reads. */
static fv_status send_batch(fv_workload *w)
{
    fv_batch *batch = &w->batch;
    if (w->device->host_is_device) return FV_OK;
    const size_t seqs = (size_t)batch->num_seqs, tokens = (size_t)batch->num_tokens;
    const struct {
        const void *host;
        size_t bytes;
    } arrays[] = {
        {w->query_start, (seqs + 1) * sizeof(int32_t)},
        {w->spec.seq_lens, seqs * sizeof(int32_t)},
        {w->block_table, seqs * (size_t)batch->block_table_stride * sizeof(int32_t)},
        {w->slot_mapping, tokens * sizeof(int64_t)},
        {w->causal, seqs},
        {w->tree_mask, tokens * sizeof(uint64_t)},
    };
    for (int32_t i = 0; i < FV_ARRAY_LEN(arrays); i++) {
        const fv_status status = fv_bench_send(&w->sent[i], w->device, arrays[i].host, arrays[i].bytes);
        if (status != FV_OK) return status;
    }
    batch->query_start = w->sent[0];
    batch->seq_lens = w->sent[1];
    batch->block_table = w->sent[2];
    batch->slot_mapping = w->sent[3];
    batch->causal = w->sent[4];
    batch->tree_mask = w->sent[5];
    batch->host_query_start = w->query_start;
    batch->host_seq_lens = w->spec.seq_lens;
    batch->host_causal = w->causal;
    return FV_OK;
}

fv_status fv_workload_init(fv_workload *w, fv_context *context, fv_device *device, const fv_problem *problem,
                           const char *spec_text, const fv_workload_options *options)
{
    fv_status status = fv_workload_read_batch(w, context, device, problem, spec_text, options->shared_prefix);
    if (status != FV_OK) return status;
    w->layer.struct_size = sizeof(w->layer);
    tensor_size sizes[NUM_TENSORS];
    size_tensors(sizes, w, options->stored);
    status = check_memory(w, sizes);
    if (status == FV_OK) status = fv_workload_fill_batch(w);
    if (status == FV_OK) status = send_batch(w);
    if (status == FV_OK) status = make_per_head(w, &w->layer);
    if (status == FV_OK) status = make_tensors(w, &w->layer, sizes);
    if (status == FV_OK) status = make_caches(w, options->warm);
    if (status != FV_OK) fv_workload_deinit(w);
    return status;
}

void fv_workload_deinit(fv_workload *w)
{
    for (int32_t i = 0; i < w->num_copies; i++) fv_bench_free(w->device, w->caches[i]);
    for (int32_t i = 0; i < FV_ARRAY_LEN(w->tensors); i++) fv_bench_free(w->device, w->tensors[i]);
    for (int32_t i = 0; i < FV_ARRAY_LEN(w->sent); i++) fv_bench_free(w->device, w->sent[i]);
    fv_bench_free(w->device, w->per_head);
    free(w->ranges);
    free(w->query_start);
    free(w->block_table);
    free(w->slot_mapping);
    free(w->shared_blocks);
    free(w->tree_mask);
    free(w->causal);
    fv_mla_products_destroy(w->products);
    fv_batch_spec_deinit(&w->spec);
    *w = (fv_workload){0};
}
