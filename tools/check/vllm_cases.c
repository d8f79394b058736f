/* The published test grids of vLLM's attention backends, as tables: same shapes, lengths and features,
 * judged by our own accuracy rule. Each function is one of their test files, tests/kernels/attention/
 * unless said otherwise. Two things are smaller than there: caches have only the blocks that are used
 * (their 32768 blocks check offsets, which our int64 strides and the random cases do), and the batch of
 * 533 prefills of 533 tokens is one of 8. fp8 queries do not exist here; where those tests quantise
 * them, the cache alone is fp8, with random scales. */
#include "check/grid.h"

/* test_triton_unified_attention.py */
static void triton_unified(check_case_list *list)
{
    static const heads shapes[] = {{4, 4}, {8, 2}, {5, 1}};
    static const int32_t head_sizes[] = {96, 128, 256};
    static const int32_t windows[] = {0, 64, 128, 256};
    const lens_list lens[] = {LENS(C(1, 1328), C(5, 18), C(129, 463)), LENS(C(1, 523), C(1, 37), C(1, 2011))};
    for (int32_t cell = 0; cell < 3 * 3 * 2 * 4 * 2 * 2; cell++) {
        check_case test = grid_case(shapes[cell % 3], head_sizes[cell / 3 % 3], 16, FV_DTYPE_BF16);
        test.problem.window = windows[cell / 18 % 4];
        test.problem.soft_cap = cell / 72 % 2 ? 50 : 0;
        if (cell / 144 % 2) grid_set_fp8(&test, FV_DTYPE_F8_E4M3);
        grid_add_both_paths(list, "triton_unified", test, &lens[cell / 9 % 2]);
    }
    const lens_list ones = LENS_TIMES(533, C(1, 1)), prefills = LENS_TIMES(8, C(533, 533));
    grid_add_both_paths(list, "triton_unified", grid_case(shapes[1], 128, 16, FV_DTYPE_BF16), &ones);
    grid_add_both_paths(list, "triton_unified", grid_case(shapes[1], 128, 16, FV_DTYPE_BF16), &prefills);
}

/* test_triton_unified_attention_diffkv.py */
static void triton_unified_diffkv(check_case_list *list)
{
    static const heads shapes[] = {{4, 4}, {8, 2}, {5, 1}};
    const lens_list lens[] = {LENS(C(1, 1328), C(5, 18), C(129, 463)), LENS(C(1, 523), C(1, 37), C(1, 2011))};
    for (int32_t cell = 0; cell < 3 * 2 * 2; cell++) {
        check_case test = grid_case(shapes[cell % 3], cell / 3 % 2 ? 192 : 128, 16, FV_DTYPE_BF16);
        test.problem.mha.v_head_size = 128;
        test.problem.kv_layout = FV_KV_LAYOUT_STRIDED;
        grid_add_both_paths(list, "triton_unified_diffkv", test, &lens[cell / 6]);
    }
}

/* test_mixed_causal_attn.py: every pattern of flags. */
static void mixed_causal(check_case_list *list)
{
    static const heads shapes[] = {{4, 4}, {8, 2}};
    for (int32_t cell = 0; cell < 2 * 8; cell++) {
        check_case test = grid_case(shapes[cell % 2], 128, 16, FV_DTYPE_BF16);
        test.problem.not_causal = 1;
        const lens_list lens = LENS({1, 128, cell / 2 & 1}, {5, 64, cell / 4 & 1}, {1, 256, cell / 8 & 1});
        grid_add_both_paths(list, "mixed_causal", test, &lens);
    }
}

/* test_rocm_aiter_unified_attn.py: mixed, decode and prefill batches. */
static void aiter_unified(check_case_list *list)
{
    const lens_list lens[] = {
        LENS(C(1, 128), C(5, 18), C(129, 463)),   LENS(C(10, 256), C(5, 64), C(32, 128)),
        LENS(C(1, 1024), C(5, 18), C(129, 1328)), LENS(C(1, 128), C(1, 256), C(1, 384), C(1, 512)),
        LENS(C(1, 1024), C(1, 1536), C(1, 2048)), LENS(C(256, 256), C(128, 512)),
        LENS(C(64, 128), C(32, 256), C(16, 512)), LENS(C(256, 1024), C(128, 2048)),
    };
    for (int32_t cell = 0; cell < 8 * 2 * 2 * 2; cell++) {
        const fv_dtype dtype = cell / 32 ? FV_DTYPE_F16 : FV_DTYPE_BF16;
        const check_case test = grid_case((heads){8, 8}, cell / 8 % 2 ? 256 : 128, cell / 16 % 2 ? 64 : 16, dtype);
        grid_add(list, "aiter_unified", &test, &lens[cell % 8]);
    }
}

/* test_flash_attn.py */
static void flash(check_case_list *list)
{
    static const heads shapes[] = {{4, 4}, {8, 2}};
    static const int32_t head_sizes[] = {40, 72, 80, 128, 256};
    const lens_list lens[] = {LENS(C(1, 1328), C(5, 18), C(129, 463)), LENS(C(1, 523), C(1, 37), C(1, 2011))};
    for (int32_t cell = 0; cell < 2 * 5 * 2 * 2; cell++) {
        check_case test = grid_case(shapes[cell % 2], head_sizes[cell / 2 % 5], 16, FV_DTYPE_BF16);
        test.problem.window = cell / 20 ? 256 : 0;
        grid_add(list, "flash", &test, &lens[cell / 10 % 2]);
    }
}

/* test_cascade_flash_attn.py: its second batch without the repetition by 100. */
static void cascade(check_case_list *list)
{
    static const heads shapes[] = {{4, 4}, {8, 2}, {16, 2}};
    static const int32_t head_sizes[] = {128, 192, 256};
    const lens_list lens[] = {LENS(C(129, 871), C(18, 280), C(37, 988), C(1023, 2304), C(1, 257)),
                              LENS_TIMES(4, C(1, 1023), C(1, 879), C(1, 778), C(1, 1777))};
    for (int32_t cell = 0; cell < 3 * 3 * 2; cell++) {
        check_case test = grid_case(shapes[cell % 3], head_sizes[cell / 3 % 3], 16,
                                    cell % 2 ? FV_DTYPE_F16 : FV_DTYPE_BF16);
        test.problem.soft_cap = cell / 2 % 2 ? 50 : 0;
        grid_add(list, "cascade", &test, &lens[cell / 9]);
    }
}

/* test_flashinfer_trtllm_attention.py: sinks and window at its lengths, scaled down by 8. */
static void sinks(check_case_list *list)
{
    static const heads shapes[] = {{64, 8}, {40, 8}};
    const lens_list lens[] = {LENS_TIMES(4, C(1, 512)), LENS(C(128, 512), C(1, 300), C(77, 400), C(4, 511))};
    for (int32_t cell = 0; cell < 2 * 2 * 2 * 2 * 2; cell++) {
        check_case test = grid_case(shapes[cell % 2], 128, 16, FV_DTYPE_BF16);
        test.problem.kv_layout = FV_KV_LAYOUT_PACKED_HND;
        test.problem.window = cell / 4 % 2 ? 128 : 0;
        test.problem.soft_cap = cell / 8 % 2 ? 50 : 0;
        test.problem.sinks = cell / 16;
        grid_add_both_paths(list, "sinks", test, &lens[cell / 2 % 2]);
    }
}

/* test_attention.py (paged decode): ALiBi and fp8. */
static void paged_decode(check_case_list *list)
{
    static const heads shapes[] = {{32, 8}, {40, 40}, {64, 8}};
    const lens_list lens = LENS(C(1, 313), C(1, 7), C(1, 1024), C(1, 64), C(1, 801), C(1, 65), C(1, 1));
    for (int32_t cell = 0; cell < 3 * 2 * 2 * 2 * 2; cell++) {
        check_case test = grid_case(shapes[cell % 3], cell / 3 % 2 ? 128 : 64, cell / 6 % 2 ? 32 : 16, FV_DTYPE_F16);
        test.problem.alibi = cell / 12 % 2 ? FV_ALIBI_LINEAR : FV_ALIBI_NONE;
        test.problem.kv_layout = FV_KV_LAYOUT_X_PACKED;
        if (cell / 24) grid_set_fp8(&test, FV_DTYPE_F8_E4M3);
        grid_add(list, "paged_decode", &test, &lens);
    }
}

/* test_cpu_attn.py */
static void cpu_attn(check_case_list *list)
{
    static const heads shapes[] = {{4, 4}, {8, 2}, {9, 3}};
    static const struct {
        int32_t head_size, block_size;
    } sizes[] = {{96, 96}, {128, 128}, {512, 128}, {80, 48}, {96, 48}, {112, 48}, {128, 48}};
    static const fv_dtype dtypes[] = {FV_DTYPE_BF16, FV_DTYPE_F16, FV_DTYPE_F32};
    const lens_list lens[] = {
        LENS(C(1, 213), C(1, 1), C(1, 312), C(1, 7), C(1, 7812)),
        LENS(C(2345, 2345), C(5, 5), C(3, 16), C(134, 5131)),
        LENS(C(992, 2456), C(1, 1234), C(98, 1145), C(1, 4162), C(2345, 2345)),
    };
    for (int32_t batch = 0; batch < 3; batch++) {
        for (int32_t cell = 0; cell < 7 * 3; cell++) {
            check_case test = grid_case(shapes[cell % 3], sizes[cell / 3].head_size, sizes[cell / 3].block_size,
                                        dtypes[(cell + batch) % 3]);
            for (int32_t feature = 0; feature < (batch == 0 ? 7 : 1); feature++) {
                check_case with = test;
                const int32_t which = batch == 0 ? feature : cell % 7; /* the long ones: one feature each */
                if (which == 1) with.problem.window = 256;
                if (which == 2) with.problem.soft_cap = 50;
                if (which == 3) with.problem.alibi = FV_ALIBI_LINEAR;
                if (which == 4) with.problem.sinks = 1;
                if (which == 5) grid_set_fp8(&with, FV_DTYPE_F8_E4M3);
                if (which == 6) grid_set_fp8(&with, FV_DTYPE_F8_E5M2);
                grid_add(list, "cpu_attn", &with, &lens[batch]);
            }
        }
    }
    const lens_list encoder = LENS({1, 1, 1}, {678, 678, 1}, {367, 367, 1}, {145, 145, 1}, {36, 36, 1},
                                   {1162, 1162, 1});
    check_case test = grid_case(shapes[1], 96, 96, FV_DTYPE_F32);
    test.problem.not_causal = 1;
    grid_add(list, "cpu_attn", &test, &encoder);
    test.problem.window = 256;
    grid_add(list, "cpu_attn", &test, &encoder);
}

/* tests/v1/attention/test_attention_backends.py: BATCH_SPECS with Llama-3-8B's shape split over 1, 2
 * and 4 ranks, both memory orders of vLLM's packed cache, and a window. */
static void backend_batches(check_case_list *list)
{
    static const heads shapes[] = {{32, 8}, {16, 4}, {8, 2}};
    static const fv_kv_layout layouts[] = {FV_KV_LAYOUT_PACKED_NHD, FV_KV_LAYOUT_PACKED_HND, FV_KV_LAYOUT_NB_2_BS_H_D};
    const lens_list lens[] = {
        LENS(C(1, 32), C(1, 40)),
        LENS(C(8, 32), C(8, 40)),
        LENS(C(1, 32), C(1, 40), C(5, 48), C(5, 56)),
        LENS_TIMES(2, C(1, 128), C(1, 256), C(1, 512), C(1, 1024)),
        LENS(C(16, 256), C(16, 512), C(16, 1024), C(16, 2048)),
        LENS(C(1, 512), C(1, 1024), C(1, 2048), C(7, 512), C(7, 1024), C(7, 2048)),
        LENS_TIMES(32, C(1, 2048)),
        LENS_TIMES(8, C(32, 4096)),
        LENS(C(1, 1024), C(1, 2048), C(1, 4096), C(32, 1024), C(32, 2048), C(32, 4096)),
        LENS(C(1, 1024)),
        LENS(C(64, 1024)),
        LENS({32, 32, 1}, {64, 64, 1}, {128, 128, 1}, {256, 256, 1}),
        LENS({256, 256, 1}, {512, 512, 1}, {1024, 1024, 1}, {2048, 2048, 1}),
    };
    for (int32_t batch = 0; batch < FV_ARRAY_LEN(lens); batch++) {
        for (int32_t cell = 0; cell < 3 * 2 * 2; cell++) {
            check_case test = grid_case(shapes[cell % 3], 128, 16, FV_DTYPE_BF16);
            test.problem.kv_layout = layouts[(batch + cell) % 3];
            test.problem.not_causal = lens[batch].lens[0].not_causal;
            test.problem.window = cell / 6 ? 127 : 0;
            if (cell / 3 % 2) grid_set_fp8(&test, FV_DTYPE_F8_E4M3);
            grid_add(list, "backend_batches", &test, &lens[batch]);
        }
    }
}

void check_vllm_cases(check_case_list *list)
{
    triton_unified(list);
    triton_unified_diffkv(list);
    mixed_causal(list);
    aiter_unified(list);
    flash(list);
    cascade(list);
    sinks(list);
    paged_decode(list);
    cpu_attn(list);
    backend_batches(list);
}
