/* Free blocks by the power of two of their size. */
#include "check/device_memory.h"

#include <pthread.h>
#include <stdlib.h>

#define ALIGNMENT 256
#define NUM_CLASSES 48

typedef struct free_block {
    struct free_block *next;
} free_block;

static fv_device *device;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static free_block *free_blocks[NUM_CLASSES];

static int32_t class_of(size_t bytes)
{
    int32_t size_class = 12;
    while ((size_t)1 << size_class < bytes) size_class++;
    return size_class;
}

void check_device_memory_use(fv_device *used)
{
    for (int32_t i = 0; i < NUM_CLASSES; i++) {
        while (device && free_blocks[i]) {
            free_block *gone = free_blocks[i];
            free_blocks[i] = gone->next;
            fv_device_free_host(device, gone);
        }
    }
    device = used;
}

int32_t check_device_memory_is_used(void) { return device != NULL; }

void *check_device_memory_take(size_t bytes)
{
    void *memory = NULL;
    if (!device) return posix_memalign(&memory, ALIGNMENT, bytes) == 0 ? memory : NULL;
    const int32_t size_class = class_of(bytes);
    pthread_mutex_lock(&lock);
    free_block *found = free_blocks[size_class];
    if (found) free_blocks[size_class] = found->next;
    pthread_mutex_unlock(&lock);
    if (found) return found;
    return fv_device_alloc_host(&memory, device, (size_t)1 << size_class) == FV_OK ? memory : NULL;
}

void check_device_memory_give(void *memory, size_t bytes)
{
    if (!device) {
        free(memory);
        return;
    }
    if (!memory) return;
    free_block *given = memory;
    const int32_t size_class = class_of(bytes);
    pthread_mutex_lock(&lock);
    given->next = free_blocks[size_class];
    free_blocks[size_class] = given;
    pthread_mutex_unlock(&lock);
}
