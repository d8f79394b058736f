/* What each backend really does with a step, seen from below by kernels that count, and that all of them
 * arrive at the same numbers. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backends/counting_kernels.h"
#include "backends/step_fixture.h"
#include "core/compiler.h"
#include "support/thinned.h"

/* Decodes, extends and prefills in no order. */
static const step_lens mixed[] = {{1, 3000}, {300, 300}, {1, 700}, {40, 900}, {1, 17}, {129, 463}, {2, 2}, {64, 64}};

static const fv_problem llama_like = {.mha = {8, 2, 64, 0}, .q_dtype = FV_DTYPE_BF16};

static void init(step_fixture *step, const fv_problem *problem, const step_lens *lens, int32_t num_seqs,
                 int32_t shared_keys)
{
    fv_context *context = NULL;
    fv_device *device = NULL;
    assert_int_equal(counting_device_create(&context, &device), FV_OK);
    step_fixture_init(step, context, device, problem, lens, num_seqs, shared_keys);
}

static void run(step_fixture *step, const char *backend, const fv_plan_options *options)
{
    fv_status status = step_fixture_plan(step, backend, options);
    memset(&counted, 0, sizeof(counted));
    if (status == FV_OK) status = step_fixture_run(step);
    if (status != FV_OK) fail_msg("%s: %s", backend, fv_last_error());
    assert_int_equal(counted.longer_items, 0);
}

/* The row against its own sum in double; bf16 results are rounded once, sums of bf16 products are exact. */
static void check_row(const step_fixture *step, int32_t seq, int32_t token, int32_t head, const char *backend)
{
    double expected[512];
    const double lse = step_fixture_expect(expected, step, seq, token, head);
    const int32_t row = step->query_start[seq] + token, size = step->problem.mha.head_size;
    double error = 0, norm = 0;
    for (int32_t d = 0; d < size; d++) {
        const double difference = step_fixture_out(step, row, head, d) - expected[d];
        error += difference * difference;
        norm += expected[d] * expected[d];
    }
    const double tolerance = step->problem.q_dtype == FV_DTYPE_BF16 ? 0x1p-8 : 1e-5;
    const double found = step->lse[row * step->problem.mha.num_heads + head];
    if (!(sqrt(error) <= tolerance * sqrt(norm) + 1e-6) || !(fabs(found - lse) <= 1e-4)) {
        fail_msg("%s: sequence %d, token %d, head %d: error %g of %g, lse %g for %g", backend, seq, token, head,
                 sqrt(error), sqrt(norm), found, lse);
    }
}

static void check_some_rows(const step_fixture *step, const char *backend)
{
    const int32_t heads = step->problem.mha.num_heads;
    for (int32_t seq = 0; seq < step->num_seqs; seq++) {
        const int32_t query_len = step->query_start[seq + 1] - step->query_start[seq];
        const int32_t tokens[] = {0, query_len / 2, query_len - 1};
        for (int32_t i = 0; i < FV_ARRAY_LEN(tokens); i++) check_row(step, seq, tokens[i], (seq + i) % heads, backend);
    }
}

/* --- what a plan does --------------------------------------------------------------------------------- */

typedef struct strategy {
    kernel_counts counts;
    fv_kv_layout layout;
    size_t workspace_bytes;
} strategy;

static strategy strategy_of(const char *backend)
{
    step_fixture step;
    init(&step, &llama_like, mixed, FV_ARRAY_LEN(mixed), 0);
    run(&step, backend, NULL);
    check_some_rows(&step, backend);
    const strategy found = {counted, fv_plan_kv_layout(step.plan), fv_plan_workspace_bytes(step.plan)};
    step_fixture_deinit(&step);
    return found;
}

static void test_unified_backends_write_then_attend_once(void **state)
{
    (void)state;
    const strategy triton = strategy_of("TRITON_ATTN"), unified = strategy_of("ROCM_AITER_UNIFIED_ATTN");
    const strategy *both[] = {&triton, &unified};
    for (int32_t i = 0; i < 2; i++) {
        assert_int_equal(both[i]->counts.kv_write, 1);
        assert_int_equal(both[i]->counts.paged, 1);
        assert_int_equal(both[i]->counts.reduce_segments, both[i]->counts.partial_items > 0);
        assert_int_equal(both[i]->counts.paged_and_new + both[i]->counts.dense_new + both[i]->counts.kv_gather, 0);
    }
    assert_int_equal(triton.layout, FV_KV_LAYOUT_NB_2_BS_H_D);
    assert_int_equal(unified.layout, FV_KV_LAYOUT_2_NB_BS_H_D);
    /* 16 segments, or as many as the sequence has shares. */
    assert_true(triton.counts.partial_items > unified.counts.partial_items);
}

static void test_rocm_attn_has_two_kernels(void **state)
{
    (void)state;
    const strategy found = strategy_of("ROCM_ATTN");
    assert_int_equal(found.layout, FV_KV_LAYOUT_X_PACKED);
    assert_int_equal(found.counts.kv_write, 1);
    assert_int_equal(found.counts.paged_and_new, 1); /* prefix prefill, for queries of several tokens */
    assert_int_equal(found.counts.paged, 1);         /* partitioned decode */
    assert_int_equal(found.counts.reduce_segments, 1);
    assert_true(found.counts.partial_items > 0);
    assert_int_equal(found.counts.partial_items % (12 + 3), 0); /* 3000 and 700 keys by 256, runs of heads */
    assert_int_equal(found.counts.dense_new + found.counts.kv_gather, 0);
}

static void test_aiter_fa_routes(void **state)
{
    (void)state;
    const strategy found = strategy_of("ROCM_AITER_FA");
    assert_int_equal(found.layout, FV_KV_LAYOUT_SHUFFLED);
    assert_int_equal(found.counts.kv_write, 1);
    assert_int_equal(found.counts.paged, 1);          /* decodes */
    assert_int_equal(found.counts.dense_new, 2);      /* extends among themselves; prefills */
    assert_int_equal(found.counts.dense_gathered, 1); /* one chunk holds the context of both extends */
    assert_int_equal(found.counts.kv_gather, 1);
    assert_int_equal(found.counts.gathered_rows, 900 - 40 + 463 - 129);
    assert_int_equal(found.counts.merge_states, 2); /* their tokens do not follow each other */
    assert_int_equal(found.counts.paged_and_new, 0);
}

static void test_no_two_backends_do_the_same(void **state)
{
    (void)state;
    strategy all[16];
    const int32_t count = fv_backend_count();
    int32_t num_found = 0;
    for (int32_t i = 0; i < count && num_found < FV_ARRAY_LEN(all); i++) {
        char reasons[512];
        fv_problem problem = llama_like;
        problem.struct_size = sizeof(problem);
        problem.kind = FV_ATTENTION_MHA;
        problem.block_size = 16;
        problem.kv_layout_any = 1;
        assert_int_equal(fv_backend_why_not(reasons, sizeof(reasons), fv_backend_name(i), NULL, &problem), FV_OK);
        if (reasons[0]) continue;
        all[num_found++] = strategy_of(fv_backend_name(i));
    }
    assert_true(num_found >= 4);
    for (int32_t i = 0; i < num_found; i++) {
        for (int32_t j = 0; j < i; j++) {
            assert_int_not_equal(all[i].layout, all[j].layout);
            assert_memory_not_equal(&all[i].counts, &all[j].counts, sizeof(all[i].counts));
        }
    }
}

/* --- they agree ------------------------------------------------------------------------------------------ */

static void check_all_agree(const fv_problem *problem)
{
    step_fixture step;
    step_fixture_init(&step, NULL, NULL, problem, mixed, FV_ARRAY_LEN(mixed), 0);
    const int32_t heads = problem->mha.num_heads, size = problem->mha.head_size;
    const int32_t num_rows = step.num_tokens * heads;
    double *first = malloc((size_t)(num_rows * (size + 1)) * sizeof(*first));
    for (int32_t b = 0; b < fv_backend_count(); b++) {
        if (step_fixture_plan(&step, fv_backend_name(b), NULL) == FV_ERR_UNSUPPORTED) continue;
        assert_int_equal(step_fixture_run(&step), FV_OK);
        for (int32_t row = 0; row < num_rows; row++) {
            double *kept = first + (size_t)row * (size_t)(size + 1);
            double error = 0, norm = 0;
            for (int32_t d = 0; d < size; d++) {
                const double value = step_fixture_out(&step, row / heads, row % heads, d);
                if (b == 0) kept[d] = value;
                error += (value - kept[d]) * (value - kept[d]);
                norm += kept[d] * kept[d];
            }
            if (b == 0) kept[size] = step.lse[row];
            const double tolerance = problem->q_dtype == FV_DTYPE_BF16 ? 0x1p-7 : 1e-5;
            if (!(sqrt(error) <= tolerance * sqrt(norm) + 1e-6) || !(fabs(step.lse[row] - kept[size]) <= 1e-4)) {
                fail_msg("%s and %s differ in row %d: %g of %g, lse %g and %g", fv_backend_name(0), fv_backend_name(b),
                         row, sqrt(error), sqrt(norm), kept[size], (double)step.lse[row]);
            }
        }
    }
    free(first);
    step_fixture_deinit(&step);
}

static void test_all_backends_agree(void **state)
{
    (void)state;
    fv_problem problem = llama_like;
    check_all_agree(&problem);
    problem.sinks = 1;
    problem.soft_cap = 20;
    check_all_agree(&problem);
    problem.window = 100;
    problem.alibi = FV_ALIBI_LINEAR;
    problem.q_dtype = FV_DTYPE_F32;
    check_all_agree(&problem);
}

/* --- memory and limits ------------------------------------------------------------------------------------- */

/* A workspace too small for the batch: more rounds and chunks, the same numbers, no more memory. */
static void test_small_workspace_makes_more_chunks(void **state)
{
    (void)state;
    for (int32_t b = 0; b < fv_backend_count(); b++) {
        const char *backend = fv_backend_name(b);
        step_fixture step;
        fv_problem problem = llama_like;
        problem.sinks = 1;
        init(&step, &problem, mixed, FV_ARRAY_LEN(mixed), 0);
        if (step_fixture_plan(&step, backend, NULL) == FV_ERR_UNSUPPORTED) {
            step_fixture_deinit(&step);
            continue;
        }
        run(&step, backend, NULL);
        const size_t roomy = fv_plan_workspace_bytes(step.plan);
        const kernel_counts before = counted;
        fv_plan_options options = {.max_workspace_bytes = 1};
        assert_int_equal(step_fixture_plan(&step, backend, &options), FV_ERR_INVALID);
        const char *least = strstr(fv_last_error(), "or from ");
        assert_non_null(least);
        options.max_workspace_bytes = strtoull(least + strlen("or from "), NULL, 10);
        run(&step, backend, &options);
        assert_true(fv_plan_workspace_bytes(step.plan) <= options.max_workspace_bytes);
        assert_true(fv_plan_workspace_bytes(step.plan) < roomy);
        assert_true(counted.kv_gather >= before.kv_gather && counted.partial_items <= before.partial_items);
        if (before.kv_gather > 0) assert_true(counted.kv_gather > 4 * before.kv_gather);
        check_some_rows(&step, backend);
        step_fixture_deinit(&step);
    }
}

/* The example of vLLM's post: a prompt of 20,000 tokens under a budget of 16,384 a step. */
static void test_long_prompt_in_two_steps(void **state)
{
    (void)state;
    static const step_lens steps[] = {{16384 / (2 * thinned - 1), 16384 / (2 * thinned - 1)},
                                      {(20000 - 16384) / (2 * thinned - 1), 20000 / (2 * thinned - 1)}};
    const fv_problem problem = {.mha = {2, 1, 32, 0}, .q_dtype = FV_DTYPE_BF16};
    for (int32_t b = 0; b < fv_backend_count(); b++) {
        for (int32_t i = 0; i < FV_ARRAY_LEN(steps); i++) {
            step_fixture step;
            init(&step, &problem, &steps[i], 1, 0);
            if (step_fixture_plan(&step, fv_backend_name(b), NULL) != FV_ERR_UNSUPPORTED) {
                run(&step, fv_backend_name(b), NULL);
                if (strcmp(fv_backend_name(b), "ROCM_AITER_FA") == 0)
                    assert_int_equal(counted.gathered_rows, steps[i].seq_len - steps[i].query_len);
                check_some_rows(&step, fv_backend_name(b));
            }
            step_fixture_deinit(&step);
        }
    }
}

/* The tokens of the last sequence become tokens of none: their keys are written, their rows left as they are. */
static void test_tokens_of_no_sequence(void **state)
{
    (void)state;
    for (int32_t i = 0; i < 2 * fv_backend_count(); i++) {
        const char *backend = fv_backend_name(i / 2);
        const fv_plan_options options = {.static_grid = i % 2};
        step_fixture step;
        init(&step, &llama_like, mixed, FV_ARRAY_LEN(mixed), 0);
        if (step_fixture_plan(&step, backend, &options) == FV_OK) {
            step.num_seqs--;
            const int32_t first = step.query_start[step.num_seqs], num_rows = step.num_tokens - first;
            const fv_layer layer = step_fixture_layer(&step);
            const size_t row = (size_t)layer.out.stride_bytes[0], kv_row = (size_t)layer.k.stride_bytes[0];
            memset(step.out, 0x5a, (size_t)step.num_tokens * row);
            memset(step.lse, 0x5a, (size_t)step.num_tokens * (size_t)layer.lse.stride_bytes[0]);
            assert_int_equal(step_fixture_run(&step), FV_OK);
            check_some_rows(&step, backend);
            const char *out = (char *)step.out + (size_t)first * row, *lse = (char *)step.lse;
            for (size_t at = 0; at < (size_t)num_rows * row; at++) assert_int_equal(out[at], 0x5a);
            for (size_t at = (size_t)first * 8 * 4; at < (size_t)step.num_tokens * 8 * 4; at++)
                assert_int_equal(lse[at], 0x5a);

            char *k = malloc((size_t)num_rows * kv_row), *v = malloc((size_t)num_rows * kv_row);
            fv_tensor k_rows = layer.k, v_rows = layer.v;
            fv_batch batch = step_fixture_batch(&step);
            const int32_t key_start = 0, out_start[] = {0, num_rows};
            k_rows.data = k;
            v_rows.data = v;
            batch.block_table += step.num_seqs * step.width;
            batch.num_seqs = 1;
            assert_int_equal(fv_kv_gather(step.device, &k_rows, &v_rows, &step.view, &batch, &key_start, out_start,
                                          num_rows, NULL, NULL, 0, NULL),
                             FV_OK);
            assert_memory_equal(k, (char *)step.k + (size_t)first * kv_row, (size_t)num_rows * kv_row);
            assert_memory_equal(v, (char *)step.v + (size_t)first * kv_row, (size_t)num_rows * kv_row);
            free(k);
            free(v);
            step.num_seqs++;
        }
        step_fixture_deinit(&step);
    }
}

static void test_foreign_layout_is_refused_by_name(void **state)
{
    (void)state;
    step_fixture step;
    step_fixture_init(&step, NULL, NULL, &llama_like, mixed, FV_ARRAY_LEN(mixed), 0);
    step.problem.kv_layout_any = 0;
    step.problem.kv_layout = FV_KV_LAYOUT_SHUFFLED;
    assert_int_equal(step_fixture_plan(&step, "ROCM_ATTN", NULL), FV_ERR_UNSUPPORTED);
    assert_non_null(strstr(fv_last_error(), "ROCM_ATTN"));
    assert_non_null(strstr(fv_last_error(), "layout shuffled not supported (accepted: strided, x_packed)"));
    assert_int_equal(step_fixture_plan(&step, "auto", NULL), FV_OK); /* finds the one that takes it */
    assert_non_null(strstr(fv_plan_describe(step.plan), "ROCM_AITER_FA"));
    step.view.layout = FV_KV_LAYOUT_X_PACKED;
    assert_int_equal(step_fixture_run(&step), FV_ERR_INVALID);
    assert_non_null(strstr(fv_last_error(), "the KV cache has layout x_packed; the plan was made for shuffled"));
    step_fixture_deinit(&step);
}

/* --- routing ------------------------------------------------------------------------------------------------- */

/* Speculative verification of 4 tokens is decode up to the threshold, an extend above it. */
static void test_decode_threshold(void **state)
{
    (void)state;
    static const step_lens lens[] = {{4, 500}, {4, 900}};
    for (int32_t threshold = 1; threshold <= 4; threshold += 3) {
        step_fixture step;
        const fv_plan_options options = {.decode_threshold = threshold};
        init(&step, &llama_like, lens, 2, 0);
        run(&step, "ROCM_AITER_FA", &options);
        assert_int_equal(counted.paged, threshold == 4);
        assert_int_equal(counted.kv_gather, threshold == 4 ? 0 : 1);
        check_some_rows(&step, "ROCM_AITER_FA");
        run(&step, "ROCM_ATTN", &options);
        assert_int_equal(counted.paged, threshold == 4);
        assert_int_equal(counted.paged_and_new, threshold == 4 ? 0 : 1);
        check_some_rows(&step, "ROCM_ATTN");
        step_fixture_deinit(&step);
    }
}

/* With a window only the keys that some new token sees are gathered. */
static void test_windowed_extend_gathers_the_window(void **state)
{
    (void)state;
    static const step_lens lens[] = {{100, 2000}, {60, 61}};
    fv_problem problem = llama_like;
    problem.window = 64;
    step_fixture step;
    init(&step, &problem, lens, 2, 0);
    run(&step, "ROCM_AITER_FA", NULL);
    assert_int_equal(counted.gathered_rows, 63 + 1);
    check_some_rows(&step, "ROCM_AITER_FA");
    step_fixture_deinit(&step);
}

/* Shared blocks are read once for all members, in every backend, where that pays. */
static void test_cascade(void **state)
{
    (void)state;
    static const step_lens lens[] = {{1, 2100}, {1, 2500}, {1, 2049}, {1, 2050}, {1, 3000}, {1, 2300}};
    for (int32_t b = 0; b < fv_backend_count(); b++) {
        const char *backend = fv_backend_name(b);
        step_fixture step;
        init(&step, &llama_like, lens, FV_ARRAY_LEN(lens), 2048);
        const fv_plan_options off = {.cascade = FV_CASCADE_OFF};
        if (step_fixture_plan(&step, backend, NULL) == FV_ERR_UNSUPPORTED) {
            step_fixture_deinit(&step);
            continue;
        }
        run(&step, backend, &off);
        const kernel_counts apart = counted;
        check_some_rows(&step, backend);
        run(&step, backend, NULL);
        assert_int_equal(apart.shared_items, 0);
        assert_true(counted.shared_items > 0);
        assert_true(counted.keys_read < apart.keys_read / 2);
        assert_non_null(strstr(fv_plan_describe(step.plan), "cascade: 1 shared prefixes, 2048 keys"));
        check_some_rows(&step, backend);
        step_fixture_deinit(&step);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_unified_backends_write_then_attend_once),
        cmocka_unit_test(test_rocm_attn_has_two_kernels),
        cmocka_unit_test(test_aiter_fa_routes),
        cmocka_unit_test(test_no_two_backends_do_the_same),
        cmocka_unit_test(test_all_backends_agree),
        cmocka_unit_test(test_small_workspace_makes_more_chunks),
        cmocka_unit_test(test_long_prompt_in_two_steps),
        cmocka_unit_test(test_tokens_of_no_sequence),
        cmocka_unit_test(test_foreign_layout_is_refused_by_name),
        cmocka_unit_test(test_decode_threshold),
        cmocka_unit_test(test_windowed_extend_gathers_the_window),
        cmocka_unit_test(test_cascade),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
