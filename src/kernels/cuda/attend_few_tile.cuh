/* A tile of few rows (attend_few.cuh): 16 keys of a warp, their way to shared memory and their arithmetic, for
 * entries of 16 bits and of one byte. */
#ifndef FV_KERNELS_CUDA_ATTEND_FEW_TILE_CUH
#define FV_KERNELS_CUDA_ATTEND_FEW_TILE_CUH

#include <float.h>

#include "kernels/cuda/attend.cuh"
#include "kernels/cuda/attend_few_jobs.cuh"
#include "kernels/cuda/half_query.cuh"
#include "kernels/cuda/widen.cuh"

/* IS_NARROW: of entries of one byte. HEADS: KV heads of a job; where they are two, each has half of the rows. */
template <int HEAD_, bool IS_NARROW_, int ROWS, int WARPS_ = HEAD_ <= 64 ? 4 : 6, int HEADS_ = 1, bool MEETS_ = false>
struct few_shape {
    static constexpr int HEAD = HEAD_, VALUE = HEAD_, TILE = 16, BLOCK_M = ROWS, OCTETS = ROWS / 8;
    static constexpr int HEADS = HEADS_, ITEM_ROWS = ROWS / HEADS; /* of an item, at once */
    static constexpr bool IS_NARROW = IS_NARROW_, IS_SMALL = IS_NARROW && OCTETS == 1;
    static constexpr int WARPS = WARPS_, THREADS = 32 * WARPS, FIRST_KEYS = WARPS * TILE;
    static constexpr bool MEETS = MEETS_; /* a block has one job, a piece of a cluster's: hopper/attend_few_meeting.cuh */
    /* Blocks on a multiprocessor. */
    static constexpr int BLOCKS = WARPS == 4 ? (HEAD <= 64 || (IS_NARROW && HEADS == 1 && !MEETS) ? 4 : 3)
                                             : (WARPS == 6 && (HEAD <= 128 || IS_SMALL) ? 2 : 1);
    static constexpr int Q_ROW = HEAD + 8; /* 8 rows lie in different banks */
    /* A warp's ring: bytes of an entry's row there, its 16-byte copies, bytes of a tile and of the warp's sums. They
     * take the stage that is free at a job's end, or, where they do not fit, room of their own before the first one. */
    static constexpr int ROW = HEAD * (IS_NARROW ? 1 : 2), COPIES = ROW / 16;
    static constexpr int PART = TILE * ROW, STAGE = 2 * HEADS * PART; /* keys of each head, values of each */
    static constexpr int SUMS = BLOCK_M * VALUE * 4;
    static constexpr int FIRST = SUMS <= STAGE ? 0 : SUMS, RING = FIRST + 2 * STAGE;
    /* Is there room for Q^T in registers? */
    static constexpr bool KEEPS_Q = OCTETS == 1 &&
                                    (HEAD <= 64 || !IS_NARROW || HEADS > 1 || (WARPS > 4 && HEAD <= 128));
    /* Sums of products that go on side by side: one product waits for the one before it. */
    static constexpr int CHAINS = OCTETS > 1 ? 1 : IS_SMALL ? 2 : 4;
    static_assert(HEAD * 2 % 128 == 0, "keys and values lie in whole lines");
    static_assert(!IS_NARROW || (ROW <= 256 && RING % 256 == 0 && FIRST % 256 == 0), "rows of one byte are aligned");
    static_assert(HEADS == 1 || (OCTETS == 1 && IS_NARROW && HEAD <= 128), "two heads have one octet of rows");
    static_assert(FIRST_KEYS <= FEW_FIRST_KEYS, "the blocks of each warp's first tile are known");
    static_assert(ROWS == 8 || ROWS == FEW_MOST_ROWS, "rows are the columns of one instruction, or of two");
};

/* A warp's part of a row. */
typedef struct alignas(16) few_share {
    float max, sum, rounded; /* few_state */
    uint32_t values;         /* [VALUE], shared */
} few_share;

template <class S> struct few_memory {
    alignas(256) char ring[S::WARPS][S::RING]; /* places of a row, of up to 256 bytes, are flipped in its address */
    alignas(16) uint16_t q[S::BLOCK_M * S::Q_ROW];
    float q_factors[S::BLOCK_M];      /* entries of one byte: what scores lack, for q is fp16 */
    const char *k[S::WARPS][S::TILE]; /* of the tile that a warp asks for; NULL: no row sees the key */
    const char *v[S::WARPS][S::TILE];
    few_share shares[S::WARPS][S::BLOCK_M]; /* at a job's end, of each warp */
    few_jobs jobs;
};

/* A maximum before the first score: a number, so that any score has a difference to it, and it to itself. */
#define FEW_LEAST (-FLT_MAX)

/* The largest of N, in few steps. */
template <int N> static __device__ __forceinline__ float largest_of(const float (&values)[N])
{
    float tree[N];
#pragma unroll
    for (int i = 0; i < N; i++) tree[i] = values[i];
#pragma unroll
    for (int step = 1; step < N; step *= 2)
#pragma unroll
        for (int i = 0; i + step < N; i += 2 * step) tree[i] = fmaxf(tree[i], tree[i + step]);
    return tree[0];
}

/* A row's maximum in the end. NaN alone has none, but a sum. */
static __device__ __forceinline__ float few_maximum(float max, float sum)
{
    return max == FEW_LEAST && sum == 0 ? -INFINITY : max;
}

/* A warp's state: of each octet of rows two for each lane l, 2 (l % 4) and the next. */
template <class S> struct few_state {
    /* [n][octet][2 i + j]: element l / 4 + 8 i of the n-th 16 for row j; next to one byte 2 (l / 4) + i. */
    float out[S::VALUE / 16][S::OCTETS][4];
    float max[S::OCTETS][2];
    float sum[S::OCTETS][2]; /* of this thread's keys */
    float rounded[4];        /* [2 octet + j]: sums of P as the tensor cores get it, of all keys: ones beside V^T */
};

/* The j-th of a lane's rows. */
static __device__ __forceinline__ int32_t few_row_of_sum(int j, int32_t lane)
{
    return j / 2 * 8 + lane % 4 * 2 + j % 2;
}

template <class S> static __device__ __forceinline__ void clear_few_state(few_state<S> *state)
{
#pragma unroll
    for (int i = 0; i < S::OCTETS; i++) {
#pragma unroll
        for (int n = 0; n < S::VALUE / 16; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) state->out[n][i][j] = 0;
        state->max[i][0] = state->max[i][1] = FEW_LEAST;
        state->sum[i][0] = state->sum[i][1] = 0;
    }
#pragma unroll
    for (int j = 0; j < 4; j++) state->rounded[j] = 0;
}

/* What a lane reads, and what it keeps of its rows where those are eight. */
template <class S> struct few_reads {
    uint32_t keys, values; /* shared: what it reads first of a tile's keys and values, in the ring's first stage */
    uint32_t queries;
    uint32_t q[S::KEEPS_Q ? S::HEAD / 16 : 1][2]; /* of each 16 elements */
    float scale[S::OCTETS][2];                    /* in base 2 */
};

/* S^T of 16 keys, those of `keys`: the n-th 16 elements. */
template <class S, class T>
static __device__ __forceinline__ void multiply_few_elements(float (&s)[S::OCTETS][4], const uint32_t (&keys)[4],
                                                             const few_reads<S> *reads, int n)
{
    if constexpr (S::KEEPS_Q) {
        ptx_mma_m16n8k16<T>(s[0], keys, reads->q[n][0], reads->q[n][1]);
    } else if constexpr (S::OCTETS == 1) {
        uint32_t q[2];
        ptx_ldmatrix_x2(q, reads->queries + n * 32);
        ptx_mma_m16n8k16<T>(s[0], keys, q[0], q[1]);
    } else {
        uint32_t q[4];
        ptx_ldmatrix_x4(q, reads->queries + n * 32);
        ptx_mma_m16n8k16<T>(s[0], keys, q[0], q[2]);
        ptx_mma_m16n8k16<T>(s[1], keys, q[1], q[3]);
    }
}

/* A warp's tiles of a job: tile n holds the 16 keys from first + 16 W n on (W warps), and all
 * rows see them from tile whole_first to the one before whole_end: rows are up to 16 tokens apart, so that some do not
 * see all of its first one and of its last one, but of no other. */
typedef struct few_tiles {
    int32_t first, count;
    int32_t whole_first, whole_end;
} few_tiles;

/* What a lane copies of a whole tile: its 16 bytes of each so many keys, and of values as far from those as all values
 * are from their keys. */
typedef struct few_lane {
    const char *from; /* those of its first key, in the cache's first page and for its first head */
    int32_t to;       /* shared, in the ring's first stage; negative: tiles are not copied so */
} few_lane;

/* Where a tile begins, in pages that hold tiles; else the block of the lane's key. */
typedef struct few_place {
    int32_t block, slot;
} few_place;

/* Pages of a sequence that a warp's lanes have, four each: `count` from `first` on. */
typedef struct few_pages {
    int4 four;
    int32_t first, count;
} few_pages;

/* Page `at` of a sequence, all lanes together: of those that they have, else of its table; whatever if it is not there. */
static __device__ __forceinline__ int32_t page_of_lanes(const few_pages *pages, const int32_t *table, int32_t at,
                                                        bool is_there)
{
    const uint32_t of = (uint32_t)(at - pages->first);
    const int32_t low = of & 1 ? pages->four.y : pages->four.x, high = of & 1 ? pages->four.w : pages->four.z;
    int32_t page = __shfl_sync(~0u, of & 2 ? high : low, (int)(of / 4));
    if (of >= (uint32_t)pages->count) {
        __syncwarp(); /* a branch, not ten instructions by predicate */
        if (is_there) page = table[at];
    }
    return page;
}

/* Can whole tiles be copied by few_lane? */
template <class S> static __device__ __forceinline__ bool has_whole_tiles(const attend_args *args)
{
    const fv_attend_params *params = &args->params;
    return (S::HEAD <= 128 || S::OCTETS == 1) && args->pages_hold_tiles && args->planes_alike &&
           params->head_size == S::HEAD && params->v_head_size == S::VALUE;
}

template <class S> static __device__ __forceinline__ few_tiles few_tiles_of(const few_slot *slot, int32_t warp)
{
    few_tiles tiles = {0, 0, 0, 0};
    if (slot->keys.first >= slot->keys.end) return tiles;
    const int32_t first = few_first_key(&slot->keys), all = (slot->keys.end - first + S::TILE - 1) / S::TILE;
    tiles.first = first + warp * S::TILE;
    tiles.count = (all - warp + S::WARPS - 1) / S::WARPS;
    tiles.whole_first = tiles.first < slot->keys.full_first;
    const int32_t last_end = tiles.first + (tiles.count - 1) * S::WARPS * S::TILE + S::TILE;
    tiles.whole_end = tiles.count - (last_end > slot->keys.full_end);
    return tiles;
}

static __device__ __forceinline__ bool is_whole_tile(const few_tiles *tiles, int32_t n)
{
    return n >= tiles->whole_first && n < tiles->whole_end;
}

template <class S> static __device__ __forceinline__ int32_t few_tile_key(const few_tiles *tiles, int32_t n)
{
    return tiles->first + n * S::WARPS * S::TILE;
}

/* Where tile n lies, asked for a tile ahead of its use. */
template <class S>
static __device__ __forceinline__ few_place find_few_tile(const few_slot *slot, const attend_args *args,
                                                          const few_tiles *tiles, int32_t n, const few_pages *pages,
                                                          int32_t lane)
{
    const int32_t first = few_tile_key<S>(tiles, n), key = first + lane;
    few_place place = {-1, 0};
    if constexpr (S::MEETS) {
        const int2 at = split_key(args, first);
        place = few_place{page_of_lanes(pages, slot->job.table, at.x, n < tiles->count), at.y};
    } else if (args->pages_hold_tiles) {
        const int2 at = split_key(args, first);
        if (n < tiles->count) place = few_place{slot->job.table[at.x], at.y};
    } else if (lane < S::TILE && n < tiles->count && key >= slot->keys.first && key < slot->keys.end) {
        place.block = slot->job.table[split_key(args, key).x];
    }
    return place;
}

/* Where chunk `chunk` of 16 bytes of a key lies in its row: the same chunk of eight keys has all banks, and of one-byte
 * entries four chunks of two keys, too. Rows are not padded for that: 128 bytes of a line that are not copied to one
 * line of shared memory take twice the time there. */
template <int ELEMENT, int CHUNKS> static __device__ __forceinline__ int32_t few_chunk_place(int32_t key, int32_t chunk)
{
    if constexpr (ELEMENT == 2) return chunk ^ key % 8;
    static_assert(ELEMENT == 2 || CHUNKS == 4 || CHUNKS == 8 || CHUNKS == 16,
                  "two rows, one row or half a row to all banks");
    return chunk ^ (CHUNKS == 4 ? key / 2 % 4 : key % 2 * 4 + key % 8 / 2);
}

/* A warp's asynchronous copies of rows of SIZE elements, 16 bytes each; elements from `size` on are zeros. */
template <int ROWS, int SIZE, int ELEMENT, int ROW_BYTES>
static __device__ __forceinline__ void copy_few_rows(char *to, const char *const *rows, const void *somewhere,
                                                     int32_t size, int32_t lane)
{
    constexpr int EACH = 16 / ELEMENT, COPIES = SIZE / EACH;
#pragma unroll
    for (int i = 0; i < ROWS * COPIES / 32; i++) {
        const int32_t at = lane + i * 32, key = at / COPIES, copy = at % COPIES;
        const char *row = rows[key];
        const bool is_there = row && copy * EACH < size;
        const int32_t place = few_chunk_place<ELEMENT, COPIES>(key, copy);
        ptx_cp_async_stream_16_or_zeros(to + key * ROW_BYTES + place * 16, is_there ? row + copy * 16 : somewhere,
                                        is_there ? 16 : 0);
    }
}

/* copy_few_rows of a tile that lies in one page: rows `stride` bytes apart from `rows` on. Bit k of `seen`: some row
 * sees key k of the tile; zeros stand for the others. */
template <int ROWS, int SIZE, int ELEMENT, int ROW_BYTES>
static __device__ __forceinline__ void copy_few_run(char *to, const char *rows, int32_t stride, uint32_t seen,
                                                    int32_t size, int32_t lane)
{
    constexpr int EACH = 16 / ELEMENT, COPIES = SIZE / EACH, STEP = 32 / COPIES; /* keys at once: a power of two */
    const int32_t key = lane / COPIES, copy = lane % COPIES;
    const char *from = rows + (int64_t)key * stride + copy * 16;
    const uint32_t own = copy * EACH < size ? seen >> key : 0;
    const int32_t place = few_chunk_place<ELEMENT, COPIES>(key, copy);
#pragma unroll
    for (int i = 0; i < ROWS / STEP; i++) {
        /* The key's part of the place: its bits are those of `key` and of i * STEP, side by side. */
        const int32_t turn = few_chunk_place<ELEMENT, COPIES>(i * STEP, 0);
        ptx_cp_async_stream_16_or_zeros(to + (key + i * STEP) * ROW_BYTES + (place ^ turn) * 16,
                                        from + (int64_t)stride * (i * STEP), own >> (i * STEP) & 1 ? 16 : 0);
    }
}

template <class S>
static __device__ __forceinline__ few_lane few_lane_of(const few_memory<S> *memory, const attend_args *args,
                                                       int32_t warp, int32_t lane)
{
    const fv_kv_plane *plane = &args->k[0].plane;
    const int32_t key = lane / (S::HEADS * S::COPIES), head = lane / S::COPIES % S::HEADS, copy = lane % S::COPIES;
    const int32_t place = few_chunk_place<S::ROW / S::HEAD, S::COPIES>(key, copy);
    const char *from = (const char *)plane->data + key * plane->slot_stride + copy * 16;
    if constexpr (S::HEADS > 1) from += head * plane->head_stride;
    few_lane own;
    own.from = ptx_keep(from);
    const uint32_t to = ptx_shared_address(memory->ring[warp] + S::FIRST + head * S::PART + key * S::ROW + place * 16);
    own.to = (int32_t)ptx_keep(has_whole_tiles<S>(args) ? to : ~0u);
    return own;
}

/* A lane's copies of the keys, or the values, of a whole tile: `from` and `to` are those of its first one. */
template <class S>
static __device__ __forceinline__ void copy_whole_rows(uint32_t to, const char *from, uint32_t stride)
{
    constexpr int STEP = 32 / (S::HEADS * S::COPIES);
#pragma unroll
    for (int i = 0; i < S::TILE / STEP; i++) {
        /* As in copy_few_run; rows lie in whole lines. */
        const int32_t turn = few_chunk_place<S::ROW / S::HEAD, S::COPIES>(i * STEP, 0) * 16;
        ptx_cp_async_stream_16((to ^ turn) + i * STEP * S::ROW, from + (uint64_t)stride * (uint32_t)(i * STEP));
    }
}

template <class S>
static __device__ __forceinline__ void copy_whole_tile(const few_lane *own, const attend_args *args,
                                                       const few_place *place, int32_t kv_head, int32_t stage)
{
    const fv_kv_plane *k = &args->k[0].plane, *v = &args->v[0].plane;
    const uint32_t to = (uint32_t)own->to + stage * S::STAGE, stride = (uint32_t)k->slot_stride;
    const char *from = own->from + (uint64_t)(uint32_t)place->block * (uint32_t)k->block_stride +
                       (uint64_t)(uint32_t)kv_head * (uint32_t)k->head_stride +
                       (uint64_t)(uint32_t)place->slot * stride;
    copy_whole_rows<S>(to, from, stride);
    copy_whole_rows<S>(to + S::HEADS * S::PART, from + ((const char *)v->data - (const char *)k->data), stride);
}

/* Bit k: some row sees key `first` + k. */
static __device__ __forceinline__ uint32_t seen_few_keys(const attend_keys *keys, int32_t first)
{
    const int32_t before = fv_max_i32(0, keys->first - first), behind = fv_max_i32(0, first + 16 - keys->end);
    return 0xffffu >> behind & 0xffffu << before;
}

/* Asks for tile n, which is in `place`, to come to a stage of the ring. */
template <class S>
static __device__ __forceinline__ void load_few_tile(few_memory<S> *memory, const attend_args *args,
                                                     const few_slot *slot, const few_tiles *tiles, int32_t n,
                                                     const few_place *place, const few_lane *own, int32_t stage,
                                                     int32_t warp, int32_t lane)
{
    constexpr int ELEMENT = S::IS_NARROW ? 1 : 2;
    const fv_attend_params *params = &args->params;
    const fv_kv_plane *k = &args->k[0].plane, *v = &args->v[0].plane;
    char *to = memory->ring[warp] + (S::FIRST + stage * S::STAGE);
    const int32_t first = few_tile_key<S>(tiles, n), kv_head = slot->job.kv_head, block = place->block;
    if (own->to >= 0 && is_whole_tile(tiles, n)) {
        copy_whole_tile<S>(own, args, place, kv_head, stage);
        return;
    }
    if (args->pages_hold_tiles) {
        const int32_t at = place->slot;
        const uint32_t seen = seen_few_keys(&slot->keys, first);
        copy_few_run<S::TILE, S::HEAD, ELEMENT, S::ROW>(to, plain_row(k, block, kv_head, at), (int32_t)k->slot_stride,
                                                        seen, params->head_size, lane);
        copy_few_run<S::TILE, S::VALUE, ELEMENT, S::ROW>(to + S::HEADS * S::PART, plain_row(v, block, kv_head, at),
                                                         (int32_t)v->slot_stride, seen, params->v_head_size, lane);
        if constexpr (S::HEADS > 1) {
            copy_few_run<S::TILE, S::HEAD, ELEMENT, S::ROW>(to + S::PART, plain_row(k, block, kv_head + 1, at),
                                                            (int32_t)k->slot_stride, seen, params->head_size, lane);
            copy_few_run<S::TILE, S::VALUE, ELEMENT, S::ROW>(to + 3 * S::PART, plain_row(v, block, kv_head + 1, at),
                                                             (int32_t)v->slot_stride, seen, params->v_head_size, lane);
        }
        return;
    }
    if constexpr (S::HEADS > 1) return; /* pages hold tiles */
    if (lane < S::TILE) {
        const int32_t at = split_key(args, first + lane).y;
        memory->k[warp][lane] = block < 0 ? NULL : plain_row(k, block, kv_head, at);
        memory->v[warp][lane] = block < 0 ? NULL : plain_row(v, block, kv_head, at);
    }
    __syncwarp();
    copy_few_rows<S::TILE, S::HEAD, ELEMENT, S::ROW>(to, memory->k[warp], params->q, params->head_size, lane);
    copy_few_rows<S::TILE, S::VALUE, ELEMENT, S::ROW>(to + S::PART, memory->v[warp], params->q, params->v_head_size,
                                                      lane);
    __syncwarp(); /* the addresses are read */
}

/* All into the first one. */
template <class S> static __device__ __forceinline__ void add_few_chains(float (&part)[S::CHAINS][S::OCTETS][4])
{
#pragma unroll
    for (int half = S::CHAINS / 2; half > 0; half /= 2)
#pragma unroll
        for (int n = 0; n < half; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) part[n][0][j] += part[n + half][0][j];
}

/* S^T of 16 keys. Of long heads the tensor cores add up spans of 64 elements: they cut off what they add. */
template <class S, class T>
static __device__ __forceinline__ void multiply_few_keys(float (&s)[S::OCTETS][4], const few_reads<S> *reads,
                                                         uint32_t k_at)
{
    constexpr int SPAN = S::HEAD > 128 ? 64 * S::CHAINS : S::HEAD;
#pragma unroll
    for (int first = 0; first < S::HEAD; first += SPAN) {
        float part[S::CHAINS][S::OCTETS][4] = {};
#pragma unroll
        for (int d = first; d < first + SPAN; d += 16) {
            uint32_t k[4];
            ptx_ldmatrix_x4(k, (k_at ^ d * 2 % 128) + d * 2 / 128 * 128);
            multiply_few_elements<S, T>(part[d / 16 % S::CHAINS], k, reads, d / 16);
        }
        add_few_chains<S>(part);
#pragma unroll
        for (int i = 0; i < S::OCTETS; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) s[i][j] = first == 0 ? part[0][i][j] : s[i][j] + part[0][i][j];
    }
}

/* Scores of keys that their row does not see: -inf. */
template <class S>
static __device__ __forceinline__ void mask_few_keys(float (&s)[S::OCTETS][4], const few_slot *slot, int32_t first_key,
                                                     int32_t lane)
{
    const int32_t origin = first_key + lane / 4;
#pragma unroll
    for (int j = 0; j < 2 * S::OCTETS; j++) {
        const few_row *row = &slot->rows[few_row_of_sum(j, lane)];
        const int32_t first = row->first - origin, end = row->end - origin;
#pragma unroll
        for (int key = 0; key < 16; key += 8) {
            float *score = &s[j / 2][key / 4 + j % 2];
            *score = key >= first && key < end ? *score : -INFINITY;
        }
    }
}

/* New maxima of the rows whose scores, `s` times `scale`, pass them by more than the slack; the sums so far follow
 * them, and the exponents `x`. */
template <class S>
static __device__ __forceinline__ void raise_few_maxima(float (&x)[S::OCTETS][4], few_state<S> *state,
                                                        const float (&s)[S::OCTETS][4],
                                                        const float (&scale)[S::OCTETS][2], float slack)
{
    bool changes = false; /* else the sums are 0 */
#pragma unroll
    for (int j = 0; j < 2 * S::OCTETS; j++) changes = changes || state->max[j / 2][j % 2] != FEW_LEAST;
    changes = __any_sync(~0u, changes);
#pragma unroll
    for (int i = 0; i < S::OCTETS; i++) {
        float factor[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const float max = state->max[i][j];
            float largest = -INFINITY;
#pragma unroll
            for (int k = j; k < 4; k += 2)
                largest = fmaxf(largest, x[i][k] == -INFINITY ? -INFINITY : s[i][k] * scale[i][j]);
#pragma unroll
            for (int step = 4; step < 32; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
            const bool passes = largest > max + slack;
            factor[j] = passes ? ptx_ex2(max - largest) : 1.0f;
            state->max[i][j] = passes ? largest : max;
            state->sum[i][j] *= factor[j];
            state->rounded[2 * i + j] *= factor[j];
        }
#pragma unroll
        for (int j = 0; j < 4; j++)
            x[i][j] = x[i][j] == -INFINITY ? -INFINITY : fmaf(s[i][j], scale[i][j % 2], -state->max[i][j % 2]);
        if (!changes) continue;
#pragma unroll
        for (int n = 0; n < S::VALUE / 16; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) state->out[n][i][j] *= factor[j % 2];
    }
}

/* P's exponents: from dot products to scores in base 2, relative to the maxima, which follow them. */
template <class S>
static __device__ __forceinline__ void score_few_keys(float (&x)[S::OCTETS][4], few_state<S> *state,
                                                      const float (&s)[S::OCTETS][4],
                                                      const float (&scale)[S::OCTETS][2], const few_slot *slot,
                                                      bool is_whole, int32_t first_key, float slack, int32_t lane)
{
    float largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < S::OCTETS; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) x[i][j] = fmaf(s[i][j], scale[i][j % 2], -state->max[i][j % 2]);
    if (!is_whole) mask_few_keys<S>(x, slot, first_key, lane);
#pragma unroll
    for (int i = 0; i < S::OCTETS; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) largest = fmaxf(largest, x[i][j]);
    if (__any_sync(~0u, largest > slack)) raise_few_maxima<S>(x, state, s, scale, slack);
}

/* P^T of the keys as T, each octet of rows the second operand of O^T = V^T P^T; their sums, too. */
template <class S, class T>
static __device__ __forceinline__ void weigh_few_keys(uint32_t (&weights)[S::OCTETS][2], few_state<S> *state,
                                                      const float (&x)[S::OCTETS][4])
{
    const uint32_t one = fv_narrow_pair<T>(1, 1);
#pragma unroll
    for (int i = 0; i < S::OCTETS; i++) {
        float p[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            p[j] = ptx_ex2(x[i][j]);
            state->sum[i][j % 2] += p[j];
        }
#pragma unroll
        for (int j = 0; j < 2; j++) weights[i][j] = ptx_movmatrix_trans(fv_narrow_pair<T>(p[2 * j], p[2 * j + 1]));
        const uint32_t ones[4] = {i == 0 ? one : 0, i == 1 ? one : 0, i == 0 ? one : 0, i == 1 ? one : 0};
        ptx_mma_m16n8k16<T>(state->rounded, ones, weights[i][0], weights[i][1]);
    }
}

/* O^T += V^T P^T */
template <class S, class T>
static __device__ __forceinline__ void add_few_values(few_state<S> *state, const uint32_t (&weights)[S::OCTETS][2],
                                                      uint32_t v_at)
{
#pragma unroll
    for (int n = 0; n < S::VALUE / 16; n++) {
        uint32_t v[4];
        ptx_ldmatrix_x4_trans(v, (v_at ^ n * 32 % 128) + n * 32 / 128 * 128);
#pragma unroll
        for (int i = 0; i < S::OCTETS; i++) ptx_mma_m16n8k16<T>(state->out[n][i], v, weights[i][0], weights[i][1]);
    }
}

/* --- entries of one byte ---------------------------------------------------------------------------------- */

/* S^T of 16 keys. A lane takes the elements of a key 16 at a time, chunk 4 i + lane % 4 of them, and they are
 * the elements of four instructions: which of them meet is free, where q is in the same order (store_narrow_query). */
template <class S, fv_dtype DTYPE>
static __device__ __forceinline__ void multiply_narrow_keys(float (&s)[S::OCTETS][4], const few_reads<S> *reads,
                                                            uint32_t keys)
{
    float part[S::CHAINS][S::OCTETS][4] = {};
#pragma unroll
    for (int n = 0; n < S::HEAD / 64; n++) {
        uint4 k[2];
#pragma unroll
        for (int i = 0; i < 2; i++) k[i] = ptx_ld_shared_v4((keys ^ n * 64) + i * 8 * S::HEAD);
#pragma unroll
        for (int step = 0; step < 4; step++) {
            const uint2 low = fv_half_four<DTYPE>((&k[0].x)[step]), high = fv_half_four<DTYPE>((&k[1].x)[step]);
            const uint32_t wide[4] = {low.x, high.x, low.y, high.y};
            multiply_few_elements<S, __half>(part[step % S::CHAINS], wide, reads, n * 4 + step);
        }
    }
    add_few_chains<S>(part);
#pragma unroll
    for (int i = 0; i < S::OCTETS; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) s[i][j] = part[0][i][j];
}

/* O^T += V^T P^T. Two neighbouring elements of a value are one 16-bit number to the load; of a chunk's 16 elements the
 * even ones are the first eight of the instruction, the odd ones the others. */
template <class S, fv_dtype DTYPE>
static __device__ __forceinline__ void add_narrow_values(few_state<S> *state, const uint32_t (&weights)[S::OCTETS][2],
                                                         uint32_t values)
{
#pragma unroll
    for (int chunk = 0; chunk < S::VALUE / 16; chunk += 2) {
        uint32_t v[4];
        ptx_ldmatrix_x4_trans(v, values ^ chunk * 16);
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const uint2 low = fv_half_four<DTYPE>(__byte_perm(v[2 * n], 0, 0x3120));
            const uint2 high = fv_half_four<DTYPE>(__byte_perm(v[2 * n + 1], 0, 0x3120));
            const uint32_t wide[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
            for (int i = 0; i < S::OCTETS; i++)
                ptx_mma_m16n8k16<__half>(state->out[chunk + n][i], wide, weights[i][0], weights[i][1]);
        }
    }
}

/* Of two heads each row has its own's products: a lane's rows are of one of them. */
template <class S, fv_dtype DTYPE>
static __device__ __forceinline__ void multiply_keys_of_heads(float (&s)[S::OCTETS][4], const few_reads<S> *reads,
                                                              uint32_t keys, int32_t lane)
{
    multiply_narrow_keys<S, DTYPE>(s, reads, keys);
    if constexpr (S::HEADS > 1) {
        float others[S::OCTETS][4];
        multiply_narrow_keys<S, DTYPE>(others, reads, keys + S::PART);
#pragma unroll
        for (int j = 0; j < 4; j++) s[0][j] = lane % 4 < 2 ? s[0][j] : others[0][j];
    }
}

/* Of two heads each one's values are added to its own rows: the weights of others are zeros, so that a value which is
 * no number reaches both. */
template <class S, fv_dtype DTYPE>
static __device__ __forceinline__ void add_values_of_heads(few_state<S> *state, const uint32_t (&weights)[S::OCTETS][2],
                                                           uint32_t values, int32_t lane)
{
    if constexpr (S::HEADS > 1) {
#pragma unroll
        for (int head = 0; head < S::HEADS; head++) {
            const bool is_own = lane / 16 == head;
            const uint32_t own[1][2] = {{is_own ? weights[0][0] : 0, is_own ? weights[0][1] : 0}};
            add_narrow_values<S, DTYPE>(state, own, values + head * S::PART);
        }
    } else {
        add_narrow_values<S, DTYPE>(state, weights, values);
    }
}

/* A chunk of 8 elements of row r of q, all lanes of a row's chunks together, in the order of multiply_narrow_keys and
 * as fp16 (half_query.cuh). */
template <class S>
static __device__ __forceinline__ void store_narrow_query(few_memory<S> *memory, fv_dtype dtype, uint4 eight, int32_t r,
                                                          int32_t chunk)
{
    float lacks = 1;
    if (dtype == FV_DTYPE_BF16) lacks = half_query_of<S::HEAD / 8>(&eight); /* all threads or none */
    const uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
    if (chunk == 0) memory->q_factors[r] = lacks;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int32_t step = chunk / 8 * 4 + chunk % 2 * 2 + i / 2, column = step * 16 + chunk / 2 % 4 * 2 + i % 2 * 8;
        *(uint32_t *)(memory->q + r * S::Q_ROW + column) = pairs[i];
    }
}

/* The threads' chunks of q, of 8 elements each: `OWN` for a thread at most. */
template <class S> struct few_queries {
    static constexpr int CHUNKS = S::HEAD / 8, ALL = S::BLOCK_M * CHUNKS, OWN = (ALL + S::THREADS - 1) / S::THREADS;
};

/* Asks for a thread's n-th chunk; next to entries of one byte it is what comes back, and store_few_query() must follow.
 * `row_of`(r): row r, of which the token and the head are read. */
template <class S, class RowOf>
static __device__ __forceinline__ uint4 ask_few_query(few_memory<S> *memory, const attend_args *args, int32_t num_rows,
                                                      int n, RowOf row_of)
{
    typedef few_queries<S> Q;
    const fv_attend_params *params = &args->params;
    const uint4 zeros = make_uint4(0, 0, 0, 0);
    const int32_t i = (int32_t)threadIdx.x + n * S::THREADS, r = i / Q::CHUNKS, chunk = i % Q::CHUNKS;
    if (Q::ALL % S::THREADS != 0 && i >= Q::ALL) return zeros; /* whole rows are a warp's */
    const bool is_there = few_item_row<S>(r) < num_rows && chunk * 8 < params->head_size;
    const few_row row = row_of(r);
    const char *from = (const char *)params->q;
    if (is_there) from += row.token * params->q_token_stride + row.head * params->q_head_stride + chunk * 16;
    if constexpr (S::IS_NARROW) return is_there ? *(const uint4 *)from : zeros;
    ptx_cp_async_16_or_zeros(memory->q + r * S::Q_ROW + chunk * 8, from, is_there ? 16 : 0);
    return zeros;
}

template <class S>
static __device__ __forceinline__ void store_few_query(few_memory<S> *memory, const attend_args *args, uint4 eight,
                                                       int n)
{
    typedef few_queries<S> Q;
    const int32_t i = (int32_t)threadIdx.x + n * S::THREADS;
    if (!S::IS_NARROW || (Q::ALL % S::THREADS != 0 && i >= Q::ALL)) return;
    store_narrow_query<S>(memory, args->params.q_dtype, eight, i / Q::CHUNKS, i % Q::CHUNKS);
}

/* The rows of q: asked for, or, next to entries of one byte, there. A barrier must follow. */
template <class S, class RowOf>
static __device__ __forceinline__ void load_few_queries(few_memory<S> *memory, const attend_args *args,
                                                        int32_t num_rows, RowOf row_of)
{
#pragma unroll
    for (int n = 0; n < few_queries<S>::OWN; n++)
        store_few_query<S>(memory, args, ask_few_query<S>(memory, args, num_rows, n, row_of), n);
}

/* Where a lane begins to read: rows of ldmatrix, but of keys of one byte chunks of 16. */
template <class S>
static __device__ __forceinline__ void place_few_reads(few_reads<S> *reads, const few_memory<S> *memory, int32_t warp,
                                                       int32_t lane)
{
    constexpr int ELEMENT = S::IS_NARROW ? 1 : 2;
    const uint32_t ring = ptx_shared_address(memory->ring[warp] + S::FIRST);
    const int32_t key = S::IS_NARROW ? lane / 4 : lane % 16, key_chunk = S::IS_NARROW ? lane % 4 : lane / 16;
    const int32_t value = S::IS_NARROW ? lane % 16 : lane / 16 * 8 + lane % 8;
    const int32_t value_chunk = S::IS_NARROW ? lane / 16 : lane / 8 % 2;
    const uint32_t k = key * S::ROW + few_chunk_place<ELEMENT, S::COPIES>(key, key_chunk) * 16;
    const uint32_t v = S::HEADS * S::PART + value * S::ROW +
                       few_chunk_place<ELEMENT, S::COPIES>(value, value_chunk) * 16;
    const int32_t row = S::OCTETS == 1 ? lane % 8 : lane % 16, chunk = S::OCTETS == 1 ? lane / 8 : lane / 16;
    reads->queries = ptx_shared_address(memory->q + row * S::Q_ROW + chunk * 8);
    reads->keys = ring + k;
    reads->values = ring + v;
    /* Else there is no register for them. */
    if constexpr (S::OCTETS == 1) reads->keys = ptx_keep(reads->keys);
    if constexpr (S::KEEPS_Q) reads->values = ptx_keep(reads->values);
}

/* What scores are multiplied by: of one byte each row's own. */
template <class S>
static __device__ __forceinline__ void find_few_scales(float (&scales)[S::OCTETS][2], const few_memory<S> *memory,
                                                       float scale, int32_t lane)
{
#pragma unroll
    for (int j = 0; j < 2 * S::OCTETS; j++) {
        const float factor = S::IS_NARROW ? memory->q_factors[few_row_of_sum(j, lane)] : 1.0f;
        scales[j / 2][j % 2] = scale * factor;
    }
}

/* The queries are there: those that stay come to registers. */
template <class S>
static __device__ __forceinline__ void take_few_queries(few_reads<S> *reads, const few_memory<S> *memory, float scale,
                                                        int32_t lane)
{
    if constexpr (S::KEEPS_Q) {
#pragma unroll
        for (int n = 0; n < S::HEAD / 16; n += 2) {
            uint32_t two[4];
            ptx_ldmatrix_x4(two, reads->queries + n * 32);
#pragma unroll
            for (int j = 0; j < 4; j++) reads->q[n + j / 2][j % 2] = two[j];
        }
    }
    if constexpr (S::OCTETS == 1) find_few_scales<S>(reads->scale, memory, scale, lane);
}

/* The tile of a stage, of entries of DTYPE. */
template <class S, fv_dtype DTYPE>
static __device__ __forceinline__ void attend_few_tile(few_state<S> *state, const few_memory<S> *memory,
                                                       const few_slot *slot, const few_reads<S> *reads, int32_t stage,
                                                       bool is_whole, int32_t first_key, float scale, float slack,
                                                       int32_t lane)
{
    using T = std::conditional_t<DTYPE == FV_DTYPE_BF16, __nv_bfloat16, __half>; /* of q and P */
    const uint32_t tile = stage * S::STAGE;
    float s[S::OCTETS][4], x[S::OCTETS][4];
    uint32_t weights[S::OCTETS][2];
    if constexpr (S::IS_NARROW)
        multiply_keys_of_heads<S, DTYPE>(s, reads, reads->keys + tile, lane);
    else
        multiply_few_keys<S, T>(s, reads, reads->keys + tile);
    if constexpr (S::OCTETS == 1) {
        score_few_keys<S>(x, state, s, reads->scale, slot, is_whole, first_key, slack, lane);
    } else {
        float scales[S::OCTETS][2];
        find_few_scales<S>(scales, memory, scale, lane);
        score_few_keys<S>(x, state, s, scales, slot, is_whole, first_key, slack, lane);
    }
    weigh_few_keys<S, T>(weights, state, x);
    if constexpr (S::IS_NARROW)
        add_values_of_heads<S, DTYPE>(state, weights, reads->values + tile, lane);
    else
        add_few_values<S, T>(state, weights, reads->values + tile);
    __syncwarp(); /* the tile is read to the end */
}

template <class S>
static __device__ __forceinline__ void attend_few_stage(few_state<S> *state, const few_memory<S> *memory,
                                                        const attend_args *args, const few_slot *slot,
                                                        const few_reads<S> *reads, int32_t stage, bool is_whole,
                                                        int32_t first_key, float scale, int32_t lane)
{
    const fv_dtype dtype = args->params.cache.dtype;
    const float slack = args->max_slack;
    if constexpr (!S::IS_NARROW) {
        if (dtype == FV_DTYPE_BF16)
            attend_few_tile<S, FV_DTYPE_BF16>(state, memory, slot, reads, stage, is_whole, first_key, scale, slack,
                                              lane);
        else
            attend_few_tile<S, FV_DTYPE_F16>(state, memory, slot, reads, stage, is_whole, first_key, scale, slack,
                                             lane);
    } else if (dtype == FV_DTYPE_F8_E4M3) {
        attend_few_tile<S, FV_DTYPE_F8_E4M3>(state, memory, slot, reads, stage, is_whole, first_key, scale, slack,
                                             lane);
    } else if (dtype == FV_DTYPE_F8_E5M2) {
        attend_few_tile<S, FV_DTYPE_F8_E5M2>(state, memory, slot, reads, stage, is_whole, first_key, scale, slack,
                                             lane);
    } else {
        attend_few_tile<S, FV_DTYPE_I8>(state, memory, slot, reads, stage, is_whole, first_key, scale, slack, lane);
    }
}

#endif
