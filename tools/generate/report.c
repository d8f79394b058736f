#include "generate/report.h"

#include <stdlib.h>
#include <string.h>

#include "core/error.h"
#include "json.h"

static double per_second(int64_t count, double seconds) { return seconds > 0.0 ? (double)count / seconds : 0.0; }
static double mib(uint64_t bytes) { return (double)bytes / (1 << 20); }

static void print_speed(FILE *file, const char *name, int64_t num_tokens, double seconds)
{
    fprintf(file, "%-10s %lld tokens in %.2f s, %.1f tokens/s\n", name, (long long)num_tokens, seconds,
            per_second(num_tokens, seconds));
}

static void print_shares(FILE *file, const char *name, double seconds, double gemm, double attention,
                         int64_t num_tokens)
{
    if (!(seconds > 0.0)) return;
    const double other = seconds - gemm - attention;
    fprintf(file, "%-10s %8.3f s   gemm %5.1f%%   attention %5.1f%%   other %5.1f%%   %8.3f ms a token\n", name,
            seconds, 100.0 * gemm / seconds, 100.0 * attention / seconds, 100.0 * other / seconds,
            1e3 * seconds / (double)num_tokens);
}

static void print_group(FILE *file, const fv_layer_group_stats *group, const char *attention)
{
    fprintf(file, "  %d layers, ", group->num_layers);
    if (group->window > 0) {
        fprintf(file, "window %d: ", group->window);
    } else {
        fprintf(file, "full: ");
    }
    fprintf(file, "%d of %d blocks used at most, %.0f MiB; %s\n", group->max_used_blocks, group->num_blocks,
            mib(group->cache_bytes), attention);
}

static void print_device(FILE *file, const fv_engine_info *engine, const fv_session_stats *session)
{
    fprintf(file, "device     %s: %s\n", engine->device, engine->device_description);
    if (session->num_graphs == 0) return;
    fprintf(file, "graphs     %d captured, %.1f MiB; %d of %d steps\n", session->num_graphs, mib(session->graph_bytes),
            session->num_graph_steps, session->num_steps);
}

void generate_print_summary(FILE *file, const generate_summary *summary, bool with_profile)
{
    const fv_engine_info *engine = &summary->engine;
    const fv_session_stats *session = &summary->session;
    fprintf(file, "model      %s: %.0f MiB, loaded in %.2f s\n", summary->model, mib(engine->weight_bytes),
            engine->load_seconds);
    print_speed(file, "prefill", session->prefill_tokens, session->prefill_seconds);
    print_speed(file, "decode", session->decode_tokens, session->decode_seconds);
    fprintf(file, "cache      %lld tokens, %d sequences at once; %s, attention in %s, blocks of %d, %.0f MiB\n",
            (long long)session->cache_tokens, session->max_running, fv_dtype_name(session->kv_cache_dtype),
            fv_dtype_name(session->attention_dtype), session->block_size, mib(session->cache_bytes));
    for (int32_t i = 0; i < session->num_groups; i++) print_group(file, &session->groups[i], summary->attention[i]);
    fprintf(file, "gemm       %s, %d threads\n", engine->gemm, engine->num_threads);
    if (strcmp(engine->device, "cpu") != 0) print_device(file, engine, session);
    if (!with_profile) return;
    fprintf(file, "profile    %d steps\n", session->num_steps);
    if (strcmp(engine->device, "cpu") != 0) return; /* a GPU's time is not told apart */
    print_shares(file, "  prefill", session->prefill_seconds, session->prefill_gemm_seconds,
                 session->prefill_attention_seconds, session->prefill_tokens);
    print_shares(file, "  decode", session->decode_seconds, session->decode_gemm_seconds,
                 session->decode_attention_seconds, session->decode_tokens);
}

static void print_replies(fv_json *json, const generate_replies *replies)
{
    static const char *const finish_names[] = {"none", "stop", "length", "cancelled", "failed"};
    fv_json_begin_array(json, "replies");
    for (int32_t i = 0; i < replies->count; i++) {
        const generate_reply *reply = &replies->all[i];
        fv_json_begin_row(json);
        fv_json_string(json, "prompt", reply->prompt);
        fv_json_text(json, "text", reply->text ? reply->text : "", reply->text_bytes);
        fv_json_string(json, "finish", finish_names[reply->finish]);
        fv_json_begin_array(json, "tokens");
        for (int32_t token = 0; token < reply->num_tokens; token++) fv_json_int(json, NULL, reply->tokens[token]);
        fv_json_end_array(json);
        if (reply->error) fv_json_string(json, "error", reply->error);
        fv_json_end_object(json);
    }
    fv_json_end_array(json);
}

static void print_phase(fv_json *json, const char *key, int64_t tokens, double seconds, double gemm, double attention)
{
    fv_json_begin_object(json, key);
    fv_json_int(json, "tokens", tokens);
    fv_json_double(json, "seconds", seconds);
    fv_json_double(json, "tokens_per_second", per_second(tokens, seconds));
    fv_json_double(json, "gemm_seconds", gemm);
    fv_json_double(json, "attention_seconds", attention);
    fv_json_end_object(json);
}

static void print_groups(fv_json *json, const generate_summary *summary)
{
    fv_json_begin_array(json, "layer_groups");
    for (int32_t i = 0; i < summary->session.num_groups; i++) {
        const fv_layer_group_stats *group = &summary->session.groups[i];
        fv_json_begin_row(json);
        fv_json_int(json, "layers", group->num_layers);
        fv_json_int(json, "window", group->window);
        fv_json_int(json, "blocks", group->num_blocks);
        fv_json_int(json, "max_blocks_used", group->max_used_blocks);
        fv_json_int(json, "cache_bytes", (int64_t)group->cache_bytes);
        fv_json_string(json, "attention", summary->attention[i]);
        fv_json_end_object(json);
    }
    fv_json_end_array(json);
}

static void print_device_json(fv_json *json, const fv_engine_info *engine, const fv_session_stats *session)
{
    fv_json_begin_object(json, "device");
    fv_json_string(json, "name", engine->device);
    fv_json_string(json, "description", engine->device_description);
    fv_json_int(json, "graphs", session->num_graphs);
    fv_json_int(json, "graph_bytes", (int64_t)session->graph_bytes);
    fv_json_int(json, "graph_steps", session->num_graph_steps);
    fv_json_int(json, "steps", session->num_steps);
    fv_json_end_object(json);
}

void generate_print_json(FILE *file, const generate_summary *summary, const generate_replies *replies)
{
    const fv_engine_info *engine = &summary->engine;
    const fv_session_stats *session = &summary->session;
    fv_json json;
    fv_json_init(&json, file);
    fv_json_begin_object(&json, NULL);
    print_replies(&json, replies);
    print_phase(&json, "prefill", session->prefill_tokens, session->prefill_seconds, session->prefill_gemm_seconds,
                session->prefill_attention_seconds);
    print_phase(&json, "decode", session->decode_tokens, session->decode_seconds, session->decode_gemm_seconds,
                session->decode_attention_seconds);
    fv_json_begin_object(&json, "cache");
    fv_json_int(&json, "tokens", session->cache_tokens);
    fv_json_int(&json, "block_size", session->block_size);
    fv_json_string(&json, "dtype", fv_dtype_name(session->kv_cache_dtype));
    fv_json_int(&json, "bytes", (int64_t)session->cache_bytes);
    fv_json_int(&json, "max_running", session->max_running);
    fv_json_end_object(&json);
    fv_json_string(&json, "attention_dtype", fv_dtype_name(session->attention_dtype));
    print_groups(&json, summary);
    fv_json_begin_object(&json, "model");
    fv_json_string(&json, "path", summary->model);
    fv_json_string(&json, "architecture", engine->architecture);
    fv_json_string(&json, "dtype", fv_dtype_name(engine->compute_dtype));
    fv_json_int(&json, "weight_bytes", (int64_t)engine->weight_bytes);
    fv_json_double(&json, "load_seconds", engine->load_seconds);
    fv_json_end_object(&json);
    print_device_json(&json, engine, session);
    fv_json_string(&json, "gemm", engine->gemm);
    fv_json_int(&json, "threads", engine->num_threads);
    fv_json_end_object(&json);
}
