/* A case: a problem, a batch and how to run it. What is random in it follows from its seed. */
#ifndef FV_TOOLS_CHECK_CASE_H
#define FV_TOOLS_CHECK_CASE_H

#include "fovea/plan.h"

typedef struct check_lens {
    int32_t query_len;
    int32_t seq_len;
    int32_t not_causal;
} check_lens;

/* What the numbers look like. */
typedef enum check_spread {
    CHECK_SPREAD_NORMAL = 0, /* softmax over many keys */
    CHECK_SPREAD_PEAKED = 1, /* few keys carry the weight */
    CHECK_SPREAD_LOW = 2,    /* all scores near -200: a maximum that starts at 0 underflows */
    CHECK_SPREAD_FLAT = 3,   /* all scores within 1e-6 to 1e-3 of each other: sums of weights round to one side */
} check_spread;

/* How the kernels are driven without a planner. */
typedef enum check_schedule {
    CHECK_SCHEDULE_WHOLE = 0,         /* a list of items, each with all keys */
    CHECK_SCHEDULE_SEGMENTS = 1,      /* a list, Q blocks cut into 1..5 segments */
    CHECK_SCHEDULE_GRID = 2,          /* the static grid, 2D */
    CHECK_SCHEDULE_GRID_SEGMENTS = 3, /* the static grid, 3D */
} check_schedule;

typedef struct check_case {
    char id[64];
    uint64_t seed;
    fv_problem problem; /* normal, with the layout of the cache */
    check_lens *lens;   /* [num_seqs], the case's own */
    int32_t num_seqs;
    check_spread spread;
    check_schedule schedule;
    int32_t in_cache;        /* 1: the new K/V lie in the cache already, nothing is written */
    int32_t shared_keys;     /* neighbours have the same blocks up to so many keys of their context: always where
                              * the case is plain, else often */
    int32_t min_groups;      /* prefix groups that every backend must find */
    int32_t scales_inside;   /* 1: per-token-head scales lie inside the blocks; plain cases of layout STRIDED */
    int32_t tight_workspace; /* 1: plans get the least workspace that they take */
    int32_t nan_queries;     /* 1: some rows of queries hold a NaN: their results are NaN, no others are */
    int32_t
        spoilt_keys; /* 1: some keys hold a NaN, some values a NaN or an infinity, on CPUs alone: what a device makes
                              * of rows beside them is its own */
    int32_t huge_scores;     /* 1: beyond fp32: results must be numbers, no more */
    int32_t odd_rows;        /* 1: some rows of keys and values are zeros, some far larger than others */
    int32_t odd_scales;      /* 1: scales of tensors and heads are 1, or far from it */
    int32_t odd_heads;       /* 1: sinks that are -inf or far from scores, slopes that are 0, negative or large */
    int32_t unused_byte;     /* of slots that hold no key; 0: 0xff, NaN in every float format */
    int32_t plain;           /* 1: dense tensors, no padding rows: what other projects' tests have */
    fv_plan_options options; /* of the schedule: batch_invariant, path, cascade, ... */
} check_case;

void check_case_deinit(check_case *test);

/* Query tokens, the largest lengths, and (row, key, element) steps: what the case costs. */
int32_t check_case_num_tokens(const check_case *test);
int32_t check_case_max_query_len(const check_case *test);
int32_t check_case_max_seq_len(const check_case *test);
double check_case_cost(const check_case *test);

/* One line: shape, dtypes, features, lengths. */
void check_case_describe(char *text, size_t text_bytes, const check_case *test);

/* A list of cases that grows. */
typedef struct check_case_list {
    check_case *cases;
    int32_t num_cases;
    int32_t capacity;
} check_case_list;

/* Appends a copy of `test` with the lengths `lens`, each repeated `repeat` times in a row of rounds,
 * normalises its problem, names it "GROUP.N" and seeds it from its name. */
void check_case_list_add(check_case_list *list, const char *group, const check_case *test, const check_lens *lens,
                         int32_t num_lens, int32_t repeat);
void check_case_list_deinit(check_case_list *list);

/* Appends the published test grids: vllm_cases.c. */
void check_vllm_cases(check_case_list *list);

/* Appends the grids of our own: own_cases.c. */
void check_own_cases(check_case_list *list);

/* Appends the grids of MLA decoding: mla_cases.c. */
void check_mla_cases(check_case_list *list);

/* Random case `index` of `seed`: random_case.c. The caller deinits it. */
void check_case_random(check_case *test, uint64_t seed, int32_t index);

#endif
