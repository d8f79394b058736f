/* mla_query on Hopper: a block makes q, its rotation and its product with W_UK of one head and up to 128 tokens, so that
 * queries never go to memory before they are absorbed, and all weights are one stream.
 *
 *   memory            shared memory                      registers of two warpgroups, 64 tokens each
 *   x, q_up[h]   ->   stages of 64 of the depth     ->   q [64, 192] fp32
 *                                                        its last 64 columns rotated  ->  out[t][h][512 ..]
 *   W_UK[h]      ->   4 stages of 128 columns       ->   q_nope W_UK, 128 columns     ->  out[t][h][0 .. 511]
 *
 * The weights of the first stages are asked for before the kernel waits for the one before it. q_nope is rounded in the
 * registers of the first product to the left operand of the second. Results leave by way of stages that nobody fills any
 * more, in turns of two buffers for each warpgroup:
 *
 *   even   what was the last stage of q_up, 16 KB for each
 *   odd    behind the 32 KB of W_UK in each of its four stages, 2 x 8 KB for each
 *
 * Blocks behind those of the heads write the keys: on 132 multiprocessors 128 heads leave four idle. */
#ifndef FV_KERNELS_CUDA_HOPPER_MLA_QUERY_CUH
#define FV_KERNELS_CUDA_HOPPER_MLA_QUERY_CUH

#include "kernels/cuda/hopper/handover.cuh"
#include "kernels/cuda/hopper/panel.cuh"
#include "kernels/cuda/kv_write_token.cuh"
#include "kernels/cuda/mla_query.cuh"
#include "kernels/cuda/overlap.cuh"
#include "kernels/cuda/rope_token.cuh"

enum {
    QUERY_HEAD = FV_MLA_QUERY_NOPE + FV_MLA_QUERY_ROPE,
    QUERY_CHUNK = 128, /* columns of W_UK that are a stage */
    QUERY_CHUNKS = FV_MLA_QUERY_LATENT / QUERY_CHUNK,
    QUERY_STAGES = 5,
    QUERY_CONSUMERS = 256, /* threads; a warp behind them asks for copies */
    QUERY_THREADS = QUERY_CONSUMERS + 32,
    QUERY_HALF_BYTES = 64 * FV_PANEL_ROW_BYTES,                      /* a panel of 64 tokens */
    QUERY_PANEL_BYTES = (int)FV_MLA_QUERY_NOPE * FV_PANEL_ROW_BYTES, /* of W_UK */
    QUERY_ANGLES = FV_MLA_QUERY_ROPE / 8,                            /* pairs of a row that a thread has */
    QUERY_BARRIER_CONSUMERS = 1,
    QUERY_BARRIER_GROUP /* the first warpgroup's, then the second's */
};

typedef struct query_stage {
    char weights[(int)QUERY_HEAD *
                 FV_PANEL_ROW_BYTES]; /* with what follows: two panels of W_UK, or what leaves for memory */
    char x[2][QUERY_HALF_BYTES];
} query_stage;

typedef struct query_memory {
    alignas(1024) query_stage stages[QUERY_STAGES];
    uint64_t full[QUERY_STAGES], empty[QUERY_STAGES];
} query_memory;
static_assert(sizeof(query_stage) % 1024 == 0 && sizeof(query_memory) <= 227 * 1024, "panels; the memory of a block");
static_assert(2 * QUERY_PANEL_BYTES + QUERY_HALF_BYTES == sizeof(query_stage), "W_UK, and room for what leaves");
static_assert(QUERY_STAGES > QUERY_CHUNKS, "the last stage of q_up is not one of W_UK");

/* --- the producer -------------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ void load_query_weights(query_memory *memory, const mla_query_args *args,
                                                          int32_t step)
{
    const int32_t slot = step % QUERY_STAGES;
    ptx_mbarrier_expect(&memory->full[slot], sizeof(query_stage));
    ptx_tensor_copy(memory->stages[slot].weights, &args->up_map, step * 64, 0, blockIdx.x, &memory->full[slot]);
}

static __device__ __forceinline__ void load_query_rows(query_memory *memory, const mla_query_args *args, int32_t step)
{
    const int32_t slot = step % QUERY_STAGES;
    ptx_tensor_copy(memory->stages[slot].x, &args->x_map, step * 64, blockIdx.y * FV_MLA_QUERY_TOKENS, 0,
                    &memory->full[slot]);
}

static __device__ __forceinline__ void load_absorb_chunk(query_memory *memory, const mla_query_args *args, int32_t step)
{
    const int32_t slot = step % QUERY_STAGES, column = (step - args->num_steps) * QUERY_CHUNK;
    char *panels = (char *)&memory->stages[slot];
    ptx_mbarrier_expect(&memory->full[slot], 2 * QUERY_PANEL_BYTES);
#pragma unroll
    for (int i = 0; i < 2; i++)
        ptx_tensor_copy(panels + i * QUERY_PANEL_BYTES, &args->absorb_map, column + i * 64, 0, blockIdx.x,
                        &memory->full[slot]);
}

/* By one thread. */
static __device__ __forceinline__ void produce_query(query_memory *memory, const mla_query_args *args)
{
    const int32_t num_early = fv_min_i32(QUERY_STAGES, args->num_steps), num_stages = args->num_steps + QUERY_CHUNKS;
    for (int32_t step = 0; step < num_early; step++) load_query_weights(memory, args, step);
    overlap_wait();
    for (int32_t step = 0; step < num_early; step++) load_query_rows(memory, args, step);
#pragma unroll 1
    for (int32_t step = num_early; step < num_stages; step++) {
        if (step >= QUERY_STAGES) ptx_mbarrier_wait(&memory->empty[step % QUERY_STAGES], (step / QUERY_STAGES + 1) % 2);
        if (step < args->num_steps) {
            load_query_weights(memory, args, step);
            load_query_rows(memory, args, step);
        } else {
            load_absorb_chunk(memory, args, step);
        }
    }
}

/* --- the consumers ------------------------------------------------------------------------------------------------- */

/* The cosine and sine of each pair of the thread's two rows. */
typedef struct query_angles {
    bool rotates[2];
    float c[2][QUERY_ANGLES], s[2][QUERY_ANGLES];
} query_angles;

/* The thread's pair `i` of a row: of columns 8 i and 8 i + 1 behind its own, or of two such that are 32 apart. */
static __device__ __forceinline__ int32_t query_pair(fv_rope_style style, int32_t i)
{
    const int32_t lane = threadIdx.x % 4;
    return style == FV_ROPE_INTERLEAVED ? 4 * i + lane : 8 * (i / 2) + 2 * lane + i % 2;
}

static __device__ __forceinline__ void find_query_angles(query_angles *angles, const fv_rope_params *rope,
                                                         int32_t token)
{
    const int32_t num_tokens = fv_rope_tokens(rope);
#pragma unroll
    for (int which = 0; which < 2; which++) {
        const int32_t own = token + which * 8;
        const int64_t position = own < num_tokens ? fv_rope_position(rope, own) : -1;
        angles->rotates[which] = position >= 0;
#pragma unroll
        for (int i = 0; i < QUERY_ANGLES; i++) {
            const int64_t at = position * rope->row_stride + query_pair(rope->style, i);
            angles->c[which][i] = position >= 0 ? rope->cos[at] : 1.0f;
            angles->s[which][i] = position >= 0 ? rope->sin[at] : 0.0f;
        }
    }
}

/* The warp has read a stage. Not where nobody fills it again. */
static __device__ __forceinline__ void release_query_stage(query_memory *memory, const mla_query_args *args,
                                                           int32_t step)
{
    if (step + QUERY_STAGES >= args->num_steps + QUERY_CHUNKS || !arrives_for_warp()) return;
    ptx_mbarrier_arrive(&memory->empty[step % QUERY_STAGES]);
}

static __device__ __forceinline__ void wait_for_query_stage(query_memory *memory, int32_t step)
{
    ptx_mbarrier_wait(&memory->full[step % QUERY_STAGES], step / QUERY_STAGES % 2);
}

/* q = x q_up^T of the warpgroup's tokens. */
template <class T>
static __device__ __forceinline__ void multiply_query(float (&q)[QUERY_HEAD / 2], query_memory *memory,
                                                      const mla_query_args *args, int32_t group)
{
#pragma unroll 1
    for (int32_t step = 0; step < args->num_steps; step++) {
        const query_stage *stage = &memory->stages[step % QUERY_STAGES];
        const uint64_t x_at = ptx_matrix_descriptor(stage->x[group], 16, 1024);
        const uint64_t up_at = ptx_matrix_descriptor(stage->weights, 16, 1024);
        wait_for_query_stage(memory, step);
        ptx_wgmma_fence();
#pragma unroll
        for (int d = 0; d < 64; d += 16)
            ptx_wgmma_m64n192k16_ss<T>(q, ptx_descriptor_at(x_at, d * 2), ptx_descriptor_at(up_at, d * 2),
                                       step + d > 0);
        ptx_wgmma_commit();
        ptx_wgmma_wait<1>();
        if (step > 0) release_query_stage(memory, args, step - 1);
    }
    ptx_wgmma_wait<0>();
    ptx_wgmma_settle(q);
    release_query_stage(memory, args, args->num_steps - 1);
}

/* 128 columns of q_nope W_UK: issued. */
template <class T>
static __device__ __forceinline__ void multiply_absorb_chunk(float (&absorbed)[QUERY_CHUNK / 2],
                                                             const uint32_t (&nope)[FV_MLA_QUERY_NOPE / 4],
                                                             query_memory *memory, int32_t step)
{
    const uint64_t at = ptx_matrix_descriptor(&memory->stages[step % QUERY_STAGES], QUERY_PANEL_BYTES, 1024);
    wait_for_query_stage(memory, step);
    ptx_wgmma_fence();
#pragma unroll
    for (int d = 0; d < FV_MLA_QUERY_NOPE / 16; d++) {
        const uint32_t rows[4] = {nope[4 * d], nope[4 * d + 1], nope[4 * d + 2], nope[4 * d + 3]};
        ptx_wgmma_m64n128k16_rs_nt<T>(absorbed, rows, ptx_descriptor_at(at, d * 16 * FV_PANEL_ROW_BYTES), d > 0);
    }
    ptx_wgmma_commit();
}

/* The last columns of the thread's rows, rotated. */
static __device__ __forceinline__ void rotate_query(float (&rope)[FV_MLA_QUERY_ROPE / 2],
                                                    const float (&q)[QUERY_HEAD / 2], const query_angles *angles,
                                                    fv_rope_style style)
{
    const bool interleaved = style == FV_ROPE_INTERLEAVED;
#pragma unroll
    for (int i = 0; i < FV_MLA_QUERY_ROPE / 2; i++) rope[i] = q[FV_MLA_QUERY_NOPE / 2 + i];
#pragma unroll
    for (int which = 0; which < 2; which++) {
        if (!angles->rotates[which]) continue;
#pragma unroll
        for (int i = 0; i < QUERY_ANGLES; i++) {
            const float c = angles->c[which][i], s = angles->s[which][i];
            const int pair = 4 * i + 2 * which, first = 4 * (i / 2) + 2 * which + i % 2;
            if (interleaved)
                rotate_pair(&rope[pair], &rope[pair + 1], c, s);
            else
                rotate_pair(&rope[first], &rope[first + FV_MLA_QUERY_ROPE / 4], c, s);
        }
    }
}

/* Where panel `panel` of what a warpgroup sends in its turn `turn` lies. */
static __device__ __forceinline__ char *query_panel(query_memory *memory, const mla_query_args *args, int32_t group,
                                                    int32_t turn, int32_t panel)
{
    const int32_t i = 2 * group + panel;
    if (turn % 2 != 0) return memory->stages[(args->num_steps + i) % QUERY_STAGES].x[1];
    return (char *)&memory->stages[(args->num_steps - 1) % QUERY_STAGES] + i * QUERY_HALF_BYTES;
}

/* 64 tokens x 2 N columns from `column` on to memory. The warp that asks for a turn's copies waits, two turns later, until
 * they have been read. */
template <class T, int N>
static __device__ __forceinline__ void store_query(const float (&columns)[N], query_memory *memory,
                                                   const mla_query_args *args, int32_t group, int32_t turn,
                                                   int32_t column)
{
    const int32_t lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
    const bool sends = threadIdx.x % 128 == turn % 2 * 32;
    if (turn > 2) {
        if (sends) ptx_bulk_wait_read();
        ptx_bar_sync(QUERY_BARRIER_GROUP + group, 128);
    }
#pragma unroll
    for (int i = 0; i < N / 8; i++) {
        char *panel = query_panel(memory, args, group, turn, i / 4);
        uint32_t p[4];
#pragma unroll
        for (int j = 0; j < 4; j++) p[j] = fv_narrow_pair<T>(columns[8 * i + 2 * j], columns[8 * i + 2 * j + 1]);
        ptx_stmatrix_x4(ptx_shared_address(panel) + panel_offset(64, row, 2 * (i % 4) + lane / 16), p[0], p[1], p[2],
                        p[3]);
    }
    ptx_fence_proxy_async();
    ptx_bar_sync(QUERY_BARRIER_GROUP + group, 128);
    if (!sends) return;
#pragma unroll
    for (int i = 0; i < N / 32; i++)
        ptx_tensor_store(&args->out_map, query_panel(memory, args, group, turn, i), column + i * 64, blockIdx.x,
                         blockIdx.y * FV_MLA_QUERY_TOKENS + group * 64);
    ptx_bulk_commit();
}

template <class T>
static __device__ __forceinline__ void consume_query(query_memory *memory, const mla_query_args *args)
{
    const int32_t group = warpgroup_of_thread();
    const fv_rope_params *rope = &args->keys.rope;
    query_angles angles;
    overlap_wait();
    find_query_angles(&angles, rope, blockIdx.y * FV_MLA_QUERY_TOKENS + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4);
    float q[QUERY_HEAD / 2];
    multiply_query<T>(q, memory, args, group);
    uint32_t nope[FV_MLA_QUERY_NOPE / 4];
#pragma unroll
    for (int i = 0; i < FV_MLA_QUERY_NOPE / 4; i++) nope[i] = fv_narrow_pair<T>(q[2 * i], q[2 * i + 1]);
    float rotated[FV_MLA_QUERY_ROPE / 2];
    rotate_query(rotated, q, &angles, rope->style);
    ptx_bar_sync(QUERY_BARRIER_CONSUMERS, QUERY_CONSUMERS); /* the last stages of q_up have been read */
#pragma unroll 1
    for (int32_t chunk = 0; chunk < QUERY_CHUNKS; chunk++) {
        float absorbed[QUERY_CHUNK / 2];
        multiply_absorb_chunk<T>(absorbed, nope, memory, args->num_steps + chunk);
        if (chunk == 0) store_query<T>(rotated, memory, args, group, 1, FV_MLA_QUERY_LATENT);
        ptx_wgmma_wait<0>();
        ptx_wgmma_settle(absorbed);
        store_query<T>(absorbed, memory, args, group, chunk + 2, chunk * QUERY_CHUNK);
    }
    if (threadIdx.x % 128 == 0 || threadIdx.x % 128 == 32) ptx_bulk_wait_read();
}

/* --- the keys ------------------------------------------------------------------------------------------------------ */

/* A warp for each token: its latent, rotated in place where there is something to rotate, then into the cache. */
static __device__ __forceinline__ void write_query_keys(const mla_query_args *args)
{
    if (blockIdx.y > 0) return;
    overlap_wait();
    const fv_rope_kv_write_params *keys = &args->keys;
    const fv_rope_rows no_copy = {};
    const int32_t warps = blockDim.x / 32, first = (blockIdx.x - args->num_heads) * warps + threadIdx.x / 32;
    const int32_t num_tokens = fv_rope_tokens(&keys->rope), step = (gridDim.x - args->num_heads) * warps;
#pragma unroll 1
    for (int32_t token = first; token < num_tokens; token += step) {
        int64_t block, slot;
        rotate_heads(&keys->rope.k, &no_copy, &keys->rope, token, 0, 1);
        __syncwarp(); /* lanes read what others of the warp rotated */
        if (find_slot(&block, &slot, &keys->write, token)) write_head(&keys->write, token, 0, false, block, slot);
    }
}

template <class T>
static __global__ void __launch_bounds__(QUERY_THREADS, 1)
    wgmma_mla_query_kernel(const __grid_constant__ mla_query_args args)
{
    PTX_DYNAMIC_SHARED(1024, shared);
    query_memory *memory = (query_memory *)shared;
    if ((int32_t)blockIdx.x >= args.num_heads) {
        write_query_keys(&args);
        return;
    }
    if (threadIdx.x == 0) {
        for (int32_t i = 0; i < QUERY_STAGES; i++) {
            ptx_mbarrier_init(&memory->full[i], 1);
            init_warp_barrier(&memory->empty[i], QUERY_CONSUMERS / 32);
        }
        ptx_fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x < QUERY_CONSUMERS) {
        consume_query<T>(memory, &args);
    } else if (threadIdx.x == QUERY_CONSUMERS) {
        produce_query(memory, &args);
    }
}

template <class T> constexpr fv_cuda_mla_query_kernel wgmma_mla_query_of(void)
{
    return {wgmma_mla_query_kernel<T>, (int32_t)sizeof(query_memory), QUERY_THREADS};
}

#endif
