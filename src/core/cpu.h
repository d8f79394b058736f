/* What this CPU is and can do. */
#ifndef FV_CORE_CPU_H
#define FV_CORE_CPU_H

#include "fovea/status.h"

/* Levels of CPU kernels, weakest to strongest; each includes those below. */
typedef enum fv_isa {
    FV_ISA_PORTABLE = 0,    /* the compiler's baseline */
    FV_ISA_AVX2 = 1,        /* x86-64-v3: AVX2, FMA, F16C, BMI */
    FV_ISA_AVX512 = 2,      /* x86-64-v4: AVX-512 F, BW, CD, DQ, VL */
    FV_ISA_AVX512_BF16 = 3, /* AVX-512 BF16 and VBMI */
    FV_ISA_AMX = 4,         /* AMX tiles of bf16 */
} fv_isa;

/* The strongest level that this CPU has, the operating system has enabled and this library was compiled with. The
 * first call on a CPU with AMX asks Linux for leave to use it, for the whole process; refused, it is AVX-512. */
fv_isa fv_cpu_isa(void);

const char *fv_isa_name(fv_isa isa); /* "portable", "avx2", "avx512", "avx512_bf16", "amx" */

/* FV_ERR_INVALID with the accepted names. */
fv_status fv_isa_parse(fv_isa *isa, const char *name);

/* CPUs that this process may run on (its affinity mask), as many at most as its control groups give it the time of
 * (core/cpu_quota.h); at least 1. */
int32_t fv_cpu_count(void);

#define FV_MAX_AHEAD_TRACKS 8

/* Places in memory from which a core had best ask for lines ahead, in turn (kernels/cpu/prefetch_stream.h): 8 on Intel's
 * cores, elsewhere 1, the order of memory. */
int32_t fv_cpu_ahead_tracks(void);

/* 1: in the order of memory, lines are best asked for into the first-level cache: AMD's cores of Zen 3 and from Zen 5 on; 0: into
 * the second-level one. */
int32_t fv_cpu_ahead_is_near(void);

/* 1: products of pairs of bf16 (VDPBF16PS) come at the rate of fp32's multiply-adds, two numbers for one: AMD's cores that have
 * them. Intel's take four times as long. */
int32_t fv_cpu_multiplies_pairs(void);

/* 1: multiply-adds take subnormal fp32 at full speed: AMD's cores from Zen 3 on (measured: Zen 3). Intel's stop for each. */
int32_t fv_cpu_subnormals_are_fast(void);

/* Writes the CPU's model name, "unknown CPU" where it cannot be found out. */
void fv_cpu_model(char *model, size_t model_bytes);

/* Writes the feature names that matter here, e.g. "avx2 fma f16c"; amx and bf16 features included. */
void fv_cpu_features(char *features, size_t features_bytes);

/* Data caches as a core of the first CPU sees them. */
typedef struct fv_cpu_caches {
    int64_t l1_bytes, l2_bytes; /* of a core */
    int64_t l3_bytes;           /* whole; 0: none */
    int32_t l3_cpus;            /* that share it, at least 1 */
    int32_t is_known;           /* 0: the kernel does not say; 32 KB, 512 KB and no L3 are assumed */
} fv_cpu_caches;

fv_cpu_caches fv_cpu_find_caches(void);

#endif
