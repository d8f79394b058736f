/* What nvcc knows without a header, for the kernels as g++ compiles them: included before each of their files. */
#ifndef CUDA_EMULATOR_DEVICE_CODE_H
#define CUDA_EMULATOR_DEVICE_CODE_H

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdint.h>
#include <vector_functions.h>

#include "cuda_emulator/emulator.h"
#include "cuda_emulator/launch.h"

/* --- keywords ------------------------------------------------------------------------------------------------------ */

#undef __forceinline__
#undef __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ thread_local /* a block runs on one thread of the operating system; see launch.cpp */

#define threadIdx (emu_self->index)
#define blockIdx (emu_self->block->index)

/* Objects: cudaLaunchConfig_t has members of these names. */
template <dim3 emu_block::*SIZE> struct emu_size {
    struct {
        operator uint32_t() const { return (emu_self->block->*SIZE).x; }
    } x;
    struct {
        operator uint32_t() const { return (emu_self->block->*SIZE).y; }
    } y;
    struct {
        operator uint32_t() const { return (emu_self->block->*SIZE).z; }
    } z;
};
inline constexpr emu_size<&emu_block::size> blockDim;
inline constexpr emu_size<&emu_block::grid_size> gridDim;

/* --- bits and numbers ------------------------------------------------------------------------------------------------ */

static inline float __uint_as_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
static inline float __int_as_float(int32_t bits) { return __builtin_bit_cast(float, bits); }
static inline uint32_t __float_as_uint(float number) { return __builtin_bit_cast(uint32_t, number); }
static inline int32_t __float_as_int(float number) { return __builtin_bit_cast(int32_t, number); }

/* A product that no compiler makes part of a fused one. */
static inline float __fmul_rn(float a, float b)
{
    volatile float product = a * b;
    return product;
}
static inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fdividef(float a, float b) { return fabsf(b) > 0x1p126f && !isinf(b) ? a * 0 : a / b; }
static inline float emu_expf(float x) { return expf(x); }
#define __expf emu_expf /* which the C library has, too */

static inline int32_t __float2int_rn(float x)
{
    if (isnan(x)) return 0;
    return x >= 0x1p31f ? INT32_MAX : x <= -0x1p31f ? INT32_MIN : (int32_t)rintf(x);
}

static inline uint32_t __umulhi(uint32_t a, uint32_t b) { return (uint32_t)((uint64_t)a * b >> 32); }

static inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector)
{
    const uint64_t bytes = (uint64_t)high << 32 | low;
    uint32_t result = 0;
    for (int i = 0; i < 4; i++) {
        const uint32_t choice = selector >> 4 * i & 15;
        uint32_t byte = (uint32_t)(bytes >> 8 * (choice & 7)) & 255;
        if (choice & 8) byte = byte & 128 ? 255 : 0;
        result |= byte << 8 * i;
    }
    return result;
}

static inline uint32_t __vmaxu2(uint32_t a, uint32_t b)
{
    const uint32_t low_a = a & 0xffff, low_b = b & 0xffff, high_a = a >> 16, high_b = b >> 16;
    return (high_a > high_b ? high_a : high_b) << 16 | (low_a > low_b ? low_a : low_b);
}

template <class T> static inline T min(T a, T b) { return b < a ? b : a; }
template <class T> static inline T max(T a, T b) { return a < b ? b : a; }

/* --- memory ------------------------------------------------------------------------------------------------------------ */

template <class T> static inline T __ldcs(const T *from) { return *from; }

/* Blocks of other threads of the operating system may be at the same number. */
template <class T> static inline T atomicAdd(T *number, T addend)
{
    return __atomic_fetch_add(number, addend, __ATOMIC_RELAXED);
}

template <class T> static inline T atomicMax(T *number, T other)
{
    T old = __atomic_load_n(number, __ATOMIC_RELAXED);
    while (old < other && !__atomic_compare_exchange_n(number, &old, other, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return old;
}

template <class T> static inline T atomicMin(T *number, T other)
{
    T old = __atomic_load_n(number, __ATOMIC_RELAXED);
    while (other < old && !__atomic_compare_exchange_n(number, &old, other, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return old;
}

static inline void __threadfence_block(void) {}

/* --- warps and blocks ---------------------------------------------------------------------------------------------------- */

static inline void __syncthreads(void) { emu_barrier(0, 0, true); }
static inline void __nanosleep(uint32_t) { emu_yield(); }

void __syncwarp(uint32_t mask = ~0u);
bool __any_sync(uint32_t mask, bool is);
int32_t __reduce_max_sync(uint32_t mask, int32_t number);
int32_t __reduce_min_sync(uint32_t mask, int32_t number);
uint32_t __reduce_max_sync(uint32_t mask, uint32_t number);
uint32_t __reduce_min_sync(uint32_t mask, uint32_t number);

/* What lane `from` of `mask` brings: of each segment of `width` lanes its own. */
uint32_t emu_shuffle(uint32_t mask, uint32_t bits, int32_t from, int32_t width);

template <class T> static inline T emu_shuffled(uint32_t mask, T value, int32_t from, int32_t width)
{
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "one register or two");
    uint32_t words[sizeof(T) / 4];
    __builtin_memcpy(words, &value, sizeof(T));
    for (uint32_t &word : words) word = emu_shuffle(mask, word, from, width);
    __builtin_memcpy(&value, words, sizeof(T));
    return value;
}

template <class T> static inline T __shfl_sync(uint32_t mask, T value, int32_t from, int32_t width = EMU_LANES)
{
    const int32_t first = emu_self->lane & -width;
    return emu_shuffled(mask, value, first | (from & (width - 1)), width);
}

template <class T> static inline T __shfl_xor_sync(uint32_t mask, T value, int32_t with, int32_t width = EMU_LANES)
{
    const int32_t lane = emu_self->lane, other = lane ^ with, last = lane | (width - 1);
    return emu_shuffled(mask, value, other > last ? lane : other, width);
}

/* --- launches -------------------------------------------------------------------------------------------------------------- */

template <class Params, class Given>
static inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(Params),
                                             const Given &params)
{
    uint32_t cluster = 1;
    for (uint32_t i = 0; i < config->numAttrs; i++) {
        const cudaLaunchAttributeID id = config->attrs[i].id;
        if (id == cudaLaunchAttributeClusterDimension) cluster = config->attrs[i].val.clusterDim.x;
        if (id == cudaLaunchAttributeProgrammaticStreamSerialization && emu_ptx_version() < 90)
            return cudaErrorInvalidValue;
    }
    return emu_launch_of<Params>("launch", kernel, config->gridDim, config->blockDim.x, config->dynamicSmemBytes,
                                 config->stream, cluster, params);
}

#endif
