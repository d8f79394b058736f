/* The paper's tables 3 and 4 and ours beside them. */
#ifndef FV_TOOLS_ACCURACY_TABLE_H
#define FV_TOOLS_ACCURACY_TABLE_H

#include "accuracy/lab.h"

enum { ACCURACY_TABLE_COLUMNS = 6, ACCURACY_NUM_COLUMNS = 2 * ACCURACY_TABLE_COLUMNS };

/* A column of the paper's: what its samples are drawn from, and its figures. */
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
