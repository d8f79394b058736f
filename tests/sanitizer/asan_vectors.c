/* AddressSanitizer's functions for accesses of any number of bytes, sooner done for vectors. GCC calls them for 32 and 64 bytes, and
 * those of libasan, which look at each byte's shadow in turn, took half to two thirds of the kernels' tests. Here one comparison
 * answers where all of the shadow is 0, memory that may be touched; whatever is not goes libasan's way.
 *
 * Where the shadow is: x86-64, Linux ("AddressSanitizer: A Fast Address Sanity Checker", USENIX ATC 2012, section 3.1). Compiled
 * without sanitizers and linked to programs of GCC's, whose calls find these before the library's. */
#include <sanitizer/asan_interface.h>
#include <stdint.h>
#include <string.h>

#define SHADOW_OFFSET 0x7fff8000u
enum { GRANULE = 8, WORD = 8 }; /* bytes of memory for a byte of shadow; of shadow read at once */

void __asan_report_load_n(uintptr_t at, uintptr_t bytes);
void __asan_report_store_n(uintptr_t at, uintptr_t bytes);
void __asan_loadN(uintptr_t at, uintptr_t bytes);
void __asan_storeN(uintptr_t at, uintptr_t bytes);

/* 1: a vector's memory is all of whole granules that may be touched. */
static inline int32_t is_open(uintptr_t at, uintptr_t bytes)
{
    const char *shadow = (const char *)(at / GRANULE + SHADOW_OFFSET);
    uint64_t word = 0;
    if (bytes == WORD / 2 * GRANULE)
        memcpy(&word, shadow, WORD / 2);
    else if (bytes == WORD * GRANULE)
        memcpy(&word, shadow, WORD);
    else
        return 0;
    return word == 0 && (at % GRANULE == 0 || shadow[bytes / GRANULE] == 0);
}

/* The first byte that may not be touched, 0 where there is none. */
static inline uintptr_t closed_byte(uintptr_t at, uintptr_t bytes)
{
    return is_open(at, bytes) ? 0 : (uintptr_t)__asan_region_is_poisoned((void *)at, bytes);
}

void __asan_loadN(uintptr_t at, uintptr_t bytes)
{
    const uintptr_t closed = closed_byte(at, bytes);
    if (closed) __asan_report_load_n(closed, bytes);
}

void __asan_storeN(uintptr_t at, uintptr_t bytes)
{
    const uintptr_t closed = closed_byte(at, bytes);
    if (closed) __asan_report_store_n(closed, bytes);
}
