/* kv_copy against the reference, byte by byte. */
#include <string.h>

#include "check/cache_case.h"
#include "check/cache_ops.h"
#include "reference/reference.h"

#define MAX_PAIRS 6

typedef struct copy_case {
    check_arena arena;
    check_cache dst, src; /* the same memory where the copy is within a cache */
    int32_t within;
    int64_t *dst_blocks, *src_blocks; /* [MAX_PAIRS] */
    fv_kv_copy_params params;
} copy_case;

/* Block i of a random order of the cache's blocks, the null block among them. */
static int64_t block_of(const check_cache *cache, int32_t i, int32_t step, int32_t start)
{
    return cache->first_block + (start + (int64_t)i * step) % cache->num_blocks;
}

/* The first blocks of one order are destinations, in a copy within a cache the next ones are sources; else the
 * sources may repeat, as where sequences part. */
static void build_pairs(copy_case *test, check_random *random)
{
    static const int32_t steps[] = {1, 2, 4, 7, 8}; /* coprime to the number of blocks */
    const int32_t step = CHECK_RANDOM_PICK(random, steps), start = check_random_int(random, 0, 1000);
    const int32_t most = (int32_t)fv_min_i64(MAX_PAIRS, test->dst.num_blocks / (test->within ? 2 : 1));
    test->params.num_pairs = check_random_int(random, 0, most);
    for (int32_t i = 0; i < test->params.num_pairs; i++) {
        test->dst_blocks[i] = block_of(&test->dst, i, step, start);
        const int32_t source = test->within ? check_random_int(random, most, 2 * most - 1)
                                            : check_random_int(random, 0, 1000);
        test->src_blocks[i] = block_of(&test->src, source, step, start);
        if (test->within && check_random_chance(random, 10)) test->src_blocks[i] = test->dst_blocks[i];
        const int64_t wild[] = {-1, INT64_MIN, INT64_MAX, test->dst.view.num_blocks + test->src.view.num_blocks};
        if (check_random_chance(random, 10)) test->dst_blocks[i] = CHECK_RANDOM_PICK(random, wild);
        if (check_random_chance(random, 10)) test->src_blocks[i] = CHECK_RANDOM_PICK(random, wild);
    }
}

static void build_copy(copy_case *test, check_random *random)
{
    static const int32_t counts[] = {1, 3, 5, 9, 11}; /* of blocks */
    check_cache_shape shape;
    *test = (copy_case){.within = check_random_chance(random, 40)};
    check_cache_shape_random(&shape, random, 1);
    check_cache_init(&test->dst, &test->arena, &shape, CHECK_RANDOM_PICK(random, counts), random);
    test->src = test->dst;
    if (!test->within) check_cache_init(&test->src, &test->arena, &shape, CHECK_RANDOM_PICK(random, counts), random);
    test->dst_blocks = check_arena_alloc(&test->arena, MAX_PAIRS * sizeof(int64_t));
    test->src_blocks = check_arena_alloc(&test->arena, MAX_PAIRS * sizeof(int64_t));
    build_pairs(test, random);
    test->params.dst = test->dst.view;
    test->params.src = test->src.view;
    test->params.dst_blocks = test->dst_blocks;
    test->params.src_blocks = test->src_blocks;
}

static void judge_copy(check_result *result, const copy_case *test, const char *expected)
{
    const fv_kv_view *view = &test->dst.view;
    if (memcmp(test->dst.memory, expected, test->dst.bytes) != 0) {
        check_result_fail(result,
                          "%d pairs of blocks, layout %s of %s: the cache is not what the reference makes of it",
                          test->params.num_pairs, fv_kv_layout_name(view->layout), fv_dtype_name(view->dtype));
    } else if (!test->within && memcmp(test->src.memory, test->src.given, test->src.bytes) != 0) {
        check_result_fail(result, "the source is changed");
    } else if (!check_arena_fences_whole(&test->arena)) {
        check_result_fail(result, "written beyond the end");
    }
}

void check_run_kv_copy(check_result *result, const check_lane *lane, const fv_kernel_table *table, uint64_t seed,
                       int32_t index)
{
    check_random random = check_random_of(seed ^ 0xc0b1, (uint64_t)index);
    check_result_init(result, "kv_copy", "%s/kv_copy", table->name);
    check_arena memory = {0}; /* of the case itself, whose arrays the kernel reads */
    copy_case *test = check_arena_alloc(&memory, sizeof(*test));
    build_copy(test, &random);
    char *expected = check_arena_alloc(&test->arena, test->dst.bytes);
    fv_reference_kv_copy(NULL, &test->params);
    memcpy(expected, test->dst.memory, test->dst.bytes);
    memcpy(test->dst.memory, test->dst.given, test->dst.bytes);
    const fv_launch launch = check_lane_launch(lane);
    if (check_lane_ran(lane, table->kv_copy(&launch, &test->params)) != FV_OK)
        check_result_fail(result, "%s", fv_last_error());
    else
        judge_copy(result, test, expected);
    check_arena_clear(&test->arena);
    check_arena_clear(&memory);
}
