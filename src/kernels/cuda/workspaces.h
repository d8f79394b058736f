/* The workspaces of products, one for each stream that has one: which is whose. Bookkeeping alone, nothing of CUDA.
 *
 * The first streams keep theirs until they are destroyed: an event behind each product would part kernels that overlap.
 * Those that come later share the rest, with such an event: a new one takes the workspace whose last product is the
 * oldest, once that has ended, for a stream that fv_stream_create did not make is gone without a word. What was
 * used under a capture is no other stream's until its own is destroyed, for the graph uses it wherever it is launched: beside it
 * neither the stream's products nor its other graphs may run. cudaStreamPerThread is one stream here, of all threads. */
#ifndef FV_KERNELS_CUDA_WORKSPACES_H
#define FV_KERNELS_CUDA_WORKSPACES_H

#include "core/device.h"

enum { FV_CUDA_NUM_WORKSPACES = 16, FV_CUDA_NUM_KEPT_WORKSPACES = 8 };

typedef struct fv_cuda_workspace {
    void *memory; /* NULL: the entry is free */
    fv_stream stream;
    fv_event end; /* of its last product; NULL: it is kept */
    uint64_t last_use;
    int32_t is_captured; /* under a capture, once; not looked at where it is kept */
} fv_cuda_workspace;

typedef struct fv_cuda_workspaces {
    fv_cuda_workspace entries[FV_CUDA_NUM_WORKSPACES];
    uint64_t num_uses;
} fv_cuda_workspaces;

/* The stream's, or NULL. */
static inline fv_cuda_workspace *fv_cuda_workspace_of(fv_cuda_workspaces *all, fv_stream stream)
{
    for (int32_t i = 0; i < FV_CUDA_NUM_WORKSPACES; i++) {
        fv_cuda_workspace *entry = &all->entries[i];
        if (entry->memory && entry->stream == stream) return entry;
    }
    return NULL;
}

/* For a stream that has none: a free one, else another stream's; NULL: graphs use all of them. */
static inline fv_cuda_workspace *fv_cuda_workspace_choose(fv_cuda_workspaces *all)
{
    fv_cuda_workspace *oldest = NULL;
    for (int32_t i = 0; i < FV_CUDA_NUM_WORKSPACES; i++) {
        fv_cuda_workspace *entry = &all->entries[i];
        if (!entry->memory) return entry;
        if (i < FV_CUDA_NUM_KEPT_WORKSPACES || entry->is_captured) continue;
        if (!oldest || entry->last_use < oldest->last_use) oldest = entry;
    }
    return oldest;
}

static inline int32_t fv_cuda_workspace_is_kept(const fv_cuda_workspaces *all, const fv_cuda_workspace *entry)
{
    return entry < &all->entries[FV_CUDA_NUM_KEPT_WORKSPACES];
}

static inline void fv_cuda_workspace_use(fv_cuda_workspaces *all, fv_cuda_workspace *entry, fv_stream stream,
                                         int32_t is_captured)
{
    entry->stream = stream;
    entry->last_use = ++all->num_uses;
    entry->is_captured |= is_captured;
}

#endif
