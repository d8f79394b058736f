/* Compiled with -O3 and contraction of a * b + c in every build type (CMakeLists.txt). */
#include "bench/ceilings.h"

#include <stdint.h>

#include "bench/ceiling_tiles.h"
#include "core/compiler.h"

#define COMPUTE_CHAINS 12
#define COMPUTE_ROUNDS 4096 /* of a task: some tens of microseconds */
#define COMPUTE_TASKS 8     /* for each worker */
#define TILE_ROUNDS 2048    /* of a task, of tiles: half a millisecond */
#define HALF_PRODUCTS 3.5   /* of bf16 for one of fp16 in pieces: four for a score, three for a value */
#define BYTE_PRODUCTS 2     /* where the keys and values are of a byte */
#define READ_TASKS 16       /* for each worker */
#define MAX_READ_TASKS 4096

#define LOOPS portable
#define LOOPS_TARGET
#define LOOPS_BYTES 16
#include "bench/ceiling_loops.h"

#if defined(__x86_64__)
#define LOOPS avx2
#define LOOPS_TARGET __attribute__((target("avx2,fma")))
#define LOOPS_BYTES 32
#include "bench/ceiling_loops.h"

#define LOOPS avx512
#define LOOPS_TARGET __attribute__((target("avx512f")))
#define LOOPS_BYTES 64
#include "bench/ceiling_loops.h"
#endif

#if defined(FV_HAVE_AVX512_BF16)
#include <immintrin.h>

#define PAIR_CHAINS 16

/* The same of products of pairs of bf16. */
__attribute__((target("avx512f,avx512bf16"))) static float compute_pairs(int32_t rounds)
{
    __m512 chain[PAIR_CHAINS];
    __m512i factor = _mm512_set1_epi32(0x3f7e3f02), term = _mm512_set1_epi32(0x3b03bb01); /* sums stay small */
    for (int32_t i = 0; i < PAIR_CHAINS; i++) chain[i] = _mm512_set1_ps((float)i);
    for (int32_t round = 0; round < rounds; round++) {
        __asm__ volatile("" : "+v"(factor), "+v"(term));
        for (int32_t i = 0; i < PAIR_CHAINS; i++)
            chain[i] = _mm512_dpbf16_ps(chain[i], (__m512bh)factor, (__m512bh)term);
    }
    float sum = 0;
    for (int32_t i = 0; i < PAIR_CHAINS; i++) sum += _mm512_cvtss_f32(chain[i]);
    return sum;
}

static void pair_task(void *user, int64_t index, int32_t worker)
{
    (void)user, (void)worker, (void)index;
    volatile float sink = compute_pairs(COMPUTE_ROUNDS);
    (void)sink;
}

/* fv_cpu_multiplies_pairs, asked once, as cpu_isa. */
static int32_t multiplies_pairs(void)
{
    static _Atomic int32_t known; /* 0: not yet */
    if (!known) known = fv_cpu_multiplies_pairs() ? 1 : -1;
    return known > 0;
}

/* 1: a level's kernels multiply pairs of bf16, faster than fp32. */
static int32_t has_pairs(fv_dtype dtype, fv_dtype kv_dtype, fv_isa isa)
{
    if (isa < FV_ISA_AVX512_BF16 || dtype != FV_DTYPE_BF16 || !multiplies_pairs()) return 0;
    return kv_dtype == FV_DTYPE_BF16 || fv_dtype_bytes(kv_dtype) == 1;
}
#endif

typedef struct loops {
    uint64_t (*read)(const char *data, int64_t bytes);
    float (*compute)(int32_t rounds);
    int32_t vector_bytes;
} loops;

static const loops all_loops[] = {
    [FV_ISA_PORTABLE] = {read_portable, compute_portable, 16},
#if defined(__x86_64__)
    [FV_ISA_AVX2] = {read_avx2, compute_avx2, 32},
    [FV_ISA_AVX512] = {read_avx512, compute_avx512, 64},
    [FV_ISA_AVX512_BF16] = {read_avx512, compute_avx512, 64},
    [FV_ISA_AMX] = {read_avx512, compute_avx512, 64},
#endif
};

/* fv_cpu_isa, asked once: eight CPUIDs take a virtual machine some 60 us, a tenth of what is timed. */
static fv_isa cpu_isa(void)
{
    static _Atomic int32_t known = -1; /* not yet */
    if (known < 0) known = (int32_t)fv_cpu_isa();
    return (fv_isa)known;
}

const char *fv_ceiling_isa(void) { return fv_isa_name(cpu_isa()); }

typedef struct read_job {
    const loops *loops;
    const char *base;
    const fv_read_range *ranges;
    int64_t num_ranges;
    int64_t num_tasks;
    uint64_t sums[MAX_READ_TASKS];
} read_job;

static void read_task(void *user, int64_t index, int32_t worker)
{
    (void)worker;
    read_job *job = user;
    const int64_t first = job->num_ranges * index / job->num_tasks;
    const int64_t end = job->num_ranges * (index + 1) / job->num_tasks;
    uint64_t sum = 0;
    for (int64_t i = first; i < end; i++)
        sum += job->loops->read(job->base + job->ranges[i].offset, job->ranges[i].bytes);
    job->sums[index] = sum;
}

uint64_t fv_ceiling_read(fv_context *context, const void *base, const fv_read_range *ranges, int64_t num_ranges)
{
    read_job job;
    job.loops = &all_loops[cpu_isa()];
    job.base = base;
    job.ranges = ranges;
    job.num_ranges = num_ranges;
    job.num_tasks = fv_min_i64(fv_min_i64(num_ranges, MAX_READ_TASKS),
                               (int64_t)READ_TASKS * fv_context_num_workers(context));
    fv_context_parallel_for(context, job.num_tasks, read_task, &job);
    uint64_t sum = 0;
    for (int64_t i = 0; i < job.num_tasks; i++) sum += job.sums[i];
    return sum;
}

static void compute_task(void *user, int64_t index, int32_t worker)
{
    (void)worker, (void)index;
    const loops *chosen = *(const loops *const *)user;
    volatile float sink = chosen->compute(COMPUTE_ROUNDS);
    (void)sink;
}

static void tile_task(void *user, int64_t index, int32_t worker)
{
    (void)user, (void)worker, (void)index;
    fv_tile_loop(TILE_ROUNDS);
}

double fv_ceiling_compute(fv_context *context, fv_dtype dtype, fv_dtype kv_dtype, fv_isa isa)
{
    const loops *chosen = &all_loops[isa];
    const int64_t num_tasks = (int64_t)COMPUTE_TASKS * fv_context_num_workers(context);
    if (isa >= FV_ISA_AMX && (dtype == FV_DTYPE_BF16 || dtype == FV_DTYPE_F16)) {
        fv_context_parallel_for(context, num_tasks, tile_task, NULL);
        const double products = dtype != FV_DTYPE_F16 ? 1 : kv_dtype == FV_DTYPE_F16 ? HALF_PRODUCTS : BYTE_PRODUCTS;
        return fv_tile_loop(1) * TILE_ROUNDS * (double)num_tasks / products;
    }
#if defined(FV_HAVE_AVX512_BF16)
    if (has_pairs(dtype, kv_dtype, isa)) {
        fv_context_parallel_for(context, num_tasks, pair_task, NULL);
        return 2.0 * PAIR_CHAINS * COMPUTE_ROUNDS * (double)num_tasks * 32;
    }
#endif
    fv_context_parallel_for(context, num_tasks, compute_task, &chosen);
    return 2.0 * COMPUTE_CHAINS * COMPUTE_ROUNDS * (double)num_tasks * (chosen->vector_bytes / 4);
}
