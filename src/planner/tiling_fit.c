#include "planner/tiling_fit.h"

int32_t fv_tiling_base_fits(const fv_tiling_machine *machine, int32_t m, int32_t n)
{
    const int32_t tiles_m = m / machine->grain.m, tiles_n = n / machine->grain.n;
    if (!fv_tiling_has_buffers(machine)) return tiles_m * tiles_n + tiles_n + 1 <= machine->num_registers;
    const int64_t least = 2 * (int64_t)machine->grain.k * machine->element_bytes;
    return 2 * (int64_t)m * n * FV_TILING_SUM_BYTES <= machine->c_bytes && m * least <= machine->a_bytes &&
           n * least <= machine->b_bytes;
}

int32_t fv_tiling_keeps_busy(const fv_tiling_machine *machine, const fv_tile *base)
{
    if (fv_tiling_has_buffers(machine)) return 1;
    const int32_t tiles_m = base->m / machine->grain.m, tiles_n = base->n / machine->grain.n;
    const int32_t products = tiles_m * tiles_n;
    return products >= machine->min_sums && tiles_m + tiles_n <= machine->max_loads * products;
}

int32_t fv_tiling_depth_fits(const fv_tiling_machine *machine, const fv_product_tiling *product)
{
    if (!fv_tiling_has_buffers(machine)) return 1; /* one step of depth at a time */
    const int64_t depth_bytes = 2 * (int64_t)product->base.k * machine->element_bytes;
    return product->base.m * depth_bytes <= machine->a_bytes && product->base.n * depth_bytes <= machine->b_bytes;
}

int64_t fv_tiling_stripe_bytes(const fv_tiling_machine *machine, const fv_product_tiling *product)
{
    return (int64_t)fv_max_i32(product->base.m, product->base.n) * product->stripe * machine->element_bytes;
}

int32_t fv_tiling_num_buffers(const fv_product_tiling *product, int32_t rows, int32_t depth)
{
    return fv_ceil_div_i32(rows, product->base.m) * fv_ceil_div_i32(depth, product->stripe);
}

static int32_t stripe_fits(const fv_tiling_machine *machine, const fv_product_tiling *product)
{
    const int64_t width = product->base.n + 2 * product->base.m;
    return width * product->stripe * machine->element_bytes <= fv_tiling_usable(machine->level_bytes[0]);
}

int64_t fv_tiling_keys_bytes(const fv_tiling *tiling, const fv_tiling_machine *machine,
                             const fv_tiling_problem *problem)
{
    return (int64_t)tiling->kv_block * (problem->qk_size + problem->v_size) * machine->element_bytes;
}

int64_t fv_tiling_rows_bytes(const fv_tiling *tiling, const fv_tiling_machine *machine,
                             const fv_tiling_problem *problem)
{
    const int64_t sums = problem->v_size + tiling->kv_block;
    return tiling->rows * (problem->qk_size * (int64_t)machine->element_bytes + sums * FV_TILING_SUM_BYTES);
}

const char *fv_tiling_why_not(const fv_tiling *tiling, const fv_tiling_machine *machine,
                              const fv_tiling_problem *problem)
{
    const fv_product_tiling *qk = &tiling->qk, *pv = &tiling->pv;
    if (!fv_tiling_base_fits(machine, qk->base.m, qk->base.n) ||
        !fv_tiling_base_fits(machine, pv->base.m, pv->base.n)) {
        return "the base tile does not fit level 0";
    }
    if (!fv_tiling_keeps_busy(machine, &qk->base) || !fv_tiling_keeps_busy(machine, &pv->base)) {
        return "the base tile has too few sums to hide their latency, or too many loads";
    }
    if (!fv_tiling_depth_fits(machine, qk) || !fv_tiling_depth_fits(machine, pv))
        return "the base tile is too deep for level 0";
    if (!fv_tiling_has_buffers(machine)) {
        if (!stripe_fits(machine, qk) || !stripe_fits(machine, pv)) return "the stripes do not fit level 1";
        const int32_t keys_fit = fv_tiling_keys_bytes(tiling, machine, problem) <=
                                 fv_tiling_usable(machine->level_bytes[1]);
        return keys_fit ? NULL : "the keys do not fit level 2";
    }
    const int64_t buffer_bytes = fv_max_i64(fv_tiling_stripe_bytes(machine, qk), fv_tiling_stripe_bytes(machine, pv));
    const int32_t num_q_buffers = fv_max_i32(fv_tiling_num_buffers(qk, tiling->rows, problem->qk_size),
                                             fv_tiling_num_buffers(pv, tiling->rows, tiling->kv_block));
    if ((num_q_buffers + FV_TILING_MIN_KV_BUFFERS) * buffer_bytes > machine->level_bytes[0])
        return "the buffers do not fit level 1";
    return NULL;
}

int32_t fv_tiling_longest_stripe(const fv_tiling_machine *machine, fv_product_tiling product, int32_t depth)
{
    for (int32_t parts = 1; parts <= depth; parts++) {
        product.stripe = (int32_t)fv_round_up(fv_ceil_div_i32(depth, parts), machine->grain.k);
        if (stripe_fits(machine, &product)) return product.stripe;
    }
    return depth;
}
