/* Patterns are applied one after another, each to the pieces that the one before left: matches and
 * the text between them are both pieces. A pattern sees only its piece, so that a look-ahead at the
 * end of a piece finds the end of text, as in the tokenizers that the models were trained with.
 *
 *   "in 2024"  --digits-->  "in " "2" "0" "2" "4"  --words-->  "in" " " "2" "0" "2" "4"
 */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "engine/pre_tokenizer.h"

#include <pcre2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/utf8.h"

#define MAX_PATTERNS 6
#define LEAST_MATCH_STEPS 10000000u /* of a match: PCRE2's own limit, */
#define STEPS_PER_BYTE 8u           /* and so many for each byte of the text */

/* Unicode's White_Space. PCRE2's \s also holds U+180E, which Unicode took out of it. */
#define SPACE "\\t-\\r \\x{85}\\p{Z}"
#define LAST_SPACES "[" SPACE "]+(?![^" SPACE "])|[" SPACE "]+"
#define SUFFIX "'s|'t|'re|'ve|'m|'ll|'d"

#define GPT2_WORDS                 \
    SUFFIX                         \
    "| ?\\p{L}+"                   \
    "| ?\\p{N}+"                   \
    "| ?[^" SPACE "\\p{L}\\p{N}]+" \
    "|" LAST_SPACES

#define LLAMA3_WORDS                        \
    "(?i:" SUFFIX ")"                       \
    "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+"        \
    "|\\p{N}{1,3}"                          \
    "| ?[^" SPACE "\\p{L}\\p{N}]+[\\r\\n]*" \
    "|[" SPACE "]*[\\r\\n]+"                \
    "|" LAST_SPACES

#define DEEPSEEK3_IDEOGRAPHS "[\\x{4e00}-\\x{9fa5}\\x{3040}-\\x{30ff}]+" /* Han, Hiragana, Katakana */
#define DEEPSEEK3_WORDS                            \
    "[!-/:-@\\[-`{-~][A-Za-z]+"                    \
    "|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+" \
    "| ?[\\p{P}\\p{S}]+[\\r\\n]*"                  \
    "|[" SPACE "]*[\\r\\n]+"                       \
    "|" LAST_SPACES

/* DeepSeek's first models and DeepSeek-V2. Letters that have cases, but for those of some scripts; marks of which the
 * last range of ASCII holds letters, too, that the pattern before has taken. */
#define DEEPSEEK_OTHER_LETTERS                                                                       \
    "[\\x{560}-\\x{588}\\x{10c7}-\\x{10ff}\\x{1c80}-\\x{1c88}\\x{2d00}-\\x{2d2d}\\x{a790}-\\x{ab68}" \
    "\\x{10570}-\\x{105bc}\\x{16e40}-\\x{16e7f}\\x{1d400}-\\x{1df1e}]"
#define DEEPSEEK_WORDS "[" SPACE "]?(?:(?!" DEEPSEEK_OTHER_LETTERS ")\\p{L&})++"
#define DEEPSEEK_MARKS \
    "[" SPACE "]?[!-/:-~\\x{ff01}-\\x{ff0f}\\x{ff1a}-\\x{ff5e}\\x{2018}-\\x{201f}\\x{3000}-\\x{3002}]+"
#define DEEPSEEK_IDEOGRAPHS "[\\x{800}-\\x{9fa5}\\x{ac00}-\\x{d7ff}]+"
/* Blanks at the end; once for each run of blanks, not from each of them. */
#define DEEPSEEK_BLANKS "(?<![" SPACE "])[" SPACE "]++\\z"

typedef struct recipe {
    const char *name; /* tokenizer.ggml.pre */
    const char *patterns[MAX_PATTERNS];
    bool ignores_merges;
    bool adds_bos;
} recipe;

static const recipe recipes[] = {
    {"smollm", {"\\p{N}", GPT2_WORDS}, false, false},
    {"gpt-2", {GPT2_WORDS}, false, false},
    {"llama-bpe", {LLAMA3_WORDS}, true, true},
    {"deepseek-llm",
     {"[\\r\\n]", DEEPSEEK_WORDS, DEEPSEEK_MARKS, DEEPSEEK_BLANKS, DEEPSEEK_IDEOGRAPHS, "\\p{N}+"},
     false,
     true},
    {"deepseek-v3", {"\\p{N}{1,3}", DEEPSEEK3_IDEOGRAPHS, DEEPSEEK3_WORDS}, false, true},
};

struct fv_pre_tokenizer {
    const recipe *recipe;
    pcre2_code *codes[MAX_PATTERNS];
};

/* One call of fv_pre_tokenizer_split. */
typedef struct splitting {
    const fv_pre_tokenizer *pre_tokenizer;
    pcre2_match_data *match;
    pcre2_match_context *limits;
    fv_take_piece *take;
    void *context;
} splitting;

static const recipe *find_recipe(fv_text name)
{
    for (int32_t i = 0; i < FV_ARRAY_LEN(recipes); i++) {
        if (strlen(recipes[i].name) != name.length) continue;
        if (memcmp(recipes[i].name, name.data, name.length) == 0) return &recipes[i];
    }
    return NULL;
}

static fv_status refuse_name(fv_text name)
{
    char accepted[256] = "";
    for (int32_t i = 0; i < FV_ARRAY_LEN(recipes); i++) {
        const size_t used = strlen(accepted);
        snprintf(accepted + used, sizeof(accepted) - used, "%s%s", i ? ", " : "", recipes[i].name);
    }
    return fv_fail(FV_ERR_UNSUPPORTED, "pre-tokenizer '%s'; accepted: %s", fv_text_printable(name).text, accepted);
}

static fv_status compile(pcre2_code **code, const char *pattern)
{
    int error;
    PCRE2_SIZE offset;
    *code = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP, &error, &offset, NULL);
    if (!*code) {
        PCRE2_UCHAR text[128];
        pcre2_get_error_message(error, text, sizeof(text));
        return fv_fail(FV_ERR_INTERNAL, "pre-tokenizer pattern at %zu: %s", (size_t)offset, (const char *)text);
    }
    pcre2_jit_compile(*code, PCRE2_JIT_COMPLETE); /* where it fails, the interpreter does the same */
    return FV_OK;
}

fv_status fv_pre_tokenizer_create(fv_pre_tokenizer **pre_tokenizer, fv_text name)
{
    *pre_tokenizer = NULL;
    const recipe *found = find_recipe(name);
    if (!found) return refuse_name(name);

    fv_pre_tokenizer *created = calloc(1, sizeof(*created));
    if (!created) return fv_fail(FV_ERR_NO_MEMORY, "no memory for a pre-tokenizer");
    created->recipe = found;
    fv_status status = FV_OK;
    for (int32_t i = 0; i < MAX_PATTERNS && found->patterns[i] && status == FV_OK; i++) {
        status = compile(&created->codes[i], found->patterns[i]);
    }
    if (status != FV_OK) {
        fv_pre_tokenizer_destroy(created);
        return status;
    }
    *pre_tokenizer = created;
    return FV_OK;
}

void fv_pre_tokenizer_destroy(fv_pre_tokenizer *pre_tokenizer)
{
    if (!pre_tokenizer) return;
    for (int32_t i = 0; i < MAX_PATTERNS; i++) pcre2_code_free(pre_tokenizer->codes[i]);
    free(pre_tokenizer);
}

bool fv_pre_tokenizer_ignores_merges(const fv_pre_tokenizer *pre_tokenizer)
{
    return pre_tokenizer->recipe->ignores_merges;
}

bool fv_pre_tokenizer_adds_bos(const fv_pre_tokenizer *pre_tokenizer) { return pre_tokenizer->recipe->adds_bos; }

/* Applies the patterns from `level` on to `text`, which is valid UTF-8. */
static fv_status split_level(const splitting *call, int32_t level, const char *text, size_t length)
{
    if (length == 0) return FV_OK;
    const pcre2_code *code = level < MAX_PATTERNS ? call->pre_tokenizer->codes[level] : NULL;
    if (!code) return call->take(call->context, text, length);

    size_t done = 0;
    while (done < length) {
        const int found = pcre2_match(code, (PCRE2_SPTR)text, length, done, PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY,
                                      call->match, call->limits);
        if (found == PCRE2_ERROR_NOMATCH) break;
        if (found < 0) {
            PCRE2_UCHAR reason[128];
            pcre2_get_error_message(found, reason, sizeof(reason));
            return fv_fail(FV_ERR_INTERNAL, "pre-tokenizer: %s", (const char *)reason);
        }
        /* Copied: the next level uses the same match data. */
        const PCRE2_SIZE *range = pcre2_get_ovector_pointer(call->match);
        const size_t begin = range[0], end = range[1];
        fv_status status = split_level(call, level + 1, text + done, begin - done);
        if (status == FV_OK) status = split_level(call, level + 1, text + begin, end - begin);
        if (status != FV_OK) return status;
        done = end;
    }
    return split_level(call, level + 1, text + done, length - done);
}

fv_status fv_pre_tokenizer_split(const fv_pre_tokenizer *pre_tokenizer, const char *text, size_t length,
                                 fv_take_piece *take, void *context)
{
    splitting call = {pre_tokenizer, pcre2_match_data_create(1, NULL), pcre2_match_context_create(NULL), take, context};
    if (!call.match || !call.limits) {
        pcre2_match_data_free(call.match);
        pcre2_match_context_free(call.limits);
        return fv_fail(FV_ERR_NO_MEMORY, "no memory for a pre-tokenizer match");
    }
    /* A run of blanks is gone back over once: steps in proportion to the text. */
    const size_t most_bytes = (UINT32_MAX - LEAST_MATCH_STEPS) / STEPS_PER_BYTE;
    const size_t num_bytes = length < most_bytes ? length : most_bytes;
    pcre2_set_match_limit(call.limits, LEAST_MATCH_STEPS + STEPS_PER_BYTE * (uint32_t)num_bytes);

    /* The patterns take valid UTF-8 only; checking here, once, keeps long texts linear. */
    fv_status status = FV_OK;
    size_t begin = 0;
    while (begin < length && status == FV_OK) {
        size_t valid = begin, invalid;
        int32_t step;
        while (valid < length && (step = fv_utf8_sequence(text + valid, length - valid)) > 0) valid += (size_t)step;
        for (invalid = valid; invalid < length && fv_utf8_sequence(text + invalid, length - invalid) <= 0;) invalid++;
        status = split_level(&call, 0, text + begin, valid - begin);
        if (status == FV_OK && invalid > valid) status = take(context, text + valid, invalid - valid);
        begin = invalid;
    }
    pcre2_match_data_free(call.match);
    pcre2_match_context_free(call.limits);
    return status;
}
