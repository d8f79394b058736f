/* What a warp has asked wgmma for: products, each by all 32 lanes, in groups that it commits and waits for. They run some
 * time in between, the oldest first, and read shared memory then. A sum's registers are NaN from the commit on until the
 * last group that adds to it has run: what reads them before its wait computes NaN. */
#ifndef CUDA_EMULATOR_WGMMA_QUEUE_H
#define CUDA_EMULATOR_WGMMA_QUEUE_H

#include <deque>
#include <memory>
#include <vector>

#include "cuda_emulator/matrix.h"

/* As a lane asks for it. */
typedef struct wgmma_product {
    float *d; /* [columns / 2], the lane's registers */
    int32_t columns;
    matrix_type type;
    bool is_left_shared, is_transposed, adds;
    uint64_t left; /* descriptors */
    uint64_t right;
    uint32_t registers[4]; /* or the left operand itself */
} wgmma_product;

/* Registers that products add to, of all lanes. */
typedef struct wgmma_sum {
    float *d[32];
    int32_t columns;
    int32_t num_products; /* that have not run */
    matrix_sum of;
} wgmma_sum;

/* The same product, of all lanes. */
typedef struct wgmma_step {
    wgmma_product product; /* what is the same in all */
    wgmma_sum *sum;
    uint32_t registers[32][4];
} wgmma_step;

typedef struct wgmma_queue {
    std::vector<wgmma_product> asked[32]; /* by lanes, since the last commit */
    bool is_fenced[32];
    std::deque<std::vector<wgmma_step>> groups; /* that have not run */
    std::vector<std::unique_ptr<wgmma_sum>> sums;
} wgmma_queue;

/* Each returns NULL, or what is wrong. */
void wgmma_queue_fence(wgmma_queue *queue, int32_t lane);
const char *wgmma_queue_ask(wgmma_queue *queue, int32_t lane, const wgmma_product *product);

/* When all lanes have come to the commit. */
const char *wgmma_queue_commit(wgmma_queue *queue);

/* Runs the oldest group, as warp `warp` of the four. */
const char *wgmma_queue_run(wgmma_queue *queue, const matrix_memory *memory, int32_t warp);

#endif
