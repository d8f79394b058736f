/* MLA with weights through a backend: plan, update, run, on the kernels of a table. The GEMM is the host's. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "backends/backend.h"
#include "check/mla_weights.h"
#include "check/mla_weights_case.h"
#include "core/error.h"
#include "core/float.h"
#include "fovea/backend.h"

static const char *const backends[] = {"TRITON_MLA", "ROCM_AITER_MLA", "ROCM_AITER_TRITON_MLA", "AMLA"};

#define MAX_GEMM_K 512 /* kv_lora_rank at most */

/* One column of c. */
static void multiply_column(const fv_gemm *g, int64_t matrix, int64_t n)
{
    const int64_t a_bytes = (int64_t)fv_dtype_bytes(g->a_dtype), b_bytes = (int64_t)fv_dtype_bytes(g->b_dtype);
    const int64_t b_step = g->b_is_transposed ? b_bytes : g->b_row_stride;
    const char *b = (const char *)g->b + matrix * g->b_matrix_stride +
                    n * (g->b_is_transposed ? g->b_row_stride : b_bytes);
    float column[MAX_GEMM_K];
    for (int64_t k = 0; k < g->k; k++) column[k] = fv_float_load(b + k * b_step, g->b_dtype);
    for (int64_t m = 0; m < g->m; m++) {
        const char *a = (const char *)g->a + matrix * g->a_matrix_stride + m * g->a_row_stride;
        char *c = (char *)g->c + matrix * g->c_matrix_stride + m * g->c_row_stride;
        double sum = 0;
        for (int64_t k = 0; k < g->k; k++) sum += (double)fv_float_load(a + k * a_bytes, g->a_dtype) * column[k];
        fv_float_store(c + n * (int64_t)fv_dtype_bytes(g->c_dtype), (float)sum, g->c_dtype);
    }
}

/* In memory that host and device see, after what the stream has before it. */
static fv_status host_gemm(void *user, const fv_gemm *g, fv_stream stream)
{
    const fv_status status = fv_stream_synchronize(user, stream);
    if (g->k > MAX_GEMM_K) return fv_fail(FV_ERR_UNSUPPORTED, "k is %d; accepted: up to %d", g->k, MAX_GEMM_K);
    for (int64_t i = 0; i < (int64_t)g->num_matrices * g->n && status == FV_OK; i++)
        multiply_column(g, i / g->n, i % g->n);
    return status;
}

typedef struct weights_run {
    check_mla_weights test;
    const check_lane *lane;
    fv_plan *plan;
    void *workspace;
} weights_run;

static fv_status open_plan(weights_run *run, const char *backend, const char *kernels)
{
    check_mla_weights *test = &run->test;
    const fv_bounds bounds = {sizeof(bounds), test->num_seqs, fv_max_i32(1, test->num_tokens),
                              fv_max_i32(1, test->max_query_len), fv_max_i32(1, test->max_seq_len)};
    fv_plan_options options = test->options;
    options.device = run->lane->device;
    options.backend = backend;
    options.kernels = kernels;
    if (test->tight_workspace) {
        options.max_workspace_bytes = 1;
        fv_status status = fv_plan_create(&run->plan, run->lane->context, &test->problem, &bounds, &options);
        const char *least = status == FV_ERR_INVALID ? strstr(fv_last_error(), "or from ") : NULL;
        if (!least || sscanf(least, "or from %zu on", &options.max_workspace_bytes) != 1) return status;
    }
    const fv_status status = fv_plan_create(&run->plan, run->lane->context, &test->problem, &bounds, &options);
    if (status == FV_OK) run->workspace = check_arena_alloc_fenced(&test->arena, fv_plan_workspace_bytes(run->plan));
    return status;
}

static fv_status run_plan(weights_run *run, check_mla_fault fault)
{
    const check_mla_weights *test = &run->test;
    const fv_batch batch = {
        .struct_size = sizeof(batch),
        .num_seqs = test->num_seqs,
        .num_tokens = test->num_tokens,
        .query_start = test->query_start,
        .seq_lens = test->seq_lens,
        .block_table = test->block_table,
        .block_table_stride = test->width,
        .block_table_width = test->width,
        .slot_mapping = test->slots,
        .host_query_start = test->query_start,
        .host_seq_lens = test->seq_lens,
    };
    fv_layer layer = {
        .struct_size = sizeof(layer),
        .q = test->q,
        .k = test->k,
        .kv_cache = test->view,
        .out = test->out,
        .lse = test->lse,
        .k_scale = test->k_scale,
        .kv_up = test->kv_up,
        .gemm = host_gemm,
        .gemm_user = run->lane->device,
        .rope_cos = test->cos,
        .rope_sin = test->sin,
        .num_rope_positions = test->num_positions,
    };
    fv_status status = fv_plan_update(run->plan, &batch, NULL);
    if (status == FV_OK && fault) fault(run->plan, &layer);
    if (status == FV_OK) status = fv_plan_run(run->plan, &layer, run->workspace, NULL);
    return status == FV_OK ? fv_stream_synchronize(run->lane->device, NULL) : status;
}

static int32_t row_good(check_result *result, weights_run *run, int32_t seq, int32_t token, int32_t head)
{
    check_mla_weights *test = &run->test;
    const int32_t query_len = test->query_start[seq + 1] - test->query_start[seq];
    const int32_t absorbed = run->plan->static_grid || query_len <= run->plan->decode_threshold;
    check_mla_row expected;
    check_mla_weights_expect(&expected, test, seq, token, head, absorbed);
    const int64_t row = test->query_start[seq] + token;
    const char *at = (const char *)test->out.data + row * test->out.stride_bytes[0] + head * test->out.stride_bytes[1];
    double error2 = 0;
    for (int64_t d = 0; d < test->out.shape[2]; d++) {
        const double error = fv_float_load(at + d * test->out.stride_bytes[2], test->out.dtype) - expected.out[d];
        error2 += error * error;
    }
    const double lse = ((const float *)test->lse.data)[row * test->lse.shape[1] + head];
    const int32_t lse_good = expected.lse == -INFINITY ? lse == expected.lse
                                                       : fabs(lse - expected.lse) <= expected.lse_error;
    if (expected.error > 0) result->worst = fmax(result->worst, sqrt(error2) / expected.error);
    if (sqrt(error2) <= expected.error && lse_good) return 1;
    check_result_fail(result,
                      "%s, sequence %d (%d, %d), token %d, head %d: error %.3g > %.3g, or lse %.7g not %.7g "
                      "within %.3g",
                      absorbed ? "absorbed" : "expanded", seq, query_len, test->seq_lens[seq], token, head,
                      sqrt(error2), expected.error, lse, expected.lse, expected.lse_error);
    return 0;
}

/* The first and the last token of each sequence, and one between, one head each. */
static void judge(check_result *result, weights_run *run)
{
    check_mla_weights *test = &run->test;
    if (memcmp(test->cache, test->cache_after, test->cache_bytes) != 0) {
        check_result_fail(result, "the cache is not what writing the new latents makes of it");
        return;
    }
    if (!check_arena_fences_whole(&test->arena)) {
        check_result_fail(result, "out, lse or the workspace is written beyond its end");
        return;
    }
    for (int32_t seq = 0; seq < test->num_seqs; seq++) {
        const int32_t query_len = test->query_start[seq + 1] - test->query_start[seq];
        const int32_t tokens[] = {0, query_len / 2, query_len - 1};
        for (int32_t i = 0; i < fv_min_i32(3, query_len); i++) {
            const int32_t head = (seq + i) % test->problem.mla.num_heads;
            if (!row_good(result, run, seq, tokens[query_len < 3 ? 2 * i : i], head)) return;
        }
    }
}

/* The backend's own reasons, or those of an option. */
static void skip(check_result *result, const weights_run *run, const char *backend)
{
    char reasons[400];
    const fv_status known = fv_backend_why_not(reasons, sizeof(reasons), backend, run->lane->device,
                                               &run->test.problem);
    check_result_skip(result, "%s", known == FV_OK && reasons[0] ? reasons : fv_last_error());
}

static void run_case(check_result *result, const check_lane *lane, const char *kernels, uint64_t seed, int32_t index,
                     check_mla_fault fault)
{
    check_random random = check_random_of(seed ^ 0x317a5, (uint64_t)index);
    const char *backend = backends[index % FV_ARRAY_LEN(backends)];
    check_result_init(result, "mla_weights", "%s with weights on %s", backend, kernels);
    weights_run run = {.lane = lane};
    check_mla_weights_init(&run.test, &random);
    fv_status status = open_plan(&run, backend, kernels);
    if (status == FV_ERR_UNSUPPORTED) {
        skip(result, &run, backend);
    } else {
        if (status == FV_OK) status = run_plan(&run, fault);
        if (status != FV_OK)
            check_result_fail(result, "%s: %s", fv_status_name(status), fv_last_error());
        else
            judge(result, &run);
    }
    fv_plan_destroy(run.plan);
    check_mla_weights_deinit(&run.test);
}

void check_run_mla_weights(check_result *result, const check_lane *lane, const fv_kernel_table *table, uint64_t seed,
                           int32_t index)
{
    run_case(result, lane, table->name, seed, index, NULL);
}

void check_run_mla_weights_spoiled(check_result *result, const check_lane *lane, uint64_t seed, int32_t index,
                                   check_mla_fault fault)
{
    run_case(result, lane, "reference", seed, index, fault);
}
