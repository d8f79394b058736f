/* S^T of a tile of MLA decode over the 656-byte entry (attend_entry.cuh): from the entries' bytes to operands in
 * registers. */
#ifndef FV_KERNELS_CUDA_HOPPER_ENTRY_SCORES_CUH
#define FV_KERNELS_CUDA_HOPPER_ENTRY_SCORES_CUH

#include "kernels/cuda/hopper/entry_block.cuh"

/* A chunk of each of the thread's two keys, as it is in the entry. */
typedef struct key_chunks {
    uint4 of[2];
} key_chunks;

static __device__ __forceinline__ key_chunks read_key_chunks(const char *at)
{
    return {*(const uint4 *)at, *(const uint4 *)(at + 8 * FV_DS_ENTRY_BYTES)};
}

static __device__ __forceinline__ uint32_t word_of(const uint4 &chunk, int word)
{
    return word == 0 ? chunk.x : word == 1 ? chunk.y : word == 2 ? chunk.z : chunk.w;
}

/* Operand of a product from four e4m3 of each key: the depth goes through the elements in the order that the four lanes
 * of a key read them in, for sums have none; that of the queries is the same (store_entry_chunk). */
static __device__ __forceinline__ void widen_key_word(uint32_t (&a)[4], const key_chunks *chunks, int word)
{
    const uint2 first = ptx_widen_e4m3(word_of(chunks->of[0], word));
    const uint2 second = ptx_widen_e4m3(word_of(chunks->of[1], word));
    a[0] = first.x;
    a[1] = second.x;
    a[2] = first.y;
    a[3] = second.y;
}

/* The same from RoPE's elements, of which a chunk is for two products. */
static __device__ __forceinline__ void take_rope_words(uint32_t (&a)[4], const key_chunks *chunks, int which)
{
    a[0] = word_of(chunks->of[0], which * 2);
    a[1] = word_of(chunks->of[1], which * 2);
    a[2] = word_of(chunks->of[0], which * 2 + 1);
    a[3] = word_of(chunks->of[1], which * 2 + 1);
}

/* Scores of a group's elements, which are done, times scales: of the key at `key`, and the eighth after it. */
template <int N>
static __device__ __forceinline__ void add_entry_group(float (&s)[N / 2], float (&of_group)[N / 2], const char *key,
                                                       int group, float scale)
{
    const float *scales = (const float *)(key + FV_DS_SCALES_AT) + group;
    const float low = scales[0] * scale, high = scales[8 * FV_DS_ENTRY_BYTES / 4] * scale;
    ptx_wgmma_settle(of_group);
#pragma unroll
    for (int i = 0; i < N / 2; i++) s[i] = fmaf(of_group[i], i / 2 % 2 ? high : low, s[i]);
}

/* S^T of a tile, in base 2: RoPE, then the groups, a few steps at a time. Their operands are made while those of the
 * part before are multiplied, and take the registers of the part before that. Blocks of 32 rows have registers for the
 * sums of one group, others for two. */
template <int N>
static __device__ __forceinline__ void multiply_entry_keys(float (&s)[N / 2], const entry_memory<N> *memory,
                                                           const char *key, float scale)
{
    constexpr int PANEL_BYTES = N * FV_PANEL_ROW_BYTES, STEPS = N <= 16 ? 4 : 2 /* of a part */, SUMS = N <= 16 ? 2 : 1;
    constexpr int ROPE_PARTS = ENTRY_ROPE_STEPS / STEPS, GROUP_PARTS = ENTRY_GROUP_STEPS / STEPS;
    constexpr int PARTS = ROPE_PARTS + ENTRY_GROUPS * GROUP_PARTS;
    const uint64_t q_at = ptx_anew(ptx_matrix_descriptor(memory->q[0], 16, 1024));
    const char *own = key + threadIdx.x % 4 * 32; /* of a key's four lanes each has two of eight chunks: all banks */
    key_chunks rope[2] = {read_key_chunks(own + FV_DS_ROPE_AT), read_key_chunks(own + FV_DS_ROPE_AT + 16)};
    key_chunks chunks = read_key_chunks(own);
    uint32_t a[2][STEPS][4];
    float of_group[SUMS][N / 2];
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        const int first = part * STEPS - ENTRY_ROPE_STEPS, group = first / ENTRY_GROUP_STEPS;
        const int ended = part - ROPE_PARTS - SUMS; /* of the groups' parts, the last one whose sums are needed here */
        const bool adds = ended >= 0 && ended % GROUP_PARTS == GROUP_PARTS - 1;
        if (part >= 2) ptx_wgmma_wait<1>();
        if (part == ROPE_PARTS + 1) {
            ptx_wgmma_settle(s);
#pragma unroll
            for (int i = 0; i < N / 2; i++) s[i] *= scale;
        }
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            if (first < 0)
                take_rope_words(a[part % 2][i], &rope[(part * STEPS + i) / 2], i % 2);
            else
                widen_key_word(a[part % 2][i], &chunks, (first + i) % ENTRY_CHUNK_STEPS);
        }
        const int next = (first + STEPS) / ENTRY_CHUNK_STEPS; /* chunk */
        if (first >= 0 && (first + STEPS) % ENTRY_CHUNK_STEPS == 0 && next < ENTRY_GROUPS * 2)
            chunks = read_key_chunks(own + next / 2 * FV_DS_TILE + next % 2 * 16);
        if (adds) {
            if (SUMS == 1) ptx_wgmma_wait<0>();
            add_entry_group<N>(s, of_group[ended / GROUP_PARTS % SUMS], key, ended / GROUP_PARTS, scale);
        }
        ptx_wgmma_fence();
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            const int step = first + i;
            if (step < 0)
                multiply_columns<__nv_bfloat16>(
                    s, a[part % 2][i],
                    ptx_descriptor_at(q_at, (LATENT_PANELS - 1) * PANEL_BYTES + (part * STEPS + i) * 32),
                    part * STEPS + i > 0);
            else
                multiply_columns<__half>(of_group[group % SUMS], a[part % 2][i],
                                         ptx_descriptor_at(q_at, step / 4 * PANEL_BYTES + step % 4 * 32),
                                         step % ENTRY_GROUP_STEPS > 0);
        }
        ptx_wgmma_commit();
    }
    ptx_wgmma_wait<0>();
    add_entry_group<N>(s, of_group[(ENTRY_GROUPS - 1) % SUMS], key, ENTRY_GROUPS - 1, scale);
}

#endif
