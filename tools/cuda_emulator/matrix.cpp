#include "cuda_emulator/matrix.h"

#include <cuda_fp16.h>
#include <string.h>

#include "cuda_emulator/swizzle.h"

namespace
{

enum { CHUNK = 8 /* elements of 16 bytes, which the swizzle leaves together */ };

/* A descriptor's fields, in bytes. */
typedef struct operand {
    uint32_t address, leading, stride;
} operand;

const char *read_descriptor(operand *out, uint64_t descriptor)
{
    out->address = (uint32_t)(descriptor & 0x3fff) << 4;
    out->leading = (uint32_t)(descriptor >> 16 & 0x3fff) << 4;
    out->stride = (uint32_t)(descriptor >> 32 & 0x3fff) << 4;
    if (descriptor >> 62 != 1) return "a matrix descriptor of another swizzle than that of 128 bytes";
    if ((descriptor >> 49 & 7) != 0) return "a matrix descriptor with a base offset, which is not emulated";
    return NULL;
}

/* The bits of fp16 as fp32: a table, for the processor may have no instruction. */
struct widened_halves {
    float of[1 << 16];
    widened_halves()
    {
        for (uint32_t bits = 0; bits < 1 << 16; bits++) {
            __half_raw half;
            half.x = (uint16_t)bits;
            of[bits] = __half2float(half);
        }
    }
};
const widened_halves halves;

void widen_chunk(float (&to)[CHUNK], const char *from, matrix_type type)
{
    uint16_t bits[CHUNK];
    memcpy(bits, from, sizeof(bits));
    if (type == MATRIX_F16) {
        for (int i = 0; i < CHUNK; i++) to[i] = halves.of[bits[i]];
        return;
    }
    uint32_t words[CHUNK];
    for (int i = 0; i < CHUNK; i++) words[i] = (uint32_t)bits[i] << 16;
    memcpy(to, words, sizeof(words));
}

/* The chunk at an address before the swizzle. */
const char *load_chunk(float (&to)[CHUNK], const matrix_memory *memory, uint32_t address, matrix_type type)
{
    const uint32_t at = swizzle_128(address);
    if (at < memory->first || at + 16 > memory->end)
        return "a matrix descriptor of what is not the block's shared memory";
    widen_chunk(to, memory->bytes + (at - memory->first), type);
    return NULL;
}

} // namespace

/* Rows of the depth: of eight each 128 bytes after the other, the next eight a stride further on. */
static uint32_t row_address(const operand *of, int32_t row, int32_t k)
{
    return of->address + (uint32_t)(row / 8) * of->stride + (uint32_t)(row % 8) * 128 + (uint32_t)k * 2;
}

const char *matrix_load_left(matrix_left *left, const matrix_memory *memory, matrix_type type, uint64_t descriptor,
                             int32_t first_row)
{
    operand of;
    const char *fault = read_descriptor(&of, descriptor);
    for (int32_t row = 0; row < MATRIX_ROWS && !fault; row++) {
        for (int32_t k = 0; k < MATRIX_DEPTH && !fault; k += CHUNK) {
            float chunk[CHUNK] = {};
            fault = load_chunk(chunk, memory, row_address(&of, first_row + row, k), type);
            memcpy(&left->of[row][k], chunk, sizeof(chunk));
        }
    }
    return fault;
}

void matrix_set_left(matrix_left *left, matrix_type type, const uint32_t (&a)[4], int32_t lane)
{
    float of[CHUNK];
    widen_chunk(of, (const char *)a, type);
    for (int i = 0; i < CHUNK; i++) /* a[0], a[1]: row, row + 8; a[2], a[3]: the same, depth + 8 */
        left->of[lane / 4 + i / 2 % 2 * 8][lane % 4 * 2 + i / 4 * 8 + i % 2] = of[i];
}

const char *matrix_load_right(matrix_right *right, const matrix_memory *memory, matrix_type type, uint64_t descriptor,
                              int32_t columns, bool is_transposed)
{
    operand of;
    const char *fault = read_descriptor(&of, descriptor);
    if (is_transposed) { /* rows of 64 columns, eight of the depth a stride, the next 64 columns a leading offset apart */
        for (int32_t k = 0; k < MATRIX_DEPTH && !fault; k++) {
            for (int32_t column = 0; column < columns && !fault; column += CHUNK) {
                const uint32_t at = row_address(&of, k, column % 64) + (uint32_t)(column / 64) * of.leading;
                float chunk[CHUNK] = {};
                fault = load_chunk(chunk, memory, at, type);
                memcpy(&right->of[k][column], chunk, sizeof(chunk));
            }
        }
        return fault;
    }
    for (int32_t column = 0; column < columns && !fault; column++) {
        for (int32_t k = 0; k < MATRIX_DEPTH && !fault; k += CHUNK) {
            float chunk[CHUNK] = {};
            fault = load_chunk(chunk, memory, row_address(&of, column, k), type);
            for (int i = 0; i < CHUNK; i++) right->of[k + i][column] = chunk[i];
        }
    }
    return fault;
}

void matrix_multiply(matrix_sum *sum, const matrix_left *left, const matrix_right *right, int32_t columns, bool adds)
{
    enum { WIDE = 16, ROWS = 4 /* that a part of the right operand is loaded for */ };
    typedef float wide __attribute__((vector_size(WIDE * sizeof(float)), aligned(sizeof(float)), may_alias));
    for (int32_t row = 0; row < MATRIX_ROWS; row += ROWS) {
        for (int32_t column = 0; column < columns; column += WIDE) {
            wide of[ROWS] = {};
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++)
                if (adds) of[r] = *(const wide *)&sum->of[row + r][column];
            for (int32_t k = 0; k < MATRIX_DEPTH; k++) {
                const wide b = *(const wide *)&right->of[k][column];
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; r++) of[r] += left->of[row + r][k] * b;
            }
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++) *(wide *)&sum->of[row + r][column] = of[r];
        }
    }
}
