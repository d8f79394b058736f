/* The report reads as the comment of planner/tiling.h, with the numbers of the machine asked for. */
#include "info/tiling.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/error.h"
#include "info/tile_measure.h"
#include "json.h"

#define KB(bytes) ((double)(bytes) / 1024)

const char *const fv_tiling_machines[FV_TILING_NUM_MACHINES] = {"cpu",    "portable", "avx2",
                                                                "avx512", "amx",      "ascend910"};

typedef struct report {
    fv_tiling_machine machine;
    fv_tiling_problem problem;
    fv_tiling tiling;
    fv_tiling_cost cost;
    fv_tiling_neighbour neighbours[FV_TILING_MAX_NEIGHBOURS];
    int32_t num_neighbours;
    int32_t is_measured;
    double measured; /* seconds for each row and key of the chosen tiling */
} report;

static fv_tiling_machine machine_of(const char *name)
{
    const fv_cpu_caches caches = fv_cpu_find_caches();
    fv_isa isa = fv_cpu_isa();
    if (strcmp(name, "ascend910") == 0) return fv_tiling_ascend910();
    if (strcmp(name, "amx") == 0) return fv_tiling_amx(&caches, fv_cpu_count());
    if (strcmp(name, "cpu") != 0) fv_isa_parse(&isa, name);
    return fv_tiling_cpu(isa, &caches, fv_cpu_count());
}

/* The machine whose vectors this CPU has. */
static const char *own_machine(void)
{
    return fv_cpu_isa() >= FV_ISA_AVX512 ? fv_isa_name(FV_ISA_AVX512) : fv_isa_name(fv_cpu_isa());
}

static fv_status run_measures(report *r, fv_tile_measure *tile_measure)
{
    const fv_status status = fv_tile_measure_check(tile_measure, &r->tiling);
    if (status != FV_OK) return status;
    r->is_measured = 1;
    r->num_neighbours = fv_tiling_neighbours(r->neighbours, &r->tiling, &r->machine, &r->problem, fv_tile_measure_run,
                                             tile_measure);
    r->measured = fv_tile_measure_run(tile_measure, &r->tiling);
    return r->measured > 0 ? FV_OK : fv_fail(FV_ERR_NO_MEMORY, "no memory to measure %d rows", r->problem.rows);
}

static fv_status measure(report *r, const fv_tiling_options *options)
{
    if (strcmp(options->machine, "cpu") != 0 && strcmp(options->machine, own_machine()) != 0) {
        return fv_fail(FV_ERR_UNSUPPORTED, "--measure with --machine %s; accepted: cpu or %s, which this one is",
                       options->machine, own_machine());
    }
    fv_tile_measure *tile_measure = NULL;
    fv_status status = fv_tile_measure_create(&tile_measure, fv_cpu_isa(), &r->problem);
    if (status != FV_OK) return status;
    status = run_measures(r, tile_measure);
    fv_tile_measure_destroy(tile_measure);
    return status;
}

static fv_status make_report(report *r, const fv_tiling_options *options)
{
    *r = (report){.machine = machine_of(options->machine),
                  .problem = {.rows = options->rows, .qk_size = 576, .v_size = 512, .stored_bytes = 2}};
    fv_status status = fv_tiling_choose(&r->tiling, &r->machine, &r->problem);
    if (status != FV_OK) return status;
    r->cost = fv_tiling_price(&r->tiling, &r->machine, &r->problem);
    if (options->measure) return measure(r, options);
    r->num_neighbours = fv_tiling_neighbours(r->neighbours, &r->tiling, &r->machine, &r->problem, NULL, NULL);
    return FV_OK;
}

/* --- text ------------------------------------------------------------------------------------------ */

static void print_base(const char *name, const fv_product_tiling *product, int32_t depth)
{
    printf("  %-12s %d x %d x %d of depth %d", name, product->base.m, product->base.n, product->base.k, depth);
    if (depth % product->base.k == 0 && product->base.k > 1)
        printf(" = %d x %d", depth / product->base.k, product->base.k);
    printf("; stripes %d deep\n", product->stripe);
}

static void print_buffers(const report *r)
{
    const fv_tiling_machine *m = &r->machine;
    const fv_tiling *t = &r->tiling;
    const fv_tile *qk = &t->qk.base, *pv = &t->pv.base;
    const int32_t bytes = m->element_bytes;
    printf("machine       %s: %d cores of %.1f TFLOP/s, %.2f TB/s; level 1 %.0f KB, level 0 %.0f, %.0f and %.0f KB\n",
           m->name, m->num_cores, m->peak * 1e-12, m->memory_bandwidth * 1e-12, KB(m->level_bytes[0]), KB(m->a_bytes),
           KB(m->b_bytes), KB(m->c_bytes));
    printf("rows          %d with %d keys: reading them takes as long as multiplying from %d rows on\n", t->rows,
           t->kv_block, t->min_rows);
    printf("base tiles    %d x %d sums of 4 bytes, twice: %.0f of %.0f KB\n", qk->m, qk->n, KB(2 * 4 * qk->m * qk->n),
           KB(m->c_bytes));
    print_base("Q K^T", &t->qk, r->problem.qk_size);
    print_base("P V", &t->pv, t->kv_block);
    printf("  inputs       %d x %d x %d bytes, twice: %.0f of %.0f KB; %d x %d x %d, twice: %.0f KB\n", qk->m, qk->k,
           bytes, KB(2 * qk->m * qk->k * bytes), KB(m->a_bytes), pv->m, pv->k, bytes, KB(2 * pv->m * pv->k * bytes));
    printf("buffers       %d x %d x %d bytes = %.0f KB; %d for Q and P, %d for K and V: %.0f of %.0f KB\n", qk->n,
           t->qk.stripe, bytes, KB(t->buffer_bytes), t->num_q_buffers, t->num_kv_buffers,
           KB((t->num_q_buffers + t->num_kv_buffers) * t->buffer_bytes), KB(m->level_bytes[0]));
}

static void print_caches(const report *r)
{
    const fv_tiling_machine *m = &r->machine;
    const fv_tiling *t = &r->tiling;
    const fv_tile *base = &t->qk.base;
    const int32_t tiles_m = base->m / m->grain.m, tiles_n = base->n / m->grain.n, bytes = m->element_bytes;
    printf("machine       %s: %d cores; L1 %.0f KB, L2 %.0f KB, of L3 %.0f KB each; %d registers of %d x %d sums\n",
           m->name, m->num_cores, KB(m->level_bytes[0]), KB(m->level_bytes[1]), KB(m->level_bytes[2]), m->num_registers,
           m->grain.m, m->grain.n);
    printf("rows          %d with %d keys: reading them takes as long as multiplying from %d rows on\n", t->rows,
           t->kv_block, t->min_rows);
    printf("base tile     %d x %d: %d registers of sums, %d of B, 1 of A: %d of %d; %d loads for %d multiply-adds\n",
           base->m, base->n, tiles_m * tiles_n, tiles_n, tiles_m * tiles_n + tiles_n + 1, m->num_registers,
           tiles_m + tiles_n, tiles_m * tiles_n);
    print_base("Q K^T", &t->qk, r->problem.qk_size);
    print_base("P V", &t->pv, t->kv_block);
    printf("L1            stripes (%d + 2 x %d) x %d x %d bytes: %.1f of %.0f KB\n", base->n, base->m, t->qk.stripe,
           bytes, KB((base->n + 2 * base->m) * t->qk.stripe * bytes), KB(m->level_bytes[0]));
    const int32_t width = r->problem.qk_size + r->problem.v_size;
    const double rows = (double)t->rows * (r->problem.qk_size * bytes + (r->problem.v_size + t->kv_block) * 4);
    printf("L2            keys in both forms %d x (%d + %d) x %d bytes: %.0f of %.0f KB; Q, O and S of the rows: %.0f "
           "KB\n",
           t->kv_block, r->problem.qk_size, r->problem.v_size, bytes, KB((double)t->kv_block * width * bytes),
           KB(m->level_bytes[1]), KB(rows));
}

static void print_cost(const report *r)
{
    const fv_tiling_cost *c = &r->cost;
    printf("a step        %.2f GFLOP in %.1f us: products %.1f us; moved to level 0 %.1f MB, to level 1 %.2f MB, to "
           "level 2 "
           "%.2f MB\n",
           c->operations * 1e-9, c->time * 1e6, c->compute_time * 1e6, c->level_bytes[0] / 1048576,
           c->level_bytes[1] / 1048576, c->level_bytes[2] / 1048576);
    if (!r->is_measured) return;
    printf("measured      %.1f GFLOP/s on one thread\n", 2e-9 * (r->problem.qk_size + r->problem.v_size) / r->measured);
}

/* At most 1; not a number: there are no neighbours. */
static double best_ratio(const report *r)
{
    double best = r->num_neighbours ? 1 : NAN;
    for (int32_t i = 0; i < r->num_neighbours; i++) {
        if (r->neighbours[i].time_ratio < best) best = r->neighbours[i].time_ratio;
    }
    return best;
}

static void print_neighbours(const report *r)
{
    if (r->num_neighbours == 0) {
        printf("\nno neighbours%s\n", r->is_measured ? " that can be measured" : "");
        return;
    }
    printf("\n%-24s %6s %6s %14s %14s %8s %8s\n", r->is_measured ? "neighbours, measured" : "neighbours, by the model",
           "rows", "keys", "base Q K^T", "stripes", "time", "bytes");
    for (int32_t i = 0; i < r->num_neighbours; i++) {
        const fv_tiling_neighbour *n = &r->neighbours[i];
        const fv_product_tiling *qk = &n->tiling.qk, *pv = &n->tiling.pv;
        char base[32], stripes[32];
        snprintf(base, sizeof(base), "%dx%dx%d/%d", qk->base.m, qk->base.n, qk->base.k, pv->base.k);
        snprintf(stripes, sizeof(stripes), "%d, %d", qk->stripe, pv->stripe);
        printf("%-24s %6d %6d %14s %14s %7.3fx %7.3fx\n", n->what, n->tiling.rows, n->tiling.kv_block, base, stripes,
               n->time_ratio, n->bytes_ratio);
    }
    printf("the chosen one is within %.1f%% of the best of them\n", 100 * (1 / best_ratio(r) - 1));
}

/* --- JSON ------------------------------------------------------------------------------------------ */

/* Four numbers of each product: rows, columns and depth of its base tile, depth of its stripes. */
static void put_tiling(fv_json *json, const fv_tiling *t)
{
    const fv_product_tiling *products[] = {&t->qk, &t->pv};
    static const char *const keys[2][4] = {{"qk_m", "qk_n", "qk_k", "qk_stripe"},
                                           {"pv_m", "pv_n", "pv_k", "pv_stripe"}};
    fv_json_int(json, "rows", t->rows);
    fv_json_int(json, "kv_block", t->kv_block);
    for (int32_t i = 0; i < 2; i++) {
        fv_json_int(json, keys[i][0], products[i]->base.m);
        fv_json_int(json, keys[i][1], products[i]->base.n);
        fv_json_int(json, keys[i][2], products[i]->base.k);
        fv_json_int(json, keys[i][3], products[i]->stripe);
    }
}

static void print_json(const report *r)
{
    fv_json json;
    fv_json_init(&json, stdout);
    fv_json_begin_object(&json, NULL);
    fv_json_string(&json, "machine", r->machine.name);
    put_tiling(&json, &r->tiling);
    fv_json_int(&json, "min_rows", r->tiling.min_rows);
    if (r->machine.num_registers == 0) {
        fv_json_int(&json, "buffer_bytes", r->tiling.buffer_bytes);
        fv_json_int(&json, "q_buffers", r->tiling.num_q_buffers);
        fv_json_int(&json, "kv_buffers", r->tiling.num_kv_buffers);
    }
    fv_json_double(&json, "step_us", r->cost.time * 1e6);
    fv_json_bool(&json, "measured", r->is_measured);
    if (r->is_measured) {
        fv_json_double(&json, "gflops", 2e-9 * (r->problem.qk_size + r->problem.v_size) / r->measured);
    }
    fv_json_double(&json, "best_neighbour_time_ratio", best_ratio(r));
    fv_json_begin_array(&json, "neighbours");
    for (int32_t i = 0; i < r->num_neighbours; i++) {
        fv_json_begin_row(&json);
        fv_json_string(&json, "differs_in", r->neighbours[i].what);
        put_tiling(&json, &r->neighbours[i].tiling);
        fv_json_double(&json, "time_ratio", r->neighbours[i].time_ratio);
        fv_json_double(&json, "bytes_ratio", r->neighbours[i].bytes_ratio);
        fv_json_end_object(&json);
    }
    fv_json_end_array(&json);
    fv_json_end_object(&json);
}

fv_status fv_tiling_report(const fv_tiling_options *options)
{
    report r;
    const fv_status status = make_report(&r, options);
    if (status != FV_OK) return status;
    if (options->json) {
        print_json(&r);
        return FV_OK;
    }
    (r.machine.num_registers ? print_caches : print_buffers)(&r);
    print_cost(&r);
    print_neighbours(&r);
    return FV_OK;
}
