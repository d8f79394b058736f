/* The stages of an MLA layer that decodes: their work, their times, and how both are printed.
 *
 * The layer multiplies through its caller's GEMM, so the caller can time each product by itself; what is
 * left of a run is attention, with the rotation of the queries and the write to the cache. */
#ifndef FV_TOOLS_BENCH_MLA_STAGES_H
#define FV_TOOLS_BENCH_MLA_STAGES_H

#include "fovea/mla.h"

typedef enum fv_mla_stage {
    FV_MLA_DOWN = 0, /* of queries and latents */
    FV_MLA_UP,
    FV_MLA_ABSORB,
    FV_MLA_ATTENTION,
    FV_MLA_PROJECT,
    FV_MLA_W_O,
    FV_MLA_NUM_STAGES,
} fv_mla_stage;

/* "QKV_down", "absorb" and so on. */
const char *fv_mla_stage_name(fv_mla_stage stage);

/* The sizes of the problem; the rest of the shape is in `mla`. */
typedef struct fv_mla_sizes {
    int32_t batch, dim, q_lora;
    fv_mla_shape mla;
    fv_dtype dtype, kv_dtype; /* of weights and activations; of the cache */
} fv_mla_sizes;

/* What a stage must at least read, write and compute for one new token of each sequence. */
typedef struct fv_mla_work {
    double bytes, operations;
} fv_mla_work;

/* `num_keys` counts the new one. */
fv_mla_work fv_mla_stage_work(const fv_mla_sizes *sizes, fv_mla_stage stage, int32_t num_keys);

#define FV_MLA_MAX_SPANS 64

/* Times the products of a layer by the weights that they read: on the CPU by the clock, on a device by events around
 * each product in the stream. */
typedef struct fv_mla_timer {
    const fv_mla_layer *layer; /* whose weights are told apart */
    fv_device *device;
    fv_gemm_fn gemm; /* multiplies */
    void *gemm_user;
    double stage_us[FV_MLA_NUM_STAGES]; /* of this run */
    struct {
        fv_event start, end; /* made when first needed */
        fv_mla_stage stage;
    } spans[FV_MLA_MAX_SPANS]; /* on a device: products of this run */
    int32_t num_spans;
} fv_mla_timer;

/* An fv_gemm_fn; `user` is an fv_mla_timer. */
fv_status fv_mla_timer_gemm(void *user, const fv_gemm *gemm, fv_stream stream);

/* Before a run, and after it, when the stream has passed: fills in stage_us. */
void fv_mla_timer_begin(fv_mla_timer *timer);
fv_status fv_mla_timer_end(fv_mla_timer *timer);
void fv_mla_timer_deinit(fv_mla_timer *timer);

#endif
