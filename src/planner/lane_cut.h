/* Cutting a pass for a device with lanes: a GPU, and the blocks of threads that it holds at once. The KV heads of an item
 * are dealt out, and its pieces are what a model of the time finds best: whole rounds of items, against what each item
 * costs beside its keys. Where there is work for several rounds, the pieces may taper, as in guided self-scheduling
 * (Polychronopoulos and Kuck, IEEE Trans. Computers 36, 1987): none is larger than one and a half times what is left for a
 * lane, so that the lanes end together.
 *
 *   |-----|-----|-----|-----|          shares: pieces of about one size, in rounds
 *   |-----------|-----------|-----|    whole rounds of whole sequences, the others cut for one more
 *   |-----------|------|---|--|-|      tapering: whole sequences first, ever smaller pieces last */
#ifndef FV_PLANNER_LANE_CUT_H
#define FV_PLANNER_LANE_CUT_H

#include "planner/query_block.h"

/* Keys of the shortest piece that is worth a reduction. */
#define FV_MIN_LANE_SEGMENT_KEYS 64

/* What an item of `rows` rows takes beside its keys, as keys: to start, to bring its queries and to write its results;
 * where they are one part of several they are fp32, and are reduced. From times on an H200, of 4 rows of 128 and of 128
 * rows of 512. */
static inline int32_t fv_lane_item_keys(int32_t rows, int32_t is_part)
{
    return is_part ? 164 + rows * 14 / 3 : 97 + rows * 7 / 4;
}

/* The same as a cost: fv_query_block_cost, of one KV head. */
static inline float fv_lane_item_cost(int32_t rows, int32_t is_part)
{
    return (float)fv_lane_item_keys(rows, is_part) * (float)(FV_LANE_KEY_COST + rows);
}

/* And of a part where there are `num_items` of them. MLA's partial results are so large that writing and reducing them takes as
 * long as there are many at once: 1 x 4k in 64 pieces of 64 keys 17.9 us, in 32 of 128 keys 16.5 (measured with 16, 64 and 128
 * heads, docs/notes/cuda-hopper.md). */
static inline float fv_lane_part_keys(const fv_split_rule *rule, int32_t rows, float num_items)
{
    const float of_round = (float)fv_lane_item_keys(rows, 1), share = num_items / (float)rule->num_lanes;
    if (rule->problem->kind != FV_ATTENTION_MLA || share >= 1) return of_round;
    const float keys = of_round - 240 * (1 - share), least = (float)fv_lane_item_keys(rows, 0);
    return keys > least ? keys : least;
}

/* What two lanes that share an item take to add their results. */
static inline float fv_lane_meeting_keys(int32_t rows) { return 0.875f * (float)rows; }

/* How long equal items take, each of `keys` and what it takes `beside` them.
 *
 * Where workers have several lanes, those share the memory that all lanes share. Of entries of two bytes one lane of two
 * takes nearly all of it, else three quarters, and two take all. So one round takes as long as its workers are busy, and
 * where one has an item more than others, it takes half of what they leave: fitted to measured cuts on an H200
 * (docs/notes/cuda-hopper.md). Three smaller lanes a worker make one round of what would be one and a half of two. In further
 * rounds the lanes that end first do. */
static inline float fv_lane_time(const fv_split_rule *rule, float num_items, float keys, float beside)
{
    const float rounds = num_items / (float)rule->num_lanes, whole = (float)(int32_t)rounds, rest = rounds - whole;
    const int32_t shares = rule->num_workers < rule->num_lanes;
    const int32_t are_two = rule->num_lanes <= 2 * rule->num_workers;
    const int32_t is_wide = fv_dtype_bytes(rule->problem->kv_dtype) * fv_max_i32(1, rule->lane_heads) > 1;
    const float most = are_two && is_wide && !rule->batch_invariant ? 1.5f : 1; /* rounds that are one */
    if (shares && rounds <= most && (is_wide || are_two)) {
        const float alone = are_two && is_wide ? 0.97f : 1.35f;
        const float of_worker = num_items / (float)rule->num_workers, down = (float)(int32_t)of_worker;
        const float full = down < of_worker ? down : down - 1;
        const float items = full < 1 ? alone : full + 0.5f + 0.5f * (of_worker - full);
        return keys * items * (float)rule->num_workers / (float)rule->num_lanes + beside * (0.7f + 0.3f * rounds);
    }
    if (rest <= 0) return (keys + beside) * whole;
    const float least = are_two ? 0.5f : 0.4f; /* of a round with few items */
    return (keys + beside) * (shares ? whole + least + 0.6f * rest : whole + 1);
}

/* Keys: what reducing the pieces of items takes at the end where those run in halves of lanes. */
#define FV_HALF_LANE_REDUCTION 500

/* Do items of so many rows run in halves of the lanes where they are more than those? */
static inline int32_t fv_lanes_halve(const fv_split_rule *rule, int32_t rows)
{
    return rows <= rule->half_rows && rule->lane_heads <= 1;
}

/* How long up to two rounds of them take then, fitted to 272 to 512 items on an H200 (docs/notes/cuda-hopper.md). */
static inline float fv_half_lanes_time(const fv_split_rule *rule, float num_items, float keys, float beside)
{
    return (keys + beside) * (0.25f + 0.8f * num_items / (float)rule->num_lanes);
}

/* How a pass is cut. */
typedef struct fv_lane_cut {
    int64_t share;      /* cost of the largest piece, of a lane's heads */
    int32_t tapers;     /* 1: fv_lane_taper_share() instead, run by run ... */
    int64_t uncut;      /* ... where blocks of less stay whole */
    int32_t whole_runs; /* the first ones, which are not cut */
    int32_t splits;     /* 1: two lanes share each item of the others */
    float time;         /* that the lanes take, in units of cost; 0: not known */
} fv_lane_cut;

/* Of some shares between two lanes' and a quarter of a lane's, and of pieces that taper, what takes the least time;
 * `total`: the pass's cost. */
fv_lane_cut fv_lane_cut_choose(const fv_split_rule *rule, const fv_step *step, const fv_pass *pass, int64_t total);

/* The largest piece of a block of that cost (of a lane's heads) where pieces taper and `rest` is left for all lanes. */
int64_t fv_lane_taper_share(const fv_split_rule *rule, const fv_lane_cut *cut, int64_t rest, int64_t cost);

#endif
