/* Hierarchical tiling of absorbed MLA decode, after AMLA (arXiv 2509.25224, section 4.2): from the sizes of a
 * machine's memories to the tile sizes of both products of a step,
 *
 *   S = Q K^T   [rows, kv_block] = [rows, qk_size] x [qk_size, kv_block]     qk_size 576, the latent and its rope part
 *   O += P V    [rows, v_size]   = [rows, kv_block] x [kv_block, v_size]     v_size 512, V is the front of K
 *
 * Two kinds of machine. *Buffers*: level 0 are buffers that the program fills (L0A, L0B, L0C of an Ascend core),
 * level 1 too. *Registers*: level 0 are vector or tile registers, the levels above are caches.
 *
 * The arithmetic, with the Ascend 910's numbers behind the bars (a die: 24 cores of 14.7 TFLOP/s, 1.6 TB/s; L1
 * 512 KB, L0A and L0B 64 KB, L0C 128 KB; KV blocks of 512 keys, bf16):
 *
 *   rows      reading the KV block must not take longer than multiplying it, all cores reading:
 *             kv_block qk_size 2 num_cores / bandwidth  <=  2 rows kv_block (qk_size + v_size) / peak
 *                                                                         | rows >= 117
 *             and as many as L1 can hold beside the stripes, for every row more saves reading    | 256
 *   base      m x n accumulators fill L0C, twice (one is written back while the other is used):
 *             m n 4 <= 128 KB / 2                                                          | m = n = 128
 *             the depth k divides the product's and fills L0A and L0B, twice:
 *             128 k 2 <= 64 KB / 2, k divides 576 or 512                        | k = 96 = 576/6; 128 = 512/4
 *   stripe    what L1 holds and takes in at a time, base.n wide and a half of the depth, so that transfers are
 *             long: 128 x 288 (72 KB) of Q and K, 128 x 256 (64 KB) of P and V
 *   buffers   L1 is cut into buffers of a stripe: 512 KB / 72 KB = 7. Q, and after it P, of 256 rows takes
 *             2 x 2 of them; the 3 left take K and V in turn: one is read, one is full, one is being filled
 *
 * With registers (AVX2: 16 of 8 floats, L1 32 KB, L2 512 KB; computing in fp32) the roles move outwards by one:
 *
 *   base      m x n/8 accumulators, n/8 registers of B and one of A: m n/8 + n/8 + 1 <= 16; 10 accumulators or more,
 *             so that no multiply-add waits for the one before; at most 2 loads for 3 of them: 4 x 24 or 6 x 16
 *   stripe    L1 holds a stripe of B (n wide) and two of A (m wide, one on its way):
 *             (24 + 2 4) k 4 <= 3/4 32 KB                                                    | k <= 192 = 576/3
 *   kv_block  L2 holds the KV block in the two forms that the products want, K in stripes of keys, V in stripes of
 *             columns: 4 kv_block (576 + 512) <= 3/4 512 KB                                         | kv_block <= 90
 *   rows      as many as are cheapest: a key is unpacked once for all rows of a step, but where Q, O and S do not
 *             fit L2 beside the keys they come from L3, once for each KV block
 *   Of all that fits the one with the least time by fv_tiling_price is taken.
 *
 * 3/4, because a cache keeps what it likes: block tables, stacks and the next keys take the rest. */
#ifndef FV_PLANNER_TILING_H
#define FV_PLANNER_TILING_H

#include "core/cpu.h"

typedef struct fv_tile {
    int32_t m, n, k; /* rows of A, columns of B, depth */
} fv_tile;

/* Bandwidths in bytes per second; 0: not known, taken as never the limit. */
typedef struct fv_tiling_machine {
    const char *name;
    int32_t num_cores;
    double peak;               /* of a core, floating-point operations per second */
    double memory_bandwidth;   /* of all cores together */
    double level_bandwidth[3]; /* of a core: level 1 to level 0, level 2 to 1, level 3 to 2 */
    double unpack_bandwidth;   /* of a core: bytes of keys written in the form that is multiplied; registers only */
    int32_t element_bytes;     /* of what is multiplied; sums are fp32 */
    fv_tile grain;             /* base tiles are multiples of it: 16 x 16 x 16; 1 x 8 x 1 with AVX2 */
    int32_t num_registers;     /* each holds grain.m x grain.n sums, or inputs as deep as grain.k; 0: buffers */
    int32_t min_sums;          /* registers of sums that hide the latency of a multiply-add */
    double max_loads;          /* registers taken in for each multiplication of two */
    int64_t a_bytes, b_bytes, c_bytes; /* level 0 of a machine with buffers */
    int64_t level_bytes[3];            /* level 1 and 2 of a core, level 3 its share; 0: there is none that matters */
} fv_tiling_machine;

typedef struct fv_tiling_problem {
    int32_t rows; /* query tokens x heads that see the same keys: 128, 256 with one token drafted */
    int32_t qk_size, v_size;
    int32_t stored_bytes; /* of a number in the KV cache */
    int32_t kv_block;     /* keys of a step; 0: to be chosen (machines with registers), 512 else */
    int32_t context_len;  /* keys in all, 0: many; a context that fits level 3 is read from memory once only */
} fv_tiling_problem;

typedef struct fv_product_tiling {
    fv_tile base;
    int32_t stripe; /* depth of what passes level 1 at a time */
} fv_product_tiling;

typedef struct fv_tiling {
    int32_t rows; /* of a step of a core */
    int32_t kv_block;
    fv_product_tiling qk, pv;
    int32_t min_rows; /* fewer, and reading the keys takes longer than multiplying them */
    /* Machines with buffers: */
    int64_t buffer_bytes;
    int32_t num_q_buffers, num_kv_buffers;
} fv_tiling;

/* What one step moves, for each core. */
typedef struct fv_tiling_cost {
    double operations;
    double level_bytes[3]; /* level 1 to 0, level 2 to 1, level 3 and memory to 2 */
    double compute_time, level_time[3], unpack_time;
    double time; /* buffers: the largest, transfers run beside the products; caches: see fv_tiling_price */
    double time_per_row_key, bytes_per_row_key; /* what tilings are compared by; time first */
} fv_tiling_cost;

/* Describes a die of the Ascend 910, as the paper does. */
fv_tiling_machine fv_tiling_ascend910(void);

/* Describes a core with AMX, computing in bf16. */
fv_tiling_machine fv_tiling_amx(const fv_cpu_caches *caches, int32_t num_cores);

/* Describes a core with vectors of `isa`, computing in fp32. Clock and bandwidths are those of a usual core, 3 GHz:
 * only their ratios matter. */
fv_tiling_machine fv_tiling_cpu(fv_isa isa, const fv_cpu_caches *caches, int32_t num_cores);

/* Chooses as written above. FV_ERR_UNSUPPORTED: no tiling fits the machine. */
fv_status fv_tiling_choose(fv_tiling *tiling, const fv_tiling_machine *machine, const fv_tiling_problem *problem);

/* NULL if the tiling fits the machine's memories, else which it does not. */
const char *fv_tiling_why_not(const fv_tiling *tiling, const fv_tiling_machine *machine,
                              const fv_tiling_problem *problem);

/* What a step costs by bytes and peak. With caches the products wait for the loads of level 1 where those take
 * longer, and for all of the levels above: nothing but the hardware's guesses fetches ahead. */
fv_tiling_cost fv_tiling_price(const fv_tiling *tiling, const fv_tiling_machine *machine,
                               const fv_tiling_problem *problem);

/* Time per row and key of a tiling, measured; negative: it cannot be. */
typedef double (*fv_tiling_measure)(void *user, const fv_tiling *tiling);

#define FV_TILING_MAX_NEIGHBOURS 24
#define FV_TILING_ROUNDS 9

typedef struct fv_tiling_neighbour {
    const char *what; /* the size that differs */
    fv_tiling tiling;
    double time_ratio; /* its time over that of the chosen one: below 1, it is better */
    double bytes_ratio;
} fv_tiling_neighbour;

/* The neighbours of a tiling: one size a step up or down, the others adapted only where it would not fit. Each is
 * priced, or, if measure is not NULL, timed in turn with the chosen one, FV_TILING_ROUNDS times: the median of
 * the ratios. Those that cannot be measured are left out.
 * Writes at most FV_TILING_MAX_NEIGHBOURS and returns how many. */
int32_t fv_tiling_neighbours(fv_tiling_neighbour *neighbours, const fv_tiling *tiling, const fv_tiling_machine *machine,
                             const fv_tiling_problem *problem, fv_tiling_measure measure, void *user);

#endif
