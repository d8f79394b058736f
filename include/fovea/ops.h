/* Operations on their own, for engines that compose their own strategy. Arrays and tensors are where
 * the device runs; calls go to `stream` in order. */
#ifndef FOVEA_OPS_H
#define FOVEA_OPS_H

#include "fovea/batch.h"
#include "fovea/device.h"
#include "fovea/view.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Writes num_tokens rows of k [T, Hkv, D] and v [T, Hkv, Dv] to the cache; slot_mapping [T] int64,
 * a token with a negative slot is skipped. A slot past the cache: FV_ERR_INVALID where the host can read the
 * slots, else the token is skipped. fp8: stored = real / scale; k_scale, v_scale [num_scales], num_scales 0
 * (no scales), 1 or Hkv. Of latent layouts k is the whole entry: v and v_scale may be absent and are not read.
 *
 * Where the view has scale planes (int8, fp8_e4m3, fp8_e5m2), the scale of each token and head is
 * computed and stored there: max(largest magnitude of the row / 127, 448 or 57344, 1e-6), and then
 * stored = round(real / scale). An infinite or NaN element counts for no scale: infinity becomes the
 * largest number, NaN stays NaN in fp8 and becomes 0 in int8; other elements, heads and tokens are
 * what they would be without it. */
FV_API fv_status fv_kv_write(fv_device *device, const fv_kv_view *cache, const fv_tensor *k, const fv_tensor *v,
                             const int64_t *slot_mapping, int32_t num_tokens, const float *k_scale,
                             const float *v_scale, int32_t num_scales, fv_stream stream);

/* Copies cached tokens to dense rows: for each sequence r, key positions key_start[r] .. key_start[r]
 * + (out_start[r + 1] - out_start[r]) - 1 go to rows from out_start[r] of k [N, Hkv, D] and v. fp8 is
 * read back with the scales. Only struct_size, block_table, block_table_stride, block_table_width and
 * num_seqs of the batch are used, and no array where there are neither sequences nor rows. Of latent layouts
 * k_scale is that of the whole entry, v_scale may be absent, and so may v: it repeats the first elements of k.
 * FV_ERR_INVALID, on the CPU, for rows that out_start does not fill, for
 * keys and blocks that are not there, and for keys in the null block. */
FV_API fv_status fv_kv_gather(fv_device *device, const fv_tensor *k, const fv_tensor *v, const fv_kv_view *cache,
                              const fv_batch *batch, const int32_t *key_start, const int32_t *out_start,
                              int32_t num_rows, const float *k_scale, const float *v_scale, int32_t num_scales,
                              fv_stream stream);

/* Copies whole blocks, with their scales, from one view to another on the same device: block
 * src_blocks[i] of src becomes block dst_blocks[i] of dst, for i in [0, num_pairs). The views may be the
 * same (copy on write); else they agree in layout, dtype and sizes of a block, and may differ in strides
 * and in the number of blocks. No block may be the destination of two pairs, or the destination of one
 * and the source of another. A block outside its cache: FV_ERR_INVALID where the host can read the
 * arrays, else the pair is skipped. */
FV_API fv_status fv_kv_copy(fv_device *device, const fv_kv_view *dst, const int64_t *dst_blocks, const fv_kv_view *src,
                            const int64_t *src_blocks, int32_t num_pairs, fv_stream stream);

/* The same between a device and the host (swap): host_src and host_dst are views of host memory, and the
 * block arrays are on the host, read before the call returns. The copies go to the stream; host memory
 * must stay as it is, or not be read, until the stream has passed. A block that is one run of bytes in
 * both views is one copy; page-locked memory (fv_device_alloc_host) is the fastest. */
FV_API fv_status fv_kv_copy_in(fv_device *device, const fv_kv_view *device_dst, const int64_t *dst_blocks,
                               const fv_kv_view *host_src, const int64_t *src_blocks, int32_t num_pairs,
                               fv_stream stream);
FV_API fv_status fv_kv_copy_out(fv_device *device, const fv_kv_view *host_dst, const int64_t *dst_blocks,
                                const fv_kv_view *device_src, const int64_t *src_blocks, int32_t num_pairs,
                                fv_stream stream);

typedef enum fv_rope_style {
    FV_ROPE_HALF = 0,        /* GPT-NeoX: element i pairs with i + rope_dim / 2 */
    FV_ROPE_INTERLEAVED = 1, /* GPT-J: element 2 i pairs with 2 i + 1 */
} fv_rope_style;

/* How tokens are rotated (RoFormer, arXiv 2104.09864, equation 34). Pair i of a head at position p becomes
 * (a c - b s, b c + a s) with c = cos[p][i], s = sin[p][i]. */
typedef struct fv_rotation {
    uint32_t struct_size; /* sizeof(fv_rotation) */
    fv_rope_style style;
    int32_t rope_dim; /* even; the first rope_dim elements of a head are rotated, the others stay */
    const float *cos; /* [max_position, rope_dim / 2] */
    const float *sin;
    int64_t row_stride;          /* of both tables, in elements; 0 = rope_dim / 2 */
    int64_t max_position;        /* rows of the tables */
    const int32_t *positions_32; /* [T]; NULL: positions_64 */
    const int64_t *positions_64;
} fv_rotation;

/* Rotates q [T', Hq, D] and k [T', Hkv, D] in place, T = num_tokens rows of each; one of them may be
 * absent. fp32, fp16 or bf16, the same for both; the arithmetic is fp32, rounded once. A position outside
 * the tables: FV_ERR_INVALID where the host can read the positions, else the token is left unrotated. */
FV_API fv_status fv_rope(fv_device *device, const fv_tensor *q, const fv_tensor *k, const fv_rotation *rotation,
                         int32_t num_tokens, fv_stream stream);

/* fv_rope on q and k, then fv_kv_write of the rotated k and of v, in one pass and with the same bits. k is
 * rotated in place as well, since the dense paths of attention read it; q may be absent. Tokens that
 * fv_kv_write skips are rotated and not written. */
FV_API fv_status fv_rope_kv_write(fv_device *device, const fv_tensor *q, const fv_tensor *k, const fv_tensor *v,
                                  const fv_rotation *rotation, const fv_kv_view *cache, const int64_t *slot_mapping,
                                  int32_t num_tokens, const float *k_scale, const float *v_scale, int32_t num_scales,
                                  fv_stream stream);

/* Merges two partial results of the same rows by their LSE (FlashAttention-style online softmax):
 *
 *   m = max(la, lb);  w = e^(la-m) + e^(lb-m) + e^(sink-m)
 *   out = (e^(la-m) a + e^(lb-m) b) / w;  lse = m + ln(w)
 *
 * out, a, b [T, H, D] and lse, lse_a, lse_b [T, H] fp32 (lse may be absent). sinks [H] or NULL enter
 * here once, so neither side may hold them. An LSE of -inf, +inf or NaN marks a side without keys; with
 * both sides empty out is 0 and lse -inf, sink or not. a and b have one dtype, out may have another; out
 * may be a or b if the dtypes agree. */
FV_API fv_status fv_merge_states(fv_device *device, const fv_tensor *out, const fv_tensor *lse, const fv_tensor *a,
                                 const fv_tensor *lse_a, const fv_tensor *b, const fv_tensor *lse_b, const float *sinks,
                                 fv_stream stream);

#ifdef __cplusplus
}
#endif
#endif
