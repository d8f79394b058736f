/* What the oracle expects of a scene, and the comparison by the accuracy rule of docs/numerics.md. */
#ifndef FV_TOOLS_CHECK_EXPECTED_H
#define FV_TOOLS_CHECK_EXPECTED_H

#include "check/lane.h"
#include "check/scene.h"
#include "reference/oracle.h"

/* (row, key, element) steps that the oracle spends on one case at most: larger ones are sampled. */
#define CHECK_ORACLE_STEPS 2.5e7

typedef struct check_expected {
    fv_oracle_row *rows;
    int32_t num_rows;
    int32_t drifts; /* the device's sums may err to one side (docs/numerics.md) */
} check_expected;

/* Computes the rows from the scene's `cache` as it is now, in the scene's memory. Where there are too
 * many, a random sample, with the last token of each sequence in it. Queries of new_min_query_len tokens and
 * more see their own keys and values as given, shorter ones as the cache stores them; INT32_MAX: all do. */
void check_expected_init(check_expected *expected, check_scene *scene, const check_lane *lane,
                         int32_t new_min_query_len);

/* Compares the scene's out and lse: every expected row by the accuracy rule, all rows for being finite,
 * and what lies between and behind the rows for being untouched. Returns 1, and sets *worst to the
 * largest share of its tolerance that a row took; or 0 with the first finding in `text`. */
int32_t check_expected_compare(double *worst, char *text, size_t text_bytes, const check_expected *expected,
                               check_scene *scene);

#endif
