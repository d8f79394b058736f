/* Latent attention of the reference: against its non-absorbed expansion, the 656-byte entry, rotation
 * at reading. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "core/float.h"
#include "reference/scene.h"

/* DeepSeek-V2's attention on small sizes, not absorbed: k = [c W_UK, r], v = c W_UV, against
 * mla_decode of [q_nope W_UK^T, q_rope] with W_UV applied to its output. */
enum { LORA = 32, ROPE = 64, NOPE = 12, VALUE = 10, ENTRY = LORA + ROPE, MLA_HEADS = 3 };

static void test_mla_matches_expansion(void **state)
{
    (void)state;
    scene *s = scene_create(1, 2, (int32_t[]){1, 3}, (int32_t[]){19, 7}, MLA_HEADS, 1, ENTRY, 3);
    fv_attend_params *p = &s->params;
    p->v_head_size = LORA;
    assert_int_equal(fv_kv_view_init(&p->cache, s->cache, FV_KV_LAYOUT_LATENT, FV_DTYPE_F32, MAX_BLOCKS, 3, 1, ENTRY),
                     FV_OK);
    scene_write_cache(s);
    static float w_uk[MLA_HEADS][NOPE][LORA], w_uv[MLA_HEADS][LORA][VALUE], q_nope[4][MLA_HEADS][NOPE];
    scene_fill_random(s, &w_uk[0][0][0], sizeof(w_uk) / 4);
    scene_fill_random(s, &w_uv[0][0][0], sizeof(w_uv) / 4);
    scene_fill_random(s, &q_nope[0][0][0], sizeof(q_nope) / 4);
    for (int32_t t = 0; t < 4; t++) {
        for (int32_t h = 0; h < MLA_HEADS; h++) {
            for (int32_t l = 0; l < LORA; l++) {
                float *q = &s->q[(t * MLA_HEADS + h) * ENTRY + l];
                *q = 0;
                for (int32_t d = 0; d < NOPE; d++) *q += q_nope[t][h][d] * w_uk[h][d][l];
            }
        }
    }
    assert_int_equal(fv_reference_mla_variants[0].launch(NULL, p), FV_OK);

    for (int32_t t = 0; t < 4; t++) {
        const int32_t r = t > 0;
        const int32_t num_keys = r == 0 ? 19 : 7 - (3 - t); /* causal */
        for (int32_t h = 0; h < MLA_HEADS; h++) {
            double sum = 0, expected[VALUE] = {0};
            for (int32_t j = 0; j < num_keys; j++) {
                const float *entry = s->k[r] + j * ENTRY;
                double score = 0;
                for (int32_t d = 0; d < NOPE; d++) {
                    double k = 0;
                    for (int32_t l = 0; l < LORA; l++) k += (double)entry[l] * w_uk[h][d][l];
                    score += q_nope[t][h][d] * k;
                }
                for (int32_t d = 0; d < ROPE; d++)
                    score += (double)s->q[(t * MLA_HEADS + h) * ENTRY + LORA + d] * entry[LORA + d];
                const double weight = exp(p->scale * score);
                sum += weight;
                for (int32_t d = 0; d < VALUE; d++)
                    for (int32_t l = 0; l < LORA; l++) expected[d] += weight * entry[l] * w_uv[h][l][d];
            }
            for (int32_t d = 0; d < VALUE; d++) {
                double value = 0;
                for (int32_t l = 0; l < LORA; l++)
                    value += (double)s->out[(t * MLA_HEADS + h) * ENTRY + l] * w_uv[h][l][d];
                assert_near(value, expected[d] / sum, 1e-5);
            }
            assert_near(s->lse[t * MLA_HEADS + h], log(sum), 1e-5);
        }
    }
    scene_destroy(s);
}

/* Keys that lie unrotated and are rotated at reading = keys rotated before they are written. */
static void test_rotation_at_reading(void **state)
{
    (void)state;
    static float cosines[MAX_KEYS][ROPE / 2], sines[MAX_KEYS][ROPE / 2], plain[4 * MLA_HEADS * ENTRY];
    scene *s = scene_create(1, 2, (int32_t[]){1, 3}, (int32_t[]){19, 7}, MLA_HEADS, 1, ENTRY, 3);
    fv_attend_params *p = &s->params;
    p->v_head_size = LORA;
    assert_int_equal(fv_kv_view_init(&p->cache, s->cache, FV_KV_LAYOUT_LATENT, FV_DTYPE_F32, MAX_BLOCKS, 3, 1, ENTRY),
                     FV_OK);
    for (int32_t j = 0; j < MAX_KEYS; j++) {
        for (int32_t i = 0; i < ROPE / 2; i++) {
            const double angle = j * pow(10000, -2.0 * i / ROPE);
            cosines[j][i] = (float)cos(angle);
            sines[j][i] = (float)sin(angle);
        }
    }
    scene_write_cache(s);
    p->rotation = (fv_key_rotation){cosines[0], sines[0], ROPE, MAX_KEYS};
    assert_int_equal(fv_reference_mla_variants[0].launch(NULL, p), FV_OK);
    memcpy(plain, s->out, sizeof(plain));

    for (int32_t r = 0; r < 2; r++) {
        for (int32_t j = 0; j < s->seq_lens[r]; j++) {
            float *rope = s->k[r] + j * ENTRY + LORA;
            for (int32_t i = 0; i < ROPE / 2; i++) {
                const float low = rope[i], high = rope[i + ROPE / 2];
                rope[i] = low * cosines[j][i] - high * sines[j][i];
                rope[i + ROPE / 2] = high * cosines[j][i] + low * sines[j][i];
            }
        }
    }
    scene_write_cache(s);
    p->rotation = (fv_key_rotation){0};
    assert_int_equal(fv_reference_mla_variants[0].launch(NULL, p), FV_OK);
    for (int32_t t = 0; t < 4 * MLA_HEADS; t++)
        for (int32_t d = 0; d < LORA; d++) assert_near(s->out[t * ENTRY + d], plain[t * ENTRY + d], 1e-6);
    scene_destroy(s);
}

/* The 656-byte entry: written, then read by hand, then attended to as the same numbers in fp32. */
static void test_fp8_ds_entry(void **state)
{
    (void)state;
    scene *s = scene_create(1, 1, (int32_t[]){1}, (int32_t[]){5}, 2, 1, 576, 2);
    fv_attend_params *p = &s->params;
    p->v_head_size = 512;
    uint8_t *entries = calloc(MAX_BLOCKS * 2, 656);
    float *read_back = s->v[0];
    assert_non_null(entries);
    assert_int_equal(
        fv_kv_view_init(&p->cache, entries, FV_KV_LAYOUT_LATENT_FP8_DS, FV_DTYPE_F8_E4M3, MAX_BLOCKS, 2, 1, 576),
        FV_OK);
    scene_write_cache(s);
    for (int32_t j = 0; j < 5; j++) {
        const uint8_t *entry = entries + (s->table[j / 2] * 2 + j % 2) * 656;
        for (int32_t d = 0; d < 512; d++) {
            float scale;
            memcpy(&scale, entry + 512 + d / 128 * 4, 4);
            read_back[j * 576 + d] = scale * fv_f32_of_e4m3(entry[d]);
            assert_near(read_back[j * 576 + d], s->k[0][j * 576 + d], 448 * scale / 16);
        }
        for (int32_t d = 0; d < 64; d++) {
            uint16_t half;
            memcpy(&half, entry + 528 + d * 2, 2);
            read_back[j * 576 + 512 + d] = fv_f32_of_bf16(half);
            assert_near(read_back[j * 576 + 512 + d], s->k[0][j * 576 + 512 + d], 1.0 / 256);
        }
    }
    assert_int_equal(fv_reference_mla_variants[0].launch(NULL, p), FV_OK);
    memcpy(s->k[0], read_back, 5 * 576 * 4);
    memcpy(s->v[0], read_back, 5 * 576 * 4);
    scene_assert_dense(s, 1e-5);
    free(entries);
    scene_destroy(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mla_matches_expansion),
        cmocka_unit_test(test_rotation_at_reading),
        cmocka_unit_test(test_fp8_ds_entry),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
