/* Products of the CUDA plugin on more streams than there are workspaces. Where there is no GPU or no cuBLASLt the choice
 * of a workspace alone; the emulated GPU has a cuBLASLt of its own (tests/fake_cublaslt). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "fovea/fovea.h"
#include "kernels/cuda/workspaces.h"

enum { NUM_STREAMS = 40, M = 8, N = 16, K = 32, NUM_SHARED = FV_CUDA_NUM_WORKSPACES - FV_CUDA_NUM_KEPT_WORKSPACES };

/* --- the choice ------------------------------------------------------------------------------------------------- */

static fv_stream stream_of(int32_t number) { return (fv_stream)(uintptr_t)(number + 1); }

/* The stream's entry, after one more product; NULL: it has none. */
static fv_cuda_workspace *use(fv_cuda_workspaces *all, int32_t number, int32_t is_captured)
{
    fv_cuda_workspace *entry = fv_cuda_workspace_of(all, stream_of(number));
    if (!entry) entry = fv_cuda_workspace_choose(all);
    if (!entry) return NULL;
    entry->memory = entry;
    fv_cuda_workspace_use(all, entry, stream_of(number), is_captured);
    return entry;
}

static void test_the_oldest_of_the_shared_ones_goes(void **state)
{
    (void)state;
    fv_cuda_workspaces all = {0};
    for (int32_t i = 0; i < FV_CUDA_NUM_WORKSPACES; i++) assert_ptr_equal(use(&all, i, 0), &all.entries[i]);
    use(&all, FV_CUDA_NUM_KEPT_WORKSPACES, 0); /* is not the oldest now */
    assert_ptr_equal(use(&all, 100, 0), &all.entries[FV_CUDA_NUM_KEPT_WORKSPACES + 1]);
    assert_null(fv_cuda_workspace_of(&all, stream_of(FV_CUDA_NUM_KEPT_WORKSPACES + 1)));
    assert_ptr_equal(use(&all, 100, 0), &all.entries[FV_CUDA_NUM_KEPT_WORKSPACES + 1]);
    for (int32_t i = 0; i < FV_CUDA_NUM_KEPT_WORKSPACES; i++)
        assert_ptr_equal(fv_cuda_workspace_of(&all, stream_of(i)), &all.entries[i]);
}

static void test_what_a_capture_used_stays(void **state)
{
    (void)state;
    fv_cuda_workspaces all = {0};
    for (int32_t i = 0; i < FV_CUDA_NUM_WORKSPACES; i++) use(&all, i, i % 2);
    for (int32_t i = 100; i < 200; i++) assert_true((use(&all, i, 0) - all.entries) % 2 == 0);
    for (int32_t i = 0; i < NUM_SHARED / 2; i++) assert_non_null(use(&all, 200 + i, 1));
    assert_null(use(&all, 300, 0));
    memset(&all.entries[9], 0, sizeof(all.entries[9])); /* its stream was destroyed */
    assert_ptr_equal(use(&all, 300, 0), &all.entries[9]);
}

/* --- on a GPU ----------------------------------------------------------------------------------------------------- */

typedef struct fixture {
    fv_context *context;
    fv_device *device;
    fv_stream streams[NUM_STREAMS];
    float *numbers; /* page-locked: a, b, and c of each stream */
    int32_t has_gemm;
} fixture;

static void must(fv_status status)
{
    if (status != FV_OK) fail_msg("%s: %s", fv_status_name(status), fv_last_error());
}

static float *out_of(const fixture *test, int32_t stream) { return test->numbers + M * K + K * N + stream * M * N; }

static fv_status multiply(const fixture *test, int32_t stream)
{
    const fv_gemm gemm = {
        .struct_size = sizeof(gemm),
        .num_matrices = 1,
        .m = M,
        .n = N,
        .k = K,
        .a_dtype = FV_DTYPE_F32,
        .b_dtype = FV_DTYPE_F32,
        .c_dtype = FV_DTYPE_F32,
        .a = test->numbers,
        .a_row_stride = K * sizeof(float),
        .b = test->numbers + M * K,
        .b_row_stride = N * sizeof(float),
        .c = out_of(test, stream),
        .c_row_stride = N * sizeof(float),
    };
    return fv_device_gemm(test->device, &gemm, test->streams[stream]);
}

/* Small whole numbers: any order of sums is exact. */
static void check(const fixture *test, int32_t stream)
{
    const float *a = test->numbers, *b = a + M * K, *c = out_of(test, stream);
    must(fv_stream_synchronize(test->device, test->streams[stream]));
    for (int32_t row = 0; row < M; row++) {
        for (int32_t column = 0; column < N; column++) {
            float sum = 0;
            for (int32_t k = 0; k < K; k++) sum += a[row * K + k] * b[k * N + column];
            if (!(c[row * N + column] == sum))
                fail_msg("stream %d: %g, not %g", stream, (double)c[row * N + column], (double)sum);
        }
    }
}

static int open_fixture(void **state)
{
    static fixture test;
    const size_t count = M * K + K * N + NUM_STREAMS * M * N;
    memset(&test, 0, sizeof(test));
    *state = &test;
    must(fv_context_create(&test.context, NULL));
    if (fv_device_find(&test.device, test.context, "cuda") != FV_OK) return 0;
    must(fv_device_alloc_host((void **)&test.numbers, test.device, count * sizeof(float)));
    for (size_t i = 0; i < count; i++) test.numbers[i] = (float)(i * 7 % 11) - 5;
    for (int32_t i = 0; i < NUM_STREAMS; i++) must(fv_stream_create(&test.streams[i], test.device));
    test.has_gemm = multiply(&test, 0) != FV_ERR_UNSUPPORTED;
    return 0;
}

static int close_fixture(void **state)
{
    fixture *test = *state;
    if (test->device) {
        for (int32_t i = 0; i < NUM_STREAMS; i++) fv_stream_destroy(test->device, test->streams[i]);
        fv_device_free_host(test->device, test->numbers);
    }
    fv_context_destroy(test->context);
    return 0;
}

static void test_more_streams_than_workspaces(void **state)
{
    const fixture *test = *state;
    if (!test->has_gemm) skip();
    for (int32_t round = 0; round < 2; round++) {
        memset(out_of(test, 0), 0xff, NUM_STREAMS * M * N * sizeof(float));
        for (int32_t i = 0; i < NUM_STREAMS; i++) must(multiply(test, i));
        for (int32_t i = 0; i < NUM_STREAMS; i++) check(test, i);
    }
}

/* Graphs keep the workspaces of the streams that they were captured on, until there are no more. */
static void test_captures_keep_theirs(void **state)
{
    fixture *test = *state;
    fv_graph graphs[NUM_SHARED] = {0};
    void *memory = NULL;
    if (!test->has_gemm) skip();
    for (int32_t i = 0; i < FV_CUDA_NUM_WORKSPACES; i++) must(multiply(test, i));
    must(fv_device_alloc(&memory, test->device, 256));
    for (int32_t i = 0; i < NUM_SHARED; i++) {
        const int32_t at = FV_CUDA_NUM_WORKSPACES + i; /* has none yet */
        must(fv_graph_begin(test->device, test->streams[at]));
        must(fv_device_fill(test->device, memory, 1, 256, test->streams[at]));
        must(multiply(test, at));
        must(fv_graph_end(&graphs[i], test->device, test->streams[at]));
    }
    const int32_t next = FV_CUDA_NUM_WORKSPACES + NUM_SHARED;
    assert_int_equal(multiply(test, next), FV_ERR_NO_SPACE);
    assert_non_null(strstr(fv_last_error(), "fv_stream_destroy"));
    must(multiply(test, 0));
    must(multiply(test, next - 1)); /* its own */
    for (int32_t i = 0; i < NUM_SHARED; i++) {
        must(fv_graph_launch(test->device, graphs[i], test->streams[FV_CUDA_NUM_WORKSPACES + i]));
        check(test, FV_CUDA_NUM_WORKSPACES + i);
        fv_graph_destroy(test->device, graphs[i]);
    }
    fv_stream_destroy(test->device, test->streams[next - 1]);
    test->streams[next - 1] = NULL;
    must(multiply(test, next));
    check(test, next);
    fv_device_free(test->device, memory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_oldest_of_the_shared_ones_goes),
        cmocka_unit_test(test_what_a_capture_used_stays),
        cmocka_unit_test_setup_teardown(test_more_streams_than_workspaces, open_fixture, close_fixture),
        cmocka_unit_test_setup_teardown(test_captures_keep_theirs, open_fixture, close_fixture),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
