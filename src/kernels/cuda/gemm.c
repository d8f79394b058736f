/* fv_device_gemm on cuBLASLt, but for products of a few rows, which are all reading (gemv.cu).
 *
 * cuBLASLt counts columns first. A row-major matrix is the transpose of the same memory read that way, so the
 * product is asked for as c^T = b^T a^T: the weights are its first operand, transposed where b is [n, k].
 *
 * The library is large and not everyone has it, so it is loaded by the first product; the plugin itself needs
 * libc alone. What cuBLASLt found best for a shape is kept in a table of fixed size, descriptors included:
 * a product that was seen before allocates nothing. Each stream has a workspace of its own (workspaces.h), because
 * two products may run at once. */
#include "kernels/cuda/gemm.h"

#include <cublasLt.h>
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include "core/compiler.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/gemv.cuh"
#include "kernels/cuda/workspaces.h"

enum {
    NUM_PLANS = 1024, /* a power of two */
    NUM_PROBES = 8,   /* places of the table that a shape may be at */
    MAX_ALIGNMENT = 256,
    NUM_ALGORITHMS = 8, /* that are asked for */
};

/* Of the blocks of threads that a GPU holds at once: so much of them is a round that is full. */
#define LEAST_ROUND 0.8f

/* What NVIDIA recommends for Hopper; older GPUs want less. */
static const size_t workspace_bytes = (size_t)32 << 20;

/* All that an algorithm depends on. No padding: compared as bytes. */
typedef struct gemm_key {
    int64_t a_row_stride, a_matrix_stride, b_row_stride, b_matrix_stride, c_row_stride, c_matrix_stride;
    int32_t num_matrices, m, n, k;
    int32_t b_is_transposed, a_dtype, b_dtype, c_dtype;
    int32_t a_alignment, b_alignment, c_alignment;
    int32_t is_used;
} gemm_key;

typedef struct gemm_plan {
    gemm_key key;
    cublasLtMatmulDescOpaque_t product;
    cublasLtMatrixLayoutOpaque_t a, b, c;
    cublasLtMatmulAlgo_t algorithm;
} gemm_plan;

/* The functions of cuBLASLt that are called. */
typedef struct lt_functions {
    __typeof__(cublasLtCreate) *create;
    __typeof__(cublasLtDestroy) *destroy;
    __typeof__(cublasLtGetStatusName) *status_name;
    __typeof__(cublasLtMatmul) *matmul;
    __typeof__(cublasLtMatmulAlgoGetHeuristic) *find_algorithms;
    __typeof__(cublasLtMatmulAlgoConfigGetAttribute) *attribute_of;
    __typeof__(cublasLtMatmulDescInit_internal) *init_product;
    __typeof__(cublasLtMatmulDescSetAttribute) *set_product;
    __typeof__(cublasLtMatrixLayoutInit_internal) *init_matrix;
    __typeof__(cublasLtMatrixLayoutSetAttribute) *set_matrix;
    __typeof__(cublasLtMatmulPreferenceInit_internal) *init_preference;
    __typeof__(cublasLtMatmulPreferenceSetAttribute) *set_preference;
} lt_functions;

struct fv_cuda_gemm {
    pthread_mutex_t lock;
    void *library; /* NULL: not loaded yet */
    lt_functions lt;
    cublasLtHandle_t handle;
    fv_cuda_workspaces workspaces;
    gemm_plan plans[NUM_PLANS];
};

/* --- the library ------------------------------------------------------------------------------------------ */

static fv_status fail(const fv_device *device, const fv_cuda_gemm *of, const char *what, cublasStatus_t error)
{
    const fv_status status = error == CUBLAS_STATUS_NOT_SUPPORTED  ? FV_ERR_UNSUPPORTED
                             : error == CUBLAS_STATUS_ALLOC_FAILED ? FV_ERR_NO_MEMORY
                                                                   : FV_ERR_DEVICE;
    return fv_cuda_state_of(device)->host.fail(status, "%s: cuBLASLt: %s: %s", device->name, what,
                                               of->lt.status_name(error));
}

static int32_t find_functions(lt_functions *lt, void *library)
{
    const struct {
        const char *name;
        void *at;
    } functions[] = {
        {"cublasLtCreate", &lt->create},
        {"cublasLtDestroy", &lt->destroy},
        {"cublasLtGetStatusName", &lt->status_name},
        {"cublasLtMatmul", &lt->matmul},
        {"cublasLtMatmulAlgoGetHeuristic", &lt->find_algorithms},
        {"cublasLtMatmulAlgoConfigGetAttribute", &lt->attribute_of},
        {"cublasLtMatmulDescInit_internal", &lt->init_product},
        {"cublasLtMatmulDescSetAttribute", &lt->set_product},
        {"cublasLtMatrixLayoutInit_internal", &lt->init_matrix},
        {"cublasLtMatrixLayoutSetAttribute", &lt->set_matrix},
        {"cublasLtMatmulPreferenceInit_internal", &lt->init_preference},
        {"cublasLtMatmulPreferenceSetAttribute", &lt->set_preference},
    };
    for (int32_t i = 0; i < FV_ARRAY_LEN(functions); i++) {
        void *found = dlsym(library, functions[i].name);
        if (!found) return 0;
        memcpy(functions[i].at, &found, sizeof(found));
    }
    return 1;
}

/* By the loader's rules, then where CUDA's installer puts it; the first that the GPU and its driver can work with. */
static fv_status load_library(fv_cuda_gemm *gemm, const fv_device *device)
{
    static const char *const names[] = {
        "libcublasLt.so.13",
        "libcublasLt.so.12",
        "/usr/local/cuda/lib64/libcublasLt.so.13",
        "/usr/local/cuda/lib64/libcublasLt.so.12",
    };
    if (gemm->library) return FV_OK;
    fv_status status = FV_OK;
    for (int32_t i = 0; i < FV_ARRAY_LEN(names); i++) {
        void *library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
        if (!library) continue;
        if (find_functions(&gemm->lt, library)) {
            const cublasStatus_t error = gemm->lt.create(&gemm->handle);
            if (error == CUBLAS_STATUS_SUCCESS) {
                gemm->library = library;
                return FV_OK;
            }
            status = fail(device, gemm, names[i], error);
        }
        dlclose(library);
    }
    if (status != FV_OK) return status;
    return fv_cuda_state_of(device)->host.fail(FV_ERR_UNSUPPORTED,
                                               "%s: no GEMM: neither libcublasLt.so.13 nor libcublasLt.so.12 is "
                                               "where the loader looks (LD_LIBRARY_PATH) or "
                                               "in /usr/local/cuda/lib64; both come with CUDA",
                                               device->name);
}

static void free_workspace(fv_cuda_workspace *entry, fv_device *device)
{
    if (entry->memory) device->ops->free(device, entry->memory);
    if (entry->end) device->ops->event_destroy(device, entry->end);
    *entry = (fv_cuda_workspace){0};
}

fv_status fv_cuda_gemm_create(fv_cuda_gemm **gemm, const fv_device *device)
{
    const fv_plugin_host *host = &fv_cuda_state_of(device)->host;
    fv_cuda_gemm *made = host->allocator.alloc(host->allocator.user, sizeof(*made), FV_CACHE_LINE);
    if (!made) return host->fail(FV_ERR_NO_MEMORY, "%s: no memory for the plans of a GEMM", device->name);
    memset(made, 0, sizeof(*made));
    pthread_mutex_init(&made->lock, NULL);
    *gemm = made;
    return FV_OK;
}

void fv_cuda_gemm_destroy(fv_cuda_gemm *gemm, const fv_device *device)
{
    if (!gemm) return;
    const fv_allocator *allocator = &fv_cuda_state_of(device)->host.allocator;
    for (int32_t i = 0; i < FV_CUDA_NUM_WORKSPACES; i++)
        free_workspace(&gemm->workspaces.entries[i], (fv_device *)device);
    if (gemm->library) { /* stays loaded, as plugins do */
        const int32_t has_entered = fv_cuda_enter(device);
        (void)gemm->lt.destroy(gemm->handle);
        fv_cuda_leave(device, has_entered);
    }
    pthread_mutex_destroy(&gemm->lock);
    allocator->free(allocator->user, gemm);
}

/* --- plans -------------------------------------------------------------------------------------------------- */

static cudaDataType_t type_of(fv_dtype dtype)
{
    switch (dtype) {
    case FV_DTYPE_F32: return CUDA_R_32F;
    case FV_DTYPE_F16: return CUDA_R_16F;
    case FV_DTYPE_BF16: return CUDA_R_16BF;
    case FV_DTYPE_F8_E4M3: return CUDA_R_8F_E4M3;
    default: return (cudaDataType_t)-1;
    }
}

static int32_t bytes_of(fv_dtype dtype) { return dtype == FV_DTYPE_F32 ? 4 : dtype == FV_DTYPE_F8_E4M3 ? 1 : 2; }

/* Of a matrix and of all its rows: strides are part of the key. */
static int32_t alignment_of(const void *data)
{
    const uintptr_t lowest_bit = (uintptr_t)data & (~(uintptr_t)data + 1);
    return lowest_bit == 0 || lowest_bit > MAX_ALIGNMENT ? MAX_ALIGNMENT : (int32_t)lowest_bit;
}

/* Strides that do not count are left out, so that equal products have equal keys. */
static gemm_key make_key(const fv_gemm *gemm)
{
    const int32_t is_batch = gemm->num_matrices > 1;
    return (gemm_key){
        .a_row_stride = gemm->a_row_stride,
        .a_matrix_stride = is_batch ? gemm->a_matrix_stride : 0,
        .b_row_stride = gemm->b_row_stride,
        .b_matrix_stride = is_batch ? gemm->b_matrix_stride : 0,
        .c_row_stride = gemm->c_row_stride,
        .c_matrix_stride = is_batch ? gemm->c_matrix_stride : 0,
        .num_matrices = gemm->num_matrices,
        .m = gemm->m,
        .n = gemm->n,
        .k = gemm->k,
        .b_is_transposed = gemm->b_is_transposed != 0,
        .a_dtype = (int32_t)gemm->a_dtype,
        .b_dtype = (int32_t)gemm->b_dtype,
        .c_dtype = (int32_t)gemm->c_dtype,
        .a_alignment = alignment_of(gemm->a),
        .b_alignment = alignment_of(gemm->b),
        .c_alignment = alignment_of(gemm->c),
        .is_used = 1,
    };
}

/* FNV-1a. */
static uint32_t hash_of(const gemm_key *key)
{
    const uint8_t *bytes = (const uint8_t *)key;
    uint32_t hash = 2166136261u;
    for (size_t i = 0; i < sizeof(*key); i++) hash = (hash ^ bytes[i]) * 16777619u;
    return hash ^ hash >> 16;
}

/* The shape's place: where it is, else a free one, else one that it takes from another. */
static gemm_plan *find_place(fv_cuda_gemm *of, const gemm_key *key)
{
    const uint32_t hash = hash_of(key);
    for (uint32_t i = 0; i < NUM_PROBES; i++) {
        gemm_plan *place = &of->plans[(hash + i) % NUM_PLANS];
        if (!place->key.is_used || memcmp(&place->key, key, sizeof(*key)) == 0) return place;
    }
    return &of->plans[(hash + (hash >> 20) % NUM_PROBES) % NUM_PLANS];
}

/* Row-major [rows, columns] with a row stride of row_stride bytes, as cuBLASLt sees it. */
static cublasStatus_t init_matrix(cublasLtMatrixLayoutOpaque_t *matrix, const lt_functions *lt, fv_dtype dtype,
                                  int32_t rows, int32_t columns, int64_t row_stride, int32_t num_matrices,
                                  int64_t matrix_stride)
{
    const int64_t bytes = bytes_of(dtype), elements = matrix_stride / bytes;
    /* A single row may have any stride; cuBLASLt wants one that is long enough. */
    const int64_t row_elements = rows == 1 ? columns : row_stride / bytes;
    cublasStatus_t error = lt->init_matrix(matrix, sizeof(*matrix), type_of(dtype), (uint64_t)columns, (uint64_t)rows,
                                           row_elements);
    if (error != CUBLAS_STATUS_SUCCESS || num_matrices == 1) return error;
    error = lt->set_matrix(matrix, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &num_matrices, sizeof(num_matrices));
    if (error != CUBLAS_STATUS_SUCCESS) return error;
    return lt->set_matrix(matrix, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &elements, sizeof(elements));
}

static cublasStatus_t describe_product(gemm_plan *plan, const lt_functions *lt)
{
    const gemm_key *key = &plan->key;
    const cublasOperation_t of_b = key->b_is_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    const int32_t b_rows = key->b_is_transposed ? key->n : key->k, b_columns = key->b_is_transposed ? key->k : key->n;
    cublasStatus_t error = lt->init_product(&plan->product, sizeof(plan->product), CUBLAS_COMPUTE_32F, CUDA_R_32F);
    if (error == CUBLAS_STATUS_SUCCESS) {
        error = lt->set_product(&plan->product, CUBLASLT_MATMUL_DESC_TRANSA, &of_b, sizeof(of_b));
    }
    if (error == CUBLAS_STATUS_SUCCESS) {
        error = init_matrix(&plan->a, lt, (fv_dtype)key->a_dtype, key->m, key->k, key->a_row_stride, key->num_matrices,
                            key->a_matrix_stride);
    }
    if (error == CUBLAS_STATUS_SUCCESS) {
        error = init_matrix(&plan->b, lt, (fv_dtype)key->b_dtype, b_rows, b_columns, key->b_row_stride,
                            key->num_matrices, key->b_matrix_stride);
    }
    if (error != CUBLAS_STATUS_SUCCESS) return error;
    return init_matrix(&plan->c, lt, (fv_dtype)key->c_dtype, key->m, key->n, key->c_row_stride, key->num_matrices,
                       key->c_matrix_stride);
}

static int32_t splits_sums(const lt_functions *lt, const cublasLtMatmulAlgo_t *algorithm)
{
    int32_t parts = 1;
    size_t size;
    (void)lt->attribute_of(algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &parts, sizeof(parts), &size);
    return parts > 1;
}

/* The first, which cuBLASLt thinks best; but where that splits sums and another one fills most of a round without, that
 * one: 128 x 7168 x 16384 of bf16 takes an H200 61 us by it, 68 by the first. */
static const cublasLtMatmulHeuristicResult_t *choose_algorithm(const cublasLtMatmulHeuristicResult_t *found,
                                                               int32_t num_found, const lt_functions *lt)
{
    if (!splits_sums(lt, &found[0].algo)) return &found[0];
    for (int32_t i = 1; i < num_found; i++) {
        const int32_t fills = found[i].wavesCount >= LEAST_ROUND && found[i].wavesCount <= 1;
        if (fills && !splits_sums(lt, &found[i].algo)) return &found[i];
    }
    return &found[0];
}

static cublasStatus_t find_algorithm(gemm_plan *plan, const fv_cuda_gemm *of)
{
    const lt_functions *lt = &of->lt;
    const struct {
        cublasLtMatmulPreferenceAttributes_t attribute;
        uint32_t bytes;
    } alignments[] = {
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, (uint32_t)plan->key.b_alignment},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, (uint32_t)plan->key.a_alignment},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, (uint32_t)plan->key.c_alignment},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, (uint32_t)plan->key.c_alignment},
    };
    cublasLtMatmulPreferenceOpaque_t preference;
    cublasStatus_t error = lt->init_preference(&preference, sizeof(preference));
    if (error == CUBLAS_STATUS_SUCCESS) {
        error = lt->set_preference(&preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes,
                                   sizeof(workspace_bytes));
    }
    for (int32_t i = 0; i < FV_ARRAY_LEN(alignments) && error == CUBLAS_STATUS_SUCCESS; i++) {
        error = lt->set_preference(&preference, alignments[i].attribute, &alignments[i].bytes,
                                   sizeof(alignments[i].bytes));
    }
    if (error != CUBLAS_STATUS_SUCCESS) return error;
    cublasLtMatmulHeuristicResult_t found[NUM_ALGORITHMS];
    int num_found = 0;
    error = lt->find_algorithms(of->handle, &plan->product, &plan->b, &plan->a, &plan->c, &plan->c, &preference,
                                NUM_ALGORITHMS, found, &num_found);
    if (error != CUBLAS_STATUS_SUCCESS) return error;
    if (num_found == 0) return CUBLAS_STATUS_NOT_SUPPORTED;
    plan->algorithm = choose_algorithm(found, num_found, lt)->algo;
    return CUBLAS_STATUS_SUCCESS;
}

static fv_status refuse(const fv_device *device, const gemm_key *key, const char *why)
{
    static const char *const names[] = {"none", "float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8"};
    return fv_cuda_state_of(device)->host.fail(
        FV_ERR_UNSUPPORTED, "%s: a product of %d x %d x %d x %d, %s times %s to %s, b %s: %s", device->name,
        key->num_matrices, key->m, key->n, key->k, names[key->a_dtype], names[key->b_dtype], names[key->c_dtype],
        key->b_is_transposed ? "transposed" : "as it is", why);
}

/* The plan of the shape, made now where there is none yet. */
static fv_status find_plan(gemm_plan **plan, fv_cuda_gemm *of, const fv_device *device, const gemm_key *key)
{
    gemm_plan *place = find_place(of, key);
    *plan = place;
    if (place->key.is_used && memcmp(&place->key, key, sizeof(*key)) == 0) return FV_OK;
    if (type_of((fv_dtype)key->a_dtype) == (cudaDataType_t)-1 || key->a_dtype != key->b_dtype ||
        type_of((fv_dtype)key->c_dtype) == (cudaDataType_t)-1) {
        return refuse(device, key, "accepted: float32, float16, bfloat16, fp8_e4m3, the same for both factors");
    }
    place->key = *key;
    cublasStatus_t error = describe_product(place, &of->lt);
    if (error == CUBLAS_STATUS_SUCCESS) error = find_algorithm(place, of);
    if (error == CUBLAS_STATUS_SUCCESS) return FV_OK;
    place->key.is_used = 0;
    if (error == CUBLAS_STATUS_NOT_SUPPORTED) return refuse(device, key, "cuBLASLt has no algorithm for it");
    return fail(device, of, "choosing an algorithm", error);
}

/* --- workspaces --------------------------------------------------------------------------------------------- */

static fv_status make_workspace(fv_cuda_workspace *entry, const fv_cuda_workspaces *all, fv_device *device)
{
    fv_status status = FV_OK;
    if (!fv_cuda_workspace_is_kept(all, entry)) status = device->ops->event_create(&entry->end, device);
    if (status == FV_OK) status = device->ops->alloc(&entry->memory, device, workspace_bytes);
    if (status != FV_OK) {
        entry->memory = NULL;
        free_workspace(entry, device);
    }
    return status;
}

/* What a thread that captures may not do is done beside its capture: nothing of it is recorded. */
static fv_status take_workspace(fv_cuda_workspace *entry, const fv_cuda_workspaces *all, fv_device *device)
{
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    const fv_status status = entry->memory ? device->ops->event_synchronize(device, entry->end)
                                           : make_workspace(entry, all, device);
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    return status;
}

static fv_status find_workspace(fv_cuda_workspace **workspace, fv_cuda_workspaces *all, fv_device *device,
                                fv_stream stream)
{
    fv_cuda_workspace *entry = fv_cuda_workspace_of(all, stream);
    if (!entry) {
        entry = fv_cuda_workspace_choose(all);
        if (!entry) {
            return fv_cuda_state_of(device)->host.fail(
                FV_ERR_NO_SPACE,
                "%s: no workspace for products on one more stream: graphs use those of %d others "
                "(fv_stream_destroy)",
                device->name, FV_CUDA_NUM_WORKSPACES - FV_CUDA_NUM_KEPT_WORKSPACES);
        }
        const fv_status status = take_workspace(entry, all, device);
        if (status != FV_OK) return status;
    }
    fv_cuda_workspace_use(all, entry, stream, entry->end && device->ops->is_capturing(device, stream));
    *workspace = entry;
    return FV_OK;
}

void fv_cuda_gemm_forget(fv_device *device, fv_stream stream)
{
    fv_cuda_gemm *of = fv_cuda_state_of(device)->gemm;
    pthread_mutex_lock(&of->lock);
    fv_cuda_workspace *entry = fv_cuda_workspace_of(&of->workspaces, stream);
    if (entry) {
        (void)device->ops->stream_synchronize(device, stream);
        free_workspace(entry, device);
    }
    pthread_mutex_unlock(&of->lock);
}

/* --- the product -------------------------------------------------------------------------------------------- */

static fv_status multiply(fv_cuda_gemm *of, fv_device *device, const fv_gemm *gemm, gemm_plan *plan,
                          const fv_cuda_workspace *workspace, fv_stream stream)
{
    static const float one = 1.0f, zero = 0.0f;
    const cublasStatus_t error = of->lt.matmul(of->handle, &plan->product, &one, gemm->b, &plan->b, gemm->a, &plan->a,
                                               &zero, gemm->c, &plan->c, gemm->c, &plan->c, &plan->algorithm,
                                               workspace->memory, workspace_bytes, (cudaStream_t)stream);
    if (error != CUBLAS_STATUS_SUCCESS) return fail(device, of, "cublasLtMatmul", error);
    if (!workspace->end || workspace->is_captured) return FV_OK;
    return device->ops->event_record(device, workspace->end, stream);
}

fv_status fv_cuda_gemm_run(fv_device *device, const fv_gemm *gemm, fv_stream stream)
{
    fv_cuda_gemm *of = fv_cuda_state_of(device)->gemm;
    if (fv_cuda_gemv_fits(gemm)) {
        const fv_launch launch = {device, NULL, stream};
        return fv_cuda_gemv(&launch, gemm);
    }
    const gemm_key key = make_key(gemm);
    gemm_plan *plan = NULL;
    fv_cuda_workspace *workspace = NULL;
    const int32_t has_entered = fv_cuda_enter(device);
    pthread_mutex_lock(&of->lock);
    fv_status status = load_library(of, device);
    if (status == FV_OK) status = find_plan(&plan, of, device, &key);
    if (status == FV_OK) status = find_workspace(&workspace, &of->workspaces, device, stream);
    if (status == FV_OK) status = multiply(of, device, gemm, plan, workspace, stream);
    pthread_mutex_unlock(&of->lock);
    fv_cuda_leave(device, has_entered);
    return status;
}
