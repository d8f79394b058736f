/* Rows of caches that lie in pieces of 16 bytes: the x-packed and the shuffled layout (attend_packed_rows.c), 16 keys of a page at
 * a time.
 *
 *   K   piece p of a key holds elements p x to p x + x - 1; those of 16 keys lie side by side
 *   V   a piece holds element d of x keys
 *
 * Rows are written in parts of 64 bytes, zeros behind the end of the last. */
#ifndef FV_KERNELS_CPU_PIECE_ROWS_H
#define FV_KERNELS_CPU_PIECE_ROWS_H

#include "kernels/cpu/simd.h"
#include "kvcache/kv_address.h"

enum {
    FV_PIECE_BYTES = 16,
    FV_PIECE_KEYS = 16, /* that rows are made of at a time */
    FV_PART_BYTES = 64,
    FV_PIECES_OF_PART = FV_PART_BYTES / FV_PIECE_BYTES,
};

/* 1: K and V lie so, and numbers have 8 or 16 bits. */
static inline int32_t fv_cache_is_in_pieces(const fv_kv_view *cache)
{
    const int64_t bytes = (int64_t)fv_dtype_bytes(cache->dtype);
    if (bytes != 1 && bytes != 2) return 0;
    const int32_t x = (int32_t)(FV_PIECE_BYTES / bytes);
    const fv_kv_plane *k = &cache->k, *v = &cache->v;
    return cache->block_size % x == 0 && k->slot_chunk <= 0 && k->slot_stride == FV_PIECE_BYTES &&
           k->element_chunk == x && k->element_stride == bytes && v->slot_stride == bytes &&
           (v->slot_chunk <= 0 || v->slot_chunk % x == 0) && v->element_chunk <= 0;
}

/* 1: rows of 16 keys of a page can be made at once. */
static inline int32_t fv_cache_has_piece_rows(const fv_kv_view *cache)
{
    const int64_t bytes = (int64_t)fv_dtype_bytes(cache->dtype);
    return cache->block_size % FV_PIECE_KEYS == 0 && fv_cache_is_in_pieces(cache) &&
           cache->head_size * bytes % FV_PIECE_BYTES == 0;
}

/* Where 16 rows go. */
typedef struct fv_row_target {
    char *to;
    int64_t row_stride, part_stride;
} fv_row_target;

#if defined(__AVX512BW__)

static inline __m512i fv_pieces_load(const char *pieces, int32_t is_there)
{
    return is_there ? _mm512_loadu_si512(pieces) : _mm512_setzero_si512();
}

/* Four pieces of four keys each to a part of four rows. */
static inline void fv_key_pieces_turn(char *to, int64_t row_stride, const __m512i pieces[4])
{
    const __m512i low = _mm512_shuffle_i32x4(pieces[0], pieces[1], 0x44);
    const __m512i high = _mm512_shuffle_i32x4(pieces[0], pieces[1], 0xee);
    const __m512i other_low = _mm512_shuffle_i32x4(pieces[2], pieces[3], 0x44);
    const __m512i other_high = _mm512_shuffle_i32x4(pieces[2], pieces[3], 0xee);
    _mm512_storeu_si512(to, _mm512_shuffle_i32x4(low, other_low, 0x88));
    _mm512_storeu_si512(to + row_stride, _mm512_shuffle_i32x4(low, other_low, 0xdd));
    _mm512_storeu_si512(to + 2 * row_stride, _mm512_shuffle_i32x4(high, other_high, 0x88));
    _mm512_storeu_si512(to + 3 * row_stride, _mm512_shuffle_i32x4(high, other_high, 0xdd));
}

/* Rows of K: `pieces` are the first of 16 keys, those of `num` pieces of each `stride` bytes apart. */
static inline void fv_key_pieces_to_rows(const fv_row_target *target, const char *pieces, int64_t stride, int32_t num)
{
    char *part = target->to;
    for (int32_t p = 0; p < num; p += FV_PIECES_OF_PART, part += target->part_stride) {
        for (int32_t key = 0; key < FV_PIECE_KEYS; key += 4) {
            __m512i of[4];
            FV_UNROLL
            for (int32_t i = 0; i < 4; i++)
                of[i] = fv_pieces_load(pieces + (p + i) * stride + key * FV_PIECE_BYTES, p + i < num);
            fv_key_pieces_turn(part + key * target->row_stride, target->row_stride, of);
        }
    }
}

/* Words, lane by lane: eight rows of eight become eight columns. */
static inline void fv_words_turn_eight(__m512i rows[8])
{
    __m512i twos[8], fours[8];
    FV_UNROLL
    for (int32_t i = 0; i < 8; i += 2) {
        twos[i] = _mm512_unpacklo_epi16(rows[i], rows[i + 1]);
        twos[i + 1] = _mm512_unpackhi_epi16(rows[i], rows[i + 1]);
    }
    FV_UNROLL
    for (int32_t i = 0; i < 8; i += 4) { /* fours[i + j]: columns 2 j and 2 j + 1 of rows i to i + 3 */
        fours[i] = _mm512_unpacklo_epi32(twos[i], twos[i + 2]);
        fours[i + 1] = _mm512_unpackhi_epi32(twos[i], twos[i + 2]);
        fours[i + 2] = _mm512_unpacklo_epi32(twos[i + 1], twos[i + 3]);
        fours[i + 3] = _mm512_unpackhi_epi32(twos[i + 1], twos[i + 3]);
    }
    FV_UNROLL
    for (int32_t j = 0; j < 4; j++) {
        rows[2 * j] = _mm512_unpacklo_epi64(fours[j], fours[4 + j]);
        rows[2 * j + 1] = _mm512_unpackhi_epi64(fours[j], fours[4 + j]);
    }
}

/* Lane l: the piece of element l * apart; none behind the last. */
static inline __m512i fv_value_pieces_gather(const char *pieces, int64_t stride, int32_t apart, int32_t num)
{
    __m512i all = _mm512_setzero_si512();
    if (num > 0) all = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(const void *)pieces));
    if (num > apart)
        all = _mm512_inserti32x4(all, _mm_loadu_si128((const __m128i *)(const void *)(pieces + apart * stride)), 1);
    if (num > 2 * apart)
        all = _mm512_inserti32x4(all, _mm_loadu_si128((const __m128i *)(const void *)(pieces + 2 * apart * stride)), 2);
    if (num > 3 * apart)
        all = _mm512_inserti32x4(all, _mm_loadu_si128((const __m128i *)(const void *)(pieces + 3 * apart * stride)), 3);
    return all;
}

/* A part of the rows of eight keys, elements of two bytes. */
FV_ALWAYS_INLINE void fv_value_words_to_part(char *to, int64_t row_stride, const char *pieces, int64_t stride,
                                             int32_t num)
{
    __m512i rows[8];
    FV_UNROLL
    for (int32_t j = 0; j < 8; j++) rows[j] = fv_value_pieces_gather(pieces + j * stride, stride, 8, num - j);
    fv_words_turn_eight(rows);
    FV_UNROLL
    for (int32_t j = 0; j < 8; j++) _mm512_storeu_si512(to + j * row_stride, rows[j]);
}

/* The same of 16 keys whose words of an element lie side by side, a whole part. */
FV_ALWAYS_INLINE void fv_value_words_to_whole_part(char *to, int64_t row_stride, const char *words, int64_t stride)
{
    __m512i rows[2][8]; /* of elements 0 to 15 and 16 to 31; lanes: keys 0 to 7 and 8 to 15 of j, then of 8 + j */
    FV_UNROLL
    for (int32_t half = 0; half < 2; half++) {
        FV_UNROLL
        for (int32_t j = 0; j < 8; j++) {
            const char *at = words + (half * 16 + j) * stride;
            const __m256i low = _mm256_loadu_si256((const __m256i *)(const void *)at);
            const __m256i high = _mm256_loadu_si256((const __m256i *)(const void *)(at + 8 * stride));
            rows[half][j] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
        }
        fv_words_turn_eight(rows[half]);
    }
    FV_UNROLL
    for (int32_t j = 0; j < 8; j++) {
        _mm512_storeu_si512(to + j * row_stride, _mm512_shuffle_i32x4(rows[0][j], rows[1][j], 0x88));
        _mm512_storeu_si512(to + (8 + j) * row_stride, _mm512_shuffle_i32x4(rows[0][j], rows[1][j], 0xdd));
    }
}

/* A part of the rows of 16 keys, elements of a byte. */
FV_ALWAYS_INLINE void fv_value_bytes_to_part(char *to, int64_t row_stride, const char *pieces, int64_t stride,
                                             int32_t num)
{
    __m512i low[8], high[8]; /* of two elements each: keys 0 to 7, 8 to 15 */
    FV_UNROLL
    for (int32_t j = 0; j < 8; j++) {
        const int32_t d = 2 * j;
        const __m512i even = fv_value_pieces_gather(pieces + d * stride, stride, 16, num - d);
        const __m512i odd = fv_value_pieces_gather(pieces + (d + 1) * stride, stride, 16, num - d - 1);
        low[j] = _mm512_unpacklo_epi8(even, odd);
        high[j] = _mm512_unpackhi_epi8(even, odd);
    }
    fv_words_turn_eight(low);
    fv_words_turn_eight(high);
    FV_UNROLL
    for (int32_t j = 0; j < 8; j++) {
        _mm512_storeu_si512(to + j * row_stride, low[j]);
        _mm512_storeu_si512(to + (8 + j) * row_stride, high[j]);
    }
}

/* Rows of V of `num` elements: pieces[0] is that of element 0 of the first keys, pieces[1] of the eight behind these where elements
 * have two bytes; those of an element and the next are `stride` bytes apart. */
static inline void fv_value_pieces_to_rows(const fv_row_target *target, const char *const pieces[2], int64_t stride,
                                           int32_t num, int64_t element_bytes)
{
    const int32_t of_part = (int32_t)(FV_PART_BYTES / element_bytes);
    char *part = target->to;
    for (int32_t d = 0; d < num; d += of_part, part += target->part_stride) {
        const int64_t row_stride = target->row_stride;
        if (element_bytes == 1) {
            fv_value_bytes_to_part(part, row_stride, pieces[0] + d * stride, stride, num - d);
            continue;
        }
        if (pieces[1] == pieces[0] + FV_PIECE_BYTES && num - d >= of_part) {
            fv_value_words_to_whole_part(part, row_stride, pieces[0] + d * stride, stride);
            continue;
        }
        fv_value_words_to_part(part, row_stride, pieces[0] + d * stride, stride, num - d);
        fv_value_words_to_part(part + 8 * row_stride, row_stride, pieces[1] + d * stride, stride, num - d);
    }
}

#else

static inline void fv_key_pieces_to_rows(const fv_row_target *target, const char *pieces, int64_t stride, int32_t num)
{
    for (int32_t p = 0; p < fv_round_up(num, FV_PIECES_OF_PART); p++) {
        char *to = target->to + p / FV_PIECES_OF_PART * target->part_stride + p % FV_PIECES_OF_PART * FV_PIECE_BYTES;
        for (int32_t key = 0; key < FV_PIECE_KEYS; key++, to += target->row_stride) {
            if (p < num)
                memcpy(to, pieces + p * stride + key * FV_PIECE_BYTES, FV_PIECE_BYTES);
            else
                memset(to, 0, FV_PIECE_BYTES);
        }
    }
}

/* element_bytes: known when it is compiled. */
FV_ALWAYS_INLINE void fv_value_pieces_to_rows_as(const fv_row_target *target, const char *const pieces[2],
                                                 int64_t stride, int32_t num, const int32_t element_bytes)
{
    const int32_t of_part = FV_PART_BYTES / element_bytes, x = FV_PIECE_BYTES / element_bytes;
    for (int32_t d = 0; d < fv_round_up(num, of_part); d++) {
        char *to = target->to + d / of_part * target->part_stride + d % of_part * element_bytes;
        for (int32_t key = 0; key < FV_PIECE_KEYS; key++, to += target->row_stride) {
            if (d < num)
                memcpy(to, pieces[key / x] + d * stride + key % x * element_bytes, (size_t)element_bytes);
            else
                memset(to, 0, (size_t)element_bytes);
        }
    }
}

static inline void fv_value_pieces_to_rows(const fv_row_target *target, const char *const pieces[2], int64_t stride,
                                           int32_t num, int64_t element_bytes)
{
    if (element_bytes == 1)
        fv_value_pieces_to_rows_as(target, pieces, stride, num, 1);
    else
        fv_value_pieces_to_rows_as(target, pieces, stride, num, 2);
}

#endif

/* Rows of `size` elements of K, or is_value of V: pieces[0] is the first of the first key, pieces[1] of the ninth. */
static inline void fv_pieces_to_rows(const fv_row_target *target, const fv_kv_plane *plane, const char *const pieces[2],
                                     int32_t size, int64_t element_bytes, int32_t is_value)
{
    if (is_value)
        fv_value_pieces_to_rows(target, pieces, plane->element_stride, size, element_bytes);
    else
        fv_key_pieces_to_rows(target, pieces[0], plane->element_chunk_stride,
                              (int32_t)(size * element_bytes / FV_PIECE_BYTES));
}

#endif
