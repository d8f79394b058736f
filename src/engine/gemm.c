/* Weights in chunks, tasks on the executor, and OpenMP held to one thread. */
#include "engine/gemm.h"

#include <oneapi/dnnl/dnnl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/compiler.h"
#include "core/context.h"
#include "core/float.h"
#include "engine/dequantize.h"
#include "engine/gemm_private.h"
#include "ops/layer_table.h"

/* Of the OpenMP that oneDNN is built with; both act on the calling thread only. Declared here because
 * <omp.h> belongs to one compiler. */
extern int omp_get_max_threads(void);
extern void omp_set_num_threads(int num_threads);

fv_status fv_gemm_fail(const char *call, int onednn_status)
{
    if (onednn_status == dnnl_out_of_memory) return fv_fail(FV_ERR_NO_MEMORY, "%s: no memory", call);
    return fv_fail(FV_ERR_INTERNAL, "%s failed with oneDNN status %d", call, onednn_status);
}

void fv_gemm_keep_failure(fv_gemm_job *job, fv_status status)
{
    int expected = FV_OK;
    if (atomic_compare_exchange_strong(&job->status, &expected, status)) {
        snprintf(job->text, sizeof(job->text), "%s", fv_last_error());
    }
}

fv_status fv_gemm_run_job(fv_gemm_job *job, int64_t num_tasks, fv_task_fn task)
{
    fv_context_parallel_for(job->gemm->context, num_tasks, task, job);
    const int status = atomic_load(&job->status);
    return status == FV_OK ? FV_OK : fv_fail((fv_status)status, "%s", job->text);
}

int fv_gemm_hold_openmp(void)
{
    const int before = omp_get_max_threads();
    if (before != 1) omp_set_num_threads(1);
    return before;
}

void fv_gemm_release_openmp(int before)
{
    if (before != 1) omp_set_num_threads(before);
}

static fv_gemm_chunk chunk_at(const fv_gemm_job *job, int64_t index)
{
    const fv_gemm_weight *weight = job->weight;
    const int64_t chunk_outputs = job->gemm->kernel->chunk_outputs;
    return (fv_gemm_chunk){
        .data = weight->data + (size_t)index * weight->chunk_bytes,
        .num_outputs = fv_min_i64(chunk_outputs, weight->out_features - index * chunk_outputs),
        .in_features = weight->in_features,
    };
}

static void pack_task(void *user, int64_t index, int32_t worker)
{
    fv_gemm_job *job = user;
    if (atomic_load_explicit(&job->status, memory_order_relaxed) != FV_OK) return;
    const fv_gemm_kernel *kernel = job->gemm->kernel;
    const fv_gemm_chunk chunk = chunk_at(job, index);
    float *rows = chunk.data;
    if (job->scratch) rows = job->scratch + worker * kernel->chunk_outputs * chunk.in_features;

    fv_status status = job->read_rows(rows, job->user, index * kernel->chunk_outputs, chunk.num_outputs);
    if (status == FV_OK && kernel->pack) {
        const int before = fv_gemm_hold_openmp();
        status = kernel->pack(job->gemm->state, &chunk, rows, worker);
        fv_gemm_release_openmp(before);
    }
    if (status != FV_OK) fv_gemm_keep_failure(job, status);
}

static void run_task(void *user, int64_t index, int32_t worker)
{
    fv_gemm_job *job = user;
    const fv_gemm_kernel *kernel = job->gemm->kernel;
    const fv_gemm_weight *weight = job->weight;
    const int64_t chunk_index = index % job->num_chunks;
    const fv_gemm_chunk chunk = chunk_at(job, chunk_index);
    const int64_t first_row = index / job->num_chunks * kernel->row_block;
    const int64_t num_rows = fv_min_i64(kernel->row_block, job->num_rows - first_row);
    float *y = job->y + first_row * weight->out_features + chunk_index * kernel->chunk_outputs;

    const int before = fv_gemm_hold_openmp();
    const fv_status status = kernel->run(job->gemm->state, y, weight->out_features, job->x, first_row, num_rows, &chunk,
                                         job->batch_invariant, worker);
    fv_gemm_release_openmp(before);
    if (status != FV_OK) fv_gemm_keep_failure(job, status);
}

static void load_rows_task(void *user, int64_t index, int32_t worker)
{
    const fv_gemm_job *job = user;
    const fv_gemm_kernel *kernel = job->gemm->kernel;
    (void)worker;
    const int64_t first_row = index * kernel->row_block;
    kernel->load_rows(job->gemm->state, job->x, first_row, fv_min_i64(kernel->row_block, job->num_rows - first_row),
                      job->weight->in_features);
}

void fv_gemm_load_rows(fv_gemm_job *job)
{
    const fv_gemm_kernel *kernel = job->gemm->kernel;
    if (!kernel->load_rows) return;
    fv_context_parallel_for(job->gemm->context, fv_ceil_div(job->num_rows, kernel->row_block), load_rows_task, job);
}

fv_status fv_gemm_create(fv_gemm_library **gemm, fv_context *context, fv_dtype dtype)
{
    *gemm = NULL;
    const char *bf16_why_not = fv_gemm_bf16_why_not();
    const bool keeps_stored = dtype == FV_DTYPE_NONE;
    if (keeps_stored) dtype = bf16_why_not ? FV_DTYPE_F32 : FV_DTYPE_BF16;
    if (dtype != FV_DTYPE_F32 && dtype != FV_DTYPE_BF16) {
        return fv_fail(FV_ERR_INVALID, "compute_dtype is %d (%s); accepted: 0 (weights as stored), float32, bfloat16",
                       (int)dtype, fv_dtype_bytes(dtype) > 0 ? fv_dtype_name(dtype) : "none of fv_dtype");
    }
    if (dtype == FV_DTYPE_BF16 && bf16_why_not) {
        return fv_fail(FV_ERR_UNSUPPORTED, "compute type bfloat16: %s", bf16_why_not);
    }

    fv_gemm_library *made = calloc(1, sizeof(*made));
    if (!made) return fv_fail(FV_ERR_NO_MEMORY, "no memory for the GEMM");
    made->context = context;
    made->kernel = dtype == FV_DTYPE_BF16 ? &fv_gemm_kernel_bf16 : &fv_gemm_kernel_f32;
    const dnnl_version_t *version = dnnl_version();
    snprintf(made->description, sizeof(made->description), "onednn %d.%d.%d %s", version->major, version->minor,
             version->patch, fv_dtype_name(dtype));
    if (keeps_stored) fv_gemm_stored_init(&made->stored, context->isa);
    if (made->kernel->create) {
        const fv_status status = made->kernel->create(&made->state, fv_context_num_workers(context));
        if (status != FV_OK) {
            fv_gemm_destroy(made);
            return status;
        }
    }
    *gemm = made;
    return FV_OK;
}

fv_status fv_gemm_create_on(fv_gemm_library **gemm, fv_context *context, fv_device *device)
{
    *gemm = NULL;
    fv_gemm_library *made = calloc(1, sizeof(*made));
    if (!made) return fv_fail(FV_ERR_NO_MEMORY, "no memory for the GEMM");
    made->context = context;
    made->kernel = &fv_gemm_kernel_device;
    snprintf(made->description, sizeof(made->description), "%s bfloat16", fv_device_name(device));
    const fv_status status = fv_gemm_device_create(&made->state, device, fv_context_num_workers(context));
    if (status != FV_OK) {
        fv_gemm_destroy(made);
        return status;
    }
    *gemm = made;
    return FV_OK;
}

void fv_gemm_destroy(fv_gemm_library *gemm)
{
    if (!gemm) return;
    fv_gemm_stored_deinit(&gemm->stored);
    if (gemm->kernel->destroy) gemm->kernel->destroy(gemm->state);
    free(gemm);
}

fv_dtype fv_gemm_dtype(const fv_gemm_library *gemm) { return gemm->kernel->dtype; }
const char *fv_gemm_describe(const fv_gemm_library *gemm) { return gemm->description; }

/* All chunks but the last have one shape; the kernel gets ready for both. */
fv_status fv_gemm_prepare_shapes(size_t *chunk_bytes, fv_gemm_library *gemm, int64_t out_features, int64_t in_features)
{
    const fv_gemm_kernel *kernel = gemm->kernel;
    const int64_t whole = fv_min_i64(kernel->chunk_outputs, out_features);
    const int64_t rest = out_features % whole;
    size_t rest_bytes = 0;
    const int before = fv_gemm_hold_openmp();
    fv_status status = kernel->prepare(chunk_bytes, gemm->state, whole, in_features);
    if (status == FV_OK && rest != 0) status = kernel->prepare(&rest_bytes, gemm->state, rest, in_features);
    fv_gemm_release_openmp(before);
    if (rest_bytes > *chunk_bytes) *chunk_bytes = rest_bytes;
    return status;
}

static fv_status pack_weight(fv_gemm_library *gemm, fv_gemm_weight *weight, fv_read_rows_fn read_rows, void *user)
{
    const fv_gemm_kernel *kernel = gemm->kernel;
    fv_gemm_job job = {.gemm = gemm, .weight = weight, .read_rows = read_rows, .user = user};
    job.num_chunks = fv_ceil_div(weight->out_features, kernel->chunk_outputs);
    if (kernel->pack) {
        const size_t floats = (size_t)fv_context_num_workers(gemm->context) * (size_t)kernel->chunk_outputs *
                              (size_t)weight->in_features;
        job.scratch = malloc(floats * sizeof(float));
        if (!job.scratch) return fv_fail(FV_ERR_NO_MEMORY, "no memory for %zu floats of weight rows", floats);
    }
    const fv_status status = fv_gemm_run_job(&job, job.num_chunks, pack_task);
    free(job.scratch);
    return status;
}

/* The kernel's room for X, whichever of rows and features grows. */
static fv_status make_room(fv_gemm_library *gemm, int64_t num_rows, int64_t in_features)
{
    if (num_rows <= gemm->max_rows && in_features <= gemm->max_in_features) return FV_OK;
    num_rows = fv_max_i64(num_rows, gemm->max_rows);
    in_features = fv_max_i64(in_features, gemm->max_in_features);
    if (gemm->kernel->reserve) {
        const fv_status status = gemm->kernel->reserve(gemm->state, num_rows, in_features);
        if (status != FV_OK) return status;
    }
    gemm->max_rows = num_rows;
    gemm->max_in_features = in_features;
    return FV_OK;
}

static fv_status alloc_weight(fv_gemm_weight *weight, const fv_gemm_library *gemm)
{
    const fv_gemm_kernel *kernel = gemm->kernel;
    weight->bytes = (size_t)fv_round_up((int64_t)weight->bytes, FV_GEMM_ALIGNMENT);
    void *data = NULL;
    if (kernel->alloc) {
        const fv_status status = kernel->alloc(&data, gemm->state, weight->bytes);
        if (status != FV_OK) return status;
    } else {
        data = aligned_alloc(FV_GEMM_ALIGNMENT, weight->bytes);
    }
    weight->data = data;
    return data ? FV_OK : fv_fail(FV_ERR_NO_MEMORY, "no memory for a weight of %zu bytes", weight->bytes);
}

/* A weight in the compute type: rows from read_rows, or with NULL random ones; user is then the seed. */
static fv_status fill_expanded(fv_gemm_weight *weight, fv_gemm_library *gemm, fv_read_rows_fn read_rows, void *user)
{
    fv_status status = fv_gemm_prepare_shapes(&weight->chunk_bytes, gemm, weight->out_features, weight->in_features);
    if (status != FV_OK) return status;
    weight->bytes = weight->chunk_bytes * (size_t)fv_ceil_div(weight->out_features, gemm->kernel->chunk_outputs);
    status = alloc_weight(weight, gemm);
    if (status != FV_OK) return status;
    if (read_rows) return pack_weight(gemm, weight, read_rows, user);
    return gemm->kernel->fill_random(gemm->state, weight->data, weight->out_features, weight->in_features,
                                     *(const uint64_t *)user);
}

static fv_status fill_stored(fv_gemm_weight *weight, fv_gemm_library *gemm, const fv_gemm_rows *parts,
                             int32_t num_parts)
{
    const fv_status status = fv_gemm_stored_prepare(weight, gemm, parts, num_parts);
    if (status != FV_OK) return status;
    const fv_status allocated = alloc_weight(weight, gemm);
    if (allocated == FV_OK) fv_gemm_stored_fill(weight, gemm, parts);
    return allocated;
}

/* Takes over a weight that has been filled, or with a failure `status` partly. */
static fv_status finish_weight(fv_gemm_weight **weight, fv_gemm_library *gemm, fv_gemm_weight *made, fv_status status)
{
    if (status == FV_OK) status = make_room(gemm, gemm->max_rows, made->in_features);
    if (status == FV_OK && made->num_parts > 0) status = fv_gemm_stored_make_room(gemm);
    if (status != FV_OK) {
        fv_gemm_weight_destroy(made);
        return status;
    }
    *weight = made;
    return FV_OK;
}

static fv_status begin_weight(fv_gemm_weight **made, const fv_gemm_library *gemm, int64_t out_features,
                              int64_t in_features)
{
    *made = calloc(1, sizeof(**made));
    if (!*made) return fv_fail(FV_ERR_NO_MEMORY, "no memory for a weight");
    (*made)->gemm = gemm;
    (*made)->out_features = out_features;
    (*made)->in_features = in_features;
    return FV_OK;
}

static fv_status create_weight(fv_gemm_weight **weight, fv_gemm_library *gemm, int64_t out_features,
                               int64_t in_features, fv_read_rows_fn read_rows, void *user)
{
    *weight = NULL;
    fv_gemm_weight *made;
    const fv_status status = begin_weight(&made, gemm, out_features, in_features);
    if (status != FV_OK) return status;
    return finish_weight(weight, gemm, made, fill_expanded(made, gemm, read_rows, user));
}

fv_status fv_gemm_weight_create(fv_gemm_weight **weight, fv_gemm_library *gemm, int64_t out_features,
                                int64_t in_features, fv_read_rows_fn read_rows, void *user)
{
    return create_weight(weight, gemm, out_features, in_features, read_rows, user);
}

typedef struct stacked_rows {
    const fv_gemm_rows *parts;
    int32_t num_parts;
    int64_t in_features;
} stacked_rows;

static fv_status read_stacked_rows(float *rows, void *user, int64_t first_row, int64_t num_rows)
{
    const stacked_rows *stack = user;
    for (int32_t i = 0; i < stack->num_parts && num_rows > 0; i++) {
        const fv_gemm_rows *part = &stack->parts[i];
        const int64_t count = fv_min_i64(num_rows, part->num_rows - first_row);
        if (count > 0) {
            /* Rows lie one after the other: many are read as one. */
            const uint8_t *at = (const uint8_t *)part->data +
                                (size_t)first_row * fv_gguf_type_bytes(part->type, stack->in_features);
            const fv_status status = fv_dequantize_row(rows, at, part->type, count * stack->in_features);
            if (status != FV_OK) return status;
            rows += count * stack->in_features;
            first_row += count;
            num_rows -= count;
        }
        first_row -= part->num_rows;
    }
    return FV_OK;
}

fv_status fv_gemm_weight_create_of_rows(fv_gemm_weight **weight, fv_gemm_library *gemm, int64_t in_features,
                                        const fv_gemm_rows *parts, int32_t num_parts)
{
    *weight = NULL;
    if (num_parts < 1 || num_parts > FV_GEMM_MAX_PARTS) {
        return fv_fail(FV_ERR_INVALID, "a weight of %d parts; accepted: 1 to %d", num_parts, FV_GEMM_MAX_PARTS);
    }
    int64_t out_features = 0;
    for (int32_t i = 0; i < num_parts; i++) {
        if (parts[i].num_rows < 1) {
            return fv_fail(FV_ERR_INVALID, "a part of %lld rows; accepted: 1 or more", (long long)parts[i].num_rows);
        }
        out_features += parts[i].num_rows;
    }
    stacked_rows stack = {parts, num_parts, in_features};
    if (!fv_gemm_stored_is_smaller(gemm, in_features, parts, num_parts)) {
        return create_weight(weight, gemm, out_features, in_features, read_stacked_rows, &stack);
    }
    fv_gemm_weight *made;
    const fv_status status = begin_weight(&made, gemm, out_features, in_features);
    if (status != FV_OK) return status;
    return finish_weight(weight, gemm, made, fill_stored(made, gemm, parts, num_parts));
}

typedef struct random_rows {
    uint64_t seed;
    int64_t in_features;
} random_rows;

void fv_gemm_random_rows(float *rows, uint64_t seed, int64_t in_features, int64_t first_row, int64_t num_rows)
{
    const float scale = fv_random_scale(in_features);
    for (int64_t i = 0; i < num_rows * in_features; i++) {
        rows[i] = fv_f32_of_bf16(fv_bf16_of_f32(fv_random_weight(seed, first_row * in_features + i) * scale));
    }
}

static fv_status read_random_rows(float *rows, void *user, int64_t first_row, int64_t num_rows)
{
    const random_rows *from = user;
    fv_gemm_random_rows(rows, from->seed, from->in_features, first_row, num_rows);
    return FV_OK;
}

fv_status fv_gemm_weight_create_random(fv_gemm_weight **weight, fv_gemm_library *gemm, int64_t out_features,
                                       int64_t in_features, uint64_t seed)
{
    random_rows from = {seed, in_features};
    if (gemm->kernel->fill_random) return create_weight(weight, gemm, out_features, in_features, NULL, &seed);
    return create_weight(weight, gemm, out_features, in_features, read_random_rows, &from);
}

void fv_gemm_weight_destroy(fv_gemm_weight *weight)
{
    if (!weight) return;
    if (weight->gemm->kernel->free) {
        weight->gemm->kernel->free(weight->gemm->state, weight->data);
    } else {
        free(weight->data);
    }
    free(weight);
}

bool fv_gemm_is_on_device(const fv_gemm_library *gemm) { return gemm->kernel == &fv_gemm_kernel_device; }
const void *fv_gemm_weight_data(const fv_gemm_weight *weight) { return weight->data; }
int64_t fv_gemm_weight_out_features(const fv_gemm_weight *weight) { return weight->out_features; }
int64_t fv_gemm_weight_in_features(const fv_gemm_weight *weight) { return weight->in_features; }
size_t fv_gemm_weight_bytes(const fv_gemm_weight *weight) { return weight->bytes; }

fv_status fv_gemm_reserve(fv_gemm_library *gemm, int64_t num_rows)
{
    const fv_status status = make_room(gemm, num_rows, gemm->max_in_features);
    return status == FV_OK ? fv_gemm_stored_make_room(gemm) : status;
}

fv_status fv_gemm_run(fv_gemm_library *gemm, float *y, const float *x, const fv_gemm_weight *weight, int64_t num_rows,
                      bool batch_invariant)
{
    if (num_rows > gemm->max_rows) {
        return fv_fail(FV_ERR_INVALID, "num_rows is %lld; reserved: %lld", (long long)num_rows,
                       (long long)gemm->max_rows);
    }
    const fv_gemm_kernel *kernel = gemm->kernel;
    if (!kernel->run) return fv_fail(FV_ERR_UNSUPPORTED, "the weights are on a device: %s", gemm->description);
    fv_gemm_job job = {.gemm = gemm, .weight = weight, .y = y, .x = x, .num_rows = num_rows};
    job.batch_invariant = batch_invariant;
    if (weight->num_parts > 0) return fv_gemm_stored_run(&job);
    job.num_chunks = fv_ceil_div(weight->out_features, kernel->chunk_outputs);
    fv_gemm_load_rows(&job);
    return fv_gemm_run_job(&job, fv_ceil_div(num_rows, kernel->row_block) * job.num_chunks, run_task);
}
