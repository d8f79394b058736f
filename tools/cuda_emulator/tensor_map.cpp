#include "cuda_emulator/tensor_map.h"

#include <string.h>

#include "cuda_emulator/swizzle.h"

namespace
{

enum { RANK = 3, ELEMENT_BYTES = 2, ROW_BYTES = 128, MAGIC = 0x4d50414d };

/* In the driver's 128 bytes. */
typedef struct tensor_map {
    uint32_t magic;
    uint32_t box[RANK];
    char *memory;
    uint64_t sizes[RANK];
    uint64_t strides[RANK - 1]; /* bytes */
} tensor_map;
static_assert(sizeof(tensor_map) <= sizeof(CUtensorMap), "the driver's own type");

bool is_between(uint64_t value, uint64_t least, uint64_t most) { return value >= least && value <= most; }

} // namespace

CUresult tensor_map_encode(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *memory,
                           const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                           const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                           CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill)
{
    const bool is_16_bits = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16 || type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    if (!is_16_bits || rank != RANK || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE ||
        swizzle != CU_TENSOR_MAP_SWIZZLE_128B || fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
        return CUDA_ERROR_NOT_SUPPORTED;
    if ((uintptr_t)map % 64 != 0 || (uintptr_t)memory % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
    tensor_map own = {.magic = MAGIC, .box = {}, .memory = (char *)memory, .sizes = {}, .strides = {}};
    for (int i = 0; i < RANK; i++) {
        if (!is_between(sizes[i], 1, (uint64_t)1 << 32) || !is_between(box[i], 1, 256) || steps[i] != 1)
            return CUDA_ERROR_INVALID_VALUE;
        own.sizes[i] = sizes[i];
        own.box[i] = box[i];
    }
    for (int i = 0; i < RANK - 1; i++) {
        if (strides[i] % 16 != 0 || strides[i] >= (uint64_t)1 << 40) return CUDA_ERROR_INVALID_VALUE;
        own.strides[i] = strides[i];
    }
    if (box[0] * ELEMENT_BYTES > ROW_BYTES || box[0] * ELEMENT_BYTES % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
    memset(map, 0, sizeof(*map));
    memcpy(map, &own, sizeof(own));
    return CUDA_SUCCESS;
}

const char *tensor_map_copy(int32_t *bytes, char *shared, uint32_t first, uint32_t shared_bytes, uint32_t address,
                            const void *map, const int32_t (&at)[3], bool stores)
{
    tensor_map own;
    memcpy(&own, map, sizeof(own));
    if (own.magic != MAGIC) return "a copy by what is no tensor map";
    const uint32_t num_rows = own.box[1] * own.box[2], end = address + num_rows * ROW_BYTES;
    if (own.box[0] * ELEMENT_BYTES != ROW_BYTES) return "boxes of rows of fewer than 128 bytes are not emulated";
    if (address % ROW_BYTES != 0) return "a box to a shared address that is no multiple of 128";
    if (address < first || end > first + shared_bytes) return "a box to what is not the block's shared memory";
    for (uint32_t row = 0; row < num_rows; row++) {
        const int64_t y = (int64_t)at[1] + row % own.box[1], z = (int64_t)at[2] + row / own.box[1];
        const bool is_row = y >= 0 && y < (int64_t)own.sizes[1] && z >= 0 && z < (int64_t)own.sizes[2];
        for (uint32_t i = 0; i < own.box[0]; i++) {
            const int64_t x = (int64_t)at[0] + i;
            char *here = shared + (swizzle_128(address + row * ROW_BYTES + i * ELEMENT_BYTES) - first);
            const bool is_there = is_row && x >= 0 && x < (int64_t)own.sizes[0];
            char *there = own.memory + x * ELEMENT_BYTES + y * (int64_t)own.strides[0] + z * (int64_t)own.strides[1];
            if (stores && is_there) memcpy(there, here, ELEMENT_BYTES);
            if (stores) continue;
            if (is_there)
                memcpy(here, there, ELEMENT_BYTES);
            else
                memset(here, 0, ELEMENT_BYTES);
        }
    }
    *bytes = (int32_t)(num_rows * ROW_BYTES);
    return NULL;
}
