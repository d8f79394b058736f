/* Mutants: the reference with one fault each. A fault is a wrong parameter wherever one can express it,
 * so that the mutant is a kernel that runs, not an edited result. */
#include "check/mutants.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "check/expected.h"
#include "check/schedule.h"
#include "core/executor.h"
#include "reference/reference.h"

typedef struct mutant {
    const char *name;
    void (*enable)(check_case *test);                           /* what the batch must use; NULL: nothing */
    void (*spoil)(check_plan *plan, check_scene *scene);        /* before the run; NULL */
    void (*spoil_output)(check_plan *plan, check_scene *scene); /* after the run; NULL */
} mutant;

static void enable_window(check_case *test) { test->problem.window = 9; }
static void enable_soft_cap(check_case *test) { test->problem.soft_cap = 2; }
static void enable_sinks(check_case *test) { test->problem.sinks = 1; }
static void enable_alibi(check_case *test) { test->problem.alibi = FV_ALIBI_LINEAR; }
static void enable_alibi_sqrt(check_case *test) { test->problem.alibi = FV_ALIBI_SQRT; }
static void enable_tree(check_case *test) { test->problem.tree_mask = 1; }

static void enable_not_causal(check_case *test) { test->problem.not_causal = 1; }

static void enable_nan(check_case *test) { test->nan_queries = 1; }

static void enable_fp8(check_case *test)
{
    test->problem.kv_dtype = FV_DTYPE_F8_E4M3;
    test->problem.kv_scaling = FV_KV_SCALING_PER_HEAD;
}

static void zero_row(const fv_attend_params *attend, int32_t token, int32_t head)
{
    memset((char *)attend->out + token * attend->out_token_stride + head * attend->out_head_stride, 0,
           (size_t)attend->v_head_size * fv_dtype_bytes(attend->out_dtype));
}

static void zero_output(check_plan *plan, check_scene *scene)
{
    for (int32_t token = 0; token < scene->num_tokens; token++)
        for (int32_t head = 0; head < plan->attend.num_heads; head++) zero_row(&plan->attend, token, head);
}

/* All bits set is NaN in every float format. */
static void nan_output(check_plan *plan, check_scene *scene)
{
    const int64_t last = scene->num_tokens - 1;
    memset((char *)plan->attend.out + last * plan->attend.out_token_stride, 0xff,
           fv_dtype_bytes(plan->attend.out_dtype));
}

static void write_past_row(check_plan *plan, check_scene *scene)
{
    char *end = scene->out_memory + scene->out_bytes;
    *end = 0;
    (void)plan;
}

/* Items of one token each, whose keys end `more` after the token's own position. */
static void end_keys_at(check_plan *plan, check_scene *scene, int32_t more)
{
    fv_attend_params *attend = &plan->attend;
    fv_work_item *items = check_arena_alloc(&scene->arena, (size_t)scene->num_tokens * sizeof(fv_work_item));
    int32_t num_items = 0;
    for (int32_t seq = 0; seq < attend->num_seqs; seq++) {
        const int32_t query_len = attend->query_start[seq + 1] - attend->query_start[seq];
        for (int32_t token = 0; token < query_len; token++) {
            const int32_t end = attend->seq_lens[seq] - query_len + token + 1 + more;
            items[num_items++] = (fv_work_item){
                .seq = seq,
                .table_row = seq,
                .first_token = token,
                .num_tokens = 1,
                .num_kv_heads = attend->num_kv_heads,
                .end_key = fv_min_i32(end, attend->seq_lens[seq]),
                .partial = -1,
                .query_start = attend->query_start[seq],
                .query_end = attend->query_start[seq + 1],
                .seq_len = attend->seq_lens[seq],
            };
        }
    }
    attend->items = items;
    attend->num_items = num_items;
    plan->reduces = 0;
}

static void drop_last_key(check_plan *plan, check_scene *scene) { end_keys_at(plan, scene, -1); }

/* key <= position becomes key <= position + 1. */
static void look_ahead(check_plan *plan, check_scene *scene)
{
    uint8_t *none = check_arena_alloc(&scene->arena, (size_t)plan->attend.num_seqs);
    plan->attend.causal = none;
    end_keys_at(plan, scene, 1);
}

static void forget_causal_flags(check_plan *plan, check_scene *scene)
{
    (void)scene;
    plan->attend.causal = NULL;
}

static void drop_first_key(check_plan *plan, check_scene *scene)
{
    end_keys_at(plan, scene, 0);
    fv_work_item *items = (fv_work_item *)plan->attend.items;
    for (int32_t i = 0; i < plan->attend.num_items; i++) items[i].first_key = 1;
}

static void widen_window(check_plan *plan, check_scene *scene)
{
    (void)scene;
    plan->attend.window++;
}

static void narrow_window(check_plan *plan, check_scene *scene)
{
    (void)scene;
    plan->attend.window--;
}

/* e^(sink + ln 2) is the sink twice. */
static void double_sinks(check_plan *plan, check_scene *scene)
{
    float *sinks = check_arena_alloc(&scene->arena, (size_t)plan->attend.num_heads * sizeof(float));
    for (int32_t head = 0; head < plan->attend.num_heads; head++) sinks[head] = plan->attend.sinks[head] + logf(2);
    plan->attend.sinks = sinks;
    plan->reduce.sinks = sinks;
}

static void ignore_sinks(check_plan *plan, check_scene *scene)
{
    (void)scene;
    plan->attend.sinks = plan->reduce.sinks = NULL;
}

static void ignore_scale(check_plan *plan, check_scene *scene)
{
    (void)scene;
    plan->attend.scale = 1;
}

static void ignore_soft_cap(check_plan *plan, check_scene *scene)
{
    (void)scene;
    plan->attend.soft_cap = 0;
}

static void ignore_alibi(check_plan *plan, check_scene *scene)
{
    (void)scene;
    plan->attend.alibi = FV_ALIBI_NONE;
}

static void ignore_tree(check_plan *plan, check_scene *scene)
{
    (void)scene;
    plan->attend.tree_mask = NULL;
}

static void use_first_kv_head(check_plan *plan, check_scene *scene)
{
    (void)scene;
    plan->attend.cache.k.head_stride = plan->attend.cache.v.head_stride = 0;
}

static void swap_blocks(check_plan *plan, check_scene *scene)
{
    const size_t entries = (size_t)plan->attend.num_seqs * (size_t)scene->block_table_stride;
    int32_t *table = check_arena_alloc(&scene->arena, entries * sizeof(int32_t));
    memcpy(table, scene->block_table, entries * sizeof(int32_t));
    table[0] = scene->block_table[1];
    table[1] = scene->block_table[0];
    plan->attend.block_table = table;
}

static void ignore_k_scale(check_plan *plan, check_scene *scene)
{
    (void)scene;
    plan->attend.k_scale = NULL;
}

static void ignore_v_scale(check_plan *plan, check_scene *scene)
{
    (void)scene;
    plan->attend.v_scale = NULL;
}

static void take_first_scale(check_plan *plan, check_scene *scene)
{
    (void)scene;
    plan->attend.num_kv_scales = 1;
}

static void read_as_e5m2(check_plan *plan, check_scene *scene)
{
    (void)scene;
    plan->attend.cache.dtype = FV_DTYPE_F8_E5M2;
}

static void forget_lse(check_plan *plan, check_scene *scene)
{
    (void)scene;
    plan->attend.lse = plan->reduce.lse = NULL;
}

/* LSE in base 2, as some kernels have it. */
static void lse_in_base_2(check_plan *plan, check_scene *scene)
{
    for (int32_t token = 0; token < scene->num_tokens; token++)
        for (int32_t head = 0; head < plan->attend.num_heads; head++)
            *(float *)(void *)((char *)plan->attend.lse + token * plan->attend.lse_token_stride +
                               head * plan->attend.lse_head_stride) *= 1.4426950f;
}

/* A row whose query holds a NaN, as if it had no keys: what a maximum that passes NaN by makes of it. */
static void lose_nan(check_plan *plan, check_scene *scene)
{
    for (int32_t token = 0; token < scene->num_tokens; token++)
        for (int32_t head = 0; head < plan->attend.num_heads; head++)
            if (check_scene_query_is_nan(scene, token, head)) zero_row(&plan->attend, token, head);
}

/* Only its LSE. */
static void lose_nan_lse(check_plan *plan, check_scene *scene)
{
    for (int32_t token = 0; token < scene->num_tokens; token++)
        for (int32_t head = 0; head < plan->attend.num_heads; head++)
            if (check_scene_query_is_nan(scene, token, head))
                *(float *)(void *)((char *)plan->attend.lse + token * plan->attend.lse_token_stride +
                                   head * plan->attend.lse_head_stride) = -INFINITY;
}

/* The reduction misses the last segment of each Q block. */
static void drop_segment(check_plan *plan, check_scene *scene)
{
    (void)scene;
    fv_reduce_item *items = (fv_reduce_item *)plan->reduce.items;
    for (int32_t i = 0; i < plan->reduce.num_items; i++) items[i].num_segments--;
}

static const mutant mutants[] = {
    {"zero output", NULL, NULL, zero_output},
    {"a NaN in the output", NULL, NULL, nan_output},
    {"a byte past the output", NULL, NULL, write_past_row},
    {"last key dropped", NULL, drop_last_key, NULL},
    {"first key dropped", NULL, drop_first_key, NULL},
    {"causal mask off by one", NULL, look_ahead, NULL},
    {"causal flags ignored", enable_not_causal, forget_causal_flags, NULL},
    {"window too wide by one", enable_window, widen_window, NULL},
    {"window too narrow by one", enable_window, narrow_window, NULL},
    {"sink counted twice", enable_sinks, double_sinks, NULL},
    {"sink ignored", enable_sinks, ignore_sinks, NULL},
    {"scale ignored", NULL, ignore_scale, NULL},
    {"soft cap ignored", enable_soft_cap, ignore_soft_cap, NULL},
    {"ALiBi ignored", enable_alibi, ignore_alibi, NULL},
    {"square-root ALiBi ignored", enable_alibi_sqrt, ignore_alibi, NULL},
    {"tree mask ignored", enable_tree, ignore_tree, NULL},
    {"wrong KV head", NULL, use_first_kv_head, NULL},
    {"two blocks swapped", enable_alibi, swap_blocks, NULL},
    {"k_scale ignored", enable_fp8, ignore_k_scale, NULL},
    {"v_scale ignored", enable_fp8, ignore_v_scale, NULL},
    {"scale of head 0 for all", enable_fp8, take_first_scale, NULL},
    {"e4m3 read as e5m2", enable_fp8, read_as_e5m2, NULL},
    {"lse not set", NULL, forget_lse, NULL},
    {"lse in base 2", NULL, NULL, lse_in_base_2},
    {"segment dropped", NULL, drop_segment, NULL},
    {"NaN of a query lost", enable_nan, NULL, lose_nan},
    {"NaN of a query not in its lse", enable_nan, NULL, lose_nan_lse},
};

/* One mutant, in one dtype. */
typedef struct mutant_run {
    const mutant *mutant;
    fv_dtype dtype;
    int32_t caught;
    int32_t sound_passes; /* the same batch without the fault */
    char text[400];       /* why it did not */
} mutant_run;

static const fv_dtype mutant_dtypes[] = {FV_DTYPE_F32, FV_DTYPE_F16, FV_DTYPE_BF16};
#define NUM_DTYPES 3

/* Decode, extend and prefill, some with hundreds of keys: a key is one of many. */
static const check_lens mutant_lens[] = {{1, 333, 0}, {5, 64, 1}, {17, 17, 0}, {3, 700, 0}};

static int32_t passes(char *text, size_t text_bytes, check_scene *scene, const check_expected *expected,
                      const mutant *fault)
{
    check_plan plan;
    check_scene_reset(scene, 1);
    check_plan_init(&plan, scene, 16, 16);
    if (fault && fault->spoil) fault->spoil(&plan, scene);
    fv_reference_attend_variants[0].launch(NULL, &plan.attend);
    if (plan.reduces) fv_reference_reduce_segments(NULL, &plan.reduce);
    if (fault && fault->spoil_output) fault->spoil_output(&plan, scene);
    double worst;
    return check_expected_compare(&worst, text, text_bytes, expected, scene) && check_arena_fences_whole(&scene->arena);
}

/* A task: one mutant in one dtype. */
static void run_mutant(void *user, int64_t index, int32_t worker)
{
    mutant_run *run = (mutant_run *)user + index;
    check_lens lens[FV_ARRAY_LEN(mutant_lens)];
    memcpy(lens, mutant_lens, sizeof(lens));
    check_case test = {
        .id = "mutants",
        .seed = 20 + (uint64_t)index,
        .problem = {.struct_size = sizeof(fv_problem),
                    .kind = FV_ATTENTION_MHA,
                    .mha = {6, 2, 64, 0},
                    .q_dtype = run->dtype,
                    .kv_layout = FV_KV_LAYOUT_NB_2_BS_H_D,
                    .block_size = 16,
                    .returns_lse = 1},
        .lens = lens,
        .num_seqs = FV_ARRAY_LEN(lens),
        .schedule = CHECK_SCHEDULE_SEGMENTS,
    };
    (void)worker;
    if (run->mutant->enable) run->mutant->enable(&test);
    if (fv_problem_normalize(&test.problem, &test.problem) != FV_OK) return;

    const fv_executor here = {.num_workers = 1};
    fv_device cpu = {.host_is_device = 1}; /* the reference's, which mutants are of */
    const check_lane lane = {.device = &cpu, .executor = &here};
    check_scene scene;
    check_expected expected;
    check_scene_init(&scene, &test);
    check_expected_init(&expected, &scene, &lane, INT32_MAX);
    char text[400];
    run->sound_passes = passes(run->text, sizeof(run->text), &scene, &expected, NULL);
    run->caught = !passes(text, sizeof(text), &scene, &expected, run->mutant);
    check_scene_deinit(&scene);
}

/* One result for a mutant in all dtypes. */
static void judge(check_report *report, const mutant_run *runs)
{
    check_result result;
    check_result_init(&result, "mutants", "mutants");
    for (int32_t i = 0; i < NUM_DTYPES; i++) {
        if (!runs[i].sound_passes)
            check_result_fail(&result, "the reference itself does not pass for '%s' in %s: %s", runs[i].mutant->name,
                              fv_dtype_name(runs[i].dtype), runs[i].text);
        else if (!runs[i].caught)
            check_result_fail(&result, "'%s' in %s is not caught", runs[i].mutant->name, fv_dtype_name(runs[i].dtype));
    }
    report->mutants++;
    report->mutants_caught += result.verdict == CHECK_PASSED;
    check_report_add(report, &result, "");
}

void check_mutants(check_report *report, const check_lane *lane)
{
    mutant_run runs[FV_ARRAY_LEN(mutants) * NUM_DTYPES];
    for (int32_t i = 0; i < FV_ARRAY_LEN(runs); i++)
        runs[i] = (mutant_run){.mutant = &mutants[i / NUM_DTYPES], .dtype = mutant_dtypes[i % NUM_DTYPES]};
    fv_executor_run(lane->executor, FV_ARRAY_LEN(runs), run_mutant, runs);
    for (int32_t i = 0; i < FV_ARRAY_LEN(mutants); i++) judge(report, runs + i * NUM_DTYPES);
}
