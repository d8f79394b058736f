/* The block pool: every block is out at most once, the null block never. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "core/compiler.h"
#include "engine/block_pool.h"

static void test_hands_out_each_block_once(void **state)
{
    (void)state;
    enum { num_blocks = 9 };
    fv_block_pool pool;
    assert_int_equal(fv_block_pool_init(&pool, num_blocks), FV_OK);
    int32_t blocks[num_blocks];
    assert_true(fv_block_pool_acquire(blocks, &pool, 4));
    assert_true(fv_block_pool_acquire(blocks + 4, &pool, 5));
    int32_t seen[num_blocks + 1] = {0};
    for (int32_t i = 0; i < num_blocks; i++) {
        assert_in_range(blocks[i], 1, num_blocks);
        assert_int_equal(seen[blocks[i]]++, 0);
    }
    assert_int_equal(pool.num_free, 0);
    assert_int_equal(pool.max_used, num_blocks);
    fv_block_pool_deinit(&pool);
}

/* In ascending order, so that a pool touches little of its memory, but what came back last first. */
static void test_hands_out_returned_blocks_first(void **state)
{
    (void)state;
    fv_block_pool pool;
    assert_int_equal(fv_block_pool_init(&pool, 9), FV_OK);
    int32_t blocks[4];
    const int32_t first[] = {1, 2, 3}, then[] = {3, 1, 4, 5};
    assert_true(fv_block_pool_acquire(blocks, &pool, 3));
    assert_memory_equal(blocks, first, sizeof(first));
    fv_block_pool_release(&pool, (const int32_t[]){1, 3}, 2);
    assert_int_equal(pool.num_free, 8);
    assert_true(fv_block_pool_acquire(blocks, &pool, 4));
    assert_memory_equal(blocks, then, sizeof(then));
    assert_int_equal(pool.num_free, 4);
    fv_block_pool_deinit(&pool);
}

static void test_gives_all_or_none(void **state)
{
    (void)state;
    fv_block_pool pool;
    assert_int_equal(fv_block_pool_init(&pool, 3), FV_OK);
    int32_t blocks[4] = {-1, -1, -1, -1};
    assert_false(fv_block_pool_acquire(blocks, &pool, 4));
    for (int32_t i = 0; i < 4; i++) assert_int_equal(blocks[i], -1);
    assert_int_equal(pool.num_free, 3);
    assert_true(fv_block_pool_acquire(blocks, &pool, 0));
    assert_true(fv_block_pool_acquire(blocks, &pool, 2));
    assert_false(fv_block_pool_acquire(blocks + 2, &pool, 2));
    assert_true(fv_block_pool_acquire(blocks + 2, &pool, 1));
    fv_block_pool_deinit(&pool);
}

static void test_takes_blocks_back_in_any_order(void **state)
{
    (void)state;
    enum { num_blocks = 50, num_rounds = 2000 };
    fv_block_pool pool;
    assert_int_equal(fv_block_pool_init(&pool, num_blocks), FV_OK);
    int32_t held[num_blocks], num_held = 0;
    uint32_t random = 1;
    for (int32_t round = 0; round < num_rounds; round++) {
        random = random * 1664525u + 1013904223u;
        const int32_t count = (int32_t)(random >> 24) % 7;
        if (random >> 31) {
            const bool fits = count <= num_blocks - num_held;
            assert_int_equal(fv_block_pool_acquire(held + num_held, &pool, count), fits);
            if (fits) num_held += count;
        } else {
            const int32_t released = fv_min_i32(count, num_held);
            const int32_t first = released < num_held ? (int32_t)(random >> 8 & 0xff) % (num_held - released) : 0;
            fv_block_pool_release(&pool, held + first, released);
            memmove(held + first, held + first + released, (size_t)(num_held - first - released) * sizeof(*held));
            num_held -= released;
        }
        assert_int_equal(pool.num_free, num_blocks - num_held);
    }
    int32_t seen[num_blocks + 1] = {0};
    for (int32_t i = 0; i < num_held; i++) assert_int_equal(seen[held[i]]++, 0);
    fv_block_pool_deinit(&pool);
}

static void test_refuses_an_empty_pool(void **state)
{
    (void)state;
    fv_block_pool pool;
    assert_int_equal(fv_block_pool_init(&pool, 0), FV_ERR_INVALID);
    assert_non_null(strstr(fv_last_error(), "num_blocks is 0"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hands_out_each_block_once), cmocka_unit_test(test_hands_out_returned_blocks_first),
        cmocka_unit_test(test_gives_all_or_none),         cmocka_unit_test(test_takes_blocks_back_in_any_order),
        cmocka_unit_test(test_refuses_an_empty_pool),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
