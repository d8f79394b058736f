/* The plan's buffers on the device: a header of counts, work items, reductions and index arrays, rewritten
 * in place at each update by a copy from a small ring of staging buffers, or a few where what is used lies far apart.
 *
 *   staging ring (page-locked host)   [0] [1] [2]  each with the event of its last copy
 *                                      |  copied in stream order
 *   device buffer                     header | items | reductions | indices | claims
 *
 * A host that runs ahead waits only when it comes round to a staging buffer whose copy has not passed.
 * Where host memory is device memory there is one buffer and no copy. The claims are the kernels' own: counters that
 * are 0 between runs. */
#ifndef FV_PLANNER_STEP_BUFFERS_H
#define FV_PLANNER_STEP_BUFFERS_H

#include "core/device.h"
#include "ops/work_item.h"

#define FV_STAGING_RING 3
#define FV_NUM_CLAIMS 16

/* Counts that kernels of a static grid read. */
typedef struct fv_step_header {
    int32_t num_seqs;
    int32_t num_tokens;
    int32_t num_items, num_reduces; /* of a static list; those behind them are empty */
    int32_t reserved[12];           /* one cache line */
} fv_step_header;

/* Entries of each part. */
typedef struct fv_step_sizes {
    int32_t num_items;
    int32_t num_reduces;
    int32_t num_indices;
} fv_step_sizes;

typedef struct fv_step_buffers {
    fv_device *device;
    fv_step_sizes room;
    size_t bytes; /* of one buffer */
    char *on_device;
    int32_t next; /* staging buffer that the next update fills */
    int32_t next_claims;
    struct {
        char *host;
        fv_event copied;
        int32_t in_flight;
    } ring[FV_STAGING_RING];
} fv_step_buffers;

/* Pointers into one buffer, host or device. */
typedef struct fv_step_view {
    fv_step_header *header;
    fv_work_item *items;
    fv_reduce_item *reduces;
    int32_t *indices; /* of gathered rows: planner/plan.h */
} fv_step_view;

fv_status fv_step_buffers_init(fv_step_buffers *buffers, fv_device *device, const fv_step_sizes *room);
void fv_step_buffers_deinit(fv_step_buffers *buffers);

/* Of all buffers, on the device and on the host. */
size_t fv_step_buffers_bytes(const fv_step_buffers *buffers);

/* The host memory to fill next; waits for its last copy. */
fv_status fv_step_buffers_begin(fv_step_view *host, fv_step_buffers *buffers);

/* Sends what begin() gave, up to the sizes used, to the device in stream order. */
fv_status fv_step_buffers_commit(fv_step_buffers *buffers, const fv_step_sizes *used, fv_stream stream);

/* A counter on the device for the attention of one run (fv_attend_params.claims): the next of FV_NUM_CLAIMS, so that as
 * many runs may be under way at once. NULL where host memory is device memory. */
int32_t *fv_step_buffers_take_claims(fv_step_buffers *buffers);

/* Where kernels read. Never changes. */
fv_step_view fv_step_buffers_on_device(const fv_step_buffers *buffers);

#endif
