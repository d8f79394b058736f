/* A block of threads of MLA decode of up to 32 rows (attend_few_latent.cuh): its roles, its shared memory, and how it
 * finds its item and rows. */
#ifndef FV_KERNELS_CUDA_HOPPER_FEW_LATENT_BLOCK_CUH
#define FV_KERNELS_CUDA_HOPPER_FEW_LATENT_BLOCK_CUH

#include "kernels/cuda/attend.cuh"
#include "kernels/cuda/hopper/latent_block.cuh"
#include "kernels/cuda/hopper/latent_columns.cuh"

enum {
    FEW_LATENT_BYTES = LATENT_HEAD * 2,
    FEW_UNIT = 32, /* latents that are there, and released, together */
    FEW_UNITS = 5,
    FEW_UNIT_BYTES = FEW_UNIT * FEW_LATENT_BYTES,
    FEW_TILE_UNITS = LATENT_TILE / FEW_UNIT,
    FEW_UNIT_STEPS = FEW_UNIT / 16, /* of the depth of a product of values; warps of a tile's scores */
    FEW_COPY_LANES = FEW_UNIT / 4,  /* of a warp of the producers: a lane for each copy of a unit, at most */
    FEW_LATENT_SCORER_REGISTERS = 96,
    FEW_LATENT_VALUER_REGISTERS = 128,
    FEW_LATENT_PRODUCER_REGISTERS = 32
};
static_assert(FEW_LATENT_BYTES % 128 == 0, "all latents begin in the same bank, and in a line of shared memory");

/* Roles of a block's threads: two warpgroups score, of every second tile each; two more multiply values, half of the
 * columns each; the last one brings keys. */
enum {
    FEW_LATENT_SCORERS = 256,
    FEW_LATENT_VALUERS = 256,
    FEW_LATENT_CONSUMERS = FEW_LATENT_SCORERS + FEW_LATENT_VALUERS,
    FEW_LATENT_PRODUCERS = 4, /* warps, the last warpgroup */
    FEW_LATENT_THREADS = FEW_LATENT_CONSUMERS + FEW_LATENT_PRODUCERS * 32,
    FEW_LATENT_BLOCKS = LATENT_VALUE / 2 / 64 /* products of 64 columns, of a warpgroup of valuers */
};

/* Barriers of threads, by their numbers; 0 is __syncthreads(). */
enum {
    FEW_LATENT_BARRIER_EVEN = 1, /* the first warpgroup has chosen what its tile's P is relative to */
    FEW_LATENT_BARRIER_ODD,      /* the second */
    FEW_LATENT_BARRIER_GROUP,    /* of the threads of the first, the next number of those of the second */
    FEW_LATENT_BARRIER_SCORERS = FEW_LATENT_BARRIER_GROUP + 2,
    FEW_LATENT_BARRIER_CONSUMERS,
    FEW_LATENT_BARRIER_PRODUCERS,
    FEW_LATENT_BARRIER_VALUERS /* of the threads of their first warpgroup, the next number of those of the second */
};

/* What the output moves by before a tile is added. */
template <int N> struct few_latent_move {
    float by[N];
    int32_t is_needed;
};

/* The ends of rows. */
template <int N> struct few_latent_ends {
    float2 sums[FEW_LATENT_SCORERS / 32][N]; /* of P, and of P as rounded */
    float largest[2][4][N];                  /* element that each warp of the valuers has, of rows in 16 bits */
    attend_end rows[N];
    float by[2][N];    /* what they are multiplied by; of rows in 16 bits, as each warpgroup of valuers finds it */
    char *targets[N];  /* where rows go */
    float2 weights[N]; /* of two blocks that share an item's keys: of the block's own sums, of the other's */
};

/* What a warp of the other block's valuers sends: 16 bytes of each lane after the other. */
template <int N> constexpr int32_t few_part_bytes = FEW_LATENT_BLOCKS * N / 2 * 4 * 32;

template <int N> struct few_latent_memory {
    static constexpr int NUM_P = N <= 16 ? 2 : 1;
    /* The valuers have a tile's operands in registers before its P is there, so they may be done with a unit before the
     * scorers are, of whom two warps read it. */
    static constexpr bool VALUES_AHEAD = N <= 16;
    static constexpr int UNIT_READERS = FEW_LATENT_VALUERS / 32 + (VALUES_AHEAD ? 4 / FEW_TILE_UNITS : 0);
    union {
        alignas(1024) char q[LATENT_PANELS][N * FV_PANEL_ROW_BYTES];
        struct { /* when all scores are there */
            few_latent_ends<N> ends;
            alignas(16) char parts[4][few_part_bytes<N>]; /* of its half of the output, from the other block's warps */
        };
    };
    alignas(1024) char p[NUM_P][N * FV_PANEL_ROW_BYTES];
    alignas(128) char units[FEW_UNITS][FEW_UNIT_BYTES];
    attend_row rows[N];
    alignas(16) float max[N];                                /* what the sums of a row are relative to */
    alignas(16) float known_max[FEW_LATENT_SCORERS / 32][N]; /* by the warps of the scorers: what theirs are */
    few_latent_move<N> move[NUM_P];
    alignas(16) float found_max[2][4][N]; /* by the warps of a warpgroup, in a tile */
    uint64_t full[FEW_UNITS], empty[FEW_UNITS];
    uint64_t p_full[NUM_P], p_empty[NUM_P];
    attend_keys keys;
    int32_t has_item, num_rows;
    attend_job job;

    /* of two blocks that share an item's keys, what comes from the other */
    alignas(16) float4 sums_of_other[N]; /* maximum, sum, and sum of P as rounded, of its rows */
    uint64_t met;                        /* they are there */
    uint64_t inbox[4];                   /* `parts` of its warps */
    block_bars bars;
};
static_assert(sizeof(few_latent_memory<16>) <= 227 * 1024 && sizeof(few_latent_memory<32>) <= 227 * 1024,
              "the shared memory of a block");

template <int N>
static __device__ __forceinline__ void init_few_latent_memory(few_latent_memory<N> *memory, const attend_args *args)
{
    for (int32_t i = 0; i < FEW_UNITS; i++) {
        ptx_mbarrier_init(&memory->full[i], 1);
        init_warp_barrier(&memory->empty[i], few_latent_memory<N>::UNIT_READERS);
    }
    for (int32_t i = 0; i < few_latent_memory<N>::NUM_P; i++) {
        init_warp_barrier(&memory->p_full[i], 4);
        init_warp_barrier(&memory->p_empty[i], FEW_LATENT_VALUERS / 32);
    }
    init_bar(&memory->bars, FEW_LATENT_BARRIER_EVEN, FEW_LATENT_SCORERS);
    init_bar(&memory->bars, FEW_LATENT_BARRIER_ODD, FEW_LATENT_SCORERS);
    for (int32_t i = 0; i < 2; i++) {
        init_bar(&memory->bars, FEW_LATENT_BARRIER_GROUP + i, 128);
        init_bar(&memory->bars, FEW_LATENT_BARRIER_VALUERS + i, 128);
    }
    init_bar(&memory->bars, FEW_LATENT_BARRIER_SCORERS, FEW_LATENT_SCORERS);
    init_bar(&memory->bars, FEW_LATENT_BARRIER_CONSUMERS, FEW_LATENT_CONSUMERS);
    init_bar(&memory->bars, FEW_LATENT_BARRIER_PRODUCERS, FEW_LATENT_PRODUCERS * 32);
    init_meeting(memory, args, N, few_part_bytes<N>);
}

/* The block's item; of two blocks that share its keys, with its half of them. */
static __device__ __forceinline__ bool find_few_item(fv_work_item *item, const attend_args *args)
{
    const fv_attend_params *params = &args->params;
    const int32_t place = latent_place(args), block = divide_index(place, args->row_parts);
    if (place < 0) return false;
    if (params->items)
        *item = params->items[block];
    else if (!find_grid_item(item, params, params->num_q_blocks - 1 - block, 0, (int32_t)blockIdx.z))
        return false;
    if (is_split(args)) take_half(item);
    return true;
}

static __device__ __forceinline__ bool find_few_job(attend_job *job, const attend_args *args)
{
    fv_work_item item;
    if (!find_few_item(&item, args)) return false;
    *job = job_of_item(args, &item);
    return true;
}

/* A lane for each row of the block, and the keys that they have. */
template <int N>
static __device__ __forceinline__ void find_few_latent_rows(few_latent_memory<N> *memory, const attend_args *args,
                                                            int32_t row0)
{
    const int32_t r = (int32_t)threadIdx.x % 32;
    const attend_row row = row_of(args, &memory->job, r < N ? row0 + r : INT32_MAX);
    const bool is_row = r < N && row0 + r < memory->job.num_rows, has_keys = row.first < row.end;
    attend_keys keys;
    keys.first = __reduce_min_sync(~0u, has_keys ? row.first : INT32_MAX);
    keys.end = __reduce_max_sync(~0u, has_keys ? row.end : 0);
    keys.full_first = __reduce_max_sync(~0u, is_row ? row.first : 0);
    keys.full_end = __reduce_min_sync(~0u, is_row ? row.end : INT32_MAX);
    if (r < N) memory->rows[r] = row;
    if (r == 0) {
        memory->keys = keys;
        memory->num_rows = fv_min_i32(N, memory->job.num_rows - row0);
    }
    __syncwarp();
}

#endif
