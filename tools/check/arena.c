/* Memory of one case. */
#include "check/arena.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check/device_memory.h"
#include "core/compiler.h"

#define FENCE_BYTES 256

struct check_block {
    check_block *next;
    unsigned char *memory; /* with the fences */
    size_t bytes;          /* between the fences */
    int32_t fenced;
    size_t mapped_bytes; /* 0: no pages of its own */
};

static check_block *add_block(check_arena *arena, void *memory, size_t bytes)
{
    check_block *block = malloc(sizeof(*block));
    if (!memory || !block) {
        fprintf(stderr, "fovea check: no memory for %zu bytes\n", bytes);
        exit(1);
    }
    *block = (check_block){.next = arena->blocks, .memory = memory, .bytes = bytes};
    arena->blocks = block;
    return block;
}

void *check_arena_alloc(check_arena *arena, size_t bytes)
{
    return memset(add_block(arena, check_device_memory_take(bytes + 1), bytes)->memory, 0, bytes);
}

void *check_arena_alloc_fenced(check_arena *arena, size_t bytes)
{
    check_block *block = add_block(arena, check_device_memory_take(bytes + 2 * FENCE_BYTES + 1), bytes);
    block->fenced = 1;
    memset(block->memory, CHECK_PATTERN, bytes + 2 * FENCE_BYTES);
    return block->memory + FENCE_BYTES;
}

/* Pages of zeros that end at `bytes`, and one that must not be touched. */
void *check_arena_alloc_guarded(check_arena *arena, size_t bytes)
{
    if (check_device_memory_is_used()) return check_arena_alloc(arena, bytes);
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), inner = (bytes + page - 1) / page * page;
    char *pages = mmap(NULL, inner + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED || mprotect(pages + inner, page, PROT_NONE) != 0) pages = NULL;
    add_block(arena, pages, bytes)->mapped_bytes = inner + page;
    return pages + inner - bytes;
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
        if (block->mapped_bytes)
            munmap(block->memory, block->mapped_bytes);
        else
            check_device_memory_give(block->memory, block->bytes + (block->fenced ? 2 * FENCE_BYTES : 0) + 1);
        free(block);
    }
}
