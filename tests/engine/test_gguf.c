/* The GGUF reader on right files, on files that are wrong in one known way, and on thousands of files
 * damaged at random: it has to refuse or to read, never to touch a byte outside. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "engine/gguf_builder.h"
#include "engine/tokenizer.h"

/* Opens what was built, expects a failure whose text holds `cause`, and frees the file. */
static void expect_refused(gguf_builder *file, fv_status status, const char *cause)
{
    fv_gguf *gguf;
    const fv_status got = fv_gguf_open_memory(&gguf, file->data, file->bytes);
    if (got != status || !strstr(fv_last_error(), cause)) {
        fail_msg("expected %s with '%s', got %s with '%s'", fv_status_name(status), cause, fv_status_name(got),
                 fv_last_error());
    }
    assert_null(gguf);
    free(file->data);
}

static void test_reads_metadata(void **state)
{
    (void)state;
    gguf_builder file;
    build_valid_file(&file);
    fv_gguf *gguf;
    assert_int_equal(fv_gguf_open_memory(&gguf, file.data, file.bytes), FV_OK);

    uint32_t number;
    float real;
    bool flag;
    fv_text text;
    assert_int_equal(fv_gguf_find_u32(&number, gguf, "llama.block_count"), FV_OK);
    assert_int_equal(number, 2);
    assert_int_equal(fv_gguf_find_u32(&number, gguf, "a.u8"), FV_OK);
    assert_int_equal(number, 200);
    assert_int_equal(fv_gguf_find_u32(&number, gguf, "a.i64"), FV_OK);
    assert_int_equal(number, 7);
    assert_int_equal(fv_gguf_find_f32(&real, gguf, "llama.eps"), FV_OK);
    assert_true(real == 1e-5f);
    assert_int_equal(fv_gguf_find_bool(&flag, gguf, "tokenizer.ggml.add_bos_token"), FV_OK);
    assert_true(flag);
    assert_int_equal(fv_gguf_find_string(&text, gguf, "general.architecture"), FV_OK);
    assert_int_equal(text.length, 5);
    assert_memory_equal(text.data, "llama", 5);
    assert_int_equal(fv_gguf_num_keys(gguf), 18);

    fv_gguf_array array;
    assert_int_equal(fv_gguf_find_array(&array, gguf, "tokenizer.ggml.merges", FV_GGUF_VALUE_STRING), FV_OK);
    assert_int_equal(array.count, 2);
    assert_true(fv_gguf_array_next_string(&text, &array));
    assert_true(fv_gguf_array_next_string(&text, &array));
    assert_memory_equal(text.data, "ab c", 4);
    assert_false(fv_gguf_array_next_string(&text, &array));
    assert_int_equal(fv_gguf_find_array(&array, gguf, "a.empty", FV_GGUF_VALUE_STRING), FV_OK);
    assert_false(fv_gguf_array_next_string(&text, &array));
    fv_gguf_close(gguf);
    free(file.data);
}

static void test_wrong_questions_name_the_key(void **state)
{
    (void)state;
    gguf_builder file;
    build_valid_file(&file);
    fv_gguf *gguf;
    assert_int_equal(fv_gguf_open_memory(&gguf, file.data, file.bytes), FV_OK);

    uint32_t number;
    float real;
    fv_gguf_array array;
    assert_int_equal(fv_gguf_find_u32(&number, gguf, "llama.head_count"), FV_ERR_IO);
    assert_non_null(strstr(fv_last_error(), "'llama.head_count' is missing"));
    assert_int_equal(fv_gguf_find_u32(&number, gguf, "a.i8"), FV_ERR_IO);
    assert_non_null(strstr(fv_last_error(), "'a.i8' is negative"));
    assert_int_equal(fv_gguf_find_u32(&number, gguf, "a.u64"), FV_ERR_IO);
    assert_non_null(strstr(fv_last_error(), "1099511627776"));
    assert_int_equal(fv_gguf_find_u32(&number, gguf, "llama.eps"), FV_ERR_IO);
    assert_non_null(strstr(fv_last_error(), "has type f32; accepted: an integer"));
    assert_int_equal(fv_gguf_find_f32(&real, gguf, "llama.block_count"), FV_ERR_IO);
    assert_int_equal(fv_gguf_find_array(&array, gguf, "tokenizer.ggml.merges", FV_GGUF_VALUE_I32), FV_ERR_IO);
    assert_non_null(strstr(fv_last_error(), "array of string"));
    fv_gguf_close(gguf);
    free(file.data);
}

static void test_finds_tensors(void **state)
{
    (void)state;
    gguf_builder file;
    build_valid_file(&file);
    fv_gguf *gguf;
    assert_int_equal(fv_gguf_open_memory(&gguf, file.data, file.bytes), FV_OK);

    const fv_gguf_tensor *tensor;
    assert_int_equal(fv_gguf_num_tensors(gguf), 3);
    assert_int_equal(fv_gguf_find_tensor(&tensor, gguf, "weight.q8_0"), FV_OK);
    assert_int_equal(tensor->type, FV_GGUF_Q8_0);
    assert_int_equal(tensor->shape[0], 32);
    assert_int_equal(tensor->shape[1], 2);
    assert_int_equal(tensor->shape[2], 1);
    assert_int_equal(tensor->bytes, 68);
    assert_int_equal(*(const uint8_t *)tensor->data, 32);
    assert_int_equal(fv_gguf_find_tensor(&tensor, gguf, "weight.q2_k"), FV_ERR_UNSUPPORTED);
    assert_non_null(strstr(fv_last_error(), "Q2_K"));
    assert_int_equal(fv_gguf_find_tensor(&tensor, gguf, "weight"), FV_ERR_IO);
    assert_non_null(strstr(fv_last_error(), "tensor 'weight' is missing"));
    fv_gguf_close(gguf);
    free(file.data);
}

static void test_refuses_headers(void **state)
{
    (void)state;
    gguf_builder file = {0};
    put_bytes(&file, "GGML", 4);
    put_u32(&file, 3);
    expect_refused(&file, FV_ERR_IO, "not a GGUF file");

    file = (gguf_builder){0};
    put_bytes(&file, "GG", 2);
    expect_refused(&file, FV_ERR_IO, "truncated in the file header");

    file = (gguf_builder){0};
    put_header(&file, 1, 0, 0);
    expect_refused(&file, FV_ERR_UNSUPPORTED, "version 1; accepted: 2 and 3");

    file = (gguf_builder){0};
    put_header(&file, 0x03000000, 0, 0);
    expect_refused(&file, FV_ERR_UNSUPPORTED, "big-endian");

    file = (gguf_builder){0};
    put_header(&file, 3, UINT64_MAX, 0);
    expect_refused(&file, FV_ERR_IO, "claims 18446744073709551615 tensors");

    file = (gguf_builder){0};
    put_header(&file, 3, 0, (uint64_t)1 << 60);
    expect_refused(&file, FV_ERR_IO, "metadata keys, more than");
}

static void test_refuses_metadata(void **state)
{
    (void)state;
    gguf_builder file = {0};
    put_header(&file, 3, 0, 1);
    put_u64(&file, UINT64_MAX - 3); /* the length of a key */
    put_u64(&file, 0);
    expect_refused(&file, FV_ERR_IO, "a string of 18446744073709551612 bytes");

    file = (gguf_builder){0};
    put_header(&file, 3, 0, 1);
    put_key(&file, "a", 99);
    put_u64(&file, 0);
    expect_refused(&file, FV_ERR_IO, "unknown value type 99");

    file = (gguf_builder){0};
    put_header(&file, 3, 0, 1);
    put_array_key(&file, "a", FV_GGUF_VALUE_U64, (uint64_t)1 << 61); /* times 8 is 0 */
    expect_refused(&file, FV_ERR_IO, "array of 2305843009213693952 elements");

    file = (gguf_builder){0};
    put_header(&file, 3, 0, 1);
    put_array_key(&file, "a", FV_GGUF_VALUE_ARRAY, 1);
    for (int32_t depth = 0; depth < 64; depth++) {
        put_u32(&file, FV_GGUF_VALUE_ARRAY);
        put_u64(&file, 1);
    }
    expect_refused(&file, FV_ERR_IO, "nested more than");

    file = (gguf_builder){0};
    put_header(&file, 3, 0, 2);
    put_u32_key(&file, "twice", 1);
    put_u32_key(&file, "twice", 2);
    expect_refused(&file, FV_ERR_IO, "'twice' appears twice");

    file = (gguf_builder){0};
    put_header(&file, 3, 0, 1);
    put_u32_key(&file, "general.alignment", 24);
    expect_refused(&file, FV_ERR_IO, "general.alignment is 24");
}

static void test_refuses_tensors(void **state)
{
    (void)state;
    static const struct {
        uint64_t d0, d1, offset;
        uint32_t type;
        const char *cause;
    } cases[] = {
        {4, 2, 7, FV_GGUF_F32, "misaligned"},
        {4, 0, 0, FV_GGUF_F32, "absurd size 0"},
        {UINT64_MAX, 2, 0, FV_GGUF_F32, "absurd size"},
        {(uint64_t)1 << 40, (uint64_t)1 << 40, 0, FV_GGUF_F32, "absurd size"},
        {31, 2, 0, FV_GGUF_Q4_1, "do not fit type Q4_1"},
        {4, 2, (uint64_t)1 << 40, FV_GGUF_F32, "past the end of the file"},
        {4, 2, UINT64_MAX - 31, FV_GGUF_F32, "past the end of the file"},
        {4, 1000, 0, FV_GGUF_F32, "past the end of the file"},
        {4, 2, 0, UINT32_MAX, "unknown type"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        gguf_builder file = {0};
        put_header(&file, 3, 1, 0);
        put_tensor_2d(&file, "t", cases[i].d0, cases[i].d1, cases[i].type, cases[i].offset);
        put_tensor_data(&file, 32, 64);
        expect_refused(&file, FV_ERR_IO, cases[i].cause);
    }

    gguf_builder file = {0};
    put_header(&file, 2, 2, 0);
    put_tensor_2d(&file, "first", 9, 1, FV_GGUF_F32, 0); /* 36 bytes: one element too far */
    put_tensor_2d(&file, "second", 16, 1, FV_GGUF_F32, 32);
    put_tensor_data(&file, 32, 128);
    expect_refused(&file, FV_ERR_IO, "tensors 'first' and 'second' overlap");

    file = (gguf_builder){0};
    put_header(&file, 3, 2, 0);
    put_tensor_2d(&file, "same", 4, 2, FV_GGUF_F32, 0);
    put_tensor_2d(&file, "same", 4, 2, FV_GGUF_F32, 32);
    put_tensor_data(&file, 32, 64);
    expect_refused(&file, FV_ERR_IO, "'same' appears twice");

    file = (gguf_builder){0};
    put_header(&file, 3, 1, 0);
    put_string(&file, "t");
    put_u32(&file, 5); /* dimensions */
    for (int32_t d = 0; d < 5; d++) put_u64(&file, 1);
    expect_refused(&file, FV_ERR_IO, "has 5 dimensions; accepted: 1 to 4");
}

static void test_hostile_names_are_printed_safely(void **state)
{
    (void)state;
    gguf_builder file = {0};
    put_header(&file, 3, 1, 0);
    put_tensor_2d(&file, "\x1b[31m\n", 4, 2, FV_GGUF_F32, 7);
    put_tensor_data(&file, 32, 64);
    expect_refused(&file, FV_ERR_IO, "'?[31m?'");
}

/* Every proper prefix of a valid file is refused: the last tensor ends with the file. */
static void test_refuses_every_truncation(void **state)
{
    (void)state;
    gguf_builder file;
    build_valid_file(&file);
    for (size_t bytes = 0; bytes < file.bytes; bytes++) {
        uint8_t *cut = malloc(bytes + 1); /* its own memory, so that a sanitizer sees a read past the end */
        assert_non_null(cut);
        memcpy(cut, file.data, bytes);
        fv_gguf *gguf;
        assert_int_not_equal(fv_gguf_open_memory(&gguf, cut, bytes), FV_OK);
        assert_null(gguf);
        free(cut);
    }
    free(file.data);
}

/* Reads everything that an opened file offers. */
static uint64_t read_all(const fv_gguf *gguf)
{
    uint64_t sum = 0;
    for (int64_t i = 0; i < fv_gguf_num_tensors(gguf); i++) {
        const fv_gguf_tensor *tensor = fv_gguf_tensor_at(gguf, i);
        for (size_t b = 0; b < tensor->bytes; b++) sum += ((const uint8_t *)tensor->data)[b];
    }
    fv_gguf_array array;
    fv_text text;
    if (fv_gguf_find_array(&array, gguf, "tokenizer.ggml.tokens", FV_GGUF_VALUE_STRING) == FV_OK) {
        while (fv_gguf_array_next_string(&text, &array)) {
            for (size_t b = 0; b < text.length; b++) sum += (uint8_t)text.data[b];
        }
    }
    fv_tokenizer *tokenizer;
    if (fv_tokenizer_create(&tokenizer, gguf) == FV_OK) {
        fv_token_list list = {0};
        fv_tokenizer_encode(&list, NULL, tokenizer, (fv_text){"abc ab<|im_end|>", 16}, FV_ENCODE_SPECIAL);
        sum += (uint64_t)list.num;
        fv_token_list_deinit(&list);
        fv_tokenizer_destroy(tokenizer);
    }
    return sum;
}

static uint32_t next_random(uint64_t *seed)
{
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*seed >> 33);
}

static void test_survives_damage(void **state)
{
    (void)state;
    static const uint64_t wild[] = {0,         1, 0x7f, 0xff, 0x7fffffff, 0x80000000, 0xffffffff, (uint64_t)1 << 62,
                                    UINT64_MAX};
    gguf_builder file;
    build_valid_file(&file);
    uint64_t seed = 1, sum = 0;
    int32_t num_opened = 0;
    for (int32_t round = 0; round < 20000; round++) {
        uint8_t *damaged = malloc(file.bytes);
        assert_non_null(damaged);
        memcpy(damaged, file.data, file.bytes);
        for (uint32_t i = 0; i <= next_random(&seed) % 3; i++) {
            const size_t at = next_random(&seed) % (file.bytes - 8);
            if (next_random(&seed) % 2) {
                damaged[at] = (uint8_t)next_random(&seed);
            } else {
                memcpy(damaged + at, &wild[next_random(&seed) % (sizeof(wild) / sizeof(wild[0]))], 8);
            }
        }
        fv_gguf *gguf;
        if (fv_gguf_open_memory(&gguf, damaged, file.bytes) == FV_OK) {
            num_opened++;
            sum += read_all(gguf);
        }
        fv_gguf_close(gguf);
        free(damaged);
    }
    assert_in_range(num_opened, 100, 19900); /* both outcomes are exercised */
    assert_true(sum > 0);
    free(file.data);
}

static void test_refuses_what_is_no_file(void **state)
{
    (void)state;
    fv_gguf *gguf;
    assert_int_equal(fv_gguf_open(&gguf, "/nonexistent/model.gguf"), FV_ERR_IO);
    assert_non_null(strstr(fv_last_error(), "/nonexistent/model.gguf: cannot open"));
    assert_null(gguf);
    assert_int_equal(fv_gguf_open(&gguf, "/"), FV_ERR_IO);
    assert_non_null(strstr(fv_last_error(), "not a regular file"));
    char fifo[64];
    snprintf(fifo, sizeof(fifo), "%s/fovea-test-fifo-%d", P_tmpdir, (int)getpid());
    assert_int_equal(mkfifo(fifo, 0600), 0);
    assert_int_equal(fv_gguf_open(&gguf, fifo), FV_ERR_IO); /* at once, though nobody writes */
    assert_non_null(strstr(fv_last_error(), "not a regular file"));
    unlink(fifo);
    assert_int_equal(fv_gguf_open_memory(&gguf, NULL, 0), FV_ERR_INVALID);

    char path[] = P_tmpdir "/fovea-test-XXXXXX";
    const int handle = mkstemp(path);
    assert_true(handle >= 0);
    assert_int_equal(fv_gguf_open(&gguf, path), FV_ERR_IO);
    assert_non_null(strstr(fv_last_error(), "the file is empty"));
    gguf_builder file;
    build_valid_file(&file);
    assert_int_equal(write(handle, file.data, file.bytes), file.bytes);
    assert_int_equal(fv_gguf_open(&gguf, path), FV_OK);
    assert_string_equal(fv_gguf_path(gguf), path);
    fv_gguf_release_tensor(gguf, fv_gguf_tensor_at(gguf, 0));
    assert_true(read_all(gguf) > 0);
    fv_gguf_close(gguf);
    close(handle);
    unlink(path);
    free(file.data);
}

static void test_model_file(void **state)
{
    (void)state;
    const char *path = getenv("FOVEA_MODEL");
    if (!path || !*path) {
        print_message("FOVEA_MODEL is not set: the test of a real model file is skipped\n");
        skip();
    }
    fv_gguf *gguf;
    assert_int_equal(fv_gguf_open(&gguf, path), FV_OK);
    assert_int_equal(fv_gguf_num_tensors(gguf), 272);
    const fv_gguf_tensor *tensor;
    assert_int_equal(fv_gguf_find_tensor(&tensor, gguf, "token_embd.weight"), FV_OK);
    assert_int_equal(tensor->type, FV_GGUF_Q8_0);
    assert_int_equal(tensor->shape[0], 576);
    assert_int_equal(tensor->shape[1], 49152);
    fv_gguf_close(gguf);
}

/* The reason says all, however long the path before it is. */
static void test_long_paths_keep_the_cause(void **state)
{
    (void)state;
    char path[3001];
    fv_gguf *gguf;
    memset(path, 'p', sizeof(path) - 1);
    path[sizeof(path) - 1] = '\0';
    assert_int_equal(fv_gguf_open(&gguf, path), FV_ERR_IO);
    assert_non_null(strstr(fv_last_error(), "ppp [...] ppp"));
    assert_non_null(strstr(fv_last_error(), "cannot open the model file: "));
    assert_int_equal(strlen(fv_last_error()), FV_ERROR_BYTES - 9);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reads_metadata),
        cmocka_unit_test(test_wrong_questions_name_the_key),
        cmocka_unit_test(test_finds_tensors),
        cmocka_unit_test(test_refuses_headers),
        cmocka_unit_test(test_refuses_metadata),
        cmocka_unit_test(test_refuses_tensors),
        cmocka_unit_test(test_hostile_names_are_printed_safely),
        cmocka_unit_test(test_refuses_every_truncation),
        cmocka_unit_test(test_survives_damage),
        cmocka_unit_test(test_refuses_what_is_no_file),
        cmocka_unit_test(test_long_paths_keep_the_cause),
        cmocka_unit_test(test_model_file),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
