/* Instructions of a warp on matrices of 16-bit elements: ldmatrix, stmatrix, movmatrix, mma. */
#ifndef CUDA_EMULATOR_MATRIX_OF_WARP_H
#define CUDA_EMULATOR_MATRIX_OF_WARP_H

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda_emulator/device_code.h"

/* `num` matrices to r[num]. */
void emu_ldmatrix(uint32_t *r, int32_t num, uint32_t address, bool is_transposed);
uint32_t emu_movmatrix_trans(uint32_t two);

/* d += a b of 16 x 8, 16 deep. */
void emu_mma_bf16(float *d, const uint32_t *a, uint32_t b0, uint32_t b1);
void emu_mma_f16(float *d, const uint32_t *a, uint32_t b0, uint32_t b1);

template <class T> inline void emu_mma(float *d, const uint32_t *a, uint32_t b0, uint32_t b1);
template <> inline void emu_mma<__nv_bfloat16>(float *d, const uint32_t *a, uint32_t b0, uint32_t b1)
{
    emu_mma_bf16(d, a, b0, b1);
}
template <> inline void emu_mma<__half>(float *d, const uint32_t *a, uint32_t b0, uint32_t b1)
{
    emu_mma_f16(d, a, b0, b1);
}

#endif
