/* The batch of a workload: lengths, tables and masks. */
#include <math.h>
#include <stdlib.h>
#include <unistd.h>

#include "bench/random_data.h"
#include "bench/workload.h"
#include "core/error.h"
#include "ops/attend_paged.h"

int32_t fv_workload_is_causal(const fv_workload *w)
{
    return w->problem.type == FV_ATTENTION_DECODER && !w->problem.not_causal;
}

static int32_t keys_of_token(const fv_workload *w, int32_t seq, int32_t token)
{
    const int32_t seq_len = w->spec.seq_lens[seq], context = seq_len - w->spec.query_lens[seq];
    const fv_key_range keys = fv_row_keys(&w->problem.context_parallel, seq_len, context + token,
                                          fv_workload_is_causal(w), w->problem.window);
    if (!w->tree_mask) return keys.end - keys.first;
    int32_t count = fv_max_i32(0, fv_min_i32(keys.end, context) - keys.first);
    const uint64_t mask = w->tree_mask[w->query_start[seq] + token];
    for (int32_t bit = 0; bit < 64; bit++) {
        count += context + bit >= keys.first && context + bit < keys.end && (mask >> bit & 1);
    }
    return count;
}

static void count_flops(fv_workload *w)
{
    const fv_problem *problem = &w->problem;
    const fv_mla_shape *mla = &problem->mla;
    const int32_t has_weights = problem->kind == FV_ATTENTION_MLA && !mla->absorbed;
    const double per_key = 2.0 * problem->mha.num_heads * (problem->mha.head_size + problem->mha.v_head_size);
    const int32_t up_size = mla->qk_nope_head_dim + mla->v_head_dim; /* elements of a head's row of kv_up */
    const double per_expanded = 2.0 * mla->num_heads * (up_size + mla->qk_rope_head_dim);
    const double per_product = 2.0 * mla->num_heads * mla->kv_lora_rank * up_size; /* of a token, or of a key */
    w->flops = 0;
    for (int32_t seq = 0; seq < w->spec.num_seqs; seq++) {
        double pairs = 0;
        for (int32_t token = 0; token < w->spec.query_lens[seq]; token++) pairs += keys_of_token(w, seq, token);
        const double absorbed = per_key * pairs + per_product * w->spec.query_lens[seq];
        const double expanded = per_expanded * pairs + per_product * w->spec.seq_lens[seq];
        w->flops += has_weights ? fmin(absorbed, expanded) : per_key * pairs;
    }
}

/* First blocks of each sequence that it shares with the one before it in its group, and the blocks of all. */
static fv_status count_blocks(fv_workload *w)
{
    const fv_batch_spec *spec = &w->spec;
    const int32_t block_size = w->problem.block_size;
    w->shared_blocks = calloc((size_t)spec->num_seqs, sizeof(*w->shared_blocks));
    if (!w->shared_blocks) return fv_fail(FV_ERR_NO_MEMORY, "no memory for %d sequences", spec->num_seqs);
    w->num_blocks = 1;
    for (int32_t seq = 0; seq < spec->num_seqs; seq++) {
        const int32_t context = spec->seq_lens[seq] - spec->query_lens[seq];
        if (seq > 0 && spec->groups[seq] == spec->groups[seq - 1]) {
            w->shared_blocks[seq] = fv_min_i32(w->shared_prefix, context) / block_size;
        }
        w->num_blocks += fv_ceil_div(spec->seq_lens[seq], block_size) - w->shared_blocks[seq];
    }
    if (w->num_blocks <= INT32_MAX) return FV_OK;
    return fv_fail(FV_ERR_INVALID, "the batch needs more than 2^31 blocks");
}

/* The blocks 1 .. num_blocks - 1 in random order; the caller frees. */
static int32_t *shuffled_blocks(int64_t num_blocks)
{
    int32_t *blocks = malloc((size_t)num_blocks * sizeof(*blocks));
    if (!blocks) return NULL;
    uint64_t state = 0x2545f4914f6cdd1du;
    for (int64_t i = 0; i < num_blocks; i++) blocks[i] = (int32_t)i;
    for (int64_t i = num_blocks - 1; i > 1; i--) {
        const int64_t other = 1 + (int64_t)(fv_random_next(&state) % (uint64_t)i);
        const int32_t kept = blocks[i];
        blocks[i] = blocks[other];
        blocks[other] = kept;
    }
    return blocks;
}

/* Lengths, the block table, and the slots of the new tokens. */
static fv_status make_tables(fv_workload *w)
{
    const fv_batch_spec *spec = &w->spec;
    const int32_t block_size = w->problem.block_size;
    const int64_t width = fv_ceil_div(spec->max_seq_len, block_size);
    w->query_start = malloc(((size_t)spec->num_seqs + 1) * sizeof(*w->query_start));
    w->block_table = calloc((size_t)spec->num_seqs * (size_t)width, sizeof(*w->block_table));
    w->slot_mapping = malloc((size_t)spec->num_tokens * sizeof(*w->slot_mapping));
    int32_t *blocks = shuffled_blocks(w->num_blocks);
    if (!w->query_start || !w->block_table || !w->slot_mapping || !blocks) {
        free(blocks);
        return fv_fail(FV_ERR_NO_MEMORY, "no memory for the tables of %d sequences", spec->num_seqs);
    }
    int64_t next_block = 1;
    int32_t token = 0;
    for (int32_t seq = 0; seq < spec->num_seqs; seq++) {
        int32_t *row = w->block_table + seq * width;
        const int32_t seq_len = spec->seq_lens[seq];
        for (int32_t i = 0; i < fv_ceil_div(seq_len, block_size); i++) {
            row[i] = i < w->shared_blocks[seq] ? row[i - width] : blocks[next_block++];
        }
        w->query_start[seq] = token;
        for (int32_t position = seq_len - spec->query_lens[seq]; position < seq_len; position++) {
            w->slot_mapping[token++] = (int64_t)row[position / block_size] * block_size + position % block_size;
        }
    }
    w->query_start[spec->num_seqs] = token;
    free(blocks);
    return FV_OK;
}

/* Flags of batches that are not causal, and the masks of a binary tree: token i hangs below (i - 1) / 2. */
static fv_status make_masks(fv_workload *w)
{
    const fv_batch_spec *spec = &w->spec;
    if (w->problem.not_causal) w->causal = calloc((size_t)spec->num_seqs, sizeof(*w->causal));
    if (w->problem.tree_mask) w->tree_mask = calloc((size_t)spec->num_tokens, sizeof(*w->tree_mask));
    if ((w->problem.not_causal && !w->causal) || (w->problem.tree_mask && !w->tree_mask)) {
        return fv_fail(FV_ERR_NO_MEMORY, "no memory for the masks of %d tokens", spec->num_tokens);
    }
    for (int32_t seq = 0; seq < spec->num_seqs && w->tree_mask; seq++) {
        for (int32_t i = 0; i < spec->query_lens[seq]; i++) {
            uint64_t *mask = &w->tree_mask[w->query_start[seq] + i];
            if (i > 0) *mask = w->tree_mask[w->query_start[seq] + (i - 1) / 2];
            if (i < 64) *mask |= 1ull << i;
        }
    }
    return FV_OK;
}

/* The block table, the slots, the order of the blocks and the masks. */
static double table_bytes(const fv_workload *w)
{
    const double width = (double)fv_ceil_div(w->spec.max_seq_len, w->problem.block_size);
    const double of_seq = width * sizeof(*w->block_table) + (w->problem.not_causal ? 1 : 0);
    const double of_token = (double)(sizeof(*w->slot_mapping) + (w->problem.tree_mask ? sizeof(*w->tree_mask) : 0));
    return w->spec.num_seqs * of_seq + w->spec.num_tokens * of_token + (double)w->num_blocks * sizeof(int32_t);
}

int64_t fv_workload_memory_limit(fv_device *device)
{
    size_t free_bytes, total_bytes;
    if (!device->host_is_device && fv_device_memory(&free_bytes, &total_bytes, device) == FV_OK) {
        return (int64_t)(free_bytes / 8 * 7);
    }
    return (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE) / 4 * 3;
}

fv_status fv_workload_check_memory(const fv_workload *w, double cache_bytes, double tensor_bytes)
{
    const double gib = 1 << 30, bytes = cache_bytes + tensor_bytes + table_bytes(w);
    const double limit = (double)fv_workload_memory_limit(w->device);
    if (bytes <= limit) return FV_OK;
    return fv_fail(FV_ERR_NO_MEMORY,
                   "the batch needs %.1f GiB (cache %.1f, queries to output %.1f, tables %.1f); accepted here: up to "
                   "%.1f GiB",
                   bytes / gib, cache_bytes / gib, tensor_bytes / gib, table_bytes(w) / gib, limit / gib);
}

fv_status fv_workload_read_batch(fv_workload *w, fv_context *context, fv_device *device, const fv_problem *problem,
                                 const char *spec_text, int32_t shared_prefix)
{
    *w = (fv_workload){.context = context, .device = device, .problem = *problem, .shared_prefix = shared_prefix};
    fv_status status = fv_batch_spec_init(&w->spec, spec_text);
    if (status == FV_OK) status = count_blocks(w);
    if (status != FV_OK) fv_workload_deinit(w);
    return status;
}

fv_status fv_workload_fill_batch(fv_workload *w)
{
    const fv_batch_spec *spec = &w->spec;
    fv_status status = make_tables(w);
    if (status == FV_OK) status = make_masks(w);
    if (status != FV_OK) return status;
    const int32_t width = (int32_t)fv_ceil_div(spec->max_seq_len, w->problem.block_size);
    w->batch = (fv_batch){
        .struct_size = sizeof(w->batch),
        .num_seqs = spec->num_seqs,
        .num_tokens = spec->num_tokens,
        .max_query_len = spec->max_query_len,
        .max_seq_len = spec->max_seq_len,
        .query_start = w->query_start,
        .seq_lens = spec->seq_lens,
        .block_table = w->block_table,
        .block_table_stride = width,
        .block_table_width = width,
        .slot_mapping = w->slot_mapping,
        .causal = w->causal,
        .tree_mask = w->tree_mask,
    };
    w->bounds = (fv_bounds){
        .struct_size = sizeof(w->bounds),
        .max_num_seqs = spec->num_seqs,
        .max_num_tokens = spec->num_tokens,
        .max_query_len = spec->max_query_len,
        .max_seq_len = spec->max_seq_len,
    };
    count_flops(w);
    return FV_OK;
}

fv_status fv_workload_init_batch(fv_workload *w, fv_context *context, const fv_problem *problem, const char *spec_text,
                                 int32_t shared_prefix)
{
    *w = (fv_workload){0};
    fv_device *cpu;
    fv_status status = fv_device_find(&cpu, context, "cpu");
    if (status == FV_OK) status = fv_workload_read_batch(w, context, cpu, problem, spec_text, shared_prefix);
    if (status != FV_OK) return status;
    status = fv_workload_check_memory(w, 0, 0);
    if (status == FV_OK) status = fv_workload_fill_batch(w);
    if (status != FV_OK) fv_workload_deinit(w);
    return status;
}
