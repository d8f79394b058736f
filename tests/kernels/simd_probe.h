/* The vector operations of kernels/cpu/simd.h as functions, compiled once for each ISA level. */
#ifndef FV_TESTS_KERNELS_SIMD_PROBE_H
#define FV_TESTS_KERNELS_SIMD_PROBE_H

#include "core/cpu.h"
#include "fovea/dtype.h"

typedef struct simd_probe {
    fv_isa isa;
    void (*load8)(float *to, const void *from, fv_dtype dtype);
    void (*load16)(float *to, const void *from, fv_dtype dtype);   /* lane order undone */
    void (*reorder)(float *to, const float *from, fv_dtype dtype); /* 16 to lane order and back */
    void (*store8)(void *to, const float *from, fv_dtype dtype);
    void (*exp2)(float *to, const float *from);    /* 8 */
    void (*exp2_16)(float *to, const float *from); /* of two vectors of 16 at a time: 32 */
    void (*tanh)(float *to, const float *from);
    void (*tanh16)(float *to, const float *from); /* fv_lanes_tanh */
    void (*max)(float *to, const float *a, const float *b);
    void (*min)(float *to, const float *a, const float *b);
    void (*reduce8)(float *to, const float *from); /* 64 to 8 */
    void (*max_by_period)(float *to, const float *from, int32_t period);
    void (*sum_by_period)(float *to, const float *from, int32_t period);
    int32_t (*any)(const int32_t *mask);
} simd_probe;

extern const simd_probe simd_probe_portable;
#if defined(__x86_64__)
extern const simd_probe simd_probe_avx2;
extern const simd_probe simd_probe_avx512;
#endif

#endif
