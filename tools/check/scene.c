/* Building a scene. */
#include "check/scene.h"

#include <math.h>
#include <string.h>

#include "core/float.h"
#include "reference/reference.h"

#define LOW_QUERY 16.0f   /* first element of q with CHECK_SPREAD_LOW ... */
#define LOW_SCORE -200.0f /* ... and the score that it makes with the first element of k */
#define FAR_BYTES (1ll << 33)

int32_t check_scene_num_keys(const check_scene *scene, int32_t seq)
{
    return fv_local_keys(&scene->test->problem.context_parallel, scene->seq_lens[seq]);
}

static void build_lengths(check_scene *scene)
{
    const check_case *test = scene->test;
    scene->query_start = check_arena_alloc(&scene->arena, (size_t)(test->num_seqs + 1) * sizeof(int32_t));
    scene->seq_lens = check_arena_alloc(&scene->arena, (size_t)test->num_seqs * sizeof(int32_t));
    if (test->problem.not_causal) scene->causal = check_arena_alloc(&scene->arena, (size_t)test->num_seqs);
    for (int32_t r = 0; r < test->num_seqs; r++) {
        scene->query_start[r + 1] = scene->query_start[r] + test->lens[r].query_len;
        scene->seq_lens[r] = test->lens[r].seq_len;
        if (scene->causal) scene->causal[r] = !test->lens[r].not_causal;
    }
    scene->num_tokens = scene->query_start[test->num_seqs];
}

static int32_t wild_entry(check_random *random, int32_t num_blocks)
{
    const int32_t wild[] = {-1, INT32_MIN, INT32_MAX, num_blocks + 7, 0, check_random_int(random, 0, num_blocks - 1)};
    return CHECK_RANDOM_PICK(random, wild);
}

/* First block of the sequence that any of its rows sees: those before may have been given back. */
static int32_t first_live_block(const check_scene *scene, int32_t seq)
{
    const fv_problem *problem = &scene->test->problem;
    const int32_t query_len = scene->query_start[seq + 1] - scene->query_start[seq];
    if (problem->window == 0 || query_len == 0) return 0;
    const int64_t context = (int64_t)scene->seq_lens[seq] - query_len;
    const int32_t causal = scene->causal ? scene->causal[seq] : 1;
    const fv_key_range keys = fv_row_keys(&problem->context_parallel, scene->seq_lens[seq], context, causal,
                                          problem->window);
    return fv_min_i32(keys.first, fv_local_keys(&problem->context_parallel, context)) / problem->block_size;
}

/* Blocks that sequence `seq` has in common with the one before it: of the context of both. */
static int32_t shared_blocks(const check_scene *scene, check_random *random, int32_t seq)
{
    const check_case *test = scene->test;
    if (test->shared_keys == 0 || seq == 0 || test->problem.window > 0) return 0;
    if (test->problem.context_parallel.world > 1 || !check_random_chance(random, test->plain ? 100 : 75)) return 0;
    int32_t keys = test->shared_keys;
    for (int32_t r = seq - 1; r <= seq; r++) keys = fv_min_i32(keys, test->lens[r].seq_len - test->lens[r].query_len);
    return fv_max_i32(0, keys) / test->problem.block_size;
}

/* Deals out the blocks 1 .. in random order and fills the table. A far cache has no null block that
 * could be read. Returns the number of blocks. */
static int32_t build_block_table(check_scene *scene, check_random *random, int32_t far)
{
    const check_case *test = scene->test;
    int32_t used = 0, widest = 0;
    for (int32_t r = 0; r < test->num_seqs; r++) {
        const int32_t count = (int32_t)fv_ceil_div(check_scene_num_keys(scene, r), test->problem.block_size);
        used += count;
        widest = fv_max_i32(widest, count);
    }
    const int32_t num_blocks = used + 1 + check_random_int(random, 0, 3);
    int32_t *order = check_arena_alloc(&scene->arena, (size_t)num_blocks * sizeof(int32_t));
    for (int32_t i = 1; i < num_blocks; i++) { /* a permutation of 1 .. num_blocks - 1 at order[1] .. */
        const int32_t other = check_random_int(random, 1, i);
        order[i] = order[other];
        order[other] = i;
    }
    scene->block_table_width = fv_max_i32(1, widest + check_random_int(random, 0, 3));
    scene->block_table_stride = scene->block_table_width + check_random_int(random, 0, 2);
    const size_t entries = (size_t)scene->block_table_stride * (size_t)test->num_seqs;
    scene->block_table = check_arena_alloc(&scene->arena, entries * sizeof(int32_t));
    for (size_t i = 0; i < entries; i++) scene->block_table[i] = wild_entry(random, num_blocks);

    int32_t next = 1;
    for (int32_t r = 0; r < test->num_seqs; r++) {
        const int32_t count = (int32_t)fv_ceil_div(check_scene_num_keys(scene, r), test->problem.block_size);
        const int32_t live = !far && check_random_chance(random, 50) ? first_live_block(scene, r) : 0;
        const int32_t shared = shared_blocks(scene, random, r);
        int32_t *row = scene->block_table + r * scene->block_table_stride;
        for (int32_t i = 0; i < count; i++, next++)
            row[i] = i < shared ? row[i - scene->block_table_stride] : i < live ? 0 : order[next];
    }
    return num_blocks;
}

/* Moves all blocks far up: ids and bases, so that the bytes are the same. */
static void move_far(check_scene *scene)
{
    fv_kv_view *view = &scene->view;
    const int64_t stride = fv_min_i64(view->k.block_stride, view->v.block_stride);
    scene->first_block = (int32_t)fv_min_i64(FAR_BYTES / stride, 1 << 28);
    view->num_blocks += scene->first_block;
    view->k.data = (char *)view->k.data - scene->first_block * view->k.block_stride;
    view->v.data = (char *)view->v.data - scene->first_block * view->v.block_stride;
    for (int32_t r = 0; r < scene->test->num_seqs; r++) {
        int32_t *row = scene->block_table + r * scene->block_table_stride;
        const int32_t count = (int32_t)fv_ceil_div(check_scene_num_keys(scene, r), view->block_size);
        for (int32_t i = 0; i < count; i++) row[i] += scene->first_block;
    }
}

/* The slot of global position `position` of a sequence; -1: another rank's, or given back. */
static int64_t slot_of(const check_scene *scene, int32_t seq, int64_t position)
{
    const fv_problem *problem = &scene->test->problem;
    const fv_context_parallel *cp = &problem->context_parallel;
    if (position < 0 || position / cp->interleave % cp->world != cp->rank) return -1;
    const int32_t key = fv_local_keys(cp, position);
    const int64_t block = scene->block_table[seq * scene->block_table_stride + key / problem->block_size];
    return block > 0 ? block * problem->block_size + key % problem->block_size : -1;
}

static void build_slots(check_scene *scene)
{
    scene->slot_mapping = check_arena_alloc(&scene->arena, (size_t)scene->num_tokens * sizeof(int64_t));
    for (int32_t r = 0; r < scene->test->num_seqs; r++) {
        const int32_t start = scene->query_start[r], end = scene->query_start[r + 1];
        for (int32_t token = start; token < end; token++)
            scene->slot_mapping[token] = slot_of(scene, r, (int64_t)scene->seq_lens[r] - end + token);
    }
}

/* A tensor [rows, heads, size] in its own memory. Odd: gaps between heads and rows, base and strides
 * at odd multiples of an element. With `fenced` the memory is CHECK_PATTERN, else NaN bytes. */
static fv_tensor build_tensor(check_scene *scene, char **memory, size_t *bytes, check_random *random, fv_dtype dtype,
                              int32_t rows, int32_t heads, int32_t size, int32_t fenced)
{
    const int32_t odd = !scene->test->plain && check_random_chance(random, 40);
    const int64_t element = (int64_t)fv_dtype_bytes(dtype);
    const int64_t head_stride = (size + (odd ? check_random_int(random, 0, 5) : 0)) * element;
    const int64_t token_stride = heads * head_stride + (odd ? check_random_int(random, 0, 9) : 0) * element;
    const int64_t base = odd ? check_random_int(random, 0, 3) * element : 0;
    *bytes = (size_t)(base + rows * token_stride);
    *memory = fenced ? check_arena_alloc_fenced(&scene->arena, *bytes)
                     : check_arena_alloc_guarded(&scene->arena, *bytes);
    if (!fenced) memset(*memory, 0xff, *bytes);
    fv_tensor tensor = fv_tensor_3d(*memory + base, dtype, rows, heads, size);
    tensor.stride_bytes[0] = token_stride;
    tensor.stride_bytes[1] = head_stride;
    return tensor;
}

/* Random numbers of one dtype, made once; rows are windows of it. */
typedef struct number_pool {
    char *numbers;
    int32_t count;
    size_t element;
} number_pool;

static number_pool build_pool(check_scene *scene, check_random *random, float factor, float offset)
{
    const fv_dtype dtype = scene->test->problem.q_dtype;
    number_pool pool = {.count = 8192, .element = fv_dtype_bytes(dtype)};
    pool.numbers = check_arena_alloc(&scene->arena, (size_t)pool.count * pool.element);
    for (int32_t i = 0; i < pool.count; i++)
        fv_float_store(pool.numbers + (size_t)i * pool.element, factor * check_random_normal(random) + offset, dtype);
    return pool;
}

static void fill_row(void *row, const number_pool *pool, check_random *random, int32_t size)
{
    const size_t at = (size_t)check_random_int(random, 0, pool->count - size);
    memcpy(row, pool->numbers + at * pool->element, (size_t)size * pool->element);
}

/* Zeros, or numbers thirty times as large. In one row of a thousand, and of ten new ones, which not all queries see, a NaN,
 * or an infinity where that is a value. */
static void alter_row(void *row, const check_case *test, check_random *random, int32_t size, int32_t is_value,
                      int32_t is_new)
{
    static const float spoilt[] = {NAN, INFINITY, -INFINITY};
    const fv_dtype dtype = test->problem.q_dtype;
    const size_t element = fv_dtype_bytes(dtype);
    const int32_t kind = test->odd_rows ? check_random_int(random, 0, 99) : 99;
    for (int32_t d = 0; d < size && kind < 13; d++) {
        char *at = (char *)row + (size_t)d * element;
        fv_float_store(at, kind < 10 ? 0 : 30 * fv_float_load(at, dtype), dtype);
    }
    if (!test->spoilt_keys || check_random_int(random, 0, 999) >= (is_new ? 100 : 1)) return;
    char *at = (char *)row + (size_t)check_random_int(random, 0, size - 1) * element;
    fv_float_store(at, is_value ? CHECK_RANDOM_PICK(random, spoilt) : NAN, dtype);
}

/* The same for all rows of new keys or values. */
static void alter_tensor(const check_scene *scene, const fv_tensor *tensor, check_random *random, int32_t is_value)
{
    for (int32_t token = 0; token < scene->num_tokens; token++)
        for (int32_t head = 0; head < tensor->shape[1]; head++)
            alter_row((char *)tensor->data + token * tensor->stride_bytes[0] + head * tensor->stride_bytes[1],
                      scene->test, random, (int32_t)tensor->shape[2], is_value, 1);
}

static void fill_tensor(const check_scene *scene, const fv_tensor *tensor, const number_pool *pool,
                        check_random *random, const float *first)
{
    for (int32_t token = 0; token < scene->num_tokens; token++) {
        for (int32_t head = 0; head < tensor->shape[1]; head++) {
            char *row = (char *)tensor->data + token * tensor->stride_bytes[0] + head * tensor->stride_bytes[1];
            fill_row(row, pool, random, (int32_t)tensor->shape[2]);
            if (first) fv_float_store(row, *first, tensor->dtype);
        }
    }
}

/* One element of every fourth row or so. */
static void spoil_queries(const check_scene *scene, check_random random)
{
    const fv_tensor *q = &scene->q;
    for (int32_t token = 0; token < scene->num_tokens; token++) {
        for (int32_t head = 0; head < q->shape[1]; head++) {
            const int32_t at = check_random_int(&random, 0, (int32_t)q->shape[2] - 1);
            char *row = (char *)q->data + token * q->stride_bytes[0] + head * q->stride_bytes[1];
            if (check_random_chance(&random, 25)) fv_float_store(row + at * q->stride_bytes[2], NAN, q->dtype);
        }
    }
}

int32_t check_scene_query_is_nan(const check_scene *scene, int32_t token, int32_t head)
{
    if (!scene->test->nan_queries) return 0;
    const fv_tensor *q = &scene->q;
    const char *row = (const char *)q->data + token * q->stride_bytes[0] + head * q->stride_bytes[1];
    for (int32_t d = 0; d < q->shape[2]; d++)
        if (isnan(fv_float_load(row + d * q->stride_bytes[2], q->dtype))) return 1;
    return 0;
}

/* A layout that no name fits: K and V apart, gaps after each head and block, or head-major. The planes
 * have no data yet. Returns the bytes of both. */
static size_t build_strided_view(fv_kv_view *view, const fv_problem *problem, int64_t num_blocks, check_random *random)
{
    const int64_t element = (int64_t)fv_dtype_bytes(problem->kv_dtype);
    const int32_t hkv = problem->mha.num_kv_heads, bs = problem->block_size;
    const int32_t head_major = check_random_chance(random, 50);
    const int32_t sizes[2] = {problem->mha.head_size, problem->mha.v_head_size};
    fv_kv_plane planes[2];
    size_t bytes = 0;
    for (int32_t i = 0; i < 2; i++) {
        const int64_t row = (sizes[i] + check_random_int(random, 0, 3)) * element;
        planes[i] = (fv_kv_plane){
            .element_stride = element,
            .head_stride = head_major ? row * bs : row,
            .slot_stride = head_major ? row : row * hkv,
            .block_stride = row * hkv * bs + check_random_int(random, 0, 7) * element,
        };
        bytes += (size_t)(planes[i].block_stride * num_blocks);
    }
    *view = (fv_kv_view){
        .struct_size = sizeof(*view),
        .layout = FV_KV_LAYOUT_STRIDED,
        .dtype = problem->kv_dtype,
        .block_size = bs,
        .num_blocks = num_blocks,
        .num_kv_heads = hkv,
        .head_size = sizes[0],
        .v_head_size = sizes[1],
        .k = planes[0],
        .v = planes[1],
    };
    return bytes;
}

static size_t scale_plane_bytes(const fv_problem *problem, int64_t num_blocks)
{
    return (size_t)(num_blocks * problem->mha.num_kv_heads * problem->block_size) * sizeof(float);
}

static void build_scale_plane(fv_scale_plane *plane, const fv_kv_view *view, char *memory, check_random *random)
{
    const int64_t heads = view->num_kv_heads, slots = view->block_size;
    const int32_t head_major = check_random_chance(random, 50);
    *plane = (fv_scale_plane){
        .data = memory,
        .block_stride = heads * slots * 4,
        .slot_stride = head_major ? 4 : heads * 4,
        .head_stride = head_major ? slots * 4 : 4,
    };
}

/* Bytes of the cache that the layout of the problem needs. */
static size_t layout_bytes(check_scene *scene, const fv_problem *problem, int64_t num_blocks, int32_t inline_scales,
                           check_random *random)
{
    const int32_t hkv = problem->mha.num_kv_heads, size = problem->mha.head_size;
    size_t bytes = 0;
    if (inline_scales)
        fv_kv_view_inline_scales_bytes(&bytes, FV_KV_LAYOUT_PACKED_NHD, problem->kv_dtype, num_blocks,
                                       problem->block_size, hkv, size);
    else if (problem->kv_layout == FV_KV_LAYOUT_STRIDED)
        bytes = build_strided_view(&scene->view, problem, num_blocks, random);
    else
        fv_kv_view_bytes(&bytes, problem->kv_layout, problem->kv_dtype, num_blocks, problem->block_size, hkv, size);
    return bytes;
}

/* The scales of tokens and heads are part of the cache's memory: inside the blocks, or after the last. */
static void build_cache(check_scene *scene, check_random *random, int32_t num_blocks)
{
    const fv_problem *problem = &scene->test->problem;
    const int32_t hkv = problem->mha.num_kv_heads, size = problem->mha.head_size;
    const int32_t has_scales = problem->kv_scaling == FV_KV_SCALING_PER_TOKEN_HEAD;
    const int32_t strided = problem->kv_layout == FV_KV_LAYOUT_STRIDED;
    const int32_t may_be_inside = has_scales && strided && problem->mha.v_head_size == size;
    const int32_t inline_scales = may_be_inside &&
                                  (scene->test->plain ? scene->test->scales_inside : check_random_chance(random, 50));
    const size_t bytes = layout_bytes(scene, problem, num_blocks, inline_scales, random);
    const size_t scales_at = (bytes + 3) / 4 * 4;
    const size_t scale_bytes = has_scales && !inline_scales ? scale_plane_bytes(problem, num_blocks) : 0;
    scene->cache_bytes = scales_at + 2 * scale_bytes;
    scene->cache = check_arena_alloc_guarded(&scene->arena, scene->cache_bytes);
    scene->cache_before = check_arena_alloc(&scene->arena, scene->cache_bytes);
    scene->cache_after = check_arena_alloc(&scene->arena, scene->cache_bytes);
    if (inline_scales) {
        const fv_kv_layout order = check_random_chance(random, 50) ? FV_KV_LAYOUT_PACKED_NHD : FV_KV_LAYOUT_PACKED_HND;
        fv_kv_view_init_inline_scales(&scene->view, scene->cache, order, problem->kv_dtype, num_blocks,
                                      problem->block_size, hkv, size);
        return;
    }
    if (strided) {
        scene->view.k.data = scene->cache;
        scene->view.v.data = scene->cache + scene->view.k.block_stride * num_blocks;
    } else {
        fv_kv_view_init(&scene->view, scene->cache, problem->kv_layout, problem->kv_dtype, num_blocks,
                        problem->block_size, hkv, size);
        scene->view.v_head_size = problem->mha.v_head_size;
    }
    if (!has_scales) return;
    build_scale_plane(&scene->view.k_scales, &scene->view, scene->cache + scales_at, random);
    build_scale_plane(&scene->view.v_scales, &scene->view, scene->cache + scales_at + scale_bytes, random);
}

static void build_scales(check_scene *scene, check_random *random)
{
    const fv_kv_scaling scaling = scene->test->problem.kv_scaling;
    if (scaling != FV_KV_SCALING_PER_TENSOR && scaling != FV_KV_SCALING_PER_HEAD) return;
    scene->num_kv_scales = scaling == FV_KV_SCALING_PER_TENSOR ? 1 : scene->test->problem.mha.num_kv_heads;
    scene->k_scale = check_arena_alloc(&scene->arena, (size_t)scene->num_kv_scales * sizeof(float));
    scene->v_scale = check_arena_alloc(&scene->arena, (size_t)scene->num_kv_scales * sizeof(float));
    for (int32_t i = 0; i < scene->num_kv_scales; i++) {
        scene->k_scale[i] = (float)(0.03 + 0.3 * check_random_unit(random));
        scene->v_scale[i] = (float)(0.03 + 0.3 * check_random_unit(random));
    }
    if (!scene->test->odd_scales) return;
    static const float odd[] = {1, 1, 1e-3f, 2, 10};
    check_random other = check_random_of(scene->test->seed, 0x5ca1e);
    for (int32_t i = 0; i < scene->num_kv_scales; i++) {
        scene->k_scale[i] = CHECK_RANDOM_PICK(&other, odd);
        scene->v_scale[i] = CHECK_RANDOM_PICK(&other, odd);
    }
}

static void build_head_numbers(check_scene *scene, check_random *random)
{
    const int32_t num_heads = scene->test->problem.mha.num_heads;
    scene->sinks = check_arena_alloc(&scene->arena, (size_t)num_heads * sizeof(float));
    scene->alibi_slopes = check_arena_alloc(&scene->arena, (size_t)num_heads * sizeof(float));
    for (int32_t head = 0; head < num_heads; head++) {
        scene->sinks[head] = 2 * check_random_normal(random);
        scene->alibi_slopes[head] = exp2f(-8.0f * (float)(head + 1) / (float)num_heads);
    }
    if (!scene->test->odd_heads) return;
    static const float sinks[] = {-INFINITY, -INFINITY, -1e4f, -200, -1, 0, 20, 200, 1e4f};
    static const float slopes[] = {0, 1, 1e3f, 1e6f, 1e-3f, -1e-2f, -0.5f};
    check_random other = check_random_of(scene->test->seed, 0x0dd5);
    for (int32_t head = 0; head < num_heads; head++) {
        scene->sinks[head] = CHECK_RANDOM_PICK(&other, sinks);
        scene->alibi_slopes[head] = CHECK_RANDOM_PICK(&other, slopes);
    }
}

static void build_tree_mask(check_scene *scene, check_random *random)
{
    scene->tree_mask = check_arena_alloc(&scene->arena, (size_t)scene->num_tokens * sizeof(uint64_t));
    for (int32_t token = 0; token < scene->num_tokens; token++)
        scene->tree_mask[token] = check_random_next(random) & check_random_next(random);
}

/* Writes rows to slots of the cache by the reference. */
static void write_slots(const check_scene *scene, const fv_tensor *k, const fv_tensor *v, const int64_t *slots,
                        int32_t num_tokens)
{
    const fv_kv_write_params params = {
        .k = k->data,
        .k_token_stride = k->stride_bytes[0],
        .k_head_stride = k->stride_bytes[1],
        .v = v->data,
        .v_token_stride = v->stride_bytes[0],
        .v_head_stride = v->stride_bytes[1],
        .src_dtype = k->dtype,
        .cache = scene->view,
        .slot_mapping = slots,
        .num_tokens = num_tokens,
        .k_scale = scene->k_scale,
        .v_scale = scene->v_scale,
        .num_kv_scales = scene->num_kv_scales,
    };
    fv_reference_kv_write(NULL, &params);
}

/* Fills the cache with the context of every sequence. */
static void write_context(check_scene *scene, const number_pool *k_pool, const number_pool *v_pool,
                          check_random *random, check_random *other, const float *first)
{
    const fv_problem *problem = &scene->test->problem;
    const int32_t hkv = problem->mha.num_kv_heads;
    const fv_dtype dtype = problem->q_dtype;
    const size_t k_bytes = (size_t)(hkv * problem->mha.head_size) * k_pool->element;
    const size_t v_bytes = (size_t)(hkv * problem->mha.v_head_size) * v_pool->element;
    const fv_tensor k = fv_tensor_3d(check_arena_alloc(&scene->arena, k_bytes), dtype, 1, hkv, problem->mha.head_size);
    const fv_tensor v = fv_tensor_3d(check_arena_alloc(&scene->arena, v_bytes), dtype, 1, hkv,
                                     problem->mha.v_head_size);
    for (int32_t r = 0; r < scene->test->num_seqs; r++) {
        const int32_t context = scene->seq_lens[r] - (scene->query_start[r + 1] - scene->query_start[r]);
        for (int32_t position = 0; position < context; position++) {
            const int64_t slot = slot_of(scene, r, position);
            if (slot < 0) continue;
            for (int32_t head = 0; head < hkv; head++) {
                char *k_row = (char *)k.data + head * k.stride_bytes[1];
                fill_row(k_row, k_pool, random, problem->mha.head_size);
                if (first) fv_float_store(k_row, *first, dtype);
                char *v_row = (char *)v.data + head * v.stride_bytes[1];
                fill_row(v_row, v_pool, random, problem->mha.v_head_size);
                alter_row(k_row, scene->test, other, problem->mha.head_size, 0, 0);
                alter_row(v_row, scene->test, other, problem->mha.v_head_size, 1, 0);
            }
            write_slots(scene, &k, &v, &slot, 1);
        }
    }
}

/* Of the queries, and so of all scores. */
static float query_factor(const check_case *test)
{
    static const float flat[] = {1e-6f, 1e-5f, 1e-4f};
    check_random random = check_random_of(test->seed, 0xf1a7);
    if (test->spread == CHECK_SPREAD_FLAT) return CHECK_RANDOM_PICK(&random, flat);
    return test->spread == CHECK_SPREAD_PEAKED ? 4.0f : 1.0f;
}

/* Of half of the cases whose scores are flat values are all but one number: roundings of their sums may go one way. */
static int32_t has_flat_values(const check_case *test)
{
    check_random random = check_random_of(test->seed, 0xf1a8);
    return test->spread == CHECK_SPREAD_FLAT && check_random_chance(&random, 50);
}

/* q, k, v, and the cache before and after the new K/V. */
static void fill_scene(check_scene *scene, check_random *random)
{
    const check_case *test = scene->test;
    const float v_offset = check_random_chance(random, 30) ? 0.5f : 0;
    const number_pool q_pool = build_pool(scene, random, query_factor(test), 0);
    const number_pool k_pool = build_pool(scene, random, 1, 0);
    const int32_t is_flat = has_flat_values(test);
    const number_pool v_pool = build_pool(scene, random, is_flat ? 1e-6f : 1, is_flat ? 0.7f : v_offset);
    const float low_q = LOW_QUERY, low_k = LOW_SCORE / (test->problem.scale * LOW_QUERY);
    const int32_t low = test->spread == CHECK_SPREAD_LOW;
    fill_tensor(scene, &scene->q, &q_pool, random, low ? &low_q : NULL);
    if (test->nan_queries) spoil_queries(scene, check_random_of(test->seed, 0x4a4));
    fill_tensor(scene, &scene->k, &k_pool, random, low ? &low_k : NULL);
    fill_tensor(scene, &scene->v, &v_pool, random, NULL);
    check_random other = check_random_of(test->seed, 0xa17e);
    alter_tensor(scene, &scene->k, &other, 0);
    alter_tensor(scene, &scene->v, &other, 1);

    memset(scene->cache, test->unused_byte ? test->unused_byte : 0xff, scene->cache_bytes);
    write_context(scene, &k_pool, &v_pool, random, &other, low ? &low_k : NULL);
    memcpy(scene->cache_before, scene->cache, scene->cache_bytes);
    write_slots(scene, &scene->k, &scene->v, scene->slot_mapping, scene->num_tokens);
    memcpy(scene->cache_after, scene->cache, scene->cache_bytes);
    if (!test->in_cache) return;
    memcpy(scene->cache_before, scene->cache_after, scene->cache_bytes);
    scene->slot_mapping = NULL;
    scene->k.data = scene->v.data = NULL;
}

static void build_lse(check_scene *scene, check_random *random)
{
    const int64_t rows = scene->num_rows, heads = scene->test->problem.mha.num_heads;
    scene->lse_bytes = (size_t)(rows * heads) * sizeof(float);
    scene->lse_memory = check_arena_alloc_fenced(&scene->arena, scene->lse_bytes);
    scene->lse = fv_tensor_2d(scene->lse_memory, FV_DTYPE_F32, rows, heads);
    if (check_random_chance(random, 50)) { /* [Hq, T'] in memory */
        scene->lse.stride_bytes[0] = 4;
        scene->lse.stride_bytes[1] = 4 * rows;
    }
    if (!scene->test->problem.returns_lse) scene->lse.data = NULL;
}

void check_scene_init(check_scene *scene, const check_case *test)
{
    check_random random = {test->seed};
    const fv_problem *problem = &test->problem;
    const fv_mha_shape *shape = &problem->mha;
    *scene = (check_scene){.test = test};
    build_lengths(scene);
    scene->num_rows = scene->num_tokens + (test->plain ? 0 : check_random_int(&random, 0, 3));
    const int32_t is_strided = problem->kv_layout == FV_KV_LAYOUT_STRIDED;
    const int32_t may_be_far = !test->plain && problem->kv_scaling != FV_KV_SCALING_PER_TOKEN_HEAD;
    check_random other = check_random_of(test->seed, 0xfa4);
    const int32_t far = may_be_far && check_random_chance(is_strided ? &random : &other, is_strided ? 50 : 20);
    const int32_t num_blocks = build_block_table(scene, &random, far);
    build_cache(scene, &random, num_blocks);
    if (far) move_far(scene);
    build_slots(scene);
    char *memory;
    size_t bytes;
    scene->q = build_tensor(scene, &memory, &bytes, &random, problem->q_dtype, scene->num_rows, shape->num_heads,
                            shape->head_size, 0);
    scene->k = build_tensor(scene, &memory, &bytes, &random, problem->q_dtype, scene->num_rows, shape->num_kv_heads,
                            shape->head_size, 0);
    scene->v = build_tensor(scene, &memory, &bytes, &random, problem->q_dtype, scene->num_rows, shape->num_kv_heads,
                            shape->v_head_size, 0);
    scene->out = build_tensor(scene, &scene->out_memory, &scene->out_bytes, &random, problem->out_dtype,
                              scene->num_rows, shape->num_heads, shape->v_head_size, 1);
    build_lse(scene, &random);
    build_scales(scene, &random);
    build_head_numbers(scene, &random);
    if (problem->tree_mask) build_tree_mask(scene, &random);
    fill_scene(scene, &random);
}

void check_scene_deinit(check_scene *scene) { check_arena_clear(&scene->arena); }

void check_scene_reset(check_scene *scene, int32_t written)
{
    memcpy(scene->cache, written ? scene->cache_after : scene->cache_before, scene->cache_bytes);
    memset(scene->out_memory, CHECK_PATTERN, scene->out_bytes);
    memset(scene->lse_memory, CHECK_PATTERN, scene->lse_bytes);
}

void check_scene_cover_rows(const fv_tensor *tensor, int32_t num_tokens)
{
    if (!tensor->data) return;
    const int64_t heads = tensor->shape[1], size = tensor->num_dims > 2 ? tensor->shape[2] : 1;
    const size_t row_bytes = (size_t)size * fv_dtype_bytes(tensor->dtype);
    for (int64_t token = 0; token < num_tokens; token++)
        for (int64_t head = 0; head < heads; head++)
            memset((char *)tensor->data + token * tensor->stride_bytes[0] + head * tensor->stride_bytes[1],
                   CHECK_PATTERN, row_bytes);
}

fv_attend_params check_scene_params(const check_scene *scene)
{
    const fv_problem *problem = &scene->test->problem;
    return (fv_attend_params){
        .q = scene->q.data,
        .q_token_stride = scene->q.stride_bytes[0],
        .q_head_stride = scene->q.stride_bytes[1],
        .out = scene->out.data,
        .out_token_stride = scene->out.stride_bytes[0],
        .out_head_stride = scene->out.stride_bytes[1],
        .lse = scene->lse.data,
        .lse_token_stride = scene->lse.stride_bytes[0],
        .lse_head_stride = scene->lse.stride_bytes[1],
        .cache = scene->view,
        .sinks = problem->sinks ? scene->sinks : NULL,
        .alibi_slopes = problem->alibi ? scene->alibi_slopes : NULL,
        .k_scale = scene->k_scale,
        .v_scale = scene->v_scale,
        .num_kv_scales = scene->num_kv_scales,
        .q_dtype = problem->q_dtype,
        .out_dtype = problem->out_dtype,
        .num_heads = problem->mha.num_heads,
        .num_kv_heads = problem->mha.num_kv_heads,
        .head_size = problem->mha.head_size,
        .v_head_size = problem->mha.v_head_size,
        .max_seq_len = scene->test->seed % 2 ? check_case_max_seq_len(scene->test) : 0, /* scratch follows it */
        .scale = problem->scale,
        .soft_cap = problem->soft_cap,
        .window = problem->window,
        .alibi = problem->alibi,
        .context_parallel = problem->context_parallel,
        .multiplies_pairs = 1,
        .subnormals_are_fast = scene->test->seed / 2 % 2,
        .num_seqs = scene->test->num_seqs,
        .query_start = scene->query_start,
        .seq_lens = scene->seq_lens,
        .block_table = scene->block_table,
        .block_table_stride = scene->block_table_stride,
        .block_table_width = scene->block_table_width,
        .causal = scene->causal,
        .tree_mask = scene->tree_mask,
    };
}
