#include "bench/quiet.h"

#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

#include "bench/samples.h"

#define ROUNDS 6000
#define ATTEMPTS 2 /* the better one counts: an interrupt is nobody beside */
#define WAIT_US 10000.0
#define LIMIT 1.1

static double least_us = INFINITY;

typedef struct probe {
    int32_t num_workers;
    _Atomic int32_t num_here;
    _Atomic int32_t some_are_missing;
    _Atomic int64_t slowest_ns;
} probe;

/* Six chains: more additions than a core does in a cycle. */
static void add_integers(void)
{
    uint64_t a = 1, b = 2, c = 3, d = 4, e = 5, f = 6;
    for (int32_t round = 0; round < ROUNDS; round++) {
        a += 7, b += 7, c += 7, d += 7, e += 7, f += 7;
        __asm__ volatile("" : "+r"(a), "+r"(b), "+r"(c), "+r"(d), "+r"(e), "+r"(f));
    }
}

/* A task of each worker: none ends before all have begun, so that nobody takes two. */
static void probe_task(void *user, int64_t index, int32_t worker)
{
    (void)index, (void)worker;
    probe *p = user;
    const double start = fv_now_us();
    atomic_fetch_add(&p->num_here, 1);
    while (atomic_load(&p->num_here) < p->num_workers) {
        if (fv_now_us() - start > WAIT_US) {
            atomic_store(&p->some_are_missing, 1);
            break;
        }
        sched_yield(); /* to a worker that has no CPU yet */
    }
    double best_us = INFINITY;
    for (int32_t attempt = 0; attempt < ATTEMPTS; attempt++) {
        const double from = fv_now_us();
        add_integers();
        best_us = fmin(best_us, fv_now_us() - from);
    }
    const int64_t ns = (int64_t)(best_us * 1e3);
    int64_t slowest = atomic_load(&p->slowest_ns);
    while (ns > slowest && !atomic_compare_exchange_weak(&p->slowest_ns, &slowest, ns)) continue;
}

double fv_quiet_probe(fv_context *context)
{
    probe p = {.num_workers = fv_context_num_workers(context)};
    fv_context_parallel_for(context, p.num_workers, probe_task, &p);
    if (atomic_load(&p.some_are_missing)) return INFINITY;
    const double us = (double)atomic_load(&p.slowest_ns) * 1e-3;
    least_us = fmin(least_us, us);
    return us;
}

double fv_quiet_limit(void) { return isfinite(least_us) ? LIMIT * least_us : 0; }
