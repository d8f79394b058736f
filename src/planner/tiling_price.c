/* What a step moves and how long it takes. */
#include <math.h>

#include "planner/tiling_fit.h"

static double time_of(double amount, double per_second) { return per_second > 0 ? amount / per_second : 0; }

/* Of a product rows x n x depth: what its base tiles take in. A broadcast fills a whole register. */
static double base_traffic(const fv_tiling_machine *machine, const fv_product_tiling *product, double products)
{
    const int32_t a_bytes = machine->grain.m == 1 ? machine->grain.n * machine->element_bytes : machine->element_bytes;
    return products * ((double)a_bytes / product->base.n + (double)machine->element_bytes / product->base.m);
}

/* With caches, in stripes of depth: B once; A for each tile of columns, if all of it and a stripe of B do not fit
 * level 1 together; the sums in and out with each stripe, but for the first coming in where they start at 0. */
static double stripe_traffic(const fv_tiling_machine *machine, const fv_product_tiling *product, double rows, double n,
                             double depth, int32_t starts_at_zero)
{
    const double bytes = machine->element_bytes;
    const double a_stripe = rows * product->stripe * bytes, b_stripe = product->base.n * product->stripe * bytes;
    const int32_t keeps_a = a_stripe + 2 * b_stripe <= (double)fv_tiling_usable(machine->level_bytes[0]);
    const double num_stripes = fv_ceil_div_i32((int32_t)depth, product->stripe);
    return depth * n * bytes + rows * depth * bytes * (keeps_a ? 1 : n / product->base.n) +
           rows * n * FV_TILING_SUM_BYTES * (2 * num_stripes - starts_at_zero);
}

/* Level 2 (or what holds Q) to level 1. */
static double step_traffic(const fv_tiling *tiling, const fv_tiling_machine *machine, const fv_tiling_problem *problem)
{
    const double rows = tiling->rows, keys = tiling->kv_block, bytes = machine->element_bytes;
    const double qk = problem->qk_size, v = problem->v_size;
    if (fv_tiling_has_buffers(
            machine)) { /* Q, P, K and V in once; S and O out once, whole depths being summed in level 0 */
        return (rows * qk + rows * keys + keys * qk + keys * v) * bytes +
               (rows * keys + rows * v) * FV_TILING_SUM_BYTES;
    }
    return (double)fv_tiling_keys_bytes(tiling, machine, problem) +
           stripe_traffic(machine, &tiling->qk, rows, keys, qk, 1) +
           stripe_traffic(machine, &tiling->pv, rows, v, keys, 0);
}

/* With caches: Q, O (read and written) and S (written, read) where they do not stay in level 2. */
static double spilled_bytes(const fv_tiling *tiling, const fv_tiling_machine *machine, const fv_tiling_problem *problem)
{
    const int64_t held = fv_tiling_rows_bytes(tiling, machine, problem) +
                         fv_tiling_keys_bytes(tiling, machine, problem);
    if (fv_tiling_has_buffers(machine) || held <= fv_tiling_usable(machine->level_bytes[1])) return 0;
    const double sums = problem->v_size + tiling->kv_block;
    return tiling->rows * ((double)problem->qk_size * machine->element_bytes + 2 * sums * FV_TILING_SUM_BYTES);
}

/* The keys: from memory, but for those that an earlier step, of other rows, has left in level 3. */
static double key_time(const fv_tiling *tiling, const fv_tiling_machine *machine, const fv_tiling_problem *problem,
                       double bytes)
{
    const double context_bytes = (double)problem->context_len * problem->qk_size * problem->stored_bytes;
    const int32_t stays = problem->context_len > 0 && context_bytes <= (double)machine->level_bytes[2];
    const double from_memory = stays ? 1.0 / fv_ceil_div_i32(problem->rows, tiling->rows) : 1;
    return time_of(bytes * from_memory, machine->memory_bandwidth / machine->num_cores) +
           time_of(bytes * (1 - from_memory), machine->level_bandwidth[2]);
}

/* Operations with whole base tiles: those that hang over the edge are done too. */
static double padded_operations(const fv_product_tiling *product, double rows, int32_t n, int32_t depth)
{
    const double m = product->base.m, columns = fv_ceil_div_i32(n, product->base.n) * product->base.n;
    return 2 * ceil(rows / m) * m * columns * depth;
}

/* One step of a core, with tiling->rows rows. */
static fv_tiling_cost price_step(const fv_tiling *tiling, const fv_tiling_machine *machine,
                                 const fv_tiling_problem *problem)
{
    const double rows = tiling->rows, keys = tiling->kv_block;
    fv_tiling_cost cost = {.operations = 2 * rows * keys * (problem->qk_size + problem->v_size)};
    const double padded = padded_operations(&tiling->qk, rows, tiling->kv_block, problem->qk_size) +
                          padded_operations(&tiling->pv, rows, problem->v_size, tiling->kv_block);
    cost.level_bytes[0] = base_traffic(machine, &tiling->qk, rows * keys * problem->qk_size) +
                          base_traffic(machine, &tiling->pv, rows * keys * problem->v_size);
    cost.level_bytes[1] = step_traffic(tiling, machine, problem);
    const double key_bytes = keys * problem->qk_size * problem->stored_bytes;
    const double spilled = spilled_bytes(tiling, machine, problem);
    cost.level_bytes[2] = key_bytes + spilled;
    cost.compute_time = padded / machine->peak;
    for (int32_t level = 0; level < 2; level++) {
        cost.level_time[level] = time_of(cost.level_bytes[level], machine->level_bandwidth[level]);
    }
    cost.level_time[2] = key_time(tiling, machine, problem, key_bytes) + time_of(spilled, machine->level_bandwidth[2]);
    if (machine->unpack_bandwidth > 0) {
        cost.unpack_time = (double)fv_tiling_keys_bytes(tiling, machine, problem) / machine->unpack_bandwidth;
    }
    const double inner = fmax(cost.compute_time, cost.level_time[0]);
    cost.time = inner + cost.level_time[1] + cost.level_time[2] + cost.unpack_time;
    if (fv_tiling_has_buffers(machine)) cost.time = fmax(inner, fmax(cost.level_time[1], cost.level_time[2]));
    return cost;
}

static double sum_of_bytes(const fv_tiling_cost *cost)
{
    return cost->level_bytes[0] + cost->level_bytes[1] + cost->level_bytes[2];
}

fv_tiling_cost fv_tiling_price(const fv_tiling *tiling, const fv_tiling_machine *machine,
                               const fv_tiling_problem *problem)
{
    fv_tiling_cost cost = price_step(tiling, machine, problem);
    /* All rows of the problem: full steps, and one with the rest. */
    const double full_steps = problem->rows / tiling->rows;
    double time = full_steps * cost.time, bytes = full_steps * sum_of_bytes(&cost);
    fv_tiling last = *tiling;
    last.rows = problem->rows % tiling->rows;
    if (last.rows) {
        const fv_tiling_cost rest = price_step(&last, machine, problem);
        time += rest.time;
        bytes += sum_of_bytes(&rest);
    }
    const double useful = (double)problem->rows * tiling->kv_block;
    cost.time_per_row_key = time / useful;
    cost.bytes_per_row_key = bytes / useful;
    return cost;
}
