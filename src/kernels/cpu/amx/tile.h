/* The tile operations of the AMX kernels: eight tiles of 16 rows of 64 bytes.
 *
 *   A  16 rows x 32 bf16        a row of A is a row: of keys, of weights
 *   B  16 rows x 16 pairs bf16  row k, pair n: elements 2k and 2k + 1 of column n
 *   C  16 rows x 16 fp32        C += A B
 *
 * Natively each is one instruction. Compiled with FV_TILES_EMULATED they are plain C with the arithmetic of the
 * instruction (Intel's manual, TDPBF16PS): products of even elements and those of odd ones are summed apart, from 0, in
 * order, then both sums together, then that to C; each step is rounded to nearest even, denormal numbers count as 0 and
 * become 0, MXCSR is not asked. Only a product below the smallest normal number may differ in its last bits.
 *
 * Tile numbers are literals, for they are part of an instruction: hence macros. `tiles` is the fv_tiles of the caller.
 * A barrier for the compiler goes with each memory operation: tiles are filled from memory that other code has just
 * written. */
#ifndef FV_KERNELS_CPU_AMX_TILE_H
#define FV_KERNELS_CPU_AMX_TILE_H

#include <string.h>

#include "kernels/cpu/simd.h"

enum {
    FV_TILE_ROWS = 16,
    FV_TILE_ROW_BYTES = 64,
    FV_TILE_BYTES = FV_TILE_ROWS * FV_TILE_ROW_BYTES,
    FV_TILE_DEPTH = 32, /* bf16 of a row of A */
    FV_TILE_COLUMNS = 16,
};

/* fv_tile_load or fv_tile_store of tile t, 0 to 3, which need not be a literal. */
#define FV_TILE_OF_FOUR(instruction, tiles, t, at, stride) \
    do {                                                   \
        switch (t) {                                       \
        case 0: instruction(tiles, 0, at, stride); break;  \
        case 1: instruction(tiles, 1, at, stride); break;  \
        case 2: instruction(tiles, 2, at, stride); break;  \
        default: instruction(tiles, 3, at, stride); break; \
        }                                                  \
    } while (0)

/* Tiles 3 to 6 have `few_rows` rows, the others 16. */
static inline int32_t fv_tile_rows_of(int32_t t, int32_t few_rows) { return t >= 3 && t < 7 ? few_rows : FV_TILE_ROWS; }

/* Of what stands between products, again and again in straight lines: inlined. Emulated it is out of line, for kernels
 * would take minutes to compile. */
#if !defined(FV_TILES_EMULATED)
#define FV_BETWEEN_PRODUCTS FV_ALWAYS_INLINE
#else
#define FV_BETWEEN_PRODUCTS __attribute__((noinline, unused)) static
#endif

#if !defined(FV_TILES_EMULATED)

/* The tiles are the thread's; a call that uses them configures and releases them. */
typedef struct fv_tiles {
    int32_t is_configured;
} fv_tiles;

/* The operand of LDTILECFG. */
typedef struct fv_tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} fv_tile_config;

static inline void fv_tiles_configure(fv_tiles *tiles, int32_t few_rows)
{
    fv_tile_config config = {.palette = 1};
    for (int32_t i = 0; i < 8; i++) {
        config.row_bytes[i] = FV_TILE_ROW_BYTES;
        config.rows[i] = (uint8_t)fv_tile_rows_of(i, few_rows);
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(config) : "memory");
    tiles->is_configured = 1;
}

static inline void fv_tiles_release(fv_tiles *tiles)
{
    __asm__ volatile("tilerelease" : : : "memory");
    tiles->is_configured = 0;
}

#define fv_tile_zero(tiles, t)                       \
    do {                                             \
        (void)(tiles);                               \
        __asm__ volatile("tilezero %%tmm" #t : : :); \
    } while (0)

/* Rows `stride` bytes apart; fast where each lies in one cache line. */
#define fv_tile_load(tiles, t, at, stride)                                 \
    do {                                                                   \
        (void)(tiles);                                                     \
        __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t                   \
                         :                                                 \
                         : "r"((const void *)(at)), "r"((int64_t)(stride)) \
                         : "memory");                                      \
    } while (0)

/* The same for lines that pass L1 by: a hint, which keeps what else is there. */
#define fv_tile_load_past(tiles, t, at, stride)                            \
    do {                                                                   \
        (void)(tiles);                                                     \
        __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm" #t                 \
                         :                                                 \
                         : "r"((const void *)(at)), "r"((int64_t)(stride)) \
                         : "memory");                                      \
    } while (0)

#define fv_tile_store(tiles, t, at, stride)                          \
    do {                                                             \
        (void)(tiles);                                               \
        __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)"         \
                         :                                           \
                         : "r"((void *)(at)), "r"((int64_t)(stride)) \
                         : "memory");                                \
    } while (0)

/* C += A B. */
#define fv_tile_dot(tiles, c, a, b)                                             \
    do {                                                                        \
        (void)(tiles);                                                          \
        __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c : : :); \
    } while (0)

#else

typedef struct fv_tiles {
    uint32_t rows[8][FV_TILE_ROWS][FV_TILE_COLUMNS];
    int32_t num_rows[8];
} fv_tiles;

typedef float fv_tile_floats __attribute__((vector_size(FV_TILE_ROW_BYTES)));
typedef uint32_t fv_tile_words __attribute__((vector_size(FV_TILE_ROW_BYTES)));

static inline void fv_tiles_configure(fv_tiles *tiles, int32_t few_rows)
{
    memset(tiles->rows, 0, sizeof(tiles->rows));
    for (int32_t i = 0; i < 8; i++) tiles->num_rows[i] = fv_tile_rows_of(i, few_rows);
}

static inline void fv_tiles_release(fv_tiles *tiles) { memset(tiles, 0xff, sizeof(*tiles)); }

static inline void fv_tile_zero(fv_tiles *tiles, int32_t t) { memset(tiles->rows[t], 0, FV_TILE_BYTES); }

static inline void fv_tile_load(fv_tiles *tiles, int32_t t, const void *at, int64_t stride)
{
    for (int32_t row = 0; row < tiles->num_rows[t]; row++)
        memcpy(tiles->rows[t][row], (const char *)at + row * stride, FV_TILE_ROW_BYTES);
}

static inline void fv_tile_load_past(fv_tiles *tiles, int32_t t, const void *at, int64_t stride)
{
    fv_tile_load(tiles, t, at, stride);
}

static inline void fv_tile_store(const fv_tiles *tiles, int32_t t, void *at, int64_t stride)
{
    for (int32_t row = 0; row < tiles->num_rows[t]; row++)
        memcpy((char *)at + row * stride, tiles->rows[t][row], FV_TILE_ROW_BYTES);
}

/* Denormal numbers become 0. */
FV_ALWAYS_INLINE fv_tile_floats fv_tile_flush(fv_tile_floats value)
{
    const fv_tile_words bits = (fv_tile_words)value;
    return (fv_tile_floats)(bits & (fv_tile_words)((bits & 0x7f800000u) != 0));
}

FV_BETWEEN_PRODUCTS void fv_tile_dot(fv_tiles *tiles, int32_t c, int32_t a, int32_t b)
{
    fv_tile_floats even[FV_TILE_ROWS], odd[FV_TILE_ROWS];
    for (int32_t k = 0; k < FV_TILE_ROWS; k++) {
        fv_tile_words pairs;
        memcpy(&pairs, tiles->rows[b][k], sizeof(pairs));
        even[k] = fv_tile_flush((fv_tile_floats)(pairs << 16));
        odd[k] = fv_tile_flush((fv_tile_floats)(pairs & 0xffff0000u));
    }
    for (int32_t row = 0; row < tiles->num_rows[c]; row++) {
        fv_tile_floats even_sum = {0}, odd_sum = {0}, sum;
        for (int32_t k = 0; k < FV_TILE_ROWS; k++) {
            const fv_tile_words pair = (fv_tile_words){0} + tiles->rows[a][row][k];
            even_sum = fv_tile_flush(even_sum + fv_tile_flush((fv_tile_floats)(pair << 16)) * even[k]);
            odd_sum = fv_tile_flush(odd_sum + fv_tile_flush((fv_tile_floats)(pair & 0xffff0000u)) * odd[k]);
        }
        memcpy(&sum, tiles->rows[c][row], sizeof(sum));
        sum = fv_tile_flush(fv_tile_flush(sum) + fv_tile_flush(even_sum + odd_sum));
        memcpy(tiles->rows[c][row], &sum, sizeof(sum));
    }
}

#endif
#endif
