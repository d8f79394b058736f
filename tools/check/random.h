/* Random numbers of the check: the same everywhere from the same seed. */
#ifndef FV_TOOLS_CHECK_RANDOM_H
#define FV_TOOLS_CHECK_RANDOM_H

#include <stdint.h>

typedef struct check_random {
    uint64_t state;
} check_random;

/* splitmix64 (Steele, Lea, Flood, OOPSLA 2014): any state is a good one. */
static inline uint64_t check_random_next(check_random *random)
{
    uint64_t z = random->state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* A generator for item `index` of `seed`, unrelated to those of other items. */
static inline check_random check_random_of(uint64_t seed, uint64_t index)
{
    check_random random = {seed * 0xd1342543de82ef95u + index};
    check_random_next(&random);
    return (check_random){check_random_next(&random)};
}

/* In [low, high], both included. */
static inline int32_t check_random_int(check_random *random, int32_t low, int32_t high)
{
    const uint64_t range = (uint64_t)((int64_t)high - low) + 1;
    return (int32_t)(low + (int64_t)(check_random_next(random) % range));
}

/* In [0, 1). */
static inline double check_random_unit(check_random *random)
{
    return (double)(check_random_next(random) >> 11) * 0x1p-53;
}

/* 1 in `percent` of 100 cases. */
static inline int32_t check_random_chance(check_random *random, int32_t percent)
{
    return check_random_int(random, 0, 99) < percent;
}

/* Mean 0, variance 1, within +-3.5: a sum of twelve would be the textbook's; four are enough here. */
static inline float check_random_normal(check_random *random)
{
    double sum = -2;
    for (int32_t i = 0; i < 4; i++) sum += check_random_unit(random);
    return (float)(sum * 1.7320508);
}

#define CHECK_RANDOM_PICK(random, array) \
    ((array)[check_random_int((random), 0, (int32_t)(sizeof(array) / sizeof((array)[0])) - 1)])

#endif
