/* Loaded (LD_PRELOAD) into the processes of a service under test: the wall clock as they read it is
 * moved by an offset that the process sets itself. The monotonic clock is not, and what the kernel
 * waits for by the wall clock is handed to it in its own time. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/time.h>
#include <time.h>

_Atomic long long pdserve_clock_offset_ns = 0;
_Atomic long long pdserve_clock_asked = 0;

static int read_clock(clockid_t id, struct timespec *t) {
    static int (*_Atomic real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    return real(id, t);
}

static void move(struct timespec *t, long long by_ns) {
    long long ns = t->tv_nsec + by_ns % 1000000000LL;
    t->tv_sec += by_ns / 1000000000LL;
    if (ns < 0) { ns += 1000000000LL; t->tv_sec--; }
    if (ns >= 1000000000LL) { ns -= 1000000000LL; t->tv_sec++; }
    t->tv_nsec = ns;
}

int clock_gettime(clockid_t id, struct timespec *t) {
    int failed = read_clock(id, t);
    if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE) && pdserve_clock_offset_ns) {
        move(t, pdserve_clock_offset_ns);
        pdserve_clock_asked++;
    }
    return failed;
}

int gettimeofday(struct timeval *restrict tv, void *restrict tz) {
    struct timespec t;
    (void)tz;
    int failed = clock_gettime(CLOCK_REALTIME, &t);
    tv->tv_sec = t.tv_sec;
    tv->tv_usec = t.tv_nsec / 1000;
    return failed;
}

time_t time(time_t *out) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    if (out) *out = t.tv_sec;
    return t.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    static int (*_Atomic real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!real) real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!real) real = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    struct timespec moved = *until;
    /* Waits by the monotonic clock have no such offset: their times are far below it. */
    if (moved.tv_sec > 1000000000LL) move(&moved, -pdserve_clock_offset_ns);
    return real(cond, mutex, &moved);
}
