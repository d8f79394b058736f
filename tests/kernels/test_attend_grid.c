/* The static grid as a CPU's workers take it: its cells are all of the work, once, whatever the number of heads of a cell. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#define FV_ISA portable
#include "kernels/cpu/attend_item.h"

enum { MAX_SEQS = 4, NUM_SEGMENTS = 4, MAX_HEADS = 12, TILE_KEYS = 16 };

/* Decodes over 1k keys, or queries of query_len tokens; cells of `head_run` heads are expected. */
static void check_grid(int32_t num_seqs, int32_t query_len, int32_t num_kv_heads, int32_t num_workers, int32_t head_run)
{
    int32_t query_start[MAX_SEQS + 1] = {0}, seq_lens[MAX_SEQS];
    for (int32_t seq = 0; seq < num_seqs; seq++) {
        query_start[seq + 1] = query_start[seq] + query_len;
        seq_lens[seq] = 1024;
    }
    const fv_attend_params params = {
        .query_start = query_start,
        .seq_lens = seq_lens,
        .num_seqs = num_seqs,
        .num_heads = 4 * num_kv_heads,
        .num_kv_heads = num_kv_heads,
        .block_q = 4,
        .tile_keys = TILE_KEYS,
        .num_q_blocks = query_start[num_seqs] / 4 + num_seqs,
        .num_segments = NUM_SEGMENTS,
    };
    const fv_attend_grid grid = fv_attend_grid_of(&params, num_workers);
    assert_int_equal(grid.head_run, head_run);
    int32_t keys_of[MAX_SEQS][MAX_HEADS] = {{0}}; /* of all tokens */
    for (int64_t cell = 0; cell < grid.num_cells; cell++) {
        fv_work_item item;
        if (!fv_attend_grid_item(&item, &grid, cell)) continue;
        assert_in_range(item.num_kv_heads, 1, head_run);
        for (int32_t head = 0; head < item.num_kv_heads; head++)
            keys_of[item.seq][item.first_kv_head + head] += (item.end_key - item.first_key) * item.num_tokens;
    }
    for (int32_t seq = 0; seq < num_seqs; seq++) {
        for (int32_t head = 0; head < num_kv_heads; head++) assert_int_equal(keys_of[seq][head], 1024 * query_len);
    }
}

static void test_short_queries_keep_heads_together(void **state)
{
    (void)state;
    check_grid(1, 1, 8, 1, 8);
    check_grid(1, 4, 8, 2, 4); /* four segments, two cells of each: four for each worker */
    check_grid(4, 1, 8, 2, 8);
    check_grid(4, 1, 12, 16, 3);
    check_grid(1, 1, 8, 64, 1);
    check_grid(2, 1, 1, 2, 1);
}

static void test_long_queries_do_not(void **state)
{
    (void)state;
    check_grid(1, 5, 8, 1, 1);
    check_grid(2, 40, 3, 2, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_short_queries_keep_heads_together),
        cmocka_unit_test(test_long_queries_do_not),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
