/* What the tables of test cases are written with: lists of lengths, and the fields that every grid sets. */
#ifndef FV_TOOLS_CHECK_GRID_H
#define FV_TOOLS_CHECK_GRID_H

#include "check/case.h"
#include "core/compiler.h"

#define C(query_len, seq_len) \
    {                         \
        query_len, seq_len, 0 \
    } /* a causal sequence */
#define LENS(...)                                                                               \
    {                                                                                           \
        (const check_lens[]){__VA_ARGS__}, FV_ARRAY_LEN(((const check_lens[]){__VA_ARGS__})), 1 \
    }
#define LENS_TIMES(times, ...)                                                                      \
    {                                                                                               \
        (const check_lens[]){__VA_ARGS__}, FV_ARRAY_LEN(((const check_lens[]){__VA_ARGS__})), times \
    }

typedef struct lens_list {
    const check_lens *lens;
    int32_t num_lens;
    int32_t repeat;
} lens_list;

typedef struct heads {
    int32_t q, kv;
} heads;

/* The fields that every grid sets; `plain`, layout nb_2_bs_h_d. */
check_case grid_case(heads num_heads, int32_t head_size, int32_t block_size, fv_dtype dtype);

/* An fp8 cache with one scale. */
void grid_set_fp8(check_case *test, fv_dtype dtype);

void grid_add(check_case_list *list, const char *group, const check_case *test, const lens_list *lens);

/* Once on the 2D and once on the 3D path. */
void grid_add_both_paths(check_case_list *list, const char *group, check_case test, const lens_list *lens);

#endif
