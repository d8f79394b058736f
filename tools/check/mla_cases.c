/* The published grids of MLA decoding, absorbed: test_triton_decode_attention.py, test_mla_decode_cpu.py,
 * test_flashmla.py, test_rocm_aiter_mla_*.py, test_mla_backends.py, and FlashMLA's own correctness grid. The
 * batches are smaller, the shapes and lengths are theirs. Prefill and extend on expanded latents, which need
 * weights and a GEMM, are the group mla_weights (run_mla_weights.c). */
#include "check/grid.h"

static check_case mla_case(int32_t num_heads, int32_t block_size, fv_dtype dtype)
{
    check_case test = grid_case((heads){1, 1}, 64, block_size, dtype);
    test.problem.kind = FV_ATTENTION_MLA;
    test.problem.mla = (fv_mla_shape){
        .num_heads = num_heads,
        .kv_lora_rank = 512,
        .qk_rope_head_dim = 64,
        .qk_nope_head_dim = 128,
        .v_head_dim = 128,
        .absorbed = 1,
    };
    test.problem.kv_layout = FV_KV_LAYOUT_LATENT;
    test.problem.returns_lse = 1;
    return test;
}

/* The caches of a latent: plain, fp8 with a scale, the 656-byte entry. */
static void set_cache(check_case *test, int32_t which)
{
    static const fv_dtype small[] = {FV_DTYPE_F8_E4M3, FV_DTYPE_F8_E5M2};
    if (which == 1 || which == 2) grid_set_fp8(test, small[which - 1]);
    if (which != 3) return;
    test->problem.kv_layout = FV_KV_LAYOUT_LATENT_FP8_DS;
    test->problem.kv_dtype = FV_DTYPE_F8_E4M3;
}

static void mla_decode(check_case_list *list)
{
    static const int32_t num_heads[] = {1, 3, 9, 16, 63, 64, 126, 128};
    static const int32_t block_sizes[] = {1, 16, 64, 17};
    static const fv_dtype dtypes[] = {FV_DTYPE_BF16, FV_DTYPE_F16, FV_DTYPE_F32};
    const lens_list lens[] = {
        LENS(C(1, 1027), C(1, 1), C(1, 20), C(1, 0)),
        LENS(C(2, 140), C(4, 300), C(1, 4096)),
        LENS(C(8, 8), C(8, 45), C(8, 520), C(3, 1025)),
    };
    for (int32_t cell = 0; cell < 8 * 4 * 3; cell++) {
        check_case test = mla_case(num_heads[cell % 8], block_sizes[(cell / 8 + cell) % 4], dtypes[cell / 3 % 3]);
        set_cache(&test, cell / 7 % 4);
        grid_add_both_paths(list, "mla_decode", test, &lens[cell / 32]);
    }
}

/* test_mla_backends.py */
static void mla_backends(check_case_list *list)
{
    static const int32_t num_heads[] = {128, 32, 16, 8};
    const lens_list lens[] = {
        LENS(C(1, 32), C(1, 40)),
        LENS(C(8, 32), C(8, 40)),
        LENS(C(1, 32), C(1, 40), C(5, 48), C(5, 56)),
        LENS(C(1, 128), C(1, 256), C(1, 512), C(1, 1024)),
        LENS(C(16, 256), C(16, 512)),
        LENS(C(1, 512), C(1, 1024), C(1, 2048), C(7, 512), C(7, 1024), C(7, 2048)),
        LENS(C(4, 128), C(4, 256), C(4, 512), C(4, 1024)),
        LENS(C(8, 512), C(8, 1024), C(8, 2048)),
        LENS(C(32, 1568), C(8, 520), C(8, 8), C(16, 80), C(16, 96), C(8, 8)),
        LENS(C(64, 1024)),
    };
    for (int32_t cell = 0; cell < 10 * 4; cell++) {
        check_case test = mla_case(num_heads[cell % 4], cell % 3 ? 16 : 64, FV_DTYPE_BF16);
        set_cache(&test, cell / 10 % 2);
        grid_add_both_paths(list, "mla_backends", test, &lens[cell / 4]);
    }
}

/* Ranks of a context-parallel group, windows, batches that are not causal. */
static void mla_masks(check_case_list *list)
{
    const lens_list lens = LENS(C(1, 300), C(4, 77), C(8, 641), {5, 90, 1}, C(1, 3));
    for (int32_t cell = 0; cell < 2 * 3 * 4; cell++) {
        check_case test = mla_case(cell % 2 ? 128 : 16, 16, FV_DTYPE_BF16);
        test.problem.not_causal = 1;
        test.problem.window = cell / 2 % 3 == 1 ? 50 : 0;
        const int32_t world = cell / 6;
        if (world > 0) test.problem.context_parallel = (fv_context_parallel){world + 1, world, cell % 3 ? 1 : 16};
        grid_add_both_paths(list, "mla_masks", test, &lens);
    }
}

/* Lists of a fixed length, as under a captured graph. */
static void mla_static_lists(check_case_list *list)
{
    static const int32_t num_heads[] = {128, 64, 32, 16, 3};
    const lens_list lens[] = {
        LENS(C(1, 3000), C(1, 70), C(1, 1), C(1, 0), C(1, 333)),
        LENS(C(1, 1024), C(1, 1024), C(1, 1024)),
        LENS(C(2, 1300), C(1, 40), C(2, 64)),
    };
    for (int32_t cell = 0; cell < 5 * 4; cell++) {
        check_case test = mla_case(num_heads[cell % 5], cell % 3 ? 64 : 16,
                                   cell % 4 == 3 ? FV_DTYPE_F16 : FV_DTYPE_BF16);
        set_cache(&test, cell / 5);
        test.options.static_list = 1;
        test.problem.returns_lse = cell % 2;
        grid_add(list, "mla_static_lists", &test, &lens[cell % 3]);
    }
}

/* One sequence, which devices of many multiprocessors cut into dozens of pieces. */
static void mla_pieces(check_case_list *list)
{
    const lens_list lens = LENS(C(1, 2500));
    for (int32_t cell = 0; cell < 2; cell++) {
        const check_case test = mla_case(16, cell ? 64 : 16, FV_DTYPE_BF16);
        grid_add(list, "mla_pieces", &test, &lens);
    }
}

/* The 656-byte entry: every number of strips of rows, keys that some rows do not see, blocks of keys with ends; the first are
 * small enough for the emulated tables. */
static void mla_entries(check_case_list *list)
{
    static const int32_t num_heads[] = {128, 16, 8, 24, 32, 48, 64, 80, 100, 112, 4};
    static const int32_t block_sizes[] = {64, 16, 1};
    const lens_list lens[] = {
        LENS(C(1, 130), C(1, 33), C(1, 1)),
        LENS(C(2, 40), C(3, 33), C(1, 0)),
        LENS(C(5, 9), C(1, 97)),
        LENS(C(1, 300)),
        LENS(C(1, 1500), C(1, 257), C(1, 33), C(1, 1)),
        LENS(C(2, 700), C(5, 90), C(1, 4000)),
        LENS(C(7, 7), C(16, 300), C(3, 513), C(1, 0)),
    };
    for (int32_t cell = 0; cell < 11 * 7; cell++) {
        check_case test = mla_case(num_heads[cell % 11], block_sizes[cell / 4 % 3],
                                   cell % 6 == 5 ? FV_DTYPE_F16 : FV_DTYPE_BF16);
        set_cache(&test, 3);
        test.problem.window = cell % 5 == 4 ? 20 : 0;
        test.problem.returns_lse = cell % 2;
        if (cell % 4 == 3) test.problem.out_dtype = FV_DTYPE_F32;
        grid_add_both_paths(list, "mla_entries", test, &lens[cell % 7]);
    }
}

void check_mla_cases(check_case_list *list)
{
    mla_static_lists(list);
    mla_decode(list);
    mla_backends(list);
    mla_masks(list);
    mla_pieces(list);
    mla_entries(list);
}
