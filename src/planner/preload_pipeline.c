/* Planning the cycle.
 *
 * Matrix-bound (sum C >= sum V), indices cyclic: the matrix unit runs C_j, C_j+1, ..., C_j+n-1 back to back.
 * The vector unit starts with V_j+n-1, fed from the cycle before, then runs V_j, ..., V_j+n-2, which follow
 * their C in the same cycle. That fits if, when packed against the end of the cycle, no V begins before its
 * C has ended, for t = 0 .. n-2:
 *
 *   V_j+t + ... + V_j+n-2  <=  C_j+t+1 + ... + C_j+n-1
 *
 * With a_i = C_i+1 - V_i and m = j + n - 2 this says that every sum a_k + ... + a_m is at least 0: of the
 * partial sums P_k = a_1 + ... + a_k, none of the n - 1 before P_m exceeds it. The largest of a round has
 * that property, because P_n = sum C - sum V >= 0 and so the rounds before it are no higher.
 *
 * Vector-bound: read backwards in time, V_n -> C_n -> ... -> V_1 -> C_1 is the same problem with the roles of
 * the units exchanged. Its solution read backwards is ours. */
#include "fovea/preload_pipeline.h"

#include "core/error.h"

/* The problem as the unit with more work sees it: lead_i -> follow_i -> lead_i+1. */
typedef struct rotation {
    int32_t num_pairs;
    int32_t is_reversed; /* pair i here is pair n - 1 - i of the pipeline, and time runs backwards */
    int64_t lead[FV_PRELOAD_MAX_PAIRS], follow[FV_PRELOAD_MAX_PAIRS];
} rotation;

static fv_status check_times(const char *name, const int64_t *times, int32_t num_pairs)
{
    for (int32_t i = 0; i < num_pairs; i++) {
        if (times[i] >= 0 && times[i] <= FV_PRELOAD_MAX_TIME) continue;
        return fv_fail(FV_ERR_INVALID, "%s_%d takes %lld; accepted: 0 to %lld", name, i + 1, (long long)times[i],
                       (long long)FV_PRELOAD_MAX_TIME);
    }
    return FV_OK;
}

static int64_t sum_of(const int64_t *times, int32_t num_pairs)
{
    int64_t sum = 0;
    for (int32_t i = 0; i < num_pairs; i++) sum += times[i];
    return sum;
}

static rotation rotation_of(fv_preload_unit bound, const int64_t *matrix_times, const int64_t *vector_times,
                            int32_t num_pairs)
{
    rotation r = {.num_pairs = num_pairs, .is_reversed = bound == FV_UNIT_VECTOR};
    for (int32_t i = 0; i < num_pairs; i++) {
        r.lead[i] = r.is_reversed ? vector_times[num_pairs - 1 - i] : matrix_times[i];
        r.follow[i] = r.is_reversed ? matrix_times[num_pairs - 1 - i] : vector_times[i];
    }
    return r;
}

/* The pair that is fed from the cycle before, m + 1 above: of those possible the one which leaves the fewest
 * stages to run ahead, that is the earliest in a block's chain. */
static int32_t fed_pair_of(const rotation *r)
{
    const int32_t n = r->num_pairs;
    int64_t sums[FV_PRELOAD_MAX_PAIRS + 1] = {0}; /* P_0 .. P_n */
    for (int32_t k = 0; k < n; k++) sums[k + 1] = sums[k] + r->lead[(k + 1) % n] - r->follow[k];
    int32_t fed_pair = n;
    for (int32_t m = 1; m <= n; m++) {
        int32_t possible = 1;
        for (int32_t back = 1; back < n; back++) {
            const int64_t before = m >= back ? sums[m - back] : sums[m - back + n] - sums[n];
            if (before > sums[m]) possible = 0;
        }
        const int32_t pair = r->is_reversed ? n - 1 - m % n : m % n;
        if (possible && pair < fed_pair) fed_pair = pair;
    }
    return fed_pair;
}

/* The order of both units: forwards the leading unit ends with the fed pair and the other begins with it;
 * backwards the roles and the ends change places, which comes to the same. */
static void put_stages(fv_preload_pipeline *p)
{
    for (int32_t place = 0; place < p->num_pairs; place++) {
        const int32_t pair = (p->fed_pair + place) % p->num_pairs;
        const int32_t next = (pair + 1) % p->num_pairs;
        p->stages[FV_UNIT_MATRIX][place] = (fv_preload_stage){.unit = FV_UNIT_MATRIX, .pair = next};
        p->stages[FV_UNIT_VECTOR][place] = (fv_preload_stage){.unit = FV_UNIT_VECTOR, .pair = pair};
    }
}

static fv_preload_stage *stage_of(fv_preload_pipeline *p, fv_preload_unit unit, int32_t pair)
{
    for (int32_t place = 0; place < p->num_pairs; place++) {
        if (p->stages[unit][place].pair == pair) return &p->stages[unit][place];
    }
    return NULL;
}

/* How many blocks each stage is ahead of V_n: one more at every input that comes from the cycle before. */
static void count_ahead(fv_preload_pipeline *p)
{
    int32_t ahead = 0;
    for (int32_t pair = p->num_pairs - 1; pair >= 0; pair--) {
        fv_preload_stage *c = stage_of(p, FV_UNIT_MATRIX, pair), *v = stage_of(p, FV_UNIT_VECTOR, pair);
        v->ahead = ahead;
        v->in_chain = pair != p->fed_pair;
        if (!v->in_chain) ahead++;
        c->ahead = ahead++; /* its own input, V of the pair before, comes from the cycle before */
        p->num_preload_stages += c->ahead + v->ahead;
    }
}

/* Each stage as early as its unit and its input allow. The matrix unit waits for nothing inside a cycle. */
static void set_times(fv_preload_pipeline *p, const int64_t *matrix_times, const int64_t *vector_times)
{
    int64_t free = 0;
    for (int32_t place = 0; place < p->num_pairs; place++) {
        fv_preload_stage *c = &p->stages[FV_UNIT_MATRIX][place];
        c->start = free;
        c->end = free = free + matrix_times[c->pair];
    }
    free = 0;
    for (int32_t place = 0; place < p->num_pairs; place++) {
        fv_preload_stage *v = &p->stages[FV_UNIT_VECTOR][place];
        if (v->in_chain) free = fv_max_i64(free, stage_of(p, FV_UNIT_MATRIX, v->pair)->end);
        v->start = free;
        v->end = free = free + vector_times[v->pair];
    }
}

/* How late each may start, from the end of the cycle backwards. */
static void set_slack(fv_preload_pipeline *p)
{
    int64_t latest = p->cycle_time;
    for (int32_t place = p->num_pairs - 1; place >= 0; place--) {
        fv_preload_stage *v = &p->stages[FV_UNIT_VECTOR][place];
        latest -= v->end - v->start;
        v->slack = latest - v->start;
    }
    latest = p->cycle_time;
    for (int32_t place = p->num_pairs - 1; place >= 0; place--) {
        fv_preload_stage *c = &p->stages[FV_UNIT_MATRIX][place];
        const fv_preload_stage *v = stage_of(p, FV_UNIT_VECTOR, c->pair);
        if (v->in_chain) latest = fv_min_i64(latest, v->start + v->slack);
        latest -= c->end - c->start;
        c->slack = latest - c->start;
    }
}

fv_status fv_preload_pipeline_plan(fv_preload_pipeline *pipeline, const int64_t *matrix_times,
                                   const int64_t *vector_times, int32_t num_pairs)
{
    if (!pipeline || !matrix_times || !vector_times)
        return fv_fail(FV_ERR_INVALID, "pipeline, matrix_times or vector_times is NULL");
    if (pipeline->struct_size < sizeof(*pipeline)) {
        return fv_fail(FV_ERR_INVALID, "fv_preload_pipeline.struct_size is %u; accepted: %zu",
                       (unsigned)pipeline->struct_size, sizeof(*pipeline));
    }
    if (num_pairs < 1 || num_pairs > FV_PRELOAD_MAX_PAIRS) {
        return fv_fail(FV_ERR_INVALID, "%d pairs of stages; accepted: 1 to %d", num_pairs, FV_PRELOAD_MAX_PAIRS);
    }
    fv_status status = check_times("C", matrix_times, num_pairs);
    if (status == FV_OK) status = check_times("V", vector_times, num_pairs);
    if (status != FV_OK) return status;
    const int64_t matrix = sum_of(matrix_times, num_pairs), vector = sum_of(vector_times, num_pairs);
    if (matrix == 0 && vector == 0) {
        return fv_fail(FV_ERR_INVALID, "every stage takes 0; accepted: at least one that takes longer");
    }

    const uint32_t struct_size = pipeline->struct_size;
    *pipeline = (fv_preload_pipeline){.struct_size = struct_size,
                                      .num_pairs = num_pairs,
                                      .bound = matrix >= vector ? FV_UNIT_MATRIX : FV_UNIT_VECTOR,
                                      .num_chains = num_pairs - 1,
                                      .preload_count = num_pairs,
                                      .cycle_time = fv_max_i64(matrix, vector),
                                      .busy = {matrix, vector}};
    const rotation r = rotation_of(pipeline->bound, matrix_times, vector_times, num_pairs);
    pipeline->fed_pair = fed_pair_of(&r);
    put_stages(pipeline);
    count_ahead(pipeline);
    set_times(pipeline, matrix_times, vector_times);
    set_slack(pipeline);
    return FV_OK;
}

/* --- a run over some blocks ---------------------------------------------------------------------- */

typedef struct clock {
    const fv_preload_pipeline *pipeline;
    int32_t num_blocks;
    int64_t free[2];                          /* [unit]: end of its last stage */
    int64_t ends[2][2][FV_PRELOAD_MAX_PAIRS]; /* [odd cycle][unit][pair]: end of the stage in that cycle */
} clock;

/* The end of what the stage needs: in cycle `cycle` or the one before. */
static int64_t input_end(const clock *k, const fv_preload_stage *stage, int32_t cycle)
{
    if (stage->unit == FV_UNIT_VECTOR) return k->ends[(cycle - !stage->in_chain) & 1][FV_UNIT_MATRIX][stage->pair];
    return stage->pair ? k->ends[(cycle - 1) & 1][FV_UNIT_VECTOR][stage->pair - 1] : 0;
}

/* Runs a cycle, without the blocks that are not there. base >= 0: a cycle of the loop, which starts then;
 * else each stage starts as soon as it can. */
static fv_preload_op *run_cycle(clock *k, fv_preload_op *op, int32_t cycle, fv_preload_phase phase, int64_t base)
{
    for (int32_t unit = 0; unit < 2; unit++) {
        for (int32_t place = 0; place < k->pipeline->num_pairs; place++) {
            const fv_preload_stage *stage = &k->pipeline->stages[unit][place];
            const int32_t block = cycle + stage->ahead;
            if (block < 0 || block >= k->num_blocks) continue;
            const int64_t soonest = fv_max_i64(k->free[unit], input_end(k, stage, cycle));
            const int64_t start = base >= 0 ? base + stage->start : soonest;
            const int64_t end = start + stage->end - stage->start;
            *op++ = (fv_preload_op){stage->unit, stage->pair, block, cycle, phase, start, end};
            k->ends[cycle & 1][unit][stage->pair] = k->free[unit] = end;
        }
    }
    return op;
}

/* The soonest start of cycle 0 at which each of its stages finds its unit free and its input made. The cycles
 * after it depend on the cycle before them alone. */
static int64_t loop_start_of(const clock *k)
{
    int64_t start = 0;
    for (int32_t unit = 0; unit < 2; unit++) {
        for (int32_t place = 0; place < k->pipeline->num_pairs; place++) {
            const fv_preload_stage *stage = &k->pipeline->stages[unit][place];
            const int64_t input = stage->in_chain ? 0 : input_end(k, stage, 0);
            start = fv_max_i64(start, fv_max_i64(k->free[unit], input) - stage->start);
        }
    }
    return start;
}

fv_status fv_preload_pipeline_run(fv_preload_run *run, fv_preload_op *ops, int32_t max_ops,
                                  const fv_preload_pipeline *pipeline, int32_t num_blocks)
{
    if (!run || !ops || !pipeline) return fv_fail(FV_ERR_INVALID, "run, ops or pipeline is NULL");
    if (run->struct_size < sizeof(*run)) {
        return fv_fail(FV_ERR_INVALID, "fv_preload_run.struct_size is %u; accepted: %zu", (unsigned)run->struct_size,
                       sizeof(*run));
    }
    if (pipeline->num_pairs < 1 || pipeline->num_pairs > FV_PRELOAD_MAX_PAIRS) {
        return fv_fail(FV_ERR_INVALID,
                       "the pipeline has %d pairs of stages; accepted: one that fv_preload_pipeline_plan filled in",
                       pipeline->num_pairs);
    }
    if (num_blocks < 1 || num_blocks > FV_PRELOAD_MAX_BLOCKS) {
        return fv_fail(FV_ERR_INVALID, "%d blocks; accepted: 1 to %d", num_blocks, FV_PRELOAD_MAX_BLOCKS);
    }
    const int32_t num_ops = 2 * pipeline->num_pairs * num_blocks;
    if (max_ops < num_ops) {
        return fv_fail(FV_ERR_NO_SPACE, "room for %d operations; %d blocks need %d", max_ops, num_blocks, num_ops);
    }

    const int32_t first = -pipeline->preload_count;
    const int32_t num_cycles = fv_max_i32(0, num_blocks - pipeline->preload_count);
    clock k = {.pipeline = pipeline, .num_blocks = num_blocks};
    for (int32_t cycle = first; cycle < 0; cycle++) ops = run_cycle(&k, ops, cycle, FV_PHASE_PRELOAD, -1);
    const int64_t loop_start = num_cycles ? loop_start_of(&k) : fv_max_i64(k.free[0], k.free[1]);
    for (int32_t cycle = 0; cycle < num_cycles; cycle++) {
        ops = run_cycle(&k, ops, cycle, FV_PHASE_LOOP, loop_start + cycle * pipeline->cycle_time);
    }
    for (int32_t cycle = num_cycles; cycle < num_blocks; cycle++) {
        ops = run_cycle(&k, ops, cycle, FV_PHASE_TAIL, -1);
    }
    *run = (fv_preload_run){.struct_size = run->struct_size,
                            .num_ops = num_ops,
                            .num_cycles = num_cycles,
                            .loop_start = loop_start,
                            .loop_end = loop_start + num_cycles * pipeline->cycle_time,
                            .total_time = fv_max_i64(k.free[0], k.free[1])};
    return FV_OK;
}
