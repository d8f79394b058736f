/* Whole items through the emulated kernels, of tiles and of pairs of bf16, against the portable ones: numbers that are
 * infinite or NaN stay with the rows and heads that see them, though products mix what they hold with zeros. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdlib.h>

#include "core/float.h"
#include "kernels/cpu_tables.h"

enum { NUM_HEADS = 8, NUM_KV_HEADS = 4, SIZE = 64, MAX_TOKENS = 40 };

typedef struct scene {
    int32_t num_tokens;
    uint16_t q[MAX_TOKENS][NUM_HEADS][SIZE];
    uint16_t k[MAX_TOKENS][NUM_KV_HEADS][SIZE];
    uint16_t v[MAX_TOKENS][NUM_KV_HEADS][SIZE];
    float out[MAX_TOKENS][NUM_HEADS][SIZE];
} scene;

static void fill(uint16_t *to, int32_t num, uint32_t *state)
{
    for (int32_t i = 0; i < num; i++) {
        *state = *state * 1664525u + 1013904223u;
        to[i] = fv_bf16_of_f32((float)(int32_t)*state * 0x1p-31f);
    }
}

static void scene_init(scene *s, int32_t num_tokens)
{
    uint32_t state = 5;
    s->num_tokens = num_tokens;
    fill(&s->q[0][0][0], sizeof(s->q) / 2, &state);
    fill(&s->k[0][0][0], sizeof(s->k) / 2, &state);
    fill(&s->v[0][0][0], sizeof(s->v) / 2, &state);
}

/* Causal attention of all tokens, one item for all heads or, with many rows, one for each. */
static void attend(scene *s, const fv_kernel_table *table)
{
    const int32_t query_start[2] = {0, s->num_tokens}, seq_lens[1] = {s->num_tokens};
    const int32_t group = NUM_HEADS / NUM_KV_HEADS, is_few = s->num_tokens * group <= FV_DECODE_ROWS;
    fv_work_item items[NUM_KV_HEADS];
    for (int32_t i = 0; i < NUM_KV_HEADS; i++)
        items[i] = (fv_work_item){.num_tokens = s->num_tokens,
                                  .first_kv_head = i,
                                  .num_kv_heads = is_few ? NUM_KV_HEADS : 1,
                                  .end_key = s->num_tokens,
                                  .partial = -1};
    fv_attend_params params = {
        .q = s->q,
        .q_token_stride = NUM_HEADS * SIZE * 2,
        .q_head_stride = SIZE * 2,
        .out = s->out,
        .out_token_stride = NUM_HEADS * SIZE * 4,
        .out_head_stride = SIZE * 4,
        .dense = {.k = s->k,
                  .k_token_stride = NUM_KV_HEADS * SIZE * 2,
                  .k_head_stride = SIZE * 2,
                  .v = s->v,
                  .v_token_stride = NUM_KV_HEADS * SIZE * 2,
                  .v_head_stride = SIZE * 2,
                  .dtype = FV_DTYPE_BF16},
        .q_dtype = FV_DTYPE_BF16,
        .out_dtype = FV_DTYPE_F32,
        .num_heads = NUM_HEADS,
        .num_kv_heads = NUM_KV_HEADS,
        .head_size = SIZE,
        .v_head_size = SIZE,
        .scale = 0.5f,
        .context_parallel = {.world = 1, .interleave = 1},
        .num_seqs = 1,
        .query_start = query_start,
        .seq_lens = seq_lens,
        .items = items,
        .num_items = is_few ? 1 : NUM_KV_HEADS,
        .block_q = MAX_TOKENS,
        .tile_keys = 64,
    };
    const fv_attend_variant *variant = &table->attend_dense[0];
    params.scratch_bytes = variant->scratch_bytes(&params);
    params.scratch = aligned_alloc(64, params.scratch_bytes);
    assert_non_null(params.scratch);
    const fv_executor executor = {.num_workers = 1};
    assert_int_equal(variant->launch(&(fv_launch){.executor = &executor}, &params), FV_OK);
    free(params.scratch);
}

/* The portable table and `table`: NaN and infinity in the same places, other numbers close. Returns the number of rows
 * that have some. */
static int32_t compare(scene *s, const fv_kernel_table *table)
{
    static scene portable;
    portable = *s;
    const fv_kernel_table *const *tables;
    fv_cpu_tables(&tables, FV_ISA_PORTABLE);
    attend(&portable, tables[1]);
    attend(s, table);
    int32_t num_odd = 0;
    for (int32_t row = 0; row < s->num_tokens * NUM_HEADS; row++) {
        const float *a = s->out[row / NUM_HEADS][row % NUM_HEADS], *b = portable.out[row / NUM_HEADS][row % NUM_HEADS];
        int32_t odd = 0;
        for (int32_t d = 0; d < SIZE; d++) {
            assert_true(isfinite(a[d]) == isfinite(b[d]));
            odd |= !isfinite(a[d]);
            if (isfinite(a[d])) assert_true(fabsf(a[d] - b[d]) <= 0.01f);
        }
        num_odd += odd;
    }
    return num_odd;
}

static void run_table(int32_t num_tokens, const fv_kernel_table *table)
{
    static scene s;
    const uint16_t infinite = 0x7f80;
    const int32_t group = NUM_HEADS / NUM_KV_HEADS, last = num_tokens - 1;
    scene_init(&s, num_tokens);
    assert_int_equal(compare(&s, table), 0);

    s.v[last][1][7] = infinite; /* seen by the last token only, and by the heads of KV head 1 */
    assert_int_equal(compare(&s, table), group);

    scene_init(&s, num_tokens);
    s.k[last][2][3] = 0x7fc0; /* NaN */
    assert_int_equal(compare(&s, table), group);
}

static void run(int32_t num_tokens)
{
    run_table(num_tokens, &fv_cpu_emulated_amx);
    run_table(num_tokens, &fv_cpu_emulated_bf16);
}

static void few_rows_keep_to_themselves(void **state)
{
    (void)state;
    run(1);
    run(2);
    run(4);
}

static void a_strip_of_rows_keeps_to_itself(void **state)
{
    (void)state;
    run(6);
    run(8);
}

static void many_rows_keep_to_themselves(void **state)
{
    (void)state;
    run(20);
    run(MAX_TOKENS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(few_rows_keep_to_themselves),
        cmocka_unit_test(a_strip_of_rows_keeps_to_itself),
        cmocka_unit_test(many_rows_keep_to_themselves),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
