/* fovea pipeline: how a matrix unit and a vector unit share the stages of a loop, so that the busier one
 * never waits. Plans with fovea/preload_pipeline.h, then prints. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "commands.h"
#include "core/compiler.h"
#include "core/error.h"
#include "pipeline/pipeline.h"

#define MAX_DURATION 1000000000 /* with three decimals below FV_PRELOAD_MAX_TIME */
#define MAX_DECIMALS 3
#define MAX_BLOCKS 4096
#define MORE_BLOCKS 3  /* full cycles of the loop where --blocks says nothing */
#define CHART_CYCLES 8 /* at most, in a chart */

typedef struct options {
    const char *pairs[FV_PRELOAD_MAX_PAIRS]; /* "3:2" */
    int32_t num_pairs;
    int32_t num_blocks; /* 0: enough for MORE_BLOCKS full cycles */
    const char *svg;
    int32_t amla, json, help;
} options;

static void print_help(void)
{
    printf(
        "usage: fovea pipeline C1:V1 [C2:V2 ...] [OPTION...]\n"
        "       fovea pipeline --amla [C1:V1 C2]\n\n"
        "Each block of a loop passes the stages C1 -> V1 -> C2 -> V2 ... -> Cn -> Vn: all C on a matrix unit, all V\n"
        "on a vector unit. Given how long they take, prints the cycle in which the busier unit never waits, what has\n"
        "to run ahead of the loop (the preload), the tail, how long each unit idles, and a chart of a run. The\n"
        "durations are numbers of any unit of time with up to three decimals, 0 included; without \":V\" V is 0.\n\n"
        "  --amla           the pipeline of AMLA, n = 2 and V2 = 0: C1 = Q K^T, V1 = softmax, C2 = P V. Without\n"
        "                   durations an example: 9:8 8, the products in the ratio of 576 to 512 columns\n"
        "  --blocks N       blocks of the run, 1 to %d (enough for %d full cycles)\n"
        "  --svg FILE       write the chart as SVG too\n"
        "  --json           print JSON instead: the cycle and every stage of the run\n"
        "  --help           this text\n\n"
        "The method: AMLA, arXiv 2509.25224, section 4.1 and appendix B. fovea pipeline 3:2 5:4 is a start.\n",
        MAX_BLOCKS, MORE_BLOCKS);
}

static fv_status read_options(options *opts, int argc, char **argv)
{
    enum { AMLA = 1000, BLOCKS, SVG, JSON };
    static const struct option long_options[] = {
        {"amla", no_argument, NULL, AMLA},     {"blocks", required_argument, NULL, BLOCKS},
        {"svg", required_argument, NULL, SVG}, {"json", no_argument, NULL, JSON},
        {"help", no_argument, NULL, 'h'},      {NULL, 0, NULL, 0},
    };
    *opts = (options){0};
    opterr = 0;
    int value;
    while ((value = getopt_long(argc, argv, ":h", long_options, NULL)) != -1) {
        fv_status status = FV_OK;
        switch (value) {
        case AMLA: opts->amla = 1; break;
        case BLOCKS: status = fv_args_i32(&opts->num_blocks, "--blocks", optarg, 1, MAX_BLOCKS); break;
        case SVG: opts->svg = optarg; break;
        case JSON: opts->json = 1; break;
        case 'h': opts->help = 1; break;
        default: status = fv_args_refuse(value, argc, argv); break;
        }
        if (status != FV_OK) return status;
    }
    for (; optind < argc; optind++) {
        if (opts->num_pairs == FV_PRELOAD_MAX_PAIRS) {
            return fv_fail(FV_ERR_INVALID, "'%s' is pair %d; accepted: 1 to %d pairs C:V", argv[optind],
                           FV_PRELOAD_MAX_PAIRS + 1, FV_PRELOAD_MAX_PAIRS);
        }
        opts->pairs[opts->num_pairs++] = argv[optind];
    }
    return FV_OK;
}

static fv_status use_amla(options *opts)
{
    static const char *const example[] = {"9:8", "8"};
    if (opts->num_pairs != 0 && opts->num_pairs != 2) {
        return fv_fail(FV_ERR_INVALID, "--amla with %d pair%s; accepted: C1:V1 C2, e.g. 9:8 8, or none",
                       opts->num_pairs, opts->num_pairs == 1 ? "" : "s");
    }
    if (opts->num_pairs == 0) memcpy(opts->pairs, example, sizeof(example));
    opts->num_pairs = 2;
    return FV_OK;
}

/* A duration, digits with up to MAX_DECIMALS behind a point, in thousandths. Returns what follows it, or NULL
 * where there is none. */
static const char *read_duration(int64_t *thousandths, const char *text)
{
    int32_t num_digits = 0, num_decimals = 0;
    int64_t value = 0;
    for (; *text >= '0' && *text <= '9' && value <= MAX_DURATION; text++, num_digits++)
        value = value * 10 + (*text - '0');
    if (value > MAX_DURATION) return NULL;
    if (*text == '.') {
        for (text++; *text >= '0' && *text <= '9' && num_decimals < MAX_DECIMALS; text++, num_decimals++) {
            value = value * 10 + (*text - '0');
        }
    }
    for (int32_t i = num_decimals; i < MAX_DECIMALS; i++) value *= 10;
    *thousandths = value;
    return num_digits + num_decimals && value <= (int64_t)MAX_DURATION * 1000 ? text : NULL;
}

static fv_status read_pair(fv_pipeline_view *view, int32_t pair, const char *text)
{
    const char *rest = read_duration(&view->times[FV_UNIT_MATRIX][pair], text);
    if (rest && *rest == ':') rest = read_duration(&view->times[FV_UNIT_VECTOR][pair], rest + 1);
    if (rest && *rest == '\0') return FV_OK;
    return fv_fail(
        FV_ERR_INVALID,
        "'%s' is not a pair of durations; accepted: C%d:V%d, e.g. 3:2 or 12.5:0.75, each from 0 to %d with up "
        "to %d decimals",
        text, pair + 1, pair + 1, MAX_DURATION, MAX_DECIMALS);
}

/* Takes the decimals away that no duration has. */
static void set_scale(fv_pipeline_view *view, int32_t num_pairs)
{
    int32_t has_decimals = 0;
    for (int32_t unit = 0; unit < 2; unit++) {
        for (int32_t i = 0; i < num_pairs; i++) has_decimals |= view->times[unit][i] % 1000 != 0;
    }
    view->scale = has_decimals ? 1000 : 1;
    for (int32_t unit = 0; unit < 2 && !has_decimals; unit++) {
        for (int32_t i = 0; i < num_pairs; i++) view->times[unit][i] /= 1000;
    }
}

static fv_status run_blocks(fv_preload_run *run, fv_preload_op **ops, const fv_preload_pipeline *pipeline,
                            int32_t num_blocks)
{
    const int32_t max_ops = 2 * pipeline->num_pairs * num_blocks;
    *run = (fv_preload_run){.struct_size = sizeof(*run)};
    *ops = calloc((size_t)max_ops, sizeof(**ops));
    if (!*ops) return fv_fail(FV_ERR_NO_MEMORY, "no memory for %d stages", max_ops);
    return fv_preload_pipeline_run(run, *ops, max_ops, pipeline, num_blocks);
}

static fv_status view_init(fv_pipeline_view *view, const options *opts)
{
    *view = (fv_pipeline_view){.pipeline = {.struct_size = sizeof(view->pipeline)}};
    for (int32_t i = 0; i < opts->num_pairs; i++) {
        const fv_status status = read_pair(view, i, opts->pairs[i]);
        if (status != FV_OK) return status;
    }
    if (opts->amla && view->times[FV_UNIT_VECTOR][1] != 0) {
        return fv_fail(FV_ERR_INVALID, "--amla with '%s'; accepted: V2 is 0, AMLA has no second vector stage",
                       opts->pairs[1]);
    }
    set_scale(view, opts->num_pairs);
    const fv_status status = fv_preload_pipeline_plan(&view->pipeline, view->times[FV_UNIT_MATRIX],
                                                      view->times[FV_UNIT_VECTOR], opts->num_pairs);
    if (status != FV_OK) return status;
    view->num_blocks = opts->num_blocks ? opts->num_blocks : view->pipeline.preload_count + MORE_BLOCKS;
    view->num_chart_blocks = fv_min_i32(view->num_blocks, view->pipeline.preload_count + CHART_CYCLES);
    const fv_status chart = run_blocks(&view->chart_run, &view->chart_ops, &view->pipeline, view->num_chart_blocks);
    return chart == FV_OK ? run_blocks(&view->run, &view->ops, &view->pipeline, view->num_blocks) : chart;
}

static void view_deinit(fv_pipeline_view *view)
{
    free(view->ops);
    free(view->chart_ops);
}

static fv_status write_svg(const char *path, const fv_pipeline_view *view)
{
    FILE *file = fopen(path, "w");
    if (!file) return fv_fail(FV_ERR_IO, "--svg '%s' cannot be written: %s", path, strerror(errno));
    fv_pipeline_print_svg(file, view);
    const int failed = ferror(file), not_closed = fclose(file);
    if (failed || not_closed) return fv_fail(FV_ERR_IO, "--svg '%s' cannot be written: %s", path, strerror(errno));
    return FV_OK;
}

int fv_cmd_pipeline(int argc, char **argv)
{
    options opts;
    fv_status status = read_options(&opts, argc, argv);
    if (status == FV_OK && opts.help) {
        print_help();
        return 0;
    }
    if (status == FV_OK && opts.amla) status = use_amla(&opts);
    if (status == FV_OK && opts.num_pairs == 0) {
        status = fv_fail(FV_ERR_INVALID, "no durations; accepted: C1:V1 C2:V2 ..., e.g. 3:2 5:4, or --amla");
    }
    if (status != FV_OK) return fv_args_fail("pipeline");

    fv_pipeline_view view;
    int exit_code = 0;
    if (view_init(&view, &opts) != FV_OK) {
        exit_code = fv_args_fail("pipeline");
    } else if (opts.svg && write_svg(opts.svg, &view) != FV_OK) {
        exit_code = fv_run_fail("pipeline");
    } else if (opts.json) {
        fv_pipeline_print_json(stdout, &view);
    } else {
        fv_pipeline_print_summary(stdout, &view);
        fv_pipeline_print_chart(stdout, &view);
        if (opts.svg) printf("wrote %s\n", opts.svg);
    }
    view_deinit(&view);
    return exit_code;
}
