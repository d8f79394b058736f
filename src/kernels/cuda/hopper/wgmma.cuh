/* Instructions of Hopper (sm_90a) that CUDA C++ has no name for: one thin function each. The sections are those of
 * NVIDIA's "Parallel Thread Execution ISA", "Asynchronous Warpgroup Level Matrix Instructions" where nothing else
 * is said. A warpgroup is four warps, the first at a multiple of four.
 *
 * Tiles of 16-bit elements in shared memory lie in panels of 64 columns: a row of a panel is 128 bytes, and its
 * 16-byte chunks are swizzled, chunk c of row r at c ^ (r % 8). Panels begin at multiples of 1024 bytes. */
#ifndef FV_KERNELS_CUDA_HOPPER_WGMMA_CUH
#define FV_KERNELS_CUDA_HOPPER_WGMMA_CUH

#include "kernels/cuda/hopper/matrix_descriptor.cuh"

/* The same value, which the compiler takes for another one: what follows from it is computed again, not kept. */
__device__ __forceinline__ uint64_t ptx_anew(uint64_t descriptor)
{
    uint32_t low = (uint32_t)descriptor;
    asm volatile("" : "+r"(low));
    return (descriptor & 0xffffffff00000000u) | low;
}

/* "wgmma.fence": before the first product that takes registers which other instructions wrote. */
__device__ __forceinline__ void ptx_wgmma_fence(void) { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

/* "wgmma.commit_group": the products since the last one are a group. */
__device__ __forceinline__ void ptx_wgmma_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* "wgmma.wait_group": until at most N groups are under way. */
template <int N> __device__ __forceinline__ void ptx_wgmma_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

/* No instruction: what follows sees the registers as they are here. After a wait, for each sum that it was for. */
template <int N> __device__ __forceinline__ void ptx_wgmma_settle(float (&d)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

/* "membar/fence: fence.proxy.async": this thread's writes to shared memory, before wgmma reads them. */
__device__ __forceinline__ void ptx_fence_proxy_async(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* The registers of a sum: their names in the instruction, and as operands. */
#define PTX_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define PTX_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define PTX_NAMES_32 PTX_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PTX_NAMES_48 PTX_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define PTX_NAMES_64 PTX_NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PTX_NAMES_96                                                                                            \
    PTX_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "           \
                 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define PTX_NAMES_128                                                                                           \
    PTX_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "           \
                 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
                 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
                 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define PTX_D8(d, i)                                                                                \
    "+f"((d)[(i)]), "+f"((d)[(i) + 1]), "+f"((d)[(i) + 2]), "+f"((d)[(i) + 3]), "+f"((d)[(i) + 4]), \
        "+f"((d)[(i) + 5]), "+f"((d)[(i) + 6]), "+f"((d)[(i) + 7])
#define PTX_D16(d, i) PTX_D8(d, i), PTX_D8(d, (i) + 8)
#define PTX_OPERANDS_8(d) PTX_D8(d, 0)
#define PTX_OPERANDS_16(d) PTX_D16(d, 0)
#define PTX_OPERANDS_32(d) PTX_D16(d, 0), PTX_D16(d, 16)
#define PTX_OPERANDS_48(d) PTX_OPERANDS_32(d), PTX_D16(d, 32)
#define PTX_OPERANDS_64(d) PTX_OPERANDS_48(d), PTX_D16(d, 48)
#define PTX_OPERANDS_96(d) PTX_OPERANDS_64(d), PTX_D16(d, 64), PTX_D16(d, 80)
#define PTX_OPERANDS_128(d) PTX_OPERANDS_64(d), PTX_D16(d, 64), PTX_D16(d, 80), PTX_D16(d, 96), PTX_D16(d, 112)

/* "wgmma.mma_async": d = a b (+ d where adds), rows x columns 64 x N, 16 deep, fp32 sums. ss: a and b from shared
 * memory, rows of elements along the depth; rs: a from registers, as in mma.m16n8k16, warp w of the four has rows 16 w
 * to 16 w + 15; _nt: b's rows are the depth, its columns lie together. Lane l, d[i]: row l / 4 + 8 (i / 2 % 2), column
 * 8 (i / 4) + 2 (l % 4) + i % 2.
 *
 * N, the registers of d, and the numbers of the operands behind them. */
#define PTX_WGMMA_SS_OF(NAME, T, TYPE, N, REGISTERS, A, B, ADDS, TRANSPOSED)                                        \
    template <> __device__ __forceinline__ void NAME<T>(float(&d)[REGISTERS], uint64_t a, uint64_t b, int32_t adds) \
    {                                                                                                               \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADDS ", 0;\n"                                              \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" PTX_NAMES_##REGISTERS     \
                     "}, " A ", " B ", p, 1, 1, 0, " #TRANSPOSED ";\n}\n"                                           \
                     : PTX_OPERANDS_##REGISTERS(d)                                                                  \
                     : "l"(a), "l"(b), "r"(adds));                                                                  \
    }
#define PTX_WGMMA_SS(NAME, N, REGISTERS, A, B, ADDS, TRANSPOSED)                                      \
    template <class T>                                                                                \
    __device__ __forceinline__ void NAME(float(&d)[REGISTERS], uint64_t a, uint64_t b, int32_t adds); \
    PTX_WGMMA_SS_OF(NAME, __nv_bfloat16, "bf16", N, REGISTERS, A, B, ADDS, TRANSPOSED)                \
    PTX_WGMMA_SS_OF(NAME, __half, "f16", N, REGISTERS, A, B, ADDS, TRANSPOSED)

#define PTX_WGMMA_RS_OF(NAME, T, TYPE, N, REGISTERS, A, B, ADDS, TRANSPOSED)                                           \
    template <>                                                                                                    \
    __device__ __forceinline__ void NAME<T>(float(&d)[REGISTERS], const uint32_t(&a)[4], uint64_t b, int32_t adds) \
    {                                                                                                              \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADDS ", 0;\n"                                             \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" PTX_NAMES_##REGISTERS    \
                     "}, {" A "}, " B ", p, 1, 1, " #TRANSPOSED ";\n}\n"                                               \
                     : PTX_OPERANDS_##REGISTERS(d)                                                                 \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));                             \
    }
#define PTX_WGMMA_RS(NAME, N, REGISTERS, A, B, ADDS, TRANSPOSED)                                                     \
    template <class T>                                                                                           \
    __device__ __forceinline__ void NAME(float(&d)[REGISTERS], const uint32_t(&a)[4], uint64_t b, int32_t adds); \
    PTX_WGMMA_RS_OF(NAME, __nv_bfloat16, "bf16", N, REGISTERS, A, B, ADDS, TRANSPOSED)                               \
    PTX_WGMMA_RS_OF(NAME, __half, "f16", N, REGISTERS, A, B, ADDS, TRANSPOSED)

PTX_WGMMA_SS(ptx_wgmma_m64n64k16_ss, 64, 32, "%32", "%33", "%34", 0)
PTX_WGMMA_SS(ptx_wgmma_m64n128k16_ss, 128, 64, "%64", "%65", "%66", 0)
PTX_WGMMA_SS(ptx_wgmma_m64n192k16_ss, 192, 96, "%96", "%97", "%98", 0)
PTX_WGMMA_SS(ptx_wgmma_m64n256k16_ss_nt, 256, 128, "%128", "%129", "%130", 1)
PTX_WGMMA_RS(ptx_wgmma_m64n16k16_rs, 16, 8, "%8, %9, %10, %11", "%12", "%13", 0)
PTX_WGMMA_RS(ptx_wgmma_m64n32k16_rs, 32, 16, "%16, %17, %18, %19", "%20", "%21", 0)
PTX_WGMMA_RS(ptx_wgmma_m64n64k16_rs, 64, 32, "%32, %33, %34, %35", "%36", "%37", 0)
PTX_WGMMA_RS(ptx_wgmma_m64n64k16_rs_nt, 64, 32, "%32, %33, %34, %35", "%36", "%37", 1)
PTX_WGMMA_RS(ptx_wgmma_m64n128k16_rs_nt, 128, 64, "%64, %65, %66, %67", "%68", "%69", 1)
PTX_WGMMA_RS(ptx_wgmma_m64n256k16_rs_nt, 256, 128, "%128, %129, %130, %131", "%132", "%133", 1)

#endif
