/* libfovea-engine: writes text with a model from a GGUF file, on fovea's paged attention.
 *
 *   fv_engine   a model in memory: weights, tokenizer, threads. Does not change.
 *   fv_session  a paged KV cache and the requests on it. Several may share an engine, one after the
 *               other or in turns, but only one of them runs at a time.
 *
 *   fv_engine_create -> fv_session_create -> fv_session_add ... -> fv_session_step until none is left
 *
 * An engine runs on the CPU or on one GPU. There weights, activations and cache are in the GPU's memory and steps
 * of decodes are launches of captured graphs; the host schedules, samples, and is what callers see.
 *
 * Structures begin with struct_size, which has to be their sizeof; zero means the default in every other field. */
#ifndef FOVEA_ENGINE_H
#define FOVEA_ENGINE_H

#include "fovea/context.h"
#include "fovea/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fv_engine fv_engine;
typedef struct fv_session fv_session;

/* Told while a model is loaded, from the calling thread: `done` of `total` weights. */
typedef void (*fv_progress_fn)(void *user, int32_t done, int32_t total);

typedef struct fv_engine_options {
    uint32_t struct_size; /* sizeof(fv_engine_options) */
    int32_t num_threads;  /* 0 = CPUs that this process may use */
    /* FV_DTYPE_F32, FV_DTYPE_BF16: of weights and GEMMs. NONE: weights stay as the file stores them where that is smaller;
     * what is computed with panels of them is bf16 where the CPU has it, else fp32 */
    fv_dtype compute_dtype;
    const char *isa; /* as in fv_context_options */
    fv_log_fn log;
    void *log_user;
    fv_progress_fn progress;
    void *progress_user;
    const char *device;         /* "cpu", "cuda", "cuda:1"; NULL = cpu. A GPU computes in bf16 */
    const char *random_weights; /* a shape of fv_engine_random_shape: seeded random weights in place of a file, which
                                   is not read; for measuring. There is no tokenizer then */
    uint64_t random_seed;
} fv_engine_options;

/* Loads the model at `path`; `options` may be NULL. FV_ERR_IO: the file is not there or not sound;
 * FV_ERR_UNSUPPORTED: a model or device that this engine cannot run, with the reason; FV_ERR_NO_MEMORY: the
 * weights do not fit, with their bytes. */
FV_API fv_status fv_engine_create(fv_engine **engine, const char *path, const fv_engine_options *options);

/* Takes NULL. Sessions go first. */
FV_API void fv_engine_destroy(fv_engine *engine);

/* The names that random_weights takes, from index 0: "tiny", "llama-8b"; NULL past the last. Static text. */
FV_API const char *fv_engine_random_shape(int32_t index);

typedef struct fv_engine_info {
    uint32_t struct_size;     /* sizeof(fv_engine_info) */
    const char *architecture; /* "llama", "gemma3", "deepseek2"; static text */
    int32_t vocabulary_size;
    int32_t context_length; /* tokens that the model was made for */
    int32_t num_layers;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_size;
    int32_t num_threads;
    int32_t has_chat_template; /* 1: fv_engine_encode_chat works; else chat_why_not */
    fv_dtype compute_dtype;
    uint64_t weight_bytes; /* in memory */
    double load_seconds;
    const char *gemm; /* library, compute type, how weights are kept; valid as long as the engine, like the next */
    const char *chat_why_not; /* "" or why there are no chats */
    const char *device;       /* its name, valid as long as the engine, like the next */
    const char *device_description;
    uint64_t decode_weight_bytes; /* that a step of one token reads: without the embedding's other rows and the experts
                                     that are not used */
} fv_engine_info;

/* FV_ERR_INVALID where `info->struct_size` is not sizeof(fv_engine_info). */
FV_API fv_status fv_engine_get_info(fv_engine_info *info, const fv_engine *engine);

/* How fast the device reads memory, in bytes a second: up to 1 GiB of it, several times. A decode of one sequence
 * cannot be faster than decode_weight_bytes and its cache at this speed. FV_ERR_UNSUPPORTED on the CPU. Not while
 * a session runs a step. */
FV_API fv_status fv_engine_measure_read(double *bytes_per_second, fv_engine *engine);

/* The tokens of `bytes` bytes of plain text, after the BOS token if the model wants one. *tokens is
 * freed with fv_engine_free_tokens. Control tokens in the text stay text. Bytes that no token stands for are left out:
 * in byte-level vocabularies some control characters and bytes that no UTF-8 text contains, as Hugging Face's tokenizers
 * do. To SentencePiece the character U+2581 is a space. FV_ERR_UNSUPPORTED where there is no tokenizer. */
FV_API fv_status fv_engine_encode(int32_t **tokens, int32_t *num_tokens, const fv_engine *engine, const char *text,
                                  size_t bytes);

/* One turn of a chat. */
typedef struct fv_message {
    const char *role; /* "system", "user", "assistant" */
    const char *content;
} fv_message;

/* The tokens of a chat in the model's own form, up to where the assistant's reply begins.
 * FV_ERR_UNSUPPORTED with the reason when the model has no form that the engine knows. */
FV_API fv_status fv_engine_encode_chat(int32_t **tokens, int32_t *num_tokens, const fv_engine *engine,
                                       const fv_message *messages, int32_t num_messages);
FV_API void fv_engine_free_tokens(int32_t *tokens); /* takes NULL */

/* The text of some tokens, without control tokens; zero-terminated, freed with fv_engine_free_text. They are taken for
 * the beginning of a document: where fv_engine_encode puts a space before one (SentencePiece), a first space is left
 * out. So of what fv_engine_encode made it is the text that was encoded, but for the bytes left out there and U+2581. */
FV_API fv_status fv_engine_decode(char **text, size_t *bytes, const fv_engine *engine, const int32_t *tokens,
                                  int32_t num_tokens);
FV_API void fv_engine_free_text(char *text); /* takes NULL */

typedef struct fv_session_options {
    uint32_t struct_size;          /* sizeof(fv_session_options) */
    const char *attention_backend; /* a name of fv_backend_name; NULL or "auto" = the first that can */
    const char *kernels;           /* name of a kernel table as in fv_plan_options; NULL = the best */
    int32_t block_size;            /* tokens of a cache block; 0 = 16 */
    fv_dtype kv_cache_dtype;       /* F32, F16, BF16, F8_E4M3, F8_E5M2, I8 (with a scale for each token and head; not
                                      for MLA); NONE = F16, on a GPU and with an attention_dtype of BF16 that */
    int32_t cache_tokens;          /* tokens that the cache holds, rounded up to whole blocks; 0 = the context length.
                                      Layers with a window take no more than their window needs */
    int32_t max_batched_tokens;    /* of a step; longer prompts are cut into chunks; 0 = 512 */
    int32_t max_num_seqs;          /* requests that run at once, at most max_batched_tokens; 0 = 16 */
    int32_t batch_invariant; /* 1: a request's results do not depend, bit for bit, on the others; the tiles of AMX, by
                                      which they would, are left out unless `kernels` names them */
    uint64_t attention_workspace_bytes; /* 0 = chosen; less leads to more, smaller chunks of cached context */
    int32_t
        no_graphs; /* 1: plain launches on a GPU too. Graphs serve steps of decodes, captured at creation for 1, 2, 4,
                          8, 16, 24, ... requests up to max_num_seqs; fewer requests take the next larger one */
    fv_dtype
        attention_dtype; /* of queries, new keys and values, and results of attention. NONE: on a GPU BF16, which is all that it
                                 takes; on a CPU F32, but F16 where it has AMX and the cache is of F16 or of one byte, `kernels` is NULL
                                 and batch_invariant 0.
                                 With AMX prefill of a cache of F16 takes 0.3 of the time in F16, one of BF16 0.12 in BF16, which
                                 moves logits ten times as far */
} fv_session_options;

/* Creates the cache and chooses the attention. `options` may be NULL. The engine outlives the session.
 * FV_ERR_UNSUPPORTED: no backend can serve this, with the reasons. */
FV_API fv_status fv_session_create(fv_session **session, fv_engine *engine, const fv_session_options *options);
FV_API void fv_session_destroy(fv_session *session); /* takes NULL; not from inside a callback of the session */

typedef enum fv_finish {
    FV_FINISH_NONE = 0,      /* goes on */
    FV_FINISH_STOP = 1,      /* the model ended its text */
    FV_FINISH_LENGTH = 2,    /* max_tokens, or the end of the context */
    FV_FINISH_CANCELLED = 3, /* fv_session_cancel */
    FV_FINISH_FAILED = 4,    /* no logit of its next token is a number, by the model's weights: it ends, others go on */
} fv_finish;

/* One token that a request wrote, or its end without one. */
typedef struct fv_token_event {
    int32_t request;
    int32_t token;    /* -1 with FV_FINISH_CANCELLED and FV_FINISH_FAILED: none */
    const char *text; /* whole UTF-8 characters that are complete now, not terminated; maybe none. Bytes that are no
                         UTF-8 come as they are, and the last event has what is left of an unfinished character */
    size_t text_bytes;
    fv_finish finish; /* other than NONE: the request has ended, this is its last event */
} fv_token_event;

/* Called during fv_session_step, for requests that go on before those whose prompt has just ended, each in the order of the
 * requests; behind all of these, or during fv_session_cancel, for requests that are cancelled. The event is valid during
 * the call. */
typedef void (*fv_token_fn)(void *user, const fv_token_event *event);

/* Logits [vocabulary_size] that follow position `position` of a request; valid during the call. */
typedef void (*fv_logits_fn)(void *user, int32_t request, int32_t position, const float *logits,
                             int32_t vocabulary_size);

typedef struct fv_request {
    uint32_t struct_size;  /* sizeof(fv_request) */
    const int32_t *prompt; /* [num_prompt_tokens], at least one; copied */
    int32_t num_prompt_tokens;
    int32_t max_tokens; /* to write; 0 = until context or cache are full */
    float temperature;  /* 0 = greedy */
    int32_t top_k;      /* 0 = all */
    float top_p;        /* 0 = all */
    uint64_t seed;
    int32_t ignore_eos;    /* 1: writes on after the model has ended its text */
    const int32_t *forced; /* [num_forced]: written in place of what was sampled, for measuring; copied */
    int32_t num_forced;
    fv_token_fn on_token;
    fv_logits_fn on_logits; /* given: called for every position from first_logits on, prompt and output */
    int32_t first_logits;
    void *user;
} fv_request;

/* Adds a request; *id counts from 0. It starts when the cache has room for all that it may take. Callbacks may add
 * requests, too: to the session that calls them from its next step on.
 * FV_ERR_INVALID: a prompt longer than the context, a token outside the vocabulary, sampling options
 * out of range. FV_ERR_NO_SPACE: more tokens than the whole cache holds. */
FV_API fv_status fv_session_add(int32_t *id, fv_session *session, const fv_request *request);

/* Ends a request that is not done, whether it waits, is in its prompt or writes. Its last event has FV_FINISH_CANCELLED and
 * what is left of an unfinished character; then its blocks of the cache are free. Between steps all that has happened when
 * the call returns. From inside a callback of the same session it happens at the end of the call that called back: what a
 * step writes for the request is told before, and where that ends the request by itself nothing follows. By one thread at
 * a time, as every call for a session.
 * FV_ERR_INVALID: an id that this session has not given, or a request that has ended or is cancelled already. */
FV_API fv_status fv_session_cancel(fv_session *session, int32_t id);

/* Runs one step: the next token of every running request, and a chunk of the prompts that wait.
 * *num_unfinished is how many requests are not done. After a failure the session can only be
 * destroyed. FV_ERR_INVALID, and no failure of the session: from inside a callback of it. */
FV_API fv_status fv_session_step(int32_t *num_unfinished, fv_session *session);

/* Layers with the same window share a block table and an attention plan, and have a cache of their own.
 * Layers that see all keys come first. */
#define FV_MAX_LAYER_GROUPS 2

typedef struct fv_layer_group_stats {
    int32_t num_layers;
    int32_t window;          /* keys that a token sees, its own included; 0 = all */
    int32_t num_blocks;      /* of the cache, without the null block */
    int32_t num_used_blocks; /* that requests hold now */
    int32_t max_used_blocks; /* the most that they held at one time */
    uint64_t cache_bytes;    /* of all layers of the group */
} fv_layer_group_stats;

typedef struct fv_session_stats {
    uint32_t struct_size; /* sizeof(fv_session_stats) */
    int32_t num_steps;
    int64_t prefill_tokens; /* in steps that had a part of a prompt, all their tokens */
    int64_t decode_tokens;  /* in steps of decodes only */
    double prefill_seconds;
    double decode_seconds;
    double prefill_gemm_seconds; /* of prefill_seconds; the rest is everything else. 0 on a GPU, as the next three */
    double prefill_attention_seconds;
    double decode_gemm_seconds;
    double decode_attention_seconds;
    int32_t num_waiting;
    int32_t num_running;
    int32_t max_running;
    int64_t cache_tokens;      /* that the cache holds */
    uint64_t cache_bytes;      /* of all groups */
    uint64_t activation_bytes; /* and the workspace of the attention */
    int32_t block_size;
    fv_dtype kv_cache_dtype;
    int32_t num_groups;
    fv_layer_group_stats groups[FV_MAX_LAYER_GROUPS];
    int64_t prompt_tokens_done; /* of prompts, so far, for progress */
    int64_t prompt_tokens_total;
    int32_t num_graphs;      /* captured */
    int32_t num_graph_steps; /* that were launches of one */
    uint64_t graph_bytes;    /* device memory that they took, their plans included; 0: not known */
    fv_dtype attention_dtype;
} fv_session_stats;

/* FV_ERR_INVALID where `stats->struct_size` is not sizeof(fv_session_stats). */
FV_API fv_status fv_session_get_stats(fv_session_stats *stats, const fv_session *session);

/* One line: backend, kernels and schedule of the last step's attention in a layer group. Valid until the
 * next step; NULL for a group that is not there. */
FV_API const char *fv_session_describe(fv_session *session, int32_t group);

#ifdef __cplusplus
}
#endif
#endif
