/* What a device can do, measured in the same run: the floor of a launch, a copy, a matrix product, and a pure read
 * of given pages. */
#ifndef FV_TOOLS_BENCH_DEVICE_CEILINGS_H
#define FV_TOOLS_BENCH_DEVICE_CEILINGS_H

#include "bench/ceilings.h"
#include "bench/device_clock.h"

/* Medians. */
typedef struct fv_device_ceilings {
    double empty_us;          /* a graph with one kernel that does nothing */
    double copy_bytes_per_us; /* of large_bytes of the probes, bytes read and bytes written */
    double read_bytes_per_us; /* of as many */
    double bf16_flops_per_us; /* a GEMM of gemm_size in each direction; 0: the device has none */
    double fp8_flops_per_us;
} fv_device_ceilings;

fv_status fv_device_ceilings_measure(fv_device_ceilings *ceilings, fv_device_clock *clock);

/* A pure read of pages, the same of each of several memories, as graphs. */
typedef struct fv_device_read {
    fv_device *device;
    void *ranges, *sink; /* on the device */
    int64_t num_ranges;
    fv_graph *graphs; /* [num_memories] */
    int32_t num_memories;
} fv_device_read;

/* `ranges` of each of the memories; the way of reading that is the fastest is tried out. */
fv_status fv_device_read_init(fv_device_read *read, fv_device_clock *clock, void *const *memories, int32_t num_memories,
                              const fv_read_range *ranges, int64_t num_ranges);
void fv_device_read_deinit(fv_device_read *read); /* takes a zeroed one */

/* Captures one call of `send` into a graph. */
typedef fv_status (*fv_send_fn)(void *user, fv_stream stream);
fv_status fv_capture(fv_graph *graph, fv_device_clock *clock, fv_send_fn send, void *user);

#endif
