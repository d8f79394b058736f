/* The samples where the plans run: copies of them in a device's memory, and the way of the results back. */
#ifndef FV_TOOLS_ACCURACY_DEVICE_H
#define FV_TOOLS_ACCURACY_DEVICE_H

#include "accuracy/sample.h"
#include "fovea/plan.h"

/* Arrays of the device, as in accuracy_samples. On the CPU they are copies too. */
typedef struct accuracy_device {
    fv_device *device;
    fv_stream stream;
    void *q, *latents;
    void *block_table, *query_start, *seq_lens;
    void *out; /* [num_samples, num_heads, 512] bf16 */
    void *workspace;
} accuracy_device;

/* Allocates, and copies what all rounds of samples share: block table and lengths. deinit takes a zeroed one. */
fv_status accuracy_device_init(accuracy_device *at, fv_device *device, const accuracy_samples *samples,
                               size_t workspace_bytes);
void accuracy_device_deinit(accuracy_device *at);

/* Sends queries and latents to the device. They must stay as they are until a run has returned. */
fv_status accuracy_device_send(accuracy_device *at, const accuracy_samples *samples);

/* out [num_samples, num_heads, 512] bf16, on the host = the plan's result for the first num_samples samples sent. */
fv_status accuracy_device_run(uint16_t *out, const accuracy_device *at, fv_plan *plan, const accuracy_samples *samples,
                              int32_t num_samples);

#endif
