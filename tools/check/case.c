/* Cases: their size, their description, lists of them. */
#include "check/case.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check/random.h"
#include "core/compiler.h"

void check_case_deinit(check_case *test)
{
    free(test->lens);
    test->lens = NULL;
}

int32_t check_case_num_tokens(const check_case *test)
{
    int32_t num_tokens = 0;
    for (int32_t r = 0; r < test->num_seqs; r++) num_tokens += test->lens[r].query_len;
    return num_tokens;
}

int32_t check_case_max_query_len(const check_case *test)
{
    int32_t longest = 0;
    for (int32_t r = 0; r < test->num_seqs; r++) longest = fv_max_i32(longest, test->lens[r].query_len);
    return longest;
}

int32_t check_case_max_seq_len(const check_case *test)
{
    int32_t longest = 0;
    for (int32_t r = 0; r < test->num_seqs; r++) longest = fv_max_i32(longest, test->lens[r].seq_len);
    return longest;
}

double check_case_cost(const check_case *test)
{
    const fv_mha_shape *shape = &test->problem.mha;
    double pairs = 0;
    for (int32_t r = 0; r < test->num_seqs; r++) {
        const check_lens *lens = &test->lens[r];
        double keys = lens->seq_len - (lens->not_causal ? 0 : lens->query_len / 2.0);
        if (test->problem.window > 0 && keys > test->problem.window) keys = test->problem.window;
        if (keys > 0) pairs += keys * lens->query_len;
    }
    return pairs * shape->num_heads * (shape->head_size + shape->v_head_size);
}

static int32_t print(char *text, size_t text_bytes, int32_t used, const char *format, int64_t value)
{
    if ((size_t)used >= text_bytes) return used;
    return used + snprintf(text + used, text_bytes - (size_t)used, format, (long long)value);
}

static int32_t print_real(char *text, size_t text_bytes, int32_t used, const char *format, double value)
{
    if ((size_t)used >= text_bytes) return used;
    return used + snprintf(text + used, text_bytes - (size_t)used, format, value);
}

void check_case_describe(char *text, size_t text_bytes, const check_case *test)
{
    static const char *const scalings[] = {"", " scale/tensor", " scale/head", " scale/token-head"};
    static const char *const alibis[] = {"", " alibi", " alibi-sqrt"};
    static const char *const schedules[] = {"whole", "segments", "grid", "grid-segments"};
    static const char *const paths[] = {"auto", "2D", "3D"};
    const fv_problem *p = &test->problem;
    int32_t used = snprintf(text, text_bytes, "%d/%d heads, D %d/%d, q %s, kv %s, %s, bs %d%s%s, %s, path %s",
                            p->mha.num_heads, p->mha.num_kv_heads, p->mha.head_size, p->mha.v_head_size,
                            fv_dtype_name(p->q_dtype), fv_dtype_name(p->kv_dtype), fv_kv_layout_name(p->kv_layout),
                            p->block_size, scalings[p->kv_scaling], alibis[p->alibi], schedules[test->schedule],
                            paths[test->options.path]);
    if (p->window) used = print(text, text_bytes, used, ", window %lld", p->window);
    if (p->soft_cap > 0) used = print_real(text, text_bytes, used, ", cap %g", p->soft_cap);
    if (p->sinks) used = print(text, text_bytes, used, ", sinks", 0);
    if (p->tree_mask) used = print(text, text_bytes, used, ", tree", 0);
    if (test->nan_queries) used = print(text, text_bytes, used, ", NaN in queries", 0);
    if (p->scale < 0 || test->huge_scores) used = print_real(text, text_bytes, used, ", scale %g", p->scale);
    if (test->spread == CHECK_SPREAD_FLAT) used = print(text, text_bytes, used, ", flat scores", 0);
    if (test->spoilt_keys) used = print(text, text_bytes, used, ", spoilt keys", 0);
    if (test->odd_rows) used = print(text, text_bytes, used, ", odd rows", 0);
    if (test->odd_scales) used = print(text, text_bytes, used, ", odd scales", 0);
    if (test->odd_heads) used = print(text, text_bytes, used, ", odd heads", 0);
    if (test->unused_byte) used = print(text, text_bytes, used, ", unused bytes 0x%llx", test->unused_byte);
    if (p->type) used = print(text, text_bytes, used, ", type %lld", p->type);
    if (test->shared_keys) used = print(text, text_bytes, used, ", %lld shared keys", test->shared_keys);
    if (test->tight_workspace) used = print(text, text_bytes, used, ", tight workspace", 0);
    if (p->not_causal) used = print(text, text_bytes, used, ", not causal", 0);
    if (p->context_parallel.world > 1) {
        used = print(text, text_bytes, used, ", rank %lld", p->context_parallel.rank);
        used = print(text, text_bytes, used, " of %lld", p->context_parallel.world);
        used = print(text, text_bytes, used, " by %lld", p->context_parallel.interleave);
    }
    used = print(text, text_bytes, used, ", %lld seqs", test->num_seqs);
    for (int32_t r = 0; r < test->num_seqs && r < 6; r++) {
        used = print(text, text_bytes, used, " (%lld,", test->lens[r].query_len);
        used = print(text, text_bytes, used, "%lld)", test->lens[r].seq_len);
    }
    if (test->num_seqs > 6) print(text, text_bytes, used, " ...", 0);
}

static uint64_t hash(const char *text)
{
    uint64_t value = 1469598103934665603u; /* FNV-1a */
    for (; *text; text++) value = (value ^ (unsigned char)*text) * 1099511628211u;
    return value;
}

void check_case_list_add(check_case_list *list, const char *group, const check_case *test, const check_lens *lens,
                         int32_t num_lens, int32_t repeat)
{
    if (list->num_cases == list->capacity) {
        list->capacity = list->capacity ? 2 * list->capacity : 64;
        list->cases = realloc(list->cases, (size_t)list->capacity * sizeof(list->cases[0]));
    }
    check_lens *all = malloc((size_t)(num_lens * repeat) * sizeof(*all));
    if (!list->cases || !all) {
        fprintf(stderr, "fovea check: no memory\n");
        exit(1);
    }
    for (int32_t i = 0; i < num_lens * repeat; i++) all[i] = lens[i % num_lens];

    int32_t number = 0; /* within the group, which is added in one go */
    for (int32_t i = list->num_cases - 1; i >= 0; i--, number++) {
        const char *id = list->cases[i].id;
        if (strncmp(id, group, strlen(group)) != 0 || id[strlen(group)] != '.') break;
    }
    check_case *added = &list->cases[list->num_cases++];
    *added = *test;
    added->lens = all;
    added->num_seqs = num_lens * repeat;
    snprintf(added->id, sizeof(added->id), "%s.%d", group, number);
    added->seed = hash(added->id);
    added->problem.struct_size = sizeof(added->problem);
    if (fv_problem_normalize(&added->problem, &added->problem) != FV_OK) {
        fprintf(stderr, "fovea check: case %s: %s\n", added->id, fv_last_error());
        exit(1);
    }
}

void check_case_list_deinit(check_case_list *list)
{
    for (int32_t i = 0; i < list->num_cases; i++) check_case_deinit(&list->cases[i]);
    free(list->cases);
    *list = (check_case_list){0};
}
