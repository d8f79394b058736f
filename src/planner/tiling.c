/* Choosing tile sizes; the arithmetic is in the header. */
#include "planner/tiling.h"

#include <math.h>

#include "core/error.h"
#include "planner/tiling_fit.h"

#define DEFAULT_KV_BLOCK 512
#define MAX_KV_BLOCK 1024
#define LONG_PARTS 2 /* a stripe is half of the depth, if that can be */

/* The least rows for which multiplying the KV block takes as long as reading it. */
static int32_t min_rows_of(const fv_tiling_machine *machine, const fv_tiling_problem *problem)
{
    const double reading = (double)problem->qk_size * problem->stored_bytes * machine->num_cores /
                           machine->memory_bandwidth;
    const double multiplying = 2.0 * (problem->qk_size + problem->v_size) / machine->peak;
    return (int32_t)(reading / multiplying) + 1;
}

/* The base tile that takes in the least for each multiplication; m = 0: none fits. */
static fv_tile least_traffic(const fv_tiling_machine *machine)
{
    fv_tile best = {0, 0, machine->grain.k};
    double least = INFINITY;
    for (int32_t m = machine->grain.m; fv_tiling_base_fits(machine, m, machine->grain.n); m += machine->grain.m) {
        for (int32_t n = machine->grain.n; fv_tiling_base_fits(machine, m, n); n += machine->grain.n) {
            const double traffic = 1.0 / m + 1.0 / n;
            if (traffic >= least) continue;
            least = traffic;
            best = (fv_tile){m, n, machine->grain.k};
        }
    }
    return best;
}

/* The deepest tile that divides `depth`. */
static int32_t best_depth(const fv_tiling_machine *machine, fv_product_tiling product, int32_t depth)
{
    for (int32_t parts = 1; parts <= depth; parts++) {
        product.base.k = depth / parts;
        if (depth % parts == 0 && product.base.k % machine->grain.k == 0 && fv_tiling_depth_fits(machine, &product)) {
            return product.base.k;
        }
    }
    return machine->grain.k;
}

/* The longest stripe of P and V that a buffer holds: whole base tiles, a part of the depth without rest. */
static int32_t longest_stripe(const fv_tiling_machine *machine, fv_product_tiling product, int32_t depth,
                              int64_t buffer_bytes)
{
    for (int32_t parts = 1; parts <= depth; parts++) {
        product.stripe = depth / parts;
        if (depth % parts == 0 && product.stripe % product.base.k == 0 &&
            fv_tiling_stripe_bytes(machine, &product) <= buffer_bytes) {
            return product.stripe;
        }
    }
    return product.base.k;
}

/* Buffers for `parts` stripes of the depth of Q and K. */
static int32_t try_buffers(fv_tiling *tiling, const fv_tiling_machine *machine, const fv_tiling_problem *problem,
                           int32_t parts)
{
    if (problem->qk_size % (parts * tiling->qk.base.k) != 0) return 0;
    tiling->qk.stripe = problem->qk_size / parts;
    tiling->buffer_bytes = fv_tiling_stripe_bytes(machine, &tiling->qk);
    tiling->pv.stripe = longest_stripe(machine, tiling->pv, tiling->kv_block, tiling->buffer_bytes);
    if (fv_tiling_why_not(tiling, machine, problem)) return 0;
    tiling->num_q_buffers = fv_max_i32(fv_tiling_num_buffers(&tiling->qk, tiling->rows, problem->qk_size),
                                       fv_tiling_num_buffers(&tiling->pv, tiling->rows, tiling->kv_block));
    tiling->num_kv_buffers = (int32_t)(machine->level_bytes[0] / tiling->buffer_bytes) - tiling->num_q_buffers;
    return 1;
}

/* Most rows first, with long stripes; short ones only where there is no other way. */
static int32_t choose_buffers(fv_tiling *tiling, const fv_tiling_machine *machine, const fv_tiling_problem *problem)
{
    tiling->qk.base = tiling->pv.base = least_traffic(machine);
    if (tiling->qk.base.m == 0) return 0;
    tiling->kv_block = problem->kv_block ? problem->kv_block : DEFAULT_KV_BLOCK;
    tiling->qk.base.k = best_depth(machine, tiling->qk, problem->qk_size);
    tiling->pv.base.k = best_depth(machine, tiling->pv, tiling->kv_block);
    const int32_t m = tiling->qk.base.m, most = fv_ceil_div_i32(problem->rows, m) * m;
    const int32_t max_parts[] = {LONG_PARTS, problem->qk_size / tiling->qk.base.k};
    for (int32_t i = 0; i < FV_ARRAY_LEN(max_parts); i++) {
        for (tiling->rows = most; tiling->rows > 0; tiling->rows -= m) {
            for (int32_t parts = 1; parts <= max_parts[i]; parts++) {
                if (try_buffers(tiling, machine, problem, parts)) return 1;
            }
        }
    }
    return 0;
}

static int32_t is_cheaper(const fv_tiling_cost *a, const fv_tiling_cost *b)
{
    if (a->time_per_row_key < b->time_per_row_key * (1 - 1e-9)) return 1;
    return a->time_per_row_key <= b->time_per_row_key * (1 + 1e-9) && a->bytes_per_row_key < b->bytes_per_row_key;
}

/* The cheapest so far. */
typedef struct cheapest {
    fv_tiling tiling;
    fv_tiling_cost cost;
    int32_t found;
} cheapest;

/* All rows and key counts that fit, with one base tile. */
static void try_base(cheapest *best, fv_tile base, const fv_tiling_machine *machine, const fv_tiling_problem *problem)
{
    const int32_t most = fv_ceil_div_i32(problem->rows, base.m) * base.m;
    const int32_t min_keys = problem->kv_block ? problem->kv_block : base.n;
    const int32_t max_keys = problem->kv_block ? problem->kv_block : MAX_KV_BLOCK;
    fv_tiling trial = {.qk = {.base = base}, .pv = {.base = base}};
    trial.qk.stripe = fv_tiling_longest_stripe(machine, trial.qk, problem->qk_size);
    for (trial.kv_block = min_keys; trial.kv_block <= max_keys; trial.kv_block += base.n) {
        trial.pv.stripe = fv_tiling_longest_stripe(machine, trial.pv, trial.kv_block);
        for (trial.rows = base.m; trial.rows <= most; trial.rows += base.m) {
            if (fv_tiling_why_not(&trial, machine, problem)) return; /* nor do more rows or keys */
            const fv_tiling_cost cost = fv_tiling_price(&trial, machine, problem);
            if (best->found && !is_cheaper(&cost, &best->cost)) continue;
            *best = (cheapest){trial, cost, 1};
        }
    }
}

static int32_t choose_caches(fv_tiling *tiling, const fv_tiling_machine *machine, const fv_tiling_problem *problem)
{
    const fv_tile *grain = &machine->grain;
    cheapest best = {.found = 0};
    for (int32_t m = grain->m; fv_tiling_base_fits(machine, m, grain->n); m += grain->m) {
        for (int32_t n = grain->n; fv_tiling_base_fits(machine, m, n); n += grain->n) {
            try_base(&best, (fv_tile){m, n, grain->k}, machine, problem);
        }
    }
    *tiling = best.tiling;
    return best.found;
}

static fv_status check_problem(const fv_tiling_problem *problem)
{
    if (problem->rows < 1 || problem->qk_size < 1 || problem->v_size < 1 || problem->stored_bytes < 1) {
        return fv_fail(FV_ERR_INVALID, "%d rows, sizes %d and %d, %d bytes stored; accepted: 1 or more of each",
                       problem->rows, problem->qk_size, problem->v_size, problem->stored_bytes);
    }
    if (problem->rows > 1 << 16 || problem->qk_size > 1 << 16 || problem->v_size > 1 << 16) {
        return fv_fail(FV_ERR_INVALID, "%d rows, sizes %d and %d; accepted: up to 65536", problem->rows,
                       problem->qk_size, problem->v_size);
    }
    if (problem->kv_block >= 0 && problem->kv_block <= 1 << 16 && problem->context_len >= 0) return FV_OK;
    return fv_fail(FV_ERR_INVALID, "KV block %d, context length %d; accepted: 0 to 65536, 0 or more", problem->kv_block,
                   problem->context_len);
}

fv_status fv_tiling_choose(fv_tiling *tiling, const fv_tiling_machine *machine, const fv_tiling_problem *problem)
{
    const fv_status status = check_problem(problem);
    if (status != FV_OK) return status;
    *tiling = (fv_tiling){0};
    const int32_t found = fv_tiling_has_buffers(machine) ? choose_buffers(tiling, machine, problem)
                                                         : choose_caches(tiling, machine, problem);
    tiling->min_rows = min_rows_of(machine, problem);
    if (found) return FV_OK;
    return fv_fail(FV_ERR_UNSUPPORTED,
                   "%s: no tiling of %d rows, sizes %d and %d fits its levels (1: %lld bytes, 2: %lld)", machine->name,
                   problem->rows, problem->qk_size, problem->v_size, (long long)machine->level_bytes[0],
                   (long long)machine->level_bytes[1]);
}
