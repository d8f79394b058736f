/* Where a case runs. */
#include "check/lane.h"

#include "core/context.h"

#define SHUFFLED_WORKERS 3

static int64_t greatest_divisor(int64_t a, int64_t b)
{
    while (b != 0) {
        const int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

static void shuffled_for(void *user, int64_t num_tasks, fv_task_fn task, void *task_user)
{
    check_lane *lane = user;
    const int32_t limit = (int32_t)fv_min_i64(num_tasks, 1 << 20);
    const int64_t start = check_random_int(&lane->random, 0, limit - 1);
    int64_t step = check_random_int(&lane->random, 1, limit);
    while (greatest_divisor(step, num_tasks) != 1) step++;
    for (int64_t i = 0; i < num_tasks; i++)
        task(task_user, (start + i * step) % num_tasks, check_random_int(&lane->random, 0, SHUFFLED_WORKERS - 1));
}

static fv_status open_context(check_lane *lane, const char *device, const fv_context_options *options)
{
    fv_status status = fv_context_create(&lane->context, options);
    if (status != FV_OK) return status;
    status = fv_device_find(&lane->device, lane->context, device);
    if (status != FV_OK) check_lane_deinit(lane);
    return status;
}

fv_status check_lane_init_shuffled(check_lane *lane, const char *device, const char *isa)
{
    *lane = (check_lane){.random = {1}};
    lane->shuffled = (fv_executor){shuffled_for, SHUFFLED_WORKERS, lane};
    lane->executor = &lane->shuffled;
    return open_context(
        lane, device,
        &(fv_context_options){.struct_size = sizeof(fv_context_options), .executor = lane->shuffled, .isa = isa});
}

fv_status check_lane_init_threaded(check_lane *lane, const char *device, const char *isa, int32_t num_threads)
{
    *lane = (check_lane){.random = {1}};
    const fv_status status = open_context(
        lane, device,
        &(fv_context_options){.struct_size = sizeof(fv_context_options), .num_threads = num_threads, .isa = isa});
    if (status == FV_OK) lane->executor = &lane->context->executor;
    return status;
}

void check_lane_deinit(check_lane *lane)
{
    fv_context_destroy(lane->context);
    lane->context = NULL;
}

fv_launch check_lane_launch(const check_lane *lane)
{
    return (fv_launch){.device = lane->device, .executor = lane->executor};
}

fv_status check_lane_ran(const check_lane *lane, fv_status status)
{
    return status == FV_OK ? fv_stream_synchronize(lane->device, NULL) : status;
}

fv_reduce_segments_fn check_lane_reduce_segments(const check_lane *lane, const fv_kernel_table *table)
{
    fv_reduce_segments_fn found = NULL;
    for (int32_t i = 0; i < lane->device->num_tables; i++) {
        if (lane->device->tables[i]->reduce_segments) found = lane->device->tables[i]->reduce_segments;
        if (lane->device->tables[i] == table) break;
    }
    return found;
}
