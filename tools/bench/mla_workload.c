/* Weights, cache and batch; a plan at a time. */
#include "bench/mla_workload.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bench/random_data.h"
#include "core/compiler.h"
#include "core/error.h"

#define ALIGNMENT 256
#define ROPE_BASE 10000.0

static fv_status allocate(void *memory, size_t bytes)
{
    const size_t rounded = (bytes + ALIGNMENT) / ALIGNMENT * ALIGNMENT;
    void *allocated = aligned_alloc(ALIGNMENT, rounded);
    memcpy(memory, &allocated, sizeof(allocated));
    return allocated ? FV_OK : fv_fail(FV_ERR_NO_MEMORY, "no memory for %zu bytes", bytes);
}

/* A dense matrix of normal numbers times `factor`. */
static fv_status make_matrix(fv_tensor *tensor, fv_mla_workload *w, int64_t rows, int64_t columns, float factor)
{
    const fv_dtype dtype = w->sizes.dtype;
    const size_t bytes = (size_t)(rows * columns) * fv_dtype_bytes(dtype);
    void **data = &w->tensors[w->num_tensors++];
    fv_random_pool pool = {0};
    fv_status status = allocate(data, bytes);
    if (status == FV_OK) status = fv_random_pool_init(&pool, dtype);
    if (status == FV_OK) {
        fv_random_pool_scale(&pool, dtype, factor);
        pool.state += (uint64_t)w->num_tensors;
        fv_random_fill(&pool, *data, bytes);
        *tensor = fv_tensor_2d(*data, dtype, rows, columns);
    }
    fv_random_pool_deinit(&pool);
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
    if (status == FV_OK) status = make_weights(&layer->q_down, w, sizes->q_lora, sizes->dim);
    if (status == FV_OK) status = make_weights(&layer->q_up, w, heads * head, sizes->q_lora);
    if (status == FV_OK) {
        status = make_weights(&layer->kv_down, w, mla->kv_lora_rank + mla->qk_rope_head_dim, sizes->dim);
    }
    fv_tensor kv_up;
    const int64_t up_rows = mla->qk_nope_head_dim + mla->v_head_dim;
    if (status == FV_OK) status = make_weights(&kv_up, w, heads * up_rows, mla->kv_lora_rank);
    if (status == FV_OK) layer->kv_up = fv_tensor_3d(kv_up.data, sizes->dtype, heads, up_rows, mla->kv_lora_rank);
    return status == FV_OK ? make_weights(&layer->o, w, sizes->dim, heads * mla->v_head_dim) : status;
}

/* theta_i = 10000^(-i / 32), rotation by halves. */
static fv_status make_tables(fv_mla_workload *w)
{
    const int32_t half = w->sizes.mla.qk_rope_head_dim / 2;
    const size_t bytes = sizeof(float) * (size_t)w->max_keys * (size_t)half;
    fv_status status = allocate(&w->cos, bytes);
    if (status == FV_OK) status = allocate(&w->sin, bytes);
    if (status != FV_OK) return status;
    for (int64_t position = 0; position < w->max_keys; position++) {
        for (int32_t i = 0; i < half; i++) {
            const double angle = (double)position * pow(ROPE_BASE, -(double)i / half);
            w->cos[position * half + i] = (float)cos(angle);
            w->sin[position * half + i] = (float)sin(angle);
        }
    }
    w->layer.rotation = (fv_rotation){
        .struct_size = sizeof(fv_rotation),
        .style = FV_ROPE_HALF,
        .rope_dim = 2 * half,
        .cos = w->cos,
        .sin = w->sin,
        .max_position = w->max_keys,
        .positions_32 = w->positions,
    };
    return FV_OK;
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
    fv_random_pool pool = {0};
    fv_status status = fv_kv_view_bytes(&bytes, FV_KV_LAYOUT_LATENT, sizes->kv_dtype, num_blocks, FV_MLA_BLOCK_SIZE, 1,
                                        entry);
    if (status == FV_OK) status = allocate(&w->cache, bytes);
    if (status == FV_OK) status = fv_random_pool_init(&pool, sizes->kv_dtype);
    if (status == FV_OK) {
        fv_random_fill(&pool, w->cache, bytes);
        status = fv_kv_view_init(&w->layer.kv_cache, w->cache, FV_KV_LAYOUT_LATENT, sizes->kv_dtype, num_blocks,
                                 FV_MLA_BLOCK_SIZE, 1, entry);
    }
    fv_random_pool_deinit(&pool);
    return status;
}

static fv_status make_batch(fv_mla_workload *w)
{
    const size_t batch = (size_t)w->sizes.batch;
    w->width = (int32_t)fv_ceil_div(w->max_keys, FV_MLA_BLOCK_SIZE);
    fv_status status = allocate(&w->query_start, sizeof(int32_t) * (batch + 1));
    if (status == FV_OK) status = allocate(&w->seq_lens, sizeof(int32_t) * batch);
    if (status == FV_OK) status = allocate(&w->positions, sizeof(int32_t) * batch);
    if (status == FV_OK) status = allocate(&w->slots, sizeof(int64_t) * batch);
    if (status == FV_OK) status = allocate(&w->block_table, sizeof(int32_t) * batch * (size_t)w->width);
    if (status == FV_OK) shuffle_blocks(w);
    return status;
}

fv_status fv_mla_workload_init(fv_mla_workload *w, const fv_mla_sizes *sizes, int32_t max_length, int32_t num_threads)
{
    const fv_context_options options = {.struct_size = sizeof(options), .num_threads = num_threads};
    fv_layer products = {0};
    *w = (fv_mla_workload){.sizes = *sizes, .max_keys = max_length + 1};
    fv_status status = fv_context_create(&w->context, &options);
    if (status == FV_OK) status = fv_mla_products_create(&w->products, &products, w->context);
    if (status == FV_OK) status = make_batch(w);
    if (status == FV_OK) status = make_tensors(w);
    if (status == FV_OK) status = make_tables(w);
    if (status == FV_OK) status = make_cache(w);
    w->timer = (fv_mla_timer){.layer = &w->layer, .gemm = products.gemm, .gemm_user = products.gemm_user};
    w->layer.struct_size = sizeof(w->layer);
    w->layer.gemm = fv_mla_timer_gemm;
    w->layer.gemm_user = &w->timer;
    return status;
}

void fv_mla_workload_deinit(fv_mla_workload *w)
{
    fv_plan_destroy(w->plan);
    for (int32_t i = 0; i < w->num_tensors; i++) free(w->tensors[i]);
    void *const memory[] = {w->cos,         w->sin,   w->query_start, w->seq_lens, w->positions,
                            w->block_table, w->slots, w->cache,       w->workspace};
    for (int32_t i = 0; i < FV_ARRAY_LEN(memory); i++) free(memory[i]);
    fv_mla_products_destroy(w->products);
    fv_context_destroy(w->context);
}

fv_status fv_mla_workload_plan(fv_mla_workload *w, int32_t length, const char *backend)
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
    const fv_plan_options plan_options = {.struct_size = sizeof(plan_options), .backend = backend};
    fv_plan_destroy(w->plan);
    w->plan = NULL;
    fv_status status = fv_plan_create(&w->plan, w->context, &problem, &bounds, &plan_options);
    if (status != FV_OK) return status;
    for (int32_t seq = 0; seq < sizes->batch; seq++) {
        w->query_start[seq + 1] = seq + 1;
        w->seq_lens[seq] = length + 1;
        w->positions[seq] = length;
        const int64_t block = w->block_table[(int64_t)seq * w->width + length / FV_MLA_BLOCK_SIZE];
        w->slots[seq] = block * FV_MLA_BLOCK_SIZE + length % FV_MLA_BLOCK_SIZE;
    }
    w->query_start[0] = 0;
    const fv_batch batch = {
        .struct_size = sizeof(batch),
        .num_seqs = sizes->batch,
        .num_tokens = sizes->batch,
        .query_start = w->query_start,
        .seq_lens = w->seq_lens,
        .block_table = w->block_table,
        .block_table_stride = w->width,
        .block_table_width = w->width,
        .slot_mapping = w->slots,
    };
    status = fv_plan_update(w->plan, &batch, NULL);
    free(w->workspace);
    w->workspace = NULL;
    return status == FV_OK ? allocate(&w->workspace, fv_mla_workspace_bytes(w->plan, sizes->q_lora)) : status;
}
