/* The batch grammar: what it reads, and what it says to what it does not. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "bench/batch_spec.h"
#include "core/compiler.h"

static void one_decode(void **state)
{
    (void)state;
    fv_batch_spec spec;
    assert_int_equal(fv_batch_spec_init(&spec, "q1s8k"), FV_OK);
    assert_int_equal(spec.num_seqs, 1);
    assert_int_equal(spec.num_tokens, 1);
    assert_int_equal(spec.query_lens[0], 1);
    assert_int_equal(spec.seq_lens[0], 8192);
    fv_batch_spec_deinit(&spec);
}

static void prefill_has_no_context(void **state)
{
    (void)state;
    fv_batch_spec spec;
    assert_int_equal(fv_batch_spec_init(&spec, "q2k"), FV_OK);
    assert_int_equal(spec.query_lens[0], 2048);
    assert_int_equal(spec.seq_lens[0], 2048);
    fv_batch_spec_deinit(&spec);
}

static void mix_keeps_the_order(void **state)
{
    (void)state;
    fv_batch_spec spec;
    assert_int_equal(fv_batch_spec_init(&spec, "2q1ks2k_32q1s1k_q17s40"), FV_OK);
    assert_int_equal(spec.num_seqs, 35);
    assert_int_equal(spec.num_tokens, 2 * 1024 + 32 + 17);
    assert_int_equal(spec.max_query_len, 1024);
    assert_int_equal(spec.max_seq_len, 2048);
    assert_int_equal(spec.query_lens[1], 1024);
    assert_int_equal(spec.query_lens[2], 1);
    assert_int_equal(spec.seq_lens[33], 1024);
    assert_int_equal(spec.seq_lens[34], 40);
    assert_int_equal(spec.num_groups, 3);
    assert_int_equal(spec.groups[1], 0);
    assert_int_equal(spec.groups[2], 1);
    assert_int_equal(spec.groups[34], 2);
    fv_batch_spec_deinit(&spec);
}

static void refusals_name_the_place(void **state)
{
    (void)state;
    static const struct {
        const char *text, *says;
    } cases[] = {
        {"", "'q' is missing"},
        {"q", "a number is missing"},
        {"3x1", "at 'x1'"},
        {"q1z", "at 'z'"},
        {"q1s", "a number is missing"},
        {"q1_", "'q' is missing"},
        {"q1__q1", "at '_q1'"},
        {"0q1", "out of range"},
        {"q0", "out of range"},
        {"q9s4", "below the query length 9"},
        {"q99999999999", "out of range"},
        {"q99999999999999999999k", "out of range"},
        {"9999999q1", "out of range"},
        {"65536q1_q1", "more than"},
        {"2kq1", "at 'kq1'"},
        {"q1 ", "at ' '"},
        {"Q1", "'q' is missing"},
    };
    for (int32_t i = 0; i < FV_ARRAY_LEN(cases); i++) {
        fv_batch_spec spec;
        assert_int_equal(fv_batch_spec_init(&spec, cases[i].text), FV_ERR_INVALID);
        if (!strstr(fv_last_error(), cases[i].says)) fail_msg("'%s' gave: %s", cases[i].text, fv_last_error());
        assert_null(spec.query_lens);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_decode),
        cmocka_unit_test(prefill_has_no_context),
        cmocka_unit_test(mix_keeps_the_order),
        cmocka_unit_test(refusals_name_the_place),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
