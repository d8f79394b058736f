/* Memory of one case. */
#include "check/arena.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check/device_memory.h"
#include "core/compiler.h"

#define FENCE_BYTES 256

struct check_block {
    check_block *next;
    unsigned char *memory; /* with the fences */
    size_t bytes;          /* between the fences */
    int32_t fenced;
};

static check_block *add_block(check_arena *arena, size_t bytes, int32_t fenced)
{
    const size_t fences = fenced ? 2 * FENCE_BYTES : 0;
    check_block *block = malloc(sizeof(*block));
    void *memory = block ? check_device_memory_take(bytes + fences + 1) : NULL;
    if (!memory) {
        fprintf(stderr, "fovea check: no memory for %zu bytes\n", bytes);
        exit(1);
    }
    *block = (check_block){arena->blocks, memory, bytes, fenced};
    arena->blocks = block;
    return block;
}

void *check_arena_alloc(check_arena *arena, size_t bytes)
{
    return memset(add_block(arena, bytes, 0)->memory, 0, bytes);
}

void *check_arena_alloc_fenced(check_arena *arena, size_t bytes)
{
    unsigned char *memory = add_block(arena, bytes, 1)->memory;
    memset(memory, CHECK_PATTERN, bytes + 2 * FENCE_BYTES);
    return memory + FENCE_BYTES;
}

static int32_t fence_whole(const unsigned char *fence)
{
    for (int32_t i = 0; i < FENCE_BYTES; i++)
        if (fence[i] != CHECK_PATTERN) return 0;
    return 1;
}

int32_t check_arena_fences_whole(const check_arena *arena)
{
    for (const check_block *block = arena->blocks; block; block = block->next) {
        if (!block->fenced) continue;
        if (!fence_whole(block->memory) || !fence_whole(block->memory + FENCE_BYTES + block->bytes)) return 0;
    }
    return 1;
}

void check_arena_clear(check_arena *arena)
{
    while (arena->blocks) {
        check_block *block = arena->blocks;
        arena->blocks = block->next;
        check_device_memory_give(block->memory, block->bytes + (block->fenced ? 2 * FENCE_BYTES : 0) + 1);
        free(block);
    }
}
