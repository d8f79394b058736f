/* Instructions of a warp that are not of matrices: votes, shuffles, reductions. */
#include "cuda_emulator/device_code.h"

static void nothing(void *const *, uint32_t) {}

void __syncwarp(uint32_t mask) { emu_meet(mask, nothing, NULL, "__syncwarp"); }

/* Each lane has its number here, and gets what it becomes. */
static void find_any(void *const *lanes, uint32_t mask)
{
    bool any = false;
    for (int32_t lane = 0; lane < EMU_LANES; lane++)
        if (mask >> lane & 1) any |= *(bool *)lanes[lane];
    for (int32_t lane = 0; lane < EMU_LANES; lane++)
        if (mask >> lane & 1) *(bool *)lanes[lane] = any;
}

bool __any_sync(uint32_t mask, bool is)
{
    emu_meet(mask, find_any, &is, "__any_sync");
    return is;
}

template <class T, bool LARGEST> static void reduce(void *const *lanes, uint32_t mask)
{
    T found = *(T *)lanes[__builtin_ctz(mask)];
    for (int32_t lane = 0; lane < EMU_LANES; lane++) {
        if (!(mask >> lane & 1)) continue;
        const T number = *(T *)lanes[lane];
        if (LARGEST ? found < number : number < found) found = number;
    }
    for (int32_t lane = 0; lane < EMU_LANES; lane++)
        if (mask >> lane & 1) *(T *)lanes[lane] = found;
}

template <class T, bool LARGEST> static T reduced(uint32_t mask, T number)
{
    emu_meet(mask, reduce<T, LARGEST>, &number, LARGEST ? "__reduce_max_sync" : "__reduce_min_sync");
    return number;
}

int32_t __reduce_max_sync(uint32_t mask, int32_t number) { return reduced<int32_t, true>(mask, number); }
int32_t __reduce_min_sync(uint32_t mask, int32_t number) { return reduced<int32_t, false>(mask, number); }
uint32_t __reduce_max_sync(uint32_t mask, uint32_t number) { return reduced<uint32_t, true>(mask, number); }
uint32_t __reduce_min_sync(uint32_t mask, uint32_t number) { return reduced<uint32_t, false>(mask, number); }

typedef struct shuffle {
    uint32_t given, taken;
    int32_t from;
} shuffle;

/* Of a lane that is not there a number comes that nobody may use: NaN. */
static void exchange(void *const *lanes, uint32_t mask)
{
    for (int32_t lane = 0; lane < EMU_LANES; lane++) {
        if (!(mask >> lane & 1)) continue;
        shuffle *mine = (shuffle *)lanes[lane];
        mine->taken = mask >> mine->from & 1 ? ((const shuffle *)lanes[mine->from])->given : ~0u;
    }
}

uint32_t emu_shuffle(uint32_t mask, uint32_t bits, int32_t from, int32_t width)
{
    if (width < 1 || width > EMU_LANES || (width & (width - 1)) != 0) emu_fail("a shuffle of %d lanes", width);
    shuffle mine = {bits, 0, from};
    emu_meet(mask, exchange, &mine, "a shuffle");
    return mine.taken;
}
