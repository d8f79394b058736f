/* Grids of our own, for what the published ones lack: prefixes that sequences really share, and scales for each
 * token and head. Every backend runs them, in its own layout where it refuses that of the case. */
#include "check/grid.h"

/* Cascade always. Each batch has groups of decodes, parted by a prefill or by a sequence of another length, and
 * extends that share a prefix too, which only some backends take for a group. */
static void shared_prefix(check_case_list *list)
{
    static const heads shapes[] = {{8, 2}, {4, 4}, {5, 1}, {16, 2}};
    static const struct {
        int32_t head_size, block_size;
    } sizes[] = {{64, 16}, {128, 32}, {96, 48}, {256, 16}};
    static const fv_dtype dtypes[] = {FV_DTYPE_BF16, FV_DTYPE_F16, FV_DTYPE_F32};
    const lens_list lens[] = {
        LENS(C(1, 700), C(1, 650), C(1, 901), C(40, 40), C(1, 300), C(1, 333), C(7, 7), C(5, 420), C(9, 500),
             C(1, 430)),
        LENS(C(1, 97), C(1, 98), C(1, 150), C(1, 1023), C(1, 1023), C(3, 3), C(1, 65), C(1, 66), C(1, 67), C(1, 68),
             C(1, 69), C(1, 70)),
        LENS(C(17, 500), C(1, 601), C(1, 602), C(60, 700), C(1, 1), C(1, 1300), C(1, 1200)),
    };
    static const int32_t num_groups[] = {2, 2, 2}; /* of decodes */
    for (int32_t cell = 0; cell < 3 * 4 * 6; cell++) {
        const int32_t feature = cell / 12, batch = cell % 3;
        check_case test = grid_case(shapes[cell % 4], sizes[(cell + feature) % 4].head_size,
                                    sizes[(cell + feature) % 4].block_size, dtypes[(cell + batch) % 3]);
        test.options.cascade = FV_CASCADE_ALWAYS;
        test.problem.returns_lse = 1;
        test.shared_keys = batch == 1 ? 600 : 1000;
        test.min_groups = feature == 2 ? 0 : num_groups[batch];
        if (feature == 1 || feature == 5) test.problem.sinks = 1;
        if (feature == 2) test.problem.window = 100; /* then members see different keys: no group is taken */
        if (feature == 3 || feature == 5) test.problem.soft_cap = 30;
        if (feature == 4) grid_set_fp8(&test, batch == 1 ? FV_DTYPE_F8_E5M2 : FV_DTYPE_F8_E4M3);
        grid_add_both_paths(list, "shared_prefix", test, &lens[batch]);
    }
}

/* Verification of several tokens is decode where the threshold says so: groups of those, too. The last two batches have
 * nothing else, so that Q blocks are of few rows: fewer than such a group has. */
static void shared_prefix_verify(check_case_list *list)
{
    const lens_list few[] = {
        LENS(C(4, 700), C(4, 650)),
        LENS(C(4, 600), C(4, 601), C(3, 602), C(4, 650), C(4, 700), C(2, 900), C(4, 600), C(4, 1000)),
    };
    const lens_list lens = LENS(C(4, 700), C(4, 650), C(3, 901), C(30, 30), C(4, 300), C(1, 333));
    for (int32_t cell = 0; cell < 2 * 3; cell++) {
        check_case test = grid_case((heads){8, cell % 2 ? 8 : 2}, 128, 16, FV_DTYPE_BF16);
        test.options.cascade = FV_CASCADE_ALWAYS;
        test.options.decode_threshold = 4;
        test.shared_keys = 1000;
        test.min_groups = 2;
        test.problem.sinks = cell / 2 == 1;
        if (cell / 2 == 2) grid_set_fp8(&test, FV_DTYPE_F8_E4M3);
        grid_add_both_paths(list, "shared_prefix_verify", test, &lens);
    }
    for (int32_t cell = 0; cell < 2 * 3; cell++) {
        static const fv_dtype dtypes[] = {FV_DTYPE_BF16, FV_DTYPE_F16, FV_DTYPE_F32};
        const heads shape = cell % 2 ? (heads){8, 8} : (heads){32, 8};
        check_case test = grid_case(shape, 128, 16, dtypes[cell / 2]);
        test.options.cascade = FV_CASCADE_ALWAYS;
        test.options.decode_threshold = 4;
        test.shared_keys = 512;
        test.min_groups = 1;
        grid_add_both_paths(list, "shared_prefix_verify", test, &few[cell % 2]);
    }
}

/* Every small dtype, with the scales in planes of their own (in each backend's layout) and inside the block. */
static void token_head_scales(check_case_list *list)
{
    static const heads shapes[] = {{8, 2}, {4, 4}, {5, 1}};
    static const int32_t head_sizes[] = {64, 128, 96, 256};
    static const fv_dtype small[] = {FV_DTYPE_I8, FV_DTYPE_F8_E4M3, FV_DTYPE_F8_E5M2};
    static const fv_dtype dtypes[] = {FV_DTYPE_BF16, FV_DTYPE_F16, FV_DTYPE_F32};
    const lens_list lens[] = {
        LENS(C(1, 400), C(5, 218), C(129, 463), C(64, 64), C(1, 33)),
        LENS(C(1, 523), C(1, 37), C(1, 1300), C(4, 90)),
    };
    for (int32_t cell = 0; cell < 3 * 4 * 2 * 2; cell++) {
        check_case test = grid_case(shapes[cell % 3], head_sizes[cell / 3 % 4], 16, dtypes[cell / 2 % 3]);
        test.problem.kv_dtype = small[(cell + cell / 3) % 3];
        test.problem.kv_scaling = FV_KV_SCALING_PER_TOKEN_HEAD;
        test.scales_inside = cell / 12 % 2;
        if (test.scales_inside) test.problem.kv_layout = FV_KV_LAYOUT_STRIDED;
        test.problem.window = cell % 5 == 4 ? 64 : 0;
        test.problem.soft_cap = cell % 7 == 5 ? 50 : 0;
        test.problem.sinks = cell % 4 == 3;
        test.problem.returns_lse = 1;
        grid_add_both_paths(list, "token_head_scales", test, &lens[cell / 24]);
    }
}

/* Some tokens of each query and some query heads for each KV head: up to 16 rows and a few more, where kernels for few rows end.
 * Pages of 16 and others, rows that see different keys within one tile. */
static void verification(check_case_list *list)
{
    static const heads shapes[] = {{32, 8}, {8, 2}, {16, 1}, {12, 4}, {14, 1}, {20, 4}};
    static const struct {
        int32_t head_size, block_size;
    } sizes[] = {{128, 16}, {64, 32}, {128, 1}, {256, 16}, {96, 48}};
    static const fv_dtype dtypes[] = {FV_DTYPE_BF16, FV_DTYPE_BF16, FV_DTYPE_F16};
    const lens_list lens[] = {
        LENS(C(4, 700), C(4, 5), C(3, 901), C(4, 64), C(1, 333), C(5, 130)),
        LENS(C(4, 1203), C(2, 97), C(4, 4)),
        LENS(C(1, 1024), C(1, 1), C(1, 17), C(1, 777)),
    };
    for (int32_t cell = 0; cell < 6 * 5 * 3; cell++) {
        const int32_t feature = cell / 6 % 7;
        check_case test = grid_case(shapes[cell % 6], sizes[cell % 5].head_size, sizes[cell % 5].block_size,
                                    dtypes[cell / 30]);
        if (feature == 1) test.problem.window = 100;
        if (feature == 2) test.problem.soft_cap = 30;
        if (feature == 3) grid_set_fp8(&test, FV_DTYPE_F8_E4M3);
        if (feature == 4) test.problem.sinks = 1;
        test.problem.returns_lse = cell % 2;
        grid_add(list, "verification", &test, &lens[cell / 2 % 3]);
    }
}

/* More decodes than a device works on at once, over entries of one byte: pieces taper, and some devices take two heads side
 * by side. */
static void many_decodes(check_case_list *list)
{
    static const heads shapes[] = {{32, 8}, {16, 8}, {8, 8}, {32, 4}};
    static const fv_dtype small[] = {FV_DTYPE_F8_E4M3, FV_DTYPE_F8_E5M2, FV_DTYPE_I8};
    const lens_list lens = LENS_TIMES(10, C(1, 313), C(1, 7), C(1, 500), C(1, 64), C(1, 401), C(1, 65), C(1, 1));
    for (int32_t cell = 0; cell < 3 * 4; cell++) {
        check_case test = grid_case(shapes[cell % 4], 128, cell / 2 % 2 ? 64 : 16,
                                    cell / 3 % 2 ? FV_DTYPE_BF16 : FV_DTYPE_F16);
        grid_set_fp8(&test, small[cell % 3]);
        test.problem.window = cell % 5 == 4 ? 100 : 0;
        test.problem.sinks = cell % 6 == 5;
        test.problem.returns_lse = cell / 4 % 2;
        grid_add(list, "many_decodes", &test, &lens);
    }
}

/* Few queries of about one length, which several lanes of a device share. */
static void equal_decodes(check_case_list *list)
{
    static const heads shapes[] = {{32, 8}, {64, 8}, {8, 8}, {8, 1}};
    const lens_list lens[] = {LENS(C(1, 1024)), LENS(C(1, 777), C(1, 780)), LENS_TIMES(4, C(1, 300), C(1, 301)),
                              LENS(C(1, 2000), C(1, 1999), C(1, 1987), C(1, 2013))};
    for (int32_t cell = 0; cell < 4 * 4 * 2; cell++) {
        check_case test = grid_case(shapes[cell % 4], 128, cell / 2 % 2 ? 64 : 16,
                                    cell / 3 % 2 ? FV_DTYPE_BF16 : FV_DTYPE_F16);
        if (cell / 16) grid_set_fp8(&test, cell % 3 ? FV_DTYPE_F8_E4M3 : FV_DTYPE_F8_E5M2);
        test.problem.sinks = cell % 6 == 5;
        test.problem.returns_lse = cell / 4 % 2;
        grid_add(list, "equal_decodes", &test, &lens[cell / 4 % 4]);
    }
}

/* Decodes by lists of a fixed length, as under a captured graph: long ones among short ones, verification, nothing to do. */
static void static_lists(check_case_list *list)
{
    static const heads shapes[] = {{32, 8}, {8, 8}, {16, 1}, {5, 1}};
    static const struct {
        int32_t head_size, block_size;
    } sizes[] = {{128, 16}, {128, 64}, {64, 16}, {256, 32}, {96, 17}};
    const lens_list lens[] = {
        LENS(C(1, 3000), C(1, 70), C(1, 1), C(1, 0), C(1, 333)),
        LENS_TIMES(10, C(1, 313), C(1, 7), C(1, 500), C(1, 64)),
        LENS(C(1, 1024)),
        LENS(C(1, 1500), C(2, 40), C(1, 700), C(2, 900)),
    };
    for (int32_t cell = 0; cell < 4 * 4 * 3; cell++) {
        const int32_t size = cell % 5, feature = cell / 4 % 6;
        check_case test = grid_case(shapes[cell % 4], sizes[size].head_size, sizes[size].block_size,
                                    cell / 3 % 2 ? FV_DTYPE_BF16 : FV_DTYPE_F16);
        test.options.static_list = 1;
        if (feature == 1 || feature == 2) grid_set_fp8(&test, feature == 1 ? FV_DTYPE_F8_E4M3 : FV_DTYPE_F8_E5M2);
        if (feature == 3) test.problem.window = 100;
        if (feature == 4) test.problem.soft_cap = 30;
        test.problem.sinks = cell % 7 == 5;
        test.problem.returns_lse = cell % 2;
        grid_add(list, "static_lists", &test, &lens[(cell + cell / 16) % 4]);
    }
}

/* Weights that are all nearly equal, of many keys: errors of their sums that do not average out show. Small enough for the
 * emulated tables. */
static void equal_scores(check_case_list *list)
{
    static const heads shapes[] = {{1, 1}, {2, 1}, {4, 1}, {3, 1}};
    static const fv_dtype dtypes[] = {FV_DTYPE_BF16, FV_DTYPE_F32, FV_DTYPE_F16};
    for (int32_t cell = 0; cell < 4 * 6; cell++) {
        const heads shape = shapes[cell % 4];
        const lens_list lens = LENS(C(1, 30000 / shape.q), C(4, 2000 / shape.q));
        check_case test = grid_case(shape, 64, cell % 5 ? 16 : 32, dtypes[cell % 3]);
        test.spread = CHECK_SPREAD_FLAT;
        test.problem.returns_lse = 1;
        test.options.path = cell % 2 ? FV_PATH_2D : FV_PATH_AUTO;
        if (cell / 4 % 3 == 1) grid_set_fp8(&test, cell / 12 ? FV_DTYPE_I8 : FV_DTYPE_F8_E4M3);
        if (cell / 4 % 3 == 2) test.problem.kv_layout = FV_KV_LAYOUT_X_PACKED;
        grid_add(list, "equal_scores", &test, &lens);
    }
}

/* Scores beyond fp32, of zeros too, whose scores are 0 however large the scale: few rows and many, of which only CPUs promise
 * numbers. */
static void huge_scores(check_case_list *list)
{
    static const heads shapes[] = {{1, 1}, {6, 2}, {6, 3}, {4, 1}, {12, 1}};
    static const fv_dtype small[] = {FV_DTYPE_F8_E4M3, FV_DTYPE_NONE, FV_DTYPE_F8_E5M2, FV_DTYPE_I8};
    static const fv_dtype dtypes[] = {FV_DTYPE_F32, FV_DTYPE_BF16, FV_DTYPE_F16};
    static const float scales[] = {1e37f, 1e38f, 3.4e38f, -1e38f};
    const lens_list lens = LENS(C(1, 130), C(1, 67), C(3, 40), C(20, 90));
    for (int32_t cell = 0; cell < 5 * 4 * 3; cell++) {
        check_case test = grid_case(shapes[cell % 5], 64, 16, dtypes[cell % 3]);
        if (small[cell % 4]) grid_set_fp8(&test, small[cell % 4]);
        test.huge_scores = test.odd_rows = 1;
        test.problem.scale = scales[cell / 5 % 4];
        test.problem.soft_cap = cell / 3 % 2 ? 40 : 0;
        test.problem.returns_lse = 1;
        grid_add(list, "huge_scores", &test, &lens);
    }
}

void check_own_cases(check_case_list *list)
{
    equal_scores(list);
    huge_scores(list);
    static_lists(list);
    many_decodes(list);
    equal_decodes(list);
    verification(list);
    shared_prefix(list);
    shared_prefix_verify(list);
    token_head_scales(list);
}
