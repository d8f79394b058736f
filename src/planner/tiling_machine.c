/* Machines, described. */
#include "planner/tiling.h"

#define NOMINAL_CLOCK 3e9

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
    if (isa > FV_ISA_AVX512) isa = FV_ISA_AVX512; /* the levels above have its vectors */
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
