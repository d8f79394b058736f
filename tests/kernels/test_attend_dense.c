/* Attention over dense keys on every CPU table that this CPU runs, against the oracle: dense keys alone,
 * chunks of them, and new tokens as they came behind a paged context. What no row may use is NaN: rows of
 * K and V between and around those of the sequences, cache slots from the context on, and their scales. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "core/float.h"
#include "kernels/cpu_tables.h"
#include "kvcache/kv_address.h"
#include "reference/oracle.h"
#include "support/attend_run.h"

enum {
    MAX_SEQS = 16,
    MAX_ITEMS = 512,
    MAX_ROWS = 512, /* of the batch: tokens x query heads */
    MAX_KEYS = 512, /* of a sequence */
    MAX_SIZE = 192, /* of a head */
    NUM_BLOCKS = 96,
    BLOCK_SIZE = 16,
    FENCE = 3,       /* rows of NaN before and behind the dense rows */
    MAX_DENSE = 640, /* rows, fences included */
    TILE = 64
};

typedef struct dense_case {
    fv_dtype dtype;       /* of q and out */
    fv_dtype dense_dtype; /* NONE: that of q */
    fv_dtype cache_dtype; /* NONE: no cache, attend_dense */
    fv_kv_layout layout;
    int32_t num_seqs;
    int32_t query_lens[MAX_SEQS], seq_lens[MAX_SEQS];
    int32_t num_heads, num_kv_heads, head_size, v_head_size;
    int32_t shared_size; /* elements at the end of each key that all heads share; 0: keys are whole */
    int32_t head_scales, token_head_scales;
    int32_t window, not_causal, tree, sinks;
    float soft_cap;
    fv_alibi alibi;
    int32_t chunk;         /* key_row: keys [first, end) of each sequence lie at odd rows */
    int32_t cut;           /* keys of a segment; 0: whole */
    int32_t num_segments;  /* static grid instead of a list; 0: a list */
    int32_t shared_keys;   /* cascade: all sequences share their first keys, and one item */
    int32_t out_first_seq; /* the items begin at this sequence; out has no rows before it */
} dense_case;

typedef struct dense_scene {
    const dense_case *test;
    uint64_t random;
    fv_attend_params params;
    char *q, *out, *k, *k_shared, *v, *cache;
    size_t out_bytes;
    float lse[MAX_ROWS];
    float sinks[MAX_SIZE], slopes[MAX_SIZE], k_scale[MAX_SIZE], v_scale[MAX_SIZE];
    float token_scales[2][NUM_BLOCKS * BLOCK_SIZE * 4]; /* [block, slot, Hkv] of K and V */
    uint8_t causal[MAX_SEQS];
    uint64_t tree[MAX_ROWS];
    int32_t query_start[MAX_SEQS + 1], seq_lens[MAX_SEQS], table[MAX_SEQS][MAX_KEYS / BLOCK_SIZE];
    int32_t key_row[MAX_SEQS];
    fv_key_range chunk[MAX_SEQS]; /* keys that the items look at */
    fv_work_item items[MAX_ITEMS];
    fv_reduce_item reduces[MAX_ITEMS];
    int32_t num_items, num_reduces, num_slots;
    float *partial_out, *partial_max, *partial_sum;
} dense_scene;

static float random_unit(dense_scene *s)
{
    s->random = s->random * 6364136223846793005u + 1442695040888963407u;
    return (float)((double)(s->random >> 11) * 0x1p-53 * 2 - 1);
}

static void *alloc_filled(size_t bytes, int value)
{
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    assert_non_null(memory);
    return memset(memory, value, bytes);
}

static void fill_rows(dense_scene *s, char *rows, int64_t first, int64_t end, int64_t stride, int32_t num_elements,
                      fv_dtype dtype)
{
    const int64_t step = (int64_t)fv_dtype_bytes(dtype);
    for (int64_t row = first; row < end; row++)
        for (int32_t d = 0; d < num_elements; d++)
            fv_float_store(rows + row * stride + d * step, 2 * random_unit(s), dtype);
}

/* --- keys ---------------------------------------------------------------------------------------------- */

/* Cached keys of the sequences; every other slot stays NaN, of int8 its scale. */
static void build_cache(dense_scene *s)
{
    const dense_case *test = s->test;
    fv_kv_view *cache = &s->params.cache;
    size_t bytes;
    assert_int_equal(fv_kv_view_bytes(&bytes, test->layout, test->cache_dtype, NUM_BLOCKS, BLOCK_SIZE,
                                      test->num_kv_heads, test->head_size),
                     FV_OK);
    s->cache = alloc_filled(bytes, 0xff);
    assert_int_equal(fv_kv_view_init(cache, s->cache, test->layout, test->cache_dtype, NUM_BLOCKS, BLOCK_SIZE,
                                     test->num_kv_heads, test->head_size),
                     FV_OK);
    memset(s->token_scales, 0xff, sizeof(s->token_scales));
    if (test->token_head_scales) {
        const int64_t heads = test->num_kv_heads;
        cache->k_scales = (fv_scale_plane){s->token_scales[0], BLOCK_SIZE * heads * 4, heads * 4, 4};
        cache->v_scales = (fv_scale_plane){s->token_scales[1], BLOCK_SIZE * heads * 4, heads * 4, 4};
    }
    const float range = test->cache_dtype == FV_DTYPE_I8 ? 100 : 2;
    int32_t next_block = NUM_BLOCKS - 1;
    for (int32_t r = 0; r < test->num_seqs; r++) {
        const int32_t context = s->seq_lens[r] - test->query_lens[r];
        for (int32_t i = 0; i < MAX_KEYS / BLOCK_SIZE; i++) {
            const int32_t is_shared = r > 0 && (i + 1) * BLOCK_SIZE <= test->shared_keys;
            s->table[r][i] = is_shared ? s->table[0][i] : i * BLOCK_SIZE < context ? next_block-- : -1000000;
        }
        for (int32_t key = r > 0 ? test->shared_keys : 0; key < context; key++) {
            const int64_t block = s->table[r][key / BLOCK_SIZE], slot = key % BLOCK_SIZE;
            for (int32_t head = 0; head < test->num_kv_heads; head++) {
                for (int32_t d = 0; d < test->head_size; d++) {
                    fv_float_store((char *)cache->k.data + fv_kv_offset(&cache->k, block, head, slot, d),
                                   range * random_unit(s), test->cache_dtype);
                    fv_float_store((char *)cache->v.data + fv_kv_offset(&cache->v, block, head, slot, d),
                                   range * random_unit(s), test->cache_dtype);
                }
                for (int32_t side = 0; side < 2; side++)
                    s->token_scales[side][(block * BLOCK_SIZE + slot) * test->num_kv_heads + head] =
                        (1.5f + random_unit(s)) / range;
            }
        }
    }
    assert_true(next_block > 0);
    s->params.block_table = s->table[0];
    s->params.block_table_stride = MAX_KEYS / BLOCK_SIZE;
    s->params.block_table_width = MAX_KEYS / BLOCK_SIZE;
}

/* Dense rows of the new tokens or of the chunks, with rows of NaN around each sequence's. */
static void build_dense(dense_scene *s)
{
    const dense_case *test = s->test;
    fv_attend_params *p = &s->params;
    const fv_dtype dtype = test->dense_dtype ? test->dense_dtype : test->dtype;
    const int64_t bytes = (int64_t)fv_dtype_bytes(dtype);
    const int32_t own_size = test->head_size - test->shared_size;
    p->dense = (fv_dense_keys){
        .k_head_stride = (own_size + 8) * bytes,
        .k_shared_token_stride = (test->shared_size + 5) * bytes,
        .shared_size = test->shared_size,
        .v_head_stride = (p->v_head_size + 16) * bytes,
        .dtype = dtype,
        .key_row = test->chunk ? s->key_row : NULL,
    };
    p->dense.k_token_stride = p->dense.k_head_stride * test->num_kv_heads + bytes;
    p->dense.v_token_stride = p->dense.v_head_stride * test->num_kv_heads + 3 * bytes;
    s->k = alloc_filled((size_t)(MAX_DENSE * p->dense.k_token_stride), 0xff);
    s->v = alloc_filled((size_t)(MAX_DENSE * p->dense.v_token_stride), 0xff);
    s->k_shared = alloc_filled((size_t)(MAX_DENSE * p->dense.k_shared_token_stride), 0xff);
    if (test->shared_size > 0) p->dense.k_shared = s->k_shared + FENCE * p->dense.k_shared_token_stride;
    p->dense.k = s->k + FENCE * p->dense.k_token_stride;
    p->dense.v = s->v + FENCE * p->dense.v_token_stride;

    int32_t row = 1; /* of the chunks */
    for (int32_t r = 0; r < test->num_seqs; r++) {
        int32_t first = s->query_start[r], end = s->query_start[r + 1];
        s->chunk[r] = (fv_key_range){0, s->seq_lens[r]};
        if (test->chunk) {
            s->chunk[r] = (fv_key_range){7 * r, fv_min_i32(7 * r + test->chunk, s->seq_lens[r])};
            s->key_row[r] = row - s->chunk[r].first;
            first = row;
            end = row + s->chunk[r].end - s->chunk[r].first;
            row = end + 2;
        }
        assert_true(end + FENCE < MAX_DENSE);
        for (int32_t head = 0; head < test->num_kv_heads; head++) {
            fill_rows(s, (char *)p->dense.k + head * p->dense.k_head_stride, first, end, p->dense.k_token_stride,
                      own_size, dtype);
            fill_rows(s, (char *)p->dense.v + head * p->dense.v_head_stride, first, end, p->dense.v_token_stride,
                      p->v_head_size, dtype);
        }
        fill_rows(s, s->k_shared + FENCE * p->dense.k_shared_token_stride, first, end, p->dense.k_shared_token_stride,
                  test->shared_size, dtype);
    }
}

/* --- schedule -------------------------------------------------------------------------------------------- */

static void add_items(dense_scene *s, int32_t seq, int32_t first_token, int32_t num_tokens, fv_key_range keys,
                      int32_t partial)
{
    const fv_attend_params *p = &s->params;
    const int32_t few = num_tokens * (p->num_heads / p->num_kv_heads) <= FV_DECODE_ROWS;
    const int32_t num_heads = few ? p->num_kv_heads : 1;
    for (int32_t head = 0; head < p->num_kv_heads; head += num_heads) {
        assert_true(s->num_items < MAX_ITEMS);
        s->items[s->num_items++] = (fv_work_item){
            .seq = seq,
            .table_row = seq,
            .first_token = first_token,
            .num_tokens = num_tokens,
            .first_kv_head = head,
            .num_kv_heads = num_heads,
            .first_key = keys.first,
            .end_key = keys.end,
            .partial = partial,
        };
    }
}

/* Items of one Q block: whole, or segments of `cut` keys and their reduction. */
static void add_block(dense_scene *s, int32_t seq, int32_t first_token, int32_t num_tokens)
{
    const fv_key_range keys = s->chunk[seq];
    const int32_t cut = s->test->cut;
    if (cut == 0) {
        add_items(s, seq, first_token, num_tokens, keys, -1);
        return;
    }
    const int32_t num_segments = (keys.end - keys.first + cut - 1) / cut;
    s->reduces[s->num_reduces++] = (fv_reduce_item){
        .first_token = s->query_start[seq] + first_token,
        .num_tokens = num_tokens,
        .partial = s->num_slots,
        .num_segments = num_segments,
    };
    for (int32_t first = keys.first; first < keys.end; first += cut) {
        add_items(s, seq, first_token, num_tokens, (fv_key_range){first, fv_min_i32(first + cut, keys.end)},
                  s->num_slots);
        s->num_slots += num_tokens;
    }
}

/* One item for the shared keys of all tokens, then one for the rest of each sequence. */
static void add_cascade(dense_scene *s)
{
    const int32_t num_tokens = s->query_start[s->test->num_seqs];
    add_items(s, 0, 0, num_tokens, (fv_key_range){0, s->test->shared_keys}, 0);
    for (int32_t r = 0; r < s->test->num_seqs; r++) {
        add_items(s, r, 0, s->test->query_lens[r], (fv_key_range){s->test->shared_keys, s->seq_lens[r]},
                  num_tokens + s->query_start[r]);
    }
    s->reduces[s->num_reduces++] = (fv_reduce_item){.num_tokens = num_tokens, .num_segments = 2};
    s->num_slots = 2 * num_tokens;
}

static void build_schedule(dense_scene *s)
{
    fv_attend_params *p = &s->params;
    if (s->test->num_segments > 0) {
        p->num_segments = s->test->num_segments;
        p->num_q_blocks = s->query_start[p->num_seqs] / p->block_q + p->num_seqs;
        s->num_slots = s->query_start[p->num_seqs] * p->num_segments;
    } else if (s->test->shared_keys > 0) {
        add_cascade(s);
    } else {
        for (int32_t r = s->test->out_first_seq; r < p->num_seqs; r++)
            for (int32_t token = 0; token < s->test->query_lens[r]; token += p->block_q)
                add_block(s, r, token, fv_min_i32(p->block_q, s->test->query_lens[r] - token));
    }
    if (s->test->num_segments == 0) p->items = s->items;
    p->num_items = s->num_items;
    const size_t slots = (size_t)s->num_slots + 1, heads = (size_t)p->num_heads;
    p->partial_out = s->partial_out = alloc_filled(slots * heads * (size_t)p->v_head_size * 4, 0xff);
    p->partial_max = s->partial_max = alloc_filled(slots * heads * 4, 0xff);
    p->partial_sum = s->partial_sum = alloc_filled(slots * heads * 4, 0xff);
}

static dense_scene *scene_create(const dense_case *test)
{
    dense_scene *s = calloc(1, sizeof(*s));
    assert_non_null(s);
    s->test = test;
    s->random = 11;
    for (int32_t r = 0; r < test->num_seqs; r++) {
        s->seq_lens[r] = test->seq_lens[r];
        s->query_start[r + 1] = s->query_start[r] + test->query_lens[r];
        s->causal[r] = !test->not_causal;
    }
    const int32_t num_tokens = s->query_start[test->num_seqs];
    const int32_t v_head_size = test->v_head_size ? test->v_head_size : test->head_size;
    const int64_t bytes = (int64_t)fv_dtype_bytes(test->dtype);
    assert_true(num_tokens * test->num_heads <= MAX_ROWS);
    fv_attend_params *p = &s->params;
    *p = (fv_attend_params){
        .q_head_stride = (test->head_size + 1) * bytes,
        .q_token_stride = (test->head_size + 1) * bytes * test->num_heads,
        .out_head_stride = v_head_size * bytes,
        .out_token_stride = v_head_size * bytes * test->num_heads,
        .out_first_token = s->query_start[test->out_first_seq],
        .lse = s->lse,
        .lse_token_stride = test->num_heads * 4,
        .lse_head_stride = 4,
        .sinks = test->sinks ? s->sinks : NULL,
        .alibi_slopes = s->slopes,
        .k_scale = test->head_scales ? s->k_scale : NULL,
        .v_scale = test->head_scales ? s->v_scale : NULL,
        .num_kv_scales = test->head_scales ? test->num_kv_heads : 0,
        .q_dtype = test->dtype,
        .out_dtype = test->dtype,
        .num_heads = test->num_heads,
        .num_kv_heads = test->num_kv_heads,
        .head_size = test->head_size,
        .v_head_size = v_head_size,
        .scale = 1 / sqrtf((float)test->head_size),
        .soft_cap = test->soft_cap,
        .window = test->window,
        .alibi = test->alibi,
        .context_parallel = {1, 0, 1},
        .num_seqs = test->num_seqs,
        .query_start = s->query_start,
        .seq_lens = s->seq_lens,
        .causal = s->causal,
        .tree_mask = test->tree ? s->tree : NULL,
        .block_q = test->shared_keys ? num_tokens : 16,
        .tile_keys = TILE,
        .num_segments = 1,
    };
    p->q = s->q = alloc_filled((size_t)(num_tokens * p->q_token_stride), 0xff);
    for (int32_t row = 0; row < num_tokens * test->num_heads; row++)
        fill_rows(s, s->q, row, row + 1, p->q_head_stride, test->head_size, test->dtype);
    s->out_bytes = (size_t)((num_tokens - p->out_first_token) * p->out_token_stride);
    p->out = s->out = alloc_filled(s->out_bytes, 0xff);
    for (int32_t h = 0; h < test->num_heads; h++) {
        s->sinks[h] = random_unit(s);
        s->slopes[h] = 0.05f * (float)(h + 1);
        s->k_scale[h] = 0.7f + 0.1f * (float)h;
        s->v_scale[h] = 1.7f - 0.1f * (float)h;
    }
    for (int32_t t = 0; t < num_tokens; t++) s->tree[t] = 0x5a3b9u + (uint64_t)t * 0x10305u;
    if (test->cache_dtype) build_cache(s);
    build_dense(s);
    build_schedule(s);
    return s;
}

static void scene_destroy(dense_scene *s)
{
    void *parts[] = {s->q,     s->out,         s->k,           s->k_shared,    s->v,
                     s->cache, s->partial_out, s->partial_max, s->partial_sum, s};
    for (int32_t i = 0; i < FV_ARRAY_LEN(parts); i++) free(parts[i]);
}

/* --- judging ---------------------------------------------------------------------------------------------- */

static void compare_row(const dense_scene *s, const fv_oracle_row *expected, const char *who)
{
    const fv_attend_params *p = &s->params;
    const fv_attend_row *row = &expected->row;
    const int32_t out_row = row->token - p->out_first_token;
    const char *at = s->out + out_row * p->out_token_stride + row->head * p->out_head_stride;
    double error2 = 0;
    for (int32_t d = 0; d < p->v_head_size; d++) {
        const double value = fv_float_load(at + d * (int64_t)fv_dtype_bytes(p->out_dtype), p->out_dtype);
        error2 += (value - expected->exact[d]) * (value - expected->exact[d]);
    }
    const double tolerance = 2 * expected->error + expected->out_floor;
    if (!(sqrt(error2) <= tolerance))
        fail_msg("%s: token %d, head %d: error %g > %g", who, row->token, row->head, sqrt(error2), tolerance);
    const double lse = s->lse[out_row * p->num_heads + row->head];
    if (expected->lse == -INFINITY ? lse != -INFINITY : !(fabs(lse - expected->lse) <= expected->lse_floor))
        fail_msg("%s: token %d, head %d: lse %.9g is not %.9g within %g", who, row->token, row->head, lse,
                 expected->lse, expected->lse_floor);
}

/* The oracle's row of every row of the batch, in order; `numbers` holds their results. */
static void expect_rows(fv_oracle_row *rows, double *numbers, const dense_scene *s)
{
    const fv_attend_params *p = &s->params;
    const int32_t group = p->num_heads / p->num_kv_heads;
    const fv_kv_reader reader = fv_kv_reader_of(p);
    double *scratch = malloc(fv_oracle_scratch_doubles(p, MAX_KEYS) * sizeof(double));
    assert_non_null(scratch);
    for (int32_t r = s->test->out_first_seq; r < p->num_seqs; r++) {
        for (int32_t token = 0; token < s->test->query_lens[r]; token++) {
            for (int32_t head = 0; head < p->num_heads; head++) {
                const int32_t index = (s->query_start[r] + token) * p->num_heads + head;
                fv_oracle_row *row = &rows[index];
                row->row = fv_attend_row_of(p, r, token, head);
                row->row.keys.first = fv_max_i32(row->row.keys.first, s->chunk[r].first);
                row->row.keys.end = fv_max_i32(fv_min_i32(row->row.keys.end, s->chunk[r].end), row->row.keys.first);
                row->exact = numbers + (ptrdiff_t)2 * index * p->v_head_size;
                row->ideal = row->exact + p->v_head_size;
                if (head % group == group - 1) fv_oracle_attend(row - group + 1, group, p, &reader, r, scratch);
            }
        }
    }
    free(scratch);
}

static void run_variant(dense_scene *s, const fv_kernel_table *table, const fv_attend_variant *variant)
{
    memset(s->out, 0xff, s->out_bytes);
    memset(s->lse, 0xff, sizeof(s->lse));
    attend_run_variant(&s->params, s->reduces, s->num_reduces, table, variant);
}

/* Runs every variant of every table: attend_dense where there is no cache, else attend_paged. */
static void check_case(const dense_case *test)
{
    dense_scene *s = scene_create(test);
    const int32_t first_row = s->params.out_first_token * test->num_heads;
    const int32_t num_rows = s->query_start[test->num_seqs] * test->num_heads;
    fv_oracle_row *rows = calloc((size_t)num_rows, sizeof(*rows));
    double *numbers = calloc((size_t)num_rows * 2 * (size_t)s->params.v_head_size, sizeof(*numbers));
    assert_true(rows && numbers);
    expect_rows(rows, numbers, s);

    const fv_kernel_table *const *tables;
    const int32_t num_tables = fv_cpu_tables(&tables, FV_ISA_AVX512_BF16);
    for (int32_t t = 0; t < num_tables; t++) {
        const fv_attend_variant *variants = test->cache_dtype ? tables[t]->attend_paged : tables[t]->attend_dense;
        const int32_t num = test->cache_dtype ? tables[t]->num_attend_paged : tables[t]->num_attend_dense;
        assert_true(num > 0);
        for (int32_t i = 0; i < num; i++) {
            run_variant(s, tables[t], &variants[i]);
            for (int32_t row = first_row; row < num_rows; row++) compare_row(s, &rows[row], tables[t]->name);
        }
    }
    free(rows);
    free(numbers);
    scene_destroy(s);
}

/* --- cases ------------------------------------------------------------------------------------------------ */

/* Two prefills, a short one that few rows serve, and a sequence without a query. */
static dense_case dense_alone(void)
{
    return (dense_case){
        .dtype = FV_DTYPE_BF16,
        .num_seqs = 4,
        .query_lens = {70, 3, 0, 21},
        .seq_lens = {70, 3, 5, 21},
        .num_heads = 4,
        .num_kv_heads = 2,
        .head_size = 40,
    };
}

/* A long extension, a short one, a decode and a prefill. */
static dense_case mixed(fv_dtype cache_dtype)
{
    return (dense_case){
        .dtype = FV_DTYPE_BF16,
        .cache_dtype = cache_dtype,
        .layout = FV_KV_LAYOUT_NB_2_BS_H_D,
        .num_seqs = 4,
        .query_lens = {19, 3, 1, 30},
        .seq_lens = {120, 140, 78, 30},
        .num_heads = 8,
        .num_kv_heads = 2,
        .head_size = 48,
    };
}

static void test_dense_alone(void **state)
{
    (void)state;
    static const fv_dtype dtypes[] = {FV_DTYPE_BF16, FV_DTYPE_F16, FV_DTYPE_F32};
    for (int32_t i = 0; i < FV_ARRAY_LEN(dtypes); i++) {
        dense_case test = dense_alone();
        test.dtype = dtypes[i];
        check_case(&test);
    }
    dense_case test = dense_alone();
    test.dense_dtype = FV_DTYPE_F32;
    test.v_head_size = 24;
    check_case(&test);
}

static void test_dense_masks_and_scores(void **state)
{
    (void)state;
    for (int32_t i = 0; i < 8; i++) {
        dense_case test = dense_alone();
        test.not_causal = i & 1;
        test.window = i & 2 ? 9 : 0;
        test.sinks = i & 1;
        test.soft_cap = i & 4 ? 0.6f : 0.0f;
        test.tree = i == 4;
        test.alibi = i == 3 ? FV_ALIBI_LINEAR : i == 5 ? FV_ALIBI_SQRT : FV_ALIBI_NONE;
        test.v_head_size = i & 4 ? 64 : 0;
        check_case(&test);
    }
}

static void test_dense_segments_and_grid(void **state)
{
    (void)state;
    dense_case test = dense_alone();
    test.sinks = 1;
    test.cut = 24;
    check_case(&test);
    test.cut = 0;
    test.num_segments = 1;
    check_case(&test);
    test.num_segments = 2;
    check_case(&test);
}

static void test_chunks(void **state)
{
    (void)state;
    static const fv_dtype dense_dtypes[] = {FV_DTYPE_NONE, FV_DTYPE_F32};
    for (int32_t i = 0; i < 2; i++) {
        dense_case test = mixed(FV_DTYPE_NONE);
        test.dense_dtype = dense_dtypes[i];
        test.chunk = 77;
        test.not_causal = i;
        check_case(&test);
        test.cut = 33;
        test.window = 50;
        check_case(&test);
    }
}

static void test_new_tokens_behind_the_cache(void **state)
{
    (void)state;
    static const fv_kv_layout layouts[] = {FV_KV_LAYOUT_NB_2_BS_H_D, FV_KV_LAYOUT_X_PACKED, FV_KV_LAYOUT_SHUFFLED,
                                           FV_KV_LAYOUT_PACKED_HND};
    for (int32_t i = 0; i < FV_ARRAY_LEN(layouts); i++) {
        dense_case test = mixed(FV_DTYPE_BF16);
        test.layout = layouts[i];
        test.tree = i == 0;
        check_case(&test);
        test.cut = 64;
        test.window = 40;
        check_case(&test);
    }
    dense_case test = mixed(FV_DTYPE_BF16);
    test.num_segments = 3;
    test.alibi = FV_ALIBI_LINEAR;
    check_case(&test);
    test.dense_dtype = FV_DTYPE_F32; /* lanes of bf16, rows of fp32 */
    check_case(&test);
    test.dtype = FV_DTYPE_F16;
    test.cache_dtype = FV_DTYPE_F32;
    test.dense_dtype = FV_DTYPE_NONE;
    check_case(&test);
    test.num_heads = 2; /* row groups of one and two */
    test.query_lens[1] = 2;
    check_case(&test);
}

static void test_new_tokens_behind_a_scaled_cache(void **state)
{
    (void)state;
    static const fv_dtype dtypes[] = {FV_DTYPE_F8_E4M3, FV_DTYPE_F8_E5M2, FV_DTYPE_BF16};
    for (int32_t i = 0; i < FV_ARRAY_LEN(dtypes); i++) {
        dense_case test = mixed(dtypes[i]);
        test.head_scales = 1;
        test.sinks = 1;
        check_case(&test);
        test.cut = 64;
        test.soft_cap = 0.8f;
        check_case(&test);
    }
    dense_case test = mixed(FV_DTYPE_F8_E4M3);
    test.layout = FV_KV_LAYOUT_X_PACKED;
    test.head_scales = 1;
    check_case(&test);
    test = mixed(FV_DTYPE_I8);
    test.token_head_scales = 1;
    check_case(&test);
    test.dtype = FV_DTYPE_F16;
    test.head_scales = 1;
    check_case(&test);
}

/* Items that span sequences, of many rows and of few: their shared keys lie in the cache. */
static void test_shared_prefix(void **state)
{
    (void)state;
    dense_case test = mixed(FV_DTYPE_BF16);
    test.num_seqs = 16;
    for (int32_t r = 0; r < 16; r++) {
        test.query_lens[r] = 1;
        test.seq_lens[r] = 101 + 3 * r;
    }
    test.shared_keys = 96;
    check_case(&test); /* 64 rows */
    test.num_seqs = 3;
    check_case(&test); /* 12 */
    test.cache_dtype = FV_DTYPE_F8_E4M3;
    test.head_scales = 1;
    test.query_lens[1] = 2;
    check_case(&test); /* 16 */
    test.query_lens[1] = 5;
    check_case(&test); /* 28, its first sequence alone is few */
}

static void test_out_of_later_tokens(void **state)
{
    (void)state;
    dense_case test = mixed(FV_DTYPE_BF16);
    test.out_first_seq = 1;
    check_case(&test);
    test = dense_alone();
    test.out_first_seq = 1;
    check_case(&test);
}

/* Keys whose end all heads share, as MLA's expanded keys do: own parts of a multiple of 16 elements and
 * not, rows read in place and copied, few rows and many, alone and behind a cache. */
static void test_shared_key_parts(void **state)
{
    (void)state;
    static const fv_dtype dtypes[] = {FV_DTYPE_BF16, FV_DTYPE_F16, FV_DTYPE_F32};
    for (int32_t i = 0; i < 6; i++) {
        dense_case test = dense_alone();
        test.dtype = dtypes[i % 3];
        test.dense_dtype = i == 3 ? FV_DTYPE_F32 : FV_DTYPE_NONE;
        test.head_size = i < 3 ? 192 : 72;
        test.v_head_size = i < 3 ? 128 : 24;
        test.shared_size = i < 3 ? 64 : 16 + 8 * (i == 3);
        test.num_kv_heads = i % 3 == 2 ? 4 : 2;
        check_case(&test);
        test.chunk = 41;
        test.cut = 30;
        check_case(&test);
    }
    for (int32_t i = 0; i < 4; i++) {
        dense_case test = mixed(i < 2 ? FV_DTYPE_BF16 : FV_DTYPE_F32);
        test.head_size = 56;
        test.shared_size = i % 2 ? 24 : 16;
        check_case(&test);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dense_alone),
        cmocka_unit_test(test_dense_masks_and_scores),
        cmocka_unit_test(test_dense_segments_and_grid),
        cmocka_unit_test(test_chunks),
        cmocka_unit_test(test_new_tokens_behind_the_cache),
        cmocka_unit_test(test_new_tokens_behind_a_scaled_cache),
        cmocka_unit_test(test_shared_prefix),
        cmocka_unit_test(test_shared_key_parts),
        cmocka_unit_test(test_out_of_later_tokens),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
