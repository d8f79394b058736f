/* The preload pipeline of AMLA (arXiv 2509.25224, section 4.1 and appendix B): a schedule for two units, a
 * matrix unit and a vector unit, that work on the blocks of a loop in turn.
 *
 *   one block           C_1 -> V_1 -> C_2 -> V_2 -> ... -> C_n -> V_n      C on the matrix unit, V on the vector unit
 *
 *            | preload          | cycle 0         | cycle 1         |  ...
 *   matrix   |C_1 1 |C_1 2      |C_2 1   |C_1 3   |C_2 2   |C_1 4   |
 *   vector   |      |V_1 1      |V_1 2            |V_1 3            |       block numbers behind the stages
 *
 * Each cycle of the steady loop holds every stage once, but of different blocks, so that few stages wait for
 * one of the same cycle: the unit with more work never idles, whatever the durations. A stage that takes its
 * input from the cycle before needs that input made ahead of the loop once. These are the preload count,
 * which is n for every set of durations. For kernel authors: give measured durations, and let the loop issue
 * the stages in the order of `stages`. Host arithmetic only, exact; allocates nothing. */
#ifndef FOVEA_PRELOAD_PIPELINE_H
#define FOVEA_PRELOAD_PIPELINE_H

#include "fovea/status.h"

#ifdef __cplusplus
extern "C" {
#endif

#define FV_PRELOAD_MAX_PAIRS 16
#define FV_PRELOAD_MAX_TIME (INT64_C(1) << 40) /* of a stage */
#define FV_PRELOAD_MAX_BLOCKS (1 << 16)

typedef enum fv_preload_unit { FV_UNIT_MATRIX = 0, FV_UNIT_VECTOR = 1 } fv_preload_unit;

/* A stage in the cycle. */
typedef struct fv_preload_stage {
    fv_preload_unit unit;
    int32_t pair;     /* C_i and V_i have i - 1 */
    int32_t ahead;    /* in cycle c it works on block c + ahead; 0 for V_n */
    int32_t in_chain; /* 1: its input is made in the same cycle; V stages only. 0: in the cycle before; C_1 has none */
    int64_t start;    /* since the start of the cycle, as early as the order allows */
    int64_t end;
    int64_t slack; /* it may start this much later before the other unit has to wait */
} fv_preload_stage;

typedef struct fv_preload_pipeline {
    uint32_t struct_size;       /* sizeof(fv_preload_pipeline), set by the caller; all else is filled in */
    int32_t num_pairs;          /* n */
    fv_preload_unit bound;      /* the unit that never waits; the matrix unit where both have the same work */
    int32_t fed_pair;           /* the pair whose V takes its C from the cycle before; the n - 1 others are chains */
    int32_t num_chains;         /* inside a cycle: n - 1, all C_i -> V_i */
    int32_t preload_count;      /* 2n - 1 - num_chains = n; also cycles from a block's first stage to its last */
    int32_t num_preload_stages; /* stages run ahead of the loop: each stage, once for each block it is ahead */
    int64_t cycle_time;         /* the larger sum */
    int64_t busy[2];            /* [unit], of a cycle; the unit idles for the rest */
    fv_preload_stage stages[2][FV_PRELOAD_MAX_PAIRS]; /* [unit][num_pairs], in the order of execution */
} fv_preload_pipeline;

/* Finds the cycle for the durations matrix_times [num_pairs] of C_1 to C_n and vector_times [num_pairs] of
 * V_1 to V_n, in any unit of time. They are integers, because the theorem is about exact comparisons: nearly
 * equal sums must not decide by rounding. Each from 0 to FV_PRELOAD_MAX_TIME, not all 0. Of the orders that
 * the theorem's partial sums allow (there is always one) it takes the one with the fewest stages to run ahead. */
FV_API fv_status fv_preload_pipeline_plan(fv_preload_pipeline *pipeline, const int64_t *matrix_times,
                                          const int64_t *vector_times, int32_t num_pairs);

typedef enum fv_preload_phase { FV_PHASE_PRELOAD = 0, FV_PHASE_LOOP = 1, FV_PHASE_TAIL = 2 } fv_preload_phase;

/* A stage of one block in a run. */
typedef struct fv_preload_op {
    fv_preload_unit unit;
    int32_t pair;
    int32_t block; /* 0 .. num_blocks - 1 */
    int32_t cycle; /* negative in the preload */
    fv_preload_phase phase;
    int64_t start, end; /* since the start of the run */
} fv_preload_op;

/* A run over some blocks: preload and tail packed as tightly as their dependencies allow, the loop's cycles
 * back to back. */
typedef struct fv_preload_run {
    uint32_t struct_size; /* sizeof(fv_preload_run), set by the caller */
    int32_t num_ops;      /* 2 n num_blocks */
    int32_t num_cycles;   /* full cycles of the loop; 0 where there are too few blocks to fill one */
    int64_t loop_start, loop_end;
    int64_t total_time;
} fv_preload_run;

/* Writes the stages of all blocks to ops [max_ops]: cycle by cycle, in each the matrix stages first, those
 * of a unit in the order of execution. FV_ERR_NO_SPACE: max_ops is below 2 n num_blocks. */
FV_API fv_status fv_preload_pipeline_run(fv_preload_run *run, fv_preload_op *ops, int32_t max_ops,
                                         const fv_preload_pipeline *pipeline, int32_t num_blocks);

#ifdef __cplusplus
}
#endif
#endif
