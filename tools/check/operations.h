/* The operations that are checked on their own, without an attention problem around them. */
#ifndef FV_TOOLS_CHECK_OPERATIONS_H
#define FV_TOOLS_CHECK_OPERATIONS_H

#include "check/lane.h"
#include "check/report.h"

typedef struct check_operation {
    const char *name; /* also of its group of cases */
    int32_t (*is_in)(const fv_kernel_table *table);
    /* Random case `index` of `seed` through the kernel of `table`. */
    void (*run)(check_result *result, const check_lane *lane, const fv_kernel_table *table, uint64_t seed,
                int32_t index);
} check_operation;

#define CHECK_NUM_OPERATIONS 10

extern const check_operation check_operations[CHECK_NUM_OPERATIONS];

/* Reference kernels with one fault each: it must fail a random case that the reference passes. */
void check_operation_mutants(check_report *report, const check_lane *lane);

#endif
