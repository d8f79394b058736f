/* Touches a vector of which the last byte, or the first, is not the program's: AddressSanitizer is to end it, whatever checks
 * vectors (asan_vectors.c).
 *
 *   overrun load|store 32|64 behind|before|inside */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef float half __attribute__((vector_size(32), aligned(1)));
typedef float whole __attribute__((vector_size(64), aligned(1)));

#define TOUCH(vector, from, stores)                              \
    do {                                                         \
        volatile vector *at = (volatile vector *)(void *)(from); \
        vector value = {0};                                      \
        if (stores)                                              \
            *at = value;                                         \
        else                                                     \
            value = *at;                                         \
        printf("%g\n", (double)value[0]);                        \
    } while (0)

int main(int num_args, char **args)
{
    if (num_args != 4) return 2;
    const int32_t stores = strcmp(args[1], "store") == 0, bytes = atoi(args[2]);
    const int32_t moved = strcmp(args[3], "behind") == 0 ? 1 : strcmp(args[3], "before") == 0 ? -1 : 0;
    char *memory = malloc((size_t)bytes);
    if (!memory) return 2;
    memset(memory, 1, (size_t)bytes);
    char *volatile from = memory + moved;
    if (bytes == sizeof(half))
        TOUCH(half, from, stores);
    else
        TOUCH(whole, from, stores);
    free(memory);
    return 0;
}
