/* fovea backends: which backends serve a problem, in which order `auto` asks them, why the others do not,
 * and what the plan of each would do with a batch. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "backends/backend.h"
#include "bench/workload.h"
#include "commands.h"
#include "core/error.h"
#include "fovea/backend.h"
#include "json.h"
#include "planner/plan.h"
#include "problem_args.h"

#define REASONS_BYTES 4096
#define MAX_REASONS 32
#define MAX_BACKENDS 64
#define MAX_GROUPS 8 /* that are printed */
#define LINE_WIDTH 116

typedef struct options {
    fv_problem_args args;
    const char *device;
    const char *batch; /* NULL: no plan is made */
    int32_t why, json, help;
} options;

static void print_help(void)
{
    printf("usage: fovea backends [--why] [SPEC] [OPTION...]\n\n"
           "Without options: what \"auto\" takes for each kind of layer, and what backends there are.\n"
           "With --why, or options of a problem: all backends in the order in which \"auto\" asks them, the one\n"
           "chosen, those that can, and all reasons of those that cannot. The problem is 32/8 heads of 128 in\n"
           "bfloat16 where nothing else is said. With a batch SPEC, as fovea bench takes it (32q1s4k is 32 decodes\n"
           "over 4096 keys): what the plan of each does with it, kernel calls, chunks and cascade.\n\n" FV_PROBLEM_HELP
               FV_PLAN_HELP "  --batch SPEC           the same as SPEC\n"
           "  --device NAME          cpu, cuda, cuda:1 (cpu)\n"
           "  --json                 print JSON\n");
}

static fv_status read_options(options *opts, int argc, char **argv)
{
    enum { DEVICE = FV_OPTION_COMMAND, BATCH, WHY, JSON, HELP };
    static const struct option long_options[] = {
        FV_PROBLEM_OPTIONS,
        {"batch", required_argument, NULL, BATCH},
        {"device", required_argument, NULL, DEVICE},
        {"why", no_argument, NULL, WHY},
        {"json", no_argument, NULL, JSON},
        {"help", no_argument, NULL, HELP},
        {NULL, 0, NULL, 0},
    };
    *opts = (options){.device = "cpu"};
    fv_problem_args_init(&opts->args);
    opterr = 0;
    int value;
    while ((value = getopt_long(argc, argv, ":h", long_options, NULL)) != -1) {
        fv_status status = FV_OK;
        switch (value) {
        case ':':
        case '?': status = fv_args_refuse(value, argc, argv); break;
        case BATCH: opts->batch = optarg; break;
        case DEVICE: opts->device = optarg; break;
        case WHY: opts->why = 1; break;
        case JSON: opts->json = 1; break;
        case 'h':
        case HELP: opts->help = 1; break;
        default: status = fv_problem_args_set(&opts->args, value, optarg); break;
        }
        if (status != FV_OK) return status;
    }
    if (optind < argc && !opts->batch) opts->batch = argv[optind++];
    if (optind < argc) return fv_args_refuse_operand(argv[optind], argv[0]);
    if (opts->args.shared_prefix && !opts->batch) {
        return fv_fail(FV_ERR_INVALID, "--shared-prefix without a batch; accepted: with SPEC, e.g. 8q1s4k");
    }
    return fv_problem_args_finish(&opts->args);
}

/* --- the answers ------------------------------------------------------------------------------------------ */

/* What one backend says to the problem. */
typedef struct answer {
    const char *name;
    const char *summary;
    int32_t rank; /* place in the order of auto, from 1; 0: auto does not ask it */
    int32_t is_chosen;
    const char *layout;
    char text[REASONS_BYTES]; /* the reasons, cut into strings */
    const char *reasons[MAX_REASONS];
    int32_t num_reasons; /* 0: it can */
    char plan[1024];     /* fv_plan_describe after the batch, or why no plan is made; "": not asked */
    size_t workspace_bytes, buffer_bytes;
} answer;

typedef struct table {
    const options *opts;
    fv_device *device;
    fv_layer_kind kind;
    answer answers[MAX_BACKENDS];
    int32_t num_answers;
} table;

/* Cuts "a; b (c; d)" in place at each "; " outside brackets. */
static void cut_reasons(answer *a)
{
    if (!a->text[0]) return;
    a->reasons[a->num_reasons++] = a->text;
    int32_t depth = 0;
    for (char *at = a->text; *at; at++) {
        depth += (*at == '(') - (*at == ')');
        if (depth > 0 || at[0] != ';' || at[1] != ' ' || a->num_reasons == MAX_REASONS) continue;
        *at = '\0';
        a->reasons[a->num_reasons++] = at + 2;
    }
}

static const char *layout_name(const fv_problem *problem, const fv_backend *backend)
{
    if (problem->type == FV_ATTENTION_ENCODER) return "none";
    return fv_kv_layout_name(problem->kv_layout_any ? backend->layout : problem->kv_layout);
}

static fv_status ask(table *t, const char *name, int32_t rank)
{
    const fv_problem *problem = &t->opts->args.problem;
    for (int32_t i = 0; i < t->num_answers; i++) {
        if (strcmp(t->answers[i].name, name) == 0) return FV_OK;
    }
    if (t->num_answers == MAX_BACKENDS) return FV_OK;
    answer *a = &t->answers[t->num_answers++];
    const fv_backend *backend = fv_backend_find(name);
    *a = (answer){.name = name, .summary = backend->summary, .rank = rank, .layout = layout_name(problem, backend)};
    const fv_status status = fv_backend_why_not(a->text, sizeof(a->text), name, t->device, problem);
    if (status == FV_OK) cut_reasons(a);
    return status;
}

/* All backends: first those that auto asks, in its order. */
static fv_status ask_all(table *t)
{
    const fv_problem *problem = &t->opts->args.problem;
    t->kind = fv_problem_layer_kind(problem);
    fv_status status = FV_OK;
    const char *name;
    for (int32_t i = 0; status == FV_OK && (name = fv_backend_preferred_name(i, t->device, problem)); i++) {
        status = ask(t, name, i + 1);
    }
    for (int32_t i = 0; i < fv_backend_count() && status == FV_OK; i++) status = ask(t, fv_backend_name(i), 0);
    for (int32_t i = 0; i < t->num_answers; i++) {
        answer *a = &t->answers[i];
        if (a->rank == 0 || a->num_reasons > 0) continue;
        a->is_chosen = 1;
        break;
    }
    return status;
}

static const char *chosen_name(const table *t)
{
    for (int32_t i = 0; i < t->num_answers; i++) {
        if (t->answers[i].is_chosen) return t->answers[i].name;
    }
    return NULL;
}

static const char *verdict(const answer *a)
{
    if (a->num_reasons > 0) return "cannot";
    return a->is_chosen ? "chosen" : "can";
}

/* --- plans -------------------------------------------------------------------------------------------------- */

static void describe_plan(answer *a, const table *t, const fv_workload *w, fv_context *context)
{
    fv_plan_options plan_options = t->opts->args.plan;
    plan_options.device = t->device;
    plan_options.backend = a->name;
    fv_plan *plan = NULL;
    fv_status status = fv_plan_create(&plan, context, &w->problem, &w->bounds, &plan_options);
    if (status == FV_OK) status = fv_plan_update(plan, &w->batch, NULL);
    if (status != FV_OK) {
        snprintf(a->plan, sizeof(a->plan), "no plan: %s", fv_last_error());
    } else {
        snprintf(a->plan, sizeof(a->plan), "%s", fv_plan_describe(plan));
        a->workspace_bytes = fv_plan_workspace_bytes(plan);
        a->buffer_bytes = fv_plan_buffer_bytes(plan);
    }
    fv_plan_destroy(plan);
}

/* A shared prefix and what the planner's rule says to it. */
typedef struct prefix_row {
    int32_t first_seq, num_seqs, num_keys;
    int64_t gain;    /* in units of fv_work_cost */
    double of_batch; /* gain / cost of the batch without cascade */
} prefix_row;

static fv_status find_prefixes(prefix_row *rows, int32_t *num_rows, const fv_workload *w)
{
    static const int32_t always = 1; /* the longest there are, so that those not worth it are seen too */
    const fv_step step = {w->spec.num_seqs, w->query_start, w->spec.seq_lens, w->causal};
    const fv_block_rows blocks = {w->block_table, w->batch.block_table_stride, w->batch.block_table_width};
    fv_query_run *runs = calloc((size_t)step.num_seqs, sizeof(*runs));
    fv_prefix_group *groups = calloc((size_t)step.num_seqs / 2 + 1, sizeof(*groups));
    *num_rows = 0;
    if (!runs || !groups) {
        free(runs);
        free(groups);
        return fv_fail(FV_ERR_NO_MEMORY, "no memory for %d sequences", step.num_seqs);
    }
    int64_t cost = 0;
    for (int32_t seq = 0; seq < step.num_seqs; seq++) {
        runs[seq] = (fv_query_run){seq, 0, fv_step_query_len(&step, seq), 0, step.seq_lens[seq]};
        cost += fv_work_cost(&w->problem, step.seq_lens[seq], runs[seq].num_tokens);
    }
    const int32_t found = fv_prefix_groups_find(groups, &w->problem, &step, runs, step.num_seqs, &blocks, always);
    for (int32_t i = 0; i < found && *num_rows < MAX_GROUPS; i++) {
        const fv_prefix_group *group = &groups[i];
        const int32_t first = group->first_run, end = first + group->num_runs;
        const int64_t gain = fv_work_cascade_gain(&w->problem, group->num_keys, group->num_runs,
                                                  w->query_start[end] - w->query_start[first]);
        rows[(*num_rows)++] = (prefix_row){first, group->num_runs, group->num_keys, gain, (double)gain / (double)cost};
    }
    free(runs);
    free(groups);
    return FV_OK;
}

/* --- printing ------------------------------------------------------------------------------------------------ */

/* Words, broken at LINE_WIDTH, each line after `indent` spaces. */
static void print_wrapped(const char *text, int32_t indent)
{
    int32_t column = 0;
    while (*text) {
        const int32_t word = (int32_t)strcspn(text, " ");
        if (column > 0 && column + 1 + word > LINE_WIDTH) {
            printf("\n");
            column = 0;
        }
        column += printf("%*s%.*s", column > 0 ? 1 : indent, "", (int)word, text);
        text += word;
        while (*text == ' ') text++;
    }
    printf("\n");
}

static const char *cascade_word(const table *t, const prefix_row *row)
{
    const fv_plan_options *plan = &t->opts->args.plan;
    if (plan->cascade == FV_CASCADE_OFF || plan->batch_invariant || plan->static_grid) return "not asked for";
    if (plan->cascade == FV_CASCADE_ALWAYS) return "taken, as asked for";
    return row->gain > 0 ? "worth it" : "not worth it";
}

static void print_prefixes(const table *t, const prefix_row *rows, int32_t num_rows)
{
    if (num_rows == 0) printf("cascade: no neighbours share whole blocks that all of them see alike\n");
    for (int32_t i = 0; i < num_rows; i++) {
        const prefix_row *row = &rows[i];
        printf("cascade: sequences %d to %d share %d keys; gain %+lld, %+.1f%% of the batch's cost: %s\n",
               row->first_seq, row->first_seq + row->num_seqs - 1, row->num_keys, (long long)row->gain,
               100 * row->of_batch, cascade_word(t, row));
    }
}

static void print_plans(const table *t)
{
    for (int32_t i = 0; i < t->num_answers; i++) {
        const answer *a = &t->answers[i];
        if (!a->plan[0]) continue;
        printf("\n%s: workspace %.2f MiB, plan buffers %.1f KiB\n", a->name, (double)a->workspace_bytes / (1 << 20),
               (double)a->buffer_bytes / 1024);
        print_wrapped(a->plan, 4);
    }
}

static void print_table(const table *t)
{
    char text[320];
    const char *chosen = chosen_name(t);
    fv_problem_args_describe(text, sizeof(text), &t->opts->args.problem);
    printf("%s, on %s\nlayer kind %s; auto takes %s\n\n", text, fv_device_name(t->device), fv_layer_kind_name(t->kind),
           chosen ? chosen : "none");
    printf("%-4s  %-24s %-7s %-13s %s\n", "rank", "backend", "answer", "layout", "strategy");
    for (int32_t i = 0; i < t->num_answers; i++) {
        const answer *a = &t->answers[i];
        char rank[16] = "-";
        if (a->rank > 0) snprintf(rank, sizeof(rank), "%d", a->rank);
        printf("%4s  %-24s %-7s %-13s %s\n", rank, a->name, verdict(a), a->layout, a->summary);
        for (int32_t r = 0; r < a->num_reasons; r++) printf("      - %s\n", a->reasons[r]);
    }
}

static void print_json(const table *t, const prefix_row *prefixes, int32_t num_prefixes)
{
    char text[320];
    fv_json json;
    fv_json_init(&json, stdout);
    fv_json_begin_object(&json, NULL);
    fv_problem_args_describe(text, sizeof(text), &t->opts->args.problem);
    fv_json_string(&json, "problem", text);
    fv_json_string(&json, "device", fv_device_name(t->device));
    fv_json_string(&json, "layer_kind", fv_layer_kind_name(t->kind));
    fv_json_string(&json, "auto", chosen_name(t));
    fv_json_begin_array(&json, "backends");
    for (int32_t i = 0; i < t->num_answers; i++) {
        const answer *a = &t->answers[i];
        fv_json_begin_row(&json);
        fv_json_string(&json, "name", a->name);
        fv_json_int(&json, "rank", a->rank);
        fv_json_string(&json, "answer", verdict(a));
        fv_json_bool(&json, "serves", a->num_reasons == 0);
        fv_json_string(&json, "layout", a->layout);
        fv_json_begin_array(&json, "why_not");
        for (int32_t r = 0; r < a->num_reasons; r++) fv_json_string(&json, NULL, a->reasons[r]);
        fv_json_end_array(&json);
        fv_json_string(&json, "summary", a->summary);
        if (a->plan[0]) {
            fv_json_string(&json, "plan", a->plan);
            fv_json_int(&json, "workspace_bytes", (int64_t)a->workspace_bytes);
            fv_json_int(&json, "plan_buffer_bytes", (int64_t)a->buffer_bytes);
        }
        fv_json_end_object(&json);
    }
    fv_json_end_array(&json);
    if (t->opts->batch) {
        fv_json_string(&json, "batch", t->opts->batch);
        fv_json_begin_array(&json, "shared_prefixes");
        for (int32_t i = 0; i < num_prefixes; i++) {
            fv_json_begin_row(&json);
            fv_json_int(&json, "first_seq", prefixes[i].first_seq);
            fv_json_int(&json, "num_seqs", prefixes[i].num_seqs);
            fv_json_int(&json, "num_keys", prefixes[i].num_keys);
            fv_json_int(&json, "gain", prefixes[i].gain);
            fv_json_double(&json, "gain_of_batch", prefixes[i].of_batch);
            fv_json_string(&json, "cascade", cascade_word(t, &prefixes[i]));
            fv_json_end_object(&json);
        }
        fv_json_end_array(&json);
    }
    fv_json_end_object(&json);
}

/* --- the two forms of the command ---------------------------------------------------------------------------- */

/* The default problem as a layer of a kind. */
static fv_status problem_of_kind(fv_problem *problem, fv_layer_kind kind)
{
    fv_problem_args args;
    fv_problem_args_init(&args);
    args.problem.kind = kind == FV_LAYER_MLA ? FV_ATTENTION_MLA : FV_ATTENTION_MHA;
    args.problem.window = kind == FV_LAYER_SLIDING_WINDOW ? 1024 : 0;
    if (kind == FV_LAYER_ENCODER) args.problem.type = FV_ATTENTION_ENCODER;
    if (kind == FV_LAYER_CROSS) args.problem.type = FV_ATTENTION_CROSS;
    const fv_status status = fv_problem_args_finish(&args);
    *problem = args.problem;
    return status;
}

/* What auto takes for the problem; NULL: no backend can. */
static fv_status find_chosen(const char **chosen, fv_device *device, const fv_problem *problem)
{
    char reasons[REASONS_BYTES];
    for (int32_t i = 0; (*chosen = fv_backend_preferred_name(i, device, problem)); i++) {
        const fv_status status = fv_backend_why_not(reasons, sizeof(reasons), *chosen, device, problem);
        if (status != FV_OK || !reasons[0]) return status;
    }
    return FV_OK;
}

static fv_status print_overview(const options *opts, fv_device *device)
{
    fv_json json;
    fv_json_init(&json, stdout);
    if (opts->json) {
        fv_json_begin_object(&json, NULL);
        fv_json_string(&json, "device", fv_device_name(device));
        fv_json_begin_array(&json, "layer_kinds");
    } else {
        printf("%-24s auto takes, on %s\n", "layer kind", fv_device_name(device));
    }
    for (int32_t kind = FV_LAYER_FULL; kind <= FV_LAYER_CROSS; kind++) {
        fv_problem problem;
        const char *chosen = NULL;
        fv_status status = problem_of_kind(&problem, (fv_layer_kind)kind);
        if (status == FV_OK) status = find_chosen(&chosen, device, &problem);
        if (status != FV_OK) return status;
        if (!opts->json) {
            printf("%-24s %s\n", fv_layer_kind_name((fv_layer_kind)kind), chosen ? chosen : "none");
            continue;
        }
        fv_json_begin_row(&json);
        fv_json_string(&json, "layer_kind", fv_layer_kind_name((fv_layer_kind)kind));
        fv_json_string(&json, "auto", chosen);
        fv_json_end_object(&json);
    }
    if (opts->json) {
        fv_json_end_array(&json);
        fv_json_begin_array(&json, "backends");
    } else {
        printf("\n%-24s %-13s strategy\n", "backend", "layout");
    }
    for (int32_t i = 0; i < fv_backend_count(); i++) {
        const fv_backend *backend = fv_backend_at(i);
        const char *layout = fv_kv_layout_name(backend->layout);
        if (!opts->json) {
            printf("%-24s %-13s %s\n", backend->name, layout, backend->summary);
            continue;
        }
        fv_json_begin_row(&json);
        fv_json_string(&json, "name", backend->name);
        fv_json_string(&json, "layout", layout);
        fv_json_string(&json, "summary", backend->summary);
        fv_json_end_object(&json);
    }
    if (opts->json) {
        fv_json_end_array(&json);
        fv_json_end_object(&json);
    } else {
        printf("\nfovea backends --why [SPEC] [OPTION...] asks all of them about a problem and a batch.\n");
    }
    return FV_OK;
}

/* Plans for the batch: of each backend that can. */
static fv_status make_plans(prefix_row *prefixes, int32_t *num_prefixes, table *t, fv_context *context)
{
    fv_workload w;
    fv_status status = fv_workload_init_batch(&w, context, &t->opts->args.problem, t->opts->batch,
                                              t->opts->args.shared_prefix);
    if (status != FV_OK) return status;
    for (int32_t i = 0; i < t->num_answers; i++) {
        if (t->answers[i].num_reasons == 0) describe_plan(&t->answers[i], t, &w, context);
    }
    if (w.problem.kind == FV_ATTENTION_MHA) status = find_prefixes(prefixes, num_prefixes, &w);
    fv_workload_deinit(&w);
    return status;
}

static fv_status print_answers(const options *opts, fv_device *device, fv_context *context)
{
    prefix_row prefixes[MAX_GROUPS];
    int32_t num_prefixes = 0;
    table *t = calloc(1, sizeof(*t));
    if (!t) return fv_fail(FV_ERR_NO_MEMORY, "no memory for the answers of the backends");
    t->opts = opts;
    t->device = device;
    fv_status status = ask_all(t);
    if (status == FV_OK && opts->batch) status = make_plans(prefixes, &num_prefixes, t, context);
    if (status == FV_OK && opts->json) print_json(t, prefixes, num_prefixes);
    if (status == FV_OK && !opts->json) {
        print_table(t);
        if (opts->batch) {
            printf("\nbatch %s", opts->batch);
            if (opts->args.shared_prefix) printf(", first %d keys of a group shared", opts->args.shared_prefix);
            printf("\n");
            print_prefixes(t, prefixes, num_prefixes);
            print_plans(t);
        }
    }
    free(t);
    return status;
}

int fv_cmd_backends(int argc, char **argv)
{
    options opts;
    if (read_options(&opts, argc, argv) != FV_OK) return fv_args_fail("backends");
    if (opts.help) {
        print_help();
        return 0;
    }
    const int32_t is_overview = !opts.why && !opts.batch && opts.args.num_of_problem == 0;
    fv_context *context = NULL;
    fv_device *device = NULL;
    fv_status status = fv_context_create(&context, NULL);
    if (status == FV_OK) status = fv_device_find(&device, context, opts.device);
    if (status == FV_OK) {
        status = is_overview ? print_overview(&opts, device) : print_answers(&opts, device, context);
    }
    const int code = status == FV_OK ? 0 : fv_run_fail("backends");
    fv_context_destroy(context);
    return code;
}
