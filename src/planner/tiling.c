/* Choosing tile sizes; the arithmetic is in the header. */
#include "planner/tiling.h"

#include <math.h>
#include <string.h>

#include "core/error.h"

#define SUM_BYTES 4
#define DEFAULT_KV_BLOCK 512
#define MAX_KV_BLOCK 1024
#define MIN_KV_BUFFERS 3 /* one is read, one is full, one is being filled */
#define LONG_PARTS 2     /* a stripe is half of the depth, if that can be */
#define NOMINAL_CLOCK 3e9

/* --- machines -------------------------------------------------------------------------------------- */

fv_tiling_machine fv_tiling_ascend910(void)
{
    return (fv_tiling_machine){
        .name = "Ascend 910, a die",
        .num_cores = 24,
        .peak = 707e12 / 48, /* of two dies */
        .memory_bandwidth = 1.6e12,
        .element_bytes = 2,
        .grain = {16, 16, 16},
        .a_bytes = 64 << 10,
        .b_bytes = 64 << 10,
        .c_bytes = 128 << 10,
        .level_bytes = {512 << 10, 0, 0},
    };
}

static fv_tiling_machine with_caches(fv_tiling_machine machine, const fv_cpu_caches *caches, int32_t num_cores)
{
    machine.num_cores = num_cores;
    machine.memory_bandwidth = num_cores * 10e9; /* fewer cores than channels; what a core alone can draw */
    machine.level_bandwidth[2] = 30e9;
    machine.level_bytes[0] = caches->l1_bytes;
    machine.level_bytes[1] = caches->l2_bytes;
    machine.level_bytes[2] = caches->l3_bytes / caches->l3_cpus;
    return machine;
}

fv_tiling_machine fv_tiling_amx(const fv_cpu_caches *caches, int32_t num_cores)
{
    const fv_tiling_machine machine = {
        .name = "CPU core, amx, bf16",
        .peak = 2.2e12, /* measured on Emerald Rapids, as are the next: a tile takes 8 and 23 cycles */
        .level_bandwidth = {128 * NOMINAL_CLOCK, 44 * NOMINAL_CLOCK},
        .unpack_bandwidth = 10 * NOMINAL_CLOCK, /* V only: 107 cycles for a tile */
        .element_bytes = 2,
        .grain = {16, 16, 32},
        .num_registers = 8,
        .min_sums = 4,
        .max_loads = 1, /* a load takes half as long as a multiplication */
    };
    return with_caches(machine, caches, num_cores);
}

fv_tiling_machine fv_tiling_cpu(fv_isa isa, const fv_cpu_caches *caches, int32_t num_cores)
{
    static const struct {
        const char *name;
        int32_t lanes, num_registers;
    } vectors[] = {
        {"CPU core, portable, fp32", 4, 16}, {"CPU core, avx2, fp32", 8, 16}, {"CPU core, avx512, fp32", 16, 32}};
    const int32_t lanes = vectors[isa].lanes;
    const fv_tiling_machine machine = {
        .name = vectors[isa].name,
        .peak = 2.0 * 2 * lanes * NOMINAL_CLOCK,                                  /* two multiply-adds a cycle */
        .level_bandwidth = {2.0 * 4 * lanes * NOMINAL_CLOCK, 20 * NOMINAL_CLOCK}, /* two loads; of L2's 32 or 64 */
        .unpack_bandwidth = 2 * NOMINAL_CLOCK, /* the transposition of K stores its numbers one by one */
        .element_bytes = 4,
        .grain = {1, lanes, 1},
        .num_registers = vectors[isa].num_registers,
        .min_sums = 10, /* five cycles, two a cycle */
        .max_loads = 0.67,
    };
    return with_caches(machine, caches, num_cores);
}

/* --- what fits ------------------------------------------------------------------------------------- */

static int32_t has_buffers(const fv_tiling_machine *machine) { return machine->num_registers == 0; }

/* What of a cache is planned with. */
static int64_t usable(int64_t bytes) { return bytes / 4 * 3; }

static int32_t ceil_div(int32_t a, int32_t b) { return (int32_t)fv_ceil_div(a, b); }

/* m x n sums fit level 0 beside inputs of the least depth. Registers: a row of B and one of A. */
static int32_t base_fits(const fv_tiling_machine *machine, int32_t m, int32_t n)
{
    const int32_t tiles_m = m / machine->grain.m, tiles_n = n / machine->grain.n;
    if (!has_buffers(machine)) return tiles_m * tiles_n + tiles_n + 1 <= machine->num_registers;
    const int64_t least = 2 * (int64_t)machine->grain.k * machine->element_bytes;
    return 2 * (int64_t)m * n * SUM_BYTES <= machine->c_bytes && m * least <= machine->a_bytes &&
           n * least <= machine->b_bytes;
}

/* Registers: the sums hide the latency of a multiplication, and the multiplications the loads. */
static int32_t keeps_busy(const fv_tiling_machine *machine, const fv_tile *base)
{
    if (has_buffers(machine)) return 1;
    const int32_t tiles_m = base->m / machine->grain.m, tiles_n = base->n / machine->grain.n;
    const int32_t products = tiles_m * tiles_n;
    return products >= machine->min_sums && tiles_m + tiles_n <= machine->max_loads * products;
}

static int32_t depth_fits(const fv_tiling_machine *machine, const fv_product_tiling *product)
{
    if (!has_buffers(machine)) return 1; /* one step of depth at a time */
    const int64_t depth_bytes = 2 * (int64_t)product->base.k * machine->element_bytes;
    return product->base.m * depth_bytes <= machine->a_bytes && product->base.n * depth_bytes <= machine->b_bytes;
}

static int64_t stripe_bytes(const fv_tiling_machine *machine, const fv_product_tiling *product)
{
    return (int64_t)fv_max_i32(product->base.m, product->base.n) * product->stripe * machine->element_bytes;
}

/* Buffers that A, rows x depth, takes. */
static int32_t buffers_of(const fv_product_tiling *product, int32_t rows, int32_t depth)
{
    return ceil_div(rows, product->base.m) * ceil_div(depth, product->stripe);
}

static int32_t stripe_fits(const fv_tiling_machine *machine, const fv_product_tiling *product)
{
    const int64_t width = product->base.n + 2 * product->base.m;
    return width * product->stripe * machine->element_bytes <= usable(machine->level_bytes[0]);
}

/* Both forms of the KV block. */
static int64_t keys_bytes(const fv_tiling *tiling, const fv_tiling_machine *machine, const fv_tiling_problem *problem)
{
    return (int64_t)tiling->kv_block * (problem->qk_size + problem->v_size) * machine->element_bytes;
}

/* Q, O and S of a step. */
static int64_t rows_bytes(const fv_tiling *tiling, const fv_tiling_machine *machine, const fv_tiling_problem *problem)
{
    const int64_t sums = problem->v_size + tiling->kv_block;
    return tiling->rows * (problem->qk_size * (int64_t)machine->element_bytes + sums * SUM_BYTES);
}

const char *fv_tiling_why_not(const fv_tiling *tiling, const fv_tiling_machine *machine,
                              const fv_tiling_problem *problem)
{
    const fv_product_tiling *qk = &tiling->qk, *pv = &tiling->pv;
    if (!base_fits(machine, qk->base.m, qk->base.n) || !base_fits(machine, pv->base.m, pv->base.n)) {
        return "the base tile does not fit level 0";
    }
    if (!keeps_busy(machine, &qk->base) || !keeps_busy(machine, &pv->base)) {
        return "the base tile has too few sums to hide their latency, or too many loads";
    }
    if (!depth_fits(machine, qk) || !depth_fits(machine, pv)) return "the base tile is too deep for level 0";
    if (!has_buffers(machine)) {
        if (!stripe_fits(machine, qk) || !stripe_fits(machine, pv)) return "the stripes do not fit level 1";
        const int32_t keys_fit = keys_bytes(tiling, machine, problem) <= usable(machine->level_bytes[1]);
        return keys_fit ? NULL : "the keys do not fit level 2";
    }
    const int64_t buffer_bytes = fv_max_i64(stripe_bytes(machine, qk), stripe_bytes(machine, pv));
    const int32_t num_q_buffers = fv_max_i32(buffers_of(qk, tiling->rows, problem->qk_size),
                                             buffers_of(pv, tiling->rows, tiling->kv_block));
    if ((num_q_buffers + MIN_KV_BUFFERS) * buffer_bytes > machine->level_bytes[0])
        return "the buffers do not fit level 1";
    return NULL;
}

/* --- what it costs --------------------------------------------------------------------------------- */

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
    const int32_t keeps_a = a_stripe + 2 * b_stripe <= (double)usable(machine->level_bytes[0]);
    const double num_stripes = ceil_div((int32_t)depth, product->stripe);
    return depth * n * bytes + rows * depth * bytes * (keeps_a ? 1 : n / product->base.n) +
           rows * n * SUM_BYTES * (2 * num_stripes - starts_at_zero);
}

/* Level 2 (or what holds Q) to level 1. */
static double step_traffic(const fv_tiling *tiling, const fv_tiling_machine *machine, const fv_tiling_problem *problem)
{
    const double rows = tiling->rows, keys = tiling->kv_block, bytes = machine->element_bytes;
    const double qk = problem->qk_size, v = problem->v_size;
    if (has_buffers(machine)) { /* Q, P, K and V in once; S and O out once, whole depths being summed in level 0 */
        return (rows * qk + rows * keys + keys * qk + keys * v) * bytes + (rows * keys + rows * v) * SUM_BYTES;
    }
    return (double)keys_bytes(tiling, machine, problem) + stripe_traffic(machine, &tiling->qk, rows, keys, qk, 1) +
           stripe_traffic(machine, &tiling->pv, rows, v, keys, 0);
}

/* With caches: Q, O (read and written) and S (written, read) where they do not stay in level 2. */
static double spilled_bytes(const fv_tiling *tiling, const fv_tiling_machine *machine, const fv_tiling_problem *problem)
{
    const int64_t held = rows_bytes(tiling, machine, problem) + keys_bytes(tiling, machine, problem);
    if (has_buffers(machine) || held <= usable(machine->level_bytes[1])) return 0;
    const double sums = problem->v_size + tiling->kv_block;
    return tiling->rows * ((double)problem->qk_size * machine->element_bytes + 2 * sums * SUM_BYTES);
}

/* The keys: from memory, but for those that an earlier step, of other rows, has left in level 3. */
static double key_time(const fv_tiling *tiling, const fv_tiling_machine *machine, const fv_tiling_problem *problem,
                       double bytes)
{
    const double context_bytes = (double)problem->context_len * problem->qk_size * problem->stored_bytes;
    const int32_t stays = problem->context_len > 0 && context_bytes <= (double)machine->level_bytes[2];
    const double from_memory = stays ? 1.0 / ceil_div(problem->rows, tiling->rows) : 1;
    return time_of(bytes * from_memory, machine->memory_bandwidth / machine->num_cores) +
           time_of(bytes * (1 - from_memory), machine->level_bandwidth[2]);
}

/* Operations with whole base tiles: those that hang over the edge are done too. */
static double padded_operations(const fv_product_tiling *product, double rows, int32_t n, int32_t depth)
{
    const double m = product->base.m, columns = ceil_div(n, product->base.n) * product->base.n;
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
        cost.unpack_time = (double)keys_bytes(tiling, machine, problem) / machine->unpack_bandwidth;
    }
    const double inner = fmax(cost.compute_time, cost.level_time[0]);
    cost.time = inner + cost.level_time[1] + cost.level_time[2] + cost.unpack_time;
    if (has_buffers(machine)) cost.time = fmax(inner, fmax(cost.level_time[1], cost.level_time[2]));
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

/* --- choosing -------------------------------------------------------------------------------------- */

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
    for (int32_t m = machine->grain.m; base_fits(machine, m, machine->grain.n); m += machine->grain.m) {
        for (int32_t n = machine->grain.n; base_fits(machine, m, n); n += machine->grain.n) {
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
        if (depth % parts == 0 && product.base.k % machine->grain.k == 0 && depth_fits(machine, &product)) {
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
            stripe_bytes(machine, &product) <= buffer_bytes) {
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
    tiling->buffer_bytes = stripe_bytes(machine, &tiling->qk);
    tiling->pv.stripe = longest_stripe(machine, tiling->pv, tiling->kv_block, tiling->buffer_bytes);
    if (fv_tiling_why_not(tiling, machine, problem)) return 0;
    tiling->num_q_buffers = fv_max_i32(buffers_of(&tiling->qk, tiling->rows, problem->qk_size),
                                       buffers_of(&tiling->pv, tiling->rows, tiling->kv_block));
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
    const int32_t m = tiling->qk.base.m, most = ceil_div(problem->rows, m) * m;
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

/* The fewest equal stripes of the depth that fit level 1. */
static int32_t fewest_stripes(const fv_tiling_machine *machine, fv_product_tiling product, int32_t depth)
{
    for (int32_t parts = 1; parts <= depth; parts++) {
        product.stripe = (int32_t)fv_round_up(ceil_div(depth, parts), machine->grain.k);
        if (stripe_fits(machine, &product)) return product.stripe;
    }
    return depth;
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
    const int32_t most = ceil_div(problem->rows, base.m) * base.m;
    const int32_t min_keys = problem->kv_block ? problem->kv_block : base.n;
    const int32_t max_keys = problem->kv_block ? problem->kv_block : MAX_KV_BLOCK;
    fv_tiling trial = {.qk = {.base = base}, .pv = {.base = base}};
    trial.qk.stripe = fewest_stripes(machine, trial.qk, problem->qk_size);
    for (trial.kv_block = min_keys; trial.kv_block <= max_keys; trial.kv_block += base.n) {
        trial.pv.stripe = fewest_stripes(machine, trial.pv, trial.kv_block);
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
    for (int32_t m = grain->m; base_fits(machine, m, grain->n); m += grain->m) {
        for (int32_t n = grain->n; base_fits(machine, m, n); n += grain->n) {
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
    const int32_t found = has_buffers(machine) ? choose_buffers(tiling, machine, problem)
                                               : choose_caches(tiling, machine, problem);
    tiling->min_rows = min_rows_of(machine, problem);
    if (found) return FV_OK;
    return fv_fail(FV_ERR_UNSUPPORTED,
                   "%s: no tiling of %d rows, sizes %d and %d fits its levels (1: %lld bytes, 2: %lld)", machine->name,
                   problem->rows, problem->qk_size, problem->v_size, (long long)machine->level_bytes[0],
                   (long long)machine->level_bytes[1]);
}

/* --- neighbours ------------------------------------------------------------------------------------ */

typedef struct walk {
    fv_tiling_neighbour *neighbours;
    int32_t num_neighbours;
    const fv_tiling *chosen;
    const fv_tiling_machine *machine;
    const fv_tiling_problem *problem;
    fv_tiling_measure measure;
    void *user;
} walk;

/* The time of a tiling over that of the chosen one, measured in turn; negative: it cannot be. */
static double measured_ratio(const walk *w, const fv_tiling *tiling)
{
    double chosen_time = INFINITY, time = INFINITY;
    for (int32_t round = 0; round < FV_TILING_ROUNDS; round++) {
        const double chosen = w->measure(w->user, w->chosen), other = w->measure(w->user, tiling);
        if (!(chosen > 0) || !(other > 0)) return -1;
        chosen_time = fmin(chosen_time, chosen);
        time = fmin(time, other);
    }
    return time / chosen_time;
}

static int32_t is_same(const fv_tiling *a, const fv_tiling *b)
{
    return a->rows == b->rows && a->kv_block == b->kv_block && memcmp(&a->qk, &b->qk, sizeof(a->qk)) == 0 &&
           memcmp(&a->pv, &b->pv, sizeof(a->pv)) == 0;
}

static void visit(walk *w, const char *what, const fv_tiling *tiling)
{
    const int32_t m = tiling->qk.base.m;
    if (w->num_neighbours == FV_TILING_MAX_NEIGHBOURS) return;
    if (tiling->rows < 1 || tiling->rows > ceil_div(w->problem->rows, m) * m || tiling->kv_block < 1) return;
    if (fv_tiling_why_not(tiling, w->machine, w->problem)) return;
    for (int32_t i = 0; i < w->num_neighbours; i++) {
        if (is_same(&w->neighbours[i].tiling, tiling)) return;
    }
    const fv_tiling_cost chosen = fv_tiling_price(w->chosen, w->machine, w->problem);
    const fv_tiling_cost other = fv_tiling_price(tiling, w->machine, w->problem);
    const double ratio = w->measure ? measured_ratio(w, tiling) : other.time_per_row_key / chosen.time_per_row_key;
    if (!(ratio > 0)) return;
    w->neighbours[w->num_neighbours++] = (fv_tiling_neighbour){what, *tiling, ratio,
                                                               other.bytes_per_row_key / chosen.bytes_per_row_key};
}

/* Another base tile of both products; a rows count that is a multiple of it. */
static void visit_base(walk *w, const char *what, int32_t m, int32_t n)
{
    const fv_tile *chosen = &w->chosen->qk.base;
    const fv_tile *grain = &w->machine->grain;
    if (m < grain->m || n < grain->n || (m == chosen->m && n == chosen->n)) return;
    fv_tiling tiling = *w->chosen;
    tiling.qk.base.m = tiling.pv.base.m = m;
    tiling.qk.base.n = tiling.pv.base.n = n;
    tiling.rows = has_buffers(w->machine) ? fv_max_i32(m, tiling.rows / m * m) : ceil_div(tiling.rows, m) * m;
    if (!has_buffers(w->machine)) {
        tiling.kv_block = w->problem->kv_block ? tiling.kv_block : fv_max_i32(n, tiling.kv_block / n * n);
        tiling.qk.stripe = fewest_stripes(w->machine, tiling.qk, w->problem->qk_size);
        tiling.pv.stripe = fewest_stripes(w->machine, tiling.pv, tiling.kv_block);
    }
    visit(w, what, &tiling);
}

/* The next tile of other rows (or columns) that the machine can make use of. With registers the other side is as
 * large as it then may be; buffers keep it. */
static void visit_next_base(walk *w, const char *what, int32_t row_step, int32_t column_step)
{
    const fv_tile *grain = &w->machine->grain;
    fv_tile tile = w->chosen->qk.base;
    do {
        tile.m += row_step;
        tile.n += column_step;
        if (tile.m <= 0 || tile.n <= 0) return;
        if (!has_buffers(w->machine)) {
            int32_t *other = row_step ? &tile.n : &tile.m;
            const int32_t step = row_step ? grain->n : grain->m;
            for (*other = step; base_fits(w->machine, tile.m, tile.n); *other += step) continue;
            *other -= step;
        }
    } while (tile.m > 0 && tile.n > 0 && base_fits(w->machine, tile.m, tile.n) && !keeps_busy(w->machine, &tile));
    visit_base(w, what, tile.m, tile.n);
}

static void visit_bases(walk *w)
{
    for (int32_t direction = -1; direction <= 1; direction += 2) {
        visit_next_base(w, "base rows", direction * w->machine->grain.m, 0);
        visit_next_base(w, "base columns", 0, direction * w->machine->grain.n);
    }
}

/* The depth in one part more or less. */
static int32_t next_part(int32_t part, int32_t depth, int32_t multiple, int32_t direction)
{
    for (int32_t parts = ceil_div(depth, part) + direction; parts >= 1 && parts <= depth; parts += direction) {
        if (depth % parts == 0 && depth / parts % multiple == 0) return depth / parts;
    }
    return 0;
}

static void visit_depths(walk *w)
{
    const int32_t grain = w->machine->grain.k;
    for (int32_t direction = -1; direction <= 1; direction += 2) {
        for (int32_t product = 0; product < 2; product++) {
            fv_tiling tiling = *w->chosen;
            fv_product_tiling *p = product ? &tiling.pv : &tiling.qk;
            const int32_t depth = product ? tiling.kv_block : w->problem->qk_size;
            const int32_t stripe = next_part(p->stripe, depth, has_buffers(w->machine) ? p->base.k : grain, direction);
            const int32_t base = has_buffers(w->machine) ? next_part(p->base.k, depth, grain, direction) : 0;
            if (stripe) {
                p->stripe = stripe;
                visit(w, product ? "stripe of P V" : "stripe of Q K^T", &tiling);
            }
            if (base) {
                tiling = *w->chosen;
                p->base.k = base;
                p->stripe = (int32_t)fv_round_up(p->stripe, base);
                visit(w, product ? "base depth of P V" : "base depth of Q K^T", &tiling);
            }
        }
    }
}

/* More keys with as many rows as then fit; a step of twice or half the rows. */
static void visit_steps(walk *w)
{
    const int32_t m = w->chosen->qk.base.m, n = w->chosen->qk.base.n, rows = w->chosen->rows;
    const int32_t other_rows[] = {rows - m, rows + m, rows / 2 / m * m, rows * 2};
    for (int32_t i = 0; i < FV_ARRAY_LEN(other_rows); i++) {
        fv_tiling tiling = *w->chosen;
        tiling.rows = other_rows[i];
        visit(w, "rows", &tiling);
    }
    if (w->problem->kv_block || has_buffers(w->machine)) return;
    const int32_t other_keys[] = {w->chosen->kv_block - n, w->chosen->kv_block + n, w->chosen->kv_block * 2};
    for (int32_t i = 0; i < FV_ARRAY_LEN(other_keys); i++) {
        fv_tiling tiling = *w->chosen;
        tiling.kv_block = other_keys[i];
        if (tiling.kv_block < n) continue;
        tiling.pv.stripe = fewest_stripes(w->machine, tiling.pv, tiling.kv_block);
        while (tiling.rows > m && fv_tiling_why_not(&tiling, w->machine, w->problem)) tiling.rows -= m;
        visit(w, "KV block", &tiling);
    }
}

int32_t fv_tiling_neighbours(fv_tiling_neighbour *neighbours, const fv_tiling *tiling, const fv_tiling_machine *machine,
                             const fv_tiling_problem *problem, fv_tiling_measure measure, void *user)
{
    walk w = {neighbours, 0, tiling, machine, problem, measure, user};
    visit_steps(&w);
    visit_bases(&w);
    visit_depths(&w);
    return w.num_neighbours;
}
