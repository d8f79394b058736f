/* Memory where a workload's kernels run: huge pages on the CPU where the system gives them, device memory elsewhere. */
#ifndef FV_TOOLS_BENCH_MEMORY_H
#define FV_TOOLS_BENCH_MEMORY_H

#include "fovea/device.h"

fv_status fv_bench_alloc(void **memory, fv_device *device, size_t bytes);
void fv_bench_free(fv_device *device, void *memory); /* takes NULL */

/* Copies host memory there, and returns when it is there. */
fv_status fv_bench_copy_in(fv_device *device, void *memory, const void *host, size_t bytes);

/* Both: a copy of the host's array. NULL for NULL. */
fv_status fv_bench_send(void **memory, fv_device *device, const void *host, size_t bytes);

#endif
