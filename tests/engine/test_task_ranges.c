/* Every task is taken once, by whom it was meant for unless that one is behind. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "engine/task_ranges.h"

enum { num_ranges = 4, num_tasks = 20011 };

static void test_order(void **state)
{
    (void)state;
    fv_task_range ranges[3];
    const fv_task_ranges of = {ranges, 3};
    fv_task_ranges_fill(&of, 7); /* 0 1, 2 3, 4 5 6 */
    const int64_t owners[] = {0, 2, 0, 2, 0, 0, 1, 2, 1};
    const int64_t tasks[] = {0, 4, 1, 5, 3, 2, 6, -1, -1};
    for (int32_t i = 0; i < FV_ARRAY_LEN(tasks); i++) {
        const int64_t task = fv_task_ranges_take(&of, owners[i]);
        assert_int_equal(task, tasks[i]);
    }
}

static void test_fewer_tasks_than_ranges(void **state)
{
    (void)state;
    fv_task_range ranges[num_ranges];
    const fv_task_ranges of = {ranges, num_ranges};
    for (int64_t count = 0; count <= num_ranges; count++) {
        fv_task_ranges_fill(&of, count);
        int32_t seen = 0;
        for (int64_t i = 0; i < count; i++) seen |= 1 << fv_task_ranges_take(&of, 1);
        assert_int_equal(seen, (1 << count) - 1);
        assert_int_equal(fv_task_ranges_take(&of, 1), -1);
    }
}

typedef struct taker {
    const fv_task_ranges *of;
    int64_t own;
    atomic_int *taken;
} taker;

static void *take_all(void *user)
{
    const taker *by = user;
    for (int64_t task; (task = fv_task_ranges_take(by->of, by->own)) >= 0;) atomic_fetch_add(&by->taken[task], 1);
    return NULL;
}

static void test_threads(void **state)
{
    (void)state;
    static atomic_int taken[num_tasks];
    fv_task_range ranges[num_ranges];
    const fv_task_ranges of = {ranges, num_ranges};
    fv_task_ranges_fill(&of, num_tasks);
    pthread_t threads[num_ranges - 1]; /* nobody begins with the last range */
    taker takers[num_ranges - 1];
    for (int32_t i = 0; i < num_ranges - 1; i++) {
        takers[i] = (taker){&of, i, taken};
        assert_int_equal(pthread_create(&threads[i], NULL, take_all, &takers[i]), 0);
    }
    for (int32_t i = 0; i < num_ranges - 1; i++) assert_int_equal(pthread_join(threads[i], NULL), 0);
    for (int32_t i = 0; i < num_tasks; i++) assert_int_equal(atomic_load(&taken[i]), 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_fewer_tasks_than_ranges),
        cmocka_unit_test(test_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
