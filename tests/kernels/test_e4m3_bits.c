/* Few rows over e4m3 by level avx2: by its bits, where the CPU takes subnormal numbers at full speed (FV_FEW_E4M3_BITS), and by
 * way of fp16, against sums of doubles. All 256 bytes are in the cache; NaN where no row sees it, and where one does. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/cpu.h"
#include "core/float.h"
#include "fovea/view.h"
#include "kernels/cpu_tables.h"
#include "support/attend_run.h"

#if defined(__x86_64__)
#include <xmmintrin.h>

enum { MAX_TOKENS = 4, MAX_SIZE = 128, NUM_KEYS = 150, BLOCK = 16, NUM_BLOCKS = 10, MAX_HEADS = 8, DAZ = 1 << 6 };

typedef struct scene {
    int32_t num_kv_heads, group, num_tokens, size;
    float v_scale, scale;
    fv_kv_view view;
    int32_t query_start[2], seq_lens[1], table[NUM_BLOCKS];
    uint8_t cache[2 * NUM_BLOCKS * BLOCK * MAX_HEADS * MAX_SIZE];
    float q[MAX_TOKENS][MAX_HEADS][MAX_SIZE];
    float out[MAX_TOKENS][MAX_HEADS][MAX_SIZE];
} scene;

static float next(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return (float)(int32_t)*state * 0x1p-31f;
}

static uint8_t *row_of(scene *s, const fv_kv_plane *plane, int32_t key, int32_t head)
{
    return (uint8_t *)plane->data + s->table[key / BLOCK] * plane->block_stride + head * plane->head_stride +
           key % BLOCK * plane->slot_stride;
}

static int32_t is_nan(uint8_t byte) { return (byte & 0x7f) == 0x7f; }

static scene *scene_of(int32_t num_kv_heads, int32_t group, int32_t num_tokens, int32_t size)
{
    static scene s;
    uint32_t state = 5;
    memset(&s, 0, sizeof(s));
    s.num_kv_heads = num_kv_heads;
    s.group = group;
    s.num_tokens = num_tokens;
    s.size = size;
    s.v_scale = 1.0f;
    s.scale = 0x1p-9f;
    s.query_start[1] = num_tokens;
    s.seq_lens[0] = NUM_KEYS;
    for (int32_t i = 0; i < NUM_BLOCKS; i++) s.table[i] = NUM_BLOCKS - 1 - i;
    memset(s.cache, 0xff, sizeof(s.cache)); /* NaN */
    s.view.struct_size = sizeof(s.view);
    assert_int_equal(fv_kv_view_init(&s.view, s.cache, FV_KV_LAYOUT_NB_2_BS_H_D, FV_DTYPE_F8_E4M3, NUM_BLOCKS, BLOCK,
                                     num_kv_heads, size),
                     FV_OK);
    uint8_t byte = 0;
    for (int32_t key = 0; key < NUM_KEYS; key++) {
        for (int32_t head = 0; head < num_kv_heads; head++) {
            uint8_t *k = row_of(&s, &s.view.k, key, head), *v = row_of(&s, &s.view.v, key, head);
            for (int32_t d = 0; d < size; d++, byte++) {
                k[d] = is_nan(byte) ? 0x81 : byte; /* the smallest number */
                v[d] = is_nan((uint8_t)(byte * 7)) ? 1 : (uint8_t)(byte * 7);
                if (key % 3 == 0) k[d] &= 0x87, v[d] &= 0x87; /* subnormal numbers alone */
            }
            byte += 3;
        }
    }
    for (int32_t token = 0; token < num_tokens; token++)
        for (int32_t head = 0; head < num_kv_heads * group; head++)
            for (int32_t d = 0; d < size; d++) s.q[token][head][d] = next(&state);
    return &s;
}

static void attend(scene *s, int32_t subnormals_are_fast)
{
    const fv_work_item item = {
        .num_tokens = s->num_tokens, .num_kv_heads = s->num_kv_heads, .end_key = NUM_KEYS, .partial = -1};
    const fv_attend_params params = {
        .q = s->q,
        .q_token_stride = sizeof(s->q[0]),
        .q_head_stride = sizeof(s->q[0][0]),
        .out = s->out,
        .out_token_stride = sizeof(s->out[0]),
        .out_head_stride = sizeof(s->out[0][0]),
        .cache = s->view,
        .v_scale = &s->v_scale,
        .num_kv_scales = 1,
        .block_table = s->table,
        .block_table_stride = NUM_BLOCKS,
        .q_dtype = FV_DTYPE_F32,
        .out_dtype = FV_DTYPE_F32,
        .num_heads = s->num_kv_heads * s->group,
        .num_kv_heads = s->num_kv_heads,
        .head_size = s->size,
        .v_head_size = s->size,
        .scale = s->scale,
        .context_parallel = {.world = 1, .interleave = 1},
        .subnormals_are_fast = (int16_t)subnormals_are_fast,
        .num_seqs = 1,
        .query_start = s->query_start,
        .seq_lens = s->seq_lens,
        .num_items = 1,
        .items = &item,
        .block_q = MAX_TOKENS,
        .tile_keys = 64,
    };
    memset(s->out, 0xff, sizeof(s->out));
    const fv_kernel_table *const *tables;
    assert_int_equal(fv_cpu_tables(&tables, FV_ISA_AVX2), FV_ISA_AVX2 + 2); /* behind the reference */
    const fv_kernel_table *avx2 = tables[FV_ISA_AVX2 + 1];
    attend_run_variant(&params, NULL, 0, avx2, &avx2->attend_paged[0]);
}

static void judge_row(scene *s, int32_t token, int32_t head)
{
    const int32_t kv_head = head / s->group, position = NUM_KEYS - s->num_tokens + token;
    double scores[NUM_KEYS], max = -INFINITY, sum = 0, out[MAX_SIZE] = {0}, size[MAX_SIZE] = {0};
    for (int32_t key = 0; key <= position; key++) {
        const uint8_t *k = row_of(s, &s->view.k, key, kv_head);
        scores[key] = 0;
        for (int32_t d = 0; d < s->size; d++)
            scores[key] += (double)s->scale * s->q[token][head][d] * fv_f32_of_e4m3(k[d]);
        max = fmax(max, scores[key]);
    }
    for (int32_t key = 0; key <= position; key++) {
        const uint8_t *v = row_of(s, &s->view.v, key, kv_head);
        const double weight = exp(scores[key] - max);
        sum += weight;
        for (int32_t d = 0; d < s->size; d++) {
            out[d] += weight * s->v_scale * fv_f32_of_e4m3(v[d]);
            size[d] += weight * s->v_scale * fabs(fv_f32_of_e4m3(v[d]));
        }
    }
    for (int32_t d = 0; d < s->size; d++)
        assert_true(fabs(s->out[token][head][d] - out[d] / sum) <= 1e-5 * size[d] / sum);
}

static void judge(scene *s)
{
    for (int32_t token = 0; token < s->num_tokens; token++)
        for (int32_t head = 0; head < s->num_kv_heads * s->group; head++) judge_row(s, token, head);
}

static void both_forms_are_right(void **state)
{
    (void)state;
    if (fv_cpu_isa() < FV_ISA_AVX2) skip();
    const int32_t shapes[][4] = {{2, 1, 1, 128}, {2, 2, 1, 64},  {2, 3, 1, 64}, {2, 3, 3, 128},
                                 {1, 4, 1, 128}, {2, 4, 3, 128}, {1, 5, 1, 96}, {2, 4, 1, 80},
                                 {2, 3, 1, 72},  {1, 2, 2, 8},   {1, 3, 1, 24}, {1, 6, 1, 40}};
    for (int32_t i = 0; i < FV_ARRAY_LEN(shapes); i++) {
        scene *s = scene_of(shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3]);
        for (int32_t is_fast = 0; is_fast < 2; is_fast++) {
            attend(s, is_fast);
            judge(s);
        }
    }
}

/* Whatever the scales are: 2^-120 is taken back in parts. */
static void scales_may_be_far_from_one(void **state)
{
    (void)state;
    if (fv_cpu_isa() < FV_ISA_AVX2) skip();
    const float scales[][2] = {{0x1p-40f, 0x1p40f}, {0x1p40f, 0x1p-40f}, {0x1p-60f, 1.0f}, {0x1p78f, 0x1p30f}};
    for (int32_t i = 0; i < FV_ARRAY_LEN(scales); i++) {
        scene *s = scene_of(2, 4, 1, 64);
        s->scale *= scales[i][0];
        s->v_scale = scales[i][1];
        for (int32_t head = 0; head < 8; head++)
            for (int32_t d = 0; d < 64; d++) s->q[0][head][d] = s->q[0][head][d] / scales[i][0];
        attend(s, 1);
        judge(s);
    }
}

/* A process whose subnormal numbers are zeros has those of e4m3 all the same, by the other form: its bits. */
static void zeros_for_denormals_are_not_asked(void **state)
{
    (void)state;
    if (fv_cpu_isa() < FV_ISA_AVX2) skip();
    scene *s = scene_of(2, 4, 1, 128);
    static float plain[MAX_TOKENS][MAX_HEADS][MAX_SIZE], fast[MAX_TOKENS][MAX_HEADS][MAX_SIZE];
    attend(s, 0);
    memcpy(plain, s->out, sizeof(plain));
    attend(s, 1);
    memcpy(fast, s->out, sizeof(fast));
    assert_memory_not_equal(plain, fast, sizeof(plain)); /* the order of sums is another */
    const unsigned int control = _mm_getcsr();
    _mm_setcsr(control | DAZ);
    attend(s, 1);
    _mm_setcsr(control);
    assert_memory_equal(plain, s->out, sizeof(plain));
}

/* NaN in a key, whatever its sign, makes the row NaN, in a value that column. */
static void nan_stays_nan(void **state)
{
    (void)state;
    if (fv_cpu_isa() < FV_ISA_AVX2) skip();
    for (int32_t column = 0; column < 64; column++) {
        for (int32_t sign = 0; sign < 2; sign++) {
            scene *s = scene_of(2, 4, 1, 64);
            row_of(s, &s->view.v, 70, 1)[column] = sign ? 0xff : 0x7f;
            attend(s, 1);
            for (int32_t head = 0; head < 8; head++)
                for (int32_t d = 0; d < 64; d++)
                    assert_int_equal(isnan(s->out[0][head][d]) != 0, head >= 4 && d == column);
            s = scene_of(2, 4, 1, 64);
            row_of(s, &s->view.k, 3, 0)[column] = sign ? 0xff : 0x7f;
            attend(s, 1);
            for (int32_t head = 0; head < 8; head++)
                for (int32_t d = 0; d < 64; d++) assert_int_equal(isnan(s->out[0][head][d]) != 0, head < 4);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(both_forms_are_right),
        cmocka_unit_test(scales_may_be_far_from_one),
        cmocka_unit_test(zeros_for_denormals_are_not_asked),
        cmocka_unit_test(nan_stays_nan),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
#else
int main(void) { return 0; }
#endif
