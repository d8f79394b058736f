/* The producers of MLA decode over the 656-byte entry (attend_entry.cuh): tiles of entries to shared memory, as they
 * are. */
#ifndef FV_KERNELS_CUDA_HOPPER_ENTRY_COPY_CUH
#define FV_KERNELS_CUDA_HOPPER_ENTRY_COPY_CUH

#include "kernels/cuda/hopper/entry_block.cuh"

/* A lane's copy of a tile, known before it is asked for. A copy is some hundred cycles of a warp, so where they are
 * many all four warps ask for some. */
typedef struct entry_run {
    const char *from;
    int32_t key;  /* of the tile, its first; LATENT_TILE: none */
    int32_t keys; /* that it has */
} entry_run;

/* Keys that no row sees are a neighbour's, which weigh nothing there: one by one. */
template <int N>
static __device__ __forceinline__ entry_run find_entry_run(const entry_memory<N> *memory, const attend_args *args,
                                                           int32_t tile_first, int32_t run_keys)
{
    const attend_keys *keys = &memory->keys;
    const fv_kv_plane *plane = &args->k[0].plane;
    const bool is_inside = tile_first >= keys->first && tile_first + LATENT_TILE <= keys->end;
    entry_run run = {NULL, LATENT_TILE, is_inside ? run_keys : 1};
    const int32_t of_warp = fv_max_i32(1, LATENT_TILE / ENTRY_PRODUCERS / run.keys), lane = threadIdx.x % 32;
    const int32_t first = (warp_of_group() * of_warp + lane) * run.keys;
    if (lane < of_warp) run.key = fv_min_i32(first, LATENT_TILE);
    const int32_t key = tile_first + fv_min_i32(run.key, LATENT_TILE - 1);
    const int2 at = split_key(args, fv_max_i32(keys->first, fv_min_i32(key, keys->end - 1)));
    run.from = (const char *)plane->data + memory->job.table[at.x] * plane->block_stride + at.y * plane->slot_stride;
    return run;
}

/* Bytes of the other warps may be there before the first one has said how many are expected: the phase ends behind
 * that. */
template <int N>
static __device__ __forceinline__ void bring_entries(entry_memory<N> *memory, const attend_args *args, int32_t origin,
                                                     int32_t num_tiles)
{
    constexpr int TILES = entry_shape<N>::TILES;
    if (num_tiles == 0) return;
    const int32_t run_keys = find_run_latents(args, FV_DS_ENTRY_BYTES, LATENT_TILE);
    entry_run next = find_entry_run(memory, args, origin, run_keys);
#pragma unroll 1
    for (int32_t tile = 0; tile < num_tiles; tile++) {
        const int32_t at = tile % TILES;
        const entry_run run = next;
        next = find_entry_run(memory, args, origin + (tile + 1) * LATENT_TILE, run_keys);
        /* A warp without a copy does not lead by a phase; nor does it wait, for without its bytes the tile may come and
         * be gone before. */
        wait_at_bar(&memory->bars, ENTRY_BARRIER_PRODUCERS, ENTRY_PRODUCERS * 32);
        const bool copies = run.key < LATENT_TILE;
        if (!__any_sync(~0u, copies)) continue;
        ptx_mbarrier_wait(&memory->empty[at], (tile / TILES + 1) % 2);
        if (threadIdx.x == entry_shape<N>::CONSUMERS) ptx_mbarrier_expect(&memory->full[at], ENTRY_TILE_BYTES);
        __syncwarp();
        if (copies)
            ptx_bulk_load(memory->tiles[at] + run.key * FV_DS_ENTRY_BYTES, run.from, run.keys * FV_DS_ENTRY_BYTES,
                          &memory->full[at]);
        __syncwarp();
    }
}

#endif
