/* The search around a tiling: sizes a step up and down, priced or measured. */
#include <string.h>

#include "planner/tiling_fit.h"

typedef struct walk {
    fv_tiling_neighbour *neighbours;
    int32_t num_neighbours;
    const fv_tiling *chosen;
    const fv_tiling_machine *machine;
    const fv_tiling_problem *problem;
    fv_tiling_measure measure;
    void *user;
} walk;

/* The median of the ratios to the chosen one, measured in turn: the clock and the neighbours on a machine drift.
 * Negative: it cannot be. */
static double measured_ratio(const walk *w, const fv_tiling *tiling)
{
    double ratios[FV_TILING_ROUNDS]; /* in order */
    for (int32_t round = 0; round < FV_TILING_ROUNDS; round++) {
        const double chosen = w->measure(w->user, w->chosen), other = w->measure(w->user, tiling);
        if (!(chosen > 0) || !(other > 0)) return -1;
        int32_t place = round;
        for (; place > 0 && ratios[place - 1] > other / chosen; place--) ratios[place] = ratios[place - 1];
        ratios[place] = other / chosen;
    }
    return ratios[FV_TILING_ROUNDS / 2];
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
    if (tiling->rows < 1 || tiling->rows > fv_ceil_div_i32(w->problem->rows, m) * m || tiling->kv_block < 1) return;
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
    tiling.rows = fv_tiling_has_buffers(w->machine) ? fv_max_i32(m, tiling.rows / m * m)
                                                    : fv_ceil_div_i32(tiling.rows, m) * m;
    if (!fv_tiling_has_buffers(w->machine)) {
        tiling.kv_block = w->problem->kv_block ? tiling.kv_block : fv_max_i32(n, tiling.kv_block / n * n);
        tiling.qk.stripe = fv_tiling_longest_stripe(w->machine, tiling.qk, w->problem->qk_size);
        tiling.pv.stripe = fv_tiling_longest_stripe(w->machine, tiling.pv, tiling.kv_block);
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
        if (!fv_tiling_has_buffers(w->machine)) {
            int32_t *other = row_step ? &tile.n : &tile.m;
            const int32_t step = row_step ? grain->n : grain->m;
            for (*other = step; fv_tiling_base_fits(w->machine, tile.m, tile.n); *other += step) continue;
            *other -= step;
        }
    } while (tile.m > 0 && tile.n > 0 && fv_tiling_base_fits(w->machine, tile.m, tile.n) &&
             !fv_tiling_keeps_busy(w->machine, &tile));
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
    for (int32_t parts = fv_ceil_div_i32(depth, part) + direction; parts >= 1 && parts <= depth; parts += direction) {
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
            const int32_t stripe = next_part(p->stripe, depth, fv_tiling_has_buffers(w->machine) ? p->base.k : grain,
                                             direction);
            const int32_t base = fv_tiling_has_buffers(w->machine) ? next_part(p->base.k, depth, grain, direction) : 0;
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
    if (w->problem->kv_block || fv_tiling_has_buffers(w->machine)) return;
    const int32_t other_keys[] = {w->chosen->kv_block - n, w->chosen->kv_block + n, w->chosen->kv_block * 2};
    for (int32_t i = 0; i < FV_ARRAY_LEN(other_keys); i++) {
        fv_tiling tiling = *w->chosen;
        tiling.kv_block = other_keys[i];
        if (tiling.kv_block < n) continue;
        tiling.pv.stripe = fv_tiling_longest_stripe(w->machine, tiling.pv, tiling.kv_block);
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
