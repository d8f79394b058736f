#include "bench/device_ceilings.h"

#include <stdlib.h>

#include "bench/bench_memory.h"
#include "bench/random_data.h"
#include "bench/samples.h"
#include "core/compiler.h"
#include "core/error.h"
#include "fovea/gemm.h"

#define NUM_SAMPLES 15
#define NUM_TRIALS 5 /* of a way to read */

fv_status fv_capture(fv_graph *graph, fv_device_clock *clock, fv_send_fn send, void *user)
{
    fv_status status = fv_graph_begin(clock->device, clock->stream);
    if (status != FV_OK) return status;
    const fv_status sent = send(user, clock->stream);
    status = fv_graph_end(graph, clock->device, clock->stream); /* also after a failure: the stream goes on */
    return sent == FV_OK ? status : sent;
}

/* The median of `send` repeated; once before that to warm up. */
static fv_status time_repeated(double *us, fv_device_clock *clock, fv_send_fn send, void *user)
{
    double times[NUM_SAMPLES];
    fv_status status = send(user, clock->stream);
    if (status == FV_OK) status = fv_stream_synchronize(clock->device, clock->stream);
    if (status == FV_OK) status = fv_device_clock_begin(clock);
    if (status != FV_OK) return status;
    for (int32_t i = 0; i < NUM_SAMPLES && status == FV_OK; i++) {
        status = fv_device_clock_start(clock);
        if (status == FV_OK) status = send(user, clock->stream);
        if (status == FV_OK) status = fv_device_clock_stop(clock);
    }
    const fv_status ended = fv_device_clock_end(clock, times);
    *us = fv_samples_of(times, NUM_SAMPLES).median_us;
    return status == FV_OK ? ended : status;
}

/* --- the pages ------------------------------------------------------------------------------------------------- */

/* In pieces of at most FV_PROBE_RANGE_BYTES, widened to multiples of 16 bytes. */
static int64_t cut_ranges(fv_probe_range *pieces, const fv_read_range *ranges, int64_t num_ranges)
{
    int64_t count = 0;
    for (int64_t i = 0; i < num_ranges; i++) {
        const int64_t first = ranges[i].offset / 16 * 16;
        const int64_t end = fv_round_up(ranges[i].offset + ranges[i].bytes, 16);
        for (int64_t at = first; at < end; at += FV_PROBE_RANGE_BYTES, count++) {
            if (pieces) pieces[count] = (fv_probe_range){at, fv_min_i64(FV_PROBE_RANGE_BYTES, end - at)};
        }
    }
    return count;
}

static fv_status send_ranges(fv_device_read *read, const fv_read_range *ranges, int64_t num_ranges)
{
    read->num_ranges = cut_ranges(NULL, ranges, num_ranges);
    const size_t bytes = (size_t)fv_max_i64(1, read->num_ranges) * sizeof(fv_probe_range);
    fv_probe_range *pieces = malloc(bytes);
    if (!pieces) return fv_fail(FV_ERR_NO_MEMORY, "no memory for a list of %lld pages", (long long)read->num_ranges);
    cut_ranges(pieces, ranges, num_ranges);
    fv_status status = fv_bench_send(&read->ranges, read->device, pieces, bytes);
    if (status == FV_OK) status = fv_bench_alloc(&read->sink, read->device, sizeof(uint64_t));
    free(pieces);
    return status;
}

static fv_probe_read probe_of(const fv_device_read *read, const void *memory, int32_t way)
{
    return (fv_probe_read){memory, read->ranges, read->num_ranges, read->sink, way};
}

typedef struct read_job {
    fv_device *device;
    fv_probe_read read;
} read_job;

static fv_status send_read(void *user, fv_stream stream)
{
    const read_job *job = user;
    return job->device->probes->read(job->device, &job->read, stream);
}

/* All ways in turn, on one memory after the other. */
static fv_status try_ways(double times[NUM_TRIALS * FV_PROBE_NUM_READS], fv_device_read *read, fv_device_clock *clock,
                          void *const *memories)
{
    const fv_device_probes *probes = read->device->probes;
    fv_status status = fv_device_clock_begin(clock);
    if (status != FV_OK) return status;
    for (int32_t i = 0; i < NUM_TRIALS * FV_PROBE_NUM_READS && status == FV_OK; i++) {
        const fv_probe_read probe = probe_of(read, memories[i % read->num_memories], i % FV_PROBE_NUM_READS);
        status = fv_device_clock_start(clock);
        if (status == FV_OK) status = probes->read(read->device, &probe, clock->stream);
        if (status == FV_OK) status = fv_device_clock_stop(clock);
    }
    const fv_status ended = fv_device_clock_end(clock, times);
    return status == FV_OK ? ended : status;
}

static fv_status choose_way(int32_t *best, fv_device_read *read, fv_device_clock *clock, void *const *memories)
{
    double times[NUM_TRIALS * FV_PROBE_NUM_READS], best_us = 0;
    fv_status status = try_ways(times, read, clock, memories); /* loads the kernels */
    if (status == FV_OK) status = try_ways(times, read, clock, memories);
    if (status != FV_OK) return status;
    for (int32_t way = 0; way < FV_PROBE_NUM_READS; way++) {
        double of_way[NUM_TRIALS];
        for (int32_t i = 0; i < NUM_TRIALS; i++) of_way[i] = times[i * FV_PROBE_NUM_READS + way];
        const double us = fv_samples_of(of_way, NUM_TRIALS).median_us;
        if (way > 0 && us >= best_us) continue;
        best_us = us;
        *best = way;
    }
    return FV_OK;
}

fv_status fv_device_read_init(fv_device_read *read, fv_device_clock *clock, void *const *memories, int32_t num_memories,
                              const fv_read_range *ranges, int64_t num_ranges)
{
    int32_t way = 0;
    *read = (fv_device_read){.device = clock->device, .num_memories = num_memories};
    read->graphs = calloc((size_t)num_memories, sizeof(*read->graphs));
    if (!read->graphs) return fv_fail(FV_ERR_NO_MEMORY, "no memory for %d graphs", num_memories);
    fv_status status = send_ranges(read, ranges, num_ranges);
    if (status == FV_OK) status = choose_way(&way, read, clock, memories);
    for (int32_t i = 0; i < num_memories && status == FV_OK; i++) {
        read_job job = {read->device, probe_of(read, memories[i], way)};
        status = fv_capture(&read->graphs[i], clock, send_read, &job);
    }
    return status;
}

void fv_device_read_deinit(fv_device_read *read)
{
    for (int32_t i = 0; i < read->num_memories && read->graphs; i++) fv_graph_destroy(read->device, read->graphs[i]);
    if (read->device) {
        fv_bench_free(read->device, read->ranges);
        fv_bench_free(read->device, read->sink);
    }
    free(read->graphs);
    *read = (fv_device_read){0};
}

/* --- the device as such ------------------------------------------------------------------------------------------ */

typedef struct send_job {
    fv_device *device;
    fv_graph graph;
    char *from, *to;
    fv_gemm gemm;
} send_job;

static fv_status send_empty(void *user, fv_stream stream)
{
    const send_job *job = user;
    return job->device->probes->empty(job->device, stream);
}

static fv_status send_graph(void *user, fv_stream stream)
{
    const send_job *job = user;
    return fv_graph_launch(job->device, job->graph, stream);
}

static fv_status send_copy(void *user, fv_stream stream)
{
    const send_job *job = user;
    return job->device->probes->copy(job->device, job->to, job->from, (size_t)job->device->probes->large_bytes, stream);
}

static fv_status send_gemm(void *user, fv_stream stream)
{
    const send_job *job = user;
    return fv_device_gemm(job->device, &job->gemm, stream);
}

static fv_status measure_empty(double *us, fv_device_clock *clock)
{
    send_job job = {.device = clock->device};
    fv_status status = send_empty(&job, clock->stream);
    if (status == FV_OK) status = fv_capture(&job.graph, clock, send_empty, &job);
    if (status == FV_OK) status = time_repeated(us, clock, send_graph, &job);
    fv_graph_destroy(clock->device, job.graph);
    return status;
}

static fv_status measure_read(double *bytes_per_us, fv_device_clock *clock, void *memory)
{
    fv_device_read read;
    const fv_read_range all = {0, clock->device->probes->large_bytes};
    double us = 0;
    fv_status status = fv_device_read_init(&read, clock, &memory, 1, &all, 1);
    send_job job = {.device = clock->device, .graph = read.graphs ? read.graphs[0] : NULL};
    if (status == FV_OK) status = time_repeated(&us, clock, send_graph, &job);
    fv_device_read_deinit(&read);
    *bytes_per_us = us > 0 ? (double)all.bytes / us : 0;
    return status;
}

/* c = a b^T with a, b and c in `memory`. A device without this product: 0. */
static fv_status measure_gemm(double *flops_per_us, fv_device_clock *clock, fv_dtype dtype, char *memory)
{
    const int32_t size = clock->device->probes->gemm_size;
    const int64_t row_bytes = size * (int64_t)fv_dtype_bytes(dtype), matrix_bytes = size * row_bytes;
    fv_random_pool pool = {0};
    fv_status status = fv_random_pool_init(&pool, dtype);
    if (status == FV_OK) status = fv_random_pool_send(&pool, clock->device);
    if (status == FV_OK) status = fv_random_fill(&pool, memory, 2 * (size_t)matrix_bytes);
    fv_random_pool_deinit(&pool);
    if (status != FV_OK) return status;
    send_job job = {
        .device = clock->device,
        .gemm = {.struct_size = sizeof(fv_gemm),
                 .num_matrices = 1,
                 .m = size,
                 .n = size,
                 .k = size,
                 .b_is_transposed = 1,
                 .a_dtype = dtype,
                 .b_dtype = dtype,
                 .c_dtype = FV_DTYPE_BF16,
                 .a = memory,
                 .a_row_stride = row_bytes,
                 .b = memory + matrix_bytes,
                 .b_row_stride = row_bytes,
                 .c = memory + 2 * matrix_bytes,
                 .c_row_stride = 2 * (int64_t)size},
    };
    double us = 0;
    status = time_repeated(&us, clock, send_gemm, &job);
    *flops_per_us = status == FV_OK ? 2.0 * size * size * size / us : 0;
    return status == FV_ERR_UNSUPPORTED ? FV_OK : status;
}

static fv_status measure_memory(fv_device_ceilings *ceilings, fv_device_clock *clock, char *memory)
{
    const int64_t bytes = clock->device->probes->large_bytes;
    send_job job = {.device = clock->device, .from = memory, .to = memory + bytes};
    double copy_us = 0;
    fv_random_pool pool = {0};
    fv_status status = fv_random_pool_init(&pool, FV_DTYPE_BF16);
    if (status == FV_OK) status = fv_random_pool_send(&pool, clock->device);
    if (status == FV_OK) status = fv_random_fill(&pool, memory, (size_t)bytes);
    fv_random_pool_deinit(&pool);
    if (status == FV_OK) status = time_repeated(&copy_us, clock, send_copy, &job);
    if (status == FV_OK) ceilings->copy_bytes_per_us = 2.0 * (double)bytes / copy_us;
    return status == FV_OK ? measure_read(&ceilings->read_bytes_per_us, clock, memory) : status;
}

fv_status fv_device_ceilings_measure(fv_device_ceilings *ceilings, fv_device_clock *clock)
{
    void *memory = NULL;
    *ceilings = (fv_device_ceilings){0};
    const fv_device_probes *probes = clock->device->probes;
    const int64_t matrices_bytes = 3 * (int64_t)probes->gemm_size * probes->gemm_size * 2;
    const int64_t bytes = fv_max_i64(2 * probes->large_bytes, matrices_bytes);
    fv_status status = fv_bench_alloc(&memory, clock->device, (size_t)bytes);
    if (status == FV_OK) status = measure_empty(&ceilings->empty_us, clock);
    if (status == FV_OK) status = measure_memory(ceilings, clock, memory);
    if (status == FV_OK) status = measure_gemm(&ceilings->bf16_flops_per_us, clock, FV_DTYPE_BF16, memory);
    if (status == FV_OK) status = measure_gemm(&ceilings->fp8_flops_per_us, clock, FV_DTYPE_F8_E4M3, memory);
    fv_bench_free(clock->device, memory);
    return status;
}
