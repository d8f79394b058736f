/* The bf16 kernel: oneDNN's inner_product on blocked bf16 weights, for CPUs with AVX512_BF16 or AMX.
 * On a Xeon with AMX, 2 threads, SmolLM2 decodes 1.7 times and prefills 3 times as fast as in fp32.
 *
 * A primitive is compiled for one number of rows. A run is cut into row counts from a short list, the
 * rest padded up to the next one, so that a handful of primitives serves every batch. Padding is computed like
 * the rest: the counts lie so close that it is less than half.
 *
 *   rows of X  |      128      |      128      |  37 of 48  |
 *
 * Primitives are made when a weight's shape is first seen, their memory objects once for each worker,
 * and the scratchpad is ours: a run creates and allocates nothing. */
#include <oneapi/dnnl/dnnl.h>
#include <stdlib.h>
#include <string.h>

#include "core/compiler.h"
#include "core/float.h"
#include "engine/gemm_kernel.h"

enum { chunk_outputs = 64, row_block = 128, num_row_counts = 9, max_shapes = 32, num_args = 4, alignment = 64 };
static const int64_t row_counts[num_row_counts] = {1, 4, 8, 16, 32, 48, 64, 96, row_block};

/* inner_product for one row count, and for each worker its arguments: src, weights, dst, scratchpad. */
typedef struct primitive_set {
    dnnl_primitive_t primitive; /* NULL: oneDNN has none for this count and layout; the next count serves */
    dnnl_memory_t *memory;      /* [num_workers][num_args] */
} primitive_set;

/* Chunks of one shape; their weights have one layout for all row counts. */
typedef struct chunk_shape {
    int64_t num_outputs;
    int64_t in_features;
    dnnl_memory_desc_t weights;
    primitive_set sets[num_row_counts];
} chunk_shape;

typedef struct bf16_worker {
    dnnl_stream_t stream;
    float *dst; /* [row_block, chunk_outputs] */
    void *scratchpad;
    size_t scratchpad_bytes;
} bf16_worker;

typedef struct bf16_state {
    dnnl_engine_t engine;
    dnnl_primitive_attr_t attr;
    int32_t num_workers;
    bf16_worker *workers;
    uint16_t *x; /* the rows of the current run */
    chunk_shape *shapes[max_shapes];
    int32_t num_shapes;
} bf16_state;

const char *fv_gemm_bf16_why_not(void)
{
    const unsigned isa = (unsigned)dnnl_get_effective_cpu_isa();
    const unsigned needed = dnnl_cpu_isa_avx512_core_bf16;
    return (isa & needed) == needed ? NULL : "the CPU has neither AVX512_BF16 nor AMX, or oneDNN may not use them";
}

static void destroy_shape(chunk_shape *shape, int32_t num_workers)
{
    if (!shape) return;
    for (int32_t i = 0; i < num_row_counts; i++) {
        primitive_set *set = &shape->sets[i];
        if (set->primitive) dnnl_primitive_destroy(set->primitive);
        for (int32_t j = 0; set->memory && j < num_workers * num_args; j++) {
            if (set->memory[j]) dnnl_memory_destroy(set->memory[j]);
        }
        free(set->memory);
    }
    free(shape);
}

static void bf16_destroy(void *state)
{
    bf16_state *bf16 = state;
    if (!bf16) return;
    for (int32_t i = 0; i < bf16->num_shapes; i++) destroy_shape(bf16->shapes[i], bf16->num_workers);
    for (int32_t i = 0; bf16->workers && i < bf16->num_workers; i++) {
        if (bf16->workers[i].stream) dnnl_stream_destroy(bf16->workers[i].stream);
        free(bf16->workers[i].dst);
        free(bf16->workers[i].scratchpad);
    }
    free(bf16->workers);
    free(bf16->x);
    if (bf16->attr) dnnl_primitive_attr_destroy(bf16->attr);
    if (bf16->engine) dnnl_engine_destroy(bf16->engine);
    free(bf16);
}

static fv_status create_workers(bf16_state *bf16)
{
    bf16->workers = calloc((size_t)bf16->num_workers, sizeof(*bf16->workers));
    if (!bf16->workers) return fv_fail(FV_ERR_NO_MEMORY, "no memory for %d GEMM workers", bf16->num_workers);
    for (int32_t i = 0; i < bf16->num_workers; i++) {
        bf16_worker *worker = &bf16->workers[i];
        worker->dst = aligned_alloc(alignment, row_block * chunk_outputs * sizeof(float));
        if (!worker->dst) return fv_fail(FV_ERR_NO_MEMORY, "no memory for a GEMM worker");
        const dnnl_status_t status = dnnl_stream_create(&worker->stream, bf16->engine, dnnl_stream_default_flags);
        if (status != dnnl_success) return fv_gemm_fail("dnnl_stream_create", status);
    }
    return FV_OK;
}

static fv_status bf16_create(void **state, int32_t num_workers)
{
    bf16_state *bf16 = calloc(1, sizeof(*bf16));
    if (!bf16) return fv_fail(FV_ERR_NO_MEMORY, "no memory for the GEMM");
    bf16->num_workers = num_workers;

    fv_status failure;
    dnnl_status_t status = dnnl_engine_create(&bf16->engine, dnnl_cpu, 0);
    if (status == dnnl_success) status = dnnl_primitive_attr_create(&bf16->attr);
    if (status == dnnl_success) status = dnnl_primitive_attr_set_scratchpad_mode(bf16->attr, dnnl_scratchpad_mode_user);
    failure = status == dnnl_success ? create_workers(bf16) : fv_gemm_fail("dnnl_engine_create", status);
    if (failure != FV_OK) {
        bf16_destroy(bf16);
        return failure;
    }
    *state = bf16;
    return FV_OK;
}

/* Room for X, and for the padding of the last block. */
static fv_status bf16_reserve(void *state, int64_t num_rows, int64_t in_features)
{
    bf16_state *bf16 = state;
    const size_t bytes = (size_t)fv_round_up((num_rows + row_block) * in_features * 2, alignment);
    uint16_t *x = aligned_alloc(alignment, bytes);
    if (!x) return fv_fail(FV_ERR_NO_MEMORY, "no memory for %zu bytes of bf16 activations", bytes);
    memset(x, 0, bytes);
    free(bf16->x);
    bf16->x = x;
    return FV_OK;
}

static fv_status grow_scratchpads(bf16_state *bf16, size_t bytes)
{
    for (int32_t i = 0; i < bf16->num_workers; i++) {
        bf16_worker *worker = &bf16->workers[i];
        if (bytes <= worker->scratchpad_bytes) continue;
        void *grown = aligned_alloc(alignment, (size_t)fv_round_up((int64_t)bytes, alignment));
        if (!grown) return fv_fail(FV_ERR_NO_MEMORY, "no memory for a GEMM scratchpad of %zu bytes", bytes);
        free(worker->scratchpad);
        worker->scratchpad = grown;
        worker->scratchpad_bytes = bytes;
    }
    return FV_OK;
}

/* The descriptor of the inner product of `num_rows` rows; weights.ndims 0: oneDNN chooses the layout. */
static dnnl_status_t describe(dnnl_primitive_desc_t *desc, const bf16_state *bf16, const chunk_shape *shape,
                              int64_t num_rows)
{
    const dnnl_dims_t src_dims = {num_rows, shape->in_features};
    const dnnl_dims_t weights_dims = {shape->num_outputs, shape->in_features};
    const dnnl_dims_t dst_dims = {num_rows, shape->num_outputs};
    dnnl_memory_desc_t src, weights = shape->weights, dst;
    dnnl_memory_desc_init_by_tag(&src, 2, src_dims, dnnl_bf16, dnnl_ab);
    dnnl_memory_desc_init_by_tag(&dst, 2, dst_dims, dnnl_f32, dnnl_ab);
    if (weights.ndims == 0) {
        dnnl_memory_desc_init_by_tag(&weights, 2, weights_dims, dnnl_bf16, dnnl_format_tag_any);
    }
    dnnl_inner_product_desc_t op;
    const dnnl_status_t status = dnnl_inner_product_forward_desc_init(&op, dnnl_forward_inference, &src, &weights, NULL,
                                                                      &dst);
    if (status != dnnl_success) return status;
    return dnnl_primitive_desc_create(desc, &op, bf16->attr, bf16->engine, NULL);
}

static fv_status create_memory(primitive_set *set, const bf16_state *bf16, const_dnnl_primitive_desc_t desc)
{
    static const dnnl_query_t queries[num_args] = {dnnl_query_src_md, dnnl_query_weights_md, dnnl_query_dst_md,
                                                   dnnl_query_scratchpad_md};
    set->memory = calloc((size_t)bf16->num_workers * num_args, sizeof(*set->memory));
    if (!set->memory) return fv_fail(FV_ERR_NO_MEMORY, "no memory for the arguments of a GEMM");
    for (int32_t i = 0; i < bf16->num_workers * num_args; i++) {
        const dnnl_memory_desc_t *md = dnnl_primitive_desc_query_md(desc, queries[i % num_args], 0);
        const dnnl_status_t status = dnnl_memory_create(&set->memory[i], md, bf16->engine, DNNL_MEMORY_NONE);
        if (status != dnnl_success) return fv_gemm_fail("dnnl_memory_create", status);
    }
    return FV_OK;
}

/* A plain loop in place of vector code would be a thousand times slower: count it as missing. */
static bool is_reference(const_dnnl_primitive_desc_t desc)
{
    const char *name = "";
    dnnl_primitive_desc_query(desc, dnnl_query_impl_info_str, 0, &name);
    return strncmp(name, "ref", 3) == 0;
}

static fv_status create_set(primitive_set *set, bf16_state *bf16, chunk_shape *shape, int64_t num_rows)
{
    dnnl_primitive_desc_t desc;
    const dnnl_status_t described = describe(&desc, bf16, shape, num_rows);
    if (described == dnnl_unimplemented) return FV_OK;
    if (described != dnnl_success) return fv_gemm_fail("inner_product", described);

    fv_status status = FV_OK;
    if (is_reference(desc)) goto done;
    if (shape->weights.ndims == 0) shape->weights = *dnnl_primitive_desc_query_md(desc, dnnl_query_weights_md, 0);
    status = create_memory(set, bf16, desc);
    if (status != FV_OK) goto done;
    const dnnl_memory_desc_t *scratchpad = dnnl_primitive_desc_query_md(desc, dnnl_query_scratchpad_md, 0);
    status = grow_scratchpads(bf16, dnnl_memory_desc_get_size(scratchpad));
    if (status != FV_OK) goto done;
    const dnnl_status_t created = dnnl_primitive_create(&set->primitive, desc);
    if (created != dnnl_success) status = fv_gemm_fail("dnnl_primitive_create", created);

done:
    dnnl_primitive_desc_destroy(desc);
    return status;
}

static chunk_shape *find_shape(const bf16_state *bf16, int64_t num_outputs, int64_t in_features)
{
    for (int32_t i = 0; i < bf16->num_shapes; i++) {
        chunk_shape *shape = bf16->shapes[i];
        if (shape->num_outputs == num_outputs && shape->in_features == in_features) return shape;
    }
    return NULL;
}

static fv_status bf16_prepare(size_t *chunk_bytes, void *state, int64_t num_outputs, int64_t in_features)
{
    bf16_state *bf16 = state;
    chunk_shape *shape = find_shape(bf16, num_outputs, in_features);
    if (!shape) {
        if (bf16->num_shapes == max_shapes) {
            return fv_fail(FV_ERR_UNSUPPORTED, "weights of more than %d different shapes", max_shapes);
        }
        shape = calloc(1, sizeof(*shape));
        if (!shape) return fv_fail(FV_ERR_NO_MEMORY, "no memory for the shape of a weight");
        shape->num_outputs = num_outputs;
        shape->in_features = in_features;
        bf16->shapes[bf16->num_shapes++] = shape;
        /* The largest first: it chooses the layout of the weights. */
        for (int32_t i = num_row_counts - 1; i >= 0; i--) {
            const fv_status status = create_set(&shape->sets[i], bf16, shape, row_counts[i]);
            if (status != FV_OK) return status;
        }
    }
    if (!shape->sets[num_row_counts - 1].primitive) {
        return fv_fail(FV_ERR_UNSUPPORTED, "oneDNN has no fast bf16 inner product for weights of %lld x %lld",
                       (long long)num_outputs, (long long)in_features);
    }
    *chunk_bytes = dnnl_memory_desc_get_size(&shape->weights);
    return FV_OK;
}

static fv_status bf16_pack(void *state, const fv_gemm_chunk *chunk, const float *rows, int32_t worker)
{
    bf16_state *bf16 = state;
    const chunk_shape *shape = find_shape(bf16, chunk->num_outputs, chunk->in_features);
    const dnnl_dims_t dims = {chunk->num_outputs, chunk->in_features};
    dnnl_memory_desc_t plain;
    dnnl_memory_desc_init_by_tag(&plain, 2, dims, dnnl_f32, dnnl_ab);

    dnnl_primitive_desc_t desc = NULL;
    dnnl_primitive_t reorder = NULL;
    dnnl_memory_t from = NULL, to = NULL;
    dnnl_status_t status = dnnl_memory_create(&from, &plain, bf16->engine, (void *)(uintptr_t)rows);
    if (status == dnnl_success) status = dnnl_memory_create(&to, &shape->weights, bf16->engine, chunk->data);
    if (status == dnnl_success) {
        status = dnnl_reorder_primitive_desc_create(&desc, &plain, bf16->engine, &shape->weights, bf16->engine, NULL);
    }
    if (status == dnnl_success) status = dnnl_primitive_create(&reorder, desc);
    const dnnl_exec_arg_t args[] = {{DNNL_ARG_FROM, from}, {DNNL_ARG_TO, to}};
    if (status == dnnl_success) status = dnnl_primitive_execute(reorder, bf16->workers[worker].stream, 2, args);

    if (reorder) dnnl_primitive_destroy(reorder);
    if (desc) dnnl_primitive_desc_destroy(desc);
    if (to) dnnl_memory_destroy(to);
    if (from) dnnl_memory_destroy(from);
    return status == dnnl_success ? FV_OK : fv_gemm_fail("reorder of weights", status);
}

static void bf16_load_rows(void *state, const float *x, int64_t first_row, int64_t num_rows, int64_t in_features)
{
    uint16_t *to = ((bf16_state *)state)->x;
    const int64_t end = (first_row + num_rows) * in_features;
    for (int64_t i = first_row * in_features; i < end; i++) to[i] = fv_bf16_of_f32(x[i]);
}

/* The smallest count that covers num_rows and has a primitive; the largest always has. */
static int32_t find_row_count(const chunk_shape *shape, int64_t num_rows)
{
    int32_t index = 0;
    while (row_counts[index] < num_rows || !shape->sets[index].primitive) index++;
    return index;
}

static dnnl_status_t execute(bf16_state *bf16, const chunk_shape *shape, int32_t count_index, int64_t first_row,
                             const fv_gemm_chunk *chunk, int32_t worker)
{
    static const int arg_names[num_args] = {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST, DNNL_ARG_SCRATCHPAD};
    const bf16_worker *own = &bf16->workers[worker];
    const primitive_set *set = &shape->sets[count_index];
    void *const data[num_args] = {bf16->x + first_row * chunk->in_features, chunk->data, own->dst, own->scratchpad};
    dnnl_exec_arg_t args[num_args];
    for (int32_t i = 0; i < num_args; i++) {
        args[i].arg = arg_names[i];
        args[i].memory = set->memory[worker * num_args + i];
        const dnnl_status_t status = dnnl_memory_set_data_handle(args[i].memory, data[i]);
        if (status != dnnl_success) return status;
    }
    return dnnl_primitive_execute(set->primitive, own->stream, num_args, args);
}

static fv_status bf16_run(void *state, float *y, int64_t y_stride, const float *x, int64_t first_row, int64_t num_rows,
                          const fv_gemm_chunk *chunk, bool batch_invariant, int32_t worker)
{
    (void)x; /* load_rows has it */
    bf16_state *bf16 = state;
    const chunk_shape *shape = find_shape(bf16, chunk->num_outputs, chunk->in_features);
    for (int64_t done = 0; done < num_rows;) {
        const int64_t count = batch_invariant ? 1 : num_rows - done;
        const dnnl_status_t status = execute(bf16, shape, find_row_count(shape, count), first_row + done, chunk,
                                             worker);
        if (status != dnnl_success) return fv_gemm_fail("inner_product", status);
        const float *dst = bf16->workers[worker].dst;
        for (int64_t row = 0; row < count; row++) {
            memcpy(y + (done + row) * y_stride, dst + row * chunk->num_outputs,
                   (size_t)chunk->num_outputs * sizeof(float));
        }
        done += count;
    }
    return FV_OK;
}

const fv_gemm_kernel fv_gemm_kernel_bf16 = {
    .dtype = FV_DTYPE_BF16,
    .chunk_outputs = chunk_outputs,
    .row_block = row_block,
    .create = bf16_create,
    .destroy = bf16_destroy,
    .reserve = bf16_reserve,
    .prepare = bf16_prepare,
    .pack = bf16_pack,
    .load_rows = bf16_load_rows,
    .run = bf16_run,
};
