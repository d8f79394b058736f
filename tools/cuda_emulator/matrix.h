/* Products of a warp's share of a wgmma: 16 rows of the 64, N columns, 16 deep, fp32 sums; and the operands as descriptors
 * and registers name them (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions"). */
#ifndef CUDA_EMULATOR_MATRIX_H
#define CUDA_EMULATOR_MATRIX_H

#include <stddef.h>
#include <stdint.h>

enum { MATRIX_ROWS = 16, MATRIX_DEPTH = 16, MATRIX_MOST_COLUMNS = 256 };

typedef enum matrix_type { MATRIX_BF16, MATRIX_F16 } matrix_type;

/* [row][k], and [k][column], widened. */
typedef struct matrix_left {
    float of[MATRIX_ROWS][MATRIX_DEPTH];
} matrix_left;
typedef struct matrix_right {
    float of[MATRIX_DEPTH][MATRIX_MOST_COLUMNS];
} matrix_right;
typedef struct matrix_sum {
    float of[MATRIX_ROWS][MATRIX_MOST_COLUMNS];
} matrix_sum;

/* A block's shared memory: what lies at shared addresses first .. end - 1. */
typedef struct matrix_memory {
    const char *bytes;
    uint32_t first, end;
} matrix_memory;

/* Rows first_row .. of a left operand in shared memory, as the descriptor has it. NULL, or what is wrong. */
const char *matrix_load_left(matrix_left *left, const matrix_memory *memory, matrix_type type, uint64_t descriptor,
                             int32_t first_row);

/* The same of a lane's registers: it has rows l / 4 and l / 4 + 8. */
void matrix_set_left(matrix_left *left, matrix_type type, const uint32_t (&a)[4], int32_t lane);

/* A right operand of so many columns; transposed: the rows in memory are the depth, not the columns. */
const char *matrix_load_right(matrix_right *right, const matrix_memory *memory, matrix_type type, uint64_t descriptor,
                              int32_t columns, bool is_transposed);

/* sum = left right (+ sum). */
void matrix_multiply(matrix_sum *sum, const matrix_left *left, const matrix_right *right, int32_t columns, bool adds);

/* Where element i of a lane's registers lies in the warp's sum. */
static inline int32_t matrix_row_of(int32_t lane, int32_t i) { return lane / 4 + i / 2 % 2 * 8; }
static inline int32_t matrix_column_of(int32_t lane, int32_t i) { return i / 4 * 8 + lane % 4 * 2 + i % 2; }

#endif
