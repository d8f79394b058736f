/* The attention kernel in fp32, without tensor cores: for queries of fp32, for caches and dense rows whose
 * numbers are not exact in the queries' dtype, for latents that are scaled or rotated at reading, and for AMLA where no
 * other kernel has it. 16 rows at a time, 32 keys a tile, or 16 where shared memory has no room for rows so long;
 * written to be right, not to be fast.
 *
 *   S   warp w, lane l: rows 4 w .. 4 w + 3, key l      so a row's maximum is a warp's; lanes from 16 on may have none
 *   O   thread t: all rows, value elements t, t + 128, ... */
#include "kernels/cuda/attend.cuh"
#include "kernels/cuda/exponent_add.cuh"

enum {
    THREADS = 128,
    BLOCK_M = 16,
    MOST_KEYS = 32, /* of a tile: a lane each */
    FEW_KEYS = 16,
    WARP_ROWS = BLOCK_M / (THREADS / 32),
    MAX_VALUE = 512, /* elements */
    VALUE_STEPS = MAX_VALUE / THREADS,
};

template <int TILE> struct f32_memory {
    attend_row rows[BLOCK_M];
    attend_tile<TILE> tile;
    attend_keys keys;
    float factor[BLOCK_M];   /* of the sums so far, when the maximum grows */
    int32_t addend[BLOCK_M]; /* AMLA: to their bits instead */
    float p[BLOCK_M][TILE];
    float numbers[]; /* q [BLOCK_M][head_size], then keys or values [TILE][the larger size + 1] */
};

static __host__ __device__ int32_t tile_row(const fv_attend_params *params)
{
    return fv_max_i32(params->head_size, params->v_head_size) + 1; /* odd: neighbouring keys, different banks */
}

template <int TILE> static size_t bytes_of(const fv_attend_params *params)
{
    return sizeof(f32_memory<TILE>) + sizeof(float) * (size_t)(BLOCK_M * params->head_size + TILE * tile_row(params));
}

static __device__ float ds_element(const char *entry, int32_t d)
{
    if (d < FV_DS_LATENT) {
        const float scale = *(const float *)(entry + FV_DS_SCALES_AT + d / FV_DS_TILE * 4);
        return scale * fv_element_load(entry + d, FV_DTYPE_F8_E4M3);
    }
    return fv_element_load(entry + FV_DS_ROPE_AT + (d - FV_DS_LATENT) * 2, FV_DTYPE_BF16);
}

static __device__ __forceinline__ float load_element(const attend_args *args, const attend_source *source,
                                                     const char *row, int32_t d)
{
    if (args->is_ds) return ds_element(row, d);
    return fv_element_load(row + element_offset(&source->plane, d), source->dtype);
}

/* Element d of key `at_key` of the tile, of index `key`, as the queries meet it. */
template <int TILE>
static __device__ __forceinline__ float load_key_element(const attend_args *args, const attend_tile<TILE> *tile,
                                                         int32_t at_key, int32_t key, int32_t d)
{
    const fv_attend_params *params = &args->params;
    const attend_source *source = &args->k[tile->is_dense[at_key]];
    const char *row = tile->k[at_key];
    if (tile->is_dense[at_key]) {
        if (d < args->own_size) return load_element(args, source, row, d);
        return load_element(args, &args->k[2], tile->shared[at_key], d - args->own_size);
    }
    const fv_key_rotation *rotation = &params->rotation;
    const float value = load_element(args, source, row, d);
    const int32_t half = rotation->rope_dim / 2, i = d - (params->head_size - rotation->rope_dim);
    if (!rotation->cos || i < 0) return value;
    const int64_t at = key_position(&params->context_parallel, key) * half + i % half;
    const float other = load_element(args, source, row, i < half ? d + half : d - half);
    return i < half ? value * rotation->cos[at] - other * rotation->sin[at]
                    : value * rotation->cos[at] + other * rotation->sin[at];
}

template <int TILE>
static __device__ void load_queries(float *q, const f32_memory<TILE> *memory, const attend_args *args, int32_t num_rows)
{
    const fv_attend_params *params = &args->params;
    const int32_t bytes = fv_element_bytes(params->q_dtype), size = params->head_size;
    for (int32_t i = threadIdx.x; i < BLOCK_M * size; i += THREADS) {
        const int32_t r = i / size, d = i % size;
        const attend_row *row = &memory->rows[r];
        const char *from = query_row(params, row) + (int64_t)d * bytes;
        q[i] = r < num_rows ? fv_element_load(from, params->q_dtype) : 0.0f;
    }
}

template <int TILE>
static __device__ void load_keys(float *to, const f32_memory<TILE> *memory, const attend_args *args, int32_t first_key)
{
    const int32_t size = args->params.head_size, row_floats = tile_row(&args->params);
    for (int32_t i = threadIdx.x; i < TILE * size; i += THREADS) {
        const int32_t key = i / size, d = i % size;
        to[key * row_floats + d] = memory->tile.k[key] ? load_key_element(args, &memory->tile, key, first_key + key, d)
                                                       : 0.0f;
    }
}

template <int TILE>
static __device__ void load_values(float *to, const f32_memory<TILE> *memory, const attend_args *args)
{
    const int32_t size = args->params.v_head_size, row_floats = tile_row(&args->params);
    for (int32_t i = threadIdx.x; i < TILE * size; i += THREADS) {
        const int32_t key = i / size, d = i % size;
        const char *row = memory->tile.v[key];
        to[key * row_floats + d] = row ? load_element(args, &args->v[memory->tile.is_dense[key]], row, d) : 0.0f;
    }
}

/* Maximum, sum and AMLA's scale of a warp's rows: the same in all of its lanes. */
typedef struct row_sums {
    float max[WARP_ROWS];
    float sum[WARP_ROWS];
    amla_scale scale[WARP_ROWS];
} row_sums;

static __device__ __forceinline__ bool adds(const attend_args *args)
{
    return args->rescaling == FV_RESCALING_ADD || args->rescaling == FV_RESCALING_ADD_UNCOMPENSATED;
}

/* Soft cap, ALiBi and masks of one score, `dot` being scale * q . k; in base 2. */
static __device__ __forceinline__ float score_of(const attend_args *args, const attend_row *row, int32_t context,
                                                 int32_t key, int32_t position, float dot)
{
    const fv_attend_params *params = &args->params;
    float score = (params->soft_cap > 0 ? cap_score(args, dot) : dot) * FV_LOG2E;
    if (params->alibi != FV_ALIBI_NONE) score += alibi_of(params->alibi, row->slope, position, row->position);
    bool sees = key >= row->first && key < row->end;
    if (params->tree_mask) sees = sees && tree_shows(row->tree, context, position);
    return sees ? score : -INFINITY;
}

/* P of the tile to shared memory, with the factors of what was before. */
template <int TILE>
static __device__ void attend_keys_of_tile(row_sums *sums, f32_memory<TILE> *memory, const attend_args *args,
                                           const attend_job *job, const float *q, const float *keys, int32_t first_key)
{
    const fv_attend_params *params = &args->params;
    const int32_t lane = threadIdx.x % 32, at_key = lane % TILE, row0 = threadIdx.x / 32 * WARP_ROWS;
    const bool has_key = lane < TILE;
    const float *key = keys + at_key * tile_row(params);
    const float scale = params->scale * (args->key_scales ? memory->tile.k_scale[at_key] : job->k_head_scale);
    float dots[WARP_ROWS] = {};
    for (int32_t d = 0; d < params->head_size; d++)
#pragma unroll
        for (int r = 0; r < WARP_ROWS; r++) dots[r] += key[d] * q[(row0 + r) * params->head_size + d];
#pragma unroll
    for (int r = 0; r < WARP_ROWS; r++) {
        float score = score_of(args, &memory->rows[row0 + r], job->context, first_key + at_key,
                               memory->tile.position[at_key], scale * dots[r]);
        if (!has_key) score = -INFINITY;
        const float max = fmaxf(sums->max[r], fv_warp_max(score));
        float p = exp2f(score - (max == -INFINITY ? 0.0f : max)); /* of NaN NaN */
        const float factor = max == sums->max[r] ? 1.0f : exp2f(sums->max[r] - max);
        sums->sum[r] = sums->sum[r] * factor + fv_warp_sum(p);
        int32_t addend = 0;
        if (adds(args)) addend = amla_move_scale(&sums->scale[r], max, sums->max[r], params->q_dtype, args->rescaling);
        sums->max[r] = max;
        if (args->rescaling != FV_RESCALING_MULTIPLY) p = amla_round(sums->scale[r].scale * p, params->q_dtype);
        if (has_key) memory->p[row0 + r][at_key] = args->key_scales ? p * memory->tile.v_scale[at_key] : p;
        if (lane == 0) memory->factor[row0 + r] = factor;
        if (lane == 0) memory->addend[row0 + r] = addend;
    }
}

template <int TILE>
static __device__ __forceinline__ void add_values(float (&out)[BLOCK_M][VALUE_STEPS], const f32_memory<TILE> *memory,
                                                  const attend_args *args, const float *values)
{
    const int32_t row_floats = tile_row(&args->params), size = args->params.v_head_size;
#pragma unroll
    for (int r = 0; r < BLOCK_M; r++)
#pragma unroll
        for (int j = 0; j < VALUE_STEPS; j++) {
            if (!adds(args))
                out[r][j] *= memory->factor[r];
            else if (memory->addend[r] != 0)
                out[r][j] = exponent_add(out[r][j], memory->addend[r]);
        }
    float part[BLOCK_M][VALUE_STEPS] = {}; /* a tile's by themselves: one by one nearly equal ones would drift */
    for (int32_t key = 0; key < TILE; key++) {
        float value[VALUE_STEPS];
#pragma unroll
        for (int j = 0; j < VALUE_STEPS; j++) {
            const int32_t d = threadIdx.x + j * THREADS;
            value[j] = d < size ? values[key * row_floats + d] : 0.0f;
        }
#pragma unroll
        for (int r = 0; r < BLOCK_M; r++)
#pragma unroll
            for (int j = 0; j < VALUE_STEPS; j++) part[r][j] += memory->p[r][key] * value[j];
    }
#pragma unroll
    for (int r = 0; r < BLOCK_M; r++)
#pragma unroll
        for (int j = 0; j < VALUE_STEPS; j++) out[r][j] += part[r][j];
}

template <int TILE>
static __device__ __forceinline__ void attend_tiles(float (&out)[BLOCK_M][VALUE_STEPS], row_sums *sums,
                                                    f32_memory<TILE> *memory, const attend_args *args,
                                                    const attend_job *job)
{
    float *q = memory->numbers, *rows = q + BLOCK_M * args->params.head_size;
    for (int32_t first_key = memory->keys.first; first_key < memory->keys.end; first_key += TILE) {
        find_keys<TILE>(&memory->tile, args, job, &memory->keys, first_key);
        __syncthreads();
        load_keys(rows, memory, args, first_key);
        __syncthreads();
        attend_keys_of_tile(sums, memory, args, job, q, rows, first_key);
        __syncthreads();
        load_values(rows, memory, args);
        __syncthreads();
        add_values(out, memory, args, rows);
        __syncthreads();
    }
}

/* The sums reach the other warps through the room of P. */
template <int TILE>
static __device__ __forceinline__ void store_rows(const float (&out)[BLOCK_M][VALUE_STEPS], const row_sums *sums,
                                                  f32_memory<TILE> *memory, const attend_args *args,
                                                  const attend_job *job, int32_t num_rows)
{
    const int32_t row0 = threadIdx.x / 32 * WARP_ROWS;
    if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int r = 0; r < WARP_ROWS; r++) {
            memory->p[row0 + r][0] = sums->max[r];
            memory->p[row0 + r][1] = sums->sum[r];
            memory->p[row0 + r][2] = sums->scale[r].scale;
        }
    }
    __syncthreads();
    const float values_factor = args->key_scales ? 1.0f / args->p_factor : job->v_head_scale;
#pragma unroll
    for (int r = 0; r < BLOCK_M; r++) {
        if (r >= num_rows) continue;
        const attend_row *row = &memory->rows[r];
        const attend_end end = end_row(args, job, row, memory->p[r][0], memory->p[r][1],
                                       values_factor / memory->p[r][2]);
        if (threadIdx.x == 0) store_sums(args, row, &end);
        const attend_target target = target_of(args, row, &end);
#pragma unroll
        for (int j = 0; j < VALUE_STEPS; j++) {
            const int32_t d = threadIdx.x + j * THREADS;
            if (d < args->params.v_head_size) store_element(&target, d, out[r][j]);
        }
    }
    __syncthreads();
}

template <int TILE>
static __global__ void __launch_bounds__(THREADS, 2) attend_f32_kernel(const __grid_constant__ attend_args args)
{
    PTX_DYNAMIC_SHARED(16, shared);
    f32_memory<TILE> *memory = (f32_memory<TILE> *)shared;
    attend_job job;
    overlap_begin();
    if (!find_job(&job, &args)) return;
    for (int32_t row0 = 0; row0 < job.num_rows; row0 += BLOCK_M) {
        const int32_t num_rows = fv_min_i32(BLOCK_M, job.num_rows - row0);
        float out[BLOCK_M][VALUE_STEPS] = {};
        row_sums sums;
#pragma unroll
        for (int r = 0; r < WARP_ROWS; r++) {
            sums.max[r] = -INFINITY;
            sums.sum[r] = 0;
            sums.scale[r] = amla_scale_at_first();
        }
        find_rows<BLOCK_M>(memory->rows, &memory->keys, &args, &job, row0);
        load_queries(memory->numbers, memory, &args, num_rows);
        attend_tiles(out, &sums, memory, &args, &job);
        store_rows(out, &sums, memory, &args, &job, num_rows);
    }
}

const fv_cuda_attend_kernel fv_cuda_attend_f32[2] = {
    {attend_f32_kernel<MOST_KEYS>, 0, THREADS, BLOCK_M},
    {attend_f32_kernel<FEW_KEYS>, 0, THREADS, BLOCK_M},
};

fv_cuda_attend_kernel fv_cuda_find_f32_kernel(const fv_attend_params *params, int32_t max_shared)
{
    const int32_t most_bytes = (int32_t)bytes_of<MOST_KEYS>(params), takes_few = most_bytes > max_shared;
    fv_cuda_attend_kernel kernel = fv_cuda_attend_f32[takes_few];
    kernel.shared_bytes = takes_few ? (int32_t)bytes_of<FEW_KEYS>(params) : most_bytes;
    return kernel;
}
