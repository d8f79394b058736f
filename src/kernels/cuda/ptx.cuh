/* Instructions that CUDA C++ has no name for: one thin function each, called as the instruction is. The
 * sections are those of NVIDIA's "Parallel Thread Execution ISA". */
#ifndef FV_KERNELS_CUDA_PTX_CUH
#define FV_KERNELS_CUDA_PTX_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

/* A tensor as Hopper's copy engine knows it: a CUtensorMap. */
typedef struct alignas(64) fv_tensor_map {
    uint64_t words[16];
} fv_tensor_map;

/* Address in the shared window: "State Spaces: shared", cvta. */
__device__ __forceinline__ uint32_t ptx_shared_address(const void *pointer)
{
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

/* The shared memory that a launch asks for, as `name`. */
#define PTX_DYNAMIC_SHARED(ALIGNMENT, name) extern __shared__ __align__(ALIGNMENT) char name[]

/* "Data Movement: cp.async": 16 bytes from global to shared memory, past L1: the first `bytes` of them, and
 * zeros after; of 0 bytes, nothing is read. Both addresses are multiples of 16. */
__device__ __forceinline__ void ptx_cp_async_16_or_zeros(void *shared, const void *global, int32_t bytes)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(ptx_shared_address(shared)), "l"(global),
                 "r"(bytes)
                 : "memory");
}

/* The same to a shared address, of bytes that are there. */
__device__ __forceinline__ void ptx_cp_async_16(uint32_t shared, const void *global)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

/* The same, with the whole 256 bytes of memory around it into L2. */
__device__ __forceinline__ void ptx_cp_async_16_of_256(uint32_t shared, const void *global)
{
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

/* "createpolicy": what is read once goes first where L2 needs room. */
__device__ __forceinline__ uint64_t ptx_policy_of_streams(void)
{
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

/* The same of 16 bytes that are read once, in whole lines of L2. */
__device__ __forceinline__ void ptx_cp_async_stream_16_or_zeros(void *shared, const void *global, int32_t bytes)
{
    asm volatile(
        "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(ptx_shared_address(shared)),
        "l"(global), "r"(bytes), "l"(ptx_policy_of_streams())
        : "memory");
}

/* The same to a shared address, of bytes that are there. */
__device__ __forceinline__ void ptx_cp_async_stream_16(uint32_t shared, const void *global)
{
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
                 "l"(ptx_policy_of_streams())
                 : "memory");
}

/* The same of 8 bytes, through L1. */
__device__ __forceinline__ void ptx_cp_async_8_or_zeros(void *shared, const void *global, int32_t bytes)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(ptx_shared_address(shared)), "l"(global),
                 "r"(bytes)
                 : "memory");
}

/* "prefetch": the line of an address to L2. */
__device__ __forceinline__ void ptx_prefetch_l2(const void *global)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

/* A number that has to stay in its registers, for the compiler cannot find it again. */
__device__ __forceinline__ uint32_t ptx_keep(uint32_t number)
{
    asm volatile("" : "+r"(number));
    return number;
}
__device__ __forceinline__ float ptx_keep(float number)
{
    asm volatile("" : "+f"(number));
    return number;
}
__device__ __forceinline__ const char *ptx_keep(const char *place)
{
    asm volatile("" : "+l"(place));
    return place;
}

/* "cp.async.commit_group": what was asked for since the last one is a group. */
__device__ __forceinline__ void ptx_cp_async_commit(void) { asm volatile("cp.async.commit_group;" ::: "memory"); }

/* "cp.async.wait_group": until at most N groups of this thread are under way. */
template <int N> __device__ __forceinline__ void ptx_cp_async_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* "Warp-level matrix load: ldmatrix": four 8x8 matrices of 16-bit elements; lane l gives the address of
 * row l % 8 of matrix l / 8, and receives of each matrix elements 2 (l % 4) and the next of row l / 4. */
__device__ __forceinline__ void ptx_ldmatrix_x4(uint32_t (&r)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

/* Two matrices, of which lanes 0 to 15 give the rows. */
__device__ __forceinline__ void ptx_ldmatrix_x2(uint32_t (&r)[2], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(address)
                 : "memory");
}

/* Four matrices, each transposed. */
__device__ __forceinline__ void ptx_ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

/* "ld": 16 bytes of shared memory, at a multiple of 16. */
__device__ __forceinline__ uint4 ptx_ld_shared_v4(uint32_t address)
{
    uint4 words;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "r"(address)
                 : "memory");
    return words;
}

/* "movmatrix": an 8x8 matrix of 16-bit elements across a warp, transposed; lane l gives and gets elements 2 (l % 4) and
 * the next of row l / 4. */
__device__ __forceinline__ uint32_t ptx_movmatrix_trans(uint32_t two)
{
    uint32_t of_columns;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(of_columns) : "r"(two));
    return of_columns;
}

/* "Warp-level matrix multiply-accumulate: mma.m16n8k16": d += a b, fp32 sums. Lane l, row l / 4 and the
 * eighth after it: a[0] (row, k 2 (l % 4)..), a[1] (row + 8, same k), a[2] (row, k + 8), a[3] (row + 8, k + 8);
 * b[0], b[1] (k, k + 8; column l / 4); d[0..1] (row, columns 2 (l % 4)..), d[2..3] (row + 8). */
template <class T>
__device__ __forceinline__ void ptx_mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void ptx_mma_m16n8k16<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                                uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void ptx_mma_m16n8k16<__half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                         uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* "Floating Point Instructions: ex2": 2^x, relative error below 2^-22; results below 2^-126 are 0. */
__device__ __forceinline__ float ptx_ex2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* "sqrt.approx": relative error below 2^-23. */
__device__ __forceinline__ float ptx_sqrt(float x)
{
    float y;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* "max.NaN", "min.NaN": NaN where one of them is. */
__device__ __forceinline__ float ptx_max_or_nan(float a, float b)
{
    float max;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(max) : "f"(a), "f"(b));
    return max;
}
__device__ __forceinline__ float ptx_min_or_nan(float a, float b)
{
    float min;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(min) : "f"(a), "f"(b));
    return min;
}

/* "Parallel Synchronization: redux.sync": the largest of a warp's numbers. */
__device__ __forceinline__ int32_t ptx_redux_max(int32_t number)
{
    int32_t largest;
    asm volatile("redux.sync.max.s32 %0, %1, 0xffffffff;" : "=r"(largest) : "r"(number));
    return largest;
}

/* "Data Movement and Conversion: cvt": four bytes of e4m3 as fp16, exactly; compute capability 8.9 and later. */
__device__ __forceinline__ uint2 ptx_widen_e4m3(uint32_t four)
{
    uint2 wide;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n}"
        : "=r"(wide.x), "=r"(wide.y)
        : "r"(four));
    return wide;
}

/* The same of e5m2. */
__device__ __forceinline__ uint2 ptx_widen_e5m2(uint32_t four)
{
    uint2 wide;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2.e5m2x2 %0, low;\n"
        "cvt.rn.f16x2.e5m2x2 %1, high;\n}"
        : "=r"(wide.x), "=r"(wide.y)
        : "r"(four));
    return wide;
}

/* "ld.global.nc": 16 bytes that nobody writes meanwhile and that are read once. */
__device__ __forceinline__ void ptx_load_once(uint4 &words, const char *from)
{
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(from));
}

/* "Special Registers: %globaltimer". */
__device__ __forceinline__ uint64_t ptx_nanoseconds(void)
{
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

/* Loads under a condition, issued where they stand: a compiler puts them off to a branch of their own. */
__device__ __forceinline__ float ptx_load_or(const float *from, bool is_there, float otherwise)
{
    float value = otherwise;
    asm volatile("{\n.reg .pred there;\nsetp.ne.s32 there, %2, 0;\n@there ld.global.f32 %0, [%1];\n}"
                 : "+f"(value)
                 : "l"(from), "r"((int32_t)is_there));
    return value;
}

__device__ __forceinline__ float4 ptx_load_or_zero(const float4 *from, bool is_there)
{
    float4 value = make_float4(0, 0, 0, 0);
    asm volatile("{\n.reg .pred there;\nsetp.ne.s32 there, %5, 0;\n"
                 "@there ld.global.v4.f32 {%0, %1, %2, %3}, [%4];\n}"
                 : "+f"(value.x), "+f"(value.y), "+f"(value.z), "+f"(value.w)
                 : "l"(from), "r"((int32_t)is_there));
    return value;
}

__device__ __forceinline__ uint2 ptx_load_or_zero(const uint2 *from, bool is_there)
{
    uint2 value = make_uint2(0, 0);
    asm volatile("{\n.reg .pred there;\nsetp.ne.s32 there, %3, 0;\n@there ld.global.v2.u32 {%0, %1}, [%2];\n}"
                 : "+r"(value.x), "+r"(value.y)
                 : "l"(from), "r"((int32_t)is_there));
    return value;
}

#endif
