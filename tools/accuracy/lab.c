#include "accuracy/lab.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "accuracy/emulated.h"
#include "check/random.h"
#include "core/compiler.h"
#include "core/context.h"
#include "core/error.h"
#include "core/float.h"
#include "kernels/cpu_tables.h"
#include "planner/plan.h"

static const char *const variants[ACCURACY_NUM_METHODS] = {
    [ACCURACY_BASE] = "amla_multiply",
    [ACCURACY_AMLA] = "amla",
    [ACCURACY_UNCOMPENSATED] = "amla_uncompensated",
};

const char *accuracy_variant(accuracy_method method) { return variants[method]; }

/* --- the backend ------------------------------------------------------------------------------------------- */

static fv_status create_plan(fv_plan **plan, const accuracy_lab *lab, fv_device *device, const char *variant)
{
    const accuracy_setup *setup = &lab->setup;
    const fv_problem problem = {
        .struct_size = sizeof(problem),
        .kind = FV_ATTENTION_MLA,
        .mla = {.num_heads = setup->num_heads,
                .kv_lora_rank = ACCURACY_LATENT,
                .qk_rope_head_dim = ACCURACY_ROPE,
                .qk_nope_head_dim = 128,
                .v_head_dim = 128,
                .absorbed = 1},
        .q_dtype = FV_DTYPE_BF16,
        .kv_layout = FV_KV_LAYOUT_LATENT,
        .block_size = ACCURACY_BLOCK_SIZE,
        .scale = 1 / sqrtf(ACCURACY_HEAD_SIZE),
    };
    const fv_bounds bounds = {
        .struct_size = sizeof(bounds),
        .max_num_seqs = lab->samples.num_samples,
        .max_num_tokens = lab->samples.num_samples,
        .max_query_len = 1,
        .max_seq_len = setup->context,
    };
    const fv_plan_options options = {
        .struct_size = sizeof(options),
        .device = device,
        .backend = "AMLA",
        .path = FV_PATH_2D, /* all blocks of a row in one go, as in the paper */
        .variant = variant,
        .kernels = setup->kernels,
    };
    return fv_plan_create(plan, lab->context, &problem, &bounds, &options);
}

/* out = the result of a method's variant, of the plan or of the emulated kernels. */
static fv_status run_method(accuracy_lab *lab, accuracy_method method, int32_t num_samples)
{
    const accuracy_samples *samples = &lab->samples;
    if (!lab->emulated[method])
        return accuracy_device_run(lab->out, &lab->at, lab->plans[method], samples, num_samples);
    return accuracy_emulated_run(lab->out, lab->emulated[method], samples, num_samples, &lab->context->executor,
                                 lab->at.workspace);
}

/* --- the lab ------------------------------------------------------------------------------------------------- */

static int32_t num_groups(const accuracy_lab *lab)
{
    return (int32_t)fv_ceil_div(lab->setup.num_heads, ACCURACY_GROUP);
}

static fv_status alloc_arrays(accuracy_lab *lab)
{
    const size_t num_samples = (size_t)lab->samples.num_samples;
    const size_t num_workers = (size_t)fv_context_num_workers(lab->context);
    const size_t row_elements = num_samples * ACCURACY_LATENT;
    lab->out = calloc(row_elements * (size_t)lab->setup.num_heads, sizeof(uint16_t));
    lab->exact = calloc(row_elements * (size_t)num_groups(lab) * ACCURACY_GROUP, sizeof(double));
    lab->scratch = calloc(num_workers, accuracy_exact_scratch(lab->setup.context));
    lab->moves = calloc(num_workers, sizeof(*lab->moves));
    if (!lab->out || !lab->exact || !lab->scratch || !lab->moves)
        return fv_fail(FV_ERR_NO_MEMORY, "no memory for results of %zu samples", num_samples);
    return FV_OK;
}

static fv_status open_emulated(size_t *bytes, accuracy_lab *lab, accuracy_method method, const fv_device *device)
{
    const char *kernels = lab->setup.kernels;
    if (!device->host_is_device)
        return fv_fail(FV_ERR_INVALID, "kernels '%s' run on the CPU, and the device is '%s'; accepted: device cpu",
                       kernels, device->name);
    lab->emulated[method] = accuracy_emulated_variant(variants[method]);
    if (!lab->emulated[method])
        return fv_fail(FV_ERR_INTERNAL, "kernels %s have no variant %s", kernels, variants[method]);
    *bytes = accuracy_emulated_scratch(lab->emulated[method], &lab->samples, fv_context_num_workers(lab->context));
    lab->block_keys = lab->emulated[method]->tile_keys;
    return FV_OK;
}

/* A plan with the method's variant; the emulated kernels have none. */
static fv_status open_method(size_t *bytes, accuracy_lab *lab, accuracy_method method, fv_device *device)
{
    const char *kernels = lab->setup.kernels;
    if (kernels && strcmp(kernels, fv_cpu_emulated_amx.name) == 0) return open_emulated(bytes, lab, method, device);
    const fv_status status = create_plan(&lab->plans[method], lab, device, variants[method]);
    if (status != FV_OK) return status;
    *bytes = fv_plan_workspace_bytes(lab->plans[method]);
    lab->block_keys = lab->plans[method]->paged->tile_keys;
    return FV_OK;
}

/* The device, the methods on it, and what they share there. */
static fv_status open_device(accuracy_lab *lab)
{
    fv_device *device;
    size_t bytes = 0;
    const fv_status found = fv_device_find(&device, lab->context, lab->setup.device ? lab->setup.device : "cpu");
    if (found != FV_OK) return found;
    for (int32_t i = 0; i < ACCURACY_NUM_METHODS; i++) {
        size_t needed = 0;
        const fv_status status = open_method(&needed, lab, i, device);
        if (status != FV_OK) return status;
        if (needed > bytes) bytes = needed;
    }
    return accuracy_device_init(&lab->at, device, &lab->samples, bytes);
}

fv_status accuracy_lab_init(accuracy_lab *lab, fv_context *context, const accuracy_setup *setup)
{
    *lab = (accuracy_lab){.setup = *setup, .context = context};
    const int32_t num_samples = fv_min_i32(fv_context_num_workers(context), setup->num_samples);
    fv_status status = accuracy_samples_init(&lab->samples, num_samples, setup->num_heads, setup->context, setup->seed);
    if (status == FV_OK) status = alloc_arrays(lab);
    if (status == FV_OK) status = open_device(lab);
    if (status != FV_OK) accuracy_lab_deinit(lab);
    return status;
}

void accuracy_lab_deinit(accuracy_lab *lab)
{
    for (int32_t i = 0; i < ACCURACY_NUM_METHODS; i++) fv_plan_destroy(lab->plans[i]);
    accuracy_device_deinit(&lab->at);
    accuracy_samples_deinit(&lab->samples);
    void *arrays[] = {lab->out, lab->exact, lab->scratch, lab->moves};
    for (int32_t i = 0; i < FV_ARRAY_LEN(arrays); i++) free(arrays[i]);
    *lab = (accuracy_lab){0};
}

const char *accuracy_lab_kernels(const accuracy_lab *lab)
{
    if (lab->emulated[ACCURACY_AMLA]) return "none; the emulated AMX kernels, variant amla";
    return fv_plan_describe(lab->plans[ACCURACY_AMLA]);
}

/* --- a round of samples ---------------------------------------------------------------------------------------- */

typedef struct sample_round {
    accuracy_lab *lab;
    const accuracy_distribution *distribution;
    int32_t first; /* sample of the column */
    int32_t num_samples;
} sample_round;

/* A stream of random numbers for each sample of each distribution. */
static void fill_task(void *user, int64_t index, int32_t worker)
{
    (void)worker;
    const sample_round *round = user;
    const accuracy_distribution *distribution = round->distribution;
    const uint64_t column = (uint64_t)distribution->shape << 32 | fv_bits_of_f32(distribution->width) >> 1;
    check_random of_column = check_random_of(round->lab->setup.seed, column);
    const check_random of_sample = check_random_of(check_random_next(&of_column), (uint64_t)(round->first + index));
    accuracy_sample_fill(&round->lab->samples, (int32_t)index, distribution, of_sample.state);
}

static double *exact_of(const accuracy_lab *lab, int64_t sample, int64_t head)
{
    return lab->exact + (sample * num_groups(lab) * ACCURACY_GROUP + head) * ACCURACY_LATENT;
}

static void exact_task(void *user, int64_t index, int32_t worker)
{
    const sample_round *round = user;
    accuracy_lab *lab = round->lab;
    const int32_t sample = (int32_t)(index / num_groups(lab));
    const int32_t head = (int32_t)(index % num_groups(lab)) * ACCURACY_GROUP;
    char *scratch = lab->scratch + (size_t)worker * accuracy_exact_scratch(lab->setup.context);
    accuracy_exact(exact_of(lab, sample, head), &lab->moves[worker], &lab->samples, sample, head,
                   (double)(1 / sqrtf(ACCURACY_HEAD_SIZE)), lab->block_keys, scratch);
}

/* |out - exact| / |exact| over all heads of a sample. */
static double error_of(const accuracy_lab *lab, int32_t sample)
{
    double error2 = 0, exact2 = 0;
    for (int32_t head = 0; head < lab->setup.num_heads; head++) {
        const double *exact = exact_of(lab, sample, head);
        const uint16_t *out = lab->out + ((int64_t)sample * lab->setup.num_heads + head) * ACCURACY_LATENT;
        for (int32_t d = 0; d < ACCURACY_LATENT; d++) {
            const double error = (double)fv_f32_of_bf16(out[d]) - exact[d];
            error2 += error * error;
            exact2 += exact[d] * exact[d];
        }
    }
    return sqrt(error2 / exact2);
}

static fv_status run_round(accuracy_column *column, const sample_round *round)
{
    accuracy_lab *lab = round->lab;
    fv_context_parallel_for(lab->context, round->num_samples, fill_task, (void *)round);
    fv_context_parallel_for(lab->context, (int64_t)round->num_samples * num_groups(lab), exact_task, (void *)round);
    fv_status status = accuracy_device_send(&lab->at, &lab->samples);
    for (int32_t method = 0; method < ACCURACY_NUM_METHODS; method++) {
        if (status == FV_OK) status = run_method(lab, method, round->num_samples);
        if (status != FV_OK) return status;
        for (int32_t sample = 0; sample < round->num_samples; sample++)
            column->error[method] += error_of(lab, sample) / lab->setup.num_samples;
    }
    return FV_OK;
}

fv_status accuracy_measure(accuracy_column *column, accuracy_lab *lab, accuracy_progress_fn progress, void *user)
{
    const int32_t num_workers = fv_context_num_workers(lab->context);
    *column = (accuracy_column){.distribution = column->distribution};
    memset(lab->moves, 0, (size_t)num_workers * sizeof(*lab->moves));
    for (int32_t first = 0; first < lab->setup.num_samples; first += lab->samples.num_samples) {
        const sample_round round = {
            .lab = lab,
            .distribution = &column->distribution,
            .first = first,
            .num_samples = fv_min_i32(lab->samples.num_samples, lab->setup.num_samples - first),
        };
        const fv_status status = run_round(column, &round);
        if (status != FV_OK) return status;
        if (progress) progress(user, first + round.num_samples);
    }

    accuracy_moves moves = {0};
    for (int32_t i = 0; i < num_workers; i++) {
        moves.num_blocks += lab->moves[i].num_blocks;
        moves.num_max += lab->moves[i].num_max;
        moves.num_integer += lab->moves[i].num_integer;
    }
    if (moves.num_blocks == 0) return FV_OK;
    column->max_moved = (double)moves.num_max / (double)moves.num_blocks;
    column->integer_moved = (double)moves.num_integer / (double)moves.num_blocks;
    return FV_OK;
}
