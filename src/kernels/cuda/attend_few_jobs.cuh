/* The jobs of a block of threads that stays: one after the other, each found while the one before is worked on.
 *
 * A job is 16 rows of an item and one of its KV heads. A block's first one has the block's number; the next one it
 * takes from a counter (fv_attend_params.claims), so that blocks on a fast multiprocessor take more of them. What a
 * job is lies behind four trips to memory, one after the other. One warp, the scout, makes them a step at a time,
 * between its tiles: what a step asks for, the next one finds there.
 *
 *   step      claim        item          lengths          rows                blocks
 *   asks for  a number     the item      the sequence     its first blocks
 *   writes                                                the next slot       says that it is there
 *
 * On a static grid a job is a cell. Where queries are whole its number says which sequence, so that the item follows
 * from the lengths, which are asked for at once, with the number of sequences: two trips, and padding has no jobs. Else
 * the scout searches, and claims on where a cell is empty. */
#ifndef FV_KERNELS_CUDA_ATTEND_FEW_JOBS_CUH
#define FV_KERNELS_CUDA_ATTEND_FEW_JOBS_CUH

#include "kernels/cuda/attend_job.cuh"

enum { FEW_ROWS = 16, FEW_FIRST_KEYS = 64, FEW_ITEM_WORDS = sizeof(fv_work_item) / 4 };

typedef enum few_slot_state {
    FEW_NO_JOB = 0, /* nor any after it */
    FEW_NOTHING,    /* a place in the list that has no job */
    FEW_JOB,
} few_slot_state;

/* Rows row0 to row0 + 15 of a job. */
typedef struct few_slot {
    attend_job job;
    attend_row rows[FEW_ROWS];
    attend_keys keys;
    int32_t row0;
    int32_t state;
} few_slot;

/* In shared memory. */
typedef struct few_jobs {
    few_slot slots[2];                    /* slot n % 2: that of the block's n-th job */
    int32_t first_blocks[FEW_FIRST_KEYS]; /* of the newest job's first keys, from a whole tile on; -1: not seen */
    int32_t num_known;                    /* jobs whose slot has been written */
} few_jobs;

typedef enum few_step { FEW_CLAIM = 0, FEW_ITEM, FEW_LENGTHS, FEW_FIND_ROWS, FEW_BLOCKS, FEW_DONE } few_step;

/* The scout's registers: what it has asked for. */
typedef struct few_scout {
    int32_t step;
    int32_t number;    /* of the job in the list, or of the cell */
    int32_t num_jobs;  /* -1: not known yet (whole queries) */
    int32_t word;      /* a lane's part of what the last step asked for */
    int32_t item_word; /* word `lane` of the item */
    int32_t blocks[2]; /* of the first keys `lane` and lane + 32 */
} few_scout;

/* Where tiles of 16 keys begin. */
static __device__ __forceinline__ int32_t few_first_key(const attend_keys *keys) { return keys->first / 16 * 16; }

static __device__ __forceinline__ void ask_few_blocks(few_scout *scout, const attend_args *args, const few_slot *slot,
                                                      int32_t lane)
{
    const bool has_keys = slot->state == FEW_JOB && slot->keys.first < slot->keys.end;
    const int32_t first = has_keys ? few_first_key(&slot->keys) : 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int32_t key = first + lane + i * 32;
        const bool is_seen = has_keys && key >= slot->keys.first && key < slot->keys.end;
        scout->blocks[i] = is_seen ? slot->job.table[split_key(args, key).x] : -1;
    }
}

/* Writes a slot: the rows of `job` from row0 on. */
static __device__ __forceinline__ void fill_few_slot(few_slot *slot, const attend_args *args, const attend_job *job,
                                                     int32_t row0, int32_t lane)
{
    const bool is_row = lane < FEW_ROWS && row0 + lane < job->num_rows;
    const attend_row row = is_row ? row_of(args, job, row0 + lane) : attend_row{};
    const bool has_keys = is_row && row.first < row.end;
    attend_keys keys;
    keys.first = __reduce_min_sync(~0u, has_keys ? row.first : INT32_MAX);
    keys.end = __reduce_max_sync(~0u, has_keys ? row.end : 0);
    keys.full_first = __reduce_max_sync(~0u, is_row ? row.first : 0);
    keys.full_end = __reduce_min_sync(~0u, is_row ? row.end : INT32_MAX);
    if (lane < FEW_ROWS) slot->rows[lane] = row;
    if (lane == 0) {
        slot->job = *job;
        slot->keys = keys;
        slot->row0 = row0;
        slot->state = FEW_JOB;
    }
    __syncwarp();
}

/* The number of the block's next job. The last of all blocks to find none leaves the counter as it was. */
static __device__ __forceinline__ int32_t claim_few_job(const attend_args *args, int32_t number, int32_t num_jobs)
{
    int32_t *claims = args->params.claims;
    if (!claims || num_jobs <= (int32_t)gridDim.x) return number + (int32_t)gridDim.x;
    const int32_t taken = atomicAdd(claims, 1);
    if (taken == num_jobs - 1) *claims = 0;
    return taken + (int32_t)gridDim.x;
}

static __device__ __forceinline__ int32_t load_num_seqs(const fv_attend_params *params)
{
    return params->num_seqs_at ? *params->num_seqs_at : params->num_seqs;
}

/* Words 0 .. 6 of a sequence and a head: attend_lengths, and the number of sequences. */
static __device__ __forceinline__ int32_t load_length_word(const attend_args *args, int32_t seq, int32_t kv_head,
                                                           int32_t lane)
{
    const fv_attend_params *params = &args->params;
    switch (lane) {
    case 0: return params->query_start[seq];
    case 1: return params->query_start[seq + 1];
    case 2: return params->seq_lens[seq];
    case 3: return params->causal ? params->causal[seq] : 1;
    case 4: return __float_as_int(fv_scale_of_head(params->k_scale, params->num_kv_scales, kv_head));
    case 5: return __float_as_int(fv_scale_of_head(params->v_scale, params->num_kv_scales, kv_head));
    case 6: return load_num_seqs(params);
    default: return 0;
    }
}

/* The item of which the lanes have the words, with one KV head. */
static __device__ __forceinline__ fv_work_item few_item_of(const few_scout *scout, int32_t head)
{
    union {
        fv_work_item item;
        int32_t words[FEW_ITEM_WORDS];
    } found;
#pragma unroll
    for (int i = 0; i < FEW_ITEM_WORDS; i++) found.words[i] = __shfl_sync(~0u, scout->item_word, i);
    found.item.first_kv_head += head;
    found.item.num_kv_heads = 1;
    return found.item;
}

/* A cell of the static grid: heads of a segment side by side, segments of a Q block one after the other. */
typedef struct few_cell {
    int32_t q_block, segment, head;
} few_cell;

static __device__ __forceinline__ few_cell few_cell_of(const attend_args *args, int32_t number)
{
    const uint32_t num_heads = (uint32_t)args->params.num_kv_heads, num_segments = (uint32_t)args->params.num_segments;
    const uint32_t at = (uint32_t)number / num_heads, q_block = at / num_segments;
    return few_cell{(int32_t)q_block, (int32_t)(at - q_block * num_segments), number - (int32_t)(at * num_heads)};
}

/* A lane's word of a cell's item; false: the cell is empty. Last Q blocks first: causal ones have the most keys. */
static __device__ __forceinline__ bool find_grid_word(int32_t *word, const attend_args *args, int32_t number,
                                                      int32_t lane)
{
    const fv_attend_params *params = &args->params;
    const few_cell cell = few_cell_of(args, number);
    union {
        fv_work_item item;
        int32_t words[FEW_ITEM_WORDS];
    } found;
    if (!find_grid_item(&found.item, params, params->num_q_blocks - 1 - cell.q_block, cell.head, cell.segment))
        return false;
#pragma unroll
    for (int i = 0; i < FEW_ITEM_WORDS; i++)
        if (lane == i) *word = found.words[i];
    return true;
}

static __device__ __forceinline__ attend_lengths few_lengths_of(const few_scout *scout)
{
    attend_lengths lengths;
    lengths.query_start = __shfl_sync(~0u, scout->word, 0);
    lengths.query_end = __shfl_sync(~0u, scout->word, 1);
    lengths.seq_len = __shfl_sync(~0u, scout->word, 2);
    lengths.causal = __shfl_sync(~0u, scout->word, 3);
    lengths.k_head_scale = __int_as_float(__shfl_sync(~0u, scout->word, 4));
    lengths.v_head_scale = __int_as_float(__shfl_sync(~0u, scout->word, 5));
    return lengths;
}

/* Asks for the lengths of the cell's sequence, of which the number is known to be less than `num_seqs`. */
static __device__ __forceinline__ void ask_few_sequence(few_scout *scout, const attend_args *args, int32_t lane)
{
    const fv_attend_params *params = &args->params;
    const few_cell cell = few_cell_of(args, scout->number);
    const bool is_first = scout->num_jobs < 0;
    scout->word = 0;
    /* What the launch was made with can be read; a graph may have come to serve more. */
    if (is_first && cell.q_block >= params->num_seqs && cell.q_block >= load_num_seqs(params)) return;
    scout->word = load_length_word(args, cell.q_block, cell.head, lane);
    if (is_first && lane * 32 < params->block_table_width) /* the table is on its way meanwhile */
        ptx_prefetch_l2(params->block_table + cell.q_block * params->block_table_stride + lane * 32);
}

/* The item of a cell of whole queries, of which the lanes have the words. */
static __device__ __forceinline__ fv_work_item few_cell_item(const attend_args *args, int32_t number,
                                                             const attend_lengths *lengths)
{
    const few_cell cell = few_cell_of(args, number);
    return grid_item_of(&args->params, cell.q_block, lengths->query_start, 0, lengths->query_end - lengths->query_start,
                        lengths->seq_len, cell.head, cell.segment);
}

/* Which of its item's heads a job has. */
static __device__ __forceinline__ int32_t few_head_of(const few_scout *scout, const attend_args *args)
{
    return args->params.items ? scout->number % args->params.num_kv_heads : 0;
}

/* Makes a step towards the slot of job `n` + 1 of the block, all lanes of the scout's warp together. */
static __device__ __forceinline__ void step_few_scout(few_scout *scout, few_jobs *jobs, const attend_args *args,
                                                      int32_t n, int32_t lane)
{
    const few_slot *now = &jobs->slots[n & 1];
    few_slot *next = &jobs->slots[(n + 1) & 1];
    const int32_t num_heads = args->params.num_kv_heads;
    switch (scout->step) {
    case FEW_CLAIM:
        if (now->state == FEW_JOB && now->row0 + FEW_ROWS < now->job.num_rows) { /* more rows of this one */
            const attend_job job = now->job;
            fill_few_slot(next, args, &job, now->row0 + FEW_ROWS, lane);
            ask_few_blocks(scout, args, next, lane);
            scout->step = FEW_BLOCKS;
            break;
        }
        scout->word = lane == 0 ? claim_few_job(args, scout->number, scout->num_jobs) : 0;
        scout->step = FEW_ITEM;
        break;
    case FEW_ITEM: {
        scout->number = __shfl_sync(~0u, scout->word, 0);
        if (scout->num_jobs >= 0 && scout->number >= scout->num_jobs) {
            if (lane == 0) next->state = FEW_NO_JOB;
            scout->step = FEW_BLOCKS;
        } else if (args->params.items) {
            const int32_t *item = (const int32_t *)&args->params.items[scout->number / num_heads];
            scout->item_word = lane < FEW_ITEM_WORDS ? item[lane] : 0;
            scout->step = FEW_LENGTHS;
        } else if (args->params.whole_queries) {
            ask_few_sequence(scout, args, lane);
            scout->step = FEW_FIND_ROWS;
        } else {
            scout->step = find_grid_word(&scout->item_word, args, scout->number, lane) ? FEW_LENGTHS : FEW_CLAIM;
        }
        break;
    }
    case FEW_LENGTHS: {
        const int32_t seq = __shfl_sync(~0u, scout->item_word, offsetof(fv_work_item, seq) / 4);
        const int32_t first_head = __shfl_sync(~0u, scout->item_word, offsetof(fv_work_item, first_kv_head) / 4);
        scout->word = load_length_word(args, seq, first_head + few_head_of(scout, args), lane);
        scout->step = FEW_FIND_ROWS;
        break;
    }
    case FEW_FIND_ROWS: {
        const attend_lengths lengths = few_lengths_of(scout);
        const bool is_cell = !args->params.items && args->params.whole_queries;
        if (scout->num_jobs < 0)
            scout->num_jobs = __shfl_sync(~0u, scout->word, 6) * num_heads * args->params.num_segments;
        scout->step = FEW_BLOCKS;
        if (is_cell && scout->number >= scout->num_jobs) {
            if (lane == 0) next->state = FEW_NO_JOB;
            break;
        }
        const int32_t head = few_head_of(scout, args);
        const fv_work_item item = is_cell ? few_cell_item(args, scout->number, &lengths) : few_item_of(scout, head);
        const attend_job job = job_of(args, &item, item.first_kv_head, &lengths);
        fill_few_slot(next, args, &job, 0, lane);
        const bool has_head = is_cell ||
                              head < __shfl_sync(~0u, scout->item_word, offsetof(fv_work_item, num_kv_heads) / 4);
        if (!has_head && lane == 0) next->state = FEW_NOTHING;
        __syncwarp();
        ask_few_blocks(scout, args, next, lane);
        break;
    }
    case FEW_BLOCKS:
        jobs->first_blocks[lane] = scout->blocks[0];
        jobs->first_blocks[lane + 32] = scout->blocks[1];
        __threadfence_block();
        __syncwarp();
        if (lane == 0) *(volatile int32_t *)&jobs->num_known = n + 2;
        scout->step = FEW_DONE;
        break;
    default: break;
    }
}

/* Before the first job there is nothing: job -1. All threads; a barrier must follow. */
static __device__ __forceinline__ few_scout begin_few_jobs(few_jobs *jobs, const attend_args *args)
{
    few_scout scout = {};
    scout.num_jobs = args->num_jobs;
    scout.step = FEW_ITEM;
    scout.word = (int32_t)blockIdx.x;
    if (threadIdx.x == 0) {
        jobs->slots[1].state = FEW_NOTHING;
        jobs->num_known = 0;
    }
    return scout;
}

/* The next job's slot, where it is known already that there is one; else NULL. */
static __device__ __forceinline__ const few_slot *next_few_slot(const few_jobs *jobs, int32_t n, int32_t lane)
{
    int32_t num_known = 0;
    if (lane == 0) num_known = *(const volatile int32_t *)&jobs->num_known;
    num_known = __shfl_sync(~0u, num_known, 0);
    __syncwarp();
    const few_slot *next = &jobs->slots[(n + 1) & 1];
    return num_known > n + 1 && next->state == FEW_JOB ? next : NULL;
}

#endif
