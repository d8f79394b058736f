/* What runs the layers of a session's steps: one implementation for the CPU (run_cpu.c), one for devices with
 * memory of their own (run_device.c). The session has the plans, the caches and the arrays of the step; a
 * runner has the activations, and what else it needs in runner_state. */
#ifndef FV_ENGINE_RUNNER_H
#define FV_ENGINE_RUNNER_H

#include "engine/session.h"

struct fv_runner {
    fv_dtype activation_dtype; /* of queries and outputs of attention, where a session asks for none */
    fv_dtype default_kv_dtype;

    /* After plans and caches. Sets max_logit_rows and adds to the stats. A failure leaves what destroy takes. */
    fv_status (*create)(fv_session *session, const fv_session_options *options);
    void (*destroy)(fv_session *session);

    /* All layers over the step in session->step; updates the plans. Afterwards the arrays may be filled again. */
    fv_status (*run)(fv_session *session);

    /* *logits [num_rows, vocabulary] on the host, of `rows` of that step, ascending; valid until the next call. Up
     * to max_logit_rows. */
    fv_status (*compute_logits)(const float **logits, fv_session *session, const int32_t *rows, int32_t num_rows);
};

extern const fv_runner fv_cpu_runner;
extern const fv_runner fv_device_runner;

/* Rows of logits that a runner has room for: one for each request, and enough to score several positions of a
 * prompt in one GEMM. */
int32_t fv_runner_logit_rows(const fv_session *session);

#endif
