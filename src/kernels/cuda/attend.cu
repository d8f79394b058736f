/* attend_paged, attend_dense and mla_decode on the GPU: the way from parameters to a kernel. One block of threads
 * for each work item, or cell of the static grid. They are one code: each key has a row, in the cache or among the
 * dense ones.
 *
 * The tensor cores serve where entries are exact in the queries' dtype: the same dtype, or one byte. */
#include <string.h>

#include "kernels/cuda/attend.cuh"
#include "kernels/cuda/hopper/attend.cuh"
#include "kernels/cuda/narrow_partial.cuh"
#include "kernels/cuda/overlap.cuh"
#include "kernels/cuda/tensor_map.cuh"

/* --- from parameters to a kernel ------------------------------------------------------------------------ */

static int32_t dtype_bytes(fv_dtype dtype)
{
    return dtype == FV_DTYPE_F32 ? 4 : dtype == FV_DTYPE_F16 || dtype == FV_DTYPE_BF16 ? 2 : 1;
}

static bool is_exact_in(fv_dtype dtype, fv_dtype q_dtype)
{
    return dtype == FV_DTYPE_NONE || dtype == q_dtype || dtype_bytes(dtype) == 1;
}

static bool needs_f32(const fv_attend_params *params)
{
    return params->q_dtype == FV_DTYPE_F32 || !is_exact_in(params->cache.dtype, params->q_dtype) ||
           (params->dense.k && params->dense.dtype != params->q_dtype) || params->rotation.cos ||
           params->cache.layout == FV_KV_LAYOUT_LATENT_FP8_DS ||
           (params->head_size | params->dense.shared_size) % 8 != 0;
}

static bool all_multiples(const int64_t *values, int32_t count, int64_t of)
{
    for (int32_t i = 0; i < count; i++)
        if (values[i] % of != 0) return false;
    return true;
}

/* Chunks of 8 elements lie together, at multiples of their bytes; chunk 0: elements are not cut. */
static bool find_chunks(attend_source *source, int64_t bytes)
{
    const fv_kv_plane *plane = &source->plane;
    const int64_t chunk = plane->element_chunk;
    if (plane->element_stride != bytes) return false;
    if (chunk > 0 && (chunk % 8 != 0 || (chunk / 8 & (chunk / 8 - 1)) != 0)) return false;
    source->chunk_stride = plane->element_chunk_stride;
    source->chunk_shift = 30; /* one run */
    for (int32_t shift = 0; chunk > 0 && shift < 30; shift++)
        if (chunk / 8 == 1 << shift) source->chunk_shift = shift;
    return true;
}

/* `block_size` 0: dense rows, which have no blocks. */
static void choose_read(attend_source *source, fv_dtype q_dtype, int32_t block_size)
{
    const fv_kv_plane *plane = &source->plane;
    const int64_t bytes = dtype_bytes(source->dtype);
    const int64_t places[] = {(int64_t)plane->data, plane->block_stride, plane->head_stride, plane->slot_chunk_stride,
                              plane->element_chunk_stride};
    source->keys_first = plane->slot_stride == bytes && plane->element_stride > bytes;
    source->read = FV_READ_ELEMENTS;
    if (!all_multiples(places, 5, 8 * bytes)) return;
    if (plane->slot_stride % (8 * bytes) == 0 && find_chunks(source, bytes)) {
        source->read = source->dtype == q_dtype ? FV_READ_COPY : FV_READ_CONVERT;
    } else if (source->keys_first && block_size > 0 && block_size % 8 == 0 && plane->slot_chunk % 8 == 0 &&
               plane->element_stride % (8 * bytes) == 0) {
        source->read = FV_READ_TRANSPOSE;
    }
}

static attend_source dense_source(const void *rows, int64_t token_stride, int64_t head_stride, fv_dtype dtype)
{
    attend_source source = {};
    source.plane.data = (void *)rows;
    source.plane.slot_stride = token_stride;
    source.plane.head_stride = head_stride;
    source.plane.element_stride = dtype_bytes(dtype);
    source.dtype = dtype;
    return source;
}

static void set_sources(attend_args *args)
{
    const fv_attend_params *params = &args->params;
    const fv_kv_view *cache = &params->cache;
    const fv_dense_keys *dense = &params->dense;
    args->is_latent = fv_kv_layout_is_latent(cache->layout);
    args->own_size = INT32_MAX;
    args->k[0].plane = cache->k;
    args->v[0].plane = args->is_latent ? cache->k : cache->v;
    args->k[0].dtype = args->v[0].dtype = cache->dtype;
    if (dense->k) {
        args->k[1] = dense_source(dense->k, dense->k_token_stride, dense->k_head_stride, dense->dtype);
        args->v[1] = dense_source(dense->v, dense->v_token_stride, dense->v_head_stride, dense->dtype);
    }
    if (dense->k && dense->k_shared) {
        args->k[2] = dense_source(dense->k_shared, dense->k_shared_token_stride, 0, dense->dtype);
        args->own_size = params->head_size - dense->shared_size;
    }
    for (int32_t i = 0; i < 3; i++) choose_read(&args->k[i], params->q_dtype, i == 0 ? cache->block_size : 0);
    for (int32_t i = 0; i < 2; i++) choose_read(&args->v[i], params->q_dtype, i == 0 ? cache->block_size : 0);
}

/* Do all rows of 16 slots lie within 2^31 bytes? */
static bool has_short_rows(const fv_kv_plane *plane)
{
    return plane->slot_stride >= 0 && plane->slot_stride <= INT32_MAX / 16;
}

/* Do values lie as keys do, and blocks and heads less than 2^32 bytes from the next one? */
static bool lie_alike(const fv_kv_plane *k, const fv_kv_plane *v)
{
    return k->block_stride == v->block_stride && k->head_stride == v->head_stride && k->slot_stride == v->slot_stride &&
           k->block_stride >= 0 && k->block_stride <= UINT32_MAX && k->head_stride >= 0 && k->head_stride <= UINT32_MAX;
}

/* Has the output more digits than P, which is of the queries' dtype, but fp16 next to one byte? */
static bool is_output_finer(const fv_attend_params *params)
{
    if (params->out_dtype == FV_DTYPE_F32) return true;
    return params->out_dtype == FV_DTYPE_F16 && params->q_dtype == FV_DTYPE_BF16 &&
           fv_dtype_bytes(params->cache.dtype) > 1;
}

static void set_args(attend_args *args, const fv_attend_params *params, fv_rescaling rescaling)
{
    memset(args, 0, sizeof(*args));
    args->params = *params;
    args->rescaling = rescaling;
    args->row_parts = index_divisor_of(1);
    args->num_whole = args->first_split = INT32_MAX;
    args->block = index_divisor_of(params->cache.block_size);
    set_sources(args);
    args->is_ds = params->cache.layout == FV_KV_LAYOUT_LATENT_FP8_DS;
    args->key_scales = params->cache.k_scales.data || params->cache.v_scales.data ||
                       (params->dense.k && params->num_kv_scales > 0);
    args->is_narrow = args->k[0].read == FV_READ_CONVERT && args->v[0].read == FV_READ_CONVERT && !params->dense.k;
    args->p_factor = args->key_scales && params->q_dtype == FV_DTYPE_F16 ? 64.0f : 1.0f;
    args->inverse_soft_cap = params->soft_cap > 0 ? 1.0f / params->soft_cap : 0.0f;
    args->max_slack = is_output_finer(params) ? 0.0f : FV_MAX_SLACK;
    args->is_special = params->soft_cap > 0 || params->alibi != FV_ALIBI_NONE || params->tree_mask;
    if (!params->alibi_slopes) args->params.alibi = FV_ALIBI_NONE;
    const int64_t q_places[] = {(int64_t)params->q, params->q_token_stride, params->q_head_stride};
    const int64_t out_places[] = {(int64_t)params->out, params->out_token_stride, params->out_head_stride};
    args->q_vectors = all_multiples(q_places, 3, 16);
    args->out_pairs = all_multiples(out_places, 3, 4);
    args->kv_heads = index_divisor_of(params->num_kv_heads);
    args->group = index_divisor_of(params->num_heads / params->num_kv_heads);
    args->segments = index_divisor_of(params->num_segments);
    args->tile = index_divisor_of(params->tile_keys);
    args->pages_hold_tiles = params->cache.block_size % 16 == 0 && has_short_rows(&args->k[0].plane) &&
                             has_short_rows(&args->v[0].plane);
    args->planes_alike = lie_alike(&args->k[0].plane, &args->v[0].plane);
}

/* The kernels of the smallest head size that holds the problem's. */
static const fv_cuda_attend_kernels *kernels_of(const fv_attend_params *params)
{
    const fv_cuda_attend_kernels *all[] = {&fv_cuda_attend_128, &fv_cuda_attend_256, &fv_cuda_attend_512};
    if (fv_kv_layout_is_latent(params->cache.layout)) {
        const bool fits = params->head_size <= fv_cuda_attend_latent.head_size &&
                          params->v_head_size <= fv_cuda_attend_latent.v_head_size;
        return fits ? &fv_cuda_attend_latent : NULL;
    }
    for (const fv_cuda_attend_kernels *kernels : all)
        if (fv_max_i32(params->head_size, params->v_head_size) <= kernels->head_size) return kernels;
    return NULL;
}

/* Rows that lie together, of the queries' dtype or of one byte, at multiples of 16 bytes. */
static bool is_plain(const attend_source *source, int32_t head_size)
{
    const fv_kv_plane *plane = &source->plane;
    const int64_t places[] = {(int64_t)plane->data, plane->block_stride, plane->head_stride, plane->slot_stride};
    if (source->chunk_shift != 30 || plane->slot_chunk > 0 || !all_multiples(places, 4, 16)) return false;
    return source->read == FV_READ_COPY || (source->read == FV_READ_CONVERT && head_size % 16 == 0);
}

/* Do all keys lie in plain rows, and do the scores need no more than a scale and a mask? */
static bool is_plain_work(const attend_args *args)
{
    const fv_attend_params *params = &args->params;
    if (args->key_scales || args->is_special || !args->q_vectors || args->own_size < params->head_size) return false;
    const bool cache_is_plain = is_plain(&args->k[0], params->head_size) && is_plain(&args->v[0], params->v_head_size);
    const bool dense_is_plain = is_plain(&args->k[1], params->head_size) && is_plain(&args->v[1], params->v_head_size);
    return (!params->cache.k.data || cache_is_plain) && (!params->dense.k || dense_is_plain);
}

/* Items or cells, times KV heads. */
static int32_t count_jobs(const fv_attend_params *params)
{
    const int32_t num_cells = params->num_q_blocks * params->num_segments;
    return (params->items ? params->num_items : num_cells) * params->num_kv_heads;
}

/* Does the list ask for two KV heads a job, and do they serve the call? */
static bool takes_pairs(const attend_args *args, const fv_cuda_attend_few_kernels *kernels, int32_t rows)
{
    const fv_attend_params *params = &args->params;
    if (!kernels->narrow_pair.kernel || !params->items || params->lane_heads != kernels->narrow_pair.heads)
        return false;
    if (rows <= 0 || rows > FV_CUDA_FEWEST_ROWS / 2) return false;
    if (params->num_kv_heads % 2 != 0 || params->num_kv_scales > 1) return false;
    if (!args->pages_hold_tiles || !args->planes_alike) return false;
    return params->head_size == kernels->head_size && params->v_head_size == kernels->head_size;
}

/* The kernel of few rows of which several blocks share an item, where the list says so and it serves the call; else
 * NULL. */
static const fv_cuda_attend_kernel *find_meeting_kernel(const fv_cuda_hopper_kernels *hopper, const attend_args *args,
                                                        int32_t block_m)
{
    const fv_attend_params *params = &args->params;
    const int32_t group = params->num_heads / params->num_kv_heads;
    if (!hopper || !params->items || params->num_segments <= 1 || params->num_split != params->num_items) return NULL;
    if (block_m > FV_CUDA_FEW_ROWS || args->is_latent || params->dense.k || needs_f32(params)) return NULL;
    if (params->item_tokens != 1 || group > FV_CUDA_FEWEST_ROWS || (group & (group - 1)) != 0) return NULL;
    if (params->head_size != 128 || params->v_head_size != 128 || !is_plain_work(args)) return NULL;
    /* What begin_meeting() does not ask. */
    if (!args->pages_hold_tiles || !args->planes_alike || params->window > 0 || params->context_parallel.world > 1)
        return NULL;
    if (params->causal || params->num_kv_scales > 1) return NULL;
    return &hopper->few_meeting[args->is_narrow];
}

/* Jobs by which a kernel is chosen: of a list of fixed length, which may be cut to fill all lanes, as many in each step. */
static int32_t count_likely_jobs(const fv_attend_params *params, int32_t num_workers)
{
    if (!params->num_items_at) return count_jobs(params);
    return fv_max_i32(num_workers + 1, params->num_seqs * params->num_kv_heads);
}

/* The kernel of few rows that serves the call, or NULL. */
static const fv_cuda_attend_kernel *find_few_kernel(const attend_args *args, int32_t num_workers)
{
    const fv_attend_params *params = &args->params;
    if (args->is_latent || params->dense.k || params->v_head_size % 4 != 0 || !is_plain_work(args)) return NULL;
    const int32_t rows = params->item_tokens * (params->num_heads / params->num_kv_heads); /* 0: not known */
    const int32_t is_more = rows <= 0 || rows > FV_CUDA_FEWEST_ROWS, num_jobs = count_likely_jobs(params, num_workers);
    const bool are_two = num_jobs > num_workers && num_jobs <= 2 * num_workers;
    const bool may_be_three = !params->batch_invariant && !params->num_items_at;
    const bool are_three = num_jobs > 2 * num_workers && num_jobs <= 3 * num_workers && may_be_three;
    for (const fv_cuda_attend_few_kernels &kernels : fv_cuda_attend_few) {
        if (fv_max_i32(params->head_size, params->v_head_size) > kernels.head_size) continue;
        if (args->is_narrow && takes_pairs(args, &kernels, rows)) return &kernels.narrow_pair;
        if (!args->is_narrow && !is_more && are_three && kernels.wide_of_three.kernel) return &kernels.wide_of_three;
        if (!args->is_narrow) return &kernels.wide[is_more];
        return !is_more && are_two && kernels.narrow_of_two.kernel ? &kernels.narrow_of_two : &kernels.narrow[is_more];
    }
    return NULL;
}

/* Rows of an item, at most, whatever the batch is. */
static int32_t most_rows(const fv_attend_params *params)
{
    const int32_t group = params->num_heads / params->num_kv_heads;
    return fv_max_i32(FV_DECODE_ROWS, fv_max_i32(1, params->block_q) * group);
}

/* Hopper's kernel of the fewest rows that an item fits in, else of 64. */
static const fv_cuda_attend_kernel *find_latent_kernel(const fv_cuda_hopper_kernels *hopper, const attend_args *args)
{
    const int32_t rows = most_rows(&args->params), is_half = args->params.q_dtype == FV_DTYPE_F16;
    if (args->rescaling != FV_RESCALING_MULTIPLY) return &hopper->amla[is_half];
    if (rows <= hopper->latent_16[is_half].block_m) return &hopper->latent_16[is_half];
    if (rows <= hopper->latent_32[is_half].block_m) return &hopper->latent_32[is_half];
    return &hopper->latent[is_half];
}

/* The Hopper kernel that serves the call, or NULL: latents with any number of rows, all else with many. */
static const fv_cuda_attend_kernel *find_hopper_kernel(const fv_cuda_hopper_kernels *hopper, const attend_args *args,
                                                       int32_t block_m)
{
    const fv_attend_params *params = &args->params;
    if (!is_plain_work(args)) return NULL;
    if (params->cache.k.data && args->k[0].read != FV_READ_COPY && !args->is_narrow) return NULL;
    if (args->is_latent) {
        if (args->is_narrow) return NULL;
        const bool is_whole = params->head_size == 576 && params->v_head_size == 512 && !params->dense.k;
        return is_whole ? find_latent_kernel(hopper, args) : NULL;
    }
    const int32_t head_size = fv_max_i32(params->head_size, params->v_head_size);
    if (block_m <= FV_CUDA_FEW_ROWS || head_size > 256) return NULL;
    const int32_t of_size = head_size <= 64 ? 0 : head_size <= 128 ? 1 : 2;
    if (args->is_narrow) return &hopper->narrow_rows[of_size];
    return &hopper->rows[of_size][params->q_dtype == FV_DTYPE_F16];
}

/* Do Hopper's kernels of the 656-byte entry serve the call? Their values are fp16 times a power of two, which is not enough
 * for an output of fp32: of a row of one key it is the value. */
static bool takes_entries(const attend_args *args)
{
    const fv_attend_params *params = &args->params;
    const fv_kv_plane *plane = &args->k[0].plane;
    const int64_t places[] = {(int64_t)plane->data, plane->block_stride, plane->slot_stride};
    if (!args->is_ds || params->q_dtype != FV_DTYPE_BF16 || args->rescaling != FV_RESCALING_MULTIPLY) return false;
    if (args->key_scales || args->is_special || params->dense.k || params->rotation.cos) return false;
    if (params->out_dtype == FV_DTYPE_F32) return false;
    return args->q_vectors && plane->slot_chunk <= 0 && all_multiples(places, 3, 16);
}

/* The one of the fewest rows that an item fits in, else of 64. */
static const fv_cuda_attend_kernel *find_entry_kernel(const fv_cuda_hopper_kernels *hopper, const attend_args *args)
{
    const fv_cuda_attend_kernel *kernel = hopper->entries;
    while (kernel->block_m < FV_CUDA_MANY_ROWS && kernel->block_m < most_rows(&args->params)) kernel++;
    return kernel;
}

/* `hopper` NULL: none of its kernels. */
static fv_cuda_attend_kernel choose_kernel(const fv_device *device, const fv_cuda_hopper_kernels *hopper,
                                           const attend_args *args, int32_t block_m)
{
    const fv_cuda_state *state = fv_cuda_state_of(device);
    const fv_attend_params *params = &args->params;
    const fv_cuda_attend_kernel kernel = fv_cuda_find_f32_kernel(params, state->max_shared);
    const fv_cuda_attend_kernel *entries = hopper && takes_entries(args) ? find_entry_kernel(hopper, args) : NULL;
    if (entries && entries->shared_bytes <= state->max_shared) return *entries;
    const fv_cuda_attend_kernels *kernels = needs_f32(params) ? NULL : kernels_of(params);
    if (!kernels) return kernel;
    const int32_t is_half = params->q_dtype == FV_DTYPE_F16;
    const fv_cuda_attend_kernel *tuned = hopper ? find_hopper_kernel(hopper, args, block_m) : NULL;
    if (!tuned && args->rescaling != FV_RESCALING_MULTIPLY) return kernel;
    if (!tuned && block_m <= FV_CUDA_FEW_ROWS) tuned = find_few_kernel(args, device->num_workers);
    if (tuned && tuned->shared_bytes <= state->max_shared) return *tuned;
    const bool takes_many = block_m > FV_CUDA_FEW_ROWS && kernels->many[is_half].shared_bytes <= state->max_shared;
    return takes_many ? kernels->many[is_half] : kernels->few[is_half];
}

/* Has each multiprocessor one block that stays, whatever the step is? The planner cuts a list of fixed length, of few sequences, for
 * one. */
static bool takes_workers_alone(const attend_args *args, int32_t num_workers)
{
    const fv_attend_params *params = &args->params;
    return params->num_items_at && fv_one_lane_suffices(params->cache.dtype, params->head_size) &&
           params->num_seqs * params->num_kv_heads <= num_workers;
}

/* Blocks of threads: a job each, or, where they stay, as many as the device holds at once. */
static dim3 grid_of(attend_args *args, const fv_cuda_attend_kernel *kernel, int32_t num_workers)
{
    const fv_attend_params *params = &args->params;
    const uint32_t parts = args->row_parts.by;
    if (!params->items && !kernel->stays) {
        return dim3((uint32_t)params->num_q_blocks * parts, (uint32_t)params->num_kv_heads,
                    (uint32_t)params->num_segments);
    }
    const int32_t num_jobs = count_jobs(params) / fv_max_i32(1, kernel->heads) * (int32_t)parts;
    const int32_t stays = takes_workers_alone(args, num_workers) ? 1 : kernel->stays;
    args->num_jobs = !params->items && params->whole_queries ? -1 : num_jobs;
    return dim3((uint32_t)(kernel->stays ? fv_min_i32(num_jobs, stays * num_workers) : num_jobs));
}

/* The grid of a list whose last items have two blocks for each block of rows, or of cells that all have. */
static dim3 split_grid_of(attend_args *args)
{
    const fv_attend_params *params = &args->params;
    const int32_t parts = (int32_t)args->row_parts.by;
    if (!params->items) {
        args->num_whole = args->first_split = 0;
        return dim3((uint32_t)(2 * params->num_q_blocks * parts), 1, (uint32_t)params->num_segments);
    }
    args->num_whole = (params->num_items - params->num_split) * parts;
    args->first_split = (int32_t)fv_round_up(args->num_whole, 2);
    return dim3((uint32_t)(args->first_split + 2 * params->num_split * parts));
}

/* Bytes of shared memory of which a multiprocessor has room for so many blocks, and no more. */
static int32_t bytes_for_blocks(const fv_cuda_attend_kernel *kernel, const fv_device *device, int32_t blocks)
{
    return fv_max_i32(kernel->shared_bytes, fv_cuda_state_of(device)->max_shared / (blocks + 1));
}

/* Where each multiprocessor has one block that stays, or two, none takes one more: it would while the kernel before
 * still holds others. */
static int32_t shared_bytes_of(const fv_cuda_attend_kernel *kernel, const fv_device *device, dim3 grid)
{
    const int32_t blocks = (int32_t)fv_ceil_div(grid.x, device->num_workers);
    return blocks < kernel->stays && blocks <= 2 ? bytes_for_blocks(kernel, device, blocks) : kernel->shared_bytes;
}

/* A cluster for each item and KV head. */
static fv_status launch_meeting(const fv_launch *launch, attend_args *args, const fv_cuda_attend_kernel *kernel)
{
    const fv_attend_params *params = &args->params;
    const int32_t blocks = params->num_segments, group = params->num_heads / params->num_kv_heads;
    args->row_parts = index_divisor_of(group * (params->v_head_size / 4) / blocks);
    args->num_jobs = 0; /* but the first of each block */
    const dim3 grid((uint32_t)blocks, (uint32_t)params->num_kv_heads, (uint32_t)params->num_items);
    return fv_cuda_launch_overlapped(launch, "attend_paged", kernel->kernel, grid, (uint32_t)kernel->num_threads,
                                     (size_t)kernel->shared_bytes, *args, (uint32_t)blocks);
}

fv_status fv_cuda_attend_launch(const fv_launch *launch, const fv_attend_params *params, int32_t block_m,
                                fv_rescaling rescaling, bool may_be_hopper)
{
    const fv_cuda_state *state = fv_cuda_state_of(launch->device);
    const fv_cuda_hopper_kernels *hopper = may_be_hopper ? state->hopper : NULL;
    attend_args args;
    set_args(&args, params, rescaling);
    if (args.is_latent && hopper) fv_cuda_map_keys(&args, state);
    const fv_cuda_attend_kernel *meeting = find_meeting_kernel(hopper, &args, block_m);
    if (meeting) return launch_meeting(launch, &args, meeting);
    const fv_cuda_attend_kernel kernel = choose_kernel(launch->device, hopper, &args, block_m);
    if (kernel.shared_bytes > state->max_shared) {
        return state->host.fail(FV_ERR_UNSUPPORTED,
                                "%s: attention over heads of %d needs %d bytes of shared memory; the GPU has %d",
                                launch->device->name, params->head_size, kernel.shared_bytes, state->max_shared);
    }
    if (kernel.map_tile > 0) fv_cuda_map_planes(&args, state, kernel.map_tile);
    if (kernel.takes_row_parts)
        args.row_parts = index_divisor_of((int32_t)fv_ceil_div(most_rows(params), kernel.block_m));
    if (kernel.heads > 1) args.kv_heads = index_divisor_of(params->num_kv_heads / kernel.heads);
    const bool splits = kernel.splits_items && params->num_split > 0;
    const dim3 grid = splits ? split_grid_of(&args) : grid_of(&args, &kernel, launch->device->num_workers);
    return fv_cuda_launch_overlapped(launch, "attend_paged", kernel.kernel, grid, (uint32_t)kernel.num_threads,
                                     (size_t)shared_bytes_of(&kernel, launch->device, grid), args, splits ? 2 : 1);
}

bool fv_cuda_narrows_partials(const fv_launch *launch, const fv_attend_params *params, fv_rescaling rescaling)
{
    if (!narrows_partials(params)) return false;
    attend_args args;
    set_args(&args, params, rescaling);
    const fv_cuda_hopper_kernels *hopper = fv_cuda_state_of(launch->device)->hopper;
    return choose_kernel(launch->device, hopper, &args, FV_CUDA_MANY_ROWS).narrows_partials;
}

/* Shared memory above 48 KiB is for kernels that ask for it. */
template <class Kernel>
static fv_status allow_shared(const fv_device *device, const Kernel *kernel, int32_t shared_bytes)
{
    if (shared_bytes > fv_cuda_state_of(device)->max_shared) return FV_OK; /* launches say so */
    return fv_cuda_status(
        device, "shared memory of the attention kernels",
        cudaFuncSetAttribute((const void *)kernel->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
}

static fv_status allow_hopper(const fv_device *device, const fv_cuda_hopper_kernels *hopper)
{
    const fv_cuda_attend_kernel *pairs[] = {hopper->rows[0], hopper->rows[1],   hopper->rows[2],  hopper->latent,
                                            hopper->amla,    hopper->latent_16, hopper->latent_32};
    fv_status status = FV_OK;
    for (const fv_cuda_attend_kernel *kernels : pairs) {
        for (int32_t i = 0; i < 2 && status == FV_OK; i++)
            status = allow_shared(device, &kernels[i], kernels[i].shared_bytes);
    }
    for (const fv_cuda_attend_kernel &kernel : hopper->entries)
        if (status == FV_OK) status = allow_shared(device, &kernel, kernel.shared_bytes);
    for (int32_t i = 0; i < 3 && status == FV_OK; i++)
        status = allow_shared(device, &hopper->narrow_rows[i], hopper->narrow_rows[i].shared_bytes);
    for (int32_t i = 0; i < 2 && status == FV_OK; i++)
        status = allow_shared(device, &hopper->few_meeting[i], hopper->few_meeting[i].shared_bytes);
    for (int32_t i = 0; i < 2 && status == FV_OK; i++)
        status = allow_shared(device, &hopper->query[i], hopper->query[i].shared_bytes);
    return status;
}

extern "C" fv_status fv_cuda_attend_open(const fv_device *device)
{
    fv_cuda_state *state = fv_cuda_state_of(device);
    const fv_cuda_attend_kernels *all[] = {&fv_cuda_attend_128, &fv_cuda_attend_256, &fv_cuda_attend_512,
                                           &fv_cuda_attend_latent};
    const int32_t has_entered = fv_cuda_enter(device);
    fv_status status = FV_OK;
    for (const fv_cuda_attend_kernel &kernel : fv_cuda_attend_f32)
        if (status == FV_OK) status = allow_shared(device, &kernel, state->max_shared);
    for (const fv_cuda_attend_kernels *kernels : all) {
        for (int32_t i = 0; i < 2 && status == FV_OK; i++) {
            status = allow_shared(device, &kernels->few[i], kernels->few[i].shared_bytes);
            if (status == FV_OK) status = allow_shared(device, &kernels->many[i], kernels->many[i].shared_bytes);
        }
    }
    for (const fv_cuda_attend_few_kernels &kernels : fv_cuda_attend_few) {
        for (const fv_cuda_attend_kernel *kernel : {&kernels.wide[0], &kernels.wide[1], &kernels.narrow[0],
                                                    &kernels.narrow[1], &kernels.narrow_of_two, &kernels.narrow_pair})
            if (status == FV_OK && kernel->kernel)
                status = allow_shared(device, kernel, bytes_for_blocks(kernel, device, 1));
        if (status == FV_OK && kernels.wide_of_three.kernel)
            status = allow_shared(device, &kernels.wide_of_three, kernels.wide_of_three.shared_bytes);
    }
    if (status == FV_OK && state->hopper) {
        status = allow_hopper(device, state->hopper);
        fv_cuda_find_encode_map(state);
    }
    fv_cuda_leave(device, has_entered);
    return status;
}
