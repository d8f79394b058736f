#include <stdio.h>
#include <string.h>

#include "backends/answers.h"
#include "json.h"

#define LINE_WIDTH 116

/* Words, broken at LINE_WIDTH, each line after `indent` spaces. */
static void print_wrapped(const char *text, int32_t indent)
{
    int32_t column = 0;
    while (*text) {
        const int32_t word = (int32_t)strcspn(text, " ");
        if (column > 0 && column + 1 + word > LINE_WIDTH) {
            printf("\n");
            column = 0;
        }
        column += printf("%*s%.*s", column > 0 ? 1 : indent, "", (int)word, text);
        text += word;
        while (*text == ' ') text++;
    }
    printf("\n");
}

static void print_prefixes(const fv_answers *t)
{
    if (t->num_prefixes == 0) printf("cascade: no neighbours share whole blocks that all of them see alike\n");
    for (int32_t i = 0; i < t->num_prefixes; i++) {
        const fv_prefix_row *row = &t->prefixes[i];
        printf("cascade: sequences %d to %d share %d keys; gain %+lld, %+.1f%% of the batch's cost: %s\n",
               row->first_seq, row->first_seq + row->num_seqs - 1, row->num_keys, (long long)row->gain,
               100 * row->of_batch, fv_answers_cascade_verdict(t, row));
    }
}

static void print_plans(const fv_answers *t)
{
    for (int32_t i = 0; i < t->num_all; i++) {
        const fv_answer *a = &t->all[i];
        if (!a->plan[0]) continue;
        printf("\n%s: workspace %.2f MiB, plan buffers %.1f KiB\n", a->name, (double)a->workspace_bytes / (1 << 20),
               (double)a->buffer_bytes / 1024);
        print_wrapped(a->plan, 4);
    }
}

void fv_answers_print(const fv_answers *t)
{
    char text[320];
    const char *chosen = fv_answers_chosen(t);
    fv_problem_args_describe(text, sizeof(text), &t->args->problem);
    printf("%s, on %s\nlayer kind %s; auto takes %s\n\n", text, fv_device_name(t->device), fv_layer_kind_name(t->kind),
           chosen ? chosen : "none");
    printf("%-4s  %-24s %-7s %-13s %s\n", "rank", "backend", "answer", "layout", "strategy");
    for (int32_t i = 0; i < t->num_all; i++) {
        const fv_answer *a = &t->all[i];
        char rank[16] = "-";
        if (a->rank > 0) snprintf(rank, sizeof(rank), "%d", a->rank);
        printf("%4s  %-24s %-7s %-13s %s\n", rank, a->name, fv_answer_verdict(a), a->layout, a->summary);
        for (int32_t r = 0; r < a->num_reasons; r++) printf("      - %s\n", a->reasons[r]);
    }
    if (!t->batch) return;
    printf("\nbatch %s", t->batch);
    if (t->args->shared_prefix) printf(", first %d keys of a group shared", t->args->shared_prefix);
    printf("\n");
    print_prefixes(t);
    print_plans(t);
}

void fv_answers_print_json(const fv_answers *t)
{
    char text[320];
    fv_json json;
    fv_json_init(&json, stdout);
    fv_json_begin_object(&json, NULL);
    fv_problem_args_describe(text, sizeof(text), &t->args->problem);
    fv_json_string(&json, "problem", text);
    fv_json_string(&json, "device", fv_device_name(t->device));
    fv_json_string(&json, "layer_kind", fv_layer_kind_name(t->kind));
    fv_json_string(&json, "auto", fv_answers_chosen(t));
    fv_json_begin_array(&json, "backends");
    for (int32_t i = 0; i < t->num_all; i++) {
        const fv_answer *a = &t->all[i];
        fv_json_begin_row(&json);
        fv_json_string(&json, "name", a->name);
        fv_json_int(&json, "rank", a->rank);
        fv_json_string(&json, "answer", fv_answer_verdict(a));
        fv_json_bool(&json, "serves", a->num_reasons == 0);
        fv_json_string(&json, "layout", a->layout);
        fv_json_begin_array(&json, "why_not");
        for (int32_t r = 0; r < a->num_reasons; r++) fv_json_string(&json, NULL, a->reasons[r]);
        fv_json_end_array(&json);
        fv_json_string(&json, "summary", a->summary);
        if (a->plan[0]) {
            fv_json_string(&json, "plan", a->plan);
            fv_json_int(&json, "workspace_bytes", (int64_t)a->workspace_bytes);
            fv_json_int(&json, "plan_buffer_bytes", (int64_t)a->buffer_bytes);
        }
        fv_json_end_object(&json);
    }
    fv_json_end_array(&json);
    if (t->batch) {
        fv_json_string(&json, "batch", t->batch);
        fv_json_begin_array(&json, "shared_prefixes");
        for (int32_t i = 0; i < t->num_prefixes; i++) {
            fv_json_begin_row(&json);
            fv_json_int(&json, "first_seq", t->prefixes[i].first_seq);
            fv_json_int(&json, "num_seqs", t->prefixes[i].num_seqs);
            fv_json_int(&json, "num_keys", t->prefixes[i].num_keys);
            fv_json_int(&json, "gain", t->prefixes[i].gain);
            fv_json_double(&json, "gain_of_batch", t->prefixes[i].of_batch);
            fv_json_string(&json, "cascade", fv_answers_cascade_verdict(t, &t->prefixes[i]));
            fv_json_end_object(&json);
        }
        fv_json_end_array(&json);
    }
    fv_json_end_object(&json);
}
