/* What the GPU can do, for `fovea bench`: fv_device_probes by CUDA.
 *
 * The read: a warp takes a part of a range, of 1 to 8 KiB, and asks for 2 or 4 KiB of it before it looks at what
 * comes. Small parts spread few pages over all multiprocessors, large ones read less of the list; which is best
 * for a size is for the caller to try. */
#include "core/device_probes.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"

#define THREADS 256
#define WARPS (THREADS / 32)
#define LANE_BYTES 16
#define WARP_BYTES (32 * LANE_BYTES)
#define GATE_NANOSECONDS 200000000ull /* then it opens by itself: the host may be stuck behind a full stream */
#define FILL_BYTES 8192
#define UNLIKELY_SUM 0x9e3779b9u

/* --- events, the gate -------------------------------------------------------------------------------- */

static fv_status cuda_cache_bytes(int64_t *bytes, fv_device *device)
{
    int l2_bytes = 0;
    const cudaError_t error = cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize,
                                                     fv_cuda_state_of(device)->index);
    *bytes = l2_bytes;
    return fv_cuda_status(device, "size of the L2 cache", error);
}

static fv_status cuda_timer_create(fv_event *event, fv_device *device)
{
    const int32_t has_entered = fv_cuda_enter(device);
    const cudaError_t error = cudaEventCreate((cudaEvent_t *)event);
    fv_cuda_leave(device, has_entered);
    return fv_cuda_status(device, "event", error);
}

static fv_status cuda_timer_elapsed(double *us, fv_device *device, fv_event start, fv_event end)
{
    float ms = 0;
    const int32_t has_entered = fv_cuda_enter(device);
    const cudaError_t error = cudaEventElapsedTime(&ms, (cudaEvent_t)start, (cudaEvent_t)end);
    fv_cuda_leave(device, has_entered);
    *us = (double)ms * 1e3;
    return fv_cuda_status(device, "time between two events", error);
}

static __global__ void __launch_bounds__(1, 1) gate(const volatile int32_t *open)
{
    const uint64_t start = ptx_nanoseconds();
    while (*open == 0 && ptx_nanoseconds() - start < GATE_NANOSECONDS) __nanosleep(500);
}

static fv_status cuda_gate(fv_device *device, const int32_t *open, fv_stream stream)
{
    const fv_launch launch = {device, NULL, stream};
    return fv_cuda_launch<const volatile int32_t *>(&launch, "gate", gate, dim3(1), 1, 0, open);
}

static __global__ void __launch_bounds__(THREADS, 1) empty(int32_t) {}

static fv_status cuda_empty(fv_device *device, fv_stream stream)
{
    const fv_launch launch = {device, NULL, stream};
    return fv_cuda_launch<int32_t>(&launch, "empty", empty, dim3((uint32_t)device->num_workers), THREADS, 0, 0);
}

/* --- memory ---------------------------------------------------------------------------------------------------- */

typedef struct fill_job {
    char *memory;
    const char *pool;
    uint64_t bytes, pool_bytes;
    uint64_t unit, piece; /* bytes: places begin at units of the pool, a piece is of whole ones */
    uint64_t seed;
} fill_job;

/* splitmix64 (Steele, Lea and Flood, 2014). */
static __device__ __forceinline__ uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

/* A block of threads for each piece. */
static __global__ void __launch_bounds__(THREADS, 1) fill_random(const fill_job job)
{
    const uint64_t first = (uint64_t)blockIdx.x * job.piece;
    const uint64_t places = (job.pool_bytes - job.piece) / job.unit;
    const char *from = job.pool + mix(job.seed + blockIdx.x) % places * job.unit;
    for (uint64_t at = threadIdx.x * LANE_BYTES; at < job.piece && first + at < job.bytes;
         at += THREADS * LANE_BYTES) {
        *(uint4 *)(job.memory + first + at) = *(const uint4 *)(from + at);
    }
}

static fv_status cuda_fill_random(fv_device *device, void *memory, size_t bytes, const void *pool, size_t pool_bytes,
                                  size_t unit, uint64_t seed, fv_stream stream)
{
    const fv_launch launch = {device, NULL, stream};
    const uint64_t piece = FILL_BYTES / unit * unit;
    const fill_job job = {(char *)memory, (const char *)pool, bytes, pool_bytes, unit, piece, seed};
    const uint32_t num_blocks = fv_cuda_blocks((int64_t)bytes, (int64_t)piece);
    return fv_cuda_launch(&launch, "random fill", fill_random, dim3(num_blocks), THREADS, 0, job);
}

static fv_status cuda_copy(fv_device *device, void *dst, const void *src, size_t bytes, fv_stream stream)
{
    const int32_t has_entered = fv_cuda_enter(device);
    const cudaError_t error = cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToDevice, (cudaStream_t)stream);
    fv_cuda_leave(device, has_entered);
    return fv_cuda_status(device, "copy", error);
}

/* --- the read --------------------------------------------------------------------------------------------------- */

typedef struct read_job {
    const char *base;
    const fv_probe_range *ranges;
    uint64_t *sink;
    int32_t num_parts; /* of all ranges */
    int32_t parts_of_range_log2;
} read_job;

/* As many as have the registers. */
static constexpr int32_t blocks_of_multiprocessor(int32_t in_flight) { return in_flight == 4 ? 6 : 4; }

static __device__ __forceinline__ uint32_t folded(uint4 value) { return value.x ^ value.y ^ value.z ^ value.w; }

/* Bytes [at, end) of this lane, WARP_BYTES apart. */
template <int32_t in_flight> static __device__ __forceinline__ uint32_t read_part(const char *at, const char *end)
{
    uint32_t sum = 0;
    for (; at + (in_flight - 1) * WARP_BYTES < end; at += in_flight * WARP_BYTES) {
        uint4 values[in_flight];
#pragma unroll
        for (int32_t i = 0; i < in_flight; i++) values[i] = __ldcs((const uint4 *)(at + i * WARP_BYTES));
#pragma unroll
        for (int32_t i = 0; i < in_flight; i++) sum ^= folded(values[i]);
    }
    for (; at < end; at += WARP_BYTES) sum ^= folded(__ldcs((const uint4 *)at));
    return sum;
}

template <int32_t in_flight>
static __global__ void __launch_bounds__(THREADS, blocks_of_multiprocessor(in_flight)) read_ranges(const read_job job)
{
    const int32_t part_bytes = FV_PROBE_RANGE_BYTES >> job.parts_of_range_log2;
    const int32_t lane_offset = threadIdx.x % 32 * LANE_BYTES;
    uint32_t sum = 0;
    for (int32_t i = blockIdx.x * WARPS + threadIdx.x / 32; i < job.num_parts; i += gridDim.x * WARPS) {
        const int32_t range = i >> job.parts_of_range_log2;
        const int32_t first = (i - (range << job.parts_of_range_log2)) * part_bytes;
        const char *data = job.base + job.ranges[range].offset;
        const int32_t end = min(first + part_bytes, (int32_t)job.ranges[range].bytes);
        sum ^= read_part<in_flight>(data + first + lane_offset, data + end);
    }
    if (sum == UNLIKELY_SUM) *job.sink = sum;
}

static fv_status cuda_read(fv_device *device, const fv_probe_read *read, fv_stream stream)
{
    const fv_launch launch = {device, NULL, stream};
    const int32_t log2 = read->way % 4, is_deep = read->way / 4;
    const int64_t num_parts = read->num_ranges << log2;
    if (num_parts > INT32_MAX / 2) {
        return fv_cuda_state_of(device)->host.fail(FV_ERR_INVALID, "a read of %lld parts; accepted: up to %d",
                                                   (long long)num_parts, INT32_MAX / 2);
    }
    const read_job job = {(const char *)read->base, read->ranges, read->sink, (int32_t)num_parts, log2};
    const int64_t most = (int64_t)device->num_workers * blocks_of_multiprocessor(is_deep ? 8 : 4);
    const int64_t wanted = fv_ceil_div(num_parts, WARPS);
    const dim3 grid((uint32_t)(wanted < most ? wanted : most));
    return fv_cuda_launch(&launch, "read", is_deep ? read_ranges<8> : read_ranges<4>, grid, THREADS, 0, job);
}

extern "C" const fv_device_probes fv_cuda_probes = {
    .large_bytes = 512ll << 20,
    .gemm_size = 8192,
    .cache_bytes = cuda_cache_bytes,
    .timer_create = cuda_timer_create,
    .timer_elapsed = cuda_timer_elapsed,
    .gate = cuda_gate,
    .empty = cuda_empty,
    .fill_random = cuda_fill_random,
    .read = cuda_read,
    .copy = cuda_copy,
};
