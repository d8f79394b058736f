/* The order in which workers that take items one by one, the threads of a CPU, begin the queries of a step: those first
 * whose last items take longer, so that who ends early finds small ones to go on with (Graham's rule of the longest
 * processing time, SIAM J. Appl. Math. 17, 1969).
 *
 *   the batch's   |-- prefill --|- prefill -|---------- seq 1 ----------|
 *                 |-- prefill --|---------- seq 2 ----------|                waits
 *   this order    |---------- seq 1 ----------|- prefill -|- prefill -|
 *                 |---------- seq 2 ----------|- prefill -|-- prefill --|
 *
 * Which rows a result is of, and its bits, do not depend on it. */
#ifndef FV_PLANNER_WORKER_ORDER_H
#define FV_PLANNER_WORKER_ORDER_H

#include "planner/pass.h"

/* `runs`: the step's queries with all their keys, in the order of the batch. Where there are workers short and long ones are put
 * apart, in that order among themselves. */
void fv_worker_order(fv_query_run *runs, const fv_split_rule *rule, const fv_step *step);

#endif
