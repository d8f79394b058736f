/* A block of threads of MLA decode over the 656-byte entry (attend_entry.cuh): its roles, its shared memory, and how it
 * finds its rows. */
#ifndef FV_KERNELS_CUDA_HOPPER_ENTRY_BLOCK_CUH
#define FV_KERNELS_CUDA_HOPPER_ENTRY_BLOCK_CUH

#include <float.h>

#include "kernels/cuda/attend.cuh"
#include "kernels/cuda/hopper/latent_block.cuh"
#include "kernels/cuda/hopper/latent_columns.cuh"

enum {
    ENTRY_GROUPS = FV_DS_LATENT / FV_DS_TILE, /* of elements that share a scale */
    ENTRY_TILE_BYTES = (int32_t)LATENT_TILE * (int32_t)FV_DS_ENTRY_BYTES,
    ENTRY_P = 2,         /* tiles whose P has a place */
    ENTRY_VALUERS = 256, /* threads; two warpgroups, behind those of the scorers */
    ENTRY_PRODUCERS = 4, /* warps, the last warpgroup */
    ENTRY_PRODUCER_REGISTERS = 24,
    ENTRY_ROPE_STEPS = FV_DS_ROPE / 16, /* products 16 deep, of S^T */
    ENTRY_GROUP_STEPS = FV_DS_TILE / 16,
    ENTRY_CHUNK_STEPS = 4,               /* for which a chunk of 16 e4m3 is enough */
    ENTRY_BLOCKS = LATENT_VALUE / 2 / 64 /* products of 64 columns, of a warpgroup of valuers; two have a scale */
};

/* What fp16 holds, 2^-24 to 2^15, is for P, and for the values of a key times its scales. What a row's sums are
 * relative to lies ENTRY_HEADROOM below the largest score that it was chosen by, so P is up to 2^12; scales are in
 * units, powers of two, up to ENTRY_LARGEST_SCALE of them. */
#define ENTRY_HEADROOM 4.0f
#define ENTRY_FIRST_UNIT 0x1p-100f
#define ENTRY_LARGEST_SCALE 8.0f

/* Barriers of threads, by their numbers; 0 is __syncthreads(). */
enum {
    ENTRY_BARRIER_EVEN = 1, /* the first warpgroup has chosen what its tile's P is relative to */
    ENTRY_BARRIER_ODD,      /* the second */
    ENTRY_BARRIER_GROUP,    /* of the threads of the first, the next number of those of the second */
    ENTRY_BARRIER_SCORERS = ENTRY_BARRIER_GROUP + 2,
    ENTRY_BARRIER_VALUERS,
    ENTRY_BARRIER_QUERIES, /* are there; not the next one, which valuers without tiles reach before scorers pass this */
    ENTRY_BARRIER_CONSUMERS,
    ENTRY_BARRIER_PRODUCERS
};

/* What the sums of a row without keys are relative to: no infinity, so what follows needs no case for it. */
#define ENTRY_NO_MAX (-FLT_MAX)

/* Of a block of N rows. The output of 64 takes half of all registers, and leaves scores to one warpgroup. */
template <int N> struct entry_shape {
    static constexpr int SCORER_GROUPS = N <= 32 ? 2 : 1, TILES = N <= 32 ? 4 : 3;
    static constexpr int SCORERS = SCORER_GROUPS * 128; /* threads, the first of a block */
    static constexpr int CONSUMERS = SCORERS + ENTRY_VALUERS, THREADS = CONSUMERS + ENTRY_PRODUCERS * 32;
    static constexpr int SCORER_REGISTERS = N <= 32 ? 104 : 136, VALUER_REGISTERS = N <= 32 ? 120 : 176;
    static_assert(SCORER_REGISTERS * SCORER_GROUPS + VALUER_REGISTERS * 2 + ENTRY_PRODUCER_REGISTERS <=
                      65536 / THREADS / 8 * 8 * (THREADS / 128),
                  "what warpgroups take, others gave");
};

/* What the output moves by before a tile is added. */
template <int N> struct entry_move {
    alignas(8) float by[N];
    int32_t is_needed;
};

template <int N> struct entry_memory {
    typedef entry_shape<N> shape;
    alignas(1024) char q[LATENT_PANELS][N * FV_PANEL_ROW_BYTES];
    alignas(1024) char p[ENTRY_P][N * FV_PANEL_ROW_BYTES];
    alignas(128) char tiles[shape::TILES][ENTRY_TILE_BYTES];
    alignas(16) __half scales[ENTRY_P][ENTRY_GROUPS][LATENT_TILE]; /* of P's tile, in units */
    attend_row rows[N];
    alignas(16) float max[N];                            /* what the sums of a row are relative to */
    alignas(16) float known_max[shape::SCORERS / 32][N]; /* by the warps of the scorers: what theirs are */
    entry_move<N> move[ENTRY_P];
    alignas(16) float found_max[2][4][N]; /* by the warps of a warpgroup, in a tile */
    alignas(16) float found_scale[2][4];
    alignas(16) float sums[shape::SCORERS / 32][N];
    uint64_t full[shape::TILES], empty[shape::TILES];
    uint64_t p_full[ENTRY_P], p_empty[ENTRY_P];
    uint64_t scored[2]; /* where one warpgroup has all scores: of every second tile but the first they are done */
    float inverse_unit;
    uint32_t largest_query;
    attend_keys keys;
    int32_t has_item;
    attend_job job;
    block_bars bars;
};
static_assert(sizeof(entry_memory<16>) <= 227 * 1024 && sizeof(entry_memory<32>) <= 227 * 1024 &&
                  sizeof(entry_memory<64>) <= 227 * 1024,
              "the shared memory of a block");

template <int N> static __device__ __forceinline__ void init_entry_memory(entry_memory<N> *memory)
{
    for (int32_t i = 0; i < entry_shape<N>::TILES; i++) {
        ptx_mbarrier_init(&memory->full[i], 1);
        init_warp_barrier(&memory->empty[i], ENTRY_VALUERS / 32);
    }
    for (int32_t i = 0; i < 2; i++) init_warp_barrier(&memory->scored[i], 4);
    for (int32_t i = 0; i < ENTRY_P; i++) {
        init_warp_barrier(&memory->p_full[i], 4);
        init_warp_barrier(&memory->p_empty[i], ENTRY_VALUERS / 32);
    }
    init_bar(&memory->bars, ENTRY_BARRIER_EVEN, entry_shape<N>::SCORERS);
    init_bar(&memory->bars, ENTRY_BARRIER_ODD, entry_shape<N>::SCORERS);
    for (int32_t i = 0; i < 2; i++) init_bar(&memory->bars, ENTRY_BARRIER_GROUP + i, 128);
    init_bar(&memory->bars, ENTRY_BARRIER_SCORERS, entry_shape<N>::SCORERS);
    init_bar(&memory->bars, ENTRY_BARRIER_VALUERS, ENTRY_VALUERS);
    init_bar(&memory->bars, ENTRY_BARRIER_QUERIES, entry_shape<N>::CONSUMERS);
    init_bar(&memory->bars, ENTRY_BARRIER_CONSUMERS, entry_shape<N>::CONSUMERS);
    init_bar(&memory->bars, ENTRY_BARRIER_PRODUCERS, ENTRY_PRODUCERS * 32);
    ptx_fence_mbarrier_init();
    memory->largest_query = 0;
    memory->inverse_unit = 1.0f / ENTRY_FIRST_UNIT;
}

/* The block's rows, by the lanes of a warp, and the keys that they have. */
template <int N>
static __device__ __forceinline__ void find_entry_rows(entry_memory<N> *memory, const attend_args *args, int32_t row0)
{
    attend_keys keys = {.first = INT32_MAX, .end = 0, .full_first = 0, .full_end = INT32_MAX};
#pragma unroll 1
    for (int32_t r = threadIdx.x % 32; r < N; r += 32) {
        const attend_row row = row_of(args, &memory->job, row0 + r);
        memory->rows[r] = row;
        if (row.first < row.end) {
            keys.first = fv_min_i32(keys.first, row.first);
            keys.end = fv_max_i32(keys.end, row.end);
        }
        if (row0 + r < memory->job.num_rows) {
            keys.full_first = fv_max_i32(keys.full_first, row.first);
            keys.full_end = fv_min_i32(keys.full_end, row.end);
        }
    }
    __syncwarp();
    keys.first = __reduce_min_sync(~0u, keys.first);
    keys.end = __reduce_max_sync(~0u, keys.end);
    keys.full_first = __reduce_max_sync(~0u, keys.full_first);
    keys.full_end = __reduce_min_sync(~0u, keys.full_end);
    if (threadIdx.x % 32 == 0) memory->keys = keys;
    __syncwarp();
}

#endif
