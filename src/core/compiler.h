/* What the compiler offers beyond C11, in one place. */
#ifndef FV_CORE_COMPILER_H
#define FV_CORE_COMPILER_H

#include <stddef.h>
#include <stdint.h>

#define FV_PRINTF(format_index, args_index) __attribute__((format(printf, format_index, args_index)))
#define FV_ALWAYS_INLINE static inline __attribute__((always_inline))
/* A small function that kernels of a GPU share: CUDA's compiler makes both forms of it. */
#if defined(__CUDACC__)
#define FV_SHARED_INLINE static inline __host__ __device__
#else
#define FV_SHARED_INLINE static inline
#endif
/* In front of a static function of plain loops: GCC compiles it with AVX2 as well, and which form it is is chosen when the
 * program starts. Results are the same, for multiplications and additions stay apart. Not under sanitizers, whose run-time
 * the choice would be before. (Clang exports what chooses.) */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__OPTIMIZE__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define FV_EACH_CPU __attribute__((target_clones("avx2", "default")))
#else
#define FV_EACH_CPU
#endif
#define FV_LIKELY(x) __builtin_expect(!!(x), 1)
#define FV_UNLIKELY(x) __builtin_expect(!!(x), 0)
#define FV_ARRAY_LEN(array) ((int32_t)(sizeof(array) / sizeof((array)[0])))

#define FV_CACHE_LINE 64

FV_SHARED_INLINE int32_t fv_min_i32(int32_t a, int32_t b) { return a < b ? a : b; }
FV_SHARED_INLINE int32_t fv_max_i32(int32_t a, int32_t b) { return a > b ? a : b; }
FV_SHARED_INLINE int64_t fv_min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
FV_SHARED_INLINE int64_t fv_max_i64(int64_t a, int64_t b) { return a > b ? a : b; }
FV_SHARED_INLINE int64_t fv_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
FV_SHARED_INLINE int64_t fv_round_up(int64_t a, int64_t multiple) { return fv_ceil_div(a, multiple) * multiple; }

#endif
