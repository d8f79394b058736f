/* Products with weights that stay as a model file stores them: Q4_0 and so on, F16, BF16.
 *
 * A decode step reads every weight once, so bytes are time. Weights are unpacked in registers, for up to four rows
 * of X at once; nothing is expanded in memory. For more rows some of them are integers in the first cache for a while.
 *
 *   W   blocks of 32 small integers q with a scale (and a minimum), or of 256 with 8 or 16 of them (gguf.h)
 *   X   each 32 values become 16-bit integers with a scale of their own: scale = max |x| / 32767
 *   y   = sum over blocks of  scale_w scale_x (q . x)  +  minimum_w sum(x)        q . x is exact
 *
 * 8-bit integers, the usual choice for X, would halve the instructions, and lose 256 times as much. Weights of 16-bit
 * floats are multiplied with X as it is.
 *
 * Eight rows of W lie side by side, a stripe, so that each lane of a vector is a row of its own: no sums over lanes,
 * scales of eight rows in one load. Bits and bytes are those of the file, in another order:
 *
 *   file     | s0 q0 q0 q0 q0 | s1 q1 ... (row 0)  | s0 q0 q0 ... (row 1)   s: 16 bits, a scale or a minimum
 *   stripe   | s0 of 8 rows | first q0 of 8 rows | second q0 of 8 rows | ...   q: a word of 32 bits
 *
 * One table of kernels for each instruction set. A result depends on the row of W, the row of X and the table alone:
 * not on how many rows there are, nor on threads. */
#ifndef FV_ENGINE_STORED_H
#define FV_ENGINE_STORED_H

#include "core/cpu.h"
#include "core/error.h"

enum {
    FV_STORED_ROWS = 8,     /* of a stripe */
    FV_STORED_X_BLOCK = 32, /* values of X that share a scale */
    FV_STORED_MAX_X = 4,    /* rows of X of a call */
    FV_STORED_MANY_X = 256, /* of a call for many rows, and of W: */
    FV_STORED_MANY_ROWS = 192,
};

/* Where a block of a type has its parts; offsets and sizes in bytes of one row's block. */
typedef struct fv_stored_layout {
    int32_t type;   /* fv_gguf_type */
    int32_t values; /* of a block */
    int32_t block_bytes;
    int32_t scales_at, num_scales; /* units of 16 bits; they come first in a stripe */
    int32_t words_at, num_words;   /* units of 32 bits */
} fv_stored_layout;

/* NULL: rows of this type are not kept as stored. Static memory. */
const fv_stored_layout *fv_stored_find_layout(int32_t type);

/* Bytes of a stripe, whether or not all of its rows are there. */
size_t fv_stored_stripe_bytes(const fv_stored_layout *layout, int64_t in_features);

/* A stripe of rows that lie one after the other as in the file; num_rows is 1 to 8, the others become zeros. */
void fv_stored_pack_stripe(uint8_t *stripe, const uint8_t *rows, int64_t num_rows, int64_t in_features,
                           const fv_stored_layout *layout);

/* `num_blocks` blocks of one row of a stripe, as in the file. */
void fv_stored_unpack_blocks(uint8_t *blocks, const uint8_t *stripe, int32_t row, int64_t first_block,
                             int64_t num_blocks, const fv_stored_layout *layout);

/* Rows of W. */
typedef struct fv_stored_rows {
    const fv_stored_layout *layout;
    const uint8_t *stripes;
    int64_t num_rows;
    int64_t in_features;
} fv_stored_rows;

/* One row of X. Each four integers are elements 0, 2, 1, 3: kernels take even and odd bytes of words. */
typedef struct fv_stored_x {
    const float *values; /* [in_features] */
    int16_t *integers;   /* [in_features] */
    float *scales;       /* [in_features / 32] */
    float *sums;         /* [in_features / 32] scale * sum of the integers */
} fv_stored_x;

/* y[i * y_stride + j] = x[i] . w[j]; num_x is 1 to FV_STORED_MAX_X. */
typedef void (*fv_stored_multiply_fn)(float *y, int64_t y_stride, const fv_stored_x *x, int32_t num_x,
                                      const fv_stored_rows *w);

/* The same, to the bit, for up to FV_STORED_MANY_X rows of X and FV_STORED_MANY_ROWS of W; `memory` has the table's
 * many_bytes, at an address that is a multiple of 64. */
typedef void (*fv_stored_multiply_many_fn)(float *y, int64_t y_stride, const fv_stored_x *x, int64_t num_x,
                                           const fv_stored_rows *w, void *memory);

typedef struct fv_stored_kernel {
    int32_t type;
    fv_stored_multiply_fn multiply;
    fv_stored_multiply_many_fn multiply_many; /* NULL: as few rows */
    int64_t min_many_x;                       /* rows of X from which on it is faster */
} fv_stored_kernel;

typedef struct fv_stored_table {
    fv_isa isa;
    const char *name;
    /* Fills integers, scales and sums from values, for types of integers; in_features is a multiple of 32. A value
     * that is not finite leaves no product with its block finite. NULL: `values` are enough. */
    void (*load_x)(const fv_stored_x *x, int64_t in_features);
    size_t many_bytes; /* 0: there is no multiply_many */
    /* out [num_rows, in_features], the same values as fv_dequantize_row's. NULL: the kernels serve many rows themselves. */
    void (*expand)(float *out, const fv_stored_rows *w);
    const fv_stored_kernel *kernels;
    int32_t num_kernels;
} fv_stored_table;

/* The strongest table up to `limit`. Static memory. */
const fv_stored_table *fv_stored_find_table(fv_isa limit);

/* The kernel of a type that has a layout. */
const fv_stored_kernel *fv_stored_find_kernel(const fv_stored_table *table, int32_t type);

extern const fv_stored_table fv_stored_table_portable;
#if defined(__x86_64__)
extern const fv_stored_table fv_stored_table_avx2;
#endif

/* NULL: not on this CPU, which has AVX-512. */
const fv_stored_table *fv_stored_find_vnni(void);

#endif
