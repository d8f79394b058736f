/* The scheduler: which tokens of which sequences the next step computes. It knows counts, not tokens.
 *
 *   waiting --admit--> running: prefill in chunks ... decode, one token a step ... --finish-->
 *
 * A step has a budget of tokens. Decodes come first, so that running sequences never stall behind a
 * long prompt; the rest goes to prompts, in order of arrival, cut where the budget ends:
 *
 *   budget 8   | a | b |  c c c c c c |      next step   | a | b | c c | d d d d |
 *               decode  prompt, chunk 1                            rest
 *
 * Each layer group has its own pool of blocks. A sequence holds in it what its next tokens can see: all
 * blocks from the first on, or with a window those that are not wholly before it. The others go back
 * to the pool, and their entries in the block table become 0, the null block:
 *
 *   block size 4, window 6, tokens 0 to 12 computed: token 13 sees 8 to 13
 *   full     | b1 | b2 | b3 | b4 |
 *   sliding  |  0 |  0 | c3 | c4 |
 *
 * A sequence is admitted when the blocks that it may hold at one time, with prompt and all tokens it may
 * write, are not reserved by others in any group, and reserves them then. So a block that it needs is
 * always free, a running sequence always ends, and those that wait are admitted in order: none fails
 * and none waits for ever. */
#ifndef FV_ENGINE_SCHEDULER_H
#define FV_ENGINE_SCHEDULER_H

#include "engine/block_pool.h"
#include "fovea/engine.h"

typedef enum fv_sequence_state {
    FV_SEQUENCE_NEW = 0,
    FV_SEQUENCE_WAITING,
    FV_SEQUENCE_RUNNING,
    FV_SEQUENCE_FINISHED,
} fv_sequence_state;

/* The blocks of a sequence in one layer group. */
typedef struct fv_block_row {
    int32_t *blocks;    /* a row of the block table, for all tokens that it may have; 0 where it has none */
    int32_t first_held; /* blocks [first_held, end_held) are acquired */
    int32_t end_held;
    int32_t num_reserved; /* while it runs: the most that it may hold at one time */
} fv_block_row;

/* A sequence as the scheduler sees it; lives in the caller's request. */
typedef struct fv_sequence {
    fv_sequence_state state;
    int32_t num_prompt;
    int32_t num_tokens;   /* known so far: the prompt and what was written */
    int32_t num_computed; /* of those, in the cache */
    int32_t max_tokens;   /* it may have in the end */
    fv_block_row rows[FV_MAX_LAYER_GROUPS];
    struct fv_sequence *next; /* waiting or running list */
} fv_sequence;

/* Sequences one behind the other; zeroed there are none. */
typedef struct fv_sequence_list {
    fv_sequence *first, *last;
} fv_sequence_list;

typedef struct fv_scheduler_limits {
    int32_t block_size;
    int32_t max_num_seqs;        /* running at once; more than max_batched_tokens are not used */
    int32_t max_batched_tokens;  /* of a step */
    int32_t chunk_tokens;        /* prompts are cut after each so many tokens, whoever else runs; 0 = where the budget
                                   ends. At most what running sequences leave of it: max_batched_tokens -
                                   max_num_seqs + 1 */
    int32_t max_sequence_tokens; /* of a sequence, whatever its windows leave of it; 0 = any */
    int32_t num_groups;
    struct {
        int32_t num_blocks; /* without the null block */
        int32_t window;     /* keys that a token sees, itself included; 0 = all */
    } groups[FV_MAX_LAYER_GROUPS];
} fv_scheduler_limits;

typedef struct fv_scheduler_group {
    fv_block_pool pool;
    int32_t num_reserved; /* blocks, by the running sequences */
} fv_scheduler_group;

typedef struct fv_scheduler {
    fv_scheduler_limits limits;
    fv_scheduler_group groups[FV_MAX_LAYER_GROUPS];
    fv_sequence_list running; /* in order of admission */
    fv_sequence_list waiting; /* in order of arrival */
    int32_t num_running;
    int32_t num_waiting;
} fv_scheduler;

/* The part of one sequence in a step: tokens [first_token, first_token + num_tokens). */
typedef struct fv_step_part {
    fv_sequence *sequence;
    int32_t first_token;
    int32_t num_tokens;
    bool is_last; /* ends at the last known token: the next one can be sampled */
} fv_step_part;

/* The most blocks that a sequence of max_tokens holds at one time in layers of `window`. */
int32_t fv_scheduler_blocks_at_once(const fv_scheduler_limits *limits, int32_t window, int32_t max_tokens);

/* FV_ERR_INVALID: a limit below 1, with its name. */
fv_status fv_scheduler_init(fv_scheduler *scheduler, const fv_scheduler_limits *limits);

/* Sequences that are still there are finished first by their owners. Takes a zeroed scheduler. */
void fv_scheduler_deinit(fv_scheduler *scheduler);

/* Lets a new sequence of prompt_tokens wait for its turn; it may grow to max_tokens in all. Keeps
 * `sequence` until fv_scheduler_finish. FV_ERR_INVALID: prompt_tokens below 1 or above max_tokens.
 * FV_ERR_NO_SPACE: it can never fit; the text says how many tokens the cache holds. */
fv_status fv_scheduler_add(fv_scheduler *scheduler, fv_sequence *sequence, int32_t prompt_tokens, int32_t max_tokens);

/* Admits who fits and fills `parts`, room for max_num_seqs; their tokens have blocks. Returns their number;
 * 0: nothing to do. */
int32_t fv_scheduler_next(fv_step_part *parts, fv_scheduler *scheduler);

/* The step has run: its tokens are in the cache. Blocks that no later token sees go back. */
void fv_scheduler_commit(fv_scheduler *scheduler, const fv_step_part *parts, int32_t num_parts);

/* The sequence has one token more. */
void fv_scheduler_append(fv_sequence *sequence);

/* Takes the sequence out, in whatever state, and gives its blocks back. */
void fv_scheduler_finish(fv_scheduler *scheduler, fv_sequence *sequence);

#endif
