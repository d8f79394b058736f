#include "planner/lane_meeting.h"

#include "planner/query_block.h"

#define LEAST_KEYS 64  /* of a lane */
#define MOST_KEYS 3072 /* of a lane, whatever the form */

/* Each lane has a worker, and as many keys as the workers that have none do not make up for. Limits as measured
 * (docs/notes/cuda-hopper.md). */
typedef struct meeting_form {
    int32_t lanes;      /* of an item */
    int32_t most_of_11; /* of the workers that can meet so: those of an item lie in one part of the device */
    int32_t most_keys;  /* of a lane, were all workers such lanes; of half of them half, for the others read nothing */
} meeting_form;

static int32_t may_meet(const fv_split_rule *rule, const fv_pass *pass)
{
    return rule->splits_items > 1 && !rule->batch_invariant && rule->path == FV_PATH_AUTO && !rule->segment_keys &&
           !rule->num_segments && pass->num_groups == 0;
}

/* Keys of the longest query; 0: some query has more tokens than one, or lengths differ. */
static int64_t equal_keys(const fv_split_rule *rule, const fv_step *step, const fv_pass *pass)
{
    int64_t total = 0, longest = 0;
    for (int32_t i = 0; i < pass->num_runs; i++) {
        if (pass->runs[i].num_tokens != 1) return 0;
        const fv_query_block block = fv_query_block_at(rule, step, &pass->runs[i], pass->runs[i].first_token);
        const int64_t keys = block.end_key - block.first_key;
        total += keys;
        longest = fv_max_i64(longest, keys);
    }
    return longest * pass->num_runs <= total + total / 8 ? longest : 0;
}

int32_t fv_lane_meeting_choose(const fv_split_rule *rule, const fv_step *step, const fv_pass *pass)
{
    static const meeting_form all[2][3] = {{{8, 10, 4300}, {4, 10, 6400}, {2, 11, 4300}},
                                           {{8, 10, 6000}, {4, 10, 4300}, {2, 11, 4200}}};
    const meeting_form *forms = all[fv_dtype_bytes(rule->problem->kv_dtype) == 1]; /* half the bytes, more warps */
    const int64_t parts = (int64_t)pass->num_runs * rule->problem->mha.num_kv_heads, workers = rule->num_workers;
    if (!may_meet(rule, pass) || 2 * parts > workers) return 0;
    const int64_t keys = equal_keys(rule, step, pass);
    for (int32_t i = 0; i < FV_ARRAY_LEN(all[0]); i++) {
        const meeting_form *form = &forms[i];
        if (form->lanes > rule->splits_items || 11 * form->lanes * parts > form->most_of_11 * workers) continue;
        if (keys < LEAST_KEYS * form->lanes) return 0;
        const int64_t lanes = form->lanes * parts;
        const int32_t are_all = form->lanes < 8 && 10 * lanes >= 9 * workers;
        const int32_t are_few = keys <= MOST_KEYS * form->lanes &&
                                keys * workers <= form->most_keys * form->lanes * lanes;
        return are_all || are_few ? form->lanes : 0;
    }
    return 0;
}
