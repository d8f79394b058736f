#include "planner/lane_fill.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "planner/query_block.h"

#define MIN_KEYS 512      /* of a piece */
#define FIRST_LIMIT 1.01f /* times what the lanes would take if nothing were cut and all ended together */
#define NEXT_LIMIT 1.01f
#define LAST_LIMIT 4.0f

/* Runs that are all alike: */
#define LEAST_RUNS 3      /* lanes for each, at most: with more, shares have fewer parts to reduce */
#define LEAST_GAIN 0.95f  /* of the time of a cut into shares, */
#define WHOLE_GAIN 0.9f   /* of whole runs, for those have the memory of lanes that are idle, */
#define ALONE_GAIN 0.88f  /* and where a lane is a worker, */
#define ROUNDS_GAIN 0.91f /* or, in several rounds, only those of the last are idle */

/* The same of MLA, which memory binds: lanes that are idle leave theirs to the others, less so over many keys, where lanes drift
 * apart: times of runs of LATENT_KEYS keys, and how much more for twice as many. */
#define LATENT_ALONE_GAIN 0.75f
#define LATENT_ROUNDS_GAIN 0.84f
#define LATENT_OCTAVE_GAIN 0.06f
#define LATENT_MOST_GAIN 0.93f
#define LATENT_KEYS 8192

/* A run as the lanes see it; costs are those of fv_query_block_cost. */
typedef struct fill_run {
    float cost;        /* whole */
    float weight;      /* of a key */
    float whole, part; /* what it takes beside its keys */
    float reduction;   /* of a step that has parts of it */
    int32_t run, keys, rows;
} fill_run;

static int32_t compare_keys(const void *a, const void *b)
{
    const uint64_t left = *(const uint64_t *)a, right = *(const uint64_t *)b;
    return left < right ? -1 : left > right;
}

/* Those of the most cost first. By keys of the bits of a cost, which for floats from 0 on are in their order. */
static void sort_runs(fill_run *runs, int32_t num_runs)
{
    uint64_t keys[FV_LANE_FILL_RUNS];
    fill_run of_pass[FV_LANE_FILL_RUNS];
    for (int32_t i = 0; i < num_runs; i++) {
        uint32_t bits;
        memcpy(&bits, &runs[i].cost, sizeof(bits));
        keys[i] = (uint64_t)~bits << 32 | (uint32_t)i;
    }
    qsort(keys, (size_t)num_runs, sizeof(*keys), compare_keys);
    memcpy(of_pass, runs, (size_t)num_runs * sizeof(*runs));
    for (int32_t i = 0; i < num_runs; i++) runs[i] = of_pass[(uint32_t)keys[i]];
}

static int32_t serves(const fv_split_rule *rule, const fv_pass *pass)
{
    return rule->num_lanes > 0 && rule->num_lanes <= rule->num_workers && rule->num_lanes <= FV_LANE_FILL_LANES &&
           rule->problem->mha.num_kv_heads == 1 && rule->path == FV_PATH_AUTO && !rule->batch_invariant &&
           !rule->segment_keys && !rule->num_segments && pass->num_groups == 0 && pass->num_runs > 1 &&
           pass->num_runs <= FV_LANE_FILL_RUNS;
}

/* The pass's runs, those of the most cost first, and whether they differ; 0 where one is no Q block. */
static int32_t list_runs(fill_run *runs, int32_t *varies, const fv_split_rule *rule, const fv_step *step,
                         const fv_pass *pass)
{
    *varies = 0;
    for (int32_t i = 0; i < pass->num_runs; i++) {
        const fv_query_run *run = &pass->runs[i];
        if (fv_query_run_repeats(step, pass, i)) {
            runs[i] = runs[i - 1];
            runs[i].run = i;
            continue;
        }
        if (run->num_tokens <= 0) return 0;
        const fv_query_block block = fv_query_block_at(rule, step, run, run->first_token);
        if (block.num_tokens != run->num_tokens) return 0;
        const int32_t rows = block.num_tokens * fv_group_of(rule->problem);
        fill_run *to = &runs[i];
        to->run = i;
        to->keys = fv_max_i32(1, block.end_key - block.first_key);
        to->weight = (float)(FV_LANE_KEY_COST + rows);
        to->rows = rows;
        to->whole = fv_lane_item_cost(rows, 0);
        to->cost = (float)to->keys * to->weight + to->whole;
        to->part = (float)fv_lane_fill_part_keys(rows) * to->weight;
        to->reduction = (float)fv_lane_fill_reduce_keys(rows) * to->weight;
        *varies = *varies || to->cost != runs[0].cost;
    }
    if (*varies) sort_runs(runs, pass->num_runs);
    return 1;
}

/* The least loaded lane, at the top of a heap, gets `cost` more. */
static void load_lane(float *loads, int32_t num_lanes, float cost)
{
    const float load = loads[0] + cost;
    int32_t at = 0;
    for (int32_t child = 1; child < num_lanes; child = 2 * at + 1) {
        if (child + 1 < num_lanes && loads[child + 1] < loads[child]) child++;
        if (loads[child] >= load) break;
        loads[at] = loads[child];
        at = child;
    }
    loads[at] = load;
}

/* Keys of a run that the least loaded lane takes before `limit`; 0: too few. */
static int32_t keys_until(const fill_run *run, int32_t rest, float load, float limit, int32_t tile_keys)
{
    const float whole = rest == run->keys ? run->whole : run->part;
    if (load + (float)rest * run->weight + whole <= limit) return rest;
    const float room = (limit - load - run->part) / run->weight;
    if (room < MIN_KEYS || rest < 2 * MIN_KEYS) return 0;
    const int32_t keys = fv_min_i32((int32_t)room, rest - MIN_KEYS) / tile_keys * tile_keys;
    return keys < MIN_KEYS ? 0 : keys;
}

/* When the last run ends; 0: not before `limit`. */
static float fill_lanes(fv_lane_fill *fill, const fv_split_rule *rule, const fill_run *runs, int32_t num_runs,
                        float limit)
{
    float loads[FV_LANE_FILL_LANES], last = 0;
    for (int32_t i = 0; i < rule->num_lanes; i++) loads[i] = 0;
    fill->num_pieces = 0;
    for (int32_t i = 0; i < num_runs; i++) {
        const fill_run *run = &runs[i];
        fill->num_of_run[run->run] = 0;
        for (int32_t rest = run->keys; rest > 0;) {
            const int32_t keys = keys_until(run, rest, loads[0], limit, rule->tile_keys);
            if (keys == 0 || fill->num_pieces == FV_LANE_FILL_PIECES) return 0;
            const float cost = (float)keys * run->weight + (keys == run->keys ? run->whole : run->part);
            last = fmaxf(last, loads[0] + cost);
            load_lane(loads, rule->num_lanes, cost);
            fill->pieces[fill->num_pieces++] = (fv_lane_piece){run->run, keys};
            fill->num_of_run[run->run]++;
            rest -= keys;
        }
    }
    return last;
}

/* Of the time of whole runs of so many keys. */
static float whole_gain(const fv_split_rule *rule, int32_t num_runs, int32_t keys)
{
    if (rule->num_lanes != rule->num_workers) return WHOLE_GAIN;
    const int32_t are_rounds = num_runs > rule->num_lanes;
    if (rule->problem->kind != FV_ATTENTION_MLA) return are_rounds ? ROUNDS_GAIN : ALONE_GAIN;
    const float octaves = fmaxf(0, log2f((float)keys / LATENT_KEYS));
    return fminf(LATENT_MOST_GAIN,
                 (are_rounds ? LATENT_ROUNDS_GAIN : LATENT_ALONE_GAIN) + LATENT_OCTAVE_GAIN * octaves);
}

/* When the last lane may end where all runs are alike, so that it is worth leaving the cut of which `cut` tells. */
static float last_limit(const fv_split_rule *rule, const fv_pass *pass, const fv_lane_cut *cut, float end_if_whole,
                        int32_t keys)
{
    if (LEAST_RUNS * pass->num_runs <= rule->num_lanes) return 0;
    if (!cut->splits && cut->time < end_if_whole) return cut->time * LEAST_GAIN;
    return cut->time * whole_gain(rule, pass->num_runs, keys);
}

int32_t fv_lane_fill_choose(fv_lane_fill *fill, const fv_split_rule *rule, const fv_step *step, const fv_pass *pass,
                            const fv_lane_cut *cut)
{
    if (!serves(rule, pass)) return 0;
    fill_run runs[FV_LANE_FILL_RUNS];
    int32_t varies;
    if (!list_runs(runs, &varies, rule, step, pass) || varies == (cut != NULL)) return 0;
    float total = 0;
    for (int32_t i = 0; i < pass->num_runs; i++) total += runs[i].cost;
    const float first = total / (float)rule->num_lanes * FIRST_LIMIT;
    float end_if_whole, last = first * LAST_LIMIT;
    if (varies) {
        end_if_whole = fill_lanes(fill, rule, runs, pass->num_runs, INFINITY);
    } else {
        end_if_whole = runs[0].cost * (float)fv_ceil_div(pass->num_runs, rule->num_lanes);
        last = last_limit(rule, pass, cut, end_if_whole, runs[0].keys) - runs[0].reduction;
        if (last < first || fill_lanes(fill, rule, runs, pass->num_runs, last) == 0) return 0;
    }
    for (float limit = first; limit <= last; limit *= NEXT_LIMIT) {
        if (limit + runs[0].reduction >= end_if_whole)
            return fill_lanes(fill, rule, runs, pass->num_runs, INFINITY) > 0;
        if (fill_lanes(fill, rule, runs, pass->num_runs, limit) > 0) return 1;
    }
    return !varies && fill_lanes(fill, rule, runs, pass->num_runs, last) > 0;
}
