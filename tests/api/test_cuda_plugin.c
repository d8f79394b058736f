/* The CUDA plugin on whatever machine this is: without it, without a driver or without a GPU a status with a
 * text, and a context that stays usable; with a GPU its memory, streams and graphs. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "fovea/fovea.h"

typedef struct fixture {
    fv_context *context;
    fv_device *device; /* NULL: there is none */
} fixture;

static int open_device(void **state)
{
    fixture *test = calloc(1, sizeof(*test));
    assert_int_equal(fv_context_create(&test->context, NULL), FV_OK);
    if (fv_device_find(&test->device, test->context, "cuda") != FV_OK) test->device = NULL;
    *state = test;
    return 0;
}

static int close_device(void **state)
{
    fixture *test = *state;
    fv_context_destroy(test->context);
    free(test);
    return 0;
}

static fixture *with_gpu(void **state)
{
    fixture *test = *state;
    if (!test->device) skip();
    return test;
}

static void test_answers_with_a_text(void **state)
{
    const fixture *test = *state;
    for (int32_t i = 0; i < 2; i++) {
        fv_device *device = NULL;
        const fv_status status = fv_device_find(&device, test->context, "cuda");
        if (test->device) {
            assert_int_equal(status, FV_OK);
            assert_ptr_equal(device, test->device);
            continue;
        }
        assert_int_equal(status, FV_ERR_UNSUPPORTED);
        assert_non_null(strstr(fv_last_error(), "cuda"));
    }
    fv_device *device = NULL;
    assert_int_equal(fv_device_find(&device, test->context, "cuda:999"), FV_ERR_UNSUPPORTED);
    assert_non_null(strstr(fv_last_error(), "cuda:999"));
    assert_int_equal(fv_device_find(&device, test->context, "cpu"), FV_OK);
    assert_string_equal(fv_device_name(device), "cpu");
}

static void *find_in_thread(void *user)
{
    fv_context *context = NULL;
    fv_device *device = NULL;
    intptr_t same = fv_context_create(&context, NULL) == FV_OK;
    same &= (fv_device_find(&device, context, "cuda") == FV_OK) == (user != NULL);
    fv_context_destroy(context);
    return (void *)same;
}

static void test_second_context_in_another_thread(void **state)
{
    const fixture *test = *state;
    pthread_t thread;
    void *same = NULL;
    assert_int_equal(pthread_create(&thread, NULL, find_in_thread, test->device), 0);
    pthread_join(thread, &same);
    assert_non_null(same);
}

static void test_memory_goes_there_and_back(void **state)
{
    const fixture *test = with_gpu(state);
    enum { BYTES = 1 << 20 };
    void *memory = NULL, *pinned = NULL;
    fv_stream stream = NULL;
    assert_int_equal(fv_device_alloc(&memory, test->device, BYTES), FV_OK);
    assert_int_equal((uintptr_t)memory % 256, 0);
    assert_int_equal(fv_device_alloc_host(&pinned, test->device, BYTES), FV_OK);
    assert_int_equal(fv_stream_create(&stream, test->device), FV_OK);
    uint8_t *bytes = pinned;
    for (int32_t i = 0; i < BYTES; i++) bytes[i] = (uint8_t)(i * 7);
    assert_int_equal(fv_device_copy_in(test->device, memory, bytes, BYTES, stream), FV_OK);
    assert_int_equal(fv_device_fill(test->device, memory, 0x5a, 100, stream), FV_OK);
    assert_int_equal(fv_stream_synchronize(test->device, stream), FV_OK);
    memset(bytes, 0, BYTES);
    assert_int_equal(fv_device_copy_out(test->device, bytes, memory, BYTES, stream), FV_OK);
    assert_int_equal(fv_stream_synchronize(test->device, stream), FV_OK);
    for (int32_t i = 0; i < BYTES; i++) assert_int_equal(bytes[i], i < 100 ? 0x5a : (uint8_t)(i * 7));
    fv_stream_destroy(test->device, stream);
    fv_device_free_host(test->device, pinned);
    fv_device_free(test->device, memory);
}

static void test_too_much_memory_is_a_status(void **state)
{
    const fixture *test = with_gpu(state);
    void *memory = NULL;
    assert_int_equal(fv_device_alloc(&memory, test->device, (size_t)1 << 50), FV_ERR_NO_MEMORY);
    assert_non_null(strstr(fv_last_error(), "1125899906842624"));
    assert_int_equal(fv_device_alloc(&memory, test->device, 16), FV_OK); /* the device stays usable */
    fv_device_free(test->device, memory);
}

static void test_graph_replays(void **state)
{
    const fixture *test = with_gpu(state);
    void *memory = NULL;
    fv_stream stream = NULL;
    fv_graph graph = NULL;
    uint8_t byte = 0;
    assert_int_not_equal(fv_graph_begin(test->device, NULL), FV_OK); /* the default stream */
    assert_int_equal(fv_device_alloc(&memory, test->device, 256), FV_OK);
    assert_int_equal(fv_stream_create(&stream, test->device), FV_OK);
    assert_int_equal(fv_graph_begin(test->device, stream), FV_OK);
    assert_int_equal(fv_device_fill(test->device, memory, 0x77, 256, stream), FV_OK);
    assert_int_equal(fv_graph_end(&graph, test->device, stream), FV_OK);
    for (int32_t i = 0; i < 3; i++) {
        assert_int_equal(fv_device_fill(test->device, memory, 0, 256, stream), FV_OK);
        assert_int_equal(fv_graph_launch(test->device, graph, stream), FV_OK);
        assert_int_equal(fv_device_copy_out(test->device, &byte, memory, 1, stream), FV_OK);
        assert_int_equal(fv_stream_synchronize(test->device, stream), FV_OK);
        assert_int_equal(byte, 0x77);
    }
    fv_graph_destroy(test->device, graph);
    fv_stream_destroy(test->device, stream);
    fv_device_free(test->device, memory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_answers_with_a_text, open_device, close_device),
        cmocka_unit_test_setup_teardown(test_second_context_in_another_thread, open_device, close_device),
        cmocka_unit_test_setup_teardown(test_memory_goes_there_and_back, open_device, close_device),
        cmocka_unit_test_setup_teardown(test_too_much_memory_is_a_status, open_device, close_device),
        cmocka_unit_test_setup_teardown(test_graph_replays, open_device, close_device),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
