/* kv_copy: copies within a device, in every layout, and the swap between a device and the host. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kvcache/kv_block_runs.h"
#include "ops/ops_fixture.h"

enum { NUM_BLOCKS = 6, HOST_BLOCKS = 5, NUM_PAIRS = 3 };

static void fill_bytes(char *memory, uint32_t seed)
{
    for (int32_t i = 0; i < CACHE_BYTES; i++) memory[i] = (char)next_random(&seed);
}

/* All tables make the bytes that the reference makes, which goes element by element. */
static void test_tables_agree(void **state)
{
    (void)state;
    static char cache[CACHE_BYTES], other[CACHE_BYTES], expected[CACHE_BYTES];
    const fv_kernel_table *const *tables;
    const int32_t num_tables = cpu_tables(&tables);
    const fv_launch launch = serial_launch();
    const int64_t dst_blocks[] = {4, 1, NUM_BLOCKS, 5, -1, 5}, src_blocks[] = {2, 3, 0, INT64_MAX, 2, 0};
    for (int32_t kind = 0; kind < NUM_CACHE_KINDS; kind++) {
        fv_kv_copy_params params = {.dst_blocks = dst_blocks, .src_blocks = src_blocks, .num_pairs = 6};
        make_cache(&params.dst, cache, kind, FV_DTYPE_NONE, NUM_BLOCKS);
        for (int32_t source = 0; source < 3; source++) { /* one block: K and V may lie together there */
            if (source == 0)
                params.src = params.dst;
            else
                make_cache(&params.src, other, kind, FV_DTYPE_NONE, source == 1 ? HOST_BLOCKS : 1);
            for (int32_t table = 0; table < num_tables; table++) {
                fill_bytes(cache, 1);
                fill_bytes(other, 2);
                must(tables[table]->kv_copy(&launch, &params));
                if (table == 0) memcpy(expected, cache, sizeof(cache));
                assert_memory_equal(cache, expected, sizeof(cache));
            }
            fill_bytes(cache, 1);
            assert_memory_not_equal(cache, expected, sizeof(cache));
        }
    }
}

/* Layouts that keep a block, or its K and V, together are copied in one or two runs. */
static void test_runs(void **state)
{
    (void)state;
    static char cache[CACHE_BYTES];
    const int64_t num_runs[] = {[FV_KV_LAYOUT_NB_2_BS_H_D] = 1,
                                [FV_KV_LAYOUT_2_NB_BS_H_D] = 2,
                                [FV_KV_LAYOUT_X_PACKED] = 2,
                                [FV_KV_LAYOUT_SHUFFLED] = 2,
                                [FV_KV_LAYOUT_PACKED_NHD] = 1,
                                [FV_KV_LAYOUT_PACKED_HND] = 1,
                                [FV_KV_LAYOUT_LATENT] = 1,
                                [FV_KV_LAYOUT_LATENT_FP8_DS] = 1,
                                [9] = 4,
                                [10] = 1,
                                [11] = 1};
    for (int32_t kind = 1; kind < NUM_CACHE_KINDS; kind++) {
        fv_kv_view view;
        fv_kv_block_runs runs;
        make_cache(&view, cache, kind, FV_DTYPE_NONE, NUM_BLOCKS);
        fv_kv_block_runs_init(&runs, &view, &view);
        int64_t found = 0;
        for (int32_t i = 0; i < runs.num_parts; i++) found += runs.parts[i].num_runs;
        assert_int_equal(found, num_runs[kind]);
    }
}

/* Blocks go out to the host and come back elsewhere; `device` may keep its memory out of reach. */
static void swap_on(fv_device *device)
{
    static char before[CACHE_BYTES], after[CACHE_BYTES], host[CACHE_BYTES], expected[CACHE_BYTES];
    const fv_launch launch = serial_launch();
    void *memory;
    fv_stream stream;
    must(fv_device_alloc(&memory, device, CACHE_BYTES));
    must(fv_stream_create(&stream, device));
    for (int32_t kind = 0; kind < NUM_CACHE_KINDS; kind++) {
        const int64_t out[NUM_PAIRS] = {2, 5, 1}, on_host[NUM_PAIRS] = {0, 4, 2}, back[NUM_PAIRS] = {3, 1, 4};
        fv_kv_view view, host_view, expected_view;
        make_cache(&view, memory, kind, FV_DTYPE_NONE, NUM_BLOCKS);
        make_cache(&host_view, host, kind, FV_DTYPE_NONE, HOST_BLOCKS);
        make_cache(&expected_view, expected, kind, FV_DTYPE_NONE, NUM_BLOCKS);
        fill_bytes(before, 3);
        fill_bytes(host, 4);
        must(fv_device_copy_in(device, memory, before, CACHE_BYTES, stream));
        must(fv_kv_copy_out(device, &host_view, on_host, &view, out, NUM_PAIRS, stream));
        must(fv_kv_copy_in(device, &view, back, &host_view, on_host, NUM_PAIRS, stream));
        must(fv_device_copy_out(device, after, memory, CACHE_BYTES, stream));
        must(fv_stream_synchronize(device, stream));

        memcpy(expected, before, CACHE_BYTES);
        fv_kv_view source_view;
        make_cache(&source_view, before, kind, FV_DTYPE_NONE, NUM_BLOCKS);
        const fv_kernel_table *const *tables;
        cpu_tables(&tables);
        const fv_kv_copy_params params = {expected_view, source_view, back, out, NUM_PAIRS};
        must(tables[0]->kv_copy(&launch, &params));
        assert_memory_equal(after, expected, CACHE_BYTES);
    }
    fv_stream_destroy(device, stream);
    fv_device_free(device, memory);
}

static void test_swap(void **state)
{
    fv_device *device;
    must(fv_device_find(&device, *state, "cpu"));
    swap_on(device);
    must(fv_device_find(&device, *state, "null"));
    swap_on(device);
}

/* Copy on write on a device whose arrays the host cannot read, replayed by a graph. */
static void test_copy_on_the_null_device(void **state)
{
    static char before[CACHE_BYTES], after[CACHE_BYTES];
    const int64_t blocks[2] = {4, 2}; /* dst, src */
    fv_device *device;
    fv_stream stream;
    fv_graph graph;
    void *memory;
    int64_t *blocks_at;
    fv_kv_view view;
    must(fv_device_find(&device, *state, "null"));
    must(fv_device_alloc(&memory, device, CACHE_BYTES));
    must(fv_device_alloc((void **)&blocks_at, device, sizeof(blocks)));
    must(fv_stream_create(&stream, device));
    make_cache(&view, memory, FV_KV_LAYOUT_PACKED_HND, FV_DTYPE_NONE, NUM_BLOCKS);
    fill_bytes(before, 5);
    must(fv_device_copy_in(device, memory, before, CACHE_BYTES, stream));
    must(fv_device_copy_in(device, blocks_at, blocks, sizeof(blocks), stream));
    must(fv_graph_begin(device, stream));
    must(fv_kv_copy(device, &view, blocks_at, &view, blocks_at + 1, 1, stream));
    must(fv_graph_end(&graph, device, stream));
    must(fv_graph_launch(device, graph, stream));
    must(fv_device_copy_out(device, after, memory, CACHE_BYTES, stream));
    must(fv_stream_synchronize(device, stream));
    const int64_t block = view.k.block_stride;
    memcpy(before + 4 * block, before + 2 * block, (size_t)block);
    assert_memory_equal(after, before, CACHE_BYTES);
    fv_graph_destroy(device, graph);
    fv_stream_destroy(device, stream);
    fv_device_free(device, memory);
    fv_device_free(device, blocks_at);
}

static void test_refusals(void **state)
{
    static char cache[CACHE_BYTES];
    const int64_t good[1] = {1}, bad[1] = {NUM_BLOCKS};
    fv_device *device;
    fv_kv_view view, other;
    must(fv_device_find(&device, *state, "cpu"));
    make_cache(&view, cache, FV_KV_LAYOUT_PACKED_NHD, FV_DTYPE_NONE, NUM_BLOCKS);
    must(fv_kv_copy(device, &view, NULL, &view, NULL, 0, NULL));
    refused(fv_kv_copy(NULL, &view, good, &view, good, 1, NULL), FV_ERR_INVALID, "device is NULL");
    refused(fv_kv_copy(device, NULL, good, &view, good, 1, NULL), FV_ERR_INVALID, "view is NULL");
    refused(fv_kv_copy(device, &view, NULL, &view, good, 1, NULL), FV_ERR_INVALID, "dst_blocks or src_blocks is NULL");
    refused(fv_kv_copy(device, &view, good, &view, bad, 1, NULL), FV_ERR_INVALID,
            "src_blocks[0] is 6; accepted: 0 to 5");
    refused(fv_kv_copy_in(device, &view, bad, &view, good, 1, NULL), FV_ERR_INVALID, "dst_blocks[0] is 6");
    refused(fv_kv_copy(device, &view, good, &view, good, -1, NULL), FV_ERR_INVALID, "-1 pairs");
    make_cache(&other, cache, FV_KV_LAYOUT_PACKED_HND, FV_DTYPE_NONE, NUM_BLOCKS);
    refused(fv_kv_copy(device, &view, good, &other, good, 1, NULL), FV_ERR_INVALID,
            "from layout packed_hnd to packed_nhd");
    make_cache(&other, cache, FV_KV_LAYOUT_PACKED_NHD, FV_DTYPE_F16, NUM_BLOCKS);
    refused(fv_kv_copy(device, &view, good, &other, good, 1, NULL), FV_ERR_INVALID, "from float16 to bfloat16");
    other = view;
    other.block_size = 4;
    refused(fv_kv_copy_out(device, &view, good, &other, good, 1, NULL), FV_ERR_INVALID, "blocks of 4 slots");
    other = view;
    other.k.element_chunk = 8;
    refused(fv_kv_copy(device, &view, good, &other, good, 1, NULL), FV_ERR_INVALID,
            "from chunks of 0 slots and 8 elements of k to 0 and 0");
    other = view;
    other.k_scales.data = cache;
    refused(fv_kv_copy(device, &view, good, &other, good, 1, NULL), FV_ERR_INVALID, "with scales and one without");
}

/* Views that no kernel serves, by whatever operation. */
static void test_views_are_refused(void **state)
{
    static char cache[CACHE_BYTES];
    static float row[576];
    const int64_t block[1] = {1}, slot[1] = {9};
    const int32_t key_start[1] = {0}, out_start[2] = {0, 1}, table[1] = {1};
    const fv_batch batch = {.struct_size = sizeof(batch),
                            .num_seqs = 1,
                            .block_table = table,
                            .block_table_stride = 1,
                            .block_table_width = 1};
    fv_device *device;
    fv_kv_view good, view;
    must(fv_device_find(&device, *state, "cpu"));
#define REFUSED(change, says)                                                                              \
    {                                                                                                      \
        view = good;                                                                                       \
        view.change;                                                                                       \
        const fv_tensor k = fv_tensor_3d(row, FV_DTYPE_F32, 1, view.num_kv_heads, view.head_size);         \
        const fv_tensor v = fv_tensor_3d(row, FV_DTYPE_F32, 1, view.num_kv_heads, view.v_head_size);       \
        refused(fv_kv_write(device, &view, &k, &v, slot, 1, NULL, NULL, 0, NULL), FV_ERR_INVALID, says);   \
        refused(fv_kv_gather(device, &k, &v, &view, &batch, key_start, out_start, 1, NULL, NULL, 0, NULL), \
                FV_ERR_INVALID, says);                                                                     \
        refused(fv_kv_copy(device, &view, block, &view, block, 1, NULL), FV_ERR_INVALID, says);            \
    }
    make_cache(&good, cache, FV_KV_LAYOUT_PACKED_NHD, FV_DTYPE_NONE, NUM_BLOCKS);
    REFUSED(struct_size = 9, "fv_kv_view.struct_size is 9; this library knows")
    REFUSED(k.data = NULL, "has no data")
    REFUSED(dtype = FV_DTYPE_NONE, "dtype 0; accepted: the values of fv_dtype but 0")
    REFUSED(dtype = (fv_dtype)99, "dtype 99")
    REFUSED(head_size = 0, "2 heads of 0 and 32 elements")
    make_cache(&good, cache, FV_KV_LAYOUT_LATENT, FV_DTYPE_NONE, NUM_BLOCKS);
    REFUSED(num_kv_heads = 2, "layout latent, 2 heads of 96 elements, 32 of them values; accepted: 1 head")
    REFUSED(v_head_size = 97, "97 of them values")
    make_cache(&good, cache, FV_KV_LAYOUT_LATENT_FP8_DS, FV_DTYPE_NONE, NUM_BLOCKS);
    REFUSED(dtype = FV_DTYPE_BF16, "latent_fp8_ds, bfloat16 entries of 576 elements, 512 of them values")
    REFUSED(head_size = 544, "accepted: fp8_e4m3 of 576, 512 of them values")
    REFUSED(v_head_size = 36, "36 of them values")
#undef REFUSED
}

/* A slot that the cache does not have is no slot to skip. */
static void test_slots_are_refused(void **state)
{
    static char cache[CACHE_BYTES];
    static float row[2 * 576], table[1];
    const int32_t positions[2] = {0, 0};
    const fv_rotation rotation = {.struct_size = sizeof(rotation),
                                  .rope_dim = 2,
                                  .cos = table,
                                  .sin = table,
                                  .max_position = 1,
                                  .positions_32 = positions};
    fv_device *device;
    fv_kv_view view;
    must(fv_device_find(&device, *state, "cpu"));
    make_cache(&view, cache, FV_KV_LAYOUT_PACKED_NHD, FV_DTYPE_NONE, NUM_BLOCKS);
    const int64_t num_slots = view.num_blocks * view.block_size;
    const int64_t slots[4] = {num_slots - 1, -5, INT64_MAX, num_slots};
    const fv_tensor k = fv_tensor_3d(row, FV_DTYPE_F32, 2, view.num_kv_heads, view.head_size);
    must(fv_kv_write(device, &view, &k, &k, slots, 2, NULL, NULL, 0, NULL));
    must(fv_rope_kv_write(device, NULL, &k, &k, &rotation, &view, slots, 2, NULL, NULL, 0, NULL));
    refused(fv_kv_write(device, &view, &k, &k, slots + 1, 2, NULL, NULL, 0, NULL), FV_ERR_INVALID,
            "slot_mapping[1] is 9223372036854775807; accepted: up to");
    refused(fv_rope_kv_write(device, NULL, &k, &k, &rotation, &view, slots + 3, 1, NULL, NULL, 0, NULL), FV_ERR_INVALID,
            "slot_mapping[0] is");
}

/* The value of a latent is the start of its key: a write needs no v, a gather gives it where it is asked for. */
static void test_latents_need_no_values(void **state)
{
    static char cache[CACHE_BYTES];
    static float row[576], read[576], value[576];
    static const float scale = 1;
    const int64_t slot[1] = {9};
    const int32_t key_start[1] = {1}, out_start[2] = {0, 1}, table[1] = {1};
    const fv_batch batch = {.struct_size = sizeof(batch),
                            .num_seqs = 1,
                            .block_table = table,
                            .block_table_stride = 1,
                            .block_table_width = 1};
    fv_device *device;
    must(fv_device_find(&device, *state, "cpu"));
    for (int32_t d = 0; d < 576; d++) row[d] = d % 448 == 0 ? 448 : (float)(d % 8);
    for (fv_kv_layout layout = FV_KV_LAYOUT_LATENT; layout <= FV_KV_LAYOUT_LATENT_FP8_DS; layout++) {
        fv_kv_view view;
        make_cache(&view, cache, layout, FV_DTYPE_NONE, NUM_BLOCKS);
        const fv_tensor k = fv_tensor_3d(row, FV_DTYPE_F32, 1, 1, view.head_size);
        const fv_tensor to = fv_tensor_3d(read, FV_DTYPE_F32, 1, 1, view.head_size);
        const fv_tensor v = fv_tensor_3d(value, FV_DTYPE_F32, 1, 1, view.v_head_size);
        must(fv_kv_write(device, &view, &k, NULL, slot, 1, &scale, NULL, 1, NULL));
        must(fv_kv_gather(device, &to, NULL, &view, &batch, key_start, out_start, 1, &scale, NULL, 1, NULL));
        assert_memory_equal(read, row, (size_t)view.head_size * sizeof(float));
        must(fv_kv_gather(device, &to, &v, &view, &batch, key_start, out_start, 1, NULL, NULL, 0, NULL));
        assert_memory_equal(value, row, (size_t)view.v_head_size * sizeof(float));
        refused(fv_kv_write(device, &view, &k, &k, slot, 1, NULL, NULL, 0, NULL), FV_ERR_INVALID,
                "v is float32 [1, 1,");
        refused(fv_kv_write(device, &view, &k, NULL, slot, 1, NULL, &scale, 1, NULL), FV_ERR_INVALID, "k_scale or");
    }
}

/* No sequences, no rows: nothing to do, and nothing is needed for it. */
static void test_empty_gathers(void **state)
{
    static char cache[CACHE_BYTES];
    static float row[576];
    fv_batch batch = {.struct_size = sizeof(batch)};
    fv_device *device;
    fv_kv_view view;
    must(fv_device_find(&device, *state, "cpu"));
    make_cache(&view, cache, FV_KV_LAYOUT_NB_2_BS_H_D, FV_DTYPE_NONE, NUM_BLOCKS);
    const fv_tensor k = fv_tensor_3d(row, FV_DTYPE_F32, 1, view.num_kv_heads, view.head_size);
    must(fv_kv_gather(device, &k, &k, &view, &batch, NULL, NULL, 0, NULL, NULL, 0, NULL));
    refused(fv_kv_gather(device, &k, &k, &view, &batch, NULL, NULL, 1, NULL, NULL, 0, NULL), FV_ERR_INVALID,
            "key_start or out_start is NULL");
    batch.num_seqs = 1;
    refused(fv_kv_gather(device, &k, &k, &view, &batch, NULL, NULL, 0, NULL, NULL, 0, NULL), FV_ERR_INVALID,
            "key_start or out_start is NULL");
}

static int open_context(void **state) { return fv_context_create((fv_context **)state, NULL) == FV_OK ? 0 : -1; }

static int close_context(void **state)
{
    fv_context_destroy(*state);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tables_agree),
        cmocka_unit_test(test_runs),
        cmocka_unit_test_setup_teardown(test_swap, open_context, close_context),
        cmocka_unit_test_setup_teardown(test_copy_on_the_null_device, open_context, close_context),
        cmocka_unit_test_setup_teardown(test_refusals, open_context, close_context),
        cmocka_unit_test_setup_teardown(test_views_are_refused, open_context, close_context),
        cmocka_unit_test_setup_teardown(test_slots_are_refused, open_context, close_context),
        cmocka_unit_test_setup_teardown(test_latents_need_no_values, open_context, close_context),
        cmocka_unit_test_setup_teardown(test_empty_gathers, open_context, close_context),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
