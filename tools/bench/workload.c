#include "bench/workload.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "core/error.h"
#include "core/float.h"
#include "ops/attend_paged.h"

#define POOL_ELEMENTS (1 << 20) /* random values that the data are cut from */
#define RANGE_BYTES (64 << 10)  /* longer pages are read in pieces, so that the workers get equal shares */
#define COLD_CACHES 4           /* copies together: this many last-level caches */
#define MAX_COPY_BYTES (2ll << 30)
#define HUGE_PAGE_BYTES (2 << 20)

int64_t fv_last_level_cache_bytes(void)
{
    const long l3 = sysconf(_SC_LEVEL3_CACHE_SIZE);
    if (l3 > 0) return l3;
    const long l2 = sysconf(_SC_LEVEL2_CACHE_SIZE);
    return l2 > 0 ? l2 : 32 << 20;
}

/* xorshift64* (Vigna, 2016). */
static uint64_t next_random(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * 0x2545f4914f6cdd1du;
}

/* About normal, mean 0 and variance 1: the sum of 12 uniform values, less 6. */
static float next_normal(uint64_t *state)
{
    float sum = -6.0f;
    for (int32_t i = 0; i < 12; i += 3) {
        const uint64_t bits = next_random(state);
        sum += ((float)(bits & 0xfffff) + (float)(bits >> 20 & 0xfffff) + (float)(bits >> 40 & 0xfffff)) / 1048576.0f;
    }
    return sum;
}

typedef struct random_pool {
    char *data;
    size_t bytes;
    size_t element;
    uint64_t state;
} random_pool;

static fv_status random_pool_init(random_pool *pool, fv_dtype dtype)
{
    *pool = (random_pool){.element = fv_dtype_bytes(dtype), .state = 0x9e3779b97f4a7c15u};
    pool->bytes = pool->element * POOL_ELEMENTS;
    pool->data = malloc(pool->bytes);
    if (!pool->data) return fv_fail(FV_ERR_NO_MEMORY, "no memory for random data");
    for (size_t i = 0; i < POOL_ELEMENTS; i++)
        fv_float_store(pool->data + i * pool->element, next_normal(&pool->state), dtype);
    return FV_OK;
}

/* Fills `bytes` from random places of the pool, a few KiB at a time: fast, and no two pages alike. */
static void random_fill(random_pool *pool, void *data, size_t bytes)
{
    const size_t piece = 8192;
    for (size_t at = 0; at < bytes; at += piece) {
        const size_t size = bytes - at < piece ? bytes - at : piece;
        const size_t from = (size_t)(next_random(&pool->state) % ((pool->bytes - piece) / pool->element)) *
                            pool->element;
        memcpy((char *)data + at, pool->data + from, size);
    }
}

/* Cache memory on huge pages where the system gives them. */
static void *alloc_cache(size_t bytes)
{
    void *memory = aligned_alloc(HUGE_PAGE_BYTES, (size_t)fv_round_up((int64_t)bytes, HUGE_PAGE_BYTES));
    if (memory) madvise(memory, bytes, MADV_HUGEPAGE);
    return memory;
}

static int32_t is_packed(fv_kv_layout layout)
{
    return layout == FV_KV_LAYOUT_PACKED_NHD || layout == FV_KV_LAYOUT_PACKED_HND;
}

/* Bytes of all heads of one token: of K, and of V where that lies elsewhere (else 0). */
static void token_bytes(int64_t *k_bytes, int64_t *v_bytes, const fv_workload *w)
{
    const fv_problem *problem = &w->problem;
    const int64_t element = (int64_t)fv_dtype_bytes(problem->kv_dtype);
    if (problem->kind == FV_ATTENTION_MLA) {
        *k_bytes = problem->kv_layout == FV_KV_LAYOUT_LATENT_FP8_DS
                       ? 656
                       : (problem->mla.kv_lora_rank + problem->mla.qk_rope_head_dim) * element;
        *v_bytes = 0;
        return;
    }
    *k_bytes = problem->mha.num_kv_heads * problem->mha.head_size * element;
    *v_bytes = problem->mha.num_kv_heads * problem->mha.v_head_size * element;
    if (!is_packed(problem->kv_layout)) return;
    *k_bytes += *v_bytes;
    *v_bytes = 0;
}

/* A dense cache whose K and V differ in size: all K blocks, then all V blocks. */
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

static fv_status view_cache(fv_kv_view *view, const fv_workload *w, void *data)
{
    const fv_problem *problem = &w->problem;
    if (problem->kv_layout == FV_KV_LAYOUT_STRIDED) {
        view_strided(view, w, data);
        return FV_OK;
    }
    const int32_t mla = problem->kind == FV_ATTENTION_MLA;
    return fv_kv_view_init(view, data, problem->kv_layout, problem->kv_dtype, w->num_blocks, problem->block_size,
                           mla ? 1 : problem->mha.num_kv_heads,
                           mla ? problem->mla.kv_lora_rank + problem->mla.qk_rope_head_dim : problem->mha.head_size);
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
                         !w->problem.not_causal, w->problem.window);
}

/* In a layout with whole tokens side by side the last block's unused part is left out exactly; in the
 * others the same number of bytes is read from the front of the page. */
static void walk_ranges(fv_workload *w)
{
    int64_t k_bytes, v_bytes;
    token_bytes(&k_bytes, &v_bytes, w);
    const fv_kv_view *view = &w->layers[0].kv_cache;
    const int32_t block_size = w->problem.block_size;
    w->num_ranges = w->read_bytes = 0;
    for (int32_t seq = 0; seq < w->spec.num_seqs; seq++) {
        const fv_key_range keys = seq_keys(w, seq);
        const int32_t *row = w->block_table + seq * w->batch.block_table_stride;
        for (int32_t key = keys.first; key < keys.end;) {
            const int32_t slot = key % block_size;
            const int32_t count = fv_min_i32(block_size - slot, keys.end - key);
            const int64_t block = row[key / block_size];
            add_range(w, block * view->k.block_stride + slot * k_bytes, count * k_bytes);
            if (v_bytes) {
                const int64_t v_offset = (char *)view->v.data - (char *)view->k.data;
                add_range(w, v_offset + block * view->v.block_stride + slot * v_bytes, count * v_bytes);
            }
            key += count;
        }
    }
}

static fv_status list_ranges(fv_workload *w)
{
    free(w->ranges);
    w->ranges = NULL;
    walk_ranges(w); /* counts */
    w->ranges = malloc((size_t)w->num_ranges * sizeof(*w->ranges));
    if (!w->ranges) return fv_fail(FV_ERR_NO_MEMORY, "no memory for a list of %lld pages", (long long)w->num_ranges);
    walk_ranges(w);
    return FV_OK;
}

static void count_flops(fv_workload *w)
{
    const fv_problem *problem = &w->problem;
    const int32_t mla = problem->kind == FV_ATTENTION_MLA;
    const double per_key = mla ? 2.0 * problem->mla.num_heads *
                                     (2 * problem->mla.kv_lora_rank + problem->mla.qk_rope_head_dim)
                               : 2.0 * problem->mha.num_heads * (problem->mha.head_size + problem->mha.v_head_size);
    w->flops = 0;
    for (int32_t seq = 0; seq < w->spec.num_seqs; seq++) {
        const int32_t query_len = w->spec.query_lens[seq], seq_len = w->spec.seq_lens[seq];
        for (int32_t token = 0; token < query_len; token++) {
            const fv_key_range keys = fv_row_keys(&problem->context_parallel, seq_len, seq_len - query_len + token,
                                                  !problem->not_causal, problem->window);
            w->flops += per_key * (keys.end - keys.first);
        }
    }
}

/* Lengths, a random permutation of the blocks 1 .. num_blocks - 1, and the slots of the new tokens. */
static fv_status make_batch(fv_workload *w)
{
    const fv_batch_spec *spec = &w->spec;
    const int32_t block_size = w->problem.block_size;
    const int64_t width = fv_ceil_div(spec->max_seq_len, block_size);
    w->num_blocks = 1;
    for (int32_t seq = 0; seq < spec->num_seqs; seq++) w->num_blocks += fv_ceil_div(spec->seq_lens[seq], block_size);
    if (w->num_blocks > INT32_MAX) return fv_fail(FV_ERR_INVALID, "the batch needs more than 2^31 blocks");

    w->query_start = malloc(((size_t)spec->num_seqs + 1) * sizeof(*w->query_start));
    w->block_table = calloc((size_t)spec->num_seqs * (size_t)width, sizeof(*w->block_table));
    w->slot_mapping = malloc((size_t)spec->num_tokens * sizeof(*w->slot_mapping));
    int32_t *blocks = malloc((size_t)w->num_blocks * sizeof(*blocks));
    if (!w->query_start || !w->block_table || !w->slot_mapping || !blocks) {
        free(blocks);
        return fv_fail(FV_ERR_NO_MEMORY, "no memory for the tables of %d sequences", spec->num_seqs);
    }
    uint64_t state = 0x2545f4914f6cdd1du;
    for (int64_t i = 0; i < w->num_blocks; i++) blocks[i] = (int32_t)i;
    for (int64_t i = w->num_blocks - 1; i > 1; i--) {
        const int64_t other = 1 + (int64_t)(next_random(&state) % (uint64_t)i);
        const int32_t kept = blocks[i];
        blocks[i] = blocks[other];
        blocks[other] = kept;
    }
    int64_t next_block = 1;
    int32_t token = 0;
    for (int32_t seq = 0; seq < spec->num_seqs; seq++) {
        int32_t *row = w->block_table + seq * width;
        const int32_t seq_len = spec->seq_lens[seq];
        for (int32_t i = 0; i < fv_ceil_div(seq_len, block_size); i++) row[i] = blocks[next_block++];
        w->query_start[seq] = token;
        for (int32_t position = seq_len - spec->query_lens[seq]; position < seq_len; position++) {
            w->slot_mapping[token++] = (int64_t)row[position / block_size] * block_size + position % block_size;
        }
    }
    w->query_start[spec->num_seqs] = token;
    free(blocks);

    w->batch = (fv_batch){
        .struct_size = sizeof(w->batch),
        .num_seqs = spec->num_seqs,
        .num_tokens = spec->num_tokens,
        .max_query_len = spec->max_query_len,
        .max_seq_len = spec->max_seq_len,
        .query_start = w->query_start,
        .seq_lens = spec->seq_lens,
        .block_table = w->block_table,
        .block_table_stride = width,
        .block_table_width = (int32_t)width,
        .slot_mapping = w->slot_mapping,
    };
    w->bounds = (fv_bounds){
        .struct_size = sizeof(w->bounds),
        .max_num_seqs = spec->num_seqs,
        .max_num_tokens = spec->num_tokens,
        .max_query_len = spec->max_query_len,
        .max_seq_len = spec->max_seq_len,
    };
    return FV_OK;
}

/* Sinks, slopes and scales: one array each of Hq (sinks, slopes) or Hkv (scales). */
static fv_status make_per_head(fv_workload *w, fv_layer *layer)
{
    const int32_t heads = w->problem.mha.num_heads;
    w->per_head = malloc(4 * (size_t)heads * sizeof(float));
    if (!w->per_head) return fv_fail(FV_ERR_NO_MEMORY, "no memory for %d heads", heads);
    for (int32_t i = 0; i < heads; i++) {
        w->per_head[i] = 0.5f;                                                           /* sinks */
        w->per_head[heads + i] = 1.0f / (float)(1 << fv_min_i32(20, 1 + 8 * i / heads)); /* slopes */
        w->per_head[2 * heads + i] = w->per_head[3 * heads + i] = 0.75f;                 /* scales */
    }
    layer->sinks = w->problem.sinks ? w->per_head : NULL;
    layer->alibi_slopes = w->problem.alibi ? w->per_head + heads : NULL;
    if (w->problem.kv_scaling != FV_KV_SCALING_NONE) {
        layer->k_scale = w->per_head + 2 * heads;
        layer->v_scale = w->per_head + 3 * heads;
    }
    return FV_OK;
}

static fv_status make_tensor(fv_tensor *tensor, void **memory, random_pool *pool, fv_dtype dtype, int64_t tokens,
                             int64_t heads, int64_t elements)
{
    const size_t bytes = (size_t)(tokens * heads * elements) * fv_dtype_bytes(dtype);
    *memory = aligned_alloc(256, (size_t)fv_round_up((int64_t)bytes, 256));
    if (!*memory) return fv_fail(FV_ERR_NO_MEMORY, "no memory for a tensor of %zu bytes", bytes);
    random_fill(pool, *memory, bytes);
    *tensor = fv_tensor_3d(*memory, dtype, tokens, heads, elements);
    return FV_OK;
}

static fv_status make_tensors(fv_workload *w, fv_layer *layer)
{
    const fv_problem *problem = &w->problem;
    const fv_mla_shape *mla = &problem->mla;
    const int32_t is_mla = problem->kind == FV_ATTENTION_MLA;
    const int64_t tokens = w->spec.num_tokens;
    const int64_t heads = is_mla ? mla->num_heads : problem->mha.num_heads;
    const int64_t kv_heads = is_mla ? 1 : problem->mha.num_kv_heads;
    const int64_t d = is_mla ? mla->kv_lora_rank + mla->qk_rope_head_dim : problem->mha.head_size;
    const int64_t dv = is_mla ? mla->kv_lora_rank : problem->mha.v_head_size;
    random_pool pool;
    fv_status status = random_pool_init(&pool, problem->q_dtype);
    if (status == FV_OK) status = make_tensor(&layer->q, &w->tensors[0], &pool, problem->q_dtype, tokens, heads, d);
    if (status == FV_OK) status = make_tensor(&layer->k, &w->tensors[1], &pool, problem->q_dtype, tokens, kv_heads, d);
    if (status == FV_OK) status = make_tensor(&layer->v, &w->tensors[2], &pool, problem->q_dtype, tokens, kv_heads, dv);
    if (status == FV_OK)
        status = make_tensor(&layer->out, &w->tensors[3], &pool, problem->out_dtype, tokens, heads, dv);
    free(pool.data);
    return status;
}

static fv_status check_memory(size_t bytes)
{
    const int64_t physical = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
    if ((int64_t)bytes <= physical / 4 * 3) return FV_OK;
    return fv_fail(FV_ERR_NO_MEMORY, "the batch needs a cache of %.1f GiB; accepted here: up to %.1f GiB",
                   (double)bytes / (1 << 30), (double)(physical / 4 * 3) / (1 << 30));
}

static fv_status make_caches(fv_workload *w, int32_t warm)
{
    int64_t k_bytes, v_bytes;
    token_bytes(&k_bytes, &v_bytes, w);
    w->cache_bytes = (size_t)((k_bytes + v_bytes) * w->num_blocks * w->problem.block_size);
    const fv_status status = check_memory(w->cache_bytes);
    if (status != FV_OK) return status;

    const int64_t cold_bytes = COLD_CACHES * fv_last_level_cache_bytes();
    const int64_t wanted = warm ? 1 : fv_ceil_div(cold_bytes, (int64_t)w->cache_bytes);
    const int64_t most = fv_max_i64(1, MAX_COPY_BYTES / (int64_t)w->cache_bytes);
    w->num_copies = (int32_t)fv_min_i64(fv_min_i64(wanted, most), FV_WORKLOAD_MAX_COPIES);
    w->is_cold = (int64_t)w->cache_bytes * w->num_copies >= cold_bytes / 2;

    random_pool pool;
    fv_status made = random_pool_init(&pool, w->problem.kv_dtype);
    for (int32_t i = 0; i < w->num_copies && made == FV_OK; i++) {
        w->caches[i] = alloc_cache(w->cache_bytes);
        if (!w->caches[i]) made = fv_fail(FV_ERR_NO_MEMORY, "no memory for a cache of %zu bytes", w->cache_bytes);
        if (w->caches[i]) random_fill(&pool, w->caches[i], w->cache_bytes);
    }
    free(pool.data);
    return made;
}

fv_status fv_workload_set_layout(fv_workload *w, fv_kv_layout layout)
{
    w->problem.kv_layout = layout;
    w->problem.kv_layout_any = 0;
    for (int32_t i = 0; i < w->num_copies; i++) {
        const fv_status status = view_cache(&w->layers[i].kv_cache, w, w->caches[i]);
        if (status != FV_OK) return status;
    }
    return list_ranges(w);
}

fv_status fv_workload_init(fv_workload *w, fv_context *context, const fv_problem *problem, const char *spec_text,
                           int32_t warm)
{
    *w = (fv_workload){.context = context, .problem = *problem};
    if (problem->kv_scaling == FV_KV_SCALING_PER_TOKEN_HEAD) {
        return fv_fail(FV_ERR_UNSUPPORTED,
                       "bench makes no scales for each token and head; accepted: none, tensor, head");
    }
    fv_layer layer = {.struct_size = sizeof(layer)};
    fv_status status = fv_device_find(&w->device, context, "cpu");
    if (status == FV_OK) status = fv_batch_spec_init(&w->spec, spec_text);
    if (status == FV_OK) status = make_batch(w);
    if (status == FV_OK) status = make_per_head(w, &layer);
    if (status == FV_OK) status = make_tensors(w, &layer);
    if (status == FV_OK) status = make_caches(w, warm);
    if (status != FV_OK) {
        fv_workload_deinit(w);
        return status;
    }
    for (int32_t i = 0; i < w->num_copies; i++) w->layers[i] = layer;
    count_flops(w);
    return FV_OK;
}

void fv_workload_deinit(fv_workload *w)
{
    for (int32_t i = 0; i < w->num_copies; i++) free(w->caches[i]);
    for (int32_t i = 0; i < FV_ARRAY_LEN(w->tensors); i++) free(w->tensors[i]);
    free(w->ranges);
    free(w->query_start);
    free(w->block_table);
    free(w->slot_mapping);
    free(w->per_head);
    fv_batch_spec_deinit(&w->spec);
    *w = (fv_workload){0};
}
