/* Building a step. Keys and values are functions of (sequence, position, head, element), so that any cache and
 * any expected row can be made from them without keeping them. */
#include "backends/step_fixture.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/float.h"

#define ALIGNMENT 256

static void *allocate(size_t bytes)
{
    return aligned_alloc(ALIGNMENT, (bytes + 2 * ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
}

/* About normal, from -1.7 to 1.7, always the same for the same numbers. */
static float number(uint64_t a, uint64_t b, uint64_t c)
{
    uint64_t x = a * 0x9e3779b97f4a7c15u + b * 0xbf58476d1ce4e5b9u + c * 0x94d049bb133111ebu + 1;
    float sum = 0;
    for (int32_t i = 0; i < 3; i++) {
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
        x = (x ^ x >> 27) * 0x94d049bb133111ebu;
        x ^= x >> 31;
        sum += (float)(x >> 40) * 0x1p-24f - 0.5f;
    }
    return sum * 1.15f;
}

/* Sequences with a common prefix have the same keys there. */
typedef enum which { QUERY = 1, KEY = 2, VALUE = 3 } which;

static int32_t shares(const step_fixture *step, int32_t seq, int32_t position)
{
    const int32_t block = position / step->problem.block_size;
    return step->block_table[seq * step->width + block] == step->block_table[block];
}

static float rounded(float value, fv_dtype dtype)
{
    uint32_t stored;
    fv_float_store(&stored, value, dtype);
    return fv_float_load(&stored, dtype);
}

static float element_of(const step_fixture *step, which of, int32_t seq, int32_t position, int32_t head, int32_t d)
{
    const int32_t owner = of != QUERY && shares(step, seq, position) ? 0 : seq;
    const uint64_t place = (uint64_t)head * 4096 + (uint64_t)d;
    return rounded(number((uint64_t)of * 1000003 + (uint64_t)owner, (uint64_t)position, place), step->problem.q_dtype);
}

static void fill_row(const step_fixture *step, void *row, which of, int32_t seq, int32_t position, int32_t heads)
{
    const size_t bytes = fv_dtype_bytes(step->problem.q_dtype);
    const int32_t size = step->problem.mha.head_size;
    for (int32_t i = 0; i < heads * size; i++) {
        fv_float_store((char *)row + (size_t)i * bytes, element_of(step, of, seq, position, i / size, i % size),
                       step->problem.q_dtype);
    }
}

static int32_t context_of(const step_fixture *step, int32_t seq)
{
    return step->seq_lens[seq] - (step->query_start[seq + 1] - step->query_start[seq]);
}

static void build_tables(step_fixture *step, int32_t shared_keys)
{
    const int32_t bs = step->problem.block_size;
    int32_t next = 1;
    step->width = (step->max_seq_len + bs - 1) / bs;
    step->block_table = calloc((size_t)(step->num_seqs * step->width), sizeof(int32_t));
    step->slot_mapping = calloc((size_t)step->num_tokens, sizeof(int64_t));
    for (int32_t seq = 0; seq < step->num_seqs; seq++) {
        int32_t *row = step->block_table + seq * step->width;
        for (int32_t i = 0; i * bs < step->seq_lens[seq]; i++) {
            row[i] = seq > 0 && (i + 1) * bs <= shared_keys ? step->block_table[i] : next++;
        }
        for (int32_t token = step->query_start[seq]; token < step->query_start[seq + 1]; token++) {
            const int32_t position = context_of(step, seq) + token - step->query_start[seq];
            step->slot_mapping[token] = (int64_t)row[position / bs] * bs + position % bs;
        }
    }
    step->num_blocks = next;
}

static void build_tensors(step_fixture *step)
{
    const fv_mha_shape *mha = &step->problem.mha;
    const size_t row = (size_t)mha->head_size * fv_dtype_bytes(step->problem.q_dtype);
    const size_t q_row = (size_t)mha->num_heads * row, kv_row = (size_t)mha->num_kv_heads * row;
    step->q = allocate((size_t)step->num_tokens * q_row);
    step->k = allocate((size_t)step->num_tokens * kv_row);
    step->v = allocate((size_t)step->num_tokens * kv_row);
    step->out = allocate((size_t)step->num_tokens * q_row);
    step->lse = allocate((size_t)(step->num_tokens * mha->num_heads) * sizeof(float));
    for (int32_t seq = 0; seq < step->num_seqs; seq++) {
        for (int32_t token = step->query_start[seq]; token < step->query_start[seq + 1]; token++) {
            const int32_t position = context_of(step, seq) + token - step->query_start[seq];
            const size_t at = (size_t)token;
            fill_row(step, (char *)step->q + at * q_row, QUERY, seq, position, mha->num_heads);
            fill_row(step, (char *)step->k + at * kv_row, KEY, seq, position, mha->num_kv_heads);
            fill_row(step, (char *)step->v + at * kv_row, VALUE, seq, position, mha->num_kv_heads);
        }
    }
    step->sinks = allocate((size_t)mha->num_heads * sizeof(float));
    step->slopes = allocate((size_t)mha->num_heads * sizeof(float));
    for (int32_t head = 0; head < mha->num_heads; head++) {
        step->sinks[head] = 0.3f * (float)head - 0.5f;
        step->slopes[head] = exp2f(-(float)(head + 1));
    }
}

void step_fixture_init(step_fixture *step, fv_context *context, fv_device *device, const fv_problem *problem,
                       const step_lens *lens, int32_t num_seqs, int32_t shared_keys)
{
    *step = (step_fixture){.context = context, .device = device, .problem = *problem, .num_seqs = num_seqs};
    step->problem.struct_size = sizeof(fv_problem);
    step->problem.kind = FV_ATTENTION_MHA;
    step->problem.kv_layout_any = 1;
    step->problem.returns_lse = 1;
    if (step->problem.block_size == 0) step->problem.block_size = 16;
    if (!context && fv_context_create(&step->context, NULL) != FV_OK) abort();
    if (!device && fv_device_find(&step->device, step->context, "cpu") != FV_OK) abort();
    step->query_start = calloc((size_t)num_seqs + 1, sizeof(int32_t));
    step->seq_lens = calloc((size_t)num_seqs, sizeof(int32_t));
    for (int32_t seq = 0; seq < num_seqs; seq++) {
        step->query_start[seq + 1] = step->query_start[seq] + lens[seq].query_len;
        step->seq_lens[seq] = lens[seq].seq_len;
        if (lens[seq].query_len > step->max_query_len) step->max_query_len = lens[seq].query_len;
        if (lens[seq].seq_len > step->max_seq_len) step->max_seq_len = lens[seq].seq_len;
    }
    step->num_tokens = step->query_start[num_seqs];
    build_tables(step, shared_keys);
    build_tensors(step);
}

static void drop_plan(step_fixture *step)
{
    fv_plan_destroy(step->plan);
    free(step->workspace);
    free(step->cache);
    step->plan = NULL;
    step->workspace = step->cache = NULL;
}

void step_fixture_deinit(step_fixture *step)
{
    void *const memory[] = {step->query_start, step->seq_lens, step->block_table, step->slot_mapping,
                            step->q,           step->k,        step->v,           step->out,
                            step->lse,         step->sinks,    step->slopes};
    drop_plan(step);
    for (size_t i = 0; i < sizeof(memory) / sizeof(memory[0]); i++) free(memory[i]);
    fv_context_destroy(step->context);
}

/* Writes the context of every sequence through the public operation. */
static fv_status write_context(step_fixture *step)
{
    const fv_mha_shape *mha = &step->problem.mha;
    const fv_dtype dtype = step->problem.q_dtype;
    const size_t row = (size_t)(mha->num_kv_heads * mha->head_size) * fv_dtype_bytes(dtype);
    const size_t most = (size_t)step->max_seq_len;
    char *k = allocate(most * row), *v = allocate(most * row);
    int64_t *slots = calloc(most, sizeof(*slots));
    fv_status status = FV_OK;
    for (int32_t seq = 0; seq < step->num_seqs && status == FV_OK; seq++) {
        const int32_t context = context_of(step, seq), bs = step->problem.block_size;
        for (int32_t i = 0; i < context; i++) {
            fill_row(step, k + (size_t)i * row, KEY, seq, i, mha->num_kv_heads);
            fill_row(step, v + (size_t)i * row, VALUE, seq, i, mha->num_kv_heads);
            slots[i] = (int64_t)step->block_table[seq * step->width + i / bs] * bs + i % bs;
        }
        const fv_tensor k_rows = fv_tensor_3d(k, dtype, context, mha->num_kv_heads, mha->head_size);
        const fv_tensor v_rows = fv_tensor_3d(v, dtype, context, mha->num_kv_heads, mha->head_size);
        if (context > 0)
            status = fv_kv_write(step->device, &step->view, &k_rows, &v_rows, slots, context, NULL, NULL, 0, NULL);
    }
    free(k);
    free(v);
    free(slots);
    return status;
}

fv_status step_fixture_plan(step_fixture *step, const char *backend, const fv_plan_options *options)
{
    const fv_problem *problem = &step->problem;
    const fv_bounds bounds = {sizeof(bounds), step->num_seqs, step->num_tokens, step->max_query_len, step->max_seq_len};
    fv_plan_options complete = options ? *options : (fv_plan_options){0};
    complete.struct_size = sizeof(complete);
    complete.backend = backend;
    complete.device = step->device;
    drop_plan(step);
    fv_status status = fv_plan_create(&step->plan, step->context, problem, &bounds, &complete);
    if (status != FV_OK) return status;
    size_t bytes = 0;
    const fv_dtype kv_dtype = problem->kv_dtype ? problem->kv_dtype : problem->q_dtype;
    const fv_kv_layout layout = fv_plan_kv_layout(step->plan);
    status = fv_kv_view_bytes(&bytes, layout, kv_dtype, step->num_blocks, problem->block_size,
                              problem->mha.num_kv_heads, problem->mha.head_size);
    if (status != FV_OK) return status;
    step->workspace = allocate(fv_plan_workspace_bytes(step->plan));
    step->cache = allocate(bytes);
    memset(step->cache, 0xff, bytes); /* NaN where nothing is written */
    status = fv_kv_view_init(&step->view, step->cache, layout, kv_dtype, step->num_blocks, problem->block_size,
                             problem->mha.num_kv_heads, problem->mha.head_size);
    return status == FV_OK ? write_context(step) : status;
}

fv_batch step_fixture_batch(const step_fixture *step)
{
    return (fv_batch){
        .struct_size = sizeof(fv_batch),
        .num_seqs = step->num_seqs,
        .num_tokens = step->num_tokens,
        .query_start = step->query_start,
        .seq_lens = step->seq_lens,
        .block_table = step->block_table,
        .block_table_stride = step->width,
        .block_table_width = step->width,
        .slot_mapping = step->slot_mapping,
    };
}

fv_layer step_fixture_layer(const step_fixture *step)
{
    const fv_mha_shape *mha = &step->problem.mha;
    const fv_dtype dtype = step->problem.q_dtype;
    return (fv_layer){
        .struct_size = sizeof(fv_layer),
        .q = fv_tensor_3d(step->q, dtype, step->num_tokens, mha->num_heads, mha->head_size),
        .k = fv_tensor_3d(step->k, dtype, step->num_tokens, mha->num_kv_heads, mha->head_size),
        .v = fv_tensor_3d(step->v, dtype, step->num_tokens, mha->num_kv_heads, mha->head_size),
        .kv_cache = step->view,
        .out = fv_tensor_3d(step->out, dtype, step->num_tokens, mha->num_heads, mha->head_size),
        .lse = fv_tensor_2d(step->lse, FV_DTYPE_F32, step->num_tokens, mha->num_heads),
        .sinks = step->problem.sinks ? step->sinks : NULL,
        .alibi_slopes = step->problem.alibi ? step->slopes : NULL,
    };
}

fv_status step_fixture_run(step_fixture *step)
{
    const fv_batch batch = step_fixture_batch(step);
    const fv_layer layer = step_fixture_layer(step);
    const fv_status status = fv_plan_update(step->plan, &batch, NULL);
    return status == FV_OK ? fv_plan_run(step->plan, &layer, step->workspace, NULL) : status;
}

double step_fixture_out(const step_fixture *step, int32_t token, int32_t head, int32_t element)
{
    const fv_mha_shape *mha = &step->problem.mha;
    const size_t at = ((size_t)token * (size_t)mha->num_heads + (size_t)head) * (size_t)mha->head_size +
                      (size_t)element;
    const fv_dtype dtype = step->problem.q_dtype;
    return fv_float_load((char *)step->out + at * fv_dtype_bytes(dtype), dtype);
}

double step_fixture_expect(double *out, const step_fixture *step, int32_t seq, int32_t token, int32_t head)
{
    const fv_mha_shape *mha = &step->problem.mha;
    const int32_t size = mha->head_size, position = context_of(step, seq) + token;
    const int32_t kv_head = head / (mha->num_heads / mha->num_kv_heads);
    const int32_t window = step->problem.window;
    const int32_t first = window > 0 && position >= window ? position - window + 1 : 0;
    double sum = 0;
    memset(out, 0, (size_t)size * sizeof(*out));
    for (int32_t key = first; key <= position; key++) {
        double score = 0;
        for (int32_t d = 0; d < size; d++) {
            score += (double)element_of(step, QUERY, seq, position, head, d) *
                     element_of(step, KEY, seq, key, kv_head, d);
        }
        const double weight = exp(score / sqrt(size)); /* scores are small: no maximum is needed */
        sum += weight;
        for (int32_t d = 0; d < size; d++) out[d] += weight * element_of(step, VALUE, seq, key, kv_head, d);
    }
    if (step->problem.sinks) sum += exp((double)step->sinks[head]);
    for (int32_t d = 0; d < size; d++) out[d] /= sum;
    return log(sum);
}
