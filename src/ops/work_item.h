/* Work items: the planner's unit of attention work, and what the segments leave for the reduction.
 *
 * A Q block is `block_q` successive query tokens of one sequence with all query heads of a KV head.
 * An item is one Q block, a run of KV heads, and the keys [first_key, end_key) that it looks at. Where
 * the keys of a Q block are cut into segments, each segment is an item that writes a partial result:
 *
 *   slot of (segment g, token t of the Q block) = partial + g's offset in `partial` + t
 *
 *   tokens of the Q block      t0 t1 t2
 *   segment 0, partial = 12    12 13 14
 *   segment 1, partial = 15    15 16 17     one fv_reduce_item: partial 12, num_segments 2
 *
 * Sequences that share their first keys may share items too: their tokens follow each other in the batch,
 * so one item takes them all, as tokens of the first of them. All keys of such an item lie before every
 * member's new tokens, and it always writes a partial result:
 *
 *   seq 0, seq 1, 1 token each, 100 shared keys
 *   item a   seq 0, tokens 0..1, keys 0..99       slots 0 1
 *   item b   seq 0, token 0, keys 100..130        slot  2
 *   item c   seq 1, token 0, keys 100..117        slot  3       one reduction: 2 tokens, 2 segments
 *
 * A slot holds, for every query head, the unnormalised output (fp32, or as fv_attend_variant.narrows_partials says),
 * the maximum and the sum. */
#ifndef FV_OPS_WORK_ITEM_H
#define FV_OPS_WORK_ITEM_H

#include "core/compiler.h"

/* An item of more rows than this (tokens x query heads of a KV head) has one KV head, or than a kernel says
 * (fv_attend_variant.shared_rows); one of up to this many may have several, so that whole cache rows are read while they are
 * near. */
#define FV_DECODE_ROWS 16

typedef struct fv_work_item {
    int32_t seq;         /* index into query_start, seq_lens and causal */
    int32_t table_row;   /* row of the block table; seq, but for a shared prefix */
    int32_t first_token; /* relative to the sequence's first new token */
    int32_t num_tokens;
    int32_t first_kv_head;
    int32_t num_kv_heads;
    int32_t first_key; /* local key index, a multiple of the tile */
    int32_t end_key;   /* exclusive; may pass the last key that a row sees */
    int32_t partial;   /* first slot of the partial result; -1: write out and lse directly */

    /* in a list, what the batch says of `seq`, so that a GPU's kernel finds it in the same trip to memory */
    int32_t query_start, query_end; /* query_start[seq], query_start[seq + 1] */
    int32_t seq_len;
} fv_work_item;

typedef struct fv_reduce_item {
    int32_t first_token; /* of the batch */
    int32_t num_tokens;
    int32_t partial; /* slot of (segment 0, first token); segment g follows at + g * segment_slots */
    int32_t num_segments;
    int32_t segment_slots; /* 0: num_tokens */
} fv_reduce_item;

FV_SHARED_INLINE int32_t fv_reduce_segment_slots(const fv_reduce_item *item)
{
    return item->segment_slots > 0 ? item->segment_slots : item->num_tokens;
}

#endif
