/* What `fovea pipeline` shows: a planned pipeline and a run of it, as text, SVG or JSON. */
#ifndef FV_TOOLS_PIPELINE_PIPELINE_H
#define FV_TOOLS_PIPELINE_PIPELINE_H

#include <stdio.h>

#include "fovea/preload_pipeline.h"

/* Durations as given are decimal numbers; all times here are those times `scale`, exactly. */
typedef struct fv_pipeline_view {
    int64_t scale; /* 1, 10, 100, 1000 */
    int64_t times[2][FV_PRELOAD_MAX_PAIRS];
    fv_preload_pipeline pipeline;
    int32_t num_blocks;
    fv_preload_run run;
    fv_preload_op *ops; /* [run.num_ops] */
    /* A shorter run where num_blocks is more than a chart can show: all cycles of the loop are alike. */
    int32_t num_chart_blocks;
    fv_preload_run chart_run;
    fv_preload_op *chart_ops;
} fv_pipeline_view;

#define FV_PIPELINE_TIME_BYTES 32

/* Writes a time as it would have been given: "2", "1.25". Returns `text`, FV_PIPELINE_TIME_BYTES long. */
const char *fv_pipeline_time(char *text, const fv_pipeline_view *view, int64_t time);

void fv_pipeline_print_summary(FILE *file, const fv_pipeline_view *view);
void fv_pipeline_print_chart(FILE *file, const fv_pipeline_view *view);
void fv_pipeline_print_json(FILE *file, const fv_pipeline_view *view);
void fv_pipeline_print_svg(FILE *file, const fv_pipeline_view *view);

/* Where the phase of cycle `cycle` begins in the chart's run: cycle -1 is the preload, num_cycles the tail. */
int64_t fv_pipeline_phase_start(const fv_pipeline_view *view, int32_t cycle);

#endif
