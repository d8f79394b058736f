/* The jobs of a block of threads that stays: one after the other, each found while the one before is worked on.
 *
 * A job is up to 8 rows, or up to 16, of an item and one of its KV heads. A block's first one has the block's number;
 * the next one it takes from a counter (fv_attend_params.claims), so that blocks on a fast multiprocessor take more of
 * them. What a job is lies behind trips to memory, one after the other. One warp, the scout, makes them a step at a
 * time, between its tiles: what a step asks for, the next one finds there.
 *
 *   step      claim        item           flags               rows                blocks
 *   asks for  a number     the item       causal, scales      its first blocks
 *   writes                                                    the next slot       says that it is there
 *
 * An item has its sequence's lengths, so flags are a step only where sequences differ in masks or heads in scales. On a
 * static grid a job is a cell. Where queries are whole its number says which sequence, so that the item follows from
 * the lengths, which are asked for in its place, with the number of sequences; padding has no jobs. Else the scout
 * searches, and claims on where a cell is empty.
 *
 * While a block's first job is looked for nothing else goes on, and each instruction counts, at 5 cycles: where its
 * item says all of it, all warps find it at once (begin_first_job). */
#ifndef FV_KERNELS_CUDA_ATTEND_FEW_JOBS_CUH
#define FV_KERNELS_CUDA_ATTEND_FEW_JOBS_CUH

#include "kernels/cuda/attend_job.cuh"

enum { FEW_MOST_ROWS = 16, FEW_FIRST_KEYS = 192 /* at most */, FEW_ITEM_WORDS = sizeof(fv_work_item) / 4 };

typedef enum few_slot_state {
    FEW_NO_JOB = 0, /* nor any after it */
    FEW_NOTHING,    /* a place in the list that has no job */
    FEW_JOB,
} few_slot_state;

/* attend_row, of what these kernels need. */
typedef struct alignas(16) few_row {
    int32_t first, end, token, head;
} few_row;

/* Where a row's results go: attend_target.to and attend_end.partial. */
typedef struct alignas(16) few_target {
    char *to;
    int32_t partial;
} few_target;

/* Rows of a job from row0 on. */
typedef struct few_slot {
    attend_job job;
    few_row rows[FEW_MOST_ROWS];
    few_target targets[FEW_MOST_ROWS]; /* written by a warp of the job's own (place_few_row) */
    attend_keys keys;
    int32_t row0;
    int32_t state;
} few_slot;

/* In shared memory. */
typedef struct few_jobs {
    few_slot slots[2]; /* slot n % 2: that of the block's n-th job */
    /* [n % 2]: of its first keys, from a whole tile on; -1: not seen */
    int32_t first_blocks[2][FEW_FIRST_KEYS];
    int32_t num_known; /* jobs whose slot has been written */
} few_jobs;

typedef enum few_step { FEW_CLAIM = 0, FEW_ITEM, FEW_FLAGS, FEW_FIND_ROWS, FEW_BLOCKS, FEW_DONE } few_step;

/* The scout's registers: what it has asked for. */
typedef struct few_scout {
    int32_t step;
    int32_t number;                      /* of the job in the list, or of the cell */
    int32_t num_jobs;                    /* -1: not known yet (whole queries) */
    int32_t word;                        /* a lane's part of what the last step asked for: FEW_QUERY_START .. */
    int32_t item_word;                   /* word `lane` of the item */
    int32_t blocks[FEW_FIRST_KEYS / 32]; /* of the first keys lane, lane + 32 ... */
} few_scout;

/* Lanes of few_scout.word. */
enum { FEW_QUERY_START = 0, FEW_QUERY_END, FEW_SEQ_LEN, FEW_CAUSAL, FEW_K_SCALE, FEW_V_SCALE, FEW_NUM_SEQS };

/* Where tiles of 16 keys begin. */
static __device__ __forceinline__ int32_t few_first_key(const attend_keys *keys) { return keys->first / 16 * 16; }

/* Asks for the blocks of the first keys; of pages that hold tiles, for that of each tile with a key that some row
 * sees. */
template <class S>
static __device__ __forceinline__ void ask_few_blocks(few_scout *scout, const attend_args *args, const attend_job *job,
                                                      const attend_keys *keys, int32_t lane)
{
    const bool has_keys = keys->first < keys->end;
    const int32_t first = has_keys ? few_first_key(keys) : 0;
#pragma unroll
    for (int i = 0; i < S::FIRST_KEYS / 32; i++) {
        const int32_t key = first + lane + i * 32, from = args->pages_hold_tiles ? key / 16 * 16 : key;
        const bool is_seen = has_keys && from < keys->end && (args->pages_hold_tiles || key >= keys->first);
        scout->blocks[i] = is_seen ? job->table[split_key(args, from).x] : -1;
    }
}

/* Which of its KV head's rows row r is: of two heads, each has half of a slot's. */
template <class S> static __device__ __forceinline__ int32_t few_item_row(int32_t r)
{
    return S::HEADS > 1 ? r % S::ITEM_ROWS : r;
}

/* row_of; of two heads `of_job` is less than the rows of a slot. */
template <class S>
static __device__ __forceinline__ few_row few_row_of(const attend_args *args, const attend_job *job, int32_t of_job)
{
    const fv_attend_params *params = &args->params;
    const int32_t r = few_item_row<S>(of_job), kv_head = job->kv_head + (S::HEADS > 1 ? of_job / S::ITEM_ROWS : 0);
    const int32_t token = divide_index(r, args->group), new_token = job->item.first_token + token;
    const fv_key_range seen = row_keys(&params->context_parallel, job->seq_len, job->context + new_token, job->causal,
                                       params->window);
    few_row row;
    row.first = fv_max_i32(seen.first, job->item.first_key);
    row.end = fv_max_i32(row.first, fv_min_i32(seen.end, job->item.end_key));
    row.token = job->query_start + new_token;
    row.head = kv_head * job->group + r - token * job->group;
    return row;
}

template <class S> static __device__ __forceinline__ bool is_few_row(const attend_job *job, int32_t row0, int32_t r)
{
    return r < S::BLOCK_M && few_item_row<S>(row0 + r) < job->num_rows;
}

/* The lane's row of the slot's of `job` from row0 on; all zeros behind the last one. */
template <class S>
static __device__ __forceinline__ few_row few_row_of_lane(const attend_args *args, const attend_job *job, int32_t row0,
                                                          int32_t lane)
{
    const few_row row = few_row_of<S>(args, job, row0 + lane);
    return is_few_row<S>(job, row0, lane) ? row : few_row{0, 0, 0, 0};
}

/* The keys of the lanes' rows. */
static __device__ __forceinline__ attend_keys few_keys_of(const few_row *row, bool is_row)
{
    const bool has_keys = row->first < row->end;
    attend_keys keys;
    keys.first = __reduce_min_sync(~0u, has_keys ? row->first : INT32_MAX);
    keys.end = __reduce_max_sync(~0u, has_keys ? row->end : 0);
    keys.full_first = __reduce_max_sync(~0u, row->first);
    keys.full_end = __reduce_min_sync(~0u, is_row ? row->end : INT32_MAX);
    return keys;
}

static __device__ __forceinline__ void write_few_rows(few_slot *slot, const attend_keys *keys, const few_row *row,
                                                      int32_t lane)
{
    if (lane < FEW_MOST_ROWS) slot->rows[lane] = *row;
    if (lane == 0) slot->keys = *keys;
}

static __device__ __forceinline__ void write_few_job(few_slot *slot, const attend_job *job, int32_t row0, int32_t lane)
{
    if (lane == 0) {
        slot->job = *job;
        slot->row0 = row0;
        slot->state = FEW_JOB;
    }
}

/* Writes a slot, the rows of `job` from row0 on, and asks for its first blocks. */
template <class S>
static __device__ __forceinline__ void fill_few_slot(few_slot *slot, few_scout *scout, const attend_args *args,
                                                     const attend_job *job, int32_t row0, int32_t lane)
{
    const few_row row = few_row_of_lane<S>(args, job, row0, lane);
    const attend_keys keys = few_keys_of(&row, is_few_row<S>(job, row0, lane));
    ask_few_blocks<S>(scout, args, job, &keys, lane);
    write_few_rows(slot, &keys, &row, lane);
    write_few_job(slot, job, row0, lane);
    __syncwarp();
}

static __device__ __forceinline__ int32_t load_num_seqs(const fv_attend_params *params)
{
    return params->num_seqs_at ? *params->num_seqs_at : params->num_seqs;
}

/* A lane's word of what is not in an item. */
static __device__ __forceinline__ int32_t load_few_flag(const fv_attend_params *params, int32_t seq, int32_t kv_head,
                                                        int32_t lane)
{
    int32_t word = lane == FEW_CAUSAL ? 1 : __float_as_int(1.0f);
    if (lane == FEW_CAUSAL && params->causal) word = params->causal[seq];
    const float *scales = lane == FEW_K_SCALE ? params->k_scale : params->v_scale;
    if ((lane == FEW_K_SCALE || lane == FEW_V_SCALE) && params->num_kv_scales > 0)
        word = __float_as_int(fv_scale_of_head(scales, params->num_kv_scales, kv_head));
    return word;
}

/* A lane's word of a sequence and a head: attend_lengths, and the number of sequences. */
static __device__ __forceinline__ int32_t load_length_word(const attend_args *args, int32_t seq, int32_t kv_head,
                                                           int32_t lane)
{
    const fv_attend_params *params = &args->params;
    const int32_t *from = lane < FEW_SEQ_LEN ? params->query_start + seq + lane : params->seq_lens + seq;
    if (lane == FEW_NUM_SEQS) from = params->num_seqs_at;
    if (lane <= FEW_SEQ_LEN || (lane == FEW_NUM_SEQS && from)) return *from;
    return lane == FEW_NUM_SEQS ? params->num_seqs : load_few_flag(params, seq, kv_head, lane);
}

/* Does what load_few_flag() asks for differ between sequences or heads? */
static __device__ __forceinline__ bool has_few_flags(const fv_attend_params *params)
{
    return params->causal || params->num_kv_scales > 1;
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
    const int32_t at = divide_index(number, args->kv_heads), q_block = divide_index(at, args->segments);
    return few_cell{q_block, at - q_block * args->params.num_segments, number - at * args->params.num_kv_heads};
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
    lengths.query_start = __shfl_sync(~0u, scout->word, FEW_QUERY_START);
    lengths.query_end = __shfl_sync(~0u, scout->word, FEW_QUERY_END);
    lengths.seq_len = __shfl_sync(~0u, scout->word, FEW_SEQ_LEN);
    lengths.causal = __shfl_sync(~0u, scout->word, FEW_CAUSAL);
    lengths.k_head_scale = __int_as_float(__shfl_sync(~0u, scout->word, FEW_K_SCALE));
    lengths.v_head_scale = __int_as_float(__shfl_sync(~0u, scout->word, FEW_V_SCALE));
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

/* The item of a cell of whole queries. */
static __device__ __forceinline__ fv_work_item few_cell_item(const attend_args *args, int32_t number,
                                                             const attend_lengths *lengths)
{
    const fv_attend_params *params = &args->params;
    const few_cell cell = few_cell_of(args, number);
    const int32_t num_keys = local_keys(&params->context_parallel, lengths->seq_len);
    const int32_t num_tiles = divide_index(num_keys + params->tile_keys - 1, args->tile);
    const int32_t segment_tiles = divide_index(num_tiles + params->num_segments - 1, args->segments);
    return grid_item_of(params, cell.q_block, make_int2(lengths->query_start, lengths->query_end), lengths->seq_len, 0,
                        cell.head, cell.segment, segment_tiles * params->tile_keys);
}

/* Which of its item's heads a job has, the first of them. */
template <class S>
static __device__ __forceinline__ int32_t few_head_of(const few_scout *scout, const attend_args *args)
{
    if (!args->params.items) return 0;
    return (scout->number - divide_index(scout->number, args->kv_heads) * (int32_t)args->kv_heads.by) * S::HEADS;
}

/* Makes a step towards the slot of job `n` + 1 of the block, all lanes of the scout's warp together. */
template <class S>
static __device__ __forceinline__ void step_few_scout(few_scout *scout, few_jobs *jobs, const attend_args *args,
                                                      int32_t n, int32_t lane)
{
    const few_slot *now = &jobs->slots[n & 1];
    few_slot *next = &jobs->slots[(n + 1) & 1];
    const int32_t num_heads = args->params.num_kv_heads;
    switch (scout->step) {
    case FEW_CLAIM:
        if (now->state == FEW_JOB && now->row0 + S::ITEM_ROWS < now->job.num_rows) { /* more rows of this one */
            const attend_job job = now->job;
            fill_few_slot<S>(next, scout, args, &job, now->row0 + S::ITEM_ROWS, lane);
            scout->step = FEW_BLOCKS;
            break;
        }
        if (scout->num_jobs <= (int32_t)gridDim.x) { /* each block has one */
            if (lane == 0) next->state = FEW_NO_JOB;
            scout->step = FEW_DONE;
            break;
        }
        scout->word = lane == 0 ? claim_job(args, scout->number, scout->num_jobs) : 0;
        scout->step = FEW_ITEM;
        break;
    case FEW_ITEM: {
        scout->number = __shfl_sync(~0u, scout->word, 0);
        if (scout->num_jobs >= 0 && scout->number >= scout->num_jobs) {
            if (lane == 0) next->state = FEW_NO_JOB;
            scout->step = FEW_BLOCKS;
        } else if (args->params.items) {
            const int32_t *item = (const int32_t *)&args->params.items[divide_index(scout->number, args->kv_heads)];
            scout->item_word = lane < FEW_ITEM_WORDS ? item[lane] : 0;
            const bool has_flags = has_few_flags(&args->params);
            if (!has_flags) scout->word = load_few_flag(&args->params, 0, 0, lane);
            scout->step = has_flags ? FEW_FLAGS : FEW_FIND_ROWS;
        } else if (args->params.whole_queries) {
            ask_few_sequence(scout, args, lane);
            scout->step = FEW_FIND_ROWS;
        } else {
            scout->step = find_grid_word(&scout->item_word, args, scout->number, lane) ? FEW_FLAGS : FEW_CLAIM;
        }
        break;
    }
    case FEW_FLAGS: {
        const int32_t seq = __shfl_sync(~0u, scout->item_word, offsetof(fv_work_item, seq) / 4);
        const int32_t first_head = __shfl_sync(~0u, scout->item_word, offsetof(fv_work_item, first_kv_head) / 4);
        const int32_t head = fv_min_i32(first_head + few_head_of<S>(scout, args), num_heads - 1); /* may have none */
        scout->word = load_few_flag(&args->params, seq, head, lane);
        scout->step = FEW_FIND_ROWS;
        break;
    }
    case FEW_FIND_ROWS: {
        attend_lengths lengths = few_lengths_of(scout);
        const bool is_cell = !args->params.items && args->params.whole_queries;
        if (scout->num_jobs < 0)
            scout->num_jobs = __shfl_sync(~0u, scout->word, FEW_NUM_SEQS) * num_heads * args->params.num_segments;
        scout->step = FEW_BLOCKS;
        if (is_cell && scout->number >= scout->num_jobs) {
            if (lane == 0) next->state = FEW_NO_JOB;
            break;
        }
        const int32_t head = few_head_of<S>(scout, args);
        const fv_work_item item = is_cell ? few_cell_item(args, scout->number, &lengths) : few_item_of(scout, head);
        lengths.query_start = item.query_start;
        lengths.query_end = item.query_end;
        lengths.seq_len = item.seq_len;
        const attend_job job = cached_job_of(args, &item, item.first_kv_head, &lengths);
        fill_few_slot<S>(next, scout, args, &job, 0, lane);
        const bool has_head = is_cell ||
                              head < __shfl_sync(~0u, scout->item_word, offsetof(fv_work_item, num_kv_heads) / 4);
        if (!has_head && lane == 0) next->state = FEW_NOTHING;
        break;
    }
    case FEW_BLOCKS: /* warps that are behind still read those of job n */
#pragma unroll
        for (int i = 0; i < S::FIRST_KEYS / 32; i++) jobs->first_blocks[(n + 1) & 1][lane + i * 32] = scout->blocks[i];
        __threadfence_block();
        __syncwarp();
        if (lane == 0) *(volatile int32_t *)&jobs->num_known = n + 2;
        scout->step = FEW_DONE;
        break;
    default: break;
    }
}

/* A list and its length are older than the kernels before. */
static __device__ __forceinline__ int32_t load_num_jobs(const attend_args *args)
{
    const int32_t *num_items_at = args->params.num_items_at;
    return num_items_at ? *num_items_at * (int32_t)args->kv_heads.by : args->num_jobs;
}

/* Before the first job there is nothing: job -1. All threads; a barrier must follow. */
static __device__ __forceinline__ few_scout begin_few_jobs(few_jobs *jobs, const attend_args *args)
{
    few_scout scout = {};
    scout.num_jobs = load_num_jobs(args);
    scout.step = FEW_ITEM;
    scout.word = (int32_t)blockIdx.x;
    if (threadIdx.x == 0) {
        jobs->slots[1].state = FEW_NOTHING;
        jobs->num_known = 0;
    }
    return scout;
}

/* An item as it is asked for. */
typedef union few_item_words {
    fv_work_item item;
    int4 vectors[sizeof(fv_work_item) / sizeof(int4)];
} few_item_words;
static_assert(sizeof(few_item_words) == sizeof(fv_work_item), "items are whole vectors, as are the header before them");

/* Asks for the item of the block's first job in a list, by each thread: the first thing of all, for it is needed first. A
 * list is older than the kernels before. */
template <class S>
static __device__ __forceinline__ void ask_first_item(few_item_words *words, const attend_args *args)
{
    const int32_t at = S::MEETS ? (int32_t)blockIdx.z : divide_index((int32_t)blockIdx.x, args->kv_heads);
    const int4 *from = (const int4 *)(args->params.items + at);
#pragma unroll
    for (int i = 0; i < (int)FV_ARRAY_LEN(words->vectors); i++) words->vectors[i] = from[i];
}

/* The item of the block's first job, with one KV head, and of whole queries the number of jobs; false: there is none, or it
 * takes a search. `item`: what ask_first_item() asked for. */
template <class S>
static __device__ __forceinline__ bool find_first_item(fv_work_item *item, int32_t *num_jobs, const attend_args *args)
{
    const fv_attend_params *params = &args->params;
    const int32_t number = (int32_t)blockIdx.x;
    if (params->items) {
        const int32_t at = divide_index(number, args->kv_heads);
        const int32_t head = (number - at * (int32_t)args->kv_heads.by) * S::HEADS;
        item->first_kv_head += head;
        item->num_kv_heads -= head; /* none: there is no such job */
        return true;
    }
    const int32_t seq = few_cell_of(args, number).q_block;
    if (!params->whole_queries || seq >= params->num_seqs) return false;
    const attend_lengths lengths = {params->query_start[seq], params->query_start[seq + 1], params->seq_lens[seq]};
    const int32_t num_seqs = load_num_seqs(params);
    *num_jobs = num_seqs * params->num_kv_heads * params->num_segments;
    *item = few_cell_item(args, number, &lengths);
    item->num_kv_heads = seq < num_seqs; /* all come in one trip */
    return true;
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
