/* Eight heads at a time, one to a lane, so that scores need no horizontal sums. Keys pass in runs that are made
 * double once for both products:
 *
 *   scores [key][head]  = K [key][d]      times  Q^T [d][head]      4 keys x 8 heads in registers
 *   out    [head][col] += P^T [key][head] times  K [key][col]       4 heads x 8 columns in registers
 *
 * Compiled with -O3 and contraction of a * b + c in every build type (CMakeLists.txt). */
#include "accuracy/exact.h"

#include <math.h>
#include <string.h>

#include "core/compiler.h"
#include "core/cpu.h"
#include "core/float.h"

enum { RUN_KEYS = 32, LANES = 4, VECTORS = ACCURACY_GROUP / LANES, KEY_STEP = 4, HEAD_STEP = 4 };

typedef double f64x4 __attribute__((vector_size(32)));

typedef struct exact_scratch {
    double q[ACCURACY_HEAD_SIZE][ACCURACY_GROUP];
    double keys[RUN_KEYS][ACCURACY_HEAD_SIZE];
    double out[ACCURACY_GROUP][ACCURACY_LATENT];
    double scores[][ACCURACY_GROUP]; /* [context, and up to a whole run] */
} exact_scratch;

size_t accuracy_exact_scratch(int32_t context)
{
    return sizeof(exact_scratch) + (size_t)fv_round_up(context, RUN_KEYS) * ACCURACY_GROUP * sizeof(double);
}

FV_ALWAYS_INLINE f64x4 load(const double *from)
{
    f64x4 value;
    memcpy(&value, from, sizeof(value));
    return value;
}

FV_ALWAYS_INLINE void store(double *to, f64x4 value) { memcpy(to, &value, sizeof(value)); }

/* --- the products, for any target ------------------------------------------------------------------------ */

FV_ALWAYS_INLINE void score_run_as(exact_scratch *s, double scores[][ACCURACY_GROUP])
{
    for (int32_t key = 0; key < RUN_KEYS; key += KEY_STEP) {
        f64x4 acc[KEY_STEP][VECTORS] = {{{0}}};
        for (int32_t d = 0; d < ACCURACY_HEAD_SIZE; d++) {
            for (int32_t j = 0; j < KEY_STEP; j++)
                for (int32_t v = 0; v < VECTORS; v++) acc[j][v] += s->keys[key + j][d] * load(s->q[d] + v * LANES);
        }
        for (int32_t j = 0; j < KEY_STEP; j++)
            for (int32_t v = 0; v < VECTORS; v++) store(scores[key + j] + v * LANES, acc[j][v]);
    }
}

FV_ALWAYS_INLINE void add_run_as(exact_scratch *s, double weights[][ACCURACY_GROUP])
{
    for (int32_t d = 0; d < ACCURACY_LATENT; d += 2 * LANES) {
        for (int32_t head = 0; head < ACCURACY_GROUP; head += HEAD_STEP) {
            f64x4 acc[HEAD_STEP][2];
            for (int32_t j = 0; j < HEAD_STEP; j++)
                for (int32_t v = 0; v < 2; v++) acc[j][v] = load(s->out[head + j] + d + v * LANES);
            for (int32_t key = 0; key < RUN_KEYS; key++) {
                for (int32_t j = 0; j < HEAD_STEP; j++)
                    for (int32_t v = 0; v < 2; v++)
                        acc[j][v] += weights[key][head + j] * load(s->keys[key] + d + v * LANES);
            }
            for (int32_t j = 0; j < HEAD_STEP; j++)
                for (int32_t v = 0; v < 2; v++) store(s->out[head + j] + d + v * LANES, acc[j][v]);
        }
    }
}

typedef struct products {
    void (*score_run)(exact_scratch *s, double scores[][ACCURACY_GROUP]);
    void (*add_run)(exact_scratch *s, double weights[][ACCURACY_GROUP]);
} products;

static void score_run(exact_scratch *s, double scores[][ACCURACY_GROUP]) { score_run_as(s, scores); }
static void add_run(exact_scratch *s, double weights[][ACCURACY_GROUP]) { add_run_as(s, weights); }
static const products portable_products = {score_run, add_run};

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) static void score_run_avx2(exact_scratch *s, double scores[][ACCURACY_GROUP])
{
    score_run_as(s, scores);
}

__attribute__((target("avx2,fma"))) static void add_run_avx2(exact_scratch *s, double weights[][ACCURACY_GROUP])
{
    add_run_as(s, weights);
}

static const products avx2_products = {score_run_avx2, add_run_avx2};
#endif

static const products *best_products(void)
{
#if defined(__x86_64__)
    if (fv_cpu_isa() >= FV_ISA_AVX2) return &avx2_products;
#endif
    return &portable_products;
}

/* --- eight heads ------------------------------------------------------------------------------------------- */

static void load_queries(exact_scratch *s, const accuracy_samples *samples, int32_t sample, int32_t first_head)
{
    for (int32_t lane = 0; lane < ACCURACY_GROUP; lane++) {
        const int64_t head = fv_min_i32(first_head + lane, samples->num_heads - 1);
        const uint16_t *row = samples->q + (sample * (int64_t)samples->num_heads + head) * ACCURACY_HEAD_SIZE;
        for (int32_t d = 0; d < ACCURACY_HEAD_SIZE; d++) s->q[d][lane] = fv_f32_of_bf16(row[d]);
    }
}

/* Keys past the context are zeros. */
static void load_run(exact_scratch *s, const accuracy_samples *samples, int32_t sample, int32_t first_key)
{
    for (int32_t i = 0; i < RUN_KEYS; i++) {
        if (first_key + i >= samples->context) {
            memset(s->keys[i], 0, sizeof(s->keys[i]));
            continue;
        }
        const uint16_t *latent = accuracy_latent(samples, sample, first_key + i);
        for (int32_t d = 0; d < ACCURACY_HEAD_SIZE; d++) s->keys[i][d] = fv_f32_of_bf16(latent[d]);
    }
}

/* The largest score of each head; counts where the running one moved. */
static void find_maxima(double max[ACCURACY_GROUP], accuracy_moves *moves, const exact_scratch *s, int32_t context,
                        int32_t num_heads, double scale, int32_t block_keys)
{
    for (int32_t lane = 0; lane < ACCURACY_GROUP; lane++) {
        max[lane] = -INFINITY;
        for (int32_t first = 0; first < context; first += block_keys) {
            double next = max[lane];
            for (int32_t key = first; key < fv_min_i32(first + block_keys, context); key++)
                next = fmax(next, scale * s->scores[key][lane]);
            if (first > 0 && lane < num_heads) {
                moves->num_blocks++;
                moves->num_max += next > max[lane];
                moves->num_integer += rint(-next / M_LN2) != rint(-max[lane] / M_LN2);
            }
            max[lane] = next;
        }
    }
}

void accuracy_exact(double *out, accuracy_moves *moves, const accuracy_samples *samples, int32_t sample,
                    int32_t first_head, double scale, int32_t block_keys, void *scratch)
{
    const products *with = best_products();
    exact_scratch *s = scratch;
    const int32_t context = samples->context;
    double max[ACCURACY_GROUP], sum[ACCURACY_GROUP] = {0};
    load_queries(s, samples, sample, first_head);
    for (int32_t key = 0; key < context; key += RUN_KEYS) {
        load_run(s, samples, sample, key);
        with->score_run(s, s->scores + key);
    }
    find_maxima(max, moves, s, context, samples->num_heads - first_head, scale, block_keys);

    memset(s->out, 0, sizeof(s->out));
    for (int32_t first = 0; first < context; first += RUN_KEYS) {
        for (int32_t key = first; key < first + RUN_KEYS; key++) {
            for (int32_t lane = 0; lane < ACCURACY_GROUP; lane++) {
                const double p = key < context ? exp(scale * s->scores[key][lane] - max[lane]) : 0;
                s->scores[key][lane] = p;
                sum[lane] += p;
            }
        }
        load_run(s, samples, sample, first);
        with->add_run(s, s->scores + first);
    }
    for (int32_t lane = 0; lane < ACCURACY_GROUP; lane++)
        for (int32_t d = 0; d < ACCURACY_LATENT; d++) out[lane * ACCURACY_LATENT + d] = s->out[lane][d] / sum[lane];
}
