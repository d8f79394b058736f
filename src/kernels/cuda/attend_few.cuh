/* Attention of few rows over a cache on tensor cores (mma.sync, sm_80 and later): decode, which the memory bounds.
 * Up to 8 rows, or up to 16, share each key, and the keys of a job are dealt out to four or six warps, 16 at a time,
 * each with its own sums and its own ring of two tiles in shared memory (attend_few_tile.cuh): no warp waits for
 * another before the end. Rows are the short side of each product, S^T = K Q^T and O^T = V^T P^T.
 *
 *   warp w      tile w     tile w + W     tile w + 2 W ...        first tile of the next job ... (W warps)
 *   its ring    [ worked on ][ on its way ]                       cp.async
 *   the end     maxima, sums and values of the warps meet in the half of each ring that is free
 *
 * Blocks of threads stay and do one job after the other (attend_few_jobs.cuh), so that memory is asked for
 * something at any time: a job's first tiles are on their way while the one before ends.
 *
 * Caches of the queries' 16-bit dtype, or of one byte: those are widened on their way from shared memory to the tensor
 * cores, to fp16, in which 8-bit formats are exact; q and P are fp16, too, whatever the queries are. Rows lie together;
 * scores need no more than scale and mask: everything else takes attend_mma.cuh. */
#ifndef FV_KERNELS_CUDA_ATTEND_FEW_CUH
#define FV_KERNELS_CUDA_ATTEND_FEW_CUH

#include "kernels/cuda/attend_few_tile.cuh"

/* Bits of few_walk.asked: what has been asked for. */
enum { FEW_FIRST_TILE = 1, FEW_QUERIES = 2 };

/* A warp on its way through the block's jobs. */
typedef struct few_walk {
    int32_t n;       /* job */
    int32_t stage;   /* of the tile to work on next */
    int32_t asked;   /* of the job, before it begins: FEW_FIRST_TILE, FEW_QUERIES */
    few_place place; /* of the tile to ask for next */
    few_pages pages; /* of pieces that meet */
    few_lane own;
} few_walk;

/* Asks for the tile after tile n of the job: its own, or the first of the next job where that is known. */
template <class S>
static __device__ __forceinline__ void ask_few_tile(few_walk *walk, few_memory<S> *memory, const attend_args *args,
                                                    const few_slot *slot, const few_tiles *tiles, int32_t n,
                                                    int32_t warp, int32_t lane)
{
    const few_slot *from = slot;
    few_tiles of = *tiles;
    int32_t asked = n + 1;
    if (n < 0 && walk->asked & FEW_FIRST_TILE) return;
    if (asked >= of.count) {
        from = n < 0 || S::MEETS ? NULL : next_few_slot(&memory->jobs, walk->n, lane);
        if (!from) return;
        of = few_tiles_of<S>(from, warp);
        if (of.count == 0) return;
        asked = 0;
        walk->asked = FEW_FIRST_TILE;
    }
    few_place place = walk->place;
    const int32_t job = n < 0 ? walk->n : walk->n + 1; /* of tile 0 */
    if (asked == 0) {
        place.block = memory->jobs.first_blocks[job & 1][warp * S::TILE + lane % S::TILE];
        place.slot = split_key(args, of.first).y;
    }
    walk->place = find_few_tile<S>(from, args, &of, asked + 1, &walk->pages, lane);
    load_few_tile<S>(memory, args, from, &of, asked, &place, &walk->own, n < 0 ? walk->stage : walk->stage ^ 1, warp,
                     lane);
}

/* All tiles of a warp, and for the scout's warp the rest of its steps. One barrier where there is a job. */
template <class S>
static __device__ __forceinline__ void attend_few_tiles(few_state<S> *state, few_walk *walk, few_scout *scout,
                                                        few_memory<S> *memory, const attend_args *args,
                                                        const few_slot *slot, int32_t warp, int32_t lane)
{
    enum { SCOUTED = 6 }; /* tiles before the end: the later a job is claimed, the better they are dealt out */
    few_reads<S> reads;
    place_few_reads<S>(&reads, memory, warp, lane);
    const float scale = args->params.scale * slot->job.k_head_scale * FV_LOG2E;
    few_tiles tiles = {0, 0, 0, 0};
    const bool is_job = slot->state == FEW_JOB;
    if (is_job) tiles = few_tiles_of<S>(slot, warp);
    const int32_t end = is_job ? fv_max_i32(tiles.count, 1) : 0; /* all warps are at the barrier */
#pragma unroll 1
    for (int32_t n = -1; n < end || (warp == 0 && scout->step != FEW_DONE); n++) {
        if (n < tiles.count) ask_few_tile<S>(walk, memory, args, slot, &tiles, n, warp, lane);
        if (n < 0 && end > 0) { /* the first keys are on their way */
            if (!(walk->asked & FEW_QUERIES))
                load_few_queries<S>(memory, args, slot->job.num_rows - slot->row0,
                                    [=](int32_t r) { return slot->rows[r]; });
            walk->asked = 0;
        }
        ptx_cp_async_commit();
        if (warp == 0 && tiles.count - n <= SCOUTED && scout->step != FEW_DONE)
            step_few_scout<S>(scout, &memory->jobs, args, walk->n, lane);
        if (n < 0 || n >= end) continue;
        ptx_cp_async_wait<1>();
        __syncwarp();
        if (n == 0) {
            __syncthreads(); /* q is there, of all warps */
            take_few_queries<S>(&reads, memory, scale, lane);
        }
        if (n >= tiles.count) continue;
        attend_few_stage<S>(state, memory, args, slot, &reads, walk->stage, is_whole_tile(&tiles, n),
                            few_tile_key<S>(&tiles, n), scale, lane);
        walk->stage ^= 1;
    }
}

/* Where element `d` of a row of a warp's sums lies: pairs of rows take turns at places of 32 bytes, so that four of
 * them have all banks. */
template <class S> static __device__ __forceinline__ uint32_t few_sum_place(uint32_t r, uint32_t d)
{
    return r * S::VALUE + (d ^ r / 2 % 4 * 8);
}

/* A warp's sums to the part of its ring that is free. */
template <class S>
static __device__ __forceinline__ void share_few_state(few_memory<S> *memory, const few_state<S> *state,
                                                       const few_slot *slot, float *values, int32_t warp, int32_t lane)
{
    const int32_t num_rows = slot->job.num_rows - slot->row0;
    float sums[2 * S::OCTETS];
#pragma unroll
    for (int j = 0; j < 2 * S::OCTETS; j++) sums[j] = state->sum[j / 2][j % 2];
#pragma unroll
    for (int step = 4; step < 32; step *= 2)
#pragma unroll
        for (int j = 0; j < 2 * S::OCTETS; j++) sums[j] += __shfl_xor_sync(~0u, sums[j], step);
    const uint32_t values_at = ptx_shared_address(values);
#pragma unroll
    for (int j = 0; j < 2 * S::OCTETS; j++) {
        const int32_t r = few_row_of_sum(j, lane);
        if (few_item_row<S>(r) >= num_rows) continue;
        if (lane < 4)
            memory->shares[warp][r] = few_share{state->max[j / 2][j % 2], sums[j], state->rounded[j], values_at};
        const uint32_t place = few_sum_place<S>(r, lane / 4 * (S::IS_NARROW ? 2 : 1));
#pragma unroll
        for (int n = 0; n < S::VALUE / 16; n++) {
            const float low = state->out[n][j / 2][j % 2], high = state->out[n][j / 2][j % 2 + 2];
            float *to = values + (place ^ n * 16 % 32) + n * 16 / 32 * 32;
            if constexpr (S::IS_NARROW) {
                *(float2 *)to = make_float2(low, high);
            } else {
                *to = low;
                *(values + (place ^ (n * 16 % 32 + 8)) + n * 16 / 32 * 32) = high;
            }
        }
    }
}

/* Finds where row `lane` of a slot goes, by a warp before the job's tiles: at its end each instruction counts. A barrier
 * must follow. */
static __device__ __forceinline__ void place_few_row(few_slot *slot, const attend_args *args, const attend_job *job,
                                                     int32_t token, int32_t head, int32_t lane)
{
    if (lane >= FEW_MOST_ROWS) return;
    attend_row row = {};
    row.token = token;
    row.head = head;
    const attend_end end = place_row(args, job, &row);
    slot->targets[lane] = few_target{target_of(args, &row, &end).to, (int32_t)end.partial};
}

/* Elements d .. d + 3 of a row of the output. */
static __device__ __forceinline__ void store_few_four(const attend_args *args, char *to, float out_factor, uint32_t d,
                                                      float4 value)
{
    const fv_dtype dtype = args->params.out_dtype;
    const attend_target target = {to, dtype, args->out_pairs && dtype != FV_DTYPE_F32, out_factor};
    if (target.pairs) {
        store_pair(&target, d, value.x, value.y);
        store_pair(&target, d + 2, value.z, value.w);
    } else {
        store_element(&target, d, value.x);
        store_element(&target, d + 1, value.y);
        store_element(&target, d + 2, value.z);
        store_element(&target, d + 3, value.w);
    }
}

/* Four elements of a row of a slot, of all its warps: they and the row's sums are relative to its maximum. */
typedef struct few_four {
    float max, sum, rounded;
    float4 value;
} few_four;

template <class S>
static __device__ __forceinline__ few_four add_few_shares(const few_memory<S> *memory, uint32_t r, uint32_t d)
{
    few_share shares[S::WARPS];
    float maxima[S::WARPS];
    uint4 parts[S::WARPS];
#pragma unroll
    for (int w = 0; w < S::WARPS; w++) {
        shares[w] = memory->shares[w][r];
        maxima[w] = shares[w].max;
    }
    few_four four = {largest_of(maxima), 0, 0, make_float4(0, 0, 0, 0)};
#pragma unroll
    for (int w = 0; w < S::WARPS; w++) parts[w] = ptx_ld_shared_v4(shares[w].values + few_sum_place<S>(r, d) * 4);
#pragma unroll
    for (int w = 0; w < S::WARPS; w++) {
        const float factor = ptx_ex2(shares[w].max - four.max);
        four.sum += shares[w].sum * factor;
        four.rounded += shares[w].rounded * factor;
        if (factor == 0.0f) continue; /* whatever its values are */
        four.value.x += __uint_as_float(parts[w].x) * factor;
        four.value.y += __uint_as_float(parts[w].y) * factor;
        four.value.z += __uint_as_float(parts[w].z) * factor;
        four.value.w += __uint_as_float(parts[w].w) * factor;
    }
    return four;
}

/* What values of P as rounded lack. */
static __device__ __forceinline__ float few_values_factor(const few_four *four, float v_head_scale)
{
    return v_head_scale * (four->rounded > 0 ? __fdividef(four->sum, four->rounded) : 1.0f);
}

/* The warps' sums become one, and the row's results go to memory: a thread for each four elements. One barrier, behind
 * which the sums of all warps are there; where results go is found before it. */
template <class S>
static __device__ __forceinline__ void store_few_rows(const few_memory<S> *memory, const attend_args *args,
                                                      const few_slot *slot)
{
    constexpr int FOURS = S::VALUE / 4;
    static_assert(S::THREADS <= S::BLOCK_M * FOURS, "each thread's first four are of a row of the slot");
    const uint32_t num_rows = (uint32_t)fv_min_i32(S::ITEM_ROWS, slot->job.num_rows - slot->row0); /* of each head */
    const uint32_t num_fours = S::HEADS * num_rows * FOURS;
    const float v_head_scale = slot->job.v_head_scale;
    uint32_t i = threadIdx.x;
#pragma unroll 1
    do {
        const uint32_t d = i % FOURS * 4;
        uint32_t r = i / FOURS;
        if constexpr (S::HEADS > 1) r = r < num_rows ? r : r - num_rows + S::ITEM_ROWS;
        const few_target place = slot->targets[r];
        if (i < S::THREADS) __syncthreads();
        if (i >= num_fours) break;
        i += S::THREADS;
        const few_four four = add_few_shares(memory, r, d);
        const float4 value = four.value;
        attend_row row = {};
        row.token = slot->rows[r].token;
        row.head = slot->rows[r].head;
        attend_end end = {-INFINITY, 0.0f, 0.0f, place.partial, (int64_t)row.token - args->params.out_first_token};
        finish_row(&end, args, &row, few_maximum(four.max, four.sum), four.sum,
                   few_values_factor(&four, v_head_scale));
        if (d == 0) store_sums(args, &row, &end);
        if (d >= (uint32_t)args->params.v_head_size) continue; /* a multiple of 4 */
        if (place.partial >= 0) {
            const float factor = end.out_factor;
            const bool is_there = factor != 0.0f;
            *(float4 *)(place.to +
                        d * 4) = make_float4(is_there ? value.x * factor : 0.0f, is_there ? value.y * factor : 0.0f,
                                             is_there ? value.z * factor : 0.0f, is_there ? value.w * factor : 0.0f);
            continue;
        }
        store_few_four(args, place.to, end.out_factor, d, value);
    } while (i < num_fours);
}

/* A job from its first tile to its results, and the way to the next one. */
template <class S>
static __device__ __forceinline__ void attend_few_job(few_walk *walk, few_scout *scout, few_memory<S> *memory,
                                                      const attend_args *args, few_slot *slot, int32_t warp,
                                                      int32_t lane)
{
    if (warp == S::WARPS - 1 && slot->state == FEW_JOB && !(walk->asked & FEW_QUERIES)) /* else begin_first_job did */
        place_few_row(slot, args, &slot->job, slot->rows[lane % FEW_MOST_ROWS].token,
                      slot->rows[lane % FEW_MOST_ROWS].head, lane);
    few_state<S> state;
    clear_few_state(&state);
    attend_few_tiles<S>(&state, walk, scout, memory, args, slot, warp, lane);
    scout->step = FEW_CLAIM;
    if (slot->state == FEW_JOB) {
        /* Kept from being found before the loop over tiles, which has no registers for what this needs. */
        const int32_t own_warp = (int32_t)ptx_keep((uint32_t)warp), own_lane = (int32_t)ptx_keep((uint32_t)lane);
        char *values = memory->ring[own_warp] + (S::FIRST > 0 ? 0 : (walk->stage ^ 1) * S::STAGE);
        share_few_state<S>(memory, &state, slot, (float *)values, own_warp, own_lane);
        store_few_rows<S>(memory, args, slot);
    }
    __syncthreads(); /* the next job is known; rows and sums are read to the end */
}

/* The slot of a block's first job, by the last two warps. */
template <class S>
static __device__ __forceinline__ void write_first_slot(few_slot *slot, const attend_args *args, const attend_job *job,
                                                        int32_t warp, int32_t lane)
{
    const few_row row = few_row_of_lane<S>(args, job, 0, lane);
    if (warp == S::WARPS - 1) {
        write_few_job(slot, job, 0, lane);
        place_few_row(slot, args, job, row.token, row.head, lane);
    } else {
        const attend_keys keys = few_keys_of(&row, is_few_row<S>(job, 0, lane));
        write_few_rows(slot, &keys, &row, lane);
    }
}

/* The block's first job by all warps at once: where its item says all of it, each asks for its part of the queries and
 * for its first tile as soon as the item is there, and one writes the slot meanwhile. Else nothing: the scout finds it.
 * A barrier must follow. */
template <class S>
static __device__ __forceinline__ void begin_first_job(few_walk *walk, few_scout *scout, few_memory<S> *memory,
                                                       const attend_args *args, fv_work_item item, int32_t warp,
                                                       int32_t lane)
{
    const fv_attend_params *params = &args->params;
    if (!has_whole_tiles<S>(args) || params->window > 0 || params->context_parallel.world > 1) return;
    if (has_few_flags(params)) return;
    if (!find_first_item<S>(&item, &scout->num_jobs, args)) return;
    const int32_t first = item.first_key / S::TILE * S::TILE + warp * S::TILE, second = first + S::WARPS * S::TILE;
    const int32_t end = item.num_kv_heads > 0 ? item.end_key : 0;
    const int32_t num_keys = fv_min_i32(item.seq_len, end); /* all of them have pages */
    const int32_t *table = params->block_table + item.table_row * params->block_table_stride;
    const int2 at = split_key(args, first);
    const int32_t block = first < num_keys ? table[at.x] : -1;
    const int2 next = split_key(args, second);
    const few_place next_place = {second < num_keys ? table[next.x] : -1, next.y};
    const int32_t num_rows = item.num_tokens * (int32_t)args->group.by;
    if (item.num_kv_heads <= 0 || num_rows <= 0 || num_rows > S::ITEM_ROWS) return;
    walk->place = next_place;
    attend_lengths lengths = {item.query_start, item.query_end, item.seq_len, 1};
    lengths.k_head_scale = fv_scale_of_head(params->k_scale, params->num_kv_scales, 0);
    lengths.v_head_scale = fv_scale_of_head(params->v_scale, params->num_kv_scales, 0);
    const attend_job job = cached_job_of(args, &item, item.first_kv_head, &lengths);
    constexpr bool IS_LATE = few_queries<S>::OWN == 1; /* else there are no registers to wait for them with */
    constexpr bool IS_LAST = IS_LATE && !S::IS_NARROW && S::OCTETS == 1; /* copied, in less time than the tile takes */
    const auto row_of = [&](int32_t r) { return few_row_of<S>(args, &job, r); };
    uint4 query = make_uint4(0, 0, 0, 0);
    if constexpr (!IS_LATE)
        load_few_queries<S>(memory, args, num_rows, row_of);
    else if constexpr (!IS_LAST)
        query = ask_few_query<S>(memory, args, num_rows, 0, row_of);
    walk->asked = FEW_QUERIES;
    const int32_t last_end = job.context + item.first_token + item.num_tokens; /* of the keys that its last row sees */
    if (first >= item.first_key && first + S::TILE <= fv_min_i32(num_keys, last_end)) {
        const few_place place = {block, at.y};
        copy_whole_tile<S>(&walk->own, args, &place, item.first_kv_head, walk->stage);
        walk->asked |= FEW_FIRST_TILE;
    } else if (lane < S::TILE) {
        memory->jobs.first_blocks[0][warp * S::TILE + lane] = block;
    }
    if constexpr (IS_LAST)
        load_few_queries<S>(memory, args, num_rows, row_of);
    else if constexpr (IS_LATE)
        store_few_query<S>(memory, args, query, 0); /* while the tile is on its way */
    if (warp >= S::WARPS - 2) write_first_slot<S>(&memory->jobs.slots[0], args, &job, warp, lane);
    scout->number = (int32_t)blockIdx.x;
    scout->step = FEW_CLAIM;
    walk->n = 0;
}

template <class S>
static __global__ void __launch_bounds__(S::THREADS, S::BLOCKS)
    attend_few_kernel(const __grid_constant__ attend_args args)
{
    PTX_DYNAMIC_SHARED(256, few_shared);
    few_memory<S> *memory = (few_memory<S> *)few_shared;
    const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    few_item_words first;
    if (args.params.items) ask_first_item<S>(&first, &args);
    /* Here and below: found again where it is needed, for there is no register that could keep it. */
    const int32_t own_lane = (int32_t)ptx_keep((uint32_t)lane);
    few_walk walk = {-1, 0, 0, {-1, 0}, {}, few_lane_of<S>(memory, &args, warp, own_lane)};
    few_scout scout = begin_few_jobs(&memory->jobs, &args);
    /* Before it waits itself, where the reduction reads no more than items before it waits: not lengths, nor sinks. */
    if (args.params.items && !args.params.sinks) overlap_let_next_start();
    overlap_begin();
    begin_first_job<S>(&walk, &scout, memory, &args, first.item, warp, lane);
    __syncthreads();
#pragma unroll 1
    for (; memory->jobs.slots[walk.n & 1].state != FEW_NO_JOB; walk.n++) {
        few_slot *slot = &memory->jobs.slots[ptx_keep((uint32_t)walk.n) & 1];
        attend_few_job<S>(&walk, &scout, memory, &args, slot, warp, lane);
    }
    ptx_cp_async_wait<0>();
}

template <class S> constexpr fv_cuda_attend_kernel attend_few_of(void)
{
    return {attend_few_kernel<S>, (int32_t)sizeof(few_memory<S>), S::THREADS, S::BLOCK_M, 0, S::BLOCKS, S::HEADS};
}

#endif
