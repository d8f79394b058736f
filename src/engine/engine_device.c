/* The device of an engine: what is tried before a model is loaded, and how fast its memory is. */
#include "core/device.h"
#include "engine/clock.h"
#include "engine/engine.h"
#include "ops/layer_table.h"

static const char *name_of_model(const fv_engine_options *options, const char *path)
{
    return options->random_weights ? options->random_weights : path;
}

/* Finds out before anything is loaded whether the device multiplies at all: cuBLASLt may not be there. */
static fv_status try_gemm(fv_device *device)
{
    enum { size = 16 };
    void *matrices = NULL;
    const size_t matrix_bytes = size * size * sizeof(uint16_t);
    fv_status status = fv_device_alloc(&matrices, device, 3 * matrix_bytes);
    if (status != FV_OK) return status;
    const fv_gemm gemm = {
        .struct_size = sizeof(gemm),
        .num_matrices = 1,
        .m = size,
        .n = size,
        .k = size,
        .b_is_transposed = 1,
        .a_dtype = FV_DTYPE_BF16,
        .b_dtype = FV_DTYPE_BF16,
        .c_dtype = FV_DTYPE_BF16,
        .a = matrices,
        .a_row_stride = size * sizeof(uint16_t),
        .b = (char *)matrices + matrix_bytes,
        .b_row_stride = size * sizeof(uint16_t),
        .c = (char *)matrices + 2 * matrix_bytes,
        .c_row_stride = size * sizeof(uint16_t),
    };
    status = fv_device_fill(device, matrices, 0, 3 * matrix_bytes, NULL);
    if (status == FV_OK) status = fv_device_gemm(device, &gemm, NULL);
    if (status == FV_OK) status = fv_stream_synchronize(device, NULL);
    fv_device_free(device, matrices);
    return status;
}

static fv_status check_layers(const fv_engine *engine, const fv_model_config *config, const char *model)
{
    const fv_layer_limits *limits = &engine->device->layers->limits;
    const char *device = fv_device_name(engine->device);
    const int32_t size = config->hidden_size, expert = config->experts.num_experts > 0 ? config->experts.ffn_size : 0;
    if (limits->max_row > 0 && (size > limits->max_row || size % limits->row_step != 0)) {
        return fv_fail(FV_ERR_UNSUPPORTED, "%s has a hidden size of %d; accepted on %s: multiples of %d up to %d",
                       model, size, device, limits->row_step, limits->max_row);
    }
    if (limits->max_expert > 0 && expert > limits->max_expert) {
        return fv_fail(FV_ERR_UNSUPPORTED, "%s has experts of %d; accepted on %s: up to %d", model, expert, device,
                       limits->max_expert);
    }
    return FV_OK;
}

static fv_status check_room(const fv_engine *engine, const fv_model_config *config, const char *model)
{
    size_t free_bytes, total_bytes;
    const fv_gguf_tensor *head;
    if (fv_device_memory(&free_bytes, &total_bytes, engine->device) != FV_OK) return FV_OK;
    const bool has_head = !engine->gguf || fv_gguf_find_tensor(&head, engine->gguf, "output.weight") != FV_ERR_IO;
    const uint64_t bytes = fv_model_config_bf16_bytes(config, has_head);
    if (bytes <= free_bytes) return FV_OK;
    return fv_fail(FV_ERR_NO_MEMORY, "%s wants %llu bytes of %s for its weights in bfloat16; %zu of %zu bytes are free",
                   model, (unsigned long long)bytes, fv_device_name(engine->device), free_bytes, total_bytes);
}

static fv_status check_model(const fv_engine *engine, const fv_engine_options *options, const char *path)
{
    const char *model = name_of_model(options, path);
    fv_model_config config;
    fv_status status = engine->gguf ? fv_model_config_read(&config, engine->gguf)
                                    : fv_model_config_of_shape(&config, options->random_weights);
    if (status == FV_OK) status = check_layers(engine, &config, model);
    return status == FV_OK ? check_room(engine, &config, model) : status;
}

fv_status fv_engine_open_device(fv_engine *engine, const fv_engine_options *options, const char *path)
{
    fv_status status = fv_device_find(&engine->device, engine->context, options->device ? options->device : "cpu");
    if (status != FV_OK) return status;
    fv_device *device = engine->device;
    if (device->host_is_device) return fv_gemm_create(&engine->gemm, engine->context, options->compute_dtype);
    if (!device->layers || !device->ops->gemm) {
        return fv_fail(FV_ERR_UNSUPPORTED, "device %s has no kernels for an engine's layers", fv_device_name(device));
    }
    if (options->compute_dtype != FV_DTYPE_NONE && options->compute_dtype != FV_DTYPE_BF16) {
        return fv_fail(FV_ERR_UNSUPPORTED, "compute_dtype is %d (%s) on %s; accepted: 0 (the default), bfloat16",
                       (int)options->compute_dtype, fv_dtype_name(options->compute_dtype), fv_device_name(device));
    }
    status = try_gemm(device);
    if (status == FV_OK) status = check_model(engine, options, path);
    return status == FV_OK ? fv_gemm_create_on(&engine->gemm, engine->context, device) : status;
}

/* Memory to read, as much as there is up to 1 GiB: far more than a cache holds. */
static fv_status alloc_to_read(void **memory, size_t *bytes, fv_device *device)
{
    fv_status status = FV_ERR_NO_MEMORY;
    for (*bytes = (size_t)1 << 30; *bytes >= (size_t)1 << 20 && status == FV_ERR_NO_MEMORY; *bytes /= 2) {
        status = fv_device_alloc(memory, device, *bytes);
        if (status == FV_OK) return fv_device_fill(device, *memory, 1, *bytes, NULL);
    }
    return status;
}

fv_status fv_engine_measure_read(double *bytes_per_second, fv_engine *engine)
{
    enum { num_rounds = 5, reads_of_round = 8 };
    fv_device *device = engine->device;
    const fv_launch launch = {device, NULL, NULL};
    if (device->host_is_device) {
        return fv_fail(FV_ERR_UNSUPPORTED, "the speed of memory is measured on GPUs; this engine is on %s",
                       fv_device_name(device));
    }
    void *memory = NULL, *sum = NULL;
    size_t bytes = 0;
    double best = 0.0;
    fv_status status = alloc_to_read(&memory, &bytes, device);
    if (status == FV_OK) status = fv_device_alloc(&sum, device, sizeof(uint32_t));
    if (status == FV_OK) status = fv_device_fill(device, sum, 0, sizeof(uint32_t), NULL);
    if (status == FV_OK) status = fv_stream_synchronize(device, NULL);
    const fv_read_memory_params params = {.data = memory, .bytes = (int64_t)bytes, .sum = sum};
    for (int32_t round = 0; round < num_rounds && status == FV_OK; round++) {
        const double start = fv_clock_seconds();
        for (int32_t i = 0; i < reads_of_round && status == FV_OK; i++) {
            status = device->layers->read_memory(&launch, &params);
        }
        if (status == FV_OK) status = fv_stream_synchronize(device, NULL);
        const double seconds = fv_clock_seconds() - start;
        const double speed = seconds > 0.0 ? reads_of_round * (double)bytes / seconds : 0.0;
        if (speed > best) best = speed;
    }
    fv_device_free(device, memory);
    fv_device_free(device, sum);
    *bytes_per_second = best;
    return status;
}
