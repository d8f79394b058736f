/* The index arithmetic of ops/ and kvcache/ in 32 bits where it divides: a division in 64 bits is a call, and
 * calls take the registers of a kernel's sums. Positions, slots and elements are below 2^31; bytes are not. */
#ifndef FV_KERNELS_CUDA_NARROW_INDEX_CUH
#define FV_KERNELS_CUDA_NARROW_INDEX_CUH

#include "kvcache/kv_address.h"
#include "ops/attend_paged.h"

/* fv_local_keys */
static __device__ __forceinline__ int32_t local_keys(const fv_context_parallel *cp, int64_t position)
{
    if (position <= 0) return 0;
    if (cp->world <= 1) return (int32_t)position;
    const int64_t run = cp->interleave, whole_round = run * cp->world;
    const uint32_t at = (uint32_t)position, round = (uint32_t)fv_min_i64(whole_round, UINT32_MAX); /* > at anyway */
    const int64_t rest = (int64_t)(at % round) - cp->rank * run;
    return (int32_t)(at / round * run + fv_max_i64(0, fv_min_i64(rest, run)));
}

/* fv_key_position */
static __device__ __forceinline__ int32_t key_position(const fv_context_parallel *cp, int32_t key)
{
    if (cp->world <= 1) return key;
    const int32_t run = cp->interleave, rounds = key / run;
    return (rounds * cp->world + cp->rank) * run + (key - rounds * run);
}

/* A number that is known at the launch, and by which a kernel divides. */
typedef struct index_divisor {
    uint32_t by;
    uint32_t inverse; /* floor((2^32 - 1) / by) */
} index_divisor;

static inline index_divisor index_divisor_of(int32_t by)
{
    const uint32_t number = by > 0 ? (uint32_t)by : 1;
    return index_divisor{number, UINT32_MAX / number};
}

/* n / by for any n >= 0: the product is the quotient or one less, for inverse / 2^32 lacks at most 2^-32 of 1 / by. */
static __device__ __forceinline__ int32_t divide_index(int32_t n, index_divisor divisor)
{
    const uint32_t number = (uint32_t)n, quotient = __umulhi(number, divisor.inverse);
    return (int32_t)(quotient + (number - quotient * divisor.by >= divisor.by));
}

/* fv_row_keys */
static __device__ __forceinline__ fv_key_range row_keys(const fv_context_parallel *cp, int32_t seq_len,
                                                        int64_t position, int32_t causal, int32_t window)
{
    if (cp->world <= 1 && window <= 0) /* most often, in few instructions */
        return fv_key_range{0, causal ? fv_min_i32(seq_len, (int32_t)position + 1) : seq_len};
    int64_t end = seq_len, first = 0;
    if (causal && position + 1 < end) end = position + 1;
    if (window > 0) {
        first = position - window + 1;
        if (!causal && position + window < end) end = position + window;
    }
    fv_key_range keys = {local_keys(cp, first), local_keys(cp, end)};
    keys.first = fv_min_i32(keys.first, keys.end);
    return keys;
}

/* fv_kv_element_offset */
static __device__ __forceinline__ int64_t element_offset(const fv_kv_plane *plane, int32_t element)
{
    if (plane->element_chunk <= 0) return element * plane->element_stride;
    const int32_t chunk = (int32_t)((uint32_t)element / (uint32_t)plane->element_chunk);
    return chunk * plane->element_chunk_stride + (element - chunk * plane->element_chunk) * plane->element_stride;
}

/* fv_kv_row_offset */
static __device__ __forceinline__ int64_t row_offset(const fv_kv_plane *plane, int64_t block, int32_t head,
                                                     int32_t slot)
{
    const int64_t offset = block * plane->block_stride + head * plane->head_stride;
    if (plane->slot_chunk <= 0) return offset + slot * plane->slot_stride;
    const int32_t chunk = (int32_t)((uint32_t)slot / (uint32_t)plane->slot_chunk);
    return offset + chunk * plane->slot_chunk_stride + (slot - chunk * plane->slot_chunk) * plane->slot_stride;
}

#endif
