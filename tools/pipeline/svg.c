/* The run as a plot: two lanes, a colour for each block, bands for preload, cycles and tail, and the way of
 * one block through the stages.
 *
 *   title, subtitle
 *   | preload | cycle 1 | cycle 2 | tail |     bands behind the lanes
 *   matrix    [ C1 ][ C1 ][ C2 ][ C1 ] ...
 *   vector          [ V1 ][ V1 ] ////          hatched: idle
 *   time axis, legend */
#include <math.h>
#include <string.h>

#include "core/compiler.h"
#include "pipeline/pipeline.h"

#define LEFT 84
#define RIGHT 24
#define BANDS_TOP 74
#define LANE_TOP 104
#define LANE_HEIGHT 48
#define LANE_STEP 84
#define BANDS_BOTTOM (LANE_TOP + LANE_STEP + LANE_HEIGHT + 14)
#define HEIGHT (BANDS_BOTTOM + 86)
#define MIN_WIDTH 900
#define MAX_WIDTH 2400
#define STAGE_WIDTH 40 /* of the shortest stage, if that leaves the whole below MAX_WIDTH */

typedef struct plot {
    FILE *file;
    const fv_pipeline_view *view;
    double scale; /* pixels for each unit of time */
    int32_t width;
} plot;

static const char *const fills[] = {"#9fc5e8", "#f9cb9c", "#b6d7a8", "#d5a6bd",
                                    "#ffe599", "#a2c4c9", "#c9b3e6", "#e6b8af"};
static const char *const strokes[] = {"#3d73a8", "#b5651d", "#4f8a3a", "#8e4a6d",
                                      "#a68a1f", "#3f7077", "#6a4fa0", "#95503f"};

static double x_of(const plot *p, int64_t time) { return LEFT + (double)time * p->scale; }

static double lane_top(int32_t unit) { return LANE_TOP + unit * LANE_STEP; }

static void set_scale(plot *p)
{
    const int64_t total = p->view->chart_run.total_time;
    int64_t shortest = total;
    for (int32_t unit = 0; unit < 2; unit++) {
        for (int32_t i = 0; i < p->view->pipeline.num_pairs; i++) {
            if (p->view->times[unit][i]) shortest = fv_min_i64(shortest, p->view->times[unit][i]);
        }
    }
    const double wanted = STAGE_WIDTH * (double)total / (double)shortest + LEFT + RIGHT;
    p->width = wanted < MIN_WIDTH ? MIN_WIDTH : wanted > MAX_WIDTH ? MAX_WIDTH : (int32_t)wanted;
    p->scale = (p->width - LEFT - RIGHT) / (double)total;
}

static void put_head(const plot *p)
{
    fprintf(
        p->file,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" viewBox=\"0 0 %d %d\" "
        "font-family=\"Helvetica, Arial, sans-serif\" font-size=\"13\" fill=\"#222\">\n"
        "<defs>\n"
        "<pattern id=\"idle\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\">"
        "<rect width=\"6\" height=\"6\" fill=\"#fff\"/><line x1=\"0\" y1=\"0\" x2=\"0\" y2=\"6\" stroke=\"#bbb\" "
        "stroke-width=\"2\"/></pattern>\n"
        "<marker id=\"tip\" viewBox=\"0 0 8 8\" refX=\"7\" refY=\"4\" markerWidth=\"7\" markerHeight=\"7\" "
        "orient=\"auto\"><path d=\"M0 0 L8 4 L0 8 z\" fill=\"#222\"/></marker>\n"
        "</defs>\n<rect width=\"%d\" height=\"%d\" fill=\"#fff\"/>\n",
        p->width, HEIGHT, p->width, HEIGHT, p->width, HEIGHT);
}

static void put_title(const plot *p)
{
    const fv_preload_pipeline *pipeline = &p->view->pipeline;
    const int32_t other = 1 - (int32_t)pipeline->bound;
    char text[FV_PIPELINE_TIME_BYTES];
    fprintf(p->file, "<text x=\"%d\" y=\"28\" font-size=\"18\" font-weight=\"bold\">Preload pipeline:", 20);
    for (int32_t i = 0; i < pipeline->num_pairs; i++) {
        for (int32_t unit = 0; unit < 2; unit++) {
            fprintf(p->file, " %c<tspan font-size=\"12\" dy=\"3\">%d</tspan><tspan dx=\"5\" dy=\"-3\">%s</tspan>",
                    "CV"[unit], i + 1, fv_pipeline_time(text, p->view, p->view->times[unit][i]));
            if (unit == 0 || i + 1 < pipeline->num_pairs) fprintf(p->file, " \xe2\x86\x92");
        }
    }
    fprintf(p->file, "</text>\n<text x=\"20\" y=\"50\" fill=\"#555\">%s-bound, a cycle takes %s",
            pipeline->bound == FV_UNIT_MATRIX ? "Matrix" : "Vector",
            fv_pipeline_time(text, p->view, pipeline->cycle_time));
    fprintf(p->file, "; the %s unit idles %.1f%% of it; preload count %d (%d stages)</text>\n",
            other == FV_UNIT_MATRIX ? "matrix" : "vector",
            100.0 * (double)(pipeline->cycle_time - pipeline->busy[other]) / (double)pipeline->cycle_time,
            pipeline->preload_count, pipeline->num_preload_stages);
}

static void put_bands(const plot *p)
{
    const int32_t num_cycles = p->view->chart_run.num_cycles;
    for (int32_t cycle = -1; cycle <= num_cycles; cycle++) {
        const double from = x_of(p, fv_pipeline_phase_start(p->view, cycle));
        const double to = x_of(p, cycle < num_cycles ? fv_pipeline_phase_start(p->view, cycle + 1)
                                                     : p->view->chart_run.total_time);
        const char *fill = cycle < 0 || cycle == num_cycles ? "#f3f0e8" : cycle % 2 ? "#eef3fa" : "#e2ebf7";
        fprintf(p->file, "<rect x=\"%.1f\" y=\"%d\" width=\"%.1f\" height=\"%d\" fill=\"%s\"/>\n", from, BANDS_TOP,
                to - from, BANDS_BOTTOM - BANDS_TOP, fill);
        char name[32] = "preload";
        if (cycle >= 0) snprintf(name, sizeof(name), "cycle %d", cycle + 1);
        if (cycle == num_cycles) snprintf(name, sizeof(name), "tail");
        if (to - from < 8.0 * (double)strlen(name)) continue;
        fprintf(p->file, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\" fill=\"#555\">%s</text>\n", (from + to) / 2,
                BANDS_TOP + 19, name);
    }
}

static void put_lanes(const plot *p)
{
    for (int32_t unit = 0; unit < 2; unit++) {
        fprintf(p->file, "<text x=\"20\" y=\"%.1f\" font-weight=\"bold\">%s</text>\n",
                lane_top(unit) + LANE_HEIGHT / 2.0 + 5, unit ? "vector" : "matrix");
        fprintf(p->file, "<rect x=\"%d\" y=\"%.1f\" width=\"%.1f\" height=\"%d\" fill=\"url(#idle)\"/>\n", LEFT,
                lane_top(unit), x_of(p, p->view->chart_run.total_time) - LEFT, LANE_HEIGHT);
    }
}

static void put_op(const plot *p, const fv_preload_op *op)
{
    const double from = x_of(p, op->start), width = x_of(p, op->end) - from, top = lane_top((int32_t)op->unit);
    char start[FV_PIPELINE_TIME_BYTES], end[FV_PIPELINE_TIME_BYTES];
    const int32_t colour = op->block % FV_ARRAY_LEN(fills);
    if (op->start == op->end) return;
    fprintf(
        p->file,
        "<g><title>%c%d of block %d, %s to %s</title><rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%d\" rx=\"3\" "
        "fill=\"%s\" stroke=\"%s\"/>",
        "CV"[op->unit], op -> pair + 1, op -> block + 1, fv_pipeline_time(start, p->view, op->start),
        fv_pipeline_time(end, p->view, op->end), from, top, width, LANE_HEIGHT, fills[colour], strokes[colour]);
    if (width >= 22) {
        fprintf(p->file,
                "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\" font-size=\"15\">%c<tspan font-size=\"10\" "
                "dy=\"3\">%d</tspan></text><text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\" font-size=\"10\" "
                "fill=\"%s\">%s%d</text>",
                from + width / 2, top + 22, "CV"[op->unit], op -> pair + 1, from + width / 2, top + 40, strokes[colour],
                width >= 48 ? "block " : "", op->block + 1);
    }
    fprintf(p->file, "</g>\n");
}

static const fv_preload_op *op_of(const plot *p, int32_t unit, int32_t pair, int32_t block)
{
    for (int32_t i = 0; i < p->view->chart_run.num_ops; i++) {
        const fv_preload_op *op = &p->view->chart_ops[i];
        if ((int32_t)op->unit == unit && op->pair == pair && op->block == block) return op;
    }
    return NULL;
}

/* From the end of each stage to the start of the next, in the space between the lanes. */
static void put_way(const plot *p, int32_t block)
{
    const double between[] = {lane_top(0) + LANE_HEIGHT, lane_top(1)};
    for (int32_t link = 1; link < 2 * p->view->pipeline.num_pairs; link++) {
        const fv_preload_op *from = op_of(p, (link - 1) % 2, (link - 1) / 2, block),
                            *to = op_of(p, link % 2, link / 2, block);
        if (to->start == to->end) continue; /* nothing is drawn there */
        const double x0 = x_of(p, from->end) - 3, x1 = x_of(p, to->start) + 5;
        const double y0 = between[from->unit], y1 = between[to->unit], middle = (y0 + y1) / 2;
        fprintf(
            p->file,
            "<path d=\"M%.1f %.1f C%.1f %.1f %.1f %.1f %.1f %.1f\" fill=\"none\" stroke=\"#222\" stroke-width=\"1.6\" "
            "marker-end=\"url(#tip)\"/>\n",
            x0, y0, x0, middle, x1, middle, x1, y1);
    }
}

/* 1, 2 or 5 times a power of ten: about ten of them along the axis. */
static double tick_step(const plot *p)
{
    const double wanted = (double)p->view->chart_run.total_time / (double)p->view->scale / 10;
    const double power = pow(10, floor(log10(wanted)));
    const double rest = wanted / power;
    return power * (rest <= 1 ? 1 : rest <= 2 ? 2 : rest <= 5 ? 5 : 10);
}

static void put_axis(const plot *p)
{
    const double step = tick_step(p), end = (double)p->view->chart_run.total_time / (double)p->view->scale;
    fprintf(p->file, "<line x1=\"%d\" y1=\"%d\" x2=\"%.1f\" y2=\"%d\" stroke=\"#444\"/>\n", LEFT, BANDS_BOTTOM,
            x_of(p, p->view->chart_run.total_time), BANDS_BOTTOM);
    for (int32_t tick = 0; tick * step <= end * 1.000001; tick++) {
        const double x = LEFT + tick * step * (double)p->view->scale * p->scale;
        fprintf(p->file,
                "<line x1=\"%.1f\" y1=\"%d\" x2=\"%.1f\" y2=\"%d\" stroke=\"#444\"/><text x=\"%.1f\" y=\"%d\" "
                "text-anchor=\"middle\" font-size=\"11\">%g</text>\n",
                x, BANDS_BOTTOM, x, BANDS_BOTTOM + 5, x, BANDS_BOTTOM + 19, tick * step);
    }
    fprintf(p->file, "<text x=\"20\" y=\"%d\" font-size=\"11\">time</text>\n", BANDS_BOTTOM + 19);
}

static void put_legend(const plot *p, int32_t block)
{
    const int32_t y = BANDS_BOTTOM + 56;
    fprintf(p->file,
            "<rect x=\"%d\" y=\"%d\" width=\"28\" height=\"16\" fill=\"url(#idle)\" stroke=\"#bbb\"/><text x=\"%d\" "
            "y=\"%d\">the unit idles</text>\n"
            "<path d=\"M%d %d h28\" stroke=\"#222\" stroke-width=\"1.6\" marker-end=\"url(#tip)\"/><text x=\"%d\" "
            "y=\"%d\">the way of block %d through the stages</text>\n"
            "<text x=\"%d\" y=\"%d\">a colour is a block</text>\n",
            LEFT, y - 12, LEFT + 36, y, LEFT + 160, y - 4, LEFT + 198, y, block + 1, LEFT + 480, y);
}

void fv_pipeline_print_svg(FILE *file, const fv_pipeline_view *view)
{
    plot p = {.file = file, .view = view};
    /* The first block that starts after the preload: its whole way lies in the loop, if the run is long enough. */
    const int32_t block = fv_min_i32(view->pipeline.preload_count, view->num_chart_blocks - 1);
    set_scale(&p);
    put_head(&p);
    put_title(&p);
    put_bands(&p);
    put_lanes(&p);
    for (int32_t i = 0; i < view->chart_run.num_ops; i++) put_op(&p, &view->chart_ops[i]);
    put_way(&p, block);
    put_axis(&p);
    put_legend(&p, block);
    fprintf(file, "</svg>\n");
}
