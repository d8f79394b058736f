/* kv_write and kv_gather over the latent layouts: every CPU table gives the bits of the reference, also for rows
 * with infinity and NaN; keys leave rotated by their global position; v is neither read nor needed. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "core/executor.h"
#include "core/float.h"
#include "kernels/cpu_tables.h"
#include "kvcache/latent_entry.h"
#include "reference/reference.h"

enum {
    TOKENS = 40,
    BLOCK_SIZE = 3,
    NUM_BLOCKS = 20,
    LORA = 512,
    ROPE = 64,
    ENTRY = LORA + ROPE,
    SRC_ROW = ENTRY + 5,
    MAX_CACHE = NUM_BLOCKS * BLOCK_SIZE * ENTRY * 4,
    POSITIONS = 4 * TOKENS,
    SEQS = 3,
    OUT_ROW = ENTRY + 3
};

static uint64_t random_state = 3;

static float random_unit(void)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (float)((double)(random_state >> 11) * 0x1p-53 * 2 - 1);
}

static const fv_launch *serial(void)
{
    static const fv_executor executor = {.num_workers = 1};
    static const fv_launch launch = {.executor = &executor};
    return &launch;
}

static void make_view(fv_kv_view *view, void *memory, fv_kv_layout layout, fv_dtype dtype)
{
    assert_int_equal(fv_kv_view_init(view, memory, layout, dtype, NUM_BLOCKS, BLOCK_SIZE, 1, ENTRY), FV_OK);
}

/* Rows of different sizes; one begins with zeros, one has infinity where `odd`, one NaN where `has_nan`. */
static void make_rows(char *rows, fv_dtype dtype, int32_t odd, int32_t has_nan)
{
    const size_t bytes = fv_dtype_bytes(dtype);
    for (int32_t token = 0; token < TOKENS; token++) {
        for (int32_t d = 0; d < ENTRY; d++) {
            float value = random_unit() * exp2f((float)(token % 12) - 5);
            if (token == 4 && d < 200) value = 0;
            if (odd && token == 5 && d % 130 == 7) value = d % 4 ? INFINITY : -INFINITY;
            if (has_nan && token == 6 && d % 190 == 3) value = NAN;
            fv_float_store(rows + (size_t)(token * SRC_ROW + d) * bytes, value, dtype);
        }
    }
}

static void make_slots(int64_t *slots)
{
    for (int32_t token = 0; token < TOKENS; token++) slots[token] = (token * 7 + 5) % (NUM_BLOCKS * BLOCK_SIZE);
    slots[3] = -1;
    slots[9] = NUM_BLOCKS * BLOCK_SIZE;
}

static fv_kv_write_params write_of(const fv_kv_view *cache, const char *rows, fv_dtype dtype, const int64_t *slots)
{
    return (fv_kv_write_params){
        .k = rows,
        .k_token_stride = SRC_ROW * (int64_t)fv_dtype_bytes(dtype),
        .src_dtype = dtype,
        .cache = *cache,
        .slot_mapping = slots,
        .num_tokens = TOKENS,
    };
}

static const struct {
    fv_kv_layout layout;
    fv_dtype dtype;
} caches[] = {
    {FV_KV_LAYOUT_LATENT_FP8_DS, FV_DTYPE_F8_E4M3},
    {FV_KV_LAYOUT_LATENT, FV_DTYPE_BF16},
    {FV_KV_LAYOUT_LATENT, FV_DTYPE_F32},
    {FV_KV_LAYOUT_LATENT, FV_DTYPE_F8_E4M3},
    {FV_KV_LAYOUT_LATENT, FV_DTYPE_F8_E5M2},
    {FV_KV_LAYOUT_LATENT, FV_DTYPE_F16},
};
static const fv_dtype src_dtypes[] = {FV_DTYPE_F32, FV_DTYPE_BF16, FV_DTYPE_F16};

static void test_write(void **state)
{
    (void)state;
    static char rows[TOKENS * SRC_ROW * 4], expected[MAX_CACHE], actual[MAX_CACHE];
    static const float k_scale = 0.37f;
    int64_t slots[TOKENS];
    make_slots(slots);
    const fv_kernel_table *const *tables;
    const int32_t num_tables = fv_cpu_tables(&tables, FV_ISA_AVX512);
    for (int32_t i = 0; i < FV_ARRAY_LEN(caches) * FV_ARRAY_LEN(src_dtypes); i++) {
        const fv_dtype dtype = src_dtypes[i % FV_ARRAY_LEN(src_dtypes)];
        const int32_t kind = i / FV_ARRAY_LEN(src_dtypes);
        /* NaN in fp16 keeps a payload or not, as the CPU likes. */
        make_rows(rows, dtype, 1, dtype != FV_DTYPE_F16 && caches[kind].dtype != FV_DTYPE_F16);
        fv_kv_view view;
        make_view(&view, expected, caches[kind].layout, caches[kind].dtype);
        memset(expected, 0x77, sizeof(expected));
        fv_kv_write_params params = write_of(&view, rows, dtype, slots);
        if (kind == 3) {
            params.k_scale = &k_scale;
            params.num_kv_scales = 1;
        }
        assert_int_equal(fv_reference_kv_write(NULL, &params), FV_OK);
        for (int32_t t = 0; t < num_tables; t++) {
            memset(actual, 0x77, sizeof(actual));
            make_view(&params.cache, actual, caches[kind].layout, caches[kind].dtype);
            assert_int_equal(tables[t]->kv_write(serial(), &params), FV_OK);
            if (memcmp(actual, expected, sizeof(actual)) != 0)
                fail_msg("%s writes other bits, cache %d, rows of %s", tables[t]->name, kind, fv_dtype_name(dtype));
        }
    }
}

/* --- kv_gather ------------------------------------------------------------------------------------------- */

typedef struct gather_scene {
    char cache[MAX_CACHE];
    char k[2][TOKENS * OUT_ROW * 4], v[2][TOKENS * OUT_ROW * 4];
    float cosines[POSITIONS][ROPE / 2], sines[POSITIONS][ROPE / 2];
    float token_scales[NUM_BLOCKS * BLOCK_SIZE];
    int32_t table[SEQS][8];
    fv_kv_gather_params params;
} gather_scene;

/* The keys from 2 on of three sequences, one of them none. */
static const int32_t key_start[SEQS] = {0, 5, 2}, out_start[SEQS + 1] = {0, 13, 13, 26};

static gather_scene *gather_create(int32_t kind, fv_dtype dtype)
{
    static char rows[TOKENS * SRC_ROW * 4];
    gather_scene *s = calloc(1, sizeof(*s));
    assert_non_null(s);
    fv_kv_gather_params *p = &s->params;
    memset(s->cache, 0xff, sizeof(s->cache));
    make_view(&p->cache, s->cache, caches[kind].layout, caches[kind].dtype);
    make_rows(rows, FV_DTYPE_F32, 0, 0);
    int64_t slots[TOKENS];
    for (int32_t token = 0; token < TOKENS; token++) slots[token] = BLOCK_SIZE + token;
    const fv_kv_write_params write = write_of(&p->cache, rows, FV_DTYPE_F32, slots);
    assert_int_equal(fv_reference_kv_write(NULL, &write), FV_OK);
    for (int32_t r = 0; r < SEQS; r++)
        for (int32_t i = 0; i < 8; i++) s->table[r][i] = i < 5 ? 1 + (r * 4 + i * 5) % 13 : -1000000;
    for (int32_t j = 0; j < POSITIONS; j++) {
        for (int32_t i = 0; i < ROPE / 2; i++) {
            const double angle = j * pow(10000, -2.0 * i / ROPE);
            s->cosines[j][i] = (float)cos(angle);
            s->sines[j][i] = (float)sin(angle);
        }
    }
    for (int32_t i = 0; i < NUM_BLOCKS * BLOCK_SIZE; i++) s->token_scales[i] = 1.5f + random_unit();
    p->k_token_stride = p->v_token_stride = OUT_ROW * (int64_t)fv_dtype_bytes(dtype);
    p->dst_dtype = dtype;
    p->num_seqs = SEQS;
    p->block_table = s->table[0];
    p->block_table_stride = p->block_table_width = 8;
    p->key_start = key_start;
    p->out_start = out_start;
    p->num_rows = out_start[SEQS];
    return s;
}

/* By the reference to side 0, by `table` to side 1. */
static void gather_both(gather_scene *s, const fv_kernel_table *table)
{
    memset(s->k, 0x77, sizeof(s->k));
    memset(s->v, 0x77, sizeof(s->v));
    const int32_t has_v = s->params.v != NULL;
    for (int32_t side = 0; side < 2; side++) {
        s->params.k = s->k[side];
        if (has_v) s->params.v = s->v[side];
        const fv_kv_gather_fn gather = side == 0 ? fv_reference_kv_gather : table->kv_gather;
        assert_int_equal(gather(serial(), &s->params), FV_OK);
    }
}

/* The reference rotates in double: `units` in the last place of the row's largest element. */
static void assert_rows_near(const gather_scene *s, const char *who, int32_t kind)
{
    const fv_dtype dtype = s->params.dst_dtype;
    const size_t bytes = fv_dtype_bytes(dtype);
    const float unit = dtype == FV_DTYPE_F32 ? 0x1p-22f : dtype == FV_DTYPE_F16 ? 0x1p-10f : 0x1p-7f;
    for (int32_t row = 0; row < out_start[SEQS]; row++) {
        float largest = 0;
        for (int32_t d = 0; d < ENTRY; d++) {
            const size_t at = (size_t)(row * OUT_ROW + d) * bytes;
            largest = fmaxf(largest, fabsf(fv_float_load(s->k[0] + at, dtype)));
        }
        for (int32_t d = 0; d < OUT_ROW; d++) {
            const size_t at = (size_t)(row * OUT_ROW + d) * bytes;
            if (d < LORA || d >= ENTRY) {
                assert_memory_equal(s->k[1] + at, s->k[0] + at, bytes);
                continue;
            }
            const float expected = fv_float_load(s->k[0] + at, dtype), actual = fv_float_load(s->k[1] + at, dtype);
            if (!(fabsf(actual - expected) <= unit * largest))
                fail_msg("%s, cache %d: row %d, element %d is %g, not %g", who, kind, row, d, (double)actual,
                         (double)expected);
        }
    }
}

static void test_gather(void **state)
{
    (void)state;
    static const float k_scale = 0.37f;
    const fv_kernel_table *const *tables;
    const int32_t num_tables = fv_cpu_tables(&tables, FV_ISA_AVX512);
    for (int32_t i = 0; i < FV_ARRAY_LEN(caches) * FV_ARRAY_LEN(src_dtypes); i++) {
        const int32_t kind = i / FV_ARRAY_LEN(src_dtypes);
        gather_scene *s = gather_create(kind, src_dtypes[i % FV_ARRAY_LEN(src_dtypes)]);
        if (i % 2) s->params.v = s->v[0];
        if (kind == 3 || kind == 5) {
            s->params.k_scale = &k_scale;
            s->params.num_kv_scales = 1;
        }
        if (kind == 4) s->params.cache.k_scales = (fv_scale_plane){s->token_scales, BLOCK_SIZE * 4, 4, 4};
        for (int32_t t = 0; t < num_tables; t++) {
            gather_both(s, tables[t]);
            if (memcmp(s->k[0], s->k[1], sizeof(s->k[0])) != 0 || memcmp(s->v[0], s->v[1], sizeof(s->v[0])) != 0)
                fail_msg("%s gathers other bits, cache %d", tables[t]->name, kind);
        }
        free(s);
    }
}

static void test_gather_rotates(void **state)
{
    (void)state;
    const fv_kernel_table *const *tables;
    const int32_t num_tables = fv_cpu_tables(&tables, FV_ISA_AVX512);
    for (int32_t i = 0; i < FV_ARRAY_LEN(caches) * FV_ARRAY_LEN(src_dtypes); i++) {
        const int32_t kind = i / FV_ARRAY_LEN(src_dtypes);
        gather_scene *s = gather_create(kind, src_dtypes[i % FV_ARRAY_LEN(src_dtypes)]);
        s->params.rotation = (fv_key_rotation){s->cosines[0], s->sines[0], i % 4 == 3 ? 24 : ROPE, POSITIONS};
        if (i % 2) s->params.context_parallel = (fv_context_parallel){3, i % 3, 2};
        for (int32_t t = 0; t < num_tables; t++) {
            gather_both(s, tables[t]);
            assert_rows_near(s, tables[t]->name, kind);
        }
        free(s);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_write),
        cmocka_unit_test(test_gather),
        cmocka_unit_test(test_gather_rotates),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
