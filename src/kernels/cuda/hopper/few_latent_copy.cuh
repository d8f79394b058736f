/* How latents come to the units of MLA decode of up to 32 rows (attend_few_latent.cuh): by bulk copies of what lies
 * together. By the last warpgroup. */
#ifndef FV_KERNELS_CUDA_HOPPER_FEW_LATENT_COPY_CUH
#define FV_KERNELS_CUDA_HOPPER_FEW_LATENT_COPY_CUH

#include "kernels/cuda/hopper/few_latent_block.cuh"

/* The keys to bring, of a sequence's table: all others are a neighbour's, whose latents weigh nothing there. */
typedef struct latent_source {
    const int32_t *table;
    int32_t first, end;
} latent_source;

/* Where keys are known before the block's `max_rows` rows; in other cases none. */
static __device__ __forceinline__ latent_source find_early_source(const attend_args *args, int32_t row0,
                                                                  int32_t max_rows)
{
    const fv_attend_params *params = &args->params;
    fv_work_item item;
    attend_keys keys;
    if (!find_few_item(&item, args) || !find_early_keys(&keys, args, &item, row0, max_rows)) return {NULL, 0, 0};
    return {params->block_table + item.table_row * params->block_table_stride, keys.first, keys.end};
}

static __device__ __forceinline__ int32_t count_few_units(const latent_source *source)
{
    const int32_t first_tile = source->first / LATENT_TILE, end_tile = (source->end + LATENT_TILE - 1) / LATENT_TILE;
    return source->first < source->end ? (end_tile - first_tile) * FEW_TILE_UNITS : 0;
}

/* Latents that no other block reads leave L2 first: items, tables, queries and what else the next kernels read stay. */
static __device__ __forceinline__ void ask_latents(char *to, const char *from, int32_t bytes, uint64_t *barrier,
                                                   const attend_args *args)
{
    if (args->row_parts.by == 1)
        ptx_bulk_load_stream(to, from, bytes, barrier);
    else
        ptx_bulk_load(to, from, bytes, barrier);
}

/* A lane's copy of one of a tile's units, of which the table is asked a tile ahead. */
typedef struct latent_copy {
    int32_t page, slot;
    int32_t key;  /* of the unit, its first; FEW_UNIT: none */
    int32_t keys; /* that it has */
} latent_copy;

/* Runs, or one by one where some of the unit's keys are a neighbour's. `unit`: that of the first lanes. */
static __device__ __forceinline__ latent_copy find_latent_copy(const latent_source *source, const attend_args *args,
                                                               int32_t unit, int32_t run)
{
    const int32_t lane = (int32_t)threadIdx.x % 32, warp = warp_of_group();
    const int32_t first = source->first / LATENT_TILE * LATENT_TILE + (unit + lane / FEW_COPY_LANES) * FEW_UNIT;
    const bool is_inside = first >= source->first && first + FEW_UNIT <= source->end;
    latent_copy copy = {0, 0, FEW_UNIT, is_inside ? run : 1};
    const int32_t of_warp = lane % FEW_COPY_LANES * copy.keys;
    if (lane < FEW_TILE_UNITS * FEW_COPY_LANES && of_warp < FEW_COPY_LANES)
        copy.key = fv_min_i32(warp * fv_max_i32(FEW_COPY_LANES, copy.keys) + of_warp, FEW_UNIT);
    const int32_t key = first + fv_min_i32(copy.key, FEW_UNIT - 1);
    const int2 at = split_key(args, fv_max_i32(source->first, fv_min_i32(key, source->end - 1)));
    copy.page = source->table[at.x];
    copy.slot = at.y;
    return copy;
}

/* Units first .. end - 1, as many as a tile has at a time. Bytes of the other warps may be there before the first one
 * has said how many are expected: the phase ends behind that. */
template <int N>
static __device__ __forceinline__ void bring_few_latents(few_latent_memory<N> *memory, const attend_args *args,
                                                         const latent_source *source, int32_t first, int32_t end)
{
    if (first >= end) return;
    const fv_kv_plane *plane = &args->k[0].plane;
    const int32_t run = find_run_latents(args, FEW_LATENT_BYTES, FEW_UNIT);
    latent_copy next = find_latent_copy(source, args, first, run);
#pragma unroll 1
    for (int32_t unit = first; unit < end; unit += FEW_TILE_UNITS) {
        const latent_copy copy = next;
        const char *from = (const char *)plane->data + copy.page * plane->block_stride + copy.slot * plane->slot_stride;
        next = find_latent_copy(source, args, unit + FEW_TILE_UNITS, run);
        /* A warp without a copy does not lead by a phase; nor does it wait, for without its bytes the unit may come and
         * be gone before. */
        wait_at_bar(&memory->bars, FEW_LATENT_BARRIER_PRODUCERS, FEW_LATENT_PRODUCERS * 32);
#pragma unroll
        for (int i = 0; i < FEW_TILE_UNITS; i++) {
            const int32_t at = (unit + i) % FEW_UNITS;
            if (unit + i >= end) break;
            const bool copies = threadIdx.x % 32 / FEW_COPY_LANES == i && copy.key < FEW_UNIT;
            if (!__any_sync(~0u, copies)) continue;
            ptx_mbarrier_wait(&memory->empty[at], ((unit + i) / FEW_UNITS + 1) % 2);
            if (threadIdx.x == FEW_LATENT_CONSUMERS) ptx_mbarrier_expect(&memory->full[at], FEW_UNIT_BYTES);
            __syncwarp();
            if (copies)
                ask_latents(memory->units[at] + copy.key * FEW_LATENT_BYTES, from, copy.keys * FEW_LATENT_BYTES,
                            &memory->full[at], args);
            __syncwarp();
        }
    }
}

/* The first units, as many as there is room for, and how many those are. Of whole pages, or parts of one, each lane
 * asks for a unit of its own: a few instructions behind the item, where the loop above is some hundred. Beside 32 rows
 * that was 1% slower. */
template <int N>
static __device__ __forceinline__ int32_t bring_early_latents(few_latent_memory<N> *memory, const attend_args *args,
                                                              const latent_source *source)
{
    const int32_t num_units = fv_min_i32(FEW_UNITS, count_few_units(source)), lane = (int32_t)threadIdx.x % 32;
    const bool is_whole = source->first % LATENT_TILE == 0 && source->first + num_units * FEW_UNIT <= source->end;
    if (N > 16 || !is_whole || find_run_latents(args, FEW_LATENT_BYTES, FEW_UNIT) < FEW_UNIT) {
        bring_few_latents<N>(memory, args, source, 0, num_units);
        return num_units;
    }
    if (warp_of_group() == 0 && lane < num_units) {
        const fv_kv_plane *plane = &args->k[0].plane;
        const int2 at = split_key(args, source->first + lane * FEW_UNIT);
        const char *from = (const char *)plane->data + source->table[at.x] * plane->block_stride +
                           at.y * plane->slot_stride;
        ptx_mbarrier_expect(&memory->full[lane], FEW_UNIT_BYTES);
        ask_latents(memory->units[lane], from, FEW_UNIT_BYTES, &memory->full[lane], args);
    }
    __syncwarp();
    return num_units;
}

#endif
