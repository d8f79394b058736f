#include "cuda_emulator/matrix_of_warp.h"

#include <string.h>

/* --- matrices in shared memory -------------------------------------------------------------------------------- */

typedef struct matrix_load {
    uint32_t *r;
    int32_t num;
    uint32_t address;
    bool is_transposed;
} matrix_load;

/* Element (row, column) of an 8x8 matrix is half of the register of one lane: lane and half. */
static void place_of(int32_t *lane, int32_t *half, int32_t row, int32_t column, bool is_transposed)
{
    const int32_t line = is_transposed ? column : row, at = is_transposed ? row : column;
    *lane = line * 4 + at / 2;
    *half = at % 2;
}

static void load_matrices(void *const *lanes, uint32_t)
{
    const matrix_load *first = (const matrix_load *)lanes[0];
    for (int32_t matrix = 0; matrix < first->num; matrix++) {
        for (int32_t row = 0; row < 8; row++) {
            const uint16_t *elements = (const uint16_t *)emu_shared_at(
                ((const matrix_load *)lanes[matrix * 8 + row])->address, 16, 16);
            for (int32_t column = 0; column < 8; column++) {
                int32_t lane, half;
                place_of(&lane, &half, row, column, first->is_transposed);
                uint16_t *in_register = (uint16_t *)&((const matrix_load *)lanes[lane])->r[matrix] + half;
                memcpy(in_register, &elements[column], 2);
            }
        }
    }
}

void emu_ldmatrix(uint32_t *r, int32_t num, uint32_t address, bool is_transposed)
{
    uint32_t loaded[4];
    matrix_load load = {loaded, num, address, is_transposed};
    emu_meet(~0u, load_matrices, &load, "ldmatrix");
    memcpy(r, loaded, (size_t)num * 4);
}

static void transpose(void *const *lanes, uint32_t)
{
    uint16_t matrix[8][8];
    for (int32_t lane = 0; lane < EMU_LANES; lane++) memcpy(&matrix[lane / 4][lane % 4 * 2], lanes[lane], 4);
    for (int32_t lane = 0; lane < EMU_LANES; lane++) {
        const uint16_t two[2] = {matrix[lane % 4 * 2][lane / 4], matrix[lane % 4 * 2 + 1][lane / 4]};
        memcpy(lanes[lane], two, 4);
    }
}

uint32_t emu_movmatrix_trans(uint32_t two)
{
    emu_meet(~0u, transpose, &two, "movmatrix");
    return two;
}

/* --- products ------------------------------------------------------------------------------------------------------- */

typedef struct product {
    float *d;
    const uint32_t *a;
    uint32_t b[2];
} product;

template <class T> static float widened(uint32_t two, int32_t half);
template <> float widened<__nv_bfloat16>(uint32_t two, int32_t half)
{
    return __uint_as_float(half ? two & 0xffff0000u : two << 16);
}
template <> float widened<__half>(uint32_t two, int32_t half)
{
#ifdef __F16C__
    return (float)__builtin_ia32_vcvtph2ps((__attribute__((vector_size(16))) short){(short)(two >> 16 * half)})[0];
#else
    return __half2float(__half(__half_raw{(uint16_t)(two >> 16 * half)}));
#endif
}

/* Products of 16-bit numbers are exact in fp32. */
template <class T> static void multiply(void *const *lanes, uint32_t)
{
    float a[16][16], b[16][8], d[16][8];
    for (int32_t lane = 0; lane < EMU_LANES; lane++) {
        const product *of = (const product *)lanes[lane];
        const int32_t row = lane / 4, column = lane % 4 * 2;
        for (int32_t i = 0; i < 4; i++)
            for (int32_t half = 0; half < 2; half++) {
                a[row + i % 2 * 8][column + i / 2 * 8 + half] = widened<T>(of->a[i], half);
                d[row + i / 2 * 8][column + half] = of->d[i / 2 * 2 + half];
                b[column + i / 2 * 8 + half][row] = widened<T>(of->b[i / 2], half);
            }
    }
    for (int32_t m = 0; m < 16; m++)
        for (int32_t k = 0; k < 16; k++)
            for (int32_t n = 0; n < 8; n++) d[m][n] += a[m][k] * b[k][n];
    for (int32_t lane = 0; lane < EMU_LANES; lane++) {
        float *of = ((const product *)lanes[lane])->d;
        const int32_t row = lane / 4, column = lane % 4 * 2;
        for (int32_t i = 0; i < 4; i++) of[i] = d[row + i / 2 * 8][column + i % 2];
    }
}

void emu_mma_bf16(float *d, const uint32_t *a, uint32_t b0, uint32_t b1)
{
    product mine = {d, a, {b0, b1}};
    emu_meet(~0u, multiply<__nv_bfloat16>, &mine, "mma");
}

void emu_mma_f16(float *d, const uint32_t *a, uint32_t b0, uint32_t b1)
{
    product mine = {d, a, {b0, b1}};
    emu_meet(~0u, multiply<__half>, &mine, "mma");
}
