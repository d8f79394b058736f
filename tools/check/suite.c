/* Small cases run side by side, each on a shuffled lane of its own; large ones one after the other on
 * all threads. */
#include "check/suite.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backends/backend.h"
#include "check/device_memory.h"
#include "check/mutants.h"
#include "check/operations.h"
#include "check/runs.h"
#include "core/cpu.h"
#include "core/error.h"
#include "core/executor.h"
#include "fovea/backend.h"
#include "kvcache/latent_entry.h"

/* Costs in (row, key, element) steps of check_case_cost(). */
#define REFERENCE_COST 5e6 /* up to here the reference is run too: it is slow, and it is the oracle */
#define LARGE_COST 3e7     /* from here a case has all threads, and one variant of each table runs */
#define HUGE_COST 1e9      /* from here only the backends run it, with the best kernels */
#define QUICK_COST 2e7
#define QUICK_EVERY 6           /* --quick takes each sixth case of the grids */
#define NUM_OPERATION_CASES 150 /* of each operation */

typedef struct check_suite {
    const check_options *options;
    check_report *report;
    check_case_list grids; /* selected cases only */
    int32_t first_random, num_random;
    check_lane threaded;
    check_lane *shuffled; /* one for each worker of `threaded` */
    int32_t num_shuffled;
} check_suite;

/* Is `id` the case `only`, or of its group? */
static int32_t selected(const char *only, const char *id)
{
    if (!only) return 1;
    const size_t length = strlen(only);
    return strncmp(only, id, length) == 0 && (id[length] == '\0' || id[length] == '.');
}

static void select_grids(check_suite *suite)
{
    check_case_list all = {0};
    check_vllm_cases(&all);
    check_own_cases(&all);
    check_mla_cases(&all);
    for (int32_t i = 0; i < all.num_cases; i++) {
        check_case *test = &all.cases[i];
        const int32_t in_sample = !suite->options->quick ||
                                  (i % QUICK_EVERY == 0 && check_case_cost(test) < QUICK_COST);
        if (!selected(suite->options->only, test->id) || (!suite->options->only && !in_sample)) {
            check_case_deinit(test);
        } else {
            all.cases[suite->grids.num_cases++] = *test; /* moves to the front, over what has been freed or moved */
        }
    }
    suite->grids.cases = all.cases;
    suite->grids.capacity = all.capacity;
}

static void select_random(check_suite *suite)
{
    const char *only = suite->options->only;
    suite->num_random = suite->options->num_random;
    if (!only || strcmp(only, "random") == 0) return;
    char *end = NULL;
    suite->num_random = 0;
    if (strncmp(only, "random.", 7) != 0) return;
    const long number = strtol(only + 7, &end, 10);
    if (*end != '\0' || end == only + 7 || number < 0 || number > INT32_MAX) return;
    suite->first_random = (int32_t)number;
    suite->num_random = 1;
}

static int32_t table_wanted(const check_suite *suite, const fv_kernel_table *table)
{
    return !suite->options->kernels || strcmp(table->name, suite->options->kernels) == 0;
}

/* Tables of attention kernels: those of the device, then emulated ones. */
static int32_t num_tables_of(const check_suite *suite, const check_lane *lane)
{
    return lane->device->num_tables + suite->options->num_emulated;
}

static const fv_kernel_table *table_at(const check_suite *suite, const check_lane *lane, int32_t index)
{
    const int32_t num_native = lane->device->num_tables;
    return index < num_native ? lane->device->tables[index] : suite->options->emulated[index - num_native];
}

static int32_t is_emulated(const check_suite *suite, const char *name)
{
    for (int32_t i = 0; i < suite->options->num_emulated; i++) {
        if (strcmp(suite->options->emulated[i]->name, name) == 0) return 1;
    }
    return 0;
}

static void run_table(const check_suite *suite, check_scene *scene, const check_expected *expected,
                      const check_lane *lane, const fv_kernel_table *table, const char *description)
{
    check_result result;
    if (table->kv_write && scene->k.data) {
        check_run_kv_write(&result, scene, lane, table);
        check_report_add(suite->report, &result, description);
    }
    if (table->kv_gather) {
        check_run_kv_gather(&result, scene, lane, table);
        check_report_add(suite->report, &result, description);
    }
    const int32_t is_mla = scene->test->problem.kind == FV_ATTENTION_MLA;
    const fv_attend_variant *variants = is_mla ? table->mla_decode : table->attend_paged;
    const int32_t num_variants = is_mla ? table->num_mla_decode : table->num_attend_paged;
    const int32_t large = check_case_cost(scene->test) >= LARGE_COST;
    for (int32_t i = 0; i < num_variants; i++) {
        if (variants[i].rescaling == FV_RESCALING_ADD_UNCOMPENSATED) continue; /* known to be off */
        if (large && (uint64_t)i != scene->test->seed % (uint64_t)num_variants) continue;
        check_run_variant(&result, scene, expected, lane, table, &variants[i]);
        check_report_add(suite->report, &result, description);
    }
}

/* A case as it runs through one backend: the device's best kernels, or those that were asked for; some also
 * with a table of a weaker level. */
static void run_backend(const check_suite *suite, check_scene *scene, const check_expected *expected,
                        const check_lane *lane, const char *backend, const char *description)
{
    const check_case *test = scene->test;
    const char *kernels = suite->options->kernels, *weaker = NULL;
    check_result result;
    if (kernels && is_emulated(suite, kernels)) return; /* which is in no plan */
    check_run_plan(&result, scene, expected, lane, backend, kernels);
    check_report_add(suite->report, &result, description);
    if (!kernels && lane->device->num_tables > 1 && test->seed % 4 == 0)
        weaker = lane->device->tables[test->seed / 4 % (uint64_t)(lane->device->num_tables - 1)]->name;
    if (!weaker || check_case_cost(test) > REFERENCE_COST) return;
    check_run_plan(&result, scene, expected, lane, backend, weaker);
    check_report_add(suite->report, &result, description);
}

/* Does the backend refuse the layout of the case, whatever else it says? */
static int32_t refuses_layout(const char *backend, const fv_problem *problem)
{
    char reasons[512];
    const fv_status status = fv_backend_why_not(reasons, sizeof(reasons), backend, NULL, problem);
    return status == FV_OK && strstr(reasons, "layout ") == reasons;
}

/* Backends of the other kind say no to the problem as such: that is not worth counting. */
static int32_t is_of_kind(const char *backend, const fv_problem *problem)
{
    const int32_t is_mla = fv_kv_layout_is_latent(fv_backend_find(backend, 0)->layout);
    return is_mla == (problem->kind == FV_ATTENTION_MLA);
}

/* One of the backends of the run takes a random case in its own layout, if it is not that of the case. */
static int32_t is_turn_of(const check_suite *suite, const check_case *test, int32_t backend)
{
    uint64_t count = 0, index = 0;
    for (int32_t i = 0; i < suite->options->num_backends; i++) {
        if (!is_of_kind(suite->options->backends[i], &test->problem)) continue;
        if (i < backend) index++;
        count++;
    }
    return test->seed % count == index;
}

/* The case with the same numbers in a cache as the backend wants it. */
static void run_in_own_layout(const check_suite *suite, const check_case *test, const check_lane *lane,
                              const char *name)
{
    check_case twin = *test;
    twin.problem.kv_layout = fv_backend_find(name, 0)->layout;
    char reasons[512];
    if (fv_backend_why_not(reasons, sizeof(reasons), name, NULL, &twin.problem) != FV_OK) return;
    if (reasons[0]) { /* not even in its own layout */
        check_result result;
        check_result_init(&result, test->id, "%s", name);
        check_result_skip(&result, "%s: %s", name, reasons);
        check_report_add(suite->report, &result, "");
        return;
    }
    char description[512];
    check_case_describe(description, sizeof(description), &twin);
    check_scene scene;
    check_expected expected;
    check_scene_init(&scene, &twin);
    check_expected_init(&expected, &scene, lane, INT32_MAX);
    run_backend(suite, &scene, &expected, lane, name, description);
    check_scene_deinit(&scene);
}

static void run_case(const check_suite *suite, const check_case *test, check_lane *lane)
{
    char description[512];
    check_case_describe(description, sizeof(description), test);
    lane->random = (check_random){test->seed};
    check_scene scene;
    check_expected expected;
    check_scene_init(&scene, test);
    check_expected_init(&expected, &scene, lane, INT32_MAX);
    for (int32_t i = 0; i < num_tables_of(suite, lane); i++) {
        const fv_kernel_table *table = table_at(suite, lane, i);
        const int32_t is_slow = strcmp(table->name, "reference") == 0 || i >= lane->device->num_tables;
        const int32_t too_slow = check_case_cost(test) > (is_slow ? REFERENCE_COST : HUGE_COST);
        if (table_wanted(suite, table) && !too_slow) run_table(suite, &scene, &expected, lane, table, description);
    }
    for (int32_t i = 0; i < suite->options->num_backends; i++) {
        const char *backend = suite->options->backends[i];
        if (!is_of_kind(backend, &test->problem)) continue;
        if (!refuses_layout(backend, &test->problem))
            run_backend(suite, &scene, &expected, lane, backend, description);
        else if (test->plain || is_turn_of(suite, test, i))
            run_in_own_layout(suite, test, lane, backend);
    }
    check_scene_deinit(&scene);
}

/* On a device what is not finite reaches more rows, weights next to one byte end sooner, and scores beyond fp32 are nobody's
 * promise (docs/numerics.md). */
static void keep_to_promises(check_case *test)
{
    test->spoilt_keys = test->odd_rows = test->odd_heads = 0;
    if (test->huge_scores) test->problem.scale = 1;
    test->huge_scores = 0;
}

/* Small cases: those of the grids first, then the random ones. */
static void small_task(void *user, int64_t index, int32_t worker)
{
    const check_suite *suite = user;
    check_lane *lane = &suite->shuffled[worker];
    if (index < suite->grids.num_cases) {
        check_case test = suite->grids.cases[index];
        if (!lane->device->host_is_device) keep_to_promises(&test);
        if (check_case_cost(&test) < LARGE_COST) run_case(suite, &test, lane);
        return;
    }
    check_case test;
    check_case_random(&test, (uint64_t)suite->options->seed,
                      suite->first_random + (int32_t)(index - suite->grids.num_cases));
    if (!lane->device->host_is_device) keep_to_promises(&test);
    run_case(suite, &test, lane);
    check_case_deinit(&test);
}

/* One random case of one operation, in every table. */
static void operation_task(void *user, int64_t index, int32_t worker)
{
    const check_suite *suite = user;
    const check_operation *operation = &check_operations[index % CHECK_NUM_OPERATIONS];
    if (!selected(suite->options->only, operation->name)) return;
    const check_lane *lane = &suite->shuffled[worker];
    check_result result;
    for (int32_t i = 0; i < lane->device->num_tables; i++) {
        const fv_kernel_table *table = lane->device->tables[i];
        if (!table_wanted(suite, table)) continue;
        if (!operation->is_in(table)) {
            if (index >= CHECK_NUM_OPERATIONS) continue; /* once is enough */
            check_result_init(&result, operation->name, "%s/%s", table->name, operation->name);
            check_result_skip(&result, "kernels %s have no %s", table->name, operation->name);
            check_report_add(suite->report, &result, "");
            continue;
        }
        operation->run(&result, lane, table, (uint64_t)suite->options->seed, (int32_t)index / CHECK_NUM_OPERATIONS);
        check_report_add(suite->report, &result, "");
    }
}

static int32_t operations_selected(const check_options *options)
{
    int32_t count = 0;
    for (int32_t i = 0; i < CHECK_NUM_OPERATIONS; i++) count += selected(options->only, check_operations[i].name);
    return count;
}

static fv_status open_lanes(check_suite *suite)
{
    fv_status status = check_lane_init_threaded(&suite->threaded, suite->options->device, suite->options->isa,
                                                suite->options->num_threads);
    if (status != FV_OK) return status;
    if (!suite->threaded.device->host_is_device) check_device_memory_use(suite->threaded.device);
    const int32_t num_workers = fv_context_num_workers(suite->threaded.context);
    suite->shuffled = calloc((size_t)num_workers, sizeof(check_lane));
    if (!suite->shuffled) return fv_fail(FV_ERR_NO_MEMORY, "no memory for %d lanes", num_workers);
    while (status == FV_OK && suite->num_shuffled < num_workers)
        status = check_lane_init_shuffled(&suite->shuffled[suite->num_shuffled++], suite->options->device,
                                          suite->options->isa);
    return status;
}

static void append_name(char *names, size_t names_bytes, const char *name)
{
    const size_t length = strlen(names);
    snprintf(names + length, names_bytes - length, "%s%s", length ? ", " : "", name);
}

static fv_status check_kernels_name(const check_suite *suite)
{
    char names[256] = "";
    for (int32_t i = 0; i < num_tables_of(suite, &suite->threaded); i++) {
        const fv_kernel_table *table = table_at(suite, &suite->threaded, i);
        if (table_wanted(suite, table)) return FV_OK;
        append_name(names, sizeof(names), table->name);
    }
    for (int32_t i = 0; i < CHECK_NUM_EMULATED && strcmp(suite->options->device, "cpu") == 0; i++) {
        const char *name = check_emulated_levels[i].table->name;
        if (!is_emulated(suite, name)) append_name(names, sizeof(names), name);
    }
    return fv_fail(FV_ERR_INVALID, "--kernels is '%s'; accepted: %s", suite->options->kernels, names);
}

static void close_suite(check_suite *suite)
{
    check_device_memory_use(NULL);
    for (int32_t i = 0; i < suite->num_shuffled; i++) check_lane_deinit(&suite->shuffled[i]);
    free(suite->shuffled);
    check_lane_deinit(&suite->threaded);
    check_case_list_deinit(&suite->grids);
}

/* Which instruction sets have kernels here, and which this machine cannot run. */
static void print_isas(const check_suite *suite)
{
    const fv_isa limit = fv_cpu_isa();
    printf("%s\n", fv_device_describe(suite->threaded.device));
    if (!suite->threaded.device->host_is_device) return;
    printf("instruction sets:");
    for (fv_isa isa = FV_ISA_PORTABLE; isa <= FV_ISA_AMX; isa++) {
        int32_t has_table = 0;
        char emulated[32];
        snprintf(emulated, sizeof(emulated), "%s-emulated", fv_isa_name(isa));
        for (int32_t i = 0; i < suite->threaded.device->num_tables; i++)
            has_table |= strcmp(suite->threaded.device->tables[i]->name, fv_isa_name(isa)) == 0;
        printf(" %s %s;", fv_isa_name(isa),
               is_emulated(suite, emulated) ? "emulated"
               : isa > limit                ? "not on this CPU"
               : has_table                  ? "native"
                                            : "not asked for, or without kernels");
    }
    printf(" %d threads\n", fv_context_num_workers(suite->threaded.context));
}

static fv_status nothing_selected(const check_options *options)
{
    return fv_fail(FV_ERR_INVALID, "--only is '%s'; no such case, fovea check --list names them", options->only);
}

/* Cases were selected, and the kernels that were asked for take none of them. */
static fv_status nothing_run(const check_options *options)
{
    return fv_fail(FV_ERR_INVALID,
                   "nothing was run: --kernels is '%s', of which --only '%s' has nothing to run; accepted: kernels of "
                   "this CPU or device, or of emulated ones small cases of attention",
                   options->kernels ? options->kernels : "all", options->only ? options->only : "all");
}

fv_status check_suite_run(check_report *report, const check_options *options)
{
    check_suite suite = {.options = options, .report = report};
    fv_status status = open_lanes(&suite);
    if (status == FV_OK) status = check_kernels_name(&suite);
    if (status != FV_OK) goto out;
    select_grids(&suite);
    select_random(&suite);
    const int32_t operations = operations_selected(options);
    const int32_t mutants = selected(options->only, "mutants") && suite.threaded.device->host_is_device;
    if (suite.grids.num_cases + suite.num_random == 0 && !operations && !mutants) {
        status = nothing_selected(options);
        goto out;
    }
    if (!options->json) print_isas(&suite);
    if (mutants) {
        check_mutants(report, &suite.threaded);
        check_operation_mutants(report, &suite.threaded);
    }
    if (operations) {
        fv_context_parallel_for(suite.threaded.context, NUM_OPERATION_CASES * CHECK_NUM_OPERATIONS, operation_task,
                                &suite);
    }
    fv_context_parallel_for(suite.threaded.context, suite.grids.num_cases + suite.num_random, small_task, &suite);
    for (int32_t i = 0; i < suite.grids.num_cases; i++)
        if (check_case_cost(&suite.grids.cases[i]) >= LARGE_COST)
            run_case(&suite, &suite.grids.cases[i], &suite.threaded);
    if (report->passed + report->failed + report->skipped == 0) status = nothing_run(options);

out:
    close_suite(&suite);
    return status;
}

/* A line, or an object of the list that is open in `json`; NULL: lines are asked for. `text` is "" for a group. */
static void list_name(fv_json *json, const char *name, const char *text)
{
    if (json) {
        fv_json_begin_row(json);
        fv_json_string(json, "name", name);
        fv_json_string(json, "text", text);
        fv_json_end_object(json);
    } else if (text[0]) {
        printf("%-24s %s\n", name, text);
    } else {
        printf("%s\n", name);
    }
}

static void list_case(fv_json *json, const check_case *test)
{
    char description[512];
    check_case_describe(description, sizeof(description), test);
    list_name(json, test->id, description);
}

/* The groups that have no cases of their own: names[0 .. result). */
static int32_t select_groups(const char *names[CHECK_NUM_OPERATIONS + 1], const check_options *options)
{
    int32_t count = 0;
    for (int32_t i = -1; i < CHECK_NUM_OPERATIONS; i++) {
        const char *name = i < 0 ? "mutants" : check_operations[i].name;
        if (selected(options->only, name)) names[count++] = name;
    }
    return count;
}

fv_status check_suite_list(const check_options *options)
{
    check_suite suite = {.options = options};
    select_grids(&suite);
    select_random(&suite);
    const char *groups[CHECK_NUM_OPERATIONS + 1];
    const int32_t num_groups = select_groups(groups, options);
    const int32_t num_listed = suite.grids.num_cases + suite.num_random + num_groups;
    fv_json writer, *json = options->json && num_listed > 0 ? &writer : NULL;
    if (json) {
        fv_json_init(json, stdout);
        fv_json_begin_array(json, NULL);
    }
    for (int32_t i = 0; i < suite.grids.num_cases; i++) list_case(json, &suite.grids.cases[i]);
    for (int32_t i = 0; i < suite.num_random; i++) {
        check_case test;
        check_case_random(&test, (uint64_t)options->seed, suite.first_random + i);
        list_case(json, &test);
        check_case_deinit(&test);
    }
    for (int32_t i = 0; i < num_groups; i++) list_name(json, groups[i], "");
    if (json) fv_json_end_array(json);
    close_suite(&suite);
    return num_listed > 0 ? FV_OK : nothing_selected(options);
}
