/* A block of threads of the kernel of many rows (attend_rows.cuh): its shared memory, and its jobs.
 *
 * A job is up to 128 rows of an item and one of its KV heads. A block stays: its first job has the block's number, the next
 * one it takes from a counter (fv_attend_params.claims), so that blocks on a fast multiprocessor take more of them. A
 * warpgroup that does nothing else, the scouts, finds the next job, its rows and its queries while this one is worked on. */
#ifndef FV_KERNELS_CUDA_HOPPER_ROWS_BLOCK_CUH
#define FV_KERNELS_CUDA_HOPPER_ROWS_BLOCK_CUH

#include "kernels/cuda/hopper/handover.cuh"
#include "kernels/cuda/hopper/panel.cuh"
#include "kernels/cuda/overlap.cuh"

enum {
    ROWS_BLOCK_M = 128, /* two warpgroups of 64 rows, the first threads of a block */
    ROWS_CONSUMERS = 256,
    ROWS_LOADERS = 128, /* two warps for keys, two for values, each for half of a tile */
    ROWS_SCOUTS = 128,  /* a row each */
    ROWS_THREADS = ROWS_CONSUMERS + ROWS_LOADERS + ROWS_SCOUTS
};
static_assert(ROWS_BLOCK_M == ROWS_SCOUTS, "a row a thread");

enum { ROWS_BARRIER_SCOUTS = 1 }; /* of threads; 0 is __syncthreads() */

/* 16-bit dtype, head size of keys and values, keys of a tile; tiles of keys, and of values, and jobs' queries that there is
 * room for. IS_NARROW: the cache's entries are of one byte and become T, fp16, on their way (rows_widen.cuh), as queries do. */
template <class Element, int HEAD_, int TILE_, int STAGES_, int QUERIES_, bool IS_NARROW_ = false> struct rows_shape {
    using T = Element;
    static constexpr int HEAD = HEAD_, TILE = TILE_, STAGES = STAGES_, QUERIES = QUERIES_;
    static constexpr bool IS_NARROW = IS_NARROW_;
    static constexpr int HALF = TILE / 2, PANELS = HEAD / FV_PANEL_COLUMNS;
    static constexpr int TILE_BYTES = TILE * HEAD * 2, QUERY_BYTES = ROWS_BLOCK_M * HEAD * 2;
    static constexpr int ENTRY_BYTES = IS_NARROW ? 1 : 2; /* of an element in the cache; panels that a row's bytes come to: */
    static constexpr int FIRST_BYTES_PANEL = IS_NARROW ? PANELS / 2 : 0, BYTES_PANELS = PANELS - FIRST_BYTES_PANEL;
    static constexpr int WIDENED = HEAD == 256 ? 2 : 4; /* a lane's 16 bytes that it has at once on their way to T */
    /* Of a thread, as many as four begin with. */
    static constexpr int CONSUMER_REGISTERS = !IS_NARROW ? 216 : HEAD == 256 ? 208 : 192, SCOUT_REGISTERS = 48;
    static constexpr int LOADER_REGISTERS = 65536 / 128 - 2 * CONSUMER_REGISTERS - SCOUT_REGISTERS;
    static_assert((HEAD == 64 || HEAD == 128 || HEAD == 256) && (TILE == 64 || TILE == 128), "products that there are");
    static_assert(ROWS_CONSUMERS == 256 && ROWS_LOADERS == 128 && ROWS_SCOUTS == 128,
                  "as many registers as a block begins with, or a warpgroup waits for ever");
};

/* A job as those need it who work on it. */
typedef struct rows_slot {
    attend_row rows[ROWS_BLOCK_M];
    float lacks[ROWS_BLOCK_M]; /* next to one byte: what scores of a row lack (half_query.cuh); with its queries */
    attend_keys keys;
    int32_t num_rows; /* 0: there is no job, nor any after it */
    attend_job job;
    uint64_t is_written, has_queries, is_free; /* barriers */
} rows_slot;

/* When a tile is there, and when it may be overwritten. */
typedef struct rows_barriers {
    uint64_t full, empty;
} rows_barriers;

template <class S> struct rows_memory {
    alignas(1024) char q[S::QUERIES][S::QUERY_BYTES]; /* of the block's n-th job: n % QUERIES */
    alignas(1024) char tiles[2][S::STAGES][S::TILE_BYTES]; /* keys, values */
    rows_slot slots[2]; /* n % 2 */
    rows_barriers of_tiles[2][S::STAGES];
    uint64_t bytes_there[ROWS_LOADERS / 32]; /* barriers: a loading warp's entries of one byte */
    int32_t next[2]; /* numbers of jobs, in turn */
};

/* All threads that fill a place arrive when their part is there, and each warp that reads it when it has. */
template <class S> static __device__ __forceinline__ void init_rows_memory(rows_memory<S> *memory)
{
    for (int32_t i = 0; i < 2 * S::STAGES; i++) {
        rows_barriers *barriers = &memory->of_tiles[i / S::STAGES][i % S::STAGES];
        ptx_mbarrier_init(&barriers->full, ROWS_LOADERS / 2);
        init_warp_barrier(&barriers->empty, ROWS_CONSUMERS / 32);
    }
    for (int32_t i = 0; i < ROWS_LOADERS / 32; i++) ptx_mbarrier_init(&memory->bytes_there[i], 1);
    for (int32_t i = 0; i < 2; i++) {
        ptx_mbarrier_init(&memory->slots[i].is_written, ROWS_SCOUTS);
        ptx_mbarrier_init(&memory->slots[i].has_queries, ROWS_SCOUTS);
        init_warp_barrier(&memory->slots[i].is_free, (ROWS_CONSUMERS + ROWS_LOADERS) / 32);
    }
    ptx_fence_mbarrier_init();
}

/* A warp has read what the barrier says may be overwritten. */
static __device__ __forceinline__ void release_rows(uint64_t *barrier)
{
    if (arrives_for_warp()) ptx_mbarrier_arrive(barrier);
}

/* The places of a ring in turn, and the parity of the phase that one is in: as many phases as times round. */
template <int PLACES> struct rows_turn {
    int32_t place, parity; /* 0, 0 at first */
    __device__ __forceinline__ void step(void)
    {
        if (++place < PLACES) return;
        place = 0;
        parity ^= 1;
    }
};

/* --- jobs, by the scouts ---------------------------------------------------------------------------------------- */

static __device__ __forceinline__ int32_t count_rows_jobs(const attend_args *args)
{
    const fv_attend_params *params = &args->params;
    const int32_t heads = params->num_kv_heads * (int32_t)args->row_parts.by;
    if (!params->items) return params->num_q_blocks * params->num_segments * heads;
    return (params->num_items_at ? *params->num_items_at : params->num_items) * heads;
}

/* Job `number`, and which of its item's blocks of rows it is; false: there are no such rows. Heads lie side by side, of a grid
 * the last Q blocks first: causal ones have the most keys, and what ends last had better be short. */
static __device__ __forceinline__ bool find_rows_job(attend_job *job, int32_t *part, const attend_args *args,
                                                     int32_t number)
{
    const fv_attend_params *params = &args->params;
    const int32_t block = divide_index(number, args->row_parts), at = divide_index(block, args->kv_heads);
    const int32_t head = block - at * params->num_kv_heads;
    fv_work_item item;
    *part = number - block * (int32_t)args->row_parts.by;
    if (params->items) {
        if (!find_list_item(&item, args, at, head)) return false;
    } else {
        const int32_t segment = at / params->num_q_blocks, q_block = at - segment * params->num_q_blocks;
        if (!find_grid_item(&item, params, params->num_q_blocks - 1 - q_block, head, segment)) return false;
    }
    *job = job_of_item(args, &item);
    return *part * ROWS_BLOCK_M < job->num_rows;
}

/* The keys of rows first .. last of a job: later rows see what begins and ends later. A last row without keys lies where its window
 * begins, which may be behind the item's keys. */
static __device__ __forceinline__ attend_keys keys_of_rows(const attend_args *args, const attend_job *job,
                                                           int32_t first_row, int32_t last_row)
{
    const attend_row first = row_of(args, job, first_row), last = row_of(args, job, last_row);
    attend_keys keys;
    keys.first = first.first;
    keys.end = fv_min_i32(last.end, job->item.end_key);
    keys.full_first = last.first;
    keys.full_end = first.end;
    return keys;
}

/* --- tiles ------------------------------------------------------------------------------------------------------ */

/* Tiles begin at multiples of the boxes that they come in. */
static __device__ __forceinline__ int32_t first_rows_key(const attend_args *args, const attend_keys *keys)
{
    const int32_t step = fv_max_i32(1, args->map_rows); /* a power of two */
    return uniform(keys->first & -step);
}
template <class S>
static __device__ __forceinline__ int32_t count_rows_tiles(const attend_args *args, const attend_keys *keys)
{
    if (keys->first >= keys->end) return 0;
    return uniform((keys->end - first_rows_key(args, keys) + S::TILE - 1) / S::TILE);
}

/* A tile comes as boxes of the maps where there are some, and no box has keys that no row sees, or that are no cache's. */
template <class S>
static __device__ __forceinline__ bool comes_in_row_boxes(const attend_args *args, const attend_keys *keys,
                                                          int32_t dense_from, int32_t tile_first)
{
    return args->map_rows > 0 && tile_first >= keys->first &&
           tile_first + S::TILE <= fv_min_i32(keys->end, dense_from);
}

#endif
