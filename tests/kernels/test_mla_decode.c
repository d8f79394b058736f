/* mla_decode on every CPU table that this CPU runs, against the oracle: head counts, lengths, block sizes, query
 * lengths, cache dtypes, masks, rotation at reading, context parallelism and segments. What no row may use is NaN:
 * slots past the sequences, blocks that no table names; entries of the block table that are not in use point far
 * outside. Around out and lse lie bytes that must not change. */
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
#include "reference/oracle.h"
#include "reference/reference.h"
#include "support/attend_run.h"

enum {
    MAX_SEQS = 6,
    MAX_ITEMS = 1024,
    SAMPLED_ROWS = 8, /* of a sequence, compared with the oracle */
    GUARD = 0x5c,
    GUARD_BYTES = 16 /* between the heads of out and lse */
};

typedef struct mla_case {
    fv_dtype dtype; /* of q and out */
    fv_dtype cache_dtype;
    int32_t is_ds; /* the 656-byte entry */
    int32_t lora, rope, num_heads, block_size;
    int32_t num_seqs;
    int32_t query_lens[MAX_SEQS], seq_lens[MAX_SEQS];
    int32_t rotates, has_k_scale, token_scales;
    int32_t last_is_nan; /* the key of each sequence's last new token, which the tokens before it do not see */
    int32_t window, not_causal, tree, sinks;
    float soft_cap;
    fv_context_parallel context_parallel;
    int32_t cut;          /* keys of a segment; 0: whole */
    int32_t num_segments; /* static grid instead of a list; 0: a list */
    int32_t shared_keys;  /* the sequences share their first keys, and one item for them */
} mla_case;

typedef struct mla_scene {
    const mla_case *test;
    uint64_t random;
    fv_attend_params params;
    char *q, *out, *lse, *cache;
    size_t out_bytes, lse_bytes;
    float *cosines, *sines, *token_scales;
    float sinks[128], k_scale;
    uint8_t causal[MAX_SEQS];
    uint64_t *tree;
    int32_t query_start[MAX_SEQS + 1];
    int32_t *table;
    fv_work_item items[MAX_ITEMS];
    fv_reduce_item reduces[MAX_ITEMS];
    int32_t num_reduces, num_slots;
} mla_scene;

static float random_unit(mla_scene *s)
{
    s->random = s->random * 6364136223846793005u + 1442695040888963407u;
    return (float)((double)(s->random >> 11) * 0x1p-53 * 2 - 1);
}

static void *alloc_filled(size_t bytes, int value)
{
    void *memory = aligned_alloc(64, (bytes + 127) / 64 * 64);
    assert_non_null(memory);
    return memset(memory, value, bytes);
}

/* --- the cache ------------------------------------------------------------------------------------------- */

static int32_t local_len(const mla_scene *s, int32_t seq)
{
    return fv_local_keys(&s->params.context_parallel, s->test->seq_lens[seq]);
}

/* Blocks of the sequences, dealt out backwards; returns their number, the null block among them. */
static int64_t build_table(mla_scene *s)
{
    const mla_case *test = s->test;
    int32_t width = 1;
    for (int32_t r = 0; r < test->num_seqs; r++)
        width = fv_max_i32(width, (int32_t)fv_ceil_div(local_len(s, r), test->block_size));
    s->table = alloc_filled((size_t)(test->num_seqs * width) * 4, 0);
    int32_t num_blocks = 3;
    for (int32_t r = 0; r < test->num_seqs; r++) {
        for (int32_t i = 0; i < width; i++) {
            const int32_t is_shared = r > 0 && (i + 1) * test->block_size <= test->shared_keys;
            const int32_t is_used = i * test->block_size < local_len(s, r);
            s->table[r * width + i] = is_shared ? s->table[i] : is_used ? num_blocks++ : -100000000;
        }
    }
    for (int32_t i = 0; i < test->num_seqs * width; i++)
        if (s->table[i] > 0) s->table[i] = num_blocks + 2 - s->table[i];
    s->params.block_table = s->table;
    s->params.block_table_stride = s->params.block_table_width = width;
    return num_blocks;
}

/* New tokens whose keys, and so whose results, are NaN. */
static int32_t num_hidden(const mla_case *test, int32_t seq) { return test->last_is_nan && test->query_lens[seq] > 1; }

static void write_keys(mla_scene *s, int32_t seq)
{
    const mla_case *test = s->test;
    const int32_t entry = test->lora + test->rope;
    float *row = alloc_filled((size_t)entry * 4, 0);
    for (int32_t key = seq > 0 ? test->shared_keys : 0; key < local_len(s, seq); key++) {
        for (int32_t d = 0; d < entry; d++) row[d] = 2 * random_unit(s);
        if (key >= local_len(s, seq) - num_hidden(test, seq)) row[0] = row[entry - 1] = NAN;
        const int64_t block = s->table[seq * s->params.block_table_stride + key / test->block_size];
        const int64_t slot = block * test->block_size + key % test->block_size;
        if (test->token_scales) s->token_scales[slot] = 1.5f + random_unit(s);
        fv_kv_write_params write = {
            .k = row,
            .src_dtype = FV_DTYPE_F32,
            .cache = s->params.cache,
            .slot_mapping = &slot,
            .num_tokens = 1,
            .k_scale = s->params.k_scale,
            .num_kv_scales = s->params.num_kv_scales,
        };
        write.cache.k_scales = (fv_scale_plane){0};
        assert_int_equal(fv_reference_kv_write(NULL, &write), FV_OK);
    }
    free(row);
}

static void build_cache(mla_scene *s)
{
    const mla_case *test = s->test;
    const int64_t num_blocks = build_table(s);
    const fv_kv_layout layout = test->is_ds ? FV_KV_LAYOUT_LATENT_FP8_DS : FV_KV_LAYOUT_LATENT;
    size_t bytes;
    assert_int_equal(
        fv_kv_view_bytes(&bytes, layout, test->cache_dtype, num_blocks, test->block_size, 1, test->lora + test->rope),
        FV_OK);
    s->cache = alloc_filled(bytes, 0xff);
    fv_kv_view *cache = &s->params.cache;
    assert_int_equal(fv_kv_view_init(cache, s->cache, layout, test->cache_dtype, num_blocks, test->block_size, 1,
                                     test->lora + test->rope),
                     FV_OK);
    cache->v_head_size = test->lora;
    s->token_scales = alloc_filled((size_t)(num_blocks * test->block_size) * 4, 0xff);
    if (test->token_scales) cache->k_scales = (fv_scale_plane){s->token_scales, test->block_size * 4, 4, 4};
    for (int32_t r = 0; r < test->num_seqs; r++) write_keys(s, r);
}

/* --- schedule ---------------------------------------------------------------------------------------------- */

static void add_item(mla_scene *s, int32_t seq, int32_t first_token, int32_t num_tokens, int32_t first_key,
                     int32_t end_key, int32_t partial)
{
    assert_true(s->params.num_items < MAX_ITEMS);
    s->items[s->params.num_items++] = (fv_work_item){
        .seq = seq,
        .table_row = seq,
        .first_token = first_token,
        .num_tokens = num_tokens,
        .num_kv_heads = 1,
        .first_key = first_key,
        .end_key = end_key,
        .partial = partial,
    };
}

static void add_block(mla_scene *s, int32_t seq, int32_t first_token, int32_t num_tokens)
{
    const int32_t num_keys = local_len(s, seq), cut = s->test->cut;
    if (cut == 0 || num_keys <= cut) {
        add_item(s, seq, first_token, num_tokens, 0, num_keys, -1);
        return;
    }
    const int32_t num_segments = (int32_t)fv_ceil_div(num_keys, cut);
    s->reduces[s->num_reduces++] = (fv_reduce_item){
        .first_token = s->query_start[seq] + first_token,
        .num_tokens = num_tokens,
        .partial = s->num_slots,
        .num_segments = num_segments,
    };
    for (int32_t first = 0; first < num_keys; first += cut, s->num_slots += num_tokens)
        add_item(s, seq, first_token, num_tokens, first, fv_min_i32(first + cut, num_keys), s->num_slots);
}

/* One item for the shared keys of all tokens, one for the rest of each sequence. */
static void add_cascade(mla_scene *s)
{
    const mla_case *test = s->test;
    const int32_t num_tokens = s->query_start[test->num_seqs];
    add_item(s, 0, 0, num_tokens, 0, test->shared_keys, 0);
    for (int32_t r = 0; r < test->num_seqs; r++)
        add_item(s, r, 0, test->query_lens[r], test->shared_keys, local_len(s, r), num_tokens + s->query_start[r]);
    s->reduces[s->num_reduces++] = (fv_reduce_item){.num_tokens = num_tokens, .num_segments = 2};
    s->num_slots = 2 * num_tokens;
}

/* As the planner cuts: short queries whole, long ones in blocks of block_q. */
static void build_schedule(mla_scene *s, int32_t block_m)
{
    const mla_case *test = s->test;
    fv_attend_params *p = &s->params;
    p->items = s->items;
    p->num_items = s->num_reduces = s->num_slots = 0;
    p->block_q = fv_max_i32(1, block_m / test->num_heads);
    if (test->num_segments > 0) {
        p->items = NULL;
        p->num_segments = test->num_segments;
        p->num_q_blocks = s->query_start[test->num_seqs] / p->block_q + test->num_seqs;
        s->num_slots = s->query_start[test->num_seqs] * test->num_segments;
    } else if (test->shared_keys > 0) {
        p->block_q = s->query_start[test->num_seqs];
        add_cascade(s);
    } else {
        for (int32_t r = 0; r < test->num_seqs; r++) {
            const int32_t is_short = test->query_lens[r] * test->num_heads <= FV_DECODE_ROWS;
            const int32_t step = is_short ? fv_max_i32(1, test->query_lens[r]) : p->block_q;
            for (int32_t token = 0; token < test->query_lens[r]; token += step)
                add_block(s, r, token, fv_min_i32(step, test->query_lens[r] - token));
        }
    }
    const size_t rows = (size_t)(s->num_slots + 1) * (size_t)test->num_heads;
    p->partial_out = alloc_filled(rows * (size_t)test->lora * 4, 0xff);
    p->partial_max = alloc_filled(rows * 4, 0xff);
    p->partial_sum = alloc_filled(rows * 4, 0xff);
}

static void drop_schedule(mla_scene *s)
{
    free(s->params.partial_out);
    free(s->params.partial_max);
    free(s->params.partial_sum);
}

/* --- the scene --------------------------------------------------------------------------------------------- */

static void build_rotation(mla_scene *s)
{
    const mla_case *test = s->test;
    const int32_t half = test->rope / 2;
    int32_t num_positions = 1;
    for (int32_t r = 0; r < test->num_seqs; r++) num_positions = fv_max_i32(num_positions, test->seq_lens[r]);
    s->cosines = alloc_filled((size_t)(num_positions * half) * 4, 0);
    s->sines = alloc_filled((size_t)(num_positions * half) * 4, 0);
    for (int32_t position = 0; position < num_positions; position++) {
        for (int32_t i = 0; i < half; i++) {
            const double angle = position * pow(10000, -2.0 * i / test->rope);
            s->cosines[position * half + i] = (float)cos(angle);
            s->sines[position * half + i] = (float)sin(angle);
        }
    }
    if (test->rotates) s->params.rotation = (fv_key_rotation){s->cosines, s->sines, test->rope, num_positions};
}

static mla_scene *scene_create(const mla_case *test)
{
    mla_scene *s = calloc(1, sizeof(*s));
    assert_non_null(s);
    s->test = test;
    s->random = 5;
    s->k_scale = 0.125f;
    for (int32_t r = 0; r < test->num_seqs; r++) {
        s->query_start[r + 1] = s->query_start[r] + test->query_lens[r];
        s->causal[r] = !test->not_causal;
    }
    const int32_t num_tokens = s->query_start[test->num_seqs], head_size = test->lora + test->rope;
    const int64_t bytes = (int64_t)fv_dtype_bytes(test->dtype);
    fv_attend_params *p = &s->params;
    *p = (fv_attend_params){
        .q_head_stride = (head_size + 3) * bytes,
        .q_token_stride = (head_size + 3) * bytes * test->num_heads + bytes,
        .out_head_stride = test->lora * bytes + GUARD_BYTES,
        .out_token_stride = (test->lora * bytes + GUARD_BYTES) * test->num_heads,
        .lse_head_stride = 4 + GUARD_BYTES,
        .lse_token_stride = (4 + GUARD_BYTES) * test->num_heads,
        .sinks = test->sinks ? s->sinks : NULL,
        .k_scale = test->has_k_scale ? &s->k_scale : NULL,
        .num_kv_scales = test->has_k_scale,
        .q_dtype = test->dtype,
        .out_dtype = test->dtype,
        .num_heads = test->num_heads,
        .num_kv_heads = 1,
        .head_size = head_size,
        .v_head_size = test->lora,
        .scale = 1 / sqrtf((float)head_size),
        .soft_cap = test->soft_cap,
        .window = test->window,
        .context_parallel = test->context_parallel.world > 0 ? test->context_parallel : (fv_context_parallel){1, 0, 1},
        .num_seqs = test->num_seqs,
        .query_start = s->query_start,
        .seq_lens = test->seq_lens,
        .causal = s->causal,
        .num_segments = 1,
    };
    for (int32_t h = 0; h < test->num_heads; h++) s->sinks[h] = random_unit(s);
    s->tree = alloc_filled((size_t)num_tokens * 8 + 8, 0);
    for (int32_t t = 0; t < num_tokens; t++) s->tree[t] = 0x5a3b9u + (uint64_t)t * 0x10305u;
    if (test->tree) p->tree_mask = s->tree;
    p->q = s->q = alloc_filled((size_t)(num_tokens * p->q_token_stride) + 8, 0xff);
    for (int32_t row = 0; row < num_tokens * test->num_heads; row++) {
        char *q = s->q + row / test->num_heads * p->q_token_stride + row % test->num_heads * p->q_head_stride;
        for (int32_t d = 0; d < head_size; d++) fv_float_store(q + d * bytes, 2 * random_unit(s), test->dtype);
    }
    s->out_bytes = (size_t)(num_tokens * p->out_token_stride) + GUARD_BYTES;
    s->lse_bytes = (size_t)(num_tokens * p->lse_token_stride) + GUARD_BYTES;
    s->out = alloc_filled(s->out_bytes, GUARD);
    s->lse = alloc_filled(s->lse_bytes, GUARD);
    p->out = s->out + GUARD_BYTES;
    p->lse = (float *)(void *)(s->lse + GUARD_BYTES);
    build_rotation(s);
    build_cache(s);
    return s;
}

static void scene_destroy(mla_scene *s)
{
    void *parts[] = {s->q, s->out, s->lse, s->cache, s->cosines, s->sines, s->tree, s->table, s->token_scales, s};
    for (int32_t i = 0; i < FV_ARRAY_LEN(parts); i++) free(parts[i]);
}

/* --- judging ------------------------------------------------------------------------------------------------- */

static void compare_row(const mla_scene *s, const fv_oracle_row *expected, const char *who)
{
    const fv_attend_params *p = &s->params;
    const fv_attend_row *row = &expected->row;
    const char *at = (const char *)p->out + row->token * p->out_token_stride + row->head * p->out_head_stride;
    double error2 = 0;
    for (int32_t d = 0; d < p->v_head_size; d++) {
        const double value = fv_float_load(at + d * (int64_t)fv_dtype_bytes(p->out_dtype), p->out_dtype);
        error2 += (value - expected->exact[d]) * (value - expected->exact[d]);
    }
    const double tolerance = 2 * expected->error + expected->out_floor;
    if (!(sqrt(error2) <= tolerance))
        fail_msg("%s: %d heads, token %d, head %d: error %g > %g", who, p->num_heads, row->token, row->head,
                 sqrt(error2), tolerance);
    float lse;
    memcpy(&lse, (const char *)p->lse + row->token * p->lse_token_stride + row->head * p->lse_head_stride, 4);
    if (expected->lse == -INFINITY ? lse != -INFINITY : !(fabs(lse - expected->lse) <= expected->lse_floor))
        fail_msg("%s: %d heads, token %d, head %d: lse %.9g is not %.9g within %g", who, p->num_heads, row->token,
                 row->head, (double)lse, expected->lse, expected->lse_floor);
}

static void assert_guard(const char *at)
{
    for (int32_t i = 0; i < GUARD_BYTES; i++)
        if (at[i] != GUARD) fail_msg("a byte beside the result is 0x%02x", (unsigned char)at[i]);
}

/* No row is left out, none is NaN, and nothing beside them was written. */
static void check_all_rows(const mla_scene *s, const char *who)
{
    const fv_attend_params *p = &s->params;
    const int64_t bytes = (int64_t)fv_dtype_bytes(p->out_dtype);
    const int32_t num_rows = s->query_start[p->num_seqs] * p->num_heads;
    int32_t seq = 0;
    assert_guard(s->out);
    assert_guard(s->lse);
    for (int32_t row = 0; row < num_rows; row++) {
        while (row / p->num_heads >= s->query_start[seq + 1]) seq++;
        if (row / p->num_heads >= s->query_start[seq + 1] - num_hidden(s->test, seq)) continue;
        const char *out = (const char *)p->out + row * p->out_head_stride;
        const char *lse = (const char *)p->lse + row * p->lse_head_stride;
        for (int32_t d = 0; d < p->v_head_size; d++)
            if (!(fabsf(fv_float_load(out + d * bytes, p->out_dtype)) <= 8.0f))
                fail_msg("%s: row %d, element %d is %g", who, row, d,
                         (double)fv_float_load(out + d * bytes, p->out_dtype));
        assert_guard(out + p->v_head_size * bytes);
        assert_guard(lse + 4);
    }
}

/* The first, the last, and some rows of sequence `seq` by the oracle; returns how many. */
static int32_t expect_rows(fv_oracle_row *rows, double *numbers, mla_scene *s, int32_t seq)
{
    const fv_attend_params *p = &s->params;
    const int32_t num_rows = (s->test->query_lens[seq] - num_hidden(s->test, seq)) * p->num_heads;
    const int32_t num = fv_min_i32(num_rows, SAMPLED_ROWS);
    for (int32_t i = 0; i < num; i++) {
        int32_t row = i == 0 ? 0 : i == 1 ? num_rows - 1 : (int32_t)((double)num_rows * (0.5 + random_unit(s) / 2));
        row = fv_min_i32(row, num_rows - 1);
        rows[i].row = fv_attend_row_of(p, seq, row / p->num_heads, row % p->num_heads);
        rows[i].exact = numbers + (ptrdiff_t)2 * i * p->v_head_size;
        rows[i].ideal = rows[i].exact + p->v_head_size;
    }
    if (num == 0) return 0;
    const fv_kv_reader reader = fv_kv_reader_of(p);
    double *scratch = malloc(fv_oracle_scratch_doubles(p, s->test->seq_lens[seq]) * sizeof(double));
    assert_non_null(scratch);
    fv_oracle_attend(rows, num, p, &reader, seq, scratch);
    free(scratch);
    return num;
}

static void run_variant(mla_scene *s, const fv_kernel_table *table, const fv_attend_variant *variant)
{
    fv_attend_params *p = &s->params;
    build_schedule(s, variant->block_m);
    p->tile_keys = variant->tile_keys;
    memset(s->out, GUARD, s->out_bytes);
    memset(s->lse, GUARD, s->lse_bytes);
    for (int32_t row = 0; row < s->query_start[p->num_seqs] * p->num_heads; row++) {
        memset((char *)p->out + row * p->out_head_stride, 0xff, (size_t)p->v_head_size * fv_dtype_bytes(p->out_dtype));
    }
    attend_run_variant(p, s->reduces, s->num_reduces, table, variant);
    drop_schedule(s);
}

/* The variants that rescale by multiplication; test_amla.c has the others. */
static void check_case(const mla_case *test)
{
    mla_scene *s = scene_create(test);
    static fv_oracle_row rows[MAX_SEQS][SAMPLED_ROWS];
    int32_t num_rows[MAX_SEQS];
    double *numbers = malloc((size_t)(MAX_SEQS * SAMPLED_ROWS * 2 * test->lora) * sizeof(double));
    assert_non_null(numbers);
    for (int32_t r = 0; r < test->num_seqs; r++)
        num_rows[r] = expect_rows(rows[r], numbers + (ptrdiff_t)r * SAMPLED_ROWS * 2 * test->lora, s, r);

    const fv_kernel_table *const *tables;
    const int32_t num_tables = fv_cpu_tables(&tables, FV_ISA_AVX512);
    for (int32_t t = 1; t < num_tables; t++) { /* 0 is the reference */
        assert_true(tables[t]->num_mla_decode > 0);
        for (int32_t i = 0; i < tables[t]->num_mla_decode; i++) {
            const fv_attend_variant *variant = &tables[t]->mla_decode[i];
            if (variant->rescaling != FV_RESCALING_MULTIPLY || strstr(variant->name, "amla")) continue;
            run_variant(s, tables[t], variant);
            check_all_rows(s, tables[t]->name);
            for (int32_t r = 0; r < test->num_seqs; r++)
                for (int32_t row = 0; row < num_rows[r]; row++) compare_row(s, &rows[r][row], tables[t]->name);
        }
    }
    free(numbers);
    scene_destroy(s);
}

/* --- cases ----------------------------------------------------------------------------------------------------- */

static const fv_dtype cache_dtypes[] = {FV_DTYPE_BF16, FV_DTYPE_F32, FV_DTYPE_F16, FV_DTYPE_F8_E4M3, FV_DTYPE_F8_E5M2};

/* Small latents, all lengths. */
static mla_case small_case(int32_t num_heads, int32_t query_len)
{
    mla_case test = {
        .dtype = FV_DTYPE_BF16,
        .cache_dtype = FV_DTYPE_BF16,
        .lora = 32,
        .rope = 64,
        .num_heads = num_heads,
        .block_size = 16,
        .num_seqs = 5,
        .seq_lens = {0, 1, 20, 140, 1027},
    };
    for (int32_t r = 0; r < test.num_seqs; r++)
        test.query_lens[r] = fv_max_i32(1, fv_min_i32(query_len, test.seq_lens[r]));
    return test;
}

/* DeepSeek's sizes, one sequence or a few. */
static mla_case deepseek_case(int32_t num_heads, int32_t query_len, int32_t seq_len)
{
    return (mla_case){
        .dtype = FV_DTYPE_BF16,
        .cache_dtype = FV_DTYPE_BF16,
        .lora = 512,
        .rope = 64,
        .num_heads = num_heads,
        .block_size = 64,
        .num_seqs = 2,
        .query_lens = {query_len, 1},
        .seq_lens = {seq_len, 20},
    };
}

static void test_heads_and_query_lengths(void **state)
{
    (void)state;
    static const int32_t heads[] = {1, 3, 9, 16, 63, 64, 126, 128};
    static const int32_t query_lens[] = {1, 2, 4, 8, 16};
    static const int32_t block_sizes[] = {16, 1, 64, 17};
    int32_t index = 0;
    for (int32_t h = 0; h < FV_ARRAY_LEN(heads); h++) {
        for (int32_t i = 0; i < FV_ARRAY_LEN(query_lens); i++, index++) {
            mla_case test = small_case(heads[h], query_lens[i]);
            test.dtype = index % 3 == 0 ? FV_DTYPE_F32 : index % 3 == 1 ? FV_DTYPE_BF16 : FV_DTYPE_F16;
            test.cache_dtype = cache_dtypes[index % 5];
            test.block_size = block_sizes[index % 4];
            test.has_k_scale = index % 5 >= 3 || index % 7 == 0;
            test.rotates = index % 2;
            test.cut = index % 3 == 2 ? 128 : 0;
            if (heads[h] * query_lens[i] > 512) test.num_seqs = 4;
            check_case(&test);
        }
    }
}

static void test_deepseek_sizes(void **state)
{
    (void)state;
    static const int32_t heads[] = {1, 2, 4, 16, 128};
    for (int32_t h = 0; h < FV_ARRAY_LEN(heads); h++) {
        mla_case test = deepseek_case(heads[h], 1, heads[h] == 2 ? 4096 : 300);
        check_case(&test);
        test.is_ds = 1;
        test.cache_dtype = FV_DTYPE_F8_E4M3;
        test.block_size = heads[h] == 16 ? 1 : 17;
        check_case(&test);
        test.rotates = 1;
        test.query_lens[0] = 3;
        test.cut = 128;
        check_case(&test);
    }
    mla_case test = deepseek_case(16, 1, 4096);
    test.dtype = FV_DTYPE_F32;
    test.cut = 1024;
    check_case(&test);
}

static void test_sizes_of_any_multiple_of_8(void **state)
{
    (void)state;
    static const int32_t sizes[][2] = {{64, 8}, {40, 32}, {24, 64}, {72, 16}, {256, 32}};
    for (int32_t i = 0; i < FV_ARRAY_LEN(sizes); i++) {
        for (int32_t heads = 2; heads <= 32; heads *= 4) {
            mla_case test = small_case(heads, 2);
            test.lora = sizes[i][0];
            test.rope = sizes[i][1];
            test.cache_dtype = cache_dtypes[i];
            test.rotates = i % 2;
            check_case(&test);
        }
    }
}

static void test_masks_and_scores(void **state)
{
    (void)state;
    for (int32_t i = 0; i < 16; i++) {
        mla_case test = small_case(i % 4 < 2 ? 2 : 24, i % 8 < 4 ? 5 : 17);
        test.not_causal = i & 1;
        test.window = i & 2 ? 33 : 0;
        test.tree = i % 5 == 4;
        test.sinks = i & 4;
        test.soft_cap = i & 8 ? 0.7f : 0.0f;
        test.token_scales = i % 3 == 0;
        test.cut = i % 4 == 3 ? 64 : 0;
        check_case(&test);
    }
}

/* Windows that begin inside a tile, with few rows and many, read in place and brought to fp32 first. */
static void test_windows(void **state)
{
    (void)state;
    for (int32_t i = 0; i < 8; i++) {
        mla_case test = small_case(i & 1 ? 2 : 24, 2);
        test.window = 29;
        test.rotates = i & 2;
        test.has_k_scale = i & 4;
        check_case(&test);
    }
}

/* A key that is NaN stays with the rows that see it. */
static void test_hidden_nan(void **state)
{
    (void)state;
    for (int32_t i = 0; i < 8; i++) {
        mla_case test = small_case(i & 1 ? 2 : 24, i & 2 ? 2 : 5);
        test.cache_dtype = FV_DTYPE_F32;
        test.last_is_nan = 1;
        test.rotates = i & 4;
        check_case(&test);
    }
}

static void test_long_queries(void **state)
{
    (void)state;
    static const int32_t heads[] = {1, 7, 128};
    for (int32_t h = 0; h < FV_ARRAY_LEN(heads); h++) {
        mla_case test = small_case(heads[h], 1);
        test.num_seqs = 3;
        test.query_lens[2] = 20;
        test.seq_lens[1] = test.query_lens[1] = 70;
        check_case(&test);
        test.cut = 64;
        test.rotates = 1;
        check_case(&test);
    }
}

static void test_static_grid(void **state)
{
    (void)state;
    for (int32_t heads = 1; heads <= 128; heads *= 8) {
        for (int32_t segments = 1; segments <= 3; segments++) {
            mla_case test = small_case(heads, 3);
            test.num_segments = segments;
            test.sinks = segments == 2;
            check_case(&test);
        }
    }
}

static void test_context_parallelism(void **state)
{
    (void)state;
    for (int32_t rank = 0; rank < 3; rank++) {
        for (int32_t i = 0; i < 4; i++) {
            mla_case test = small_case(i < 2 ? 2 : 40, 4);
            test.context_parallel = (fv_context_parallel){3, rank, i % 2 ? 16 : 1};
            test.rotates = 1;
            test.cut = i == 3 ? 64 : 0;
            test.tree = i == 1;
            test.is_ds = i == 2;
            if (test.is_ds) {
                test.cache_dtype = FV_DTYPE_F8_E4M3;
                test.lora = 512;
                test.num_seqs = 4;
            }
            check_case(&test);
        }
    }
}

/* An item that spans sequences: their shared keys, all before the new tokens. */
static void test_shared_prefix(void **state)
{
    (void)state;
    for (int32_t heads = 2; heads <= 32; heads *= 16) {
        mla_case test = {
            .dtype = FV_DTYPE_BF16,
            .cache_dtype = FV_DTYPE_BF16,
            .lora = 32,
            .rope = 64,
            .num_heads = heads,
            .block_size = 16,
            .num_seqs = 4,
            .query_lens = {1, 2, 1, 1},
            .seq_lens = {70, 81, 130, 64 + 1},
            .shared_keys = 64,
            .rotates = heads == 2,
        };
        check_case(&test);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_heads_and_query_lengths),
        cmocka_unit_test(test_deepseek_sizes),
        cmocka_unit_test(test_sizes_of_any_multiple_of_8),
        cmocka_unit_test(test_masks_and_scores),
        cmocka_unit_test(test_windows),
        cmocka_unit_test(test_hidden_nan),
        cmocka_unit_test(test_long_queries),
        cmocka_unit_test(test_static_grid),
        cmocka_unit_test(test_context_parallelism),
        cmocka_unit_test(test_shared_prefix),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
