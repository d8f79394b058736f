/* The paper's tables 3 and 4 and ours beside them. */
#ifndef FV_TOOLS_ACCURACY_TABLE_H
#define FV_TOOLS_ACCURACY_TABLE_H

#include "accuracy/lab.h"

enum { ACCURACY_GAUSSIAN_COLUMNS = 6, ACCURACY_UNIFORM_COLUMNS = 7, ACCURACY_NUM_COLUMNS = 13 };

/* A column of the paper's: what its samples are drawn from, and its figures, NaN where it has none. The widths are
 * inferred: those at which Base gives the figures. For the last uniform one that is 60; 50 lies between columns. */
typedef struct accuracy_paper_column {
    accuracy_distribution distribution;
    double base, amla;
} accuracy_paper_column;

/* Table 3 (Gaussian), then table 4 (uniform). */
extern const accuracy_paper_column accuracy_paper[ACCURACY_NUM_COLUMNS];

/* `columns` [ACCURACY_NUM_COLUMNS] in the paper's order, measured in the lab. */
void accuracy_print(const accuracy_column *columns, const accuracy_lab *lab);
void accuracy_print_json(const accuracy_column *columns, const accuracy_lab *lab);

#endif
