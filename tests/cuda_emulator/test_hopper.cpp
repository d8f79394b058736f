/* The emulator's parts that know how Hopper lays things out: products by descriptors, boxes of tensor maps, mbarriers. Each
 * against the plain formula, on panels that are written as the kernels write them. */
#include <cuda_fp16.h>
#include <stdio.h>
#include <string.h>

#include "cuda_emulator/matrix.h"
#include "cuda_emulator/mbarrier.h"
#include "cuda_emulator/tensor_map.h"
#include "cuda_emulator/wgmma_queue.h"

namespace
{

int num_failed;

void expect(bool is, const char *what, int line)
{
    if (is) return;
    num_failed++;
    fprintf(stderr, "line %d: %s\n", line, what);
}
#define EXPECT(is) expect(is, #is, __LINE__)

enum { BASE = 1024 /* the first shared address */ };
alignas(1024) char shared[128 * 1024];
const matrix_memory memory = {shared, BASE, BASE + sizeof(shared)};

uint32_t next_random(void)
{
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return state >> 8;
}

/* Small whole numbers: all sums are exact. */
float random_number(void) { return (float)(int32_t)(next_random() % 17) - 8; }

uint16_t bits_of(matrix_type type, float number)
{
    uint32_t word;
    memcpy(&word, &number, sizeof(word));
    return type == MATRIX_BF16 ? (uint16_t)(word >> 16) : __half_raw(__float2half(number)).x;
}

/* Element `column` of a row in panels of `rows` rows of 64 elements, from address `base` on: chunks lie at their number xor the
 * row's. */
void put(uint32_t base, int rows, int row, int column, uint16_t bits)
{
    const int chunk = column / 8 % 8;
    const uint32_t at = base +
                        (uint32_t)(column / 64 * rows * 128 + row * 128 + ((chunk ^ row % 8) * 16) + column % 8 * 2);
    memcpy(shared + at - BASE, &bits, sizeof(bits));
}

uint64_t descriptor_at(uint32_t address, uint32_t leading, uint32_t stride)
{
    return (uint64_t)(address >> 4) | (uint64_t)(leading >> 4) << 16 | (uint64_t)(stride >> 4) << 32 |
           (uint64_t)1 << 62;
}

/* 64 x N x 64, in four steps, by all four warps: a in shared memory or registers, b by its columns or by the depth. */
void test_product(matrix_type type, int columns, bool is_transposed, bool from_registers)
{
    enum { DEPTH = 64, ROWS = 64 };
    static float a[ROWS][DEPTH], b[DEPTH][MATRIX_MOST_COLUMNS];
    const uint32_t a_at = 2048, b_at = 16 * 1024;
    memset(shared, 0xff, sizeof(shared));
    for (int row = 0; row < ROWS; row++) {
        for (int k = 0; k < DEPTH; k++) {
            a[row][k] = random_number();
            put(a_at, ROWS, row, k, bits_of(type, a[row][k]));
        }
    }
    for (int k = 0; k < DEPTH; k++) {
        for (int column = 0; column < columns; column++) {
            b[k][column] = random_number();
            if (is_transposed)
                put(b_at, DEPTH, k, column, bits_of(type, b[k][column]));
            else
                put(b_at, columns, column, k, bits_of(type, b[k][column]));
        }
    }
    for (int warp = 0; warp < 4; warp++) {
        static matrix_sum sum;
        for (int step = 0; step < DEPTH / 16; step++) {
            matrix_left left;
            static matrix_right right;
            for (int lane = 0; lane < 32; lane++) {
                uint32_t words[4];
                for (int i = 0; i < 4; i++) {
                    const int row = warp * 16 + lane / 4 + i % 2 * 8, k = step * 16 + lane % 4 * 2 + i / 2 * 8;
                    words[i] = bits_of(type, a[row][k]) | (uint32_t)bits_of(type, a[row][k + 1]) << 16;
                }
                matrix_set_left(&left, type, words, lane);
            }
            if (!from_registers)
                EXPECT(!matrix_load_left(&left, &memory, type, descriptor_at(a_at + step * 32, 16, 1024), warp * 16));
            const uint64_t right_at = is_transposed ? descriptor_at(b_at + step * 16 * 128, DEPTH * 128, 1024)
                                                    : descriptor_at(b_at + step * 32, 16, 1024);
            EXPECT(!matrix_load_right(&right, &memory, type, right_at, columns, is_transposed));
            matrix_multiply(&sum, &left, &right, columns, step > 0);
        }
        int num_wrong = 0;
        for (int lane = 0; lane < 32; lane++) {
            for (int i = 0; i < columns / 2; i++) {
                const int row = matrix_row_of(lane, i), column = matrix_column_of(lane, i);
                float expected = 0;
                for (int k = 0; k < DEPTH; k++) expected += a[warp * 16 + row][k] * b[k][column];
                if (!(sum.of[row][column] == expected)) num_wrong++;
            }
        }
        EXPECT(num_wrong == 0);
    }
}

/* A warp's sum of two groups: NaN from the first commit on, until the second group has run. */
void test_queue(void)
{
    static float d[32][MATRIX_ROWS / 2];
    wgmma_queue queue = {};
    memset(shared, 0, sizeof(shared));
    for (int column = 0; column < 16; column++) {
        for (int k = 0; k < 64; k++) put(BASE, 16, column, k, bits_of(MATRIX_BF16, 1));
    }
    for (auto &lane : d) lane[0] = 1;
    const uint32_t ones = bits_of(MATRIX_BF16, 1) * 0x10001u;
    EXPECT(wgmma_queue_ask(&queue, 0, NULL)); /* no fence */
    for (int group = 0; group < 2; group++) {
        for (int lane = 0; lane < 32; lane++) {
            const wgmma_product product = {d[lane],
                                           16,
                                           MATRIX_BF16,
                                           false,
                                           false,
                                           group == 1,
                                           0,
                                           descriptor_at(BASE, 16, 1024),
                                           {ones, ones, ones, ones}};
            wgmma_queue_fence(&queue, lane);
            EXPECT(!wgmma_queue_ask(&queue, lane, &product));
        }
        EXPECT(!wgmma_queue_commit(&queue));
        EXPECT(d[5][3] != d[5][3]);
    }
    EXPECT(!wgmma_queue_run(&queue, &memory, 0));
    EXPECT(d[5][3] != d[5][3]);
    EXPECT(!wgmma_queue_run(&queue, &memory, 0));
    int num_wrong = 0;
    for (const auto &lane : d) {
        for (const float element : lane) num_wrong += element == 32 ? 0 : 1;
    }
    EXPECT(num_wrong == 0);
    wgmma_product product = {d[0], 16, MATRIX_BF16, false, false, true, 0, descriptor_at(BASE, 16, 1024), {}};
    wgmma_queue_fence(&queue, 0);
    EXPECT(!wgmma_queue_ask(&queue, 0, &product));
    EXPECT(wgmma_queue_commit(&queue)); /* of one lane alone */
}

void test_descriptors(void)
{
    static matrix_right right;
    EXPECT(matrix_load_right(&right, &memory, MATRIX_BF16, descriptor_at(0, 16, 1024) ^ (uint64_t)3 << 62, 16, false));
    EXPECT(matrix_load_right(&right, &memory, MATRIX_BF16, descriptor_at(sizeof(shared), 16, 1024), 16, false));
    EXPECT(matrix_load_right(&right, &memory, MATRIX_BF16, descriptor_at(0, 16, 1024), 8, false));
}

void test_boxes(void)
{
    enum { SLOTS = 16, BLOCKS = 3, WIDTH = 576, ROWS = 8 };
    alignas(16) static uint16_t cache[BLOCKS][SLOTS][WIDTH];
    uint16_t *elements = &cache[0][0][0];
    for (size_t i = 0; i < sizeof(cache) / sizeof(*elements); i++) elements[i] = (uint16_t)next_random();
    CUtensorMap map;
    const cuuint64_t sizes[3] = {WIDTH, SLOTS, BLOCKS}, strides[2] = {WIDTH * 2, SLOTS * WIDTH * 2};
    const cuuint32_t box[3] = {64, ROWS, 1}, steps[3] = {1, 1, 1};
    EXPECT(tensor_map_encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, cache, sizes, strides, box, steps,
                             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS);
    const int32_t at[2][3] = {{128, 8, 2}, {560, 12, 1}}; /* the second is half outside */
    for (int which = 0; which < 2; which++) {
        int32_t bytes = 0;
        memset(shared, 0xff, sizeof(shared));
        EXPECT(!tensor_map_copy(&bytes, shared, BASE, sizeof(shared), BASE + 2048, &map, at[which]));
        EXPECT(bytes == ROWS * 128);
        int num_wrong = 0;
        for (int row = 0; row < ROWS; row++) {
            for (int column = 0; column < 64; column++) {
                const int x = at[which][0] + column, y = at[which][1] + row;
                const uint16_t expected = x < WIDTH && y < SLOTS ? cache[at[which][2]][y][x] : 0;
                uint16_t is;
                memcpy(&is, shared + 2048 + row * 128 + ((column / 8 ^ row) * 16) + column % 8 * 2, sizeof(is));
                if (is != expected) num_wrong++;
            }
        }
        EXPECT(num_wrong == 0);
        alignas(16) static uint16_t given[BLOCKS][SLOTS][WIDTH]; /* and back, to where it came from and nowhere else */
        memcpy(given, cache, sizeof(cache));
        for (int y = at[which][1]; y < at[which][1] + ROWS && y < SLOTS; y++)
            for (int x = at[which][0]; x < at[which][0] + 64 && x < WIDTH; x++) cache[at[which][2]][y][x] = 0;
        EXPECT(!tensor_map_copy(&bytes, shared, BASE, sizeof(shared), BASE + 2048, &map, at[which], true));
        EXPECT(memcmp(given, cache, sizeof(cache)) == 0);
    }
    int32_t bytes = 0;
    EXPECT(tensor_map_copy(&bytes, shared, BASE, sizeof(shared), BASE + sizeof(shared) - 128, &map, at[0]));
    EXPECT(tensor_map_copy(&bytes, shared, BASE, sizeof(shared), BASE + 64, &map, at[0]));
    memset(&map, 0, sizeof(map));
    EXPECT(tensor_map_copy(&bytes, shared, BASE, sizeof(shared), BASE, &map, at[0]));
}

void test_mbarriers(void)
{
    uint64_t word = ~(uint64_t)0;
    bool has_ended = false;
    EXPECT(mbarrier_count(&word, 1, 0)); /* never initialised */
    EXPECT(!mbarrier_init(&word, 2));
    EXPECT(!mbarrier_test(&has_ended, word, 1) && has_ended);
    EXPECT(!mbarrier_test(&has_ended, word, 0) && !has_ended);
    EXPECT(!mbarrier_count(&word, 0, -4096)); /* bytes before they are expected */
    EXPECT(!mbarrier_count(&word, 1, 0));
    EXPECT(!mbarrier_test(&has_ended, word, 0) && !has_ended);
    EXPECT(!mbarrier_count(&word, 1, 8192));
    EXPECT(!mbarrier_test(&has_ended, word, 0) && !has_ended);
    EXPECT(mbarrier_count(&word, 1, 0)); /* a third arrival */
    EXPECT(!mbarrier_count(&word, 0, -4096));
    EXPECT(!mbarrier_test(&has_ended, word, 0) && has_ended);
    EXPECT(!mbarrier_test(&has_ended, word, 1) && !has_ended);
    EXPECT(!mbarrier_count(&word, 2, 0));
    EXPECT(!mbarrier_test(&has_ended, word, 1) && has_ended);
    EXPECT(mbarrier_count(&word, 0, -(1 << 20)));
}

} // namespace

int main(void)
{
    static const int sizes[] = {16, 32, 64, 96, 128, 256};
    for (const int columns : sizes) {
        for (int form = 0; form < 8; form++) {
            if ((form & 2) && columns % 64 != 0) continue;
            test_product(form & 1 ? MATRIX_F16 : MATRIX_BF16, columns, form & 2, form & 4);
        }
    }
    test_queue();
    test_descriptors();
    test_boxes();
    test_mbarriers();
    return num_failed > 0;
}
