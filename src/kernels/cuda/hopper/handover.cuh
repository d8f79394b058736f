/* How threads hand over what they wrote or have read: arrivals of a warp at an mbarrier, and of threads at a barrier where others
 * wait.
 *
 * One lane arrives for its warp, behind __syncwarp(), which orders the accesses of all lanes before it. racecheck of NVIDIA's
 * compute-sanitizer knows neither that nor two barriers in turn at which one side only arrives, nor follows numbered barriers at
 * which several roles meet. With FOVEA_CUDA_EACH_ARRIVES (CMake: the same) all lanes arrive, who arrives at a barrier waits there,
 * and where roles meet barriers are mbarriers: the same order of the same accesses, slower, in words that the tool knows
 * (docs/cuda.md, "Checking"). */
#ifndef FV_KERNELS_CUDA_HOPPER_HANDOVER_CUH
#define FV_KERNELS_CUDA_HOPPER_HANDOVER_CUH

#include "kernels/cuda/hopper/mbarrier.cuh"

#if defined(FOVEA_CUDA_EACH_ARRIVES)
static constexpr int32_t ARRIVALS_OF_WARP = 32;
#else
static constexpr int32_t ARRIVALS_OF_WARP = 1;
#endif

/* A barrier at which `num_warps` warps arrive in each phase. */
static __device__ __forceinline__ void init_warp_barrier(uint64_t *barrier, int32_t num_warps)
{
    ptx_mbarrier_init(barrier, num_warps * ARRIVALS_OF_WARP);
}

/* Does this lane arrive there for its warp? */
static __device__ __forceinline__ bool arrives_for_warp(void)
{
    return ARRIVALS_OF_WARP > 1 || threadIdx.x % 32 == 0;
}

/* Barriers of a block's threads by their numbers. */
typedef struct block_bars {
#if defined(FOVEA_CUDA_EACH_ARRIVES)
    uint64_t of[16];
#endif
} block_bars;

static __device__ __forceinline__ void init_bar(block_bars *bars, int32_t id, int32_t threads)
{
#if defined(FOVEA_CUDA_EACH_ARRIVES)
    ptx_mbarrier_init(&bars->of[id], threads);
#else
    (void)bars, (void)id, (void)threads;
#endif
}

static __device__ __forceinline__ void wait_at_bar(const block_bars *bars, int32_t id, int32_t threads)
{
#if defined(FOVEA_CUDA_EACH_ARRIVES)
    (void)threads;
    ptx_mbarrier_arrive_and_wait((uint64_t *)&bars->of[id]);
#else
    (void)bars;
    ptx_bar_sync(id, threads);
#endif
}

/* The same; true in all of the threads where it is in one. */
static __device__ __forceinline__ bool vote_at_bar(const block_bars *bars, int32_t id, int32_t threads, bool is)
{
    if (ARRIVALS_OF_WARP > 1) wait_at_bar(bars, id, threads);
    return ptx_bar_any(id, threads, is);
}

/* Without waiting: others of the `threads` wait there. */
static __device__ __forceinline__ void arrive_at_bar(int32_t id, int32_t threads)
{
    if (ARRIVALS_OF_WARP > 1)
        ptx_bar_sync(id, threads);
    else
        ptx_bar_arrive(id, threads);
}
static __device__ __forceinline__ void arrive_at_bar(const block_bars *bars, int32_t id, int32_t threads)
{
    if (ARRIVALS_OF_WARP > 1)
        wait_at_bar(bars, id, threads);
    else
        ptx_bar_arrive(id, threads);
}

#endif
