/* AMLA: the addition to the exponent against ldexp, with its guards and the error of the compensation; and the
 * three variants of mla_decode on every CPU table that this CPU runs and on the emulated AMX one, against the oracle. Slots past the end of
 * a sequence, unused blocks and what follows the scratch memory are poisoned. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "core/float.h"
#include "kernels/cpu/exponent_add.h"
#include "kernels/cpu_tables.h"
#include "kvcache/kv_address.h"
#include "kvcache/latent_entry.h"
#include "reference/oracle.h"
#include "support/attend_run.h"
#include "support/thinned.h"

static uint64_t next_bits(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static double next_unit(uint64_t *state) { return (double)(next_bits(state) >> 11) * 0x1p-53; }

static float next_normal(uint64_t *state)
{
    return (float)(sqrt(-2 * log(1 - next_unit(state))) * cos(6.283185307179586 * next_unit(state)));
}

/* --- the addition ----------------------------------------------------------------------------------------- */

enum { NUM_RANDOM = 200000 };

static float add_one(float value, int32_t addend) { return fv_exponent_add(fv_splat(value), addend)[3]; }

static int32_t addend_of(float n, float error) { return fv_exponent_addend(fv_splat(n), fv_splat(error))[5]; }

/* What the addition of n to the exponent has to give: ldexp, without denormal numbers. */
static float scaled(float value, int32_t n)
{
    if (fabsf(value) < 0x1p-126f) return copysignf(0.0f, value);
    const float exact = ldexpf(value, n);
    return fabsf(exact) < 0x1p-126f ? copysignf(0.0f, value) : exact;
}

static void assert_same_bits(float value, float expected, float from, int32_t addend)
{
    if (fv_bits_of_f32(value) != fv_bits_of_f32(expected))
        fail_msg("%a and %d: %a is not %a", (double)from, addend, (double)value, (double)expected);
}

/* Lemma 3.1, any float and any exponent; beyond 2^31 / 2^23 = 255 steps no addend goes. */
static void test_whole_powers(void **state)
{
    (void)state;
    uint64_t random = 1;
    for (int32_t i = 0; i < NUM_RANDOM; i += thinned) {
        const float value = fv_f32_of_bits((uint32_t)next_bits(&random));
        const int32_t n = (int32_t)(next_bits(&random) % 511) - 255;
        if (value != value) continue;
        assert_same_bits(add_one(value, n * FV_EXPONENT_ONE), scaled(value, n), value, n * FV_EXPONENT_ONE);
    }
    for (int32_t n = -255; n <= 255; n++) assert_int_equal(addend_of((float)n, 0.0f), n * FV_EXPONENT_ONE);
    for (int32_t n = -253; n <= 254; n++) {
        const float value = n < 0 ? 0x1.8p127f : 0x1.8p-126f;
        assert_same_bits(add_one(value, n * FV_EXPONENT_ONE), ldexpf(value, n), value, n * FV_EXPONENT_ONE);
    }
}

static void test_guards(void **state)
{
    (void)state;
    static const int32_t addends[] = {INT32_MIN, INT32_MIN + 1,   -FV_EXPONENT_INFINITY, -FV_EXPONENT_ONE, -1, 0, 1,
                                      12345,     FV_EXPONENT_ONE, FV_EXPONENT_INFINITY,  INT32_MAX};
    static const float stay[] = {0.0f, -0.0f, INFINITY, -INFINITY};
    for (int32_t i = 0; i < FV_ARRAY_LEN(addends); i++) {
        const int32_t addend = addends[i];
        for (int32_t j = 0; j < FV_ARRAY_LEN(stay); j++)
            assert_same_bits(add_one(stay[j], addend), stay[j], stay[j], addend);
        assert_same_bits(add_one(0x1p-127f, addend), 0.0f, 0x1p-127f, addend);
        assert_same_bits(add_one(-0x1.fp-140f, addend), -0.0f, -0x1.fp-140f, addend);
        const float nan = fv_f32_of_bits(0xffc12345u);
        assert_same_bits(add_one(nan, addend), nan, nan, addend);
        /* Any sum lies between 0 and infinity and keeps its sign. */
        const float moved = add_one(-1.0f, addend);
        const int64_t bits = 0x3f800000 + (int64_t)addend;
        const float expected = bits < FV_EXPONENT_ONE        ? -0.0f
                               : bits > FV_EXPONENT_INFINITY ? -INFINITY
                                                             : -fv_f32_of_bits((uint32_t)bits);
        assert_same_bits(moved, expected, -1.0f, addend);
    }
    assert_same_bits(add_one(0x1.fffffep127f, 1), INFINITY, 0x1.fffffep127f, 1);
    assert_same_bits(add_one(0x1p-126f, -1), 0.0f, 0x1p-126f, -1);
    assert_same_bits(add_one(-0x1p-125f, -FV_EXPONENT_ONE), -0x1p-126f, -0x1p-125f, -FV_EXPONENT_ONE);

    /* Jumps beyond all exponents, and no number at all: no finite output is left, or any addend will do. */
    assert_same_bits(add_one(0x1.fffffep127f, addend_of(-3e38f, 0.01f)), 0.0f, 0x1.fffffep127f, 0);
    assert_same_bits(add_one(0x1.fffffep127f, addend_of(-INFINITY, -0.01f)), 0.0f, 0x1.fffffep127f, 0);
    assert_same_bits(add_one(-0x1p-126f, addend_of(3e38f, 0.01f)), -INFINITY, -0x1p-126f, 0);
    addend_of(NAN, NAN);
}

/* Of a compensation by e at most e / 2 is missed, and most of it is met: 0.2 e in the root of the mean square. */
static void test_compensation(void **state)
{
    (void)state;
    uint64_t random = 2;
    double squares = 0, missed = 0;
    for (int32_t i = 0; i < NUM_RANDOM; i += thinned) {
        const float value = ldexpf((float)(1 + next_unit(&random)), (int32_t)(next_bits(&random) % 180) - 60);
        const float error = (float)((next_unit(&random) - 0.5) * 0x1p-6);
        const int32_t n = -(int32_t)(next_bits(&random) % 60);
        const double got = add_one(value, addend_of((float)n, error));
        const double off = got / ((double)ldexpf(value, n) * (1 + (double)error)) - 1;
        assert_true(fabs(off) <= 0.52 * fabs((double)error) + 0x1p-22);
        squares += (double)error * error;
        missed += off * off;
    }
    assert_true(sqrt(missed / squares) < 0.3);
}

/* --- the kernels ------------------------------------------------------------------------------------------ */

enum {
    MAX_SEQS = 4,
    MAX_KEYS = 1200, /* of a sequence */
    MAX_ITEMS = 256,
    MAX_ROWS = 512,
};

typedef struct mla_case {
    fv_dtype dtype;       /* of q and out; 0: bf16 */
    fv_dtype cache_dtype; /* 0: that of q */
    int32_t is_ds;        /* the 656-byte entry */
    int32_t query_lens[MAX_SEQS], seq_lens[MAX_SEQS];
    int32_t num_heads, lora, rope, block_size, tile_keys;
    int32_t window, not_causal, tree, sinks, rotates, has_scale;
    float soft_cap;
    fv_alibi alibi;
    fv_context_parallel cp;
    float growth;         /* the last key is this much longer than the first: the maximum keeps moving */
    int32_t cut;          /* keys of a segment; 0: whole */
    int32_t num_segments; /* static grid instead of a list */
    int32_t all_variants; /* not AMLA's alone */
    int32_t num_workers;  /* 0: one */
} mla_case;

typedef struct mla_scene {
    const mla_case *test;
    uint64_t random;
    fv_attend_params params;
    char *q, *out, *cache;
    size_t out_bytes;
    float *lse, *cos, *sin;
    float sinks[128], slopes[128], scale;
    uint8_t causal[MAX_SEQS];
    uint64_t tree[MAX_ROWS];
    int32_t query_start[MAX_SEQS + 1], table[MAX_SEQS][MAX_KEYS];
    fv_work_item items[MAX_ITEMS];
    fv_reduce_item reduces[MAX_ITEMS];
    int32_t num_items, num_reduces, num_slots;
    float *partial_out, *partial_max, *partial_sum;
} mla_scene;

static void *alloc_filled(size_t bytes, int value)
{
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);
    assert_non_null(memory);
    return memset(memory, value, bytes);
}

static void write_entry(mla_scene *s, char *entry, float length)
{
    const mla_case *test = s->test;
    const fv_dtype dtype = s->params.cache.dtype;
    for (int32_t d = 0; d < test->lora + test->rope; d++) {
        const float value = length * next_normal(&s->random);
        if (!test->is_ds)
            fv_float_store(entry + d * (int64_t)fv_dtype_bytes(dtype), value, dtype);
        else if (d < FV_DS_LATENT)
            fv_float_store(entry + d, value * 16, FV_DTYPE_F8_E4M3);
        else
            fv_float_store(entry + FV_DS_ROPE_AT + (d - FV_DS_LATENT) * 2, value, FV_DTYPE_BF16);
    }
    for (int32_t i = 0; test->is_ds && i < 4; i++) {
        const float scale = 0.0625f * (1 + 0.1f * (float)i);
        memcpy(entry + FV_DS_SCALES_AT + 4 * i, &scale, 4);
    }
}

static void build_cache(mla_scene *s)
{
    const mla_case *test = s->test;
    fv_kv_view *cache = &s->params.cache;
    const fv_kv_layout layout = test->is_ds ? FV_KV_LAYOUT_LATENT_FP8_DS : FV_KV_LAYOUT_LATENT;
    const fv_dtype dtype = test->is_ds ? FV_DTYPE_F8_E4M3 : test->cache_dtype ? test->cache_dtype : s->params.q_dtype;
    const int64_t num_blocks = MAX_SEQS * (MAX_KEYS / test->block_size + 1) + 1;
    const int32_t head_size = test->lora + test->rope;
    size_t bytes;
    assert_int_equal(fv_kv_view_bytes(&bytes, layout, dtype, num_blocks, test->block_size, 1, head_size), FV_OK);
    s->cache = alloc_filled(bytes, 0xff);
    assert_int_equal(fv_kv_view_init(cache, s->cache, layout, dtype, num_blocks, test->block_size, 1, head_size),
                     FV_OK);
    cache->v_head_size = test->lora;
    int32_t next_block = (int32_t)num_blocks - 1;
    for (int32_t r = 0; r < MAX_SEQS; r++) {
        const int32_t num_keys = fv_local_keys(&s->params.context_parallel, test->seq_lens[r]);
        for (int32_t i = 0; i < MAX_KEYS; i++)
            s->table[r][i] = i * test->block_size < num_keys ? next_block-- : -1000000;
        for (int32_t key = 0; key < num_keys; key++) {
            const float length = 1 + test->growth * (float)key / (float)num_keys;
            write_entry(s,
                        s->cache +
                            fv_kv_row_offset(&cache->k, s->table[r][key / test->block_size], 0, key % test->block_size),
                        length);
        }
    }
    assert_true(next_block >= 0);
}

static void add_block(mla_scene *s, int32_t seq, int32_t first_token, int32_t num_tokens)
{
    const int32_t num_keys = fv_local_keys(&s->params.context_parallel, s->test->seq_lens[seq]);
    const int32_t cut = s->test->cut ? s->test->cut : num_keys + 1;
    const int32_t num_segments = s->test->cut ? (num_keys + cut - 1) / cut : 1;
    if (s->test->cut) {
        s->reduces[s->num_reduces++] = (fv_reduce_item){.first_token = s->query_start[seq] + first_token,
                                                        .num_tokens = num_tokens,
                                                        .partial = s->num_slots,
                                                        .num_segments = num_segments};
    }
    for (int32_t i = 0; i < num_segments; i++) {
        assert_true(s->num_items < MAX_ITEMS);
        s->items[s->num_items++] = (fv_work_item){.seq = seq,
                                                  .table_row = seq,
                                                  .first_token = first_token,
                                                  .num_tokens = num_tokens,
                                                  .num_kv_heads = 1,
                                                  .first_key = i * cut,
                                                  .end_key = (i + 1) * cut,
                                                  .partial = s->test->cut ? s->num_slots : -1};
        if (s->test->cut) s->num_slots += num_tokens;
    }
}

static void build_schedule(mla_scene *s)
{
    fv_attend_params *p = &s->params;
    if (s->test->num_segments) {
        p->num_segments = s->test->num_segments;
        p->num_q_blocks = s->query_start[MAX_SEQS] / p->block_q + MAX_SEQS;
        s->num_slots = s->query_start[MAX_SEQS] * p->num_segments;
    } else {
        for (int32_t r = 0; r < MAX_SEQS; r++)
            for (int32_t token = 0; token < s->test->query_lens[r]; token += p->block_q)
                add_block(s, r, token, fv_min_i32(p->block_q, s->test->query_lens[r] - token));
        p->items = s->items;
        p->num_items = s->num_items;
    }
    const size_t cells = (size_t)(s->num_slots + 1) * (size_t)p->num_heads;
    p->partial_out = s->partial_out = alloc_filled(cells * (size_t)p->v_head_size * 4, 0xff);
    p->partial_max = s->partial_max = alloc_filled(cells * 4, 0xff);
    p->partial_sum = s->partial_sum = alloc_filled(cells * 4, 0xff);
}

static void build_rotation(mla_scene *s)
{
    const int32_t half = s->test->rope / 2;
    const size_t count = (size_t)(MAX_KEYS * half);
    s->cos = alloc_filled(count * 4, 0xff);
    s->sin = alloc_filled(count * 4, 0xff);
    for (int32_t position = 0; position < MAX_KEYS; position++) {
        for (int32_t i = 0; i < half; i++) {
            s->cos[position * half + i] = cosf((float)position * powf(10000, -(float)i / (float)half));
            s->sin[position * half + i] = sinf((float)position * powf(10000, -(float)i / (float)half));
        }
    }
    if (s->test->rotates) s->params.rotation = (fv_key_rotation){s->cos, s->sin, s->test->rope, MAX_KEYS};
}

static mla_scene *scene_create(const mla_case *test)
{
    mla_scene *s = calloc(1, sizeof(*s));
    assert_non_null(s);
    s->test = test;
    s->random = 7;
    s->scale = test->has_scale ? 0.6f : 1.0f;
    for (int32_t r = 0; r < MAX_SEQS; r++) {
        s->query_start[r + 1] = s->query_start[r] + test->query_lens[r];
        s->causal[r] = !test->not_causal;
    }
    const int32_t num_tokens = s->query_start[MAX_SEQS], head_size = test->lora + test->rope;
    const fv_dtype dtype = test->dtype ? test->dtype : FV_DTYPE_BF16;
    const int64_t bytes = (int64_t)fv_dtype_bytes(dtype);
    assert_true(num_tokens * test->num_heads <= MAX_ROWS);
    fv_attend_params *p = &s->params;
    *p = (fv_attend_params){
        .q_head_stride = (head_size + 1) * bytes,
        .q_token_stride = (head_size + 1) * bytes * test->num_heads,
        .out_head_stride = test->lora * bytes,
        .out_token_stride = test->lora * bytes * test->num_heads,
        .lse_token_stride = 4, /* [Hq, T] */
        .lse_head_stride = num_tokens * 4,
        .sinks = test->sinks ? s->sinks : NULL,
        .alibi_slopes = s->slopes,
        .k_scale = test->has_scale ? &s->scale : NULL,
        .v_scale = test->has_scale ? &s->scale : NULL,
        .num_kv_scales = test->has_scale,
        .q_dtype = dtype,
        .out_dtype = dtype,
        .num_heads = test->num_heads,
        .num_kv_heads = 1,
        .head_size = head_size,
        .v_head_size = test->lora,
        .scale = 1 / sqrtf((float)head_size),
        .soft_cap = test->soft_cap,
        .window = test->window,
        .alibi = test->alibi,
        .context_parallel = test->cp.world ? test->cp : (fv_context_parallel){1, 0, 1},
        .num_seqs = MAX_SEQS,
        .query_start = s->query_start,
        .seq_lens = test->seq_lens,
        .block_table = s->table[0],
        .block_table_stride = MAX_KEYS,
        .block_table_width = MAX_KEYS,
        .causal = s->causal,
        .tree_mask = test->tree ? s->tree : NULL,
        .block_q = fv_max_i32(1, 40 / test->num_heads),
        .tile_keys = test->tile_keys,
        .num_segments = 1,
    };
    p->q = s->q = alloc_filled((size_t)(num_tokens * p->q_token_stride), 0xff);
    for (int32_t row = 0; row < num_tokens * test->num_heads; row++)
        for (int32_t d = 0; d < head_size; d++)
            fv_float_store(s->q + row * p->q_head_stride + d * bytes, next_normal(&s->random), dtype);
    s->out_bytes = (size_t)(num_tokens * p->out_token_stride);
    p->out = s->out = alloc_filled(s->out_bytes, 0xff);
    p->lse = s->lse = alloc_filled((size_t)(num_tokens * test->num_heads) * 4, 0xff);
    for (int32_t h = 0; h < test->num_heads; h++) {
        s->sinks[h] = next_normal(&s->random);
        s->slopes[h] = 0.05f * (float)(h + 1);
    }
    for (int32_t t = 0; t < num_tokens; t++) s->tree[t] = 0x5a3b9u + (uint64_t)t * 0x10305u;
    build_cache(s);
    build_rotation(s);
    build_schedule(s);
    return s;
}

static void scene_destroy(mla_scene *s)
{
    void *parts[] = {s->q, s->out, s->lse, s->cos, s->sin, s->cache, s->partial_out, s->partial_max, s->partial_sum, s};
    for (int32_t i = 0; i < FV_ARRAY_LEN(parts); i++) free(parts[i]);
}

/* Tables that this CPU runs, up to AVX-512, from the second on, then the emulated one; NULL behind them. */
static const fv_kernel_table *table_at(int32_t index)
{
    const fv_kernel_table *const *tables;
    const int32_t num_tables = fv_cpu_tables(&tables, FV_ISA_AVX512) - 1;
    if (index < num_tables) return tables[index + 1];
    return index == num_tables ? &fv_cpu_emulated_amx : NULL;
}

static void run_variant(mla_scene *s, const fv_kernel_table *table, const fv_attend_variant *variant)
{
    memset(s->out, 0xff, s->out_bytes);
    const fv_kernel_table *reducing = table->reduce_segments ? table : table_at(0); /* the emulated one attends only */
    attend_run_variant_by(fv_max_i32(1, s->test->num_workers), &s->params, s->reduces, s->num_reduces, reducing,
                          variant);
}

/* loss: what the row may be off by beyond the oracle's rule, as a part of its length. */
static void compare_row(const mla_scene *s, const fv_oracle_row *expected, double loss, const char *who,
                        const char *variant)
{
    const fv_attend_params *p = &s->params;
    const fv_attend_row *row = &expected->row;
    const char *at = s->out + row->token * p->out_token_stride + row->head * p->out_head_stride;
    double error2 = 0, exact2 = 0;
    for (int32_t d = 0; d < p->v_head_size; d++) {
        const double value = fv_float_load(at + d * (int64_t)fv_dtype_bytes(p->out_dtype), p->out_dtype);
        exact2 += expected->exact[d] * expected->exact[d];
        error2 += (value - expected->exact[d]) * (value - expected->exact[d]);
    }
    const double tolerance = 2 * expected->error + expected->out_floor + loss * sqrt(exact2);
    if (!(sqrt(error2) <= tolerance))
        fail_msg("%s %s: token %d, head %d: error %g > %g", who, variant, row->token, row->head, sqrt(error2),
                 tolerance);
    const double lse = s->lse[row->token + row->head * (p->lse_head_stride / 4)];
    if (expected->lse == -INFINITY ? lse != -INFINITY : !(fabs(lse - expected->lse) <= expected->lse_floor))
        fail_msg("%s %s: token %d, head %d: lse %.9g is not %.9g within %g", who, variant, row->token, row->head, lse,
                 expected->lse, expected->lse_floor);
}

static void expect_rows(fv_oracle_row *rows, double *numbers, const mla_scene *s)
{
    const fv_attend_params *p = &s->params;
    const fv_kv_reader reader = fv_kv_reader_of(p);
    double *scratch = malloc(fv_oracle_scratch_doubles(p, MAX_KEYS) * sizeof(double));
    assert_non_null(scratch);
    for (int32_t r = 0; r < p->num_seqs; r++) {
        for (int32_t i = 0, num; i < s->test->query_lens[r] * p->num_heads; i += num) {
            const int32_t first = s->query_start[r] * p->num_heads + i;
            num = fv_min_i32(p->num_heads - i % p->num_heads, FV_ORACLE_MAX_ROWS);
            for (int32_t j = 0; j < num; j++) {
                rows[first + j].row = fv_attend_row_of(p, r, (i + j) / p->num_heads, (i + j) % p->num_heads);
                rows[first + j].exact = numbers + (ptrdiff_t)2 * (first + j) * p->v_head_size;
                rows[first + j].ideal = rows[first + j].exact + p->v_head_size;
            }
            fv_oracle_attend(&rows[first], num, p, &reader, r, scratch);
        }
    }
    free(scratch);
}

static int32_t is_amla(const fv_attend_variant *variant) { return strncmp(variant->name, "amla", 4) == 0; }

static void check_case(const mla_case *test)
{
    mla_scene *s = scene_create(test);
    const int32_t num_rows = s->query_start[MAX_SEQS] * test->num_heads;
    fv_oracle_row *rows = calloc((size_t)num_rows, sizeof(*rows));
    double *numbers = calloc((size_t)num_rows * 2 * (size_t)test->lora, sizeof(*numbers));
    assert_true(rows && numbers);
    expect_rows(rows, numbers, s);

    const fv_kernel_table *table;
    for (int32_t t = 0; (table = table_at(t)); t++) {
        int32_t num_checked = 0;
        for (int32_t i = 0; i < table->num_mla_decode; i++) {
            const fv_attend_variant *variant = &table->mla_decode[i];
            if (!is_amla(variant) && !test->all_variants) continue;
            const double loss = variant->rescaling == FV_RESCALING_ADD_UNCOMPENSATED ? 0x1p-7 : 0;
            run_variant(s, table, variant);
            for (int32_t row = 0; row < num_rows; row++) compare_row(s, &rows[row], loss, table->name, variant->name);
            num_checked += is_amla(variant);
        }
        assert_int_equal(num_checked, 3);
    }
    free(rows);
    free(numbers);
    scene_destroy(s);
}

/* --- cases -------------------------------------------------------------------------------------------------- */

/* A decode, a short verification, an empty sequence and one of one key, with maxima that keep moving. */
static mla_case mixed(void)
{
    return (mla_case){
        .query_lens = {1, 5, 0, 1},
        .seq_lens = {1100, 333, 9, 1},
        .num_heads = 16,
        .lora = 64,
        .rope = 32, /* sizes that tiles serve */
        .block_size = 16,
        .tile_keys = 64,
        .growth = 2,
    };
}

static void test_heads_blocks_and_tiles(void **state)
{
    (void)state;
    static const int32_t heads[] = {1, 2, 7, 8, 24, 60};
    static const int32_t block_sizes[] = {1, 16, 17, 64, 100, 3};
    static const int32_t tiles[] = {512, 8, 40, 64, 512, 1024};
    for (int32_t i = 0; i < FV_ARRAY_LEN(heads); i++) {
        mla_case test = mixed();
        test.num_heads = heads[i];
        test.block_size = block_sizes[i];
        test.tile_keys = tiles[i];
        test.growth = (float)i;
        check_case(&test);
    }
    mla_case test = mixed(); /* the shape of DeepSeek-V3 */
    test.num_heads = 64;
    test.lora = 512;
    test.rope = 64;
    test.tile_keys = 512;
    check_case(&test);
    test = mixed(); /* sizes that fill no panel, no rotated part */
    test.lora = 72;
    test.rope = 0;
    check_case(&test);
}

static void test_dtypes(void **state)
{
    (void)state;
    static const fv_dtype dtypes[] = {FV_DTYPE_BF16, FV_DTYPE_F16, FV_DTYPE_F32};
    static const fv_dtype cache_dtypes[] = {FV_DTYPE_BF16, FV_DTYPE_F16, FV_DTYPE_F32, FV_DTYPE_F8_E4M3,
                                            FV_DTYPE_F8_E5M2};
    for (int32_t i = 0; i < FV_ARRAY_LEN(dtypes); i++) {
        for (int32_t j = 0; j < FV_ARRAY_LEN(cache_dtypes); j++) {
            mla_case test = mixed();
            test.dtype = dtypes[i];
            test.cache_dtype = cache_dtypes[j];
            test.has_scale = j >= 3;
            check_case(&test);
        }
    }
    mla_case test = mixed();
    test.is_ds = 1;
    test.lora = FV_DS_LATENT;
    test.rope = FV_DS_ROPE;
    check_case(&test);
    test.rotates = 1;
    check_case(&test);
}

/* A wider output than the queries shows more than the compensation gives: AMLA declines, Base does not. */
static void test_why_not(void **state)
{
    (void)state;
    const fv_problem asked = {
        .struct_size = sizeof(asked),
        .kind = FV_ATTENTION_MLA,
        .mla =
            {.num_heads = 16, .kv_lora_rank = 512, .qk_rope_head_dim = 64, .qk_nope_head_dim = 128, .v_head_dim = 128},
        .q_dtype = FV_DTYPE_BF16,
        .block_size = 16,
    };
    fv_problem problem;
    assert_int_equal(fv_problem_normalize(&problem, &asked), FV_OK);
    const fv_kernel_table *const *tables;
    fv_cpu_tables(&tables, FV_ISA_PORTABLE);
    for (int32_t i = 0; i < tables[1]->num_mla_decode; i++) {
        const fv_attend_variant *variant = &tables[1]->mla_decode[i];
        problem.out_dtype = FV_DTYPE_BF16;
        assert_null(variant->why_not(&problem));
        problem.out_dtype = FV_DTYPE_F32;
        const int32_t adds = variant->rescaling == FV_RESCALING_ADD ||
                             variant->rescaling == FV_RESCALING_ADD_UNCOMPENSATED;
        assert_int_equal(variant->why_not(&problem) != NULL, adds);
    }
}

static void test_masks_and_scores(void **state)
{
    (void)state;
    for (int32_t i = 0; i < 16; i++) {
        mla_case test = mixed();
        test.not_causal = i & 1;
        test.window = i & 2 ? 90 : 0;
        test.tree = (i & 4) != 0;
        test.rotates = (i & 8) != 0;
        test.sinks = i % 3 == 1;
        test.soft_cap = i % 5 == 2 ? 3.0f : 0.0f;
        test.alibi = i == 3 ? FV_ALIBI_LINEAR : i == 9 ? FV_ALIBI_SQRT : FV_ALIBI_NONE;
        check_case(&test);
    }
    for (int32_t rank = 0; rank < 3; rank++) { /* rank 2 has no key of the last sequence */
        mla_case test = mixed();
        test.cp = (fv_context_parallel){3, rank, rank + 1};
        test.rotates = 1;
        test.window = rank == 1 ? 50 : 0;
        check_case(&test);
    }
}

/* Large values, and rows that fill 2 to 4 strips of a tile kernel: these share blocks of keys there. */
static void test_rows_that_share_blocks(void **state)
{
    (void)state;
    static const int32_t heads[] = {20, 40, 60, 17};
    for (int32_t i = 0; i < 16; i += thinned) {
        mla_case test = mixed();
        test.lora = 256;
        test.num_heads = heads[i % 4];
        test.block_size = i % 3 == 2 ? 7 : 16;
        test.tile_keys = 512;
        test.not_causal = i % 5 == 1;
        test.window = i % 5 == 2 ? 290 : i % 5 == 3 ? 3 : 0;
        test.tree = i % 7 == 3;
        test.sinks = i & 1;
        test.soft_cap = i % 7 == 5 ? 3.0f : 0.0f;
        test.cut = i % 4 == 1 ? 192 : 0;
        test.growth = (float)(i % 6);
        test.all_variants = 1;
        check_case(&test);
    }
}

/* Segments of one query, of which the first to run takes most keys, and the last find few or none left. */
static void test_segments_that_deal_out_keys(void **state)
{
    (void)state;
    static const int32_t cuts[] = {192, 320, 512, 1056};
    for (int32_t i = 0; i < FV_ARRAY_LEN(cuts); i++) {
        mla_case test = mixed();
        test.query_lens[1] = 1;
        test.lora = 256;
        test.num_heads = i % 2 ? 60 : 20;
        test.cut = cuts[i];
        test.sinks = i & 1;
        test.growth = (float)i;
        test.all_variants = 1;
        test.num_workers = 12; /* one for each item, at least */
        check_case(&test);
    }
}

static void test_segments_and_grid(void **state)
{
    (void)state;
    for (int32_t i = 0; i < 4; i++) {
        mla_case test = mixed();
        test.cut = 192;
        test.sinks = i & 1;
        test.window = i & 2 ? 150 : 0;
        check_case(&test);
        test.cut = 0;
        test.num_segments = 1 + 4 * i;
        check_case(&test);
    }
}

/* A NaN in the last new token is no business of the tokens before it. */
static void check_nan_out_of_sight(int32_t lora, int32_t num_heads)
{
    mla_case test = mixed();
    test.lora = lora;
    test.num_heads = num_heads;
    mla_scene *s = scene_create(&test);
    const fv_kv_view *cache = &s->params.cache;
    const int32_t last = test.seq_lens[1] - 1;
    memset(s->cache + fv_kv_row_offset(&cache->k, s->table[1][last / test.block_size], 0, last % test.block_size), 0xff,
           (size_t)(test.lora + test.rope) * 2);
    const fv_kernel_table *table;
    for (int32_t t = 0; (table = table_at(t)); t++) {
        for (int32_t i = 0; i < table->num_mla_decode; i++) {
            if (!is_amla(&table->mla_decode[i])) continue;
            run_variant(s, table, &table->mla_decode[i]);
            for (int32_t token = 0; token < s->query_start[MAX_SEQS]; token++) {
                const uint16_t *row = (const uint16_t *)(const void *)(s->out + token * s->params.out_token_stride);
                assert_int_equal(isnan(fv_f32_of_bf16(row[0])), token == s->query_start[2] - 1);
            }
        }
    }
    scene_destroy(s);
}

static void test_nan_out_of_sight(void **state)
{
    (void)state;
    check_nan_out_of_sight(64, 16);
    check_nan_out_of_sight(256, 20);
}

/* --- maxima by hand: one head, one element that matters ----------------------------------------------------- */

enum { HAND_KEYS = 64, HAND_TILE = 8 };

/* The output (element 1) of query e_0 over keys whose element 0 is the score and whose element 1 is the value. */
static float attend_by_hand(const fv_kernel_table *kernels, const fv_attend_variant *variant, const float *scores,
                            const float *values)
{
    float keys[HAND_KEYS][8] = {{0}}, q[8] = {1}, out[8];
    int32_t table[HAND_KEYS], seq_len = HAND_KEYS, query_start[2] = {0, 1};
    for (int32_t key = 0; key < HAND_KEYS; key++) {
        keys[key][0] = scores[key];
        keys[key][1] = values[key];
        table[key] = key;
    }
    const fv_work_item item = {.num_tokens = 1, .num_kv_heads = 1, .end_key = HAND_KEYS, .partial = -1};
    fv_attend_params p = {
        .q = q,
        .out = out,
        .q_dtype = FV_DTYPE_F32,
        .out_dtype = FV_DTYPE_F32,
        .num_heads = 1,
        .num_kv_heads = 1,
        .head_size = 8,
        .v_head_size = 8,
        .scale = 1,
        .context_parallel = {1, 0, 1},
        .num_seqs = 1,
        .query_start = query_start,
        .seq_lens = &seq_len,
        .block_table = table,
        .block_table_stride = HAND_KEYS,
        .block_table_width = HAND_KEYS,
        .items = &item,
        .num_items = 1,
        .block_q = 1,
        .tile_keys = HAND_TILE,
    };
    assert_int_equal(fv_kv_view_init(&p.cache, keys, FV_KV_LAYOUT_LATENT, FV_DTYPE_F32, HAND_KEYS, 1, 1, 72), FV_OK);
    p.cache.head_size = p.cache.v_head_size = 8;
    p.cache.k.block_stride = p.cache.k.slot_stride = sizeof(keys[0]);
    p.cache.v = p.cache.k;
    attend_run_variant(&p, NULL, 0, kernels, variant);
    return out[1];
}

static void check_by_hand(const float *scores, const float *values, double expected, double tolerance)
{
    const fv_kernel_table *const *tables;
    const int32_t num_tables = fv_cpu_tables(&tables, FV_ISA_AVX512);
    for (int32_t t = 1; t < num_tables; t++) {
        for (int32_t i = 0; i < tables[t]->num_mla_decode; i++) {
            const fv_attend_variant *variant = &tables[t]->mla_decode[i];
            if (!is_amla(variant)) continue;
            const double out = attend_by_hand(tables[t], variant, scores, values);
            if (isnan(expected) ? !isnan(out) : !(fabs(out - expected) <= tolerance))
                fail_msg("%s %s: %g is not %g", tables[t]->name, variant->name, out, expected);
        }
    }
}

static void test_jumps(void **state)
{
    (void)state;
    float scores[HAND_KEYS], values[HAND_KEYS];
    static const float steps[] = {0, 0.001f, 0.3466f, 0.7f, 20, 87, 89, 300, 1e6f, 1e9f, 1e37f};
    for (int32_t i = 0; i < FV_ARRAY_LEN(steps); i++) { /* each block's scores lie a step above the last one's */
        double sum = 0, weights = 0;
        const float last = steps[i] * (float)(HAND_KEYS / HAND_TILE - 1);
        for (int32_t key = 0; key < HAND_KEYS; key++) {
            scores[key] = steps[i] * (float)(key / HAND_TILE);
            values[key] = key % 3 ? (float)key : -(float)key;
            const double p = exp((double)scores[key] - (double)last);
            sum += p * values[key];
            weights += p;
        }
        check_by_hand(scores, values, sum / weights, 1e-4 * 64);
    }

    for (int32_t key = 0; key < HAND_KEYS; key++) { /* from far below 0 up, huge and tiny values, zeros of both signs */
        scores[key] = key < 32 ? -1e30f : 5;
        values[key] = key < 32 ? 1e36f : key < 40 ? -0.0f : 0x1p-149f;
    }
    check_by_hand(scores, values, 0, 1e-40);

    for (int32_t key = 0; key < HAND_KEYS; key++) { /* one NaN, then one infinite value */
        scores[key] = (float)(key % 5);
        values[key] = 1;
    }
    check_by_hand(scores, values, 1, 1e-6);
    scores[20] = NAN;
    check_by_hand(scores, values, NAN, 0);
    scores[20] = 1;
    values[20] = INFINITY;
    check_by_hand(scores, values, NAN, 0); /* the latent's score is 0 times infinity */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_whole_powers),
        cmocka_unit_test(test_guards),
        cmocka_unit_test(test_compensation),
        cmocka_unit_test(test_heads_blocks_and_tiles),
        cmocka_unit_test(test_dtypes),
        cmocka_unit_test(test_why_not),
        cmocka_unit_test(test_masks_and_scores),
        cmocka_unit_test(test_segments_and_grid),
        cmocka_unit_test(test_rows_that_share_blocks),
        cmocka_unit_test(test_segments_that_deal_out_keys),
        cmocka_unit_test(test_nan_out_of_sight),
        cmocka_unit_test(test_jumps),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
