/* Contexts of the driver, on a GPU and on the emulated one: the plugin works in its GPU's primary context whatever a
 * thread has current, leaves that as it was, and makes no context on other GPUs. The driver's functions come from
 * libcuda.so.1, or from FOVEA_TEST_DRIVER; skipped where there is no GPU, or only one. */
#include <dlfcn.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "fovea/fovea.h"

enum { BYTES = 4096, BLOCK_SIZE = 16, HEAD_SIZE = 64, POINTER_CONTEXT = 1 /* CU_POINTER_ATTRIBUTE_CONTEXT */ };

/* As cuda.h has them: a context is a pointer, a GPU an int, 0 is success. */
typedef struct driver {
    int (*init)(unsigned int flags);
    int (*gpu)(int *gpu, int ordinal);
    int (*create)(void **context, unsigned int flags, int gpu);
    int (*destroy)(void *context);
    int (*current)(void **context);
    int (*primary_state)(int gpu, unsigned int *flags, int *is_active);
    int (*pointer)(void *value, int attribute, uintptr_t pointer); /* NULL: the emulator has none */
} driver;

static void must(fv_status status)
{
    if (status != FV_OK) fail_msg("%s: %s", fv_status_name(status), fv_last_error());
}

/* Skips the test where there is no GPU of that number. */
static driver driver_for(int ordinal)
{
    driver found = {0};
    const struct {
        const char *name;
        void *at;
    } functions[] = {
        {"cuInit", &found.init},
        {"cuDeviceGet", &found.gpu},
        {"cuCtxCreate_v2", &found.create},
        {"cuCtxDestroy_v2", &found.destroy},
        {"cuCtxGetCurrent", &found.current},
        {"cuDevicePrimaryCtxGetState", &found.primary_state},
        {"cuPointerGetAttribute", &found.pointer},
    };
    const char *name = getenv("FOVEA_TEST_DRIVER");
    void *library = dlopen(name ? name : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) skip();
    for (size_t i = 0; i < sizeof(functions) / sizeof(functions[0]); i++) {
        void *function = dlsym(library, functions[i].name);
        memcpy(functions[i].at, &function, sizeof(function));
        if (!function && functions[i].at != &found.pointer) fail_msg("no %s", functions[i].name);
    }
    int gpu;
    if (found.init(0) != 0 || found.gpu(&gpu, ordinal) != 0) skip();
    return found;
}

static void *current_of(const driver *cuda)
{
    void *context = NULL;
    assert_int_equal(cuda->current(&context), 0);
    return context;
}

static int is_active(const driver *cuda, int ordinal)
{
    int gpu, active = 0;
    unsigned int flags;
    assert_int_equal(cuda->gpu(&gpu, ordinal), 0);
    assert_int_equal(cuda->primary_state(gpu, &flags, &active), 0);
    return active;
}

static void open_device(fv_context **context, fv_device **device, const char *name)
{
    must(fv_context_create(context, NULL));
    must(fv_device_find(device, *context, name));
}

/* A kernel: block 0 of a cache becomes block 1. `blocks` is page-locked. */
static void copy_block(fv_device *device, void *memory, int64_t *blocks, fv_stream stream)
{
    fv_kv_view view;
    must(fv_kv_view_init(&view, memory, FV_KV_LAYOUT_NB_2_BS_H_D, FV_DTYPE_BF16, 2, BLOCK_SIZE, 1, HEAD_SIZE));
    blocks[0] = 0;
    blocks[1] = 1;
    must(fv_kv_copy(device, &view, blocks + 1, &view, blocks, 1, stream));
}

/* One call of each kind; the thread's context is `expected` after each. */
static void work(const driver *cuda, fv_device *device, const void *expected)
{
    void *memory = NULL, *blocks = NULL;
    fv_stream stream = NULL;
    fv_event event = NULL;
    fv_graph graph = NULL;
    uint8_t *bytes = NULL;
    size_t free_bytes, total_bytes;
#define KEEPS(call) \
    must(call);     \
    assert_ptr_equal(current_of(cuda), expected)
    KEEPS(fv_device_memory(&free_bytes, &total_bytes, device));
    KEEPS(fv_device_alloc(&memory, device, 2 * BYTES));
    KEEPS(fv_device_alloc_host(&blocks, device, BYTES));
    KEEPS(fv_device_alloc_host((void **)&bytes, device, BYTES));
    KEEPS(fv_stream_create(&stream, device));
    KEEPS(fv_event_create(&event, device));
    KEEPS(fv_device_fill(device, memory, 0x5a, BYTES, stream));
    KEEPS(fv_graph_begin(device, stream));
    copy_block(device, memory, blocks, stream);
    KEEPS(fv_graph_end(&graph, device, stream));
    KEEPS(fv_graph_launch(device, graph, stream));
    KEEPS(fv_event_record(device, event, stream));
    KEEPS(fv_event_synchronize(device, event));
    KEEPS(fv_device_copy_out(device, bytes, (char *)memory + BYTES, BYTES, stream));
    KEEPS(fv_stream_synchronize(device, stream));
#undef KEEPS
    for (int32_t i = 0; i < BYTES; i++) assert_int_equal(bytes[i], 0x5a);
    if (cuda->pointer) { /* not the caller's */
        void *context = NULL;
        assert_int_equal(cuda->pointer(&context, POINTER_CONTEXT, (uintptr_t)memory), 0);
        assert_ptr_not_equal(context, expected);
    }
    fv_graph_destroy(device, graph);
    fv_event_destroy(device, event);
    fv_stream_destroy(device, stream);
    fv_device_free_host(device, bytes);
    fv_device_free_host(device, blocks);
    fv_device_free(device, memory);
    assert_ptr_equal(current_of(cuda), expected);
}

/* First: nothing else in the process has used GPU 0. */
static void test_a_second_gpu_leaves_the_first_alone(void **state)
{
    (void)state;
    const driver cuda = driver_for(1);
    fv_context *context;
    fv_device *device;
    open_device(&context, &device, "cuda:1");
    work(&cuda, device, NULL);
    assert_int_equal(is_active(&cuda, 1), 1);
    assert_int_equal(is_active(&cuda, 0), 0);
    fv_context_destroy(context);
    assert_int_equal(is_active(&cuda, 0), 0); /* the run-time may keep GPU 1's for itself */
    assert_ptr_equal(current_of(&cuda), NULL);
}

static void test_a_callers_context_is_neither_used_nor_lost(void **state)
{
    (void)state;
    const driver cuda = driver_for(0);
    fv_context *context;
    fv_device *device;
    void *own = NULL;
    int gpu;
    assert_int_equal(cuda.gpu(&gpu, 0), 0);
    assert_int_equal(cuda.create(&own, 0, gpu), 0);
    open_device(&context, &device, "cuda");
    assert_ptr_equal(current_of(&cuda), own);
    work(&cuda, device, own);
    fv_context_destroy(context);
    assert_ptr_equal(current_of(&cuda), own);
    assert_int_equal(cuda.destroy(own), 0);
    assert_ptr_equal(current_of(&cuda), NULL);
}

typedef struct other_thread {
    const driver *cuda;
    fv_device *device;
} other_thread;

static void *work_in_thread(void *user)
{
    const other_thread *thread = user;
    work(thread->cuda, thread->device, NULL);
    return NULL;
}

static void test_a_thread_without_one_gets_none(void **state)
{
    (void)state;
    const driver cuda = driver_for(0);
    fv_context *context;
    fv_device *device;
    pthread_t thread;
    open_device(&context, &device, "cuda");
    other_thread other = {&cuda, device};
    assert_int_equal(pthread_create(&thread, NULL, work_in_thread, &other), 0);
    pthread_join(thread, NULL);
    fv_context_destroy(context);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_second_gpu_leaves_the_first_alone),
        cmocka_unit_test(test_a_callers_context_is_neither_used_nor_lost),
        cmocka_unit_test(test_a_thread_without_one_gets_none),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
