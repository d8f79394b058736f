/* Special tokens: what is found is the longest one, as a walk over all of them finds it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/special_tokens.h"

enum { max_tokens = 60, max_length = 8 };

/* A vocabulary of random short words over two letters, so that many begin with others. */
typedef struct words {
    fv_vocabulary vocabulary;
    fv_token tokens[max_tokens];
    char texts[max_tokens][max_length];
} words;

static uint32_t next_random(uint32_t *seed)
{
    *seed = *seed * 1664525u + 1013904223u;
    return *seed >> 8;
}

static void fill_words(words *out, uint32_t *seed)
{
    static const fv_token_kind kinds[] = {FV_TOKEN_NORMAL, FV_TOKEN_CONTROL, FV_TOKEN_USER_DEFINED};
    const int32_t num = (int32_t)(next_random(seed) % (max_tokens + 1));
    out->vocabulary = (fv_vocabulary){.tokens = out->tokens, .num_tokens = num};
    for (int32_t i = 0; i < num; i++) {
        const size_t length = next_random(seed) % max_length;
        for (size_t at = 0; at < length; at++) out->texts[i][at] = "ab"[next_random(seed) % 2];
        out->tokens[i] = (fv_token){.bytes = {out->texts[i], length}, .kind = kinds[next_random(seed) % 3]};
    }
}

static int32_t find_by_walking(const words *from, fv_text text, bool with_control)
{
    int32_t best = FV_NO_TOKEN;
    for (int32_t i = 0; i < from->vocabulary.num_tokens; i++) {
        const fv_token *token = &from->tokens[i];
        if (!fv_token_is_special(token) || token->bytes.length == 0 || token->bytes.length > text.length) continue;
        if (token->kind == FV_TOKEN_CONTROL && !with_control) continue;
        if (memcmp(token->bytes.data, text.data, token->bytes.length) != 0) continue;
        if (best == FV_NO_TOKEN || token->bytes.length > from->tokens[best].bytes.length) best = i;
    }
    return best;
}

static void test_finds_the_longest(void **state)
{
    (void)state;
    uint32_t seed = 3;
    int32_t num_found = 0;
    for (int32_t round = 0; round < 400; round++) {
        words made;
        fv_special_tokens specials;
        fill_words(&made, &seed);
        assert_int_equal(fv_special_tokens_init(&specials, &made.vocabulary), FV_OK);
        for (int32_t i = 0; i < 100; i++) {
            char text[12];
            const size_t length = 1 + next_random(&seed) % sizeof(text);
            for (size_t at = 0; at < length; at++) text[at] = "abc"[next_random(&seed) % 16 / 7];
            const fv_text where = {text, length};
            const bool with_control = i % 2 == 0;
            const int32_t found = fv_special_tokens_match(&specials, where, with_control);
            assert_int_equal(found, find_by_walking(&made, where, with_control));
            num_found += found != FV_NO_TOKEN;
        }
        fv_special_tokens_deinit(&specials);
    }
    assert_true(num_found > 1000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_finds_the_longest)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
