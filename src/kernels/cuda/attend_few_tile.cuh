/* A tile of few rows (attend_few.cuh): 16 keys of a warp, their way to shared memory and their arithmetic, for
 * entries of 16 bits and of one byte. */
#ifndef FV_KERNELS_CUDA_ATTEND_FEW_TILE_CUH
#define FV_KERNELS_CUDA_ATTEND_FEW_TILE_CUH

#include "kernels/cuda/attend_few_jobs.cuh"
#include "kernels/cuda/attend_mma.cuh"

template <class Element, int HEAD_, int VALUE_, int WARPS_ = HEAD_ <= 64 ? 4 : 6> struct few_shape {
    using T = Element;
    static constexpr int HEAD = HEAD_, VALUE = VALUE_, TILE = 16, BLOCK_M = FEW_ROWS;
    static constexpr int WARPS = WARPS_, THREADS = 32 * WARPS;
    static constexpr int Q_ROW = HEAD + 8;                                    /* 8 rows lie in different banks */
    static constexpr int WIDE = TILE * (HEAD + VALUE) * 2, NARROW = WIDE / 2; /* bytes of a tile */
    static constexpr int RING = 2 * WIDE; /* of one byte: room for a warp's sums, and behind it the two stages */
    static constexpr int BLOCKS = HEAD <= 64 ? 4 : HEAD <= 128 ? 12 / WARPS : 1; /* on a multiprocessor */
    static_assert(HEAD == VALUE && HEAD * 2 % 128 == 0, "keys and values lie alike, in whole lines");
    static_assert(WIDE + 2 * NARROW <= RING, "a ring");
    static_assert(BLOCK_M * VALUE * 4 <= WIDE && WARPS * TILE <= FEW_FIRST_KEYS, "a warp's sums fit into a stage");
};

/* A warp's ring: bytes of an entry's row there, of a stage, and before the first one; 16-byte copies of a row. */
template <class S, bool IS_NARROW> struct few_ring {
    static constexpr int ROW = S::HEAD * (IS_NARROW ? 1 : 2), BYTES = IS_NARROW ? S::NARROW : S::WIDE;
    static constexpr int FIRST = IS_NARROW ? S::WIDE : 0, COPIES = ROW / 16;
};

template <class S> struct few_memory {
    alignas(128) char ring[S::WARPS][S::RING];
    alignas(16) typename S::T q[S::BLOCK_M * S::Q_ROW];
    float q_factors[S::BLOCK_M];      /* entries of one byte: what scores lack, for q is fp16 */
    const char *k[S::WARPS][S::TILE]; /* of the tile that a warp asks for; NULL: no row sees the key */
    const char *v[S::WARPS][S::TILE];
    /* At a job's end, of each warp: values [BLOCK_M][VALUE], maxima, sums, and sums as rounded. */
    const float *values[S::WARPS];
    float max[S::WARPS][S::BLOCK_M], sum[S::WARPS][S::BLOCK_M], rounded[S::WARPS][S::BLOCK_M];
    few_jobs jobs;
};

/* A warp's state: two rows for each thread, l / 4 and the eighth after it. */
template <class S> struct few_state {
    float out[S::VALUE / 8][4];
    float max[2];
    float sum[2];     /* of this thread's keys */
    float rounded[4]; /* sums of P as the tensor cores get it, of all keys: a column of ones behind V */
};

/* A warp's tiles of a job: tile n holds the 16 keys from first + 16 W n on (W warps), all of them seen by some row from tile
 * whole_first to the one before whole_end. */
typedef struct few_tiles {
    int32_t first, count;
    int32_t whole_first, whole_end;
} few_tiles;

/* What a lane copies of a tile that is whole: its 16 bytes of each so many keys, and of values as far from those as all
 * values are from their keys. */
typedef struct few_lane {
    const char *from; /* those of its first key, in the cache's first page and for its first head */
    uint32_t to;      /* shared, in the ring's first stage */
    int32_t is_plain; /* 1: tiles are copied so where they are whole */
} few_lane;

/* Where a tile begins, in pages that hold tiles; else the block of the lane's key. */
typedef struct few_place {
    int32_t block, slot;
} few_place;

template <class S> static __device__ __forceinline__ few_tiles few_tiles_of(const few_slot *slot, int32_t warp)
{
    few_tiles tiles = {0, 0, 0, 0};
    if (slot->keys.first >= slot->keys.end) return tiles;
    const int32_t first = few_first_key(&slot->keys), all = (slot->keys.end - first + S::TILE - 1) / S::TILE;
    tiles.first = first + warp * S::TILE;
    tiles.count = (all - warp + S::WARPS - 1) / S::WARPS;
    tiles.whole_first = tiles.first < slot->keys.first;
    const int32_t last_end = tiles.first + (tiles.count - 1) * S::WARPS * S::TILE + S::TILE;
    tiles.whole_end = tiles.count - (last_end > slot->keys.end);
    return tiles;
}

template <class S> static __device__ __forceinline__ int32_t few_tile_key(const few_tiles *tiles, int32_t n)
{
    return tiles->first + n * S::WARPS * S::TILE;
}

/* Where tile n lies, asked for a tile ahead of its use. */
template <class S>
static __device__ __forceinline__ few_place find_few_tile(const few_slot *slot, const attend_args *args,
                                                          const few_tiles *tiles, int32_t n, int32_t lane)
{
    const int32_t first = few_tile_key<S>(tiles, n), key = first + lane;
    few_place place = {-1, 0};
    if (args->pages_hold_tiles) {
        const int2 at = split_key(args, first);
        if (n < tiles->count) place = few_place{slot->job.table[at.x], at.y};
    } else if (lane < S::TILE && n < tiles->count && key >= slot->keys.first && key < slot->keys.end) {
        place.block = slot->job.table[split_key(args, key).x];
    }
    return place;
}

/* Where chunk `chunk` of 16 bytes of a key lies in its row: the same chunk of eight keys has all banks, and of one-byte
 * entries four chunks of two keys, too. Rows are not padded for that: 128 bytes of a line that are not copied to one line
 * of shared memory take twice the time there. */
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

/* copy_few_rows of a tile that lies in one page: rows `stride` bytes apart from `rows` on. Bit k of `seen`: some row sees
 * key k of the tile; zeros stand for the others. */
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

template <class S, bool IS_NARROW>
static __device__ __forceinline__ few_lane few_lane_of(const few_memory<S> *memory, const attend_args *args,
                                                       int32_t warp, int32_t lane)
{
    using R = few_ring<S, IS_NARROW>;
    const fv_attend_params *params = &args->params;
    const int32_t key = lane / R::COPIES, copy = lane % R::COPIES;
    const int32_t place = few_chunk_place<R::ROW / S::HEAD, R::COPIES>(key, copy);
    few_lane own;
    own.from = ptx_keep((const char *)args->k[0].plane.data + key * args->k[0].plane.slot_stride + copy * 16);
    own.to = ptx_keep(ptx_shared_address(memory->ring[warp] + R::FIRST + key * R::ROW + place * 16));
    own.is_plain = S::HEAD <= 128 && args->pages_hold_tiles && args->planes_alike && params->head_size == S::HEAD &&
                   params->v_head_size == S::VALUE;
    return own;
}

/* A lane's copies of the keys, or the values, of a whole tile: `from` and `to` are those of its first one. */
template <class S, bool IS_NARROW>
static __device__ __forceinline__ void copy_whole_rows(uint32_t to, const char *from, uint32_t stride)
{
    using R = few_ring<S, IS_NARROW>;
    constexpr int STEP = 32 / R::COPIES;
#pragma unroll
    for (int i = 0; i < S::TILE / STEP; i++) {
        /* As in copy_few_run; rows lie in whole lines. */
        const int32_t turn = few_chunk_place<R::ROW / S::HEAD, R::COPIES>(i * STEP, 0) * 16;
        ptx_cp_async_stream_16((to ^ turn) + i * STEP * R::ROW, from + (uint64_t)stride * (uint32_t)(i * STEP));
    }
}

template <class S, bool IS_NARROW>
static __device__ __forceinline__ void copy_whole_tile(const few_lane *own, const attend_args *args,
                                                       const few_place *place, int32_t kv_head, int32_t stage)
{
    using R = few_ring<S, IS_NARROW>;
    const fv_kv_plane *k = &args->k[0].plane, *v = &args->v[0].plane;
    const uint32_t to = own->to + stage * R::BYTES, stride = (uint32_t)k->slot_stride;
    const char *from = own->from + (uint64_t)(uint32_t)place->block * (uint32_t)k->block_stride +
                       (uint64_t)(uint32_t)kv_head * (uint32_t)k->head_stride +
                       (uint64_t)(uint32_t)place->slot * stride;
    copy_whole_rows<S, IS_NARROW>(to, from, stride);
    copy_whole_rows<S, IS_NARROW>(to + S::TILE * R::ROW, from + ((const char *)v->data - (const char *)k->data), stride);
}

/* Bit k: some row sees key `first` + k. */
static __device__ __forceinline__ uint32_t seen_few_keys(const attend_keys *keys, int32_t first)
{
    const int32_t before = fv_max_i32(0, keys->first - first), behind = fv_max_i32(0, first + 16 - keys->end);
    return 0xffffu >> behind & 0xffffu << before;
}

/* Asks for tile n, which is in `place`, to come to a stage of the ring. */
template <class S, bool IS_NARROW>
static __device__ __forceinline__ void load_few_tile(few_memory<S> *memory, const attend_args *args,
                                                     const few_slot *slot, const few_tiles *tiles, int32_t n,
                                                     const few_place *place, const few_lane *own, int32_t stage,
                                                     int32_t warp, int32_t lane)
{
    using R = few_ring<S, IS_NARROW>;
    constexpr int ELEMENT = IS_NARROW ? 1 : 2;
    const fv_attend_params *params = &args->params;
    const fv_kv_plane *k = &args->k[0].plane, *v = &args->v[0].plane;
    char *to = memory->ring[warp] + (R::FIRST + stage * R::BYTES);
    const int32_t first = few_tile_key<S>(tiles, n), kv_head = slot->job.kv_head, block = place->block;
    if (own->is_plain && n >= tiles->whole_first && n < tiles->whole_end) {
        copy_whole_tile<S, IS_NARROW>(own, args, place, kv_head, stage);
        return;
    }
    if (args->pages_hold_tiles) {
        const int32_t at = place->slot;
        const uint32_t seen = seen_few_keys(&slot->keys, first);
        copy_few_run<S::TILE, S::HEAD, ELEMENT, R::ROW>(to, plain_row(k, block, kv_head, at), (int32_t)k->slot_stride,
                                                         seen, params->head_size, lane);
        copy_few_run<S::TILE, S::VALUE, ELEMENT, R::ROW>(to + S::TILE * R::ROW, plain_row(v, block, kv_head, at),
                                                          (int32_t)v->slot_stride, seen, params->v_head_size, lane);
        return;
    }
    if (lane < S::TILE) {
        const int32_t at = split_key(args, first + lane).y;
        memory->k[warp][lane] = block < 0 ? NULL : plain_row(k, block, kv_head, at);
        memory->v[warp][lane] = block < 0 ? NULL : plain_row(v, block, kv_head, at);
    }
    __syncwarp();
    copy_few_rows<S::TILE, S::HEAD, ELEMENT, R::ROW>(to, memory->k[warp], params->q, params->head_size, lane);
    copy_few_rows<S::TILE, S::VALUE, ELEMENT, R::ROW>(to + S::TILE * R::ROW, memory->v[warp], params->q,
                                                       params->v_head_size, lane);
    __syncwarp(); /* the addresses are read */
}

/* S of 16 rows x 16 keys. Of long heads the tensor cores add up spans of 64 elements: they cut off what they add. */
template <class S>
static __device__ __forceinline__ void multiply_few_keys(float (&s)[2][4], uint32_t q_at, uint32_t k_at)
{
    using T = typename S::T;
    constexpr int SPAN = S::HEAD > 128 ? 64 : S::HEAD;
#pragma unroll
    for (int first = 0; first < S::HEAD; first += SPAN) {
        float part[2][4] = {};
#pragma unroll
        for (int d = first; d < first + SPAN; d += 16) {
            uint32_t k[4], q[4];
            ptx_ldmatrix_x4(k, (k_at ^ d * 2 % 128) + d * 2 / 128 * 128);
            ptx_ldmatrix_x4(q, q_at + d * 2);
            ptx_mma_m16n8k16<T>(part[0], q, k[0], k[1]);
            ptx_mma_m16n8k16<T>(part[1], q, k[2], k[3]);
        }
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) s[n][j] = first == 0 ? part[n][j] : s[n][j] + part[n][j];
    }
}

/* Scores of keys that their row does not see: -inf. */
static __device__ __forceinline__ void mask_few_keys(float (&s)[2][4], const few_slot *slot, int32_t tile_first,
                                                     int32_t lane)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const few_row *row = &slot->rows[lane / 4 + half * 8];
        const int32_t origin = tile_first + lane % 4 * 2, first = row->first - origin, end = row->end - origin;
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int32_t key = n * 8 + j;
                float *score = &s[n][2 * half + j];
                *score = key >= first && key < end ? *score : -INFINITY;
            }
    }
}

/* From dot products to scores in base 2, and the new maxima; the sums so far follow them. */
template <class S>
static __device__ __forceinline__ void score_few_keys(float (&s)[2][4], few_state<S> *state, const few_slot *slot,
                                                      int32_t tile_first, int32_t lane, const float (&scale)[2])
{
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) s[n][j] *= scale[j / 2];
    if (tile_first < slot->keys.full_first || tile_first + S::TILE > slot->keys.full_end)
        mask_few_keys(s, slot, tile_first, lane);
    float factor[2] = {1, 1};
    bool changes = false;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float largest = fmaxf(fmaxf(s[0][2 * half], s[0][2 * half + 1]), fmaxf(s[1][2 * half], s[1][2 * half + 1]));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        const float max = state->max[half];
        if (!(largest > max + FV_MAX_SLACK)) continue;
        factor[half] = ptx_ex2(max - largest);
        changes = changes || max != -INFINITY; /* else its sums are 0 */
        state->max[half] = largest;
    }
    if (!__any_sync(~0u, changes)) return;
#pragma unroll
    for (int half = 0; half < 2; half++) state->sum[half] *= factor[half];
#pragma unroll
    for (int j = 0; j < 4; j++) state->rounded[j] *= factor[j / 2];
#pragma unroll
    for (int n = 0; n < S::VALUE / 8; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) state->out[n][j] *= factor[j / 2];
}

/* P of the keys as P_T; their sums, too. */
template <class S, class P_T>
static __device__ __forceinline__ void weigh_few_keys(uint32_t (&weights)[4], few_state<S> *state,
                                                      const float (&s)[2][4])
{
    float p[2][4];
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float max = state->max[j / 2] == -INFINITY ? 0.0f : state->max[j / 2];
            p[n][j] = ptx_ex2(s[n][j] - max);
            state->sum[j / 2] += p[n][j];
        }
#pragma unroll
    for (int i = 0; i < 4; i++) weights[i] = fv_narrow_pair<P_T>(p[i / 2][i % 2 * 2], p[i / 2][i % 2 * 2 + 1]);
    const uint32_t ones = fv_narrow_pair<P_T>(1, 1);
    ptx_mma_m16n8k16<P_T>(state->rounded, weights, ones, ones);
}

/* O += P V */
template <class S>
static __device__ __forceinline__ void add_few_values(few_state<S> *state, const uint32_t (&weights)[4], uint32_t v_at)
{
#pragma unroll
    for (int n = 0; n < S::VALUE / 8; n += 2) {
        uint32_t v[4];
        ptx_ldmatrix_x4_trans(v, (v_at ^ n * 16 % 128) + n * 16 / 128 * 128);
        ptx_mma_m16n8k16<typename S::T>(state->out[n], weights, v[0], v[1]);
        ptx_mma_m16n8k16<typename S::T>(state->out[n + 1], weights, v[2], v[3]);
    }
}

/* --- entries of one byte ---------------------------------------------------------------------------------- */

/* S of 16 rows x 16 keys. A lane takes the elements of a key 16 at a time, chunk 4 i + lane % 4 of them, and they are
 * the elements of four instructions: which of them meet is free, where q is in the same order (store_narrow_query). */
template <class S, fv_dtype DTYPE>
static __device__ __forceinline__ void multiply_narrow_keys(float (&s)[2][4], uint32_t q_at, const char *keys,
                                                            int32_t lane)
{
    const int32_t key = lane / 4, place = few_chunk_place<1, S::HEAD / 16>(key, lane % 4);
#pragma unroll
    for (int i = 0; i < S::HEAD / 64; i++) {
        float part[2][4] = {};
        uint4 k[2];
#pragma unroll
        for (int n = 0; n < 2; n++) k[n] = *(const uint4 *)(keys + (n * 8 + key) * S::HEAD + (place ^ i * 4) * 16);
#pragma unroll
        for (int step = 0; step < 4; step++) {
            uint32_t q[4];
            ptx_ldmatrix_x4(q, q_at + (i * 4 + step) * 32);
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const uint32_t four = (&k[n].x)[step];
                ptx_mma_m16n8k16<__half>(part[n], q, widen_two<__half, DTYPE>((uint16_t)four),
                                         widen_two<__half, DTYPE>((uint16_t)(four >> 16)));
            }
        }
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) s[n][j] = i == 0 ? part[n][j] : s[n][j] + part[n][j];
    }
}

/* O += P V. Two neighbouring elements of a value are one 16-bit number to the load; the even ones and the odd ones of
 * a chunk are two instructions: out[2 c] and out[2 c + 1] of chunk c. */
template <class S, fv_dtype DTYPE>
static __device__ __forceinline__ void add_narrow_values(few_state<S> *state, const uint32_t (&weights)[4],
                                                         const char *values, int32_t lane)
{
    const int32_t matrix = lane / 8, key = matrix % 2 * 8 + lane % 8;
    const int32_t place = few_chunk_place<1, S::VALUE / 16>(key, matrix / 2);
    const uint32_t row_at = ptx_shared_address(values + key * S::VALUE);
#pragma unroll
    for (int chunk = 0; chunk < S::VALUE / 16; chunk += 2) {
        uint32_t v[4];
        ptx_ldmatrix_x4_trans(v, row_at + (place ^ chunk) * 16);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t low = __byte_perm(v[2 * i], 0, 0x3120), high = __byte_perm(v[2 * i + 1], 0, 0x3120);
            ptx_mma_m16n8k16<__half>(state->out[2 * (chunk + i)], weights, widen_two<__half, DTYPE>((uint16_t)low),
                                     widen_two<__half, DTYPE>((uint16_t)high));
            ptx_mma_m16n8k16<__half>(state->out[2 * (chunk + i) + 1], weights,
                                     widen_two<__half, DTYPE>((uint16_t)(low >> 16)),
                                     widen_two<__half, DTYPE>((uint16_t)(high >> 16)));
        }
    }
}

/* A chunk of 8 elements of row r of q, all lanes of a row's chunks together, in the order of multiply_narrow_keys and as
 * fp16: of bf16 times a power of two of the row's own that makes its largest element about 2^13, so that what fp16 cannot
 * hold is 2^-37 of that. */
template <class S>
static __device__ __forceinline__ void store_narrow_query(few_memory<S> *memory, fv_dtype dtype, uint4 eight, int32_t r,
                                                          int32_t chunk)
{
    constexpr int CHUNKS = S::HEAD / 8;
    uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
    float lacks = 1;
    if (dtype == FV_DTYPE_BF16) { /* all threads or none */
        float2 reals[4];
        float largest = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            reals[i] = make_float2(__uint_as_float(pairs[i] << 16), __uint_as_float(pairs[i] & 0xffff0000u));
            largest = fmaxf(largest, fmaxf(fabsf(reals[i].x), fabsf(reals[i].y)));
        }
#pragma unroll
        for (int step = 1; step < CHUNKS; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
        const uint32_t exponent = max(__float_as_uint(largest) >> 23, 40u); /* biased by 127 */
        const float factor = __uint_as_float((267 - exponent) << 23);
        lacks = __uint_as_float((exponent - 13) << 23);
#pragma unroll
        for (int i = 0; i < 4; i++) pairs[i] = fv_narrow_pair<__half>(reals[i].x * factor, reals[i].y * factor);
    }
    if (chunk == 0) memory->q_factors[r] = lacks;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int32_t step = chunk / 8 * 4 + chunk % 2 * 2 + i / 2, column = step * 16 + chunk / 2 % 4 * 2 + i % 2 * 8;
        *(uint32_t *)(memory->q + r * S::Q_ROW + column) = pairs[i];
    }
}

/* The rows of q: asked for, or, next to entries of one byte, there. A barrier must follow. `row_of`(r): row r, of which the
 * token and the head are read. */
template <class S, bool IS_NARROW, class RowOf>
static __device__ __forceinline__ void load_few_queries(few_memory<S> *memory, const attend_args *args,
                                                        int32_t num_rows, RowOf row_of)
{
    constexpr int CHUNKS = S::HEAD / 8, ALL = S::BLOCK_M * CHUNKS;
    const fv_attend_params *params = &args->params;
#pragma unroll
    for (int n = 0; n < (ALL + S::THREADS - 1) / S::THREADS; n++) {
        const int32_t i = (int32_t)threadIdx.x + n * S::THREADS, r = i / CHUNKS, chunk = i % CHUNKS;
        if (ALL % S::THREADS != 0 && i >= ALL) break; /* whole rows are a warp's */
        const bool is_there = r < num_rows && chunk * 8 < params->head_size;
        const few_row row = row_of(r);
        const char *from = (const char *)params->q;
        if (is_there) from += row.token * params->q_token_stride + row.head * params->q_head_stride + chunk * 16;
        if constexpr (IS_NARROW)
            store_narrow_query<S>(memory, params->q_dtype, is_there ? *(const uint4 *)from : make_uint4(0, 0, 0, 0), r,
                                  chunk);
        else
            ptx_cp_async_16_or_zeros(memory->q + r * S::Q_ROW + chunk * 8, from, is_there ? 16 : 0);
    }
}

template <class S>
static __device__ __forceinline__ void attend_few_tile(few_state<S> *state, const few_slot *slot, const char *tile,
                                                       uint32_t q_at, int32_t first_key, float scale, int32_t lane)
{
    const int32_t in_matrix = lane % 8, matrix = lane / 8;
    constexpr int ROW = S::HEAD * 2, CHUNKS = ROW / 16;
    const int32_t key = matrix / 2 * 8 + in_matrix, value = matrix % 2 * 8 + in_matrix;
    const uint32_t k_at = ptx_shared_address(tile + key * ROW + few_chunk_place<2, CHUNKS>(key, matrix % 2) * 16);
    const uint32_t v_at = ptx_shared_address(tile + (S::TILE + value) * ROW +
                                             few_chunk_place<2, CHUNKS>(value, matrix / 2) * 16);
    const float scales[2] = {scale, scale};
    float s[2][4];
    uint32_t weights[4];
    multiply_few_keys<S>(s, q_at, k_at);
    score_few_keys<S>(s, state, slot, first_key, lane, scales);
    weigh_few_keys<S, typename S::T>(weights, state, s);
    add_few_values<S>(state, weights, v_at);
    __syncwarp(); /* the tile is read to the end */
}

template <class S, fv_dtype DTYPE>
static __device__ __forceinline__ void attend_narrow_tile(few_state<S> *state, const few_memory<S> *memory,
                                                          const few_slot *slot, const char *tile, uint32_t q_at,
                                                          int32_t first_key, float scale, int32_t lane)
{
    const float scales[2] = {scale * memory->q_factors[lane / 4], scale * memory->q_factors[lane / 4 + 8]};
    float s[2][4];
    uint32_t weights[4];
    multiply_narrow_keys<S, DTYPE>(s, q_at, tile, lane);
    score_few_keys<S>(s, state, slot, first_key, lane, scales);
    weigh_few_keys<S, __half>(weights, state, s);
    add_narrow_values<S, DTYPE>(state, weights, tile + S::TILE * S::HEAD, lane);
    __syncwarp(); /* the tile is read to the end */
}

/* The tile of a stage. */
template <class S, bool IS_NARROW>
static __device__ __forceinline__ void attend_few_stage(few_state<S> *state, const few_memory<S> *memory,
                                                        const attend_args *args, const few_slot *slot, int32_t stage,
                                                        uint32_t q_at, int32_t first_key, float scale, int32_t warp,
                                                        int32_t lane)
{
    using R = few_ring<S, IS_NARROW>;
    const char *tile = memory->ring[warp] + R::FIRST + stage * R::BYTES;
    if constexpr (!IS_NARROW) {
        attend_few_tile<S>(state, slot, tile, q_at, first_key, scale, lane);
        return;
    }
    const fv_dtype dtype = args->params.cache.dtype;
    if (dtype == FV_DTYPE_F8_E4M3)
        attend_narrow_tile<S, FV_DTYPE_F8_E4M3>(state, memory, slot, tile, q_at, first_key, scale, lane);
    else if (dtype == FV_DTYPE_F8_E5M2)
        attend_narrow_tile<S, FV_DTYPE_F8_E5M2>(state, memory, slot, tile, q_at, first_key, scale, lane);
    else
        attend_narrow_tile<S, FV_DTYPE_I8>(state, memory, slot, tile, q_at, first_key, scale, lane);
}

#endif
