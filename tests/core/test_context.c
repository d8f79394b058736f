/* Context and executor: options, allocator, loops from several threads, fork. */
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "fovea/fovea.h"

enum { NUM_TASKS = 1000 };

typedef struct tally {
    atomic_int ran[NUM_TASKS];
    atomic_int busy[64]; /* tasks of one worker never overlap */
    atomic_int overlaps;
} tally;

static void count_task(void *user, int64_t index, int32_t worker)
{
    tally *counted = user;
    if (atomic_fetch_add(&counted->busy[worker], 1) != 0) atomic_fetch_add(&counted->overlaps, 1);
    atomic_fetch_add(&counted->ran[index], 1);
    atomic_fetch_sub(&counted->busy[worker], 1);
}

static void assert_each_ran(const tally *counted, int32_t times)
{
    for (int32_t i = 0; i < NUM_TASKS; i++) assert_int_equal(atomic_load(&counted->ran[i]), times);
}

static void test_loops_run_each_task_once(void **state)
{
    (void)state;
    for (int32_t threads = 1; threads <= 4; threads++) {
        const fv_context_options options = {.struct_size = sizeof(options), .num_threads = threads};
        fv_context *context = NULL;
        assert_int_equal(fv_context_create(&context, &options), FV_OK);
        assert_int_equal(fv_context_num_workers(context), threads);
        tally *counted = calloc(1, sizeof(*counted));
        for (int32_t i = 0; i < 50; i++) fv_context_parallel_for(context, NUM_TASKS, count_task, counted);
        assert_each_ran(counted, 50);
        assert_int_equal(atomic_load(&counted->overlaps), 0);
        fv_context_parallel_for(context, 0, count_task, counted);
        fv_context_parallel_for(context, 1, count_task, counted);
        assert_int_equal(atomic_load(&counted->ran[0]), 51);
        free(counted);
        fv_context_destroy(context);
    }
}

/* Sleep between loops, so that workers go to sleep and wake. */
static void test_loops_after_idle_time(void **state)
{
    (void)state;
    const fv_context_options options = {.struct_size = sizeof(options), .num_threads = 3};
    fv_context *context = NULL;
    assert_int_equal(fv_context_create(&context, &options), FV_OK);
    tally *counted = calloc(1, sizeof(*counted));
    for (int32_t i = 0; i < 20; i++) {
        usleep(500);
        fv_context_parallel_for(context, NUM_TASKS, count_task, counted);
    }
    assert_each_ran(counted, 20);
    free(counted);
    fv_context_destroy(context);
}

typedef struct caller {
    fv_context *context;
    tally counted;
} caller;

static void *call_loops(void *user)
{
    caller *self = user;
    for (int32_t i = 0; i < 20; i++) fv_context_parallel_for(self->context, NUM_TASKS, count_task, &self->counted);
    return NULL;
}

static void test_two_threads_share_a_context(void **state)
{
    (void)state;
    const fv_context_options options = {.struct_size = sizeof(options), .num_threads = 3};
    fv_context *context = NULL;
    assert_int_equal(fv_context_create(&context, &options), FV_OK);
    caller *callers = calloc(2, sizeof(*callers));
    pthread_t threads[2];
    for (int32_t i = 0; i < 2; i++) {
        callers[i].context = context;
        pthread_create(&threads[i], NULL, call_loops, &callers[i]);
    }
    for (int32_t i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    for (int32_t i = 0; i < 2; i++) assert_each_ran(&callers[i].counted, 20);
    free(callers);
    fv_context_destroy(context);
}

/* A forked child has none of the pool's threads; its loops must still run. */
static void test_loops_in_a_forked_child(void **state)
{
    (void)state;
    const fv_context_options options = {.struct_size = sizeof(options), .num_threads = 3};
    fv_context *context = NULL;
    assert_int_equal(fv_context_create(&context, &options), FV_OK);
    tally *counted = calloc(1, sizeof(*counted));
    const pid_t child = fork();
    if (child == 0) {
        fv_context_parallel_for(context, NUM_TASKS, count_task, counted);
        for (int32_t i = 0; i < NUM_TASKS; i++) {
            if (atomic_load(&counted->ran[i]) != 1) _exit(1);
        }
        fv_context_destroy(context);
        _exit(0);
    }
    int exit_status = -1;
    assert_int_equal(waitpid(child, &exit_status, 0), child);
    assert_int_equal(exit_status, 0);
    free(counted);
    fv_context_destroy(context);
}

static atomic_int signals_elsewhere;
static pthread_t test_thread;

static void note_thread(int number)
{
    (void)number;
    if (!pthread_equal(pthread_self(), test_thread)) atomic_fetch_add(&signals_elsewhere, 1);
}

/* A caller that blocks a signal to wait for it gets it: no worker takes it first. */
static void test_workers_take_no_signals(void **state)
{
    (void)state;
    test_thread = pthread_self();
    struct sigaction action = {.sa_handler = note_thread}, before;
    sigaction(SIGUSR1, &action, &before);
    const fv_context_options options = {.struct_size = sizeof(options), .num_threads = 3};
    fv_context *context = NULL;
    assert_int_equal(fv_context_create(&context, &options), FV_OK);
    sigset_t waited, mask_before;
    sigemptyset(&waited);
    sigaddset(&waited, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &waited, &mask_before);
    assert_int_equal(sigismember(&mask_before, SIGUSR1), 0); /* the caller's mask is what it was */
    kill(getpid(), SIGUSR1);
    const struct timespec limit = {.tv_sec = 10};
    assert_int_equal(sigtimedwait(&waited, NULL, &limit), SIGUSR1);
    assert_int_equal(atomic_load(&signals_elsewhere), 0);
    pthread_sigmask(SIG_SETMASK, &mask_before, NULL);
    sigaction(SIGUSR1, &before, NULL);
    fv_context_destroy(context);
}

typedef struct counting_allocator {
    int32_t live, made, fail_after;
} counting_allocator;

static void *counting_alloc(void *user, size_t bytes, size_t alignment)
{
    counting_allocator *counted = user;
    if (counted->made >= counted->fail_after) return NULL;
    void *memory = NULL;
    if (posix_memalign(&memory, alignment, bytes) != 0) return NULL;
    counted->made++;
    counted->live++;
    return memory;
}

static void counting_free(void *user, void *memory)
{
    counting_allocator *counted = user;
    if (memory) counted->live--;
    free(memory);
}

/* Every allocation of creating a context and a plan fails once; nothing leaks, the code says why. */
static void test_out_of_memory_at_every_allocation(void **state)
{
    (void)state;
    const fv_problem problem = {.struct_size = sizeof(problem),
                                .kind = FV_ATTENTION_MHA,
                                .mha = {4, 2, 64, 0},
                                .q_dtype = FV_DTYPE_F32,
                                .block_size = 16,
                                .kv_layout_any = 1};
    const fv_bounds bounds = {sizeof(bounds), 4, 64, 0, 1024};
    for (int32_t fail_after = 0;; fail_after++) {
        counting_allocator counted = {.fail_after = fail_after};
        const fv_context_options options = {
            .struct_size = sizeof(options), .num_threads = 1, .allocator = {counting_alloc, counting_free, &counted}};
        fv_context *context = NULL;
        fv_plan *plan = NULL;
        fv_status status = fv_context_create(&context, &options);
        if (status == FV_OK) status = fv_plan_create(&plan, context, &problem, &bounds, NULL);
        fv_plan_destroy(plan);
        fv_context_destroy(context);
        assert_int_equal(counted.live, 0);
        if (status == FV_OK) {
            assert_true(fail_after >= 4);
            return;
        }
        assert_int_equal(status, FV_ERR_NO_MEMORY);
        assert_true(strlen(fv_last_error()) > 0);
        if (fail_after == 2) assert_non_null(strstr(fv_last_error(), "no memory for a pool")); /* the third */
    }
}

static void test_wrong_options_are_refused(void **state)
{
    (void)state;
    fv_context *context = (fv_context *)&context; /* what was there is not left for a clean-up to destroy */
    fv_context_options options = {.struct_size = 3};
    assert_int_equal(fv_context_create(&context, &options), FV_ERR_INVALID);
    assert_null(context);
    options = (fv_context_options){.struct_size = sizeof(options), .num_threads = -1};
    assert_int_equal(fv_context_create(&context, &options), FV_ERR_INVALID);
    assert_non_null(strstr(fv_last_error(), "-1"));
    options = (fv_context_options){.struct_size = sizeof(options), .isa = "sse9"};
    assert_int_equal(fv_context_create(&context, &options), FV_ERR_INVALID);
    assert_non_null(strstr(fv_last_error(), "avx2"));
    options = (fv_context_options){.struct_size = sizeof(options), .allocator = {counting_alloc, NULL, NULL}};
    assert_int_equal(fv_context_create(&context, &options), FV_ERR_INVALID);
    assert_null(context);
    fv_context_destroy(NULL);
}

/* A caller's executor, which counts the loops that are in it at once. */
typedef struct lent_loops {
    fv_context *context;
    int32_t at_once, most, num_loops;
    int32_t num_tasks, num_inner;
} lent_loops;

static void lent_parallel_for(void *user, int64_t num_tasks, fv_task_fn task, void *task_user)
{
    lent_loops *loops = user;
    loops->num_loops++;
    if (++loops->at_once > loops->most) loops->most = loops->at_once;
    for (int64_t i = 0; i < num_tasks; i++) task(task_user, i, (int32_t)(i % 2));
    loops->at_once--;
}

static void inner_task(void *user, int64_t index, int32_t worker)
{
    (void)index;
    lent_loops *loops = user;
    assert_int_equal(worker, 0);
    loops->num_inner++;
}

static void outer_task(void *user, int64_t index, int32_t worker)
{
    (void)index;
    (void)worker;
    lent_loops *loops = user;
    loops->num_tasks++;
    fv_context_parallel_for(loops->context, 3, inner_task, loops);
}

/* A loop within a loop stays in its thread. */
static void test_a_lent_executor_has_one_loop(void **state)
{
    (void)state;
    lent_loops loops = {0};
    const fv_context_options options = {
        .struct_size = sizeof(options), .executor = {lent_parallel_for, 2, &loops}, .no_plugins = 1};
    assert_int_equal(fv_context_create(&loops.context, &options), FV_OK);
    assert_int_equal(fv_context_num_workers(loops.context), 2);
    fv_context_parallel_for(loops.context, 5, outer_task, &loops);
    fv_context_parallel_for(loops.context, 5, outer_task, &loops);
    assert_int_equal(loops.most, 1);
    assert_int_equal(loops.num_loops, 2);
    assert_int_equal(loops.num_tasks, 10);
    assert_int_equal(loops.num_inner, 30);
    fv_context_destroy(loops.context);
}

/* As after a failed fv_device_find, whose error nobody looked at. */
static void test_no_device_is_refused(void **state)
{
    (void)state;
    void *memory = NULL;
    fv_stream stream = NULL;
    fv_graph graph = NULL;
    assert_int_equal(fv_device_alloc(&memory, NULL, 64), FV_ERR_INVALID);
    assert_non_null(strstr(fv_last_error(), "fv_device_alloc"));
    assert_int_equal(fv_device_copy_in(NULL, &memory, &memory, sizeof(memory), NULL), FV_ERR_INVALID);
    assert_int_equal(fv_stream_create(&stream, NULL), FV_ERR_INVALID);
    assert_int_equal(fv_graph_begin(NULL, NULL), FV_ERR_INVALID);
    assert_int_equal(fv_graph_end(&graph, NULL, NULL), FV_ERR_INVALID);
    assert_int_equal(fv_dtype_parse(NULL, "float16"), FV_ERR_INVALID);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_loops_run_each_task_once),     cmocka_unit_test(test_loops_after_idle_time),
        cmocka_unit_test(test_two_threads_share_a_context),  cmocka_unit_test(test_loops_in_a_forked_child),
        cmocka_unit_test(test_a_lent_executor_has_one_loop), cmocka_unit_test(test_out_of_memory_at_every_allocation),
        cmocka_unit_test(test_wrong_options_are_refused),    cmocka_unit_test(test_workers_take_no_signals),
        cmocka_unit_test(test_no_device_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
