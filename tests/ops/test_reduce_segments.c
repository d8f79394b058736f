/* reduce_segments in every table: one item that is dealt out to several workers, of more segments than a row's weights
 * are kept for, gives the bits of a single worker, and the sums in double. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "ops/ops_fixture.h"

enum { HEADS = 5, TOKENS = 2, D = 64, SEGMENTS = 300, SLOTS = SEGMENTS * TOKENS, OUTPUTS = TOKENS * HEADS * D };

typedef struct partials {
    float out[SLOTS * HEADS * D];
    float max[SLOTS * HEADS], sum[SLOTS * HEADS];
} partials;

/* A third of the rows have no key, those of token 1 and head 3 all. */
static void fill(partials *p)
{
    uint32_t seed = 3;
    for (int32_t row = 0; row < SLOTS * HEADS; row++) {
        const int32_t token = row / HEADS % TOKENS, head = row % HEADS;
        const int32_t is_empty = next_random(&seed) % 3 == 0 || (token == 1 && head == 3);
        p->max[row] = is_empty ? -INFINITY : 3 * next_normal(&seed);
        p->sum[row] = is_empty ? NAN : 1 + (float)(next_random(&seed) % 8);
        for (int32_t d = 0; d < D; d++) p->out[row * D + d] = is_empty ? NAN : next_normal(&seed);
    }
}

/* The tasks of a loop from the last to the first: they may come in any order. */
static void run_backwards(void *user, int64_t num_tasks, fv_task_fn task, void *task_user)
{
    *(int64_t *)user = num_tasks;
    for (int64_t i = num_tasks - 1; i >= 0; i--) task(task_user, i, 0);
}

static double exact(double *lse, const partials *p, int32_t token, int32_t head, int32_t d)
{
    double sum = 0, value = 0;
    for (int32_t segment = 0; segment < SEGMENTS; segment++) {
        const int32_t row = (segment * TOKENS + token) * HEADS + head;
        if (p->max[row] == -INFINITY) continue;
        sum += exp(p->max[row]) * (double)p->sum[row];
        value += exp(p->max[row]) * (double)p->out[row * D + d];
    }
    *lse = log(sum);
    return sum > 0 ? value / sum : 0;
}

static void test_dealt_out(void **state)
{
    (void)state;
    partials *p = malloc(sizeof(*p));
    assert_non_null(p);
    fill(p);
    const fv_reduce_item item = {.num_tokens = TOKENS, .num_segments = SEGMENTS};
    float out[OUTPUTS], lse[TOKENS * HEADS], alone[OUTPUTS], lse_alone[TOKENS * HEADS];
    fv_reduce_params params = {
        .out_token_stride = HEADS * D * 4,
        .out_head_stride = D * 4,
        .out_dtype = FV_DTYPE_F32,
        .lse_token_stride = HEADS * 4,
        .lse_head_stride = 4,
        .num_heads = HEADS,
        .v_head_size = D,
        .items = &item,
        .num_items = 1,
        .partial_out = p->out,
        .partial_max = p->max,
        .partial_sum = p->sum,
    };
    int64_t num_tasks = 0;
    const fv_executor executor = {run_backwards, 3, &num_tasks};
    const fv_launch launches[] = {serial_launch(), {.executor = &executor}};
    const fv_kernel_table *const *tables;
    const int32_t num_tables = cpu_tables(&tables);
    for (int32_t table = 0; table < num_tables; table++) {
        for (int32_t i = 0; i < 2; i++) {
            params.out = i == 0 ? alone : out;
            params.lse = i == 0 ? lse_alone : lse;
            must(tables[table]->reduce_segments(&launches[i], &params));
        }
        assert_memory_equal(out, alone, sizeof(out));
        assert_memory_equal(lse, lse_alone, sizeof(lse));
        for (int32_t row = 0; row < TOKENS * HEADS; row++) {
            for (int32_t d = 0; d < D; d++) {
                double total;
                const double value = exact(&total, p, row / HEADS, row % HEADS, d);
                assert_true(fabs(out[row * D + d] - value) <= 1e-5);
                assert_true(total == -INFINITY ? lse[row] == -INFINITY : fabs(lse[row] - total) <= 1e-5);
            }
        }
    }
    assert_int_equal(num_tasks, HEADS); /* of the strongest table */
    free(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_dealt_out)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
