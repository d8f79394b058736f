/* Tensor maps: what a CUtensorMap of the emulated driver holds, and the copy of a box of one to shared memory and back. Of the
 * driver's modes those that the kernels use: elements of 16 bits, tiles without interleave, rows of 128 bytes swizzled. */
#ifndef CUDA_EMULATOR_TENSOR_MAP_H
#define CUDA_EMULATOR_TENSOR_MAP_H

#include <cuda.h>
#include <stddef.h>
#include <stdint.h>

/* cuTensorMapEncodeTiled: as the driver has it, CUDA_ERROR_INVALID_VALUE for what it refuses. */
CUresult tensor_map_encode(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *memory,
                           const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                           const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                           CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill);

/* A box from element (x, y, z) on to a shared address, of a block whose `shared_bytes` at `shared` begin at address `first`;
 * zeros for what is outside of the tensor. `stores`: the other way, but for what is outside. How many bytes of shared
 * memory that are, or what is wrong. */
const char *tensor_map_copy(int32_t *bytes, char *shared, uint32_t first, uint32_t shared_bytes, uint32_t address,
                            const void *map, const int32_t (&at)[3], bool stores = false);

#endif
