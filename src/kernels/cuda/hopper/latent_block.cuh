/* A block of threads of the kernel of 64 rows of MLA decode (attend_latent.cuh): its shared memory, and
 * how it finds the rows of an item, the keys that they have, and their queries. Which of an item's blocks it is, is
 * found for the kernel of fewer rows, too. */
#ifndef FV_KERNELS_CUDA_HOPPER_LATENT_BLOCK_CUH
#define FV_KERNELS_CUDA_HOPPER_LATENT_BLOCK_CUH

#include "kernels/cuda/hopper/handover.cuh"
#include "kernels/cuda/hopper/panel.cuh"
#include "kernels/cuda/overlap.cuh"

enum {
    LATENT_HEAD = 576,
    LATENT_VALUE = 512,
    LATENT_TILE = 64,
    LATENT_ROWS = 64,
    LATENT_PANELS = LATENT_HEAD / 64,
    LATENT_PANEL_BYTES = LATENT_TILE * FV_PANEL_ROW_BYTES,
    LATENT_CONSUMERS = 256, /* two warpgroups, the first threads of a block */
    LATENT_PRODUCERS = 128,
    LATENT_LOADERS = 64,    /* of them, a thread for each row of a tile */
    LATENT_ANNOUNCERS = 64, /* the others, in the end a thread for each of the block's rows */
    LATENT_ENDERS = LATENT_CONSUMERS + LATENT_ANNOUNCERS, /* who have a part in the ends of rows */
    LATENT_THREADS = LATENT_CONSUMERS + LATENT_PRODUCERS,
    LATENT_CONSUMER_REGISTERS = 224,
    LATENT_PRODUCER_REGISTERS = 56,
    LATENT_LOW_PANELS = 4,                           /* of the first warpgroup's values */
    LATENT_ROPE = 2 * LATENT_LOW_PANELS,             /* the panel that is no value */
    LATENT_PREFETCH_TILES = 32,                      /* of an item whose tiles L2 is asked for ahead, at most */
    LATENT_STAGED_BYTES = LATENT_VALUE / 2 * 4 + 32, /* of a row of half of the output; 32: four rows in all banks */
    LATENT_WARP_BYTES = 16 * LATENT_STAGED_BYTES     /* of a warp's rows */
};

/* Barriers of threads, by their numbers; 0 is __syncthreads(). */
enum {
    LATENT_BARRIER_EVEN = 1, /* the first warpgroup's P and maxima are there */
    LATENT_BARRIER_ODD,      /* the second's */
    LATENT_BARRIER_CONSUMERS,
    LATENT_BARRIER_LOADERS,
    LATENT_BARRIER_JOB,  /* rows and job are there */
    LATENT_BARRIER_SUMS, /* the warpgroups' sums of rows are there */
    LATENT_BARRIER_ENDS, /* all of latent_ends is */
    LATENT_BARRIER_ROWS  /* and three more: the warps that have the same rows */
};

/* A kernel's form. */
template <class Element, bool AMLA> struct latent_form {
    typedef Element T;
    static constexpr bool IS_AMLA = AMLA; /* the output is rescaled by additions to its bits: exponent_add.cuh */
};

struct latent_memory { /* of the 227 KiB that a block can have, all */
    alignas(1024) char q[LATENT_PANELS][LATENT_PANEL_BYTES];
    alignas(1024) char tiles[2][LATENT_PANELS][LATENT_PANEL_BYTES];
    alignas(1024) char p[LATENT_PANEL_BYTES];
    attend_row rows[LATENT_ROWS];
    float row_max[LATENT_ROWS]; /* what the sums of a row are relative to, from the tile whose P is in `p` on */
    uint64_t full[2][LATENT_PANELS];
    uint64_t empty[2][3];              /* of a tile: the low values' panels, the high ones', LATENT_ROPE */
    uint64_t landed[2][LATENT_PANELS]; /* the rows of a panel that come one by one, before products may read them */
    attend_keys keys;
    attend_job job;
    int32_t row0; /* the block's first one of its job */

    /* of two blocks that share an item's keys, what comes from the other */
    uint64_t met;      /* the sums of its rows: sums_of_other */
    uint64_t inbox[4]; /* a warp's rows of its half of the output, in `q` */
    uint64_t taken;    /* word that it has the other half */

    block_bars bars;
};

/* The ends of the rows, as they are found while the last products are under way: where the queries of LATENT_ROPE were,
 * which are in registers then, behind what the other block's columns take. */
struct latent_ends {
    float4 sums[2][LATENT_ROWS];  /* of each warpgroup: maximum, sum and sum of P as rounded, AMLA's scale */
    float2 weights[LATENT_ROWS];  /* of the block's keys, and of the other block's */
    attend_end rows[LATENT_ROWS];
    float by[2][LATENT_ROWS];     /* what each warpgroup's columns are multiplied by */
    char *targets[LATENT_ROWS];   /* where they go */
};
enum { LATENT_ENDS_AT = 2048 };
static_assert(LATENT_ENDS_AT + sizeof(latent_ends) <= LATENT_PANEL_BYTES, "the panel");
static_assert(4 * LATENT_WARP_BYTES <= LATENT_ROPE * LATENT_PANEL_BYTES + LATENT_ENDS_AT, "behind the inbox");

static __device__ __forceinline__ latent_ends *ends_of(latent_memory *memory)
{
    return (latent_ends *)(memory->q[LATENT_ROPE] + LATENT_ENDS_AT);
}

static_assert(sizeof(latent_memory) <= 227 * 1024, "the shared memory of a block");
static_assert(LATENT_ROWS * (LATENT_VALUE + 8) * 4 <= 2 * LATENT_PANELS * LATENT_PANEL_BYTES, "both tiles'");
static_assert(4 * LATENT_WARP_BYTES <= LATENT_PANELS * LATENT_PANEL_BYTES, "a tile's, of half of the output");

/* --- two blocks of an item --------------------------------------------------------------------------------------- */

/* Where a round of items leaves multiprocessors free, two blocks share the keys of each, neighbours in the grid and a
 * cluster: the first has the first half of the tiles. */
static __device__ __forceinline__ bool is_split(const attend_args *args)
{
    return (int32_t)blockIdx.x >= args->first_split;
}

/* The block's place among the items' blocks of rows, -1: none. */
static __device__ __forceinline__ int32_t latent_place(const attend_args *args)
{
    const int32_t block = (int32_t)blockIdx.x;
    if (block < args->num_whole) return block;
    return block < args->first_split ? -1 : args->num_whole + (block - args->first_split) / 2;
}

/* Which of the blocks that share an item's rows this one is. */
static __device__ __forceinline__ int32_t latent_row_part(const attend_args *args)
{
    const int32_t place = latent_place(args);
    return place - divide_index(place, args->row_parts) * (int32_t)args->row_parts.by;
}

/* Maximum, sum, and sum of P as rounded, of a row in the other block: where the row has what these kernels do not
 * read. */
static __device__ __forceinline__ float4 *sums_of_other(latent_memory *memory, int32_t row)
{
    static_assert(offsetof(attend_row, position) == 16 && sizeof(attend_row) == 32, "16 bytes of each row");
    return (float4 *)&memory->rows[row].position;
}

/* The block's half of an item's keys. */
static __device__ __forceinline__ void take_half(fv_work_item *item)
{
    const int32_t tiles = (item->end_key - item->first_key + LATENT_TILE - 1) / LATENT_TILE;
    const int32_t middle = fv_min_i32(item->first_key + (tiles + 1) / 2 * LATENT_TILE, item->end_key);
    if (blockIdx.x % 2 == 0)
        item->end_key = middle;
    else
        item->first_key = middle;
}

/* --- the block's rows ------------------------------------------------------------------------------------------ */

/* The last barriers of a block's memory: where two blocks share an item, those at which they meet. The other one sends
 * the sums of `num_rows` rows, and `part_bytes` of the output to each of four warps. */
template <class Memory>
static __device__ __forceinline__ void init_meeting(Memory *memory, const attend_args *args, int32_t num_rows,
                                                    int32_t part_bytes)
{
    ptx_mbarrier_init(&memory->met, 1);
    for (int32_t warp = 0; warp < 4; warp++) ptx_mbarrier_init(&memory->inbox[warp], 1);
    ptx_fence_mbarrier_init();
    if (!is_split(args)) return;
    ptx_mbarrier_expect(&memory->met, num_rows * (int32_t)sizeof(float4));
    for (int32_t warp = 0; warp < 4; warp++) ptx_mbarrier_expect(&memory->inbox[warp], part_bytes);
}

/* Warps that ask for a tile in boxes, or for some of its rows. */
static __device__ __forceinline__ int32_t count_askers(const attend_args *args)
{
    return args->map_rows == LATENT_TILE ? 1 : LATENT_LOADERS / 32;
}

static __device__ __forceinline__ void init_latent_memory(latent_memory *memory, const attend_args *args)
{
    for (int32_t buffer = 0; buffer < 2; buffer++) { /* unrolled: in a loop each takes 40 cycles */
        for (int32_t panel = 0; panel < LATENT_PANELS; panel++) {
            ptx_mbarrier_init(&memory->full[buffer][panel], count_askers(args));
            ptx_mbarrier_init(&memory->landed[buffer][panel], LATENT_LOADERS);
        }
        for (int32_t part = 0; part < 3; part++) init_warp_barrier(&memory->empty[buffer][part], 4);
    }
    init_bar(&memory->bars, LATENT_BARRIER_JOB, LATENT_ENDERS);
    init_bar(&memory->bars, LATENT_BARRIER_SUMS, LATENT_ENDERS);
    init_bar(&memory->bars, LATENT_BARRIER_ENDS, LATENT_ENDERS);
    ptx_mbarrier_init(&memory->taken, 1);
    init_meeting(memory, args, LATENT_ROWS, LATENT_WARP_BYTES);
    if (is_split(args)) ptx_mbarrier_expect(&memory->taken, 4 * sizeof(float4));
}

/* The block's item, its first row of that, and barriers in `memory` to use from here on; false: there is no item. A list
 * is older than the kernel before this one, so its items are asked for while that still runs. */
static __device__ __forceinline__ bool find_latent_item(fv_work_item *item, int32_t *row0, latent_memory *memory,
                                                        const attend_args *args)
{
    const fv_attend_params *params = &args->params;
    const int32_t place = latent_place(args), block = divide_index(place, args->row_parts);
    if (place < 0) return false;
    if (params->items) *item = params->items[block];
    if (threadIdx.x == LATENT_THREADS - 32) init_latent_memory(memory, args);
    *row0 = (int32_t)ptx_keep((uint32_t)(place - block * (int32_t)args->row_parts.by) * LATENT_ROWS);
    __syncthreads();
    overlap_begin();
    if (!params->items && !find_grid_item(item, params, params->num_q_blocks - 1 - block, 0, (int32_t)blockIdx.z))
        return false;
    if (is_split(args)) take_half(item);
    return true;
}

/* The rows of an item from the block's first one on, for consumers behind a barrier, and the keys that they have;
 * false: there are no rows. Later rows see what begins and ends later, so the first one and the last tell of all keys.
 * Only warps whose lanes have no row of their own look at those two, so the first ones do not know the keys. */
static __device__ __forceinline__ bool find_latent_rows(attend_keys *keys, latent_memory *memory,
                                                        const attend_args *args, const fv_work_item *item, int32_t row0)
{
    const fv_attend_params *params = &args->params;
    const int32_t num_rows = item->num_tokens * (int32_t)args->group.by, thread = (int32_t)threadIdx.x;
    const int32_t last = fv_min_i32(row0 + LATENT_ROWS, num_rows) - 1;
    if (row0 > last) return false;
    const bool has_row = thread < LATENT_ROWS;
    const int32_t r = has_row ? row0 + thread : thread % 2 == 0 ? row0 : last, token = divide_index(r, args->group);
    const int32_t new_token = item->first_token + token, num_new = item->query_end - item->query_start;
    const fv_key_range seen = row_keys(&params->context_parallel, item->seq_len, item->seq_len - num_new + new_token,
                                       params->causal ? params->causal[item->seq] : 1, params->window);
    const int32_t first = fv_max_i32(seen.first, item->first_key);
    const int32_t end = fv_max_i32(first, fv_min_i32(seen.end, item->end_key));
    if (has_row) { /* of attend_row, what these kernels read */
        attend_row *row = &memory->rows[thread];
        row->first = r <= last ? first : 0;
        row->end = r <= last ? end : 0;
        row->token = item->query_start + new_token;
        row->head = r - token * (int32_t)args->group.by;
    }
    keys->first = __shfl_sync(~0u, first, 0);
    keys->full_end = __shfl_sync(~0u, end, 0);
    keys->full_first = __shfl_sync(~0u, first, 1);
    keys->end = fv_min_i32(__shfl_sync(~0u, end, 1), item->end_key);
    if (thread == LATENT_CONSUMERS - 32) memory->keys = *keys;
    return true;
}

/* The keys of a block's `max_rows` rows, from `row0` of the item on, where they are known without the rows: of one token,
 * as in decode, all that the item has but for those of later tokens. False: they are not, or there are no rows. */
static __device__ __forceinline__ bool find_early_keys(attend_keys *keys, const attend_args *args,
                                                       const fv_work_item *item, int32_t row0, int32_t max_rows)
{
    const fv_attend_params *params = &args->params;
    if (params->window > 0 || params->context_parallel.world > 1) return false;
    const int32_t token = item->num_tokens == 1 ? 0 : divide_index(row0, args->group);
    const int32_t rows_of_token = (token + 1) * (int32_t)args->group.by - row0;
    if (token >= item->num_tokens || rows_of_token <= 0) return false;
    if (token + 1 < item->num_tokens && rows_of_token < max_rows) return false;
    const int32_t later = item->query_end - item->query_start - 1 - item->first_token - token; /* tokens */
    if (later > 0 && params->causal) return false;
    keys->first = keys->full_first = item->first_key;
    keys->end = keys->full_end = fv_max_i32(item->first_key, fv_min_i32(item->end_key, item->seq_len - later));
    return true;
}

/* The job, for consumers behind a barrier: by one of the threads. */
static __device__ __forceinline__ void keep_latent_job(latent_memory *memory, const attend_args *args,
                                                       const fv_work_item *item, int32_t row0)
{
    if (threadIdx.x != LATENT_CONSUMERS - 32) return;
    memory->row0 = row0;
    const attend_lengths lengths = load_lengths(args, item);
    memory->job = job_of(args, item, 0, &lengths);
}

/* Queries into panels, of rows that there are: asked for, by the consumers, as soon as the item is known. */
static __device__ __forceinline__ void load_latent_queries(latent_memory *memory, const attend_args *args,
                                                           const fv_work_item *item, int32_t row0)
{
    const fv_attend_params *params = &args->params;
    const int32_t place = threadIdx.x / 8, chunk = threadIdx.x % 8, num_rows = item->num_tokens * (int32_t)args->group.by;
    const int32_t first_token = item->query_start + item->first_token;
    char *to = memory->q[0] + panel_offset(LATENT_ROWS, place, chunk);
    if (row0 >= num_rows) return;
#pragma unroll 1 /* a block runs this once: fewer instructions are faster */
    for (int i = 0; i < LATENT_ROWS * 8 / LATENT_CONSUMERS; i++) {
        const int32_t r = row0 + place + i * (LATENT_CONSUMERS / 8);
        const int32_t token = divide_index(r, args->group), head = r - token * (int32_t)args->group.by;
        const bool is_there = r < num_rows;
        const char *from = (const char *)params->q + chunk * 16;
        if (is_there) from += (first_token + token) * params->q_token_stride + head * params->q_head_stride;
#pragma unroll
        for (int panel = 0; panel < LATENT_PANELS; panel++) /* of a row that is not there nothing is read */
            ptx_cp_async_16_or_zeros(to + panel * LATENT_PANEL_BYTES + i * (LATENT_CONSUMERS / 8) * FV_PANEL_ROW_BYTES,
                                     from + panel * FV_PANEL_ROW_BYTES, is_there ? 16 : 0);
    }
    ptx_cp_async_commit();
}

/* Tiles begin at multiples of LATENT_TILE. */
static __device__ __forceinline__ int32_t first_latent_key(const attend_keys *keys)
{
    return uniform(keys->first / LATENT_TILE * LATENT_TILE);
}
static __device__ __forceinline__ int32_t count_latent_tiles(const attend_keys *keys)
{
    if (keys->first >= keys->end) return 0;
    return uniform((keys->end - first_latent_key(keys) + LATENT_TILE - 1) / LATENT_TILE);
}

#endif
