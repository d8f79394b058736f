/* The accuracy tables in a reduced form, through the backend AMLA: few samples of few heads over the full context.
 * Columns of low variance come near the paper's figures; in all of them AMLA stays near multiplication, and without
 * the compensation the loss shows. The result in double against a plain loop, and the null device, which stands in
 * for a GPU, against the CPU. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "accuracy/table.h"
#include "core/compiler.h"
#include "core/float.h"

typedef struct bench {
    fv_context *context;
    accuracy_lab lab;
} bench;

static void bench_init(bench *b, const accuracy_setup *setup)
{
    const fv_context_options options = {.struct_size = sizeof(options), .num_threads = 2, .no_plugins = 1};
    assert_int_equal(fv_context_create(&b->context, &options), FV_OK);
    assert_int_equal(accuracy_lab_init(&b->lab, b->context, setup), FV_OK);
}

static void bench_deinit(bench *b)
{
    accuracy_lab_deinit(&b->lab);
    fv_context_destroy(b->context);
}

/* --- the exact result ------------------------------------------------------------------------------------- */

static double dot(const uint16_t *a, const uint16_t *b)
{
    double sum = 0;
    for (int32_t d = 0; d < ACCURACY_HEAD_SIZE; d++) sum += (double)fv_f32_of_bf16(a[d]) * (double)fv_f32_of_bf16(b[d]);
    return sum;
}

/* One head, key by key. */
static void plain_row(double *out, const accuracy_samples *samples, int32_t head, double scale)
{
    const uint16_t *q = samples->q + (ptrdiff_t)head * ACCURACY_HEAD_SIZE;
    double max = -INFINITY, sum = 0;
    for (int32_t key = 0; key < samples->context; key++)
        max = fmax(max, scale * dot(q, accuracy_latent(samples, 0, key)));
    for (int32_t d = 0; d < ACCURACY_LATENT; d++) out[d] = 0;
    for (int32_t key = 0; key < samples->context; key++) {
        const uint16_t *latent = accuracy_latent(samples, 0, key);
        const double p = exp(scale * dot(q, latent) - max);
        sum += p;
        for (int32_t d = 0; d < ACCURACY_LATENT; d++) out[d] += p * (double)fv_f32_of_bf16(latent[d]);
    }
    for (int32_t d = 0; d < ACCURACY_LATENT; d++) out[d] /= sum;
}

static void test_exact(void **state)
{
    (void)state;
    enum { NUM_HEADS = 11, CONTEXT = 205, BLOCK_KEYS = 64 };
    static const accuracy_distribution distribution = {ACCURACY_GAUSSIAN, 1.5f};
    static double out[ACCURACY_GROUP * ACCURACY_LATENT], expected[ACCURACY_LATENT];
    const double scale = 1.0 / 24;
    accuracy_samples samples;
    assert_int_equal(accuracy_samples_init(&samples, 1, NUM_HEADS, CONTEXT, 3), FV_OK);
    accuracy_sample_fill(&samples, 0, &distribution, 77);
    void *scratch = malloc(accuracy_exact_scratch(CONTEXT));
    assert_non_null(scratch);
    accuracy_moves moves = {0};
    for (int32_t first = 0; first < NUM_HEADS; first += ACCURACY_GROUP) {
        accuracy_exact(out, &moves, &samples, 0, first, scale, BLOCK_KEYS, scratch);
        for (int32_t lane = 0; lane < ACCURACY_GROUP && first + lane < NUM_HEADS; lane++) {
            plain_row(expected, &samples, first + lane, scale);
            for (int32_t d = 0; d < ACCURACY_LATENT; d++)
                assert_true(fabs(out[lane * ACCURACY_LATENT + d] - expected[d]) <= 1e-12);
        }
    }
    assert_int_equal(moves.num_blocks, NUM_HEADS * 3); /* 4 blocks, the first does not count */
    assert_true(moves.num_max > 0 && moves.num_max < moves.num_blocks && moves.num_integer <= moves.num_max);
    free(scratch);
    accuracy_samples_deinit(&samples);
}

/* --- the tables --------------------------------------------------------------------------------------------- */

/* Of blocks in random order the second has the maximum with probability 1/2, the third 1/3 and so on. */
static double moved_at_random(int32_t num_blocks)
{
    double sum = 0;
    for (int32_t i = 2; i <= num_blocks; i++) sum += 1.0 / i;
    return sum / (num_blocks - 1);
}

static void test_tables(void **state)
{
    (void)state;
    static const struct {
        int32_t column;
        double near_paper; /* |error / paper's - 1|; few samples of peaked softmaxes vary more */
        double least_loss; /* without the compensation, as a multiple of Base */
    } cases[] = {{0, 0.05, 0.95}, {1, 0.05, 1.2},  {2, 0.06, 1.25}, {3, 0.1, 1.25},
                 {5, 0.4, 1.4},   {6, 0.05, 0.95}, {8, 0.06, 1.2}};
    const accuracy_setup setup = {.num_samples = 2, .num_heads = 32, .context = 8192, .seed = 1};
    bench b;
    bench_init(&b, &setup);
    for (int32_t i = 0; i < FV_ARRAY_LEN(cases); i++) {
        const accuracy_paper_column *paper = &accuracy_paper[cases[i].column];
        accuracy_column column = {.distribution = paper->distribution};
        assert_int_equal(accuracy_measure(&column, &b.lab, NULL, NULL), FV_OK);
        const double base = column.error[ACCURACY_BASE], amla = column.error[ACCURACY_AMLA];
        const double uncompensated = column.error[ACCURACY_UNCOMPENSATED];
        if (!(fabs(amla / base - 1) <= 0.035 && fabs(base / paper->base - 1) <= cases[i].near_paper &&
              fabs(amla / paper->amla - 1) <= cases[i].near_paper && uncompensated / base >= cases[i].least_loss))
            fail_msg("column %d: Base %g, AMLA %g, without compensation %g; the paper %g, %g", cases[i].column, base,
                     amla, uncompensated, paper->base, paper->amla);
        const double moved = moved_at_random(setup.context / b.lab.block_keys);
        assert_true(column.max_moved > 0.75 * moved && column.max_moved < 1.25 * moved);
        assert_true(column.integer_moved > 0.125 * moved && column.integer_moved <= column.max_moved);
    }
    bench_deinit(&b);
}

/* Through the tile kernels: every CPU has them, emulated. */
static void test_emulated(void **state)
{
    (void)state;
    const accuracy_setup setup = {
        .num_samples = 2, .num_heads = 16, .context = 4096, .seed = 1, .kernels = "amx-emulated"};
    bench b;
    bench_init(&b, &setup);
    accuracy_column column = {.distribution = {ACCURACY_GAUSSIAN, 3}};
    assert_int_equal(accuracy_measure(&column, &b.lab, NULL, NULL), FV_OK);
    const double base = column.error[ACCURACY_BASE];
    assert_true(base > 1.4e-3 && base < 1.9e-3);
    assert_true(fabs(column.error[ACCURACY_AMLA] / base - 1) <= 0.04);
    assert_true(column.error[ACCURACY_UNCOMPENSATED] / base >= 1.2);
    assert_true(column.max_moved > 0.1 && column.max_moved < 0.25); /* of 16 blocks of 256 */
    bench_deinit(&b);
}

/* The same numbers whatever the threads are. */
static void test_seed(void **state)
{
    (void)state;
    accuracy_column columns[2] = {{.distribution = {ACCURACY_UNIFORM, 3}}, {.distribution = {ACCURACY_UNIFORM, 3}}};
    for (int32_t i = 0; i < 2; i++) {
        const accuracy_setup setup = {.num_samples = 3, .num_heads = 5, .context = 700, .seed = 9};
        const fv_context_options options = {.struct_size = sizeof(options), .num_threads = 1 + 2 * i, .no_plugins = 1};
        bench b = {0};
        assert_int_equal(fv_context_create(&b.context, &options), FV_OK);
        assert_int_equal(accuracy_lab_init(&b.lab, b.context, &setup), FV_OK);
        assert_int_equal(accuracy_measure(&columns[i], &b.lab, NULL, NULL), FV_OK);
        bench_deinit(&b);
    }
    for (int32_t i = 0; i < ACCURACY_NUM_METHODS; i++) assert_true(columns[0].error[i] == columns[1].error[i]);
    assert_true(columns[0].max_moved == columns[1].max_moved);
}

/* A device brings the figures of the CPU with the same kernels, the last round not full. */
static void test_device(void **state)
{
    (void)state;
    static const char *const devices[] = {"cpu", "null"};
    accuracy_column columns[2] = {{.distribution = {ACCURACY_GAUSSIAN, 3}}, {.distribution = {ACCURACY_GAUSSIAN, 3}}};
    for (int32_t i = 0; i < 2; i++) {
        const accuracy_setup setup = {.num_samples = 3,
                                      .num_heads = 5,
                                      .context = 1100,
                                      .seed = 4,
                                      .device = devices[i],
                                      .kernels = i == 0 ? "portable" : NULL};
        const fv_context_options options = {.struct_size = sizeof(options), .num_threads = 2};
        bench b = {0};
        assert_int_equal(fv_context_create(&b.context, &options), FV_OK);
        if (accuracy_lab_init(&b.lab, b.context, &setup) != FV_OK) fail_msg("%s: %s", devices[i], fv_last_error());
        assert_int_equal(accuracy_measure(&columns[i], &b.lab, NULL, NULL), FV_OK);
        bench_deinit(&b);
    }
    for (int32_t i = 0; i < ACCURACY_NUM_METHODS; i++) {
        assert_true(columns[0].error[i] > 0);
        assert_true(columns[0].error[i] == columns[1].error[i]);
    }
    assert_true(columns[0].error[ACCURACY_BASE] != columns[0].error[ACCURACY_AMLA]);
    assert_true(columns[0].max_moved == columns[1].max_moved && columns[0].integer_moved == columns[1].integer_moved);
}

/* What a device has not is refused, and the lab is left empty. */
static void test_refusals(void **state)
{
    (void)state;
    static const struct {
        const char *device, *kernels, *text;
    } cases[] = {{"null", "amx-emulated", "run on the CPU"},
                 {"null", "avx2", "no kernels 'avx2' on device null"},
                 {"nope", NULL, "no device 'nope:0'"}};
    const fv_context_options options = {.struct_size = sizeof(options), .num_threads = 1};
    fv_context *context;
    assert_int_equal(fv_context_create(&context, &options), FV_OK);
    for (int32_t i = 0; i < FV_ARRAY_LEN(cases); i++) {
        const accuracy_setup setup = {
            .num_samples = 1, .num_heads = 1, .context = 64, .device = cases[i].device, .kernels = cases[i].kernels};
        accuracy_lab lab;
        assert_true(accuracy_lab_init(&lab, context, &setup) != FV_OK);
        if (!strstr(fv_last_error(), cases[i].text)) fail_msg("%s", fv_last_error());
        assert_null(lab.at.device);
    }
    fv_context_destroy(context);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exact), cmocka_unit_test(test_tables), cmocka_unit_test(test_emulated),
        cmocka_unit_test(test_seed),  cmocka_unit_test(test_device), cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
