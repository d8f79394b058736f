/* How latents of 16 bits come to the tiles of MLA decode of 64 rows (attend_latent.cuh): by boxes of a tensor map, or
 * row by row. By the third warpgroup. */
#ifndef FV_KERNELS_CUDA_HOPPER_LATENT_COPY_CUH
#define FV_KERNELS_CUDA_HOPPER_LATENT_COPY_CUH

#include "kernels/cuda/hopper/latent_block.cuh"

/* Where a key lies, known before it is asked for. */
typedef struct latent_slot {
    int32_t page, slot;
} latent_slot;

/* The row of a tile that a loader looks up; a warp's 32 are those that it brings. */
static __device__ __forceinline__ int32_t row_of_loader(void) { return threadIdx.x % LATENT_LOADERS; }

/* Keys that no row sees are a neighbour's, whose latents weigh nothing there. */
static __device__ __forceinline__ latent_slot find_latent_slot(const attend_args *args, const int32_t *table,
                                                               const attend_keys *keys, int32_t key)
{
    const int2 at = split_key(args, fv_max_i32(keys->first, fv_min_i32(key, keys->end - 1)));
    return {table[at.x], at.y};
}

/* A tile comes as boxes of the map where there is one, and no box has keys that no row sees. */
static __device__ __forceinline__ bool comes_in_boxes(const attend_args *args, const attend_keys *keys,
                                                      int32_t tile_first)
{
    return args->map_rows > 0 && tile_first >= keys->first && tile_first + LATENT_TILE <= keys->end;
}

/* What a tile's place is waited for by. */
static __device__ __forceinline__ uint32_t parity_of_space(int32_t tile) { return (uint32_t)(tile / 2 + 1) % 2; }

/* The part of place `buffer` that panel `panel` belongs to may be overwritten. */
static __device__ __forceinline__ void wait_for_space(latent_memory *memory, int32_t buffer, uint32_t parity,
                                                      int32_t panel)
{
    ptx_mbarrier_wait(&memory->empty[buffer][panel / LATENT_LOW_PANELS], parity);
}
static __device__ __forceinline__ void wait_for_space(latent_memory *memory, int32_t tile, int32_t panel)
{
    wait_for_space(memory, tile % 2, parity_of_space(tile), panel);
}

/* Where box `box` of the warp's lies: the same in all lanes. */
static __device__ __forceinline__ latent_slot slot_of_box(const attend_args *args, latent_slot at, int32_t box)
{
    return {__shfl_sync(~0u, at.page, box * args->map_rows), __shfl_sync(~0u, at.slot, box * args->map_rows)};
}

static constexpr __device__ __forceinline__ int panel_in_turn(int i) { return i < 0 ? (int)LATENT_ROPE : i; }

/* Panels FIRST .. END - 1 of the boxes that begin at the warp's rows, when there is space, and how many bytes that is:
 * the phase of a panel's barrier ends when both warps have said so, and all bytes are there. By one lane, and from what
 * is the same in all: else a copy takes 40 instructions, and a tile longer to ask for than to multiply. FIRST -1: with
 * LATENT_ROPE before them. */
template <int FIRST, int END>
static __device__ __forceinline__ void load_box_panels(latent_memory *memory, const attend_args *args, int32_t tile,
                                                       latent_slot at, int32_t num_boxes)
{
    const int32_t buffer = uniform(tile % 2), row = uniform(row_of_loader() / 32 * 32), box_rows = args->map_rows;
    latent_slot of_box = slot_of_box(args, at, 0);
    if (FIRST < 0) wait_for_space(memory, tile, LATENT_ROPE);
    wait_for_space(memory, tile, FIRST < 0 ? 0 : FIRST);
#pragma unroll 1
    for (int32_t box = 0; box < num_boxes; box++) {
        const int32_t offset = (row + box * box_rows) * FV_PANEL_ROW_BYTES;
        if (ptx_elect()) {
#pragma unroll
            for (int i = FIRST; i < END; i++)
                ptx_tensor_copy(memory->tiles[buffer][panel_in_turn(i)] + offset, &args->maps[0], panel_in_turn(i) * 64,
                                of_box.slot, of_box.page, &memory->full[buffer][panel_in_turn(i)]);
        }
        of_box = slot_of_box(args, at, box + 1);
    }
    if (ptx_elect()) {
#pragma unroll
        for (int i = FIRST; i < END; i++)
            ptx_mbarrier_expect(&memory->full[buffer][panel_in_turn(i)], num_boxes * box_rows * FV_PANEL_ROW_BYTES);
    }
    __syncwarp();
}

/* The boxes of a tile that the warp asks for, of `box_rows`; the first warp's are all where one is a tile. */
static __device__ __forceinline__ int32_t count_boxes(int32_t box_rows)
{
    if (box_rows == LATENT_TILE) return uniform(row_of_loader() < 32 ? 1 : 0);
    return uniform(box_rows == 32 ? 1 : box_rows == 16 ? 2 : 0);
}

/* The warp's part of a tile that comes in several boxes. The panel that is no value comes with the low values', for to ask
 * for boxes is what takes the time. */
static __device__ __forceinline__ void load_latent_boxes(latent_memory *memory, const attend_args *args, int32_t tile,
                                                         latent_slot at, int32_t num_boxes)
{
    load_box_panels<-1, LATENT_LOW_PANELS>(memory, args, tile, at, num_boxes);
    load_box_panels<LATENT_LOW_PANELS, LATENT_ROPE>(memory, args, tile, at, num_boxes);
}

/* Panels FIRST .. END - 1 of a tile that is one box. What a copy needs is known before there is space: a tile's places
 * wait for each other, so each instruction between the end of a product and a copy counts. */
template <int FIRST, int END>
static __device__ __forceinline__ void load_tile_panels(latent_memory *memory, const attend_args *args, int32_t buffer,
                                                        uint32_t parity, latent_slot at)
{
    uint64_t *full = memory->full[buffer];
    wait_for_space(memory, buffer, parity, FIRST);
    if (ptx_elect()) {
#pragma unroll
        for (int i = FIRST; i < END; i++)
            ptx_tensor_copy(memory->tiles[buffer][i], &args->maps[0], i * 64, at.slot, at.page, &full[i]);
#pragma unroll
        for (int i = FIRST; i < END; i++) ptx_mbarrier_expect(&full[i], LATENT_PANEL_BYTES);
    }
    __syncwarp();
}

/* The panel that is no value comes first, for S begins with it, as soon as S of the tile before is there. */
template <int BUFFER>
static __device__ __forceinline__ void load_tile_box(latent_memory *memory, const attend_args *args, uint32_t parity,
                                                     latent_slot at)
{
    load_tile_panels<LATENT_ROPE, LATENT_PANELS>(memory, args, BUFFER, parity, at);
    load_tile_panels<0, LATENT_LOW_PANELS>(memory, args, BUFFER, parity, at);
    load_tile_panels<LATENT_LOW_PANELS, LATENT_ROPE>(memory, args, BUFFER, parity, at);
}

/* A tile that is one box, by the first warp. The other one, which has its part of tiles that come row by row, is kept in
 * step by a barrier: to a warp two phases ahead a place looks as if there were space, and one two phases behind would
 * wait for what has been. */
static __device__ __forceinline__ void load_latent_tile(latent_memory *memory, const attend_args *args, int32_t tile,
                                                        latent_slot at)
{
    ptx_bar_sync(LATENT_BARRIER_LOADERS, LATENT_LOADERS);
    if (row_of_loader() >= 32) return;
    const latent_slot of_box = {uniform(at.page), uniform(at.slot)};
    const uint32_t parity = (uint32_t)uniform((int32_t)parity_of_space(tile));
    if (tile % 2 == 0)
        load_tile_box<0>(memory, args, parity, of_box);
    else
        load_tile_box<1>(memory, args, parity, of_box);
}

/* One of the block's first two tiles, for whose places nothing has to be waited: in few instructions, as a block runs
 * them once. */
static __device__ __forceinline__ void load_first_tile(latent_memory *memory, const attend_args *args, int32_t tile,
                                                       latent_slot at)
{
    const int32_t buffer = uniform(tile);
    const latent_slot of_box = {uniform(at.page), uniform(at.slot)};
    if (row_of_loader() < 32 && ptx_elect()) {
#pragma unroll 1
        for (int i = -1; i < LATENT_ROPE; i++) {
            const int panel = panel_in_turn(i);
            ptx_tensor_copy(memory->tiles[buffer][panel], &args->maps[0], panel * 64, of_box.slot, of_box.page,
                            &memory->full[buffer][panel]);
            ptx_mbarrier_expect(&memory->full[buffer][panel], LATENT_PANEL_BYTES);
        }
    }
    __syncwarp();
}

/* Panels FIRST .. END - 1 of the warp's rows, eight lanes to each: asked for. L2 takes 256 bytes at a time from memory,
 * as for boxes, which a row's first and last panel may share with other rows. */
template <int FIRST, int END>
static __device__ __forceinline__ void load_latent_panels(latent_memory *memory, int32_t buffer,
                                                          const char *const (&rows)[8])
{
    const int32_t row = row_of_loader() / 32 * 32 + threadIdx.x % 32 / 8;
    const uint32_t to = ptx_shared_address(memory->tiles[buffer]) + panel_offset(LATENT_TILE, row, threadIdx.x % 8);
#pragma unroll
    for (int panel = FIRST; panel < END; panel++) {
#pragma unroll
        for (int i = 0; i < 8; i++) { /* every fourth row: the swizzle has two forms */
            const uint32_t at = panel * LATENT_PANEL_BYTES + i * 4 * FV_PANEL_ROW_BYTES;
            const char *from = rows[i] + panel * FV_PANEL_ROW_BYTES;
            if (panel > 0 && panel + 1 < LATENT_PANELS)
                ptx_cp_async_16_of_256((to ^ (i % 2 << 6)) + at, from);
            else
                ptx_cp_async_16((to ^ (i % 2 << 6)) + at, from);
        }
        ptx_cp_async_arrive(&memory->landed[buffer][panel]);
    }
}

/* The warp's rows one by one: for pages of any size. */
static __device__ __forceinline__ void load_latent_rows(latent_memory *memory, const attend_args *args, int32_t tile,
                                                        latent_slot at)
{
    const fv_kv_plane *plane = &args->k[0].plane;
    const int64_t own = at.page * plane->block_stride + at.slot * plane->slot_stride;
    const int32_t buffer = uniform(tile % 2);
    const char *rows[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
        rows[i] = (const char *)plane->data + __shfl_sync(~0u, own, i * 4 + threadIdx.x % 32 / 8) +
                  threadIdx.x % 8 * 16;
    wait_for_space(memory, tile, LATENT_ROPE);
    load_latent_panels<LATENT_ROPE, LATENT_PANELS>(memory, buffer, rows);
    wait_for_space(memory, tile, 0);
    load_latent_panels<0, LATENT_LOW_PANELS>(memory, buffer, rows);
    wait_for_space(memory, tile, LATENT_LOW_PANELS);
    load_latent_panels<LATENT_LOW_PANELS, LATENT_ROPE>(memory, buffer, rows);
}

/* Is L2 asked for tiles ahead? Of few tiles, where a box lies in one piece; of several blocks that have the same keys
 * by the first, and not of a single one's, which memory binds. */
static __device__ __forceinline__ bool prefetches_latents(const attend_args *args, int32_t row0, int32_t num_tiles)
{
    const int32_t most = is_split(args) ? LATENT_PREFETCH_TILES / 2 : LATENT_PREFETCH_TILES;
    return args->map_rows > 0 && args->k[0].plane.slot_stride == LATENT_HEAD * 2 && args->row_parts.by > 1 &&
           row0 == 0 && num_tiles <= most;
}

/* The warp's boxes of the tile behind tile `tile`: to L2, as soon as this one may be asked for, and before it is. */
static __device__ __forceinline__ void prefetch_latents(latent_memory *memory, const attend_args *args, int32_t tile,
                                                        latent_slot next, int32_t num_boxes)
{
    const fv_kv_plane *plane = &args->k[0].plane;
    const int32_t box_rows = args->map_rows;
    const uint64_t own = (uint64_t)plane->data + next.page * plane->block_stride + next.slot * plane->slot_stride;
    wait_for_space(memory, tile, LATENT_ROPE);
#pragma unroll 1
    for (int32_t box = 0; box < num_boxes; box++) {
        const char *from = (const char *)__shfl_sync(~0u, own, box * box_rows);
        if (ptx_elect()) ptx_bulk_prefetch(from, box_rows * LATENT_HEAD * 2);
        __syncwarp();
    }
}

/* The first two warps: they ask for latents, and wait for nothing but space. */
static __device__ __forceinline__ void load_latents(latent_memory *memory, const attend_args *args,
                                                    const fv_work_item *item, const attend_keys *keys, int32_t row0)
{
    if (keys->first >= keys->end) return;
    const int32_t *table = args->params.block_table + item->table_row * args->params.block_table_stride;
    const int32_t first = keys->first / LATENT_TILE * LATENT_TILE + row_of_loader();
    latent_slot next = find_latent_slot(args, table, keys, first);
    __syncwarp(); /* asked for before the other is found */
    latent_slot second = find_latent_slot(args, table, keys, first + LATENT_TILE);
    const int32_t origin = first_latent_key(keys), num_tiles = count_latent_tiles(keys);
    const int32_t num_first = fv_min_i32(num_tiles, 2), num_boxes = count_boxes(args->map_rows);
    const bool prefetches = prefetches_latents(args, row0, num_tiles);
    int32_t tile = 0;
    if (args->map_rows == LATENT_TILE && origin >= keys->first && origin + num_first * LATENT_TILE <= keys->end) {
#pragma unroll 1
        for (; tile < num_first; tile++, next = second) load_first_tile(memory, args, tile, next);
        next = find_latent_slot(args, table, keys, first + 2 * LATENT_TILE);
        second = find_latent_slot(args, table, keys, first + 3 * LATENT_TILE);
    }
#pragma unroll 1
    for (; tile < num_tiles; tile++) {
        const int32_t tile_first = origin + tile * LATENT_TILE;
        const latent_slot at = next;
        next = second;
        __syncwarp(); /* what is asked for now goes to where `second` was, and is not moved there, which would wait for it */
        second = find_latent_slot(args, table, keys, first + (tile + 2) * LATENT_TILE);
        if (prefetches && tile >= 2 && comes_in_boxes(args, keys, tile_first + LATENT_TILE))
            prefetch_latents(memory, args, tile, next, num_boxes);
        if (!comes_in_boxes(args, keys, tile_first))
            load_latent_rows(memory, args, tile, at);
        else if (args->map_rows == LATENT_TILE)
            load_latent_tile(memory, args, tile, at);
        else
            load_latent_boxes(memory, args, tile, at, num_boxes);
    }
}

/* The other two take turns: what landed row by row is announced, in place of the boxes' arrivals, behind the fence
 * that products need. It may wait for copies under way, so it is not for those who ask for them. */
static __device__ __forceinline__ void announce_latents(latent_memory *memory, const attend_args *args,
                                                        const attend_keys *keys)
{
    const int32_t origin = first_latent_key(keys), num_tiles = count_latent_tiles(keys);
    const int32_t first_turn = threadIdx.x / 32 % 2;
    uint32_t parities = 0; /* a bit for each buffer */
#pragma unroll 1
    for (int32_t tile = 0; tile < num_tiles; tile++) {
        if (comes_in_boxes(args, keys, origin + tile * LATENT_TILE)) continue;
        const int32_t buffer = tile % 2;
#pragma unroll 1
        for (int32_t turn = first_turn; turn < LATENT_PANELS; turn += 2) {
            const int32_t panel = turn == 0 ? LATENT_ROPE : turn - 1; /* as they are asked for */
            ptx_mbarrier_wait(&memory->landed[buffer][panel], parities >> buffer & 1);
            ptx_fence_proxy_async();
            if ((int32_t)threadIdx.x % 32 < count_askers(args)) ptx_mbarrier_arrive(&memory->full[buffer][panel]);
        }
        parities ^= 1u << buffer;
    }
}

#endif
