/* What a pipeline is, in lines of text and as JSON. */
#include <string.h>

#include "core/compiler.h"
#include "json.h"
#include "pipeline/pipeline.h"

static const char *const unit_names[] = {"matrix", "vector"};
static const char *const phase_names[] = {"preload", "loop", "tail"};

const char *fv_pipeline_time(char *text, const fv_pipeline_view *view, int64_t time)
{
    int32_t used = snprintf(text, FV_PIPELINE_TIME_BYTES, "%lld", (long long)(time / view->scale));
    int64_t rest = time % view->scale;
    if (rest) text[used++] = '.';
    for (int64_t digit = view->scale / 10; rest; rest %= digit, digit /= 10) text[used++] = (char)('0' + rest / digit);
    text[used] = '\0';
    return text;
}

int64_t fv_pipeline_phase_start(const fv_pipeline_view *view, int32_t cycle)
{
    return cycle < 0 ? 0 : view->chart_run.loop_start + cycle * view->pipeline.cycle_time;
}

static double percent(int64_t part, int64_t whole) { return whole ? 100.0 * (double)part / (double)whole : 0; }

static void print_durations(FILE *file, const fv_pipeline_view *view)
{
    char c[FV_PIPELINE_TIME_BYTES], v[FV_PIPELINE_TIME_BYTES];
    fprintf(file, "one block     ");
    for (int32_t i = 0; i < view->pipeline.num_pairs; i++) {
        fprintf(file, "%sC%d %s -> V%d %s", i ? " -> " : "", i + 1, fv_pipeline_time(c, view, view->times[0][i]), i + 1,
                fv_pipeline_time(v, view, view->times[1][i]));
    }
    fprintf(file, "\n");
}

static void print_bound(FILE *file, const fv_pipeline_view *view)
{
    const fv_preload_pipeline *p = &view->pipeline;
    const int32_t other = 1 - (int32_t)p->bound;
    char text[3][FV_PIPELINE_TIME_BYTES];
    fprintf(file,
            "cycle         %s long, %s-bound: the %s unit never waits, the %s unit works %s and idles %s (%.1f%%)\n",
            fv_pipeline_time(text[0], view, p->cycle_time), unit_names[p->bound], unit_names[p->bound],
            unit_names[other], fv_pipeline_time(text[1], view, p->busy[other]),
            fv_pipeline_time(text[2], view, p->cycle_time - p->busy[other]),
            percent(p->cycle_time - p->busy[other], p->cycle_time));
}

/* "C2 of block i at 0 to 5, C1 of block i+2 at 5 to 8" */
static void print_unit(FILE *file, const fv_pipeline_view *view, int32_t unit)
{
    char start[FV_PIPELINE_TIME_BYTES], end[FV_PIPELINE_TIME_BYTES];
    fprintf(file, "  %-11s ", unit_names[unit]);
    for (int32_t place = 0; place < view->pipeline.num_pairs; place++) {
        const fv_preload_stage *s = &view->pipeline.stages[unit][place];
        fprintf(file, "%s%c%d of block i", place ? ", " : "", "CV"[unit], s -> pair + 1);
        if (s->ahead) fprintf(file, "+%d", s->ahead);
        fprintf(file, " at %s to %s", fv_pipeline_time(start, view, s->start), fv_pipeline_time(end, view, s->end));
    }
    fprintf(file, "\n");
}

static void print_chains(FILE *file, const fv_preload_pipeline *p)
{
    fprintf(file, "chains        ");
    int32_t num_printed = 0;
    for (int32_t pair = 0; pair < p->num_pairs; pair++) {
        if (pair != p->fed_pair) fprintf(file, "%sC%d -> V%d", num_printed++ ? ", " : "", pair + 1, pair + 1);
    }
    fprintf(file, "%s; the other inputs come from the cycle before\n",
            num_printed ? " within a cycle" : "none within a cycle");
}

static void print_preload(FILE *file, const fv_pipeline_view *view)
{
    char start[FV_PIPELINE_TIME_BYTES];
    const fv_preload_pipeline *p = &view->pipeline;
    fprintf(file, "preload       count %d:", p->preload_count);
    for (int32_t pair = 0; pair < p->num_pairs; pair++) {
        for (int32_t unit = 0; unit < 2; unit++) {
            int32_t ahead = 0;
            for (int32_t place = 0; place < p->num_pairs; place++) {
                if (p->stages[unit][place].pair == pair) ahead = p->stages[unit][place].ahead;
            }
            if (ahead == 1) fprintf(file, " %c%d of block 1,", "CV"[unit], pair + 1);
            if (ahead > 1) fprintf(file, " %c%d of blocks 1 to %d,", "CV"[unit], pair + 1, ahead);
        }
    }
    fprintf(file, " %d stages", p->num_preload_stages);
    if (view->run.num_cycles)
        fprintf(file, "; the loop starts at %s", fv_pipeline_time(start, view, view->run.loop_start));
    fprintf(file, "\n");
}

static void print_run(FILE *file, const fv_pipeline_view *view)
{
    const fv_preload_pipeline *p = &view->pipeline;
    const int64_t in_turn = (p->busy[0] + p->busy[1]) * view->num_blocks, total = view->run.total_time;
    char text[2][FV_PIPELINE_TIME_BYTES], blocks[16];
    snprintf(blocks, sizeof(blocks), "%d block%s", view->num_blocks, view->num_blocks == 1 ? "" : "s");
    fprintf(
        file,
        "%-13s %s long, %d full cycle%s: matrix unit %.1f%% busy, vector unit %.1f%%; one stage at a time %s (%.2fx)\n",
        blocks, fv_pipeline_time(text[0], view, total), view->run.num_cycles, view->run.num_cycles == 1 ? "" : "s",
        percent(p->busy[0] * view->num_blocks, total), percent(p->busy[1] * view->num_blocks, total),
        fv_pipeline_time(text[1], view, in_turn), (double)in_turn / (double)total);
}

void fv_pipeline_print_summary(FILE *file, const fv_pipeline_view *view)
{
    print_durations(file, view);
    print_bound(file, view);
    print_unit(file, view, FV_UNIT_MATRIX);
    print_unit(file, view, FV_UNIT_VECTOR);
    print_chains(file, &view->pipeline);
    print_preload(file, view);
    print_run(file, view);
}

/* --- JSON ------------------------------------------------------------------------------------------ */

static void put_time(fv_json *json, const char *key, const fv_pipeline_view *view, int64_t time)
{
    char text[FV_PIPELINE_TIME_BYTES];
    fv_json_number(json, key, fv_pipeline_time(text, view, time));
}

static void put_stages(fv_json *json, const fv_pipeline_view *view, int32_t unit)
{
    fv_json_begin_array(json, unit_names[unit]);
    for (int32_t place = 0; place < view->pipeline.num_pairs; place++) {
        const fv_preload_stage *s = &view->pipeline.stages[unit][place];
        fv_json_begin_row(json);
        fv_json_int(json, "pair", s->pair + 1);
        fv_json_int(json, "block_ahead", s->ahead);
        fv_json_bool(json, "input_from_same_cycle", s->in_chain);
        put_time(json, "start", view, s->start);
        put_time(json, "end", view, s->end);
        put_time(json, "slack", view, s->slack);
        fv_json_end_object(json);
    }
    fv_json_end_array(json);
}

static void put_run(fv_json *json, const fv_pipeline_view *view)
{
    fv_json_begin_object(json, "run");
    fv_json_int(json, "blocks", view->num_blocks);
    fv_json_int(json, "cycles", view->run.num_cycles);
    put_time(json, "loop_start", view, view->run.loop_start);
    put_time(json, "loop_end", view, view->run.loop_end);
    put_time(json, "total", view, view->run.total_time);
    fv_json_begin_array(json, "stages");
    for (int32_t i = 0; i < view->run.num_ops; i++) {
        const fv_preload_op *op = &view->ops[i];
        fv_json_begin_row(json);
        fv_json_string(json, "unit", unit_names[op->unit]);
        fv_json_int(json, "pair", op->pair + 1);
        fv_json_int(json, "block", op->block + 1);
        fv_json_int(json, "cycle", op->cycle + 1);
        fv_json_string(json, "phase", phase_names[op->phase]);
        put_time(json, "start", view, op->start);
        put_time(json, "end", view, op->end);
        fv_json_end_object(json);
    }
    fv_json_end_array(json);
    fv_json_end_object(json);
}

void fv_pipeline_print_json(FILE *file, const fv_pipeline_view *view)
{
    const fv_preload_pipeline *p = &view->pipeline;
    fv_json json;
    fv_json_init(&json, file);
    fv_json_begin_object(&json, NULL);
    fv_json_begin_array(&json, "pairs");
    for (int32_t i = 0; i < p->num_pairs; i++) {
        fv_json_begin_row(&json);
        put_time(&json, "matrix", view, view->times[0][i]);
        put_time(&json, "vector", view, view->times[1][i]);
        fv_json_end_object(&json);
    }
    fv_json_end_array(&json);
    fv_json_string(&json, "bound", unit_names[p->bound]);
    put_time(&json, "cycle", view, p->cycle_time);
    put_time(&json, "matrix_idle", view, p->cycle_time - p->busy[0]);
    put_time(&json, "vector_idle", view, p->cycle_time - p->busy[1]);
    fv_json_int(&json, "chains", p->num_chains);
    fv_json_int(&json, "preload_count", p->preload_count);
    fv_json_int(&json, "preload_stages", p->num_preload_stages);
    put_stages(&json, view, FV_UNIT_MATRIX);
    put_stages(&json, view, FV_UNIT_VECTOR);
    put_run(&json, view);
    fv_json_end_object(&json);
}
