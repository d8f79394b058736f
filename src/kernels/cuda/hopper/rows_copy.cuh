/* How jobs, queries, keys and values come to the kernel of many rows (attend_rows.cuh), by warpgroups of their own: two
 * warps bring keys, two values, by boxes of tensor maps, or row by row, and widen them where they are of one byte; four find
 * jobs and bring queries. */
#ifndef FV_KERNELS_CUDA_HOPPER_ROWS_COPY_CUH
#define FV_KERNELS_CUDA_HOPPER_ROWS_COPY_CUH

#include "kernels/cuda/half_query.cuh"
#include "kernels/cuda/hopper/rows_widen.cuh"

/* --- keys and values -------------------------------------------------------------------------------------------- */

/* What a warp brings. */
typedef struct rows_loader {
    int32_t is_value;
    int32_t half; /* of a tile */
} rows_loader;

/* Where the lane's keys of a half of a tile lie, each 32 behind the one before. */
template <class S> struct rows_places {
    int32_t page[S::HALF / 32], slot[S::HALF / 32];
};

/* Of dense rows the page is -1, the slot the row's number behind that of key 0. A key that no row sees is a neighbour's,
 * which weighs nothing there. */
template <class S>
static __device__ __forceinline__ rows_places<S> find_rows_places(const attend_args *args, const attend_job *job,
                                                                  const attend_keys *keys, int32_t first)
{
    rows_places<S> places;
#pragma unroll
    for (int i = 0; i < S::HALF / 32; i++) {
        const int32_t key = fv_max_i32(keys->first, fv_min_i32(first + i * 32, keys->end - 1));
        places.page[i] = -1;
        places.slot[i] = key;
        if (key >= job->dense_from) continue;
        const int2 at = split_key(args, key);
        places.page[i] = job->table[at.x];
        places.slot[i] = at.y;
    }
    return places;
}

/* A box of each panel. */
template <class S>
static __device__ __forceinline__ void load_row_box(char *to, uint64_t *there, const fv_tensor_map *map, int32_t x,
                                                    int32_t slot, int32_t z)
{
#pragma unroll
    for (int panel = 0; panel < S::BYTES_PANELS; panel++)
        ptx_tensor_copy(to + (S::FIRST_BYTES_PANEL + panel) * S::TILE * FV_PANEL_ROW_BYTES, map,
                        x + panel * FV_PANEL_COLUMNS, slot, z, there);
}

/* The boxes of half of a tile, by one lane, which says to the barrier how many bytes come; the first half's one where a box is a
 * tile. */
template <class S>
static __device__ __forceinline__ void load_rows_boxes(char *to, uint64_t *there, const attend_args *args,
                                                       const attend_job *job, const rows_places<S> *places,
                                                       rows_loader loader)
{
    const int32_t box_rows = args->map_rows, x = job->kv_head * args->map_head_x, z = job->kv_head * args->map_head_z;
    const int32_t rows = box_rows <= S::HALF ? (int32_t)S::HALF : loader.half ? 0 : box_rows;
#pragma unroll 1
    for (int32_t row = 0; row < rows; row += box_rows) {
        const int32_t page = __shfl_sync(~0u, row < 32 ? places->page[0] : places->page[S::HALF / 32 - 1], row % 32);
        const int32_t slot = __shfl_sync(~0u, row < 32 ? places->slot[0] : places->slot[S::HALF / 32 - 1], row % 32);
        if (ptx_elect())
            load_row_box<S>(to + row * FV_PANEL_ROW_BYTES, there, &args->maps[loader.is_value], x, slot,
                            page * args->map_block_z + z);
        __syncwarp();
    }
    if (ptx_elect())
        ptx_mbarrier_expect(there, rows * S::HEAD * S::ENTRY_BYTES);
    else if (!S::IS_NARROW)
        ptx_mbarrier_arrive(there);
    __syncwarp();
}

static __device__ __forceinline__ uint64_t row_of_place(const attend_source *sources, const attend_job *job,
                                                        int32_t page, int32_t slot)
{
    if (page < 0) return (uint64_t)dense_row(&sources[1], job->dense_row + slot, job->kv_head);
    return (uint64_t)plain_row(&sources[0].plane, page, job->kv_head, slot);
}

/* 32 rows of `size` elements, of which each lane has where one lies (0: zeros), to panels of `panel_rows` rows, 16 lanes to
 * each (8 of heads of 64): asked for. Chunks behind a row's last one are zeros. */
template <class S>
static __device__ __forceinline__ void copy_warp_rows(char *to, int32_t panel_rows, uint64_t own, int32_t size,
                                                      const void *somewhere)
{
    constexpr int CHUNKS = S::HEAD / 8, AT_ONCE = 32 / CHUNKS;
    const int32_t lane = threadIdx.x % 32, chunk = lane % CHUNKS;
#pragma unroll(S::IS_NARROW ? 1 : 4)
    for (int step = 0; step < 32 / AT_ONCE; step++) {
        const int32_t row = step * AT_ONCE + lane / CHUNKS;
        const char *from = (const char *)__shfl_sync(~0u, own, row);
        const bool is_there = from && chunk * 8 < size;
        ptx_cp_async_16_or_zeros(to + panel_offset(panel_rows, row, chunk), is_there ? from + chunk * 16 : somewhere,
                                 is_there ? 16 : 0);
    }
}

/* Half of a tile row by row: a lane arrives when what it has asked for is there. */
template <class S>
static __device__ __forceinline__ void load_rows_singly(char *to, uint64_t *full, const attend_args *args,
                                                        const attend_job *job, const rows_places<S> *places,
                                                        rows_loader loader)
{
    const int32_t size = loader.is_value ? args->params.v_head_size : args->params.head_size;
#pragma unroll
    for (int i = 0; i < S::HALF / 32; i++) {
        const uint64_t own = loader.is_value ? row_of_place(args->v, job, places->page[i], places->slot[i])
                                             : row_of_place(args->k, job, places->page[i], places->slot[i]);
        copy_warp_rows<S>(to + i * 32 * FV_PANEL_ROW_BYTES, S::TILE, own, size, args->params.q);
    }
    ptx_cp_async_arrive(full);
}

/* The warp's part of all tiles of a job. */
template <class S>
static __device__ __forceinline__ void load_rows_tiles(rows_memory<S> *memory, rows_turn<S::STAGES> *turn,
                                                       const attend_args *args, const rows_slot *slot,
                                                       rows_loader loader)
{
    const attend_job *job = &slot->job;
    const attend_keys keys = slot->keys;
    const int32_t origin = first_rows_key(args, &keys), num_tiles = count_rows_tiles<S>(args, &keys);
    if (num_tiles == 0) return;
    const int32_t first = origin + loader.half * S::HALF + (int32_t)threadIdx.x % 32;
    rows_places<S> next = find_rows_places<S>(args, job, &keys, first);
#pragma unroll 1
    for (int32_t tile = 0; tile < num_tiles; tile++, turn->step()) {
        const rows_places<S> places = next;
        next = find_rows_places<S>(args, job, &keys, first + (tile + 1) * S::TILE);
        rows_barriers *barriers = &memory->of_tiles[loader.is_value][turn->place];
        char *to = memory->tiles[loader.is_value][turn->place] + loader.half * S::HALF * FV_PANEL_ROW_BYTES;
        ptx_mbarrier_wait(&barriers->empty, turn->parity ^ 1);
        if (comes_in_row_boxes<S>(args, &keys, job->dense_from, origin + tile * S::TILE))
            load_rows_boxes<S>(to, &barriers->full, args, job, &places, loader);
        else
            load_rows_singly<S>(to, &barriers->full, args, job, &places, loader);
    }
}

/* Asks for the bytes of half of a tile of one-byte entries. */
template <class S>
static __device__ __forceinline__ void ask_rows_bytes(char *to, uint64_t *there, const attend_args *args,
                                                      const attend_job *job, const rows_places<S> *places,
                                                      rows_loader loader, bool is_boxes)
{
    if (is_boxes) {
        load_rows_boxes<S>(to, there, args, job, places, loader);
        return;
    }
    const fv_kv_plane *plane = loader.is_value ? &args->v->plane : &args->k->plane;
    const int32_t size = loader.is_value ? args->params.v_head_size : args->params.head_size;
#pragma unroll
    for (int i = 0; i < S::HALF / 32; i++) {
        const uint64_t own = (uint64_t)plain_row(plane, places->page[i], job->kv_head, places->slot[i]);
        copy_rows_bytes<S>(to + i * 32 * FV_PANEL_ROW_BYTES, own, size, args->params.q);
    }
    ptx_cp_async_commit();
}

/* load_rows_tiles of one-byte entries. `parity`: of the warp's own barrier. */
template <class S>
static __device__ __forceinline__ void widen_rows_tiles(rows_memory<S> *memory, rows_turn<S::STAGES> *turn,
                                                        int32_t *parity, const attend_args *args,
                                                        const rows_slot *slot, rows_loader loader)
{
    const attend_job *job = &slot->job;
    const attend_keys keys = slot->keys;
    const int32_t origin = first_rows_key(args, &keys), num_tiles = count_rows_tiles<S>(args, &keys);
    if (num_tiles == 0) return;
    const int32_t first = origin + loader.half * S::HALF + (int32_t)threadIdx.x % 32;
    uint64_t *there = &memory->bytes_there[loader.is_value * 2 + loader.half];
    rows_places<S> places = find_rows_places<S>(args, job, &keys, first);
#pragma unroll 1
    for (int32_t tile = 0; tile < num_tiles; tile++, turn->step()) {
        rows_barriers *barriers = &memory->of_tiles[loader.is_value][turn->place];
        char *to = memory->tiles[loader.is_value][turn->place] + loader.half * S::HALF * FV_PANEL_ROW_BYTES;
        const bool is_boxes = comes_in_row_boxes<S>(args, &keys, job->dense_from, origin + tile * S::TILE);
        ptx_mbarrier_wait(&barriers->empty, turn->parity ^ 1);
        ask_rows_bytes<S>(to, there, args, job, &places, loader, is_boxes);
        places = find_rows_places<S>(args, job, &keys, first + (tile + 1) * S::TILE);
        if (is_boxes) {
            ptx_mbarrier_wait(there, *parity);
            *parity ^= 1;
        } else {
            ptx_cp_async_wait<0>();
            __syncwarp();
        }
        widen_rows<S>(to, args->params.cache.dtype);
        ptx_fence_proxy_async();
        ptx_mbarrier_arrive(&barriers->full);
    }
}

/* The third warpgroup: a warp's part of all jobs of the block. */
template <class S> static __device__ __forceinline__ void load_rows(rows_memory<S> *memory, const attend_args *args)
{
    const int32_t warp = uniform((int32_t)threadIdx.x / 32) - ROWS_CONSUMERS / 32;
    const rows_loader loader = {warp / 2, warp % 2};
    rows_turn<S::STAGES> of_tiles = {};
    int32_t parity = 0;
#pragma unroll 1
    for (rows_turn<2> of_slots = {};; of_slots.step()) {
        rows_slot *slot = &memory->slots[of_slots.place];
        ptx_mbarrier_wait(&slot->is_written, of_slots.parity);
        if (slot->num_rows == 0) return;
        if constexpr (S::IS_NARROW)
            widen_rows_tiles<S>(memory, &of_tiles, &parity, args, slot, loader);
        else
            load_rows_tiles<S>(memory, &of_tiles, args, slot, loader);
        __syncwarp();
        release_rows(&slot->is_free);
    }
}

/* --- jobs and queries ------------------------------------------------------------------------------------------- */

/* A job to its slot; the scout's row. */
static __device__ __forceinline__ attend_row fill_rows_slot(rows_slot *slot, const attend_args *args,
                                                            const attend_job *job, int32_t row0, int32_t scout)
{
    const int32_t num_rows = fv_min_i32(ROWS_BLOCK_M, job->num_rows - row0);
    const attend_row row = row_of(args, job, row0 + scout);
    slot->rows[scout] = row;
    if (scout == 0) {
        slot->job = *job;
        slot->keys = keys_of_rows(args, job, row0, row0 + num_rows - 1);
        slot->num_rows = num_rows;
    }
    return row;
}

/* What copy_warp_rows() has brought of a warp's 32 rows of queries, as fp16, for entries of one byte; and what their scores lack.
 * Each lane's own chunks, which it has asked for itself. */
template <class S>
static __device__ __forceinline__ void narrow_queries(char *q, float *lacks, fv_dtype dtype)
{
    constexpr int CHUNKS = S::HEAD / 8, AT_ONCE = 32 / CHUNKS;
    const int32_t lane = threadIdx.x % 32, chunk = lane % CHUNKS;
#pragma unroll 1
    for (int step = 0; step < 32 / AT_ONCE; step++) {
        const int32_t row = step * AT_ONCE + lane / CHUNKS;
        uint4 *at = (uint4 *)(q + panel_offset(ROWS_BLOCK_M, row, chunk)), eight = *at;
        const float of_row = dtype == FV_DTYPE_BF16 ? half_query_of<CHUNKS>(&eight) : 1.0f;
        *at = eight;
        if (chunk == 0) lacks[row] = of_row;
    }
}

/* The number of the block's next job, to all scouts. `turn`: 0, 1, 0, ... */
template <class S>
static __device__ __forceinline__ int32_t claim_for_scouts(rows_memory<S> *memory, const attend_args *args,
                                                           int32_t number, int32_t num_jobs, int32_t turn, int32_t scout)
{
    if (num_jobs <= (int32_t)gridDim.x) return num_jobs; /* each block has one */
    if (scout == 0) memory->next[turn] = claim_job(args, number, num_jobs);
    ptx_bar_sync(ROWS_BARRIER_SCOUTS, ROWS_SCOUTS);
    return memory->next[turn];
}

/* The fourth one: finds all jobs of the block, one ahead. None is claimed before there is room for it: blocks that held two
 * left others without. */
template <class S> static __device__ __forceinline__ void scout_rows(rows_memory<S> *memory, const attend_args *args)
{
    const int32_t scout = (int32_t)threadIdx.x - ROWS_CONSUMERS - ROWS_LOADERS, num_jobs = count_rows_jobs(args);
    rows_turn<2> of_slots = {};
    int32_t number = (int32_t)blockIdx.x, num_found = 0;
#pragma unroll 1
    for (int32_t claims = 0;; claims++) {
        rows_slot *slot = &memory->slots[of_slots.place];
        ptx_mbarrier_wait(&slot->is_free, of_slots.parity ^ 1);
        if (claims > 0) number = claim_for_scouts<S>(memory, args, number, num_jobs, claims % 2, scout);
        if (number >= num_jobs) break;
        attend_job job;
        int32_t part;
        if (!find_rows_job(&job, &part, args, number)) continue;
        const int32_t row0 = part * ROWS_BLOCK_M;
        const attend_row row = fill_rows_slot(slot, args, &job, row0, scout);
        const uint64_t own = row0 + scout < job.num_rows ? (uint64_t)query_row(&args->params, &row) : 0;
        ptx_mbarrier_arrive(&slot->is_written);
        if (S::QUERIES == 1 && num_found > 0) { /* the job before is done with its own */
            const int32_t before = num_found - 1;
            ptx_mbarrier_wait(&memory->slots[before % 2].is_free, before / 2 % 2);
        }
        char *q = memory->q[num_found % S::QUERIES];
        char *to = q + scout / 32 * 32 * FV_PANEL_ROW_BYTES;
        copy_warp_rows<S>(to, ROWS_BLOCK_M, own, args->params.head_size, args->params.q);
        if constexpr (S::IS_NARROW) {
            ptx_cp_async_commit();
            ptx_cp_async_wait<0>();
            narrow_queries<S>(to, &slot->lacks[scout / 32 * 32], args->params.q_dtype);
            ptx_mbarrier_arrive(&slot->has_queries);
        } else {
            ptx_cp_async_arrive(&slot->has_queries);
        }
        of_slots.step();
        num_found++;
    }
    rows_slot *slot = &memory->slots[of_slots.place];
    if (scout == 0) slot->num_rows = 0;
    ptx_mbarrier_arrive(&slot->is_written);
}

#endif
