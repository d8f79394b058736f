/* In place of the kernels' hopper/mbarrier.cuh: the same functions, as the emulator does them (copy_engine.cpp,
 * cluster_barrier.cpp, warpgroup.cpp). What they
 * mean is said there. */
#ifndef FV_KERNELS_CUDA_HOPPER_MBARRIER_CUH
#define FV_KERNELS_CUDA_HOPPER_MBARRIER_CUH

#include "kernels/cuda/ptx.cuh"

void ptx_mbarrier_init(uint64_t *barrier, uint32_t count);
void ptx_mbarrier_arrive(uint64_t *barrier);
void ptx_mbarrier_arrive_and_wait(uint64_t *barrier);
void ptx_mbarrier_wait(uint64_t *barrier, uint32_t parity);
void ptx_mbarrier_expect(uint64_t *barrier, uint32_t bytes);
static inline void ptx_fence_mbarrier_init(void) {}

void ptx_tensor_copy(void *shared, const fv_tensor_map *map, int32_t x, int32_t y, int32_t z, uint64_t *barrier);
void ptx_tensor_store(const fv_tensor_map *map, const void *shared, int32_t x, int32_t y, int32_t z);
void ptx_bulk_load(void *shared, const void *global, int32_t bytes, uint64_t *barrier);
inline void ptx_bulk_load_stream(void *shared, const void *global, int32_t bytes, uint64_t *barrier)
{
    ptx_bulk_load(shared, global, bytes, barrier);
}
void ptx_bulk_store(void *global, const void *shared, int32_t bytes);
void ptx_bulk_commit(void);
void ptx_bulk_wait_read(void);
void ptx_bulk_send(uint32_t shared, const void *from, int32_t bytes, uint32_t barrier);
void ptx_store_async_16(uint32_t shared, float4 value, uint32_t barrier);
void ptx_prefetch_map(const fv_tensor_map *map);
inline void ptx_bulk_prefetch(const void *, int32_t) {}
void ptx_cp_async_arrive(uint64_t *barrier);

void ptx_cluster_arrive(void);
void ptx_cluster_wait(void);
uint32_t ptx_shared_address_in(const void *pointer, uint32_t rank);

void ptx_bar_sync(int32_t id, int32_t threads);
void ptx_bar_arrive(int32_t id, int32_t threads);
bool ptx_bar_any(int32_t id, int32_t threads, bool is);

void ptx_stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3);
void ptx_stmatrix_x4_trans(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3);
bool ptx_elect(void);

/* Registers are the compiler's. */
template <int N> static inline void ptx_give_registers(void) {}
template <int N> static inline void ptx_take_registers(void) {}

#endif
