/* Items of few rows through the emulated tiles (attend_few_tiles.c) by themselves: that they serve them, where a kernel table
 * would fall back to another level without a word, and what comes out, against sums of doubles. */
#define FV_ISA amx_emulated
#define FV_TILES_EMULATED 1

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "core/float.h"
#include "fovea/view.h"
#include "kernels/cpu/amx/attend_few_tiles.h"
#include "kernels/cpu/amx/attend_tiles.h"
#include "kernels/cpu_tables.h"

enum { MAX_TOKENS = 8, MAX_SIZE = 256, MAX_KEYS = 900, MAX_HEADS = 80, MAX_ITEMS = 3 };

typedef struct few_shape {
    int32_t num_kv_heads, group, num_tokens, size, block_size, num_keys, window;
    fv_kv_layout layout;
    fv_alibi alibi;
    int32_t is_tree; /* token t sees new tokens t, t - 2, .. : two branches */
} few_shape;

/* A sequence whose new tokens are the last keys; pages in reverse order, NaN wherever no key is. */
typedef struct scene {
    few_shape shape;
    fv_kv_view view;
    int32_t query_start[2], seq_lens[1], table[MAX_KEYS];
    uint64_t tree[MAX_TOKENS];
    float slopes[MAX_HEADS];
    uint16_t q[MAX_TOKENS][MAX_HEADS][MAX_SIZE];
    float out[MAX_TOKENS][MAX_HEADS][MAX_SIZE];
    float lse[MAX_TOKENS][MAX_HEADS];
    /* [item][token][head][element], dense: as many of each as there are */
    float partial_out[MAX_ITEMS * MAX_TOKENS * MAX_HEADS * MAX_SIZE];
    float partial_max[MAX_ITEMS * MAX_TOKENS * MAX_HEADS], partial_sum[MAX_ITEMS * MAX_TOKENS * MAX_HEADS];
} scene;

static float next(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return (float)(int32_t)*state * 0x1p-31f;
}

static uint16_t *element_of(const scene *s, const fv_kv_plane *plane, int32_t key, int32_t head)
{
    const int32_t size = s->shape.block_size;
    return (uint16_t *)(void *)((char *)plane->data + s->table[key / size] * plane->block_stride +
                                head * plane->head_stride + key % size * plane->slot_stride);
}

static scene *scene_of(few_shape shape)
{
    static scene s;
    uint32_t state = 11;
    memset(&s, 0, sizeof(s));
    s.shape = shape;
    s.query_start[1] = shape.num_tokens;
    s.seq_lens[0] = shape.num_keys;
    const int32_t num_blocks = (shape.num_keys + shape.block_size - 1) / shape.block_size + 1;
    for (int32_t i = 1; i < num_blocks; i++) s.table[i - 1] = num_blocks - i;
    for (int32_t t = 0; t < shape.num_tokens; t++) s.tree[t] = 1ull << t | (t >= 2 ? s.tree[t - 2] : 0);
    for (int32_t head = 0; head < MAX_HEADS; head++) s.slopes[head] = 0.5f / (float)(1 + head);
    size_t bytes = 0;
    assert_int_equal(fv_kv_view_bytes(&bytes, shape.layout, FV_DTYPE_BF16, num_blocks, shape.block_size,
                                      shape.num_kv_heads, shape.size),
                     FV_OK);
    void *cache = malloc(bytes);
    assert_non_null(cache);
    memset(cache, 0xff, bytes);
    s.view.struct_size = sizeof(s.view);
    assert_int_equal(fv_kv_view_init(&s.view, cache, shape.layout, FV_DTYPE_BF16, num_blocks, shape.block_size,
                                     shape.num_kv_heads, shape.size),
                     FV_OK);
    for (int32_t key = 0; key < shape.num_keys; key++) {
        for (int32_t head = 0; head < shape.num_kv_heads; head++) {
            for (int32_t d = 0; d < shape.size; d++) {
                element_of(&s, &s.view.k, key, head)[d] = fv_bf16_of_f32(next(&state));
                element_of(&s, &s.view.v, key, head)[d] = fv_bf16_of_f32(next(&state));
            }
        }
    }
    for (int32_t token = 0; token < shape.num_tokens; token++)
        for (int32_t head = 0; head < shape.num_kv_heads * shape.group; head++)
            for (int32_t d = 0; d < shape.size; d++) s.q[token][head][d] = fv_bf16_of_f32(next(&state));
    return &s;
}

static void free_cache(scene *s) { free(s->view.k.data < s->view.v.data ? s->view.k.data : s->view.v.data); }

static fv_attend_params params_of(scene *s)
{
    return (fv_attend_params){
        .q = s->q,
        .q_token_stride = sizeof(s->q[0]),
        .q_head_stride = sizeof(s->q[0][0]),
        .out = s->out,
        .out_token_stride = sizeof(s->out[0]),
        .out_head_stride = sizeof(s->out[0][0]),
        .lse = s->lse[0],
        .lse_token_stride = sizeof(s->lse[0]),
        .lse_head_stride = sizeof(float),
        .cache = s->view,
        .block_table = s->table,
        .block_table_stride = MAX_KEYS,
        .q_dtype = FV_DTYPE_BF16,
        .out_dtype = FV_DTYPE_F32,
        .num_heads = s->shape.num_kv_heads * s->shape.group,
        .num_kv_heads = s->shape.num_kv_heads,
        .head_size = s->shape.size,
        .v_head_size = s->shape.size,
        .scale = 0.25f,
        .window = s->shape.window,
        .alibi = s->shape.alibi,
        .alibi_slopes = s->slopes,
        .tree_mask = s->shape.is_tree ? s->tree : NULL,
        .context_parallel = {.world = 1, .interleave = 1},
        .num_seqs = 1,
        .query_start = s->query_start,
        .seq_lens = s->seq_lens,
        .num_items = 1,
        .block_q = MAX_TOKENS,
        .tile_keys = 64,
    };
}

/* 1: the tiles served the item of all heads and keys. */
static int32_t attend(scene *s)
{
    const fv_work_item item = {.num_tokens = s->shape.num_tokens,
                               .num_kv_heads = s->shape.num_kv_heads,
                               .end_key = s->shape.num_keys,
                               .partial = -1};
    fv_attend_params params = params_of(s);
    params.items = &item;
    params.scratch_bytes = FV_ISA_SYMBOL(fv_tiles_scratch)(&params);
    params.scratch = aligned_alloc(64, (params.scratch_bytes + 63) / 64 * 64);
    assert_non_null(params.scratch);
    memset(params.scratch, 0xff, params.scratch_bytes);
    const fv_attend_job job = fv_attend_job_of(&params, &item);
    fv_key_shares shares = {0};
    assert_true(FV_ISA_SYMBOL(fv_few_tiles_serve)(&job));
    const int32_t serves = FV_ISA_SYMBOL(fv_attend_few_tiles)(&job, params.scratch, FV_RESCALING_MULTIPLY, &shares);
    free(params.scratch);
    return serves;
}

static double alibi_of(const scene *s, int32_t head, int32_t distance)
{
    if (s->shape.alibi == FV_ALIBI_NONE) return 0;
    return -s->slopes[head] * (s->shape.alibi == FV_ALIBI_LINEAR ? distance : sqrt(distance));
}

static void judge_row(const scene *s, int32_t token, int32_t head)
{
    const int32_t context = s->shape.num_keys - s->shape.num_tokens;
    const int32_t kv_head = head / s->shape.group, position = s->shape.num_keys - s->shape.num_tokens + token;
    const int32_t past = position - s->shape.window + 1, first = s->shape.window && past > 0 ? past : 0;
    double scores[MAX_KEYS], max = -INFINITY, sum = 0, out[MAX_SIZE] = {0};
    for (int32_t key = first; key <= position; key++) {
        scores[key] = alibi_of(s, head, position - key);
        for (int32_t d = 0; d < s->shape.size; d++)
            scores[key] += 0.25 * fv_f32_of_bf16(s->q[token][head][d]) *
                           fv_f32_of_bf16(element_of(s, &s->view.k, key, kv_head)[d]);
        if (s->shape.is_tree && key >= context && !(s->tree[token] >> (key - context) & 1)) scores[key] = -INFINITY;
        max = fmax(max, scores[key]);
    }
    for (int32_t key = first; key <= position; key++) {
        const double weight = exp(scores[key] - max);
        sum += weight;
        for (int32_t d = 0; d < s->shape.size; d++)
            out[d] += weight * fv_f32_of_bf16(element_of(s, &s->view.v, key, kv_head)[d]);
    }
    for (int32_t d = 0; d < s->shape.size; d++) assert_true(fabs(s->out[token][head][d] - out[d] / sum) < 0x1p-7);
    assert_true(fabs(s->lse[token][head] - (max + log(sum))) < 1e-4);
}

static void judge(few_shape shape)
{
    scene *s = scene_of(shape);
    assert_true(attend(s));
    for (int32_t token = 0; token < shape.num_tokens; token++)
        for (int32_t head = 0; head < shape.num_kv_heads * shape.group; head++) judge_row(s, token, head);
    free_cache(s);
}

static few_shape shape_of(int32_t num_kv_heads, int32_t group, int32_t num_tokens, int32_t size)
{
    return (few_shape){.num_kv_heads = num_kv_heads,
                       .group = group,
                       .num_tokens = num_tokens,
                       .size = size,
                       .block_size = 16,
                       .num_keys = 150,
                       .layout = FV_KV_LAYOUT_NB_2_BS_H_D};
}

static void rows_of_all_numbers_are_served(void **state)
{
    (void)state;
    judge(shape_of(8, 4, 1, 128));  /* two groups of heads */
    judge(shape_of(9, 4, 1, 128));  /* three, the last one of a head */
    judge(shape_of(20, 4, 1, 128)); /* more heads than an item takes */
    judge(shape_of(8, 3, 1, 128));
    judge(shape_of(4, 5, 1, 256));
    judge(shape_of(8, 8, 1, 128));
    judge(shape_of(8, 4, 4, 128)); /* 16 rows: a group for each head */
    judge(shape_of(8, 2, 2, 128)); /* two tokens, of which one does not see the last key */
    judge(shape_of(8, 4, 8, 128)); /* 32 rows: two strips for each head */
    judge(shape_of(8, 3, 6, 128)); /* 18, of which the second strip has two */
    judge(shape_of(2, 4, 5, 64));  /* 20, narrow tokens */
    judge(shape_of(2, 4, 1, 64));
    judge(shape_of(1, 7, 1, 96));
    judge(shape_of(8, 4, 1, 80)); /* heads of no whole tiles: copied, with zeros behind */
    judge(shape_of(2, 3, 5, 40));
    judge(shape_of(3, 4, 7, 72));
    judge(shape_of(2, 4, 2, 8));
}

static void pages_of_all_sizes_are_served(void **state)
{
    (void)state;
    const fv_kv_layout layouts[] = {FV_KV_LAYOUT_NB_2_BS_H_D, FV_KV_LAYOUT_2_NB_BS_H_D, FV_KV_LAYOUT_PACKED_HND};
    const int32_t sizes[] = {1, 8, 16, 24, 32, 128};
    for (int32_t i = 0; i < 3; i++) {
        for (int32_t j = 0; j < 6; j++) {
            few_shape shape = shape_of(8, 4, 1, 128);
            shape.layout = layouts[i];
            shape.block_size = sizes[j];
            judge(shape);
        }
    }
}

static void keys_begin_and_end_anywhere(void **state)
{
    (void)state;
    const int32_t windows[] = {1, 15, 16, 17, 33, 64, 149};
    for (int32_t i = 0; i < 7; i++) {
        few_shape shape = shape_of(8, 2, 2, 128);
        shape.window = windows[i];
        judge(shape);
    }
    for (int32_t num_keys = 1; num_keys <= 66; num_keys += 5) {
        few_shape shape = shape_of(8, 4, 1, 128);
        shape.num_keys = num_keys;
        judge(shape);
    }
}

/* Lanes of several heads and strips of one have their own slopes and rows of the mask. */
static void alibi_and_trees_are_served(void **state)
{
    (void)state;
    const few_shape shapes[] = {shape_of(8, 4, 1, 128), shape_of(8, 2, 3, 128), shape_of(4, 4, 4, 64),
                                shape_of(4, 3, 7, 128)};
    for (int32_t i = 0; i < 4; i++) {
        few_shape shape = shapes[i];
        for (int32_t form = 0; form < 5; form++) {
            const fv_alibi alibis[] = {FV_ALIBI_LINEAR, FV_ALIBI_SQRT, FV_ALIBI_NONE, FV_ALIBI_LINEAR, FV_ALIBI_NONE};
            shape.alibi = alibis[form];
            shape.is_tree = form >= 2;
            shape.num_keys = form == 4 ? shape.num_tokens : 150; /* no key before the tree */
            judge(shape);
        }
    }
}

/* Zeros have multiplied what other heads do not see. */
static void what_is_not_finite_is_left_to_others(void **state)
{
    (void)state;
    for (int32_t what = 0; what < 4; what++) {
        scene *s = scene_of(shape_of(8, 4, 1, 128));
        const fv_kv_plane *plane = what % 2 ? &s->view.v : &s->view.k;
        element_of(s, plane, 70, 5)[3] = what < 2 ? 0x7f80 : 0x7fc0;
        assert_false(attend(s));
        free_cache(s);
    }
}

/* --- keys that items deal out --------------------------------------------------------------------------------------- */

/* A loop whose tasks are dealt out to MAX_ITEMS threads, those of this launch of the executor. */
typedef struct thread_loop {
    fv_task_fn task;
    void *user;
    int64_t num_tasks;
    _Atomic int64_t next;
    atomic_int num_workers;
} thread_loop;

static void *run_tasks(void *user)
{
    thread_loop *loop = user;
    const int32_t worker = atomic_fetch_add(&loop->num_workers, 1);
    for (int64_t i; (i = atomic_fetch_add(&loop->next, 1)) < loop->num_tasks;) loop->task(loop->user, i, worker);
    return NULL;
}

static void run_on_threads(void *user, int64_t num_tasks, fv_task_fn task, void *task_user)
{
    (void)user;
    thread_loop loop = {.task = task, .user = task_user, .num_tasks = num_tasks};
    pthread_t threads[MAX_ITEMS];
    for (int32_t i = 0; i < MAX_ITEMS; i++) assert_int_equal(pthread_create(&threads[i], NULL, run_tasks, &loop), 0);
    for (int32_t i = 0; i < MAX_ITEMS; i++) pthread_join(threads[i], NULL);
}

static void run_last_first(void *user, int64_t num_tasks, fv_task_fn task, void *task_user)
{
    (void)user;
    for (int64_t i = num_tasks - 1; i >= 0; i--) task(task_user, i, (int32_t)i);
}

/* The items' results of a row together, as reduce_segments has them. */
static void merge_row(scene *s, int64_t row, int64_t num_rows)
{
    const int64_t num_heads = num_rows / s->shape.num_tokens, token = row / num_heads, head = row % num_heads;
    float max = -INFINITY, sum = 0, *out = s->out[token][head];
    for (int32_t i = 0; i < MAX_ITEMS; i++) max = fmaxf(max, s->partial_max[i * num_rows + row]);
    memset(out, 0, (size_t)s->shape.size * sizeof(float));
    for (int32_t i = 0; i < MAX_ITEMS; i++) {
        const int64_t at = i * num_rows + row;
        const float weight = expf(s->partial_max[at] - max);
        sum += weight * s->partial_sum[at];
        for (int32_t d = 0; d < s->shape.size; d++) out[d] += weight * s->partial_out[at * s->shape.size + d];
    }
    for (int32_t d = 0; d < s->shape.size; d++) out[d] /= sum;
    s->lse[token][head] = max + logf(sum);
}

/* A launch of MAX_ITEMS items of the sequence's keys. */
static void launch_siblings(scene *s,
                            void (*parallel_for)(void *user, int64_t num_tasks, fv_task_fn task, void *task_user))
{
    const int32_t ends[MAX_ITEMS + 1] = {0, 320, 640, s->shape.num_keys > 640 ? s->shape.num_keys : 960};
    const int64_t rows = (int64_t)s->shape.num_tokens * s->shape.num_kv_heads * s->shape.group;
    fv_work_item items[MAX_ITEMS];
    for (int32_t i = 0; i < MAX_ITEMS; i++)
        items[i] = (fv_work_item){.num_tokens = s->shape.num_tokens,
                                  .num_kv_heads = s->shape.num_kv_heads,
                                  .first_key = ends[i],
                                  .end_key = ends[i + 1],
                                  .partial = i * s->shape.num_tokens};
    fv_attend_params params = params_of(s);
    params.items = items;
    params.num_items = MAX_ITEMS;
    params.partial_out = s->partial_out;
    params.partial_max = s->partial_max;
    params.partial_sum = s->partial_sum;
    memset(s->partial_out, 0xff, sizeof(s->partial_out));
    memset(s->partial_max, 0xff, sizeof(s->partial_max));
    memset(s->partial_sum, 0xff, sizeof(s->partial_sum));
    const fv_attend_variant *variant = &fv_cpu_emulated_amx.attend_paged[0];
    params.scratch_bytes = variant->scratch_bytes(&params);
    params.scratch = aligned_alloc(64, MAX_ITEMS * params.scratch_bytes);
    assert_non_null(params.scratch);
    const fv_executor executor = {.parallel_for = parallel_for, .num_workers = MAX_ITEMS};
    assert_int_equal(variant->launch(&(fv_launch){.executor = &executor}, &params), FV_OK);
    free(params.scratch);
    for (int64_t row = 0; row < rows; row++) merge_row(s, row, rows);
}

static void siblings_deal_out_keys(void **state)
{
    (void)state;
    const int32_t nums_of_tokens[] = {1, 4, 8};
    for (int32_t i = 0; i < 3; i++) {
        const int32_t num_tokens = nums_of_tokens[i];
        few_shape shape = shape_of(8, 4, num_tokens, 128);
        shape.num_keys = 850;
        shape.is_tree = num_tokens == 4;
        scene *s = scene_of(shape);
        launch_siblings(s, run_last_first);
        /* The last item ran first, took what others leave, and has more than the quarter of all weights that its own
         * keys have. */
        const int64_t last = 2 * num_tokens * 32;
        assert_true(s->partial_sum[last] * expf(s->partial_max[last] - s->lse[0][0]) > 0.6f);
        for (int32_t token = 0; token < num_tokens; token++)
            for (int32_t head = 0; head < 32; head++) judge_row(s, token, head);
        free_cache(s);
    }
}

/* 24 rows of heads of 256, which are done head by head (attend_shared_tiles.c), each head with all keys. */
static void siblings_share_each_head(void **state)
{
    (void)state;
    few_shape shape = shape_of(2, 24, 1, 256);
    shape.num_keys = 850;
    scene *s = scene_of(shape);
    launch_siblings(s, run_last_first);
    for (int32_t head = 0; head < 48; head++) judge_row(s, 0, head);
    free_cache(s);
}

/* Items whose keys are all behind the sequence's end go the way of the one that has them. */
static void siblings_without_keys_take_none_twice(void **state)
{
    (void)state;
    few_shape shape = shape_of(4, 5, 3, 128); /* 15 rows over pages of 3 keys: not dealt out */
    shape.block_size = 3;
    shape.num_keys = 300;
    scene *s = scene_of(shape);
    launch_siblings(s, run_last_first);
    for (int32_t token = 0; token < 3; token++)
        for (int32_t head = 0; head < 20; head++) judge_row(s, token, head);
    free_cache(s);
}

/* At the same time, with any of them ahead. */
static void siblings_deal_out_keys_on_threads(void **state)
{
    (void)state;
    few_shape shape = shape_of(8, 4, 1, 128);
    shape.num_keys = 850;
    for (int32_t round = 0; round < 3; round++) {
        scene *s = scene_of(shape);
        launch_siblings(s, run_on_threads);
        for (int32_t head = 0; head < 32; head++) judge_row(s, 0, head);
        free_cache(s);
    }
}

enum { NUM_STEPS = 1 << 18 };

/* Steps that threads deal out as fast as they can. */
typedef struct step_count {
    fv_key_shares *shares;
    atomic_uchar *num_taken; /* [NUM_STEPS] */
} step_count;

static void take_steps(void *user, int64_t index, int32_t worker)
{
    const step_count *count = user;
    (void)worker;
    for (;;) {
        const fv_step_run run = fv_key_shares_next(count->shares, (int32_t)index, 3, 1);
        if (run.first >= run.end) return;
        for (int32_t step = run.first; step < run.end; step++) atomic_fetch_add(&count->num_taken[step], 1);
    }
}

static void each_step_is_taken_once(void **state)
{
    (void)state;
    static atomic_uchar num_taken[NUM_STEPS];
    fv_key_shares shares = {.num_items = MAX_ITEMS};
    const int32_t ends[MAX_ITEMS + 1] = {0, 1000, NUM_STEPS / 2, NUM_STEPS}; /* the first soon takes from the others */
    for (int32_t i = 0; i < MAX_ITEMS; i++) {
        shares.of[i].end_item = MAX_ITEMS;
        atomic_init(&shares.of[i].left, fv_key_share_of(ends[i], ends[i + 1]));
    }
    step_count count = {&shares, num_taken};
    run_on_threads(NULL, MAX_ITEMS, take_steps, &count);
    for (int32_t step = 0; step < NUM_STEPS; step++) assert_int_equal(num_taken[step], 1);
}

/* Who has which keys is not known when one item cannot go on: all siblings are done again. */
static void siblings_are_lost_together(void **state)
{
    (void)state;
    for (int32_t key = 100; key < 850; key += 300) {
        few_shape shape = shape_of(8, 4, 1, 128);
        shape.num_keys = 850;
        scene *s = scene_of(shape);
        element_of(s, &s->view.k, key, 5)[3] = 0x7fc0;
        launch_siblings(s, key == 400 ? run_on_threads : run_last_first);
        for (int32_t head = 0; head < 32; head++) {
            if (head / 4 == 5)
                assert_true(isnan(s->out[0][head][0]));
            else
                judge_row(s, 0, head);
        }
        free_cache(s);
    }
}

/* What the planner is told: only what this kernel serves, and lets others share. */
static void keys_are_dealt_out_where_rows_lie_side_by_side(void **state)
{
    (void)state;
    int32_t (*deals_keys)(const fv_problem *) = fv_cpu_emulated_amx.attend_paged[0].deals_keys;
    const fv_problem problem = {.mha = {32, 8, 128, 128},
                                .q_dtype = FV_DTYPE_BF16,
                                .kv_dtype = FV_DTYPE_BF16,
                                .kv_layout = FV_KV_LAYOUT_NB_2_BS_H_D,
                                .block_size = 16,
                                .context_parallel = {.world = 1, .interleave = 1}};
    assert_true(deals_keys(&problem));
    fv_problem other = problem;
    other.kv_layout = FV_KV_LAYOUT_SHUFFLED;
    assert_false(deals_keys(&other));
    other.kv_layout = FV_KV_LAYOUT_X_PACKED;
    assert_false(deals_keys(&other));
    other = problem;
    other.window = 100;
    assert_false(deals_keys(&other));
    other = problem;
    other.mha.num_heads = 16; /* two rows go to vectors */
    assert_false(deals_keys(&other));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_of_all_numbers_are_served),
        cmocka_unit_test(pages_of_all_sizes_are_served),
        cmocka_unit_test(keys_begin_and_end_anywhere),
        cmocka_unit_test(alibi_and_trees_are_served),
        cmocka_unit_test(what_is_not_finite_is_left_to_others),
        cmocka_unit_test(siblings_deal_out_keys),
        cmocka_unit_test(siblings_share_each_head),
        cmocka_unit_test(siblings_without_keys_take_none_twice),
        cmocka_unit_test(siblings_deal_out_keys_on_threads),
        cmocka_unit_test(each_step_is_taken_once),
        cmocka_unit_test(siblings_are_lost_together),
        cmocka_unit_test(keys_are_dealt_out_where_rows_lie_side_by_side),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
