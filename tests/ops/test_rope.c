/* rope against its formula in every table, and fused with the write: the bits of the two steps. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "core/float.h"
#include "ops/ops_fixture.h"

enum { TOKENS = 9, Q_HEADS = 4, KV_HEADS = 2, D = 32, POSITIONS = 50, NUM_BLOCKS = 6, MAX_BYTES = TOKENS * 4 * 40 * 4 };

typedef struct tables {
    float cos_sin[POSITIONS * D]; /* [positions, rope_dim]: cos, then sin */
    int32_t positions_32[TOKENS];
    int64_t positions_64[TOKENS];
    fv_rotation rotation;
} tables;

static void make_tables(tables *t, int32_t rope_dim, fv_rope_style style, int32_t wide)
{
    const int32_t half = rope_dim / 2;
    for (int32_t p = 0; p < POSITIONS; p++) {
        for (int32_t i = 0; i < half; i++) {
            const double angle = p * pow(10000.0, -2.0 * i / rope_dim);
            t->cos_sin[p * rope_dim + i] = (float)cos(angle);
            t->cos_sin[p * rope_dim + half + i] = (float)sin(angle);
        }
    }
    for (int32_t token = 0; token < TOKENS; token++) t->positions_64[token] = t->positions_32[token] = token * 6 % 50;
    t->rotation = (fv_rotation){
        .struct_size = sizeof(fv_rotation),
        .style = style,
        .rope_dim = rope_dim,
        .cos = t->cos_sin,
        .sin = t->cos_sin + half,
        .row_stride = rope_dim,
        .max_position = POSITIONS,
        .positions_32 = wide ? NULL : t->positions_32,
        .positions_64 = wide ? t->positions_64 : NULL,
    };
}

static fv_rope_params params_of(const tables *t, void *q, void *k, fv_dtype dtype)
{
    const int64_t element = (int64_t)fv_dtype_bytes(dtype);
    const fv_rotation *r = &t->rotation;
    return (fv_rope_params){
        .q = {q, Q_HEADS * D * element, D * element, Q_HEADS},
        .k = {k, KV_HEADS * (D + 3) * element, (D + 3) * element, KV_HEADS}, /* a gap after each head */
        .dtype = dtype,
        .style = r->style,
        .rope_dim = r->rope_dim,
        .cos = r->cos,
        .sin = r->sin,
        .row_stride = r->row_stride,
        .max_position = r->max_position,
        .positions_32 = r->positions_32,
        .positions_64 = r->positions_64,
        .num_tokens = TOKENS,
    };
}

/* One head of the formula in double: half a unit in the last place, and the fp32 arithmetic before it. */
static void assert_rotated(const char *got, const char *given, const tables *t, int32_t token, fv_dtype dtype)
{
    const size_t bytes = fv_dtype_bytes(dtype);
    const double unit = dtype == FV_DTYPE_BF16 ? 0x1p-9 : dtype == FV_DTYPE_F16 ? 0x1p-12 : 0x1p-25;
    const fv_rotation *r = &t->rotation;
    const int32_t half = r->rope_dim / 2;
    for (int32_t i = 0; i < half; i++) {
        const int32_t at_a = r->style == FV_ROPE_HALF ? i : 2 * i,
                      at_b = r->style == FV_ROPE_HALF ? i + half : 2 * i + 1;
        const double a = fv_float_load(given + (size_t)at_a * bytes, dtype);
        const double b = fv_float_load(given + (size_t)at_b * bytes, dtype);
        const double c = r->cos[t->positions_32[token] * r->row_stride + i];
        const double s = r->sin[t->positions_32[token] * r->row_stride + i];
        const double floor = 0x1p-23 * (fabs(a) + fabs(b)) + 1e-9;
        const double to_a = a * c - b * s, to_b = b * c + a * s;
        assert_true(fabs(fv_float_load(got + (size_t)at_a * bytes, dtype) - to_a) <= 2.01 * unit * fabs(to_a) + floor);
        assert_true(fabs(fv_float_load(got + (size_t)at_b * bytes, dtype) - to_b) <= 2.01 * unit * fabs(to_b) + floor);
    }
    const size_t rest = (size_t)(D - r->rope_dim) * bytes;
    if (rest) assert_memory_equal(got + (size_t)r->rope_dim * bytes, given + (size_t)r->rope_dim * bytes, rest);
}

static void test_rotates(void **state)
{
    (void)state;
    static char q[MAX_BYTES], k[MAX_BYTES], q_given[MAX_BYTES], k_given[MAX_BYTES];
    static tables t;
    const fv_dtype dtypes[] = {FV_DTYPE_F32, FV_DTYPE_F16, FV_DTYPE_BF16};
    const int32_t rope_dims[] = {D, 20, 2};
    const fv_kernel_table *const *kernels;
    const int32_t num_tables = cpu_tables(&kernels);
    const fv_launch launch = serial_launch();
    uint32_t seed = 7;
    for (int32_t round = 0; round < 18 * num_tables; round++) {
        const fv_dtype dtype = dtypes[round % 3];
        const int64_t element = (int64_t)fv_dtype_bytes(dtype);
        make_tables(&t, rope_dims[round / 3 % 3], (fv_rope_style)(round / 9 % 2), round % 2);
        fill_random(q_given, dtype, TOKENS * Q_HEADS * D, 1, &seed);
        fill_random(k_given, dtype, TOKENS * KV_HEADS * (D + 3), 1, &seed);
        memcpy(q, q_given, sizeof(q));
        memcpy(k, k_given, sizeof(k));
        const fv_rope_params params = params_of(&t, q, k, dtype);
        must(kernels[round / 18]->rope(&launch, &params));
        for (int32_t token = 0; token < TOKENS; token++) {
            for (int32_t head = 0; head < Q_HEADS; head++) {
                const int64_t at = (token * Q_HEADS + head) * D * element;
                assert_rotated(q + at, q_given + at, &t, token, dtype);
            }
            for (int32_t head = 0; head < KV_HEADS; head++) {
                const int64_t at = (token * KV_HEADS + head) * (D + 3) * element;
                assert_rotated(k + at, k_given + at, &t, token, dtype);
                assert_memory_equal(k + at + D * element, k_given + at + D * element, (size_t)(3 * element));
            }
        }
    }
}

/* q and k in place and the whole cache, bit for bit, in every table, layout and cache dtype. */
static void test_fused_equals_the_two_steps(void **state)
{
    (void)state;
    static char q[2][MAX_BYTES], k[2][MAX_BYTES], v[MAX_BYTES], cache[2][CACHE_BYTES];
    static tables t;
    const int64_t slots[TOKENS] = {9, -1, 8, 40, 41, 1 << 20, 23, 17, 30};
    const float scales[KV_HEADS] = {0.25f, 0.01f};
    const fv_kernel_table *const *kernels;
    const int32_t num_tables = cpu_tables(&kernels);
    const fv_launch launch = serial_launch();
    uint32_t seed = 8;
    for (int32_t table = 0; table < num_tables; table++) {
        for (int32_t kind = 0; kind < NUM_CACHE_KINDS; kind++) {
            if (kind == FV_KV_LAYOUT_LATENT || kind == FV_KV_LAYOUT_LATENT_FP8_DS) continue; /* no k and v */
            make_tables(&t, kind % 2 ? D : 20, (fv_rope_style)(kind % 3 == 0), 0);
            t.positions_32[3] = -1; /* not rotated */
            const fv_dtype dtype = kind % 2 ? FV_DTYPE_BF16 : FV_DTYPE_F32;
            const int64_t element = (int64_t)fv_dtype_bytes(dtype);
            fill_random(q[0], dtype, TOKENS * Q_HEADS * D, 1, &seed);
            fill_random(k[0], dtype, TOKENS * KV_HEADS * (D + 3), 1, &seed);
            fill_random(v, dtype, TOKENS * KV_HEADS * D, 1, &seed);
            memcpy(q[1], q[0], MAX_BYTES);
            memcpy(k[1], k[0], MAX_BYTES);
            fv_rope_kv_write_params params[2] = {0};
            for (int32_t i = 0; i < 2; i++) {
                memset(cache[i], 0x77, CACHE_BYTES);
                params[i].rope = params_of(&t, q[i], k[i], dtype);
                params[i].write = (fv_kv_write_params){
                    .k = k[i],
                    .k_token_stride = params[i].rope.k.token_stride,
                    .k_head_stride = params[i].rope.k.head_stride,
                    .v = v,
                    .v_token_stride = KV_HEADS * D * element,
                    .v_head_stride = D * element,
                    .src_dtype = dtype,
                    .slot_mapping = slots,
                    .num_tokens = TOKENS,
                };
                const fv_dtype cache_dtype = cache_has_scales(kind) ? FV_DTYPE_I8
                                             : kind == 2            ? FV_DTYPE_F8_E5M2
                                             : kind == 4            ? FV_DTYPE_F8_E4M3
                                                                    : FV_DTYPE_NONE;
                make_cache(&params[i].write.cache, cache[i], kind, cache_dtype, NUM_BLOCKS);
                if (kind != 2) continue;
                params[i].write.k_scale = params[i].write.v_scale = scales;
                params[i].write.num_kv_scales = KV_HEADS;
            }
            must(kernels[table]->rope(&launch, &params[0].rope));
            must(kernels[table]->kv_write(&launch, &params[0].write));
            must(kernels[table]->rope_kv_write(&launch, &params[1]));
            assert_memory_equal(q[0], q[1], MAX_BYTES);
            assert_memory_equal(k[0], k[1], MAX_BYTES);
            assert_memory_equal(cache[0], cache[1], CACHE_BYTES);
        }
    }
}

/* The public functions on the CPU and on the null device, where a position outside is let be. */
static void test_public_functions(void **state)
{
    (void)state;
    static float q[TOKENS * Q_HEADS * D], k[TOKENS * KV_HEADS * D], v[TOKENS * KV_HEADS * D];
    static float before[TOKENS * KV_HEADS * D];
    static char cache[CACHE_BYTES];
    static tables t;
    const int64_t slots[TOKENS] = {9, 10, 11, 12, 13, 14, 15, 16, 17};
    fv_context *context;
    fv_device *device;
    fv_kv_view view;
    uint32_t seed = 9;
    must(fv_context_create(&context, NULL));
    must(fv_device_find(&device, context, "cpu"));
    make_tables(&t, D, FV_ROPE_HALF, 0);
    make_cache(&view, cache, FV_KV_LAYOUT_NB_2_BS_H_D, FV_DTYPE_F32, NUM_BLOCKS);
    fill_random(q, FV_DTYPE_F32, TOKENS * Q_HEADS * D, 1, &seed);
    fill_random(k, FV_DTYPE_F32, TOKENS * KV_HEADS * D, 1, &seed);
    memcpy(before, k, sizeof(k));
    const fv_tensor q_rows = fv_tensor_3d(q, FV_DTYPE_F32, TOKENS, Q_HEADS, D);
    const fv_tensor k_rows = fv_tensor_3d(k, FV_DTYPE_F32, TOKENS, KV_HEADS, D);
    const fv_tensor v_rows = fv_tensor_3d(v, FV_DTYPE_F32, TOKENS, KV_HEADS, D);
    must(fv_rope(device, &q_rows, NULL, &t.rotation, TOKENS, NULL));
    must(fv_rope_kv_write(device, NULL, &k_rows, &v_rows, &t.rotation, &view, slots, TOKENS, NULL, NULL, 0, NULL));
    for (int32_t token = 0; token < TOKENS; token++) {
        assert_rotated((char *)(k + token * KV_HEADS * D), (char *)(before + token * KV_HEADS * D), &t, token,
                       FV_DTYPE_F32);
    }
    const float *row = (const float *)(const void *)(cache + view.k.block_stride + 1 * view.k.slot_stride);
    assert_memory_equal(row, k, D * sizeof(float)); /* slot 9 is block 1, offset 1 */

    fv_rotation r = t.rotation;
#define REFUSED(change, says) \
    r = t.rotation;           \
    r.change;                 \
    refused(fv_rope(device, &q_rows, &k_rows, &r, TOKENS, NULL), FV_ERR_INVALID, says)
    REFUSED(struct_size = 4, "fv_rotation.struct_size is 4; this library knows");
    REFUSED(style = (fv_rope_style)5, "style is 5; accepted: 0 (half), 1 (interleaved)");
    REFUSED(rope_dim = 7, "rope_dim is 7");
    REFUSED(rope_dim = 64, "heads of q have 32 elements");
    REFUSED(row_stride = 3, "row_stride is 3");
    REFUSED(cos = NULL, "cos or sin is NULL");
    REFUSED(positions_64 = t.positions_64, "both of positions_32 and positions_64");
    REFUSED(positions_32 = NULL, "none of positions_32 and positions_64");
    REFUSED(max_position = 40, "the position of token 7 is 42; accepted: 0 to 39");
#undef REFUSED
    refused(fv_rope(device, NULL, NULL, &t.rotation, TOKENS, NULL), FV_ERR_INVALID, "neither q nor k");
    refused(fv_rope(device, &q_rows, &k_rows, NULL, TOKENS, NULL), FV_ERR_INVALID, "the rotation is NULL");
    refused(fv_rope(device, &q_rows, &k_rows, &t.rotation, TOKENS + 1, NULL), FV_ERR_INVALID,
            "q is float32 [9, 4, 32]");
    refused(fv_rope_kv_write(device, &q_rows, NULL, &v_rows, &t.rotation, &view, slots, TOKENS, NULL, NULL, 0, NULL),
            FV_ERR_INVALID, "k is none");
    fv_context_destroy(context);
}

static void test_on_the_null_device(void **state)
{
    (void)state;
    static float k[2 * 2 * KV_HEADS * D], cache_back[16];
    static tables t;
    struct {
        float k[2 * KV_HEADS * D], v[2 * KV_HEADS * D], cos[POSITIONS], sin[POSITIONS];
        int64_t positions[2], slots[2];
    } host = {.positions = {3, POSITIONS}, .slots = {1, -1}}, *at;
    fv_context *context;
    fv_device *device;
    fv_kv_view view;
    void *cache;
    uint32_t seed = 10;
    must(fv_context_create(&context, NULL));
    must(fv_device_find(&device, context, "null"));
    must(fv_device_alloc((void **)&at, device, sizeof(host)));
    must(fv_device_alloc(&cache, device, CACHE_BYTES));
    make_tables(&t, 2, FV_ROPE_HALF, 0);
    for (int32_t p = 0; p < POSITIONS; p++) {
        host.cos[p] = t.cos_sin[2 * p];
        host.sin[p] = t.cos_sin[2 * p + 1];
    }
    fill_random(host.k, FV_DTYPE_F32, 2 * KV_HEADS * D, 1, &seed);
    must(fv_device_copy_in(device, at, &host, sizeof(host), NULL));
    make_cache(&view, cache, FV_KV_LAYOUT_NB_2_BS_H_D, FV_DTYPE_F32, NUM_BLOCKS);
    const fv_rotation rotation = {.struct_size = sizeof(rotation),
                                  .rope_dim = 2,
                                  .cos = at->cos,
                                  .sin = at->sin,
                                  .max_position = POSITIONS,
                                  .positions_64 = at->positions};
    const fv_tensor k_rows = fv_tensor_3d(at->k, FV_DTYPE_F32, 2, KV_HEADS, D);
    const fv_tensor v_rows = fv_tensor_3d(at->v, FV_DTYPE_F32, 2, KV_HEADS, D);
    must(fv_rope_kv_write(device, NULL, &k_rows, &v_rows, &rotation, &view, at->slots, 2, NULL, NULL, 0, NULL));
    must(fv_device_copy_out(device, k, at->k, sizeof(host.k), NULL));
    must(fv_device_copy_out(device, cache_back, (char *)cache + view.k.slot_stride, sizeof(cache_back), NULL));
    must(fv_stream_synchronize(device, NULL));
    assert_float_equal(k[0], host.k[0] * host.cos[3] - host.k[1] * host.sin[3], 1e-6);
    assert_memory_equal(k + KV_HEADS * D, host.k + KV_HEADS * D, KV_HEADS * D * sizeof(float)); /* outside the tables */
    assert_memory_equal(cache_back, k, sizeof(cache_back));
    fv_device_free(device, at);
    fv_device_free(device, cache);
    fv_context_destroy(context);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rotates),
        cmocka_unit_test(test_fused_equals_the_two_steps),
        cmocka_unit_test(test_public_functions),
        cmocka_unit_test(test_on_the_null_device),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
