/* Memory of one case: many blocks, freed together. Each block is its own allocation, so that address
 * sanitizers see every step over an edge. */
#ifndef FV_TOOLS_CHECK_ARENA_H
#define FV_TOOLS_CHECK_ARENA_H

#include <stddef.h>
#include <stdint.h>

typedef struct check_block check_block;

typedef struct check_arena {
    check_block *blocks;
} check_arena;

/* `bytes` of zeroed memory aligned to 64 bytes, that the device under check sees too; ends the program where there is none, as no check can
 * go on without. */
void *check_arena_alloc(check_arena *arena, size_t bytes);

/* The same filled with a pattern, with a fence of it on either side. */
void *check_arena_alloc_fenced(check_arena *arena, size_t bytes);

/* Zeroed memory whose end, on the host, is that of a page: who reads on faults there, and a debugger shows who it is. It
 * begins at a multiple of an element, if its size is one. */
void *check_arena_alloc_guarded(check_arena *arena, size_t bytes);

/* 1 when the fences around all blocks of check_arena_alloc_fenced are whole. */
int32_t check_arena_fences_whole(const check_arena *arena);

/* Frees all blocks; the arena may be used again. */
void check_arena_clear(check_arena *arena);

#define CHECK_PATTERN 0xa5

#endif
