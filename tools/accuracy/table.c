#include "accuracy/table.h"

#include <math.h>
#include <stdio.h>

#include "core/compiler.h"
#include "json.h"

const accuracy_paper_column accuracy_paper[ACCURACY_NUM_COLUMNS] = {
    {{ACCURACY_GAUSSIAN, 1}, 1.77e-3, 1.81e-3}, {{ACCURACY_GAUSSIAN, 2}, 1.74e-3, 1.75e-3},
    {{ACCURACY_GAUSSIAN, 3}, 1.65e-3, 1.66e-3}, {{ACCURACY_GAUSSIAN, 4}, 1.51e-3, 1.51e-3},
    {{ACCURACY_GAUSSIAN, 5}, 1.33e-3, 1.35e-3}, {{ACCURACY_GAUSSIAN, 10}, 7.82e-4, 7.86e-4},
    {{ACCURACY_UNIFORM, 1}, 1.97e-3, 2.01e-3},  {{ACCURACY_UNIFORM, 3}, 1.77e-3, 1.78e-3},
    {{ACCURACY_UNIFORM, 5}, 1.69e-3, 1.69e-3},  {{ACCURACY_UNIFORM, 10}, 1.24e-3, 1.24e-3},
    {{ACCURACY_UNIFORM, 20}, 7.04e-4, 7.04e-4}, {{ACCURACY_UNIFORM, 50}, 2.26e-4, 2.26e-4},
    {{ACCURACY_UNIFORM, 60}, 2.26e-4, 2.26e-4},
};

/* A line of the table: a name, a number of each column, how to print it. */
typedef struct table_line {
    const char *name;
    const char *format;
    double (*of)(const accuracy_column *column, const accuracy_paper_column *paper);
} table_line;

static double paper_base(const accuracy_column *column, const accuracy_paper_column *paper)
{
    (void)column;
    return paper->base * 1e3;
}

static double paper_amla(const accuracy_column *column, const accuracy_paper_column *paper)
{
    (void)column;
    return paper->amla * 1e3;
}

static double base(const accuracy_column *column, const accuracy_paper_column *paper)
{
    (void)paper;
    return column->error[ACCURACY_BASE] * 1e3;
}

static double amla(const accuracy_column *column, const accuracy_paper_column *paper)
{
    (void)paper;
    return column->error[ACCURACY_AMLA] * 1e3;
}

static double uncompensated(const accuracy_column *column, const accuracy_paper_column *paper)
{
    (void)paper;
    return column->error[ACCURACY_UNCOMPENSATED] * 1e3;
}

static double base_to_paper(const accuracy_column *column, const accuracy_paper_column *paper)
{
    return 100 * (column->error[ACCURACY_BASE] / paper->base - 1);
}

static double amla_to_paper(const accuracy_column *column, const accuracy_paper_column *paper)
{
    return 100 * (column->error[ACCURACY_AMLA] / paper->amla - 1);
}

static double amla_to_base(const accuracy_column *column, const accuracy_paper_column *paper)
{
    (void)paper;
    return 100 * (column->error[ACCURACY_AMLA] / column->error[ACCURACY_BASE] - 1);
}

static double loss(const accuracy_column *column, const accuracy_paper_column *paper)
{
    (void)paper;
    return column->error[ACCURACY_UNCOMPENSATED] / column->error[ACCURACY_BASE];
}

static double max_moved(const accuracy_column *column, const accuracy_paper_column *paper)
{
    (void)paper;
    return 100 * column->max_moved;
}

static double integer_moved(const accuracy_column *column, const accuracy_paper_column *paper)
{
    (void)paper;
    return 100 * column->integer_moved;
}

static const table_line lines[] = {
    {"Base, the paper's, 1e-3", "%9.3f ", paper_base},
    {"Base, 1e-3", "%9.3f ", base},
    {"AMLA, the paper's, 1e-3", "%9.3f ", paper_amla},
    {"AMLA, 1e-3", "%9.3f ", amla},
    {"AMLA without compensation, 1e-3", "%9.3f ", uncompensated},
    {"AMLA to Base", "%+9.1f%%", amla_to_base},
    {"without compensation to Base", "%9.2fx", loss},
    {"Base to the paper's", "%+9.1f%%", base_to_paper},
    {"AMLA to the paper's", "%+9.1f%%", amla_to_paper},
    {"blocks that move the maximum", "%9.1f%%", max_moved},
    {"blocks that move n", "%9.1f%%", integer_moved},
};

static void print_number(const char *format, double number)
{
    if (!isfinite(number))
        printf("%9s ", "-");
    else
        printf(format, number);
}

static void print_table(const char *title, const accuracy_column *columns, const accuracy_paper_column *paper,
                        int32_t num_columns)
{
    printf("\n%-32s", title);
    for (int32_t i = 0; i < num_columns; i++) printf("%9g ", (double)columns[i].distribution.width);
    printf("\n");
    for (int32_t line = 0; line < FV_ARRAY_LEN(lines); line++) {
        printf("%-32s", lines[line].name);
        for (int32_t i = 0; i < num_columns; i++)
            print_number(lines[line].format, lines[line].of(&columns[i], &paper[i]));
        printf("\n");
    }
}

void accuracy_print(const accuracy_column *columns, const accuracy_lab *lab)
{
    const accuracy_setup *setup = &lab->setup;
    printf("Backend AMLA, %d heads over %d latents of 576 in shuffled blocks of %d, bf16, %d samples a column, seed "
           "%llu:\n"
           "|out - exact| / |exact|, Frobenius norms over all heads, exact in double from the same inputs; mean.\n",
           setup->num_heads, setup->context, ACCURACY_BLOCK_SIZE, setup->num_samples, (unsigned long long)setup->seed);
    printf("device: %s\nplan: %s\n", fv_device_describe(lab->at.device), accuracy_lab_kernels(lab));
    print_table("Gaussian, sigma", columns, accuracy_paper, ACCURACY_GAUSSIAN_COLUMNS);
    print_table("uniform in [-a, a), a", columns + ACCURACY_GAUSSIAN_COLUMNS,
                accuracy_paper + ACCURACY_GAUSSIAN_COLUMNS, ACCURACY_UNIFORM_COLUMNS);
    printf(
        "\nThe last two lines are of the exact scores, in blocks of %d keys. A kernel may keep a maximum for longer\n"
        "(Hopper's: until a score passes it by 8, in base 2), and then its output moves less often.\n",
        lab->block_keys);
    printf(
        "\nThe paper: AMLA, arXiv 2509.25224, tables 3 and 4 (100 samples of 8192 keys; we take 128 heads). Its "
        "column\n"
        "widths are not given where we read it: ours are those that fit its figures. The last uniform figure is set\n"
        "beside 50, the round number next to it, and beside 60, which fits.\n");
}

void accuracy_print_json(const accuracy_column *columns, const accuracy_lab *lab)
{
    const accuracy_setup *setup = &lab->setup;
    fv_json json;
    fv_json_init(&json, stdout);
    fv_json_begin_object(&json, NULL);
    fv_json_string(&json, "device", fv_device_describe(lab->at.device));
    fv_json_string(&json, "plan", accuracy_lab_kernels(lab));
    fv_json_int(&json, "block_keys", lab->block_keys);
    fv_json_int(&json, "heads", setup->num_heads);
    fv_json_int(&json, "context", setup->context);
    fv_json_int(&json, "samples", setup->num_samples);
    fv_json_int(&json, "seed", (int64_t)setup->seed);
    fv_json_begin_array(&json, "columns");
    for (int32_t i = 0; i < ACCURACY_NUM_COLUMNS; i++) {
        const accuracy_column *column = &columns[i];
        fv_json_begin_row(&json);
        fv_json_string(&json, "distribution", column->distribution.shape == ACCURACY_GAUSSIAN ? "gaussian" : "uniform");
        fv_json_double(&json, "width", column->distribution.width);
        fv_json_double(&json, "base", column->error[ACCURACY_BASE]);
        fv_json_double(&json, "amla", column->error[ACCURACY_AMLA]);
        fv_json_double(&json, "amla_uncompensated", column->error[ACCURACY_UNCOMPENSATED]);
        fv_json_double(&json, "paper_base", accuracy_paper[i].base);
        fv_json_double(&json, "paper_amla", accuracy_paper[i].amla);
        fv_json_double(&json, "blocks_that_move_the_maximum", column->max_moved);
        fv_json_double(&json, "blocks_that_move_n", column->integer_moved);
        fv_json_end_object(&json);
    }
    fv_json_end_array(&json);
    fv_json_end_object(&json);
}
