#include "backends/answers.h"

#include <stdio.h>
#include <string.h>

#include "backends/backend.h"

/* Cuts "a; b (c; d)" in place at each "; " outside brackets. */
static void cut_reasons(fv_answer *a)
{
    if (!a->text[0]) return;
    a->reasons[a->num_reasons++] = a->text;
    int32_t depth = 0;
    for (char *at = a->text; *at; at++) {
        depth += (*at == '(') - (*at == ')');
        if (depth > 0 || at[0] != ';' || at[1] != ' ' || a->num_reasons == FV_ANSWER_MAX_REASONS) continue;
        *at = '\0';
        a->reasons[a->num_reasons++] = at + 2;
    }
}

static const char *layout_name(const fv_problem *problem, const fv_backend *backend)
{
    if (problem->type == FV_ATTENTION_ENCODER) return "none";
    return fv_kv_layout_name(problem->kv_layout_any ? backend->layout : problem->kv_layout);
}

static fv_status ask(fv_answers *t, const char *name, int32_t rank)
{
    const fv_problem *problem = &t->args->problem;
    for (int32_t i = 0; i < t->num_all; i++) {
        if (strcmp(t->all[i].name, name) == 0) return FV_OK;
    }
    if (t->num_all == FV_ANSWERS_MAX_BACKENDS) return FV_OK;
    fv_answer *a = &t->all[t->num_all++];
    const fv_backend *backend = fv_backend_find(name, 0);
    *a = (fv_answer){.name = name, .summary = backend->summary, .rank = rank, .layout = layout_name(problem, backend)};
    const fv_status status = fv_backend_why_not(a->text, sizeof(a->text), name, t->device, problem);
    if (status == FV_OK) cut_reasons(a);
    return status;
}

fv_status fv_answers_init(fv_answers *t, const fv_problem_args *args, fv_device *device)
{
    *t = (fv_answers){.args = args, .device = device};
    const fv_problem *problem = &args->problem;
    t->kind = fv_problem_layer_kind(problem);
    fv_status status = FV_OK;
    const char *name;
    for (int32_t i = 0; status == FV_OK && (name = fv_backend_preferred_name(i, t->device, problem)); i++) {
        status = ask(t, name, i + 1);
    }
    for (int32_t i = 0; i < fv_backend_count() && status == FV_OK; i++) status = ask(t, fv_backend_name(i), 0);
    for (int32_t i = 0; i < t->num_all; i++) {
        fv_answer *a = &t->all[i];
        if (a->rank == 0 || a->num_reasons > 0) continue;
        a->is_chosen = 1;
        break;
    }
    return status;
}

const char *fv_answers_chosen(const fv_answers *t)
{
    for (int32_t i = 0; i < t->num_all; i++) {
        if (t->all[i].is_chosen) return t->all[i].name;
    }
    return NULL;
}

const char *fv_answer_verdict(const fv_answer *a)
{
    if (a->num_reasons > 0) return "cannot";
    return a->is_chosen ? "chosen" : "can";
}
