/* Random schedules. */
#include "check/schedule.h"

#include <string.h>

#define MAX_SEGMENTS 5

/* What a list of items is built from. */
typedef struct list_builder {
    check_plan *plan;
    check_scene *scene;
    check_random random;
    fv_work_item *items;
    fv_reduce_item *reduces;
    int32_t num_slots;
} list_builder;

/* One item for each run of `run` KV heads. */
static void add_items(list_builder *builder, fv_work_item item, int32_t run)
{
    const int32_t num_kv_heads = builder->plan->attend.num_kv_heads;
    for (int32_t head = 0; head < num_kv_heads; head += run) {
        item.first_kv_head = head;
        item.num_kv_heads = fv_min_i32(run, num_kv_heads - head);
        builder->items[builder->plan->attend.num_items++] = item;
    }
}

static void add_q_block(list_builder *builder, int32_t seq, int32_t first_token, int32_t num_tokens)
{
    fv_attend_params *attend = &builder->plan->attend;
    const int32_t tile = attend->tile_keys;
    const int32_t query_len = attend->query_start[seq + 1] - attend->query_start[seq];
    const int32_t causal = attend->causal ? attend->causal[seq] : 1;
    const fv_key_range keys = fv_block_keys(&attend->context_parallel, attend->seq_lens[seq],
                                            (int64_t)attend->seq_lens[seq] - query_len, first_token, num_tokens, causal,
                                            attend->window);
    const int32_t first_tile = keys.first / tile;
    const int32_t end_tile = (int32_t)fv_ceil_div(keys.end, tile);
    const int32_t most = builder->scene->test->schedule == CHECK_SCHEDULE_SEGMENTS ? MAX_SEGMENTS : 1;
    const int32_t num_segments = check_random_int(&builder->random, 1, most);
    const int32_t run = check_random_int(&builder->random, 1, attend->num_kv_heads);
    fv_work_item item = {
        .seq = seq,
        .table_row = seq,
        .first_token = first_token,
        .num_tokens = num_tokens,
        .query_start = attend->query_start[seq],
        .query_end = attend->query_start[seq + 1],
        .seq_len = attend->seq_lens[seq],
    };
    int32_t tile_at = first_tile;
    for (int32_t segment = 0; segment < num_segments; segment++) {
        const int32_t last = segment == num_segments - 1;
        const int32_t end = last ? end_tile
                                 : check_random_int(&builder->random, tile_at, fv_max_i32(tile_at, end_tile));
        item.first_key = tile_at * tile;
        item.end_key = last && check_random_chance(&builder->random, 50) ? keys.end : end * tile;
        item.partial = num_segments == 1 ? -1 : builder->num_slots + segment * num_tokens;
        add_items(builder, item, run);
        tile_at = end;
    }
    if (num_segments == 1) return;
    builder->reduces[builder->plan->reduce.num_items++] = (fv_reduce_item){
        .first_token = attend->query_start[seq] + first_token,
        .num_tokens = num_tokens,
        .partial = builder->num_slots,
        .num_segments = num_segments,
    };
    builder->num_slots += num_segments * num_tokens;
}

/* Every Q block of every sequence, each cut in its own way. Returns the number of slots. */
static int32_t build_list(check_plan *plan, check_scene *scene)
{
    const size_t most_blocks = (size_t)scene->num_tokens + 1;
    list_builder builder = {
        .plan = plan,
        .scene = scene,
        .random = {scene->test->seed ^ 0x11157},
        .items = check_arena_alloc(&scene->arena, most_blocks * MAX_SEGMENTS * (size_t)plan->attend.num_kv_heads *
                                                      sizeof(fv_work_item)),
        .reduces = check_arena_alloc(&scene->arena, most_blocks * sizeof(fv_reduce_item)),
    };
    for (int32_t seq = 0; seq < scene->test->num_seqs; seq++) {
        const int32_t query_len = scene->test->lens[seq].query_len;
        for (int32_t first = 0; first < query_len; first += plan->attend.block_q)
            add_q_block(&builder, seq, first, fv_min_i32(plan->attend.block_q, query_len - first));
    }
    plan->attend.items = builder.items;
    plan->reduce.items = builder.reduces;
    plan->attend.num_segments = 1;
    plan->reduces = plan->reduce.num_items > 0;
    return builder.num_slots;
}

static int32_t build_grid(check_plan *plan, check_scene *scene)
{
    check_random random = {scene->test->seed ^ 0x6121d};
    const int32_t segmented = scene->test->schedule == CHECK_SCHEDULE_GRID_SEGMENTS;
    fv_attend_params *attend = &plan->attend;
    attend->num_q_blocks = scene->num_tokens / attend->block_q + scene->test->num_seqs;
    attend->num_segments = segmented ? check_random_int(&random, 2, 16) : 1;
    plan->reduce.block_q = attend->block_q;
    plan->reduce.num_q_blocks = attend->num_q_blocks;
    plan->reduce.num_segments = attend->num_segments;
    plan->reduces = segmented;
    return segmented ? scene->num_tokens * attend->num_segments : 0;
}

/* Of a list's items any number, the last ones; of the grid's cells all or none. */
static int32_t draw_num_split(const fv_attend_params *attend, const check_scene *scene)
{
    check_random random = {scene->test->seed ^ 0x5b117};
    if (attend->items) return check_random_int(&random, 0, attend->num_items);
    return check_random_chance(&random, 50) ? attend->num_q_blocks : 0;
}

static float *alloc_partial(check_scene *scene, size_t count)
{
    float *partial = check_arena_alloc_fenced(&scene->arena, count * sizeof(float));
    memset(partial, 0xff, count * sizeof(float));
    return partial;
}

void check_plan_init(check_plan *plan, check_scene *scene, int32_t block_m, int32_t tile_keys)
{
    const fv_attend_params attend = check_scene_params(scene);
    *plan = (check_plan){.attend = attend};
    plan->attend.block_q = fv_max_i32(1, block_m / (attend.num_heads / attend.num_kv_heads));
    plan->attend.item_tokens = fv_min_i32(check_case_max_query_len(scene->test), plan->attend.block_q);
    plan->attend.tile_keys = tile_keys;
    plan->reduce = (fv_reduce_params){
        .out = attend.out,
        .out_token_stride = attend.out_token_stride,
        .out_head_stride = attend.out_head_stride,
        .out_dtype = attend.out_dtype,
        .lse = attend.lse,
        .lse_token_stride = attend.lse_token_stride,
        .lse_head_stride = attend.lse_head_stride,
        .sinks = attend.sinks,
        .num_heads = attend.num_heads,
        .v_head_size = attend.v_head_size,
        .num_seqs = attend.num_seqs,
        .query_start = attend.query_start,
    };
    const int32_t listed = scene->test->schedule == CHECK_SCHEDULE_WHOLE ||
                           scene->test->schedule == CHECK_SCHEDULE_SEGMENTS;
    const int32_t num_slots = listed ? build_list(plan, scene) : build_grid(plan, scene);
    plan->attend.num_split = draw_num_split(&plan->attend, scene);

    const size_t rows = (size_t)num_slots * (size_t)attend.num_heads;
    plan->attend.partial_out = alloc_partial(scene, rows * (size_t)attend.v_head_size);
    plan->attend.partial_max = alloc_partial(scene, rows);
    plan->attend.partial_sum = alloc_partial(scene, rows);
    plan->reduce.partial_out = plan->attend.partial_out;
    plan->reduce.partial_max = plan->attend.partial_max;
    plan->reduce.partial_sum = plan->attend.partial_sum;
}
