/* What goes wrong on a GPU gives a status with a text, leaks nothing, and leaves the context usable: a device out of
 * memory, batches above the stated maxima, caches that are gone, contexts in several threads, a process that sees no
 * GPU. Skipped where there is no GPU, but for the last.
 *
 * A cache that was freed is refused where the view says so (no data). Where it does not, a GPU reads memory that is
 * no longer mapped, or is another's: the first is FV_ERR_DEVICE when the stream is waited for, and the process' GPU is
 * lost for good; the second nobody can see. So that case has a process of its own. */
#include <pthread.h>
#include <setjmp.h>
#include <spawn.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "fovea/fovea.h"

enum {
    HEADS = 8,
    KV_HEADS = 2,
    SIZE = 64,
    SEQS = 3,
    BLOCK_SIZE = 16,
    WIDTH = 8,
    NUM_BLOCKS = 1 + SEQS * WIDTH,
    OUT_BYTES = SEQS * HEADS * SIZE * 2,
    NUM_THREADS = 3,
};

/* A decode of three sequences, all on the device. */
typedef struct decode {
    fv_context *context;
    fv_device *device;
    fv_plan *plan;
    fv_stream stream;
    char *memory; /* everything below lies in it */
    size_t bytes;
    fv_batch batch;
    fv_layer layer;
    void *workspace;
} decode;

typedef struct decode_arrays {
    int64_t slots[SEQS];
    int32_t query_start[SEQS + 1], seq_lens[SEQS], block_table[SEQS * WIDTH];
    uint16_t q[SEQS * HEADS * SIZE], k[SEQS * KV_HEADS * SIZE], v[SEQS * KV_HEADS * SIZE];
    uint16_t cache[NUM_BLOCKS * 2 * BLOCK_SIZE * KV_HEADS * SIZE];
    uint16_t out[SEQS * HEADS * SIZE];
} decode_arrays;

static fv_status open_plan(decode *d, int32_t max_num_seqs)
{
    const fv_problem problem = {
        .struct_size = sizeof(problem),
        .kind = FV_ATTENTION_MHA,
        .mha = {HEADS, KV_HEADS, SIZE, 0},
        .q_dtype = FV_DTYPE_BF16,
        .block_size = BLOCK_SIZE,
        .kv_layout = FV_KV_LAYOUT_NB_2_BS_H_D,
    };
    const fv_bounds bounds = {sizeof(bounds), max_num_seqs, max_num_seqs, 1, WIDTH * BLOCK_SIZE};
    const fv_plan_options options = {.struct_size = sizeof(options), .device = d->device, .backend = "TRITON_ATTN"};
    return fv_plan_create(&d->plan, d->context, &problem, &bounds, &options);
}

static void fill_arrays(decode_arrays *host)
{
    memset(host, 0, sizeof(*host));
    uint16_t *const numbers[] = {host->q, host->k, host->v, host->cache};
    const size_t counts[] = {SEQS * HEADS * SIZE, SEQS * KV_HEADS * SIZE, SEQS * KV_HEADS * SIZE,
                             sizeof(host->cache) / sizeof(uint16_t)};
    for (size_t part = 0; part < 4; part++)
        for (size_t i = 0; i < counts[part]; i++) numbers[part][i] = (uint16_t)(0x3e00 + (i * 37 + part) % 256);
    for (int32_t i = 0; i < SEQS * WIDTH; i++) host->block_table[i] = 1 + i;
    for (int32_t seq = 0; seq < SEQS; seq++) {
        host->query_start[seq + 1] = seq + 1;
        host->seq_lens[seq] = 17 + 40 * seq;
        host->slots[seq] = (int64_t)host->block_table[seq * WIDTH + (host->seq_lens[seq] - 1) / BLOCK_SIZE] *
                               BLOCK_SIZE +
                           (host->seq_lens[seq] - 1) % BLOCK_SIZE;
    }
}

static fv_status open_decode(decode *d)
{
    *d = (decode){0};
    fv_status status = fv_context_create(&d->context, NULL);
    if (status == FV_OK) status = fv_device_find(&d->device, d->context, "cuda");
    if (status == FV_OK) status = open_plan(d, SEQS);
    if (status == FV_OK) status = fv_stream_create(&d->stream, d->device);
    if (status != FV_OK) return status;
    const size_t workspace_at = (sizeof(decode_arrays) + 255) / 256 * 256;
    d->bytes = workspace_at + fv_plan_workspace_bytes(d->plan);
    status = fv_device_alloc((void **)&d->memory, d->device, d->bytes);
    decode_arrays *host = malloc(sizeof(*host));
    if (status != FV_OK || !host) {
        free(host);
        return status != FV_OK ? status : FV_ERR_NO_MEMORY;
    }
    fill_arrays(host);
    status = fv_device_copy_in(d->device, d->memory, host, sizeof(*host), d->stream);
    if (status == FV_OK) status = fv_stream_synchronize(d->device, d->stream);
    free(host);
    decode_arrays *at = (decode_arrays *)(void *)d->memory;
    d->workspace = d->memory + workspace_at;
    d->batch = (fv_batch){
        .struct_size = sizeof(fv_batch),
        .num_seqs = SEQS,
        .num_tokens = SEQS,
        .query_start = at->query_start,
        .seq_lens = at->seq_lens,
        .block_table = at->block_table,
        .block_table_stride = WIDTH,
        .block_table_width = WIDTH,
        .slot_mapping = at->slots,
    };
    d->layer = (fv_layer){
        .struct_size = sizeof(fv_layer),
        .q = fv_tensor_3d(at->q, FV_DTYPE_BF16, SEQS, HEADS, SIZE),
        .k = fv_tensor_3d(at->k, FV_DTYPE_BF16, SEQS, KV_HEADS, SIZE),
        .v = fv_tensor_3d(at->v, FV_DTYPE_BF16, SEQS, KV_HEADS, SIZE),
        .out = fv_tensor_3d(at->out, FV_DTYPE_BF16, SEQS, HEADS, SIZE),
    };
    if (status != FV_OK) return status;
    return fv_kv_view_init(&d->layer.kv_cache, at->cache, FV_KV_LAYOUT_NB_2_BS_H_D, FV_DTYPE_BF16, NUM_BLOCKS,
                           BLOCK_SIZE, KV_HEADS, SIZE);
}

static void close_decode(decode *d)
{
    fv_plan_destroy(d->plan);
    if (d->device) {
        fv_device_free(d->device, d->memory);
        if (d->stream) fv_stream_destroy(d->device, d->stream);
    }
    fv_context_destroy(d->context);
}

static fv_status run_decode(uint16_t *out, decode *d)
{
    fv_status status = fv_plan_update(d->plan, &d->batch, d->stream);
    if (status == FV_OK) status = fv_plan_run(d->plan, &d->layer, d->workspace, d->stream);
    if (status == FV_OK) status = fv_device_copy_out(d->device, out, d->layer.out.data, OUT_BYTES, d->stream);
    return status == FV_OK ? fv_stream_synchronize(d->device, d->stream) : status;
}

static void must(fv_status status)
{
    if (status != FV_OK) fail_msg("%s: %s", fv_status_name(status), fv_last_error());
}

static void refused(fv_status found, fv_status expected, const char *says)
{
    assert_int_equal(found, expected);
    if (!strstr(fv_last_error(), says)) fail_msg("'%s' lacks '%s'", fv_last_error(), says);
}

/* The fixture: a decode that works, before the test and after it, with the same bits, and with as much device memory
 * free after the test as before. */
typedef struct fixture {
    decode decode;
    uint16_t expected[OUT_BYTES / 2];
    size_t free_bytes;
} fixture;

/* A context from its beginning to its end, with all that there is in it. */
static void live_once(const uint16_t *expected)
{
    decode d;
    uint16_t out[OUT_BYTES / 2];
    fv_graph graph = NULL;
    must(open_decode(&d));
    must(run_decode(out, &d));
    must(fv_graph_begin(d.device, d.stream));
    must(fv_plan_run(d.plan, &d.layer, d.workspace, d.stream));
    must(fv_graph_end(&graph, d.device, d.stream));
    must(fv_graph_launch(d.device, graph, d.stream));
    must(fv_stream_synchronize(d.device, d.stream));
    fv_graph_destroy(d.device, graph);
    close_decode(&d);
    assert_memory_equal(out, expected, sizeof(out));
}

static fixture *open_fixture(void)
{
    static fixture test;
    size_t total;
    const fv_status status = open_decode(&test.decode);
    if (status != FV_OK) {
        const int32_t has_device = test.decode.device != NULL;
        close_decode(&test.decode);
        if (has_device) must(status);
        skip();
    }
    must(run_decode(test.expected, &test.decode));
    live_once(test.expected); /* the driver keeps what it loads for the first of a kind */
    must(fv_device_memory(&test.free_bytes, &total, test.decode.device));
    return &test;
}

static void close_fixture(fixture *test)
{
    uint16_t out[OUT_BYTES / 2];
    size_t free_bytes, total;
    must(run_decode(out, &test->decode));
    assert_memory_equal(out, test->expected, sizeof(out));
    must(fv_device_memory(&free_bytes, &total, test->decode.device));
    if (free_bytes < test->free_bytes) fail_msg("%zu bytes were free, now %zu are", test->free_bytes, free_bytes);
    close_decode(&test->decode);
}

/* Takes device memory in ever smaller pieces until less than a MiB is left; returns their number. */
static int32_t take_all(void **pieces, int32_t max_pieces, fv_device *device)
{
    int32_t num_pieces = 0;
    for (size_t bytes = (size_t)1 << 40; bytes >= 1 << 20; bytes /= 2) {
        while (num_pieces < max_pieces) {
            const fv_status status = fv_device_alloc(&pieces[num_pieces], device, bytes);
            if (status != FV_OK) {
                refused(status, FV_ERR_NO_MEMORY, "memory");
                break;
            }
            num_pieces++;
        }
    }
    return num_pieces;
}

static void test_out_of_memory(void **state)
{
    (void)state;
    fixture *test = open_fixture();
    fv_device *device = test->decode.device;
    void *pieces[256];
    const int32_t num_pieces = take_all(pieces, 256, device);
    decode second = {.context = test->decode.context, .device = device};
    refused(open_plan(&second, 1 << 18), FV_ERR_NO_MEMORY, "no device memory for");
    uint16_t out[OUT_BYTES / 2];
    must(run_decode(out, &test->decode)); /* those that have what they need go on */
    assert_memory_equal(out, test->expected, sizeof(out));
    for (int32_t i = 0; i < num_pieces; i++) fv_device_free(device, pieces[i]);
    must(open_plan(&second, 1 << 18));
    fv_plan_destroy(second.plan);
    close_fixture(test);
}

static void test_batches_above_the_maxima(void **state)
{
    (void)state;
    fixture *test = open_fixture();
    decode *d = &test->decode;
    fv_batch batch = d->batch;
    batch.num_seqs = SEQS + 1;
    refused(fv_plan_update(d->plan, &batch, d->stream), FV_NEEDS_PLAN, "num_seqs is 4; the plan was made for up to 3");
    refused(fv_plan_run(d->plan, &d->layer, d->workspace, d->stream), FV_ERR_INVALID, "before a successful");
    batch = d->batch;
    batch.num_tokens = SEQS + 5;
    refused(fv_plan_update(d->plan, &batch, d->stream), FV_NEEDS_PLAN, "num_tokens is 8");
    batch = d->batch;
    batch.max_seq_len = WIDTH * BLOCK_SIZE + 1;
    refused(fv_plan_update(d->plan, &batch, d->stream), FV_NEEDS_PLAN, "max_seq_len is 129");
    const int32_t query_start[] = {0, 1, 2, 3}, long_lens[] = {17, 57, 1000};
    batch = d->batch;
    batch.host_query_start = query_start;
    batch.host_seq_lens = long_lens;
    refused(fv_plan_update(d->plan, &batch, d->stream), FV_NEEDS_PLAN, "a sequence length is 1000");
    close_fixture(test);
}

static void test_a_cache_without_data(void **state)
{
    (void)state;
    fixture *test = open_fixture();
    decode *d = &test->decode;
    fv_layer layer = d->layer;
    layer.kv_cache.k.data = NULL;
    must(fv_plan_update(d->plan, &d->batch, d->stream));
    refused(fv_plan_run(d->plan, &layer, d->workspace, d->stream), FV_ERR_INVALID, "the KV cache has no data");
    close_fixture(test);
}

/* Contexts, plans, streams, events and graphs that come and go leave nothing: seen by close_fixture. */
static void test_nothing_leaks(void **state)
{
    (void)state;
    fixture *test = open_fixture();
    for (int32_t i = 0; i < 20; i++) live_once(test->expected);
    close_fixture(test);
}

/* NULL, or what went wrong. */
static void *decode_in_thread(void *user)
{
    const uint16_t *expected = user;
    static _Thread_local char text[512];
    decode d;
    uint16_t out[OUT_BYTES / 2];
    fv_status status = open_decode(&d);
    int32_t same = 1;
    for (int32_t i = 0; i < 100 && status == FV_OK && same; i++) {
        status = run_decode(out, &d);
        same = memcmp(out, expected, sizeof(out)) == 0;
    }
    if (status != FV_OK || !same) snprintf(text, sizeof(text), "%s", same ? fv_last_error() : "other bits");
    close_decode(&d);
    return status == FV_OK && same ? NULL : strdup(text);
}

static void test_contexts_in_other_threads(void **state)
{
    (void)state;
    fixture *test = open_fixture();
    pthread_t threads[NUM_THREADS];
    for (int32_t i = 0; i < NUM_THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, decode_in_thread, test->expected), 0);
    for (int32_t i = 0; i < NUM_THREADS; i++) {
        char *fault = NULL;
        pthread_join(threads[i], (void **)&fault);
        if (fault) fail_msg("%s", fault);
    }
    close_fixture(test);
}

/* --- in a process of its own ------------------------------------------------------------------------------------ */

/* The decode over memory that was freed: 0, or what is wrong with the answer. */
static int run_over_freed_memory(void)
{
    decode d;
    uint16_t out[OUT_BYTES / 2];
    if (open_decode(&d) != FV_OK) return 2;
    void *gone = NULL;
    if (fv_device_alloc(&gone, d.device, (size_t)256 << 20) != FV_OK) return 3;
    fv_device_free(d.device, gone); /* so large that it is unmapped */
    d.layer.kv_cache.k.data = d.layer.kv_cache.v.data = gone;
    const fv_status status = run_decode(out, &d);
    fprintf(stderr, "freed cache: %s: %s\n", fv_status_name(status), status == FV_OK ? "" : fv_last_error());
    const int code = status == FV_ERR_DEVICE && strstr(fv_last_error(), "illegal memory access") ? 0 : 4;
    close_decode(&d); /* must come back, though the GPU does not */
    return code;
}

static int find_no_gpu(void)
{
    fv_context *context = NULL;
    fv_device *device = NULL;
    if (fv_context_create(&context, NULL) != FV_OK) return 2;
    const fv_status status = fv_device_find(&device, context, "cuda");
    fprintf(stderr, "no GPU: %s: %s\n", fv_status_name(status), fv_last_error());
    int code = status == FV_ERR_UNSUPPORTED && strstr(fv_last_error(), "cuda") ? 0 : 3;
    if (fv_device_find(&device, context, "cpu") != FV_OK) code = 4;
    fv_context_destroy(context);
    return code;
}

/* This program again, as `what`; returns its exit code. */
static int run_again(const char *what, const char *environment)
{
    extern char **environ;
    char *const arguments[] = {(char *)(uintptr_t) "test_cuda_faults", (char *)(uintptr_t)what, NULL};
    char *variables[512] = {(char *)(uintptr_t)environment};
    int32_t count = environment ? 1 : 0;
    for (char **at = environ; *at && count < 511; at++)
        if (!environment || strncmp(*at, environment, strcspn(environment, "=") + 1) != 0) variables[count++] = *at;
    variables[count] = NULL;
    pid_t child;
    int result = -1;
    assert_int_equal(posix_spawn(&child, "/proc/self/exe", NULL, NULL, arguments, variables), 0);
    assert_int_equal(waitpid(child, &result, 0), child);
    return WIFEXITED(result) ? WEXITSTATUS(result) : -1;
}

static void test_a_freed_cache(void **state)
{
    (void)state;
    fixture *test = open_fixture();
    assert_int_equal(run_again("freed-cache", NULL), 0);
    close_fixture(test); /* another process' fault is not ours */
}

static void test_a_process_without_a_gpu(void **state)
{
    (void)state;
    assert_int_equal(run_again("no-gpu", "CUDA_VISIBLE_DEVICES="), 0);
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "freed-cache") == 0) return run_over_freed_memory();
    if (argc > 1 && strcmp(argv[1], "no-gpu") == 0) return find_no_gpu();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_out_of_memory),
        cmocka_unit_test(test_batches_above_the_maxima),
        cmocka_unit_test(test_a_cache_without_data),
        cmocka_unit_test(test_nothing_leaks),
        cmocka_unit_test(test_contexts_in_other_threads),
        cmocka_unit_test(test_a_freed_cache),
        cmocka_unit_test(test_a_process_without_a_gpu),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
