/* The peak of the AMX units: 2 x 2 tiles of bf16, both operands in L1, each sum over 256 elements and stored. Numbers
 * are random: the units draw less power for zeros, and run faster. Compiled for AMX where the compiler knows it. */
#include "bench/ceiling_tiles.h"

#if defined(FV_HAVE_AMX)

#include "kernels/cpu/amx/tile.h"

enum { DEPTH = 8, OPERAND_BYTES = 2 * DEPTH * FV_TILE_BYTES };

static void fill(uint16_t *operand, uint32_t seed)
{
    for (int32_t i = 0; i < OPERAND_BYTES / 2; i++) {
        seed = seed * 1664525u + 1013904223u;
        operand[i] = (uint16_t)(0x3f00u | (seed >> 16 & 0x80ffu)); /* 0.5 to 2, either sign */
    }
}

double fv_tile_loop(int32_t rounds)
{
    _Alignas(64) uint16_t memory[2][OPERAND_BYTES / 2];
    _Alignas(64) char sums[4 * FV_TILE_BYTES];
    fv_tiles tiles;
    const char *a = (const char *)memory[0], *b = (const char *)memory[1];
    fill(memory[0], 1);
    fill(memory[1], 2);
    fv_tiles_configure(&tiles, FV_TILE_ROWS);
    for (int32_t round = 0; round < rounds; round++) {
        fv_tile_zero(&tiles, 0);
        fv_tile_zero(&tiles, 1);
        fv_tile_zero(&tiles, 2);
        fv_tile_zero(&tiles, 3);
        for (int32_t d = 0; d < DEPTH; d++) {
            fv_tile_load(&tiles, 6, b + d * FV_TILE_BYTES, FV_TILE_ROW_BYTES);
            fv_tile_load(&tiles, 4, a + d * FV_TILE_BYTES, FV_TILE_ROW_BYTES);
            fv_tile_dot(&tiles, 0, 4, 6);
            fv_tile_load(&tiles, 5, a + (DEPTH + d) * FV_TILE_BYTES, FV_TILE_ROW_BYTES);
            fv_tile_dot(&tiles, 1, 5, 6);
            fv_tile_load(&tiles, 7, b + (DEPTH + d) * FV_TILE_BYTES, FV_TILE_ROW_BYTES);
            fv_tile_dot(&tiles, 2, 4, 7);
            fv_tile_dot(&tiles, 3, 5, 7);
        }
        fv_tile_store(&tiles, 0, sums, FV_TILE_ROW_BYTES);
        fv_tile_store(&tiles, 1, sums + FV_TILE_BYTES, FV_TILE_ROW_BYTES);
        fv_tile_store(&tiles, 2, sums + 2 * FV_TILE_BYTES, FV_TILE_ROW_BYTES);
        fv_tile_store(&tiles, 3, sums + 3 * FV_TILE_BYTES, FV_TILE_ROW_BYTES);
    }
    fv_tiles_release(&tiles);
    return 2.0 * 32 * 32 * DEPTH * FV_TILE_DEPTH * rounds;
}

#else

double fv_tile_loop(int32_t rounds)
{
    (void)rounds;
    return 0;
}

#endif
