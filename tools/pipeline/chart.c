/* The run as rows of characters:
 *
 *            preload      |cycle 1          |cycle 2          |tail
 *   time     0            19                36                53
 *   matrix   [C1.1][C1.2-][C2.1--][C1.3--]...
 *   vector         [V1.1-][V1.2----].....                            C1.2: C_1 of block 2; dots: idle
 *
 * As wide as the shortest stage needs for its label, in panels below each other where that is more than a
 * screen's width. */
#include <string.h>

#include "core/compiler.h"
#include "pipeline/pipeline.h"

#define PANEL_COLUMNS 100
#define MAX_PANELS 6
#define MAX_COLUMNS (PANEL_COLUMNS * MAX_PANELS)
#define LABEL_COLUMNS 6 /* [C1.1] */

typedef struct chart {
    int32_t num_columns;
    int64_t total;
    char phases[MAX_COLUMNS + 1], times[MAX_COLUMNS + 1], rows[2][MAX_COLUMNS + 1];
} chart;

static int32_t column_of(const chart *c, int64_t time)
{
    return (int32_t)((double)time / (double)c->total * c->num_columns + 0.5);
}

/* Enough columns for the label of the shortest stage, if that is not too many. */
static int32_t columns_of(const fv_pipeline_view *view)
{
    int64_t shortest = view->chart_run.total_time;
    for (int32_t unit = 0; unit < 2; unit++) {
        for (int32_t i = 0; i < view->pipeline.num_pairs; i++) {
            if (view->times[unit][i]) shortest = fv_min_i64(shortest, view->times[unit][i]);
        }
    }
    const double wanted = LABEL_COLUMNS * (double)view->chart_run.total_time / (double)shortest;
    if (wanted > MAX_COLUMNS) return 2 * PANEL_COLUMNS; /* the shortest goes without a label anyway */
    return wanted < PANEL_COLUMNS ? PANEL_COLUMNS : (int32_t)wanted;
}

/* Text from a column on, as far as it fits before column `end`. */
static void put_text(char *row, int32_t column, int32_t end, const char *text)
{
    for (; *text && column < end; text++) row[column++] = *text;
}

static void put_op(chart *c, const fv_preload_op *op)
{
    char *row = c->rows[op->unit];
    const int32_t first = column_of(c, op->start), end = column_of(c, op->end);
    if (first == end) return; /* too short to be seen, or of no duration */
    memset(row + first, '-', (size_t)(end - first));
    row[first] = '[';
    row[end - 1] = end - first > 1 ? ']' : '|';
    char label[32];
    const int32_t length = snprintf(label, sizeof(label), "%c%d.%d", "CV"[op->unit], op -> pair + 1, op -> block + 1);
    if (length <= end - first - 2) put_text(row, first + 1, end - 1, label);
}

static void put_phases(chart *c, const fv_pipeline_view *view)
{
    const int32_t num_cycles = view->chart_run.num_cycles;
    for (int32_t cycle = -1; cycle <= num_cycles; cycle++) {
        const int32_t first = column_of(c, fv_pipeline_phase_start(view, cycle));
        const int32_t end = cycle < num_cycles ? column_of(c, fv_pipeline_phase_start(view, cycle + 1))
                                               : c->num_columns;
        char name[32] = "|preload", time[FV_PIPELINE_TIME_BYTES];
        if (cycle >= 0) snprintf(name, sizeof(name), "|cycle %d", cycle + 1);
        if (cycle == num_cycles) snprintf(name, sizeof(name), "|tail");
        put_text(c->phases, first, end, name);
        fv_pipeline_time(time, view, fv_pipeline_phase_start(view, cycle));
        if ((int32_t)strlen(time) < end - first) put_text(c->times, first, end, time);
    }
}

static void print_row(FILE *file, const char *name, const char *row, int32_t first, int32_t length)
{
    while (length > 0 && row[first + length - 1] == ' ') length--;
    if (length > 0) fprintf(file, "%-8s%.*s\n", name, length, row + first);
}

void fv_pipeline_print_chart(FILE *file, const fv_pipeline_view *view)
{
    chart c = {.num_columns = columns_of(view), .total = view->chart_run.total_time};
    memset(c.phases, ' ', MAX_COLUMNS);
    memset(c.times, ' ', MAX_COLUMNS);
    memset(c.rows, '.', sizeof(c.rows));
    put_phases(&c, view);
    for (int32_t i = 0; i < view->chart_run.num_ops; i++) put_op(&c, &view->chart_ops[i]);
    for (int32_t first = 0; first < c.num_columns; first += PANEL_COLUMNS) {
        const int32_t length = fv_min_i32(PANEL_COLUMNS, c.num_columns - first);
        fprintf(file, "\n");
        print_row(file, "", c.phases, first, length);
        print_row(file, "time", c.times, first, length);
        print_row(file, "matrix", c.rows[FV_UNIT_MATRIX], first, length);
        print_row(file, "vector", c.rows[FV_UNIT_VECTOR], first, length);
    }
    fprintf(file, "\nC1.2 is C_1 of block 2; dots: the unit idles.");
    if (view->num_chart_blocks < view->num_blocks) {
        fprintf(file, " The chart is of a run over %d of the %d blocks.", view->num_chart_blocks, view->num_blocks);
    }
    fprintf(file, "\n");
}
