/* Barriers in shared memory that count arrivals and bytes (mbarrier), the copies that arrive at them, and the other
 * instructions by which warpgroups with roles of their own keep in step on Hopper (sm_90a): one thin function each. The
 * sections are those of NVIDIA's "Parallel Thread Execution ISA". */
#ifndef FV_KERNELS_CUDA_HOPPER_MBARRIER_CUH
#define FV_KERNELS_CUDA_HOPPER_MBARRIER_CUH

#include "kernels/cuda/ptx.cuh"

/* "mbarrier.init": `count` arrivals end a phase. By one thread; others see it after a fence and a barrier. */
__device__ __forceinline__ void ptx_mbarrier_init(uint64_t *barrier, uint32_t count)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(ptx_shared_address(barrier)), "r"(count) : "memory");
}

/* "fence.mbarrier_init": what was initialised, before other blocks of the cluster and the copy engine use it. */
__device__ __forceinline__ void ptx_fence_mbarrier_init(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/* "mbarrier.arrive". */
__device__ __forceinline__ void ptx_mbarrier_arrive(uint64_t *barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(ptx_shared_address(barrier)) : "memory");
}

/* "mbarrier.try_wait": until the phase of that parity has ended; parity 1 of a fresh barrier has. */
__device__ __forceinline__ void ptx_mbarrier_wait(uint64_t *barrier, uint32_t parity)
{
    asm volatile("{\n.reg .pred done;\nfv_wait:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra fv_wait;\n}\n" ::"r"(ptx_shared_address(barrier)),
                 "r"(parity)
                 : "memory");
}

/* An arrival, and a wait until the phase that it belongs to has ended. */
__device__ __forceinline__ void ptx_mbarrier_arrive_and_wait(uint64_t *barrier)
{
    asm volatile("{\n.reg .pred done;\n.reg .b64 phase;\nmbarrier.arrive.shared::cta.b64 phase, [%0];\n"
                 "fv_wait:\nmbarrier.try_wait.shared::cta.b64 done, [%0], phase;\n@!done bra fv_wait;\n}\n" ::"r"(
                     ptx_shared_address(barrier))
                 : "memory");
}

/* "mbarrier.arrive.expect_tx": an arrival; the phase does not end before that many more bytes are there. */
__device__ __forceinline__ void ptx_mbarrier_expect(uint64_t *barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(ptx_shared_address(barrier)), "r"(bytes)
                 : "memory");
}

/* "cp.async.bulk.tensor": a box of a map of three dimensions, from element (x, y, z) on, to shared memory; its bytes
 * arrive at the barrier. */
__device__ __forceinline__ void ptx_tensor_copy(void *shared, const fv_tensor_map *map, int32_t x, int32_t y, int32_t z,
                                                uint64_t *barrier)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(ptx_shared_address(shared)),
                 "l"(map), "r"(x), "r"(y), "r"(z), "r"(ptx_shared_address(barrier))
                 : "memory");
}

/* "cp.async.bulk.tensor": a box of shared memory to its place in a map, but for what lies outside; belongs to a group as
 * ptx_bulk_store does. What was written there before is seen behind a fence (ptx_fence_proxy_async). */
__device__ __forceinline__ void ptx_tensor_store(const fv_tensor_map *map, const void *shared, int32_t x, int32_t y,
                                                 int32_t z)
{
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map), "r"(x),
                 "r"(y), "r"(z), "r"(ptx_shared_address(shared))
                 : "memory");
}

/* "cp.async.bulk": bytes, a multiple of 16, from global to shared memory, both at multiples of 16; they arrive at the
 * barrier. */
__device__ __forceinline__ void ptx_bulk_load(void *shared, const void *global, int32_t bytes, uint64_t *barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     ptx_shared_address(shared)),
                 "l"(global), "r"(bytes), "r"(ptx_shared_address(barrier))
                 : "memory");
}

/* The same of what is read once. */
__device__ __forceinline__ void ptx_bulk_load_stream(void *shared, const void *global, int32_t bytes, uint64_t *barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
                 "[%3], %4;" ::"r"(ptx_shared_address(shared)),
                 "l"(global), "r"(bytes), "r"(ptx_shared_address(barrier)), "l"(ptx_policy_of_streams())
                 : "memory");
}

/* "cp.async.bulk": bytes, a multiple of 16, from shared to global memory, both at multiples of 16. What was written
 * there before is seen behind a fence (ptx_fence_proxy_async). */
__device__ __forceinline__ void ptx_bulk_store(void *global, const void *shared, int32_t bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
                 "r"(ptx_shared_address(shared)), "r"(bytes)
                 : "memory");
}

/* "cp.async.bulk.commit_group", "cp.async.bulk.wait_group.read": until all that this thread has stored so has been
 * read. */
__device__ __forceinline__ void ptx_bulk_commit(void) { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void ptx_bulk_wait_read(void)
{
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

/* "barrier.cluster": arrives, of all threads of a cluster's blocks, and waits for all that have not exited. Relaxed: of
 * what was written before, the others see mbarriers alone, behind ptx_fence_mbarrier_init. */
__device__ __forceinline__ void ptx_cluster_arrive(void)
{
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void ptx_cluster_wait(void) { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

/* "mapa": the shared address of what lies at the same place in block `rank` of the cluster. */
__device__ __forceinline__ uint32_t ptx_shared_address_in(const void *pointer, uint32_t rank)
{
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(ptx_shared_address(pointer)), "r"(rank));
    return address;
}

/* "st.async": 16 bytes to shared memory of a block of the cluster; they arrive at a barrier of that block. */
__device__ __forceinline__ void ptx_store_async_16(uint32_t shared, float4 value, uint32_t barrier)
{
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     shared),
                 "r"(__float_as_uint(value.x)), "r"(__float_as_uint(value.y)), "r"(__float_as_uint(value.z)),
                 "r"(__float_as_uint(value.w)), "r"(barrier)
                 : "memory");
}

/* "cp.async.bulk": bytes, a multiple of 16, to shared memory of a block of the cluster; they arrive at a barrier of
 * that block. What was written there before is seen behind a fence (ptx_fence_proxy_async). */
__device__ __forceinline__ void ptx_bulk_send(uint32_t shared, const void *from, int32_t bytes, uint32_t barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared),
                 "r"(ptx_shared_address(from)), "r"(bytes), "r"(barrier)
                 : "memory");
}

/* "cp.async.bulk.prefetch": bytes in one piece, to L2. */
__device__ __forceinline__ void ptx_bulk_prefetch(const void *global, int32_t bytes)
{
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

/* "prefetch.tensormap": the first copy by a map need not wait for it. */
__device__ __forceinline__ void ptx_prefetch_map(const fv_tensor_map *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* "cp.async.mbarrier.arrive": an arrival, counted in the barrier's number, when all copies that this thread has asked
 * for by cp.async are there. */
__device__ __forceinline__ void ptx_cp_async_arrive(uint64_t *barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(ptx_shared_address(barrier)) : "memory");
}

/* "bar": barrier `id` of `threads` threads, those that wait and those that only arrive. */
__device__ __forceinline__ void ptx_bar_sync(int32_t id, int32_t threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void ptx_bar_arrive(int32_t id, int32_t threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* "bar.red.or": the same wait; true in all of the threads where it is in one. */
__device__ __forceinline__ bool ptx_bar_any(int32_t id, int32_t threads, bool is)
{
    uint32_t any;
    asm volatile("{\n.reg .pred is, any;\nsetp.ne.b32 is, %3, 0;\nbar.red.or.pred any, %1, %2, is;\n"
                 "selp.u32 %0, 1, 0, any;\n}\n"
                 : "=r"(any)
                 : "r"(id), "r"(threads), "r"((uint32_t)is)
                 : "memory");
    return any != 0;
}

/* "Warp-level matrix store: stmatrix": four 8x8 matrices of 16-bit elements; lane l gives the shared address of row
 * l % 8 of matrix l / 8, and of each matrix elements 2 (l % 4) and the next of row l / 4. */
__device__ __forceinline__ void ptx_stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1),
                 "r"(r2), "r"(r3)
                 : "memory");
}

/* The same, each matrix transposed. */
__device__ __forceinline__ void ptx_stmatrix_x4_trans(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2,
                                                      uint32_t r3)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0),
                 "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}

/* "elect.sync": true in one lane of the warp, which all are in. */
__device__ __forceinline__ bool ptx_elect(void)
{
    uint32_t is_elected;
    asm volatile("{\n.reg .pred is;\nelect.sync _|is, 0xffffffff;\nselp.u32 %0, 1, 0, is;\n}\n" : "=r"(is_elected));
    return is_elected != 0;
}

/* "setmaxnreg": a warpgroup gives back registers, or waits until it has so many. */
template <int N> __device__ __forceinline__ void ptx_give_registers(void)
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void ptx_take_registers(void)
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

#endif
