/* Batched, checked payload reads: many (offset, length, check) into one buffer, each compared with its XXH3, without the GIL and on
 * several threads. Optional: lfdata/format/gather.py does the same in Python where this module was not built.
 *
 * From a descriptor by pread, or from a mapping. A file truncated under a mapping raises SIGBUS at the missing page: copies run under
 * a guard of their own thread, and the handler jumps back to it; the row counts as failed. Any other SIGBUS goes where it went before.
 *
 * XXH3 as defined in docs/format.md, section 2.4.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define P1 11400714785074694791ULL
#define P2 14029467366897019727ULL
#define P3 1609587929392839161ULL
#define P4 9650029242287828579ULL
#define P5 2870177450012600261ULL
#define Q1 0x9E3779B1ULL
#define Q2 0x85EBCA77ULL
#define Q3 0xC2B2AE3DULL
#define M1 0x165667919E3779F9ULL
#define M2 0x9FB21C651E98DF25ULL

static const uint8_t SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

typedef unsigned __int128 u128;

static inline uint64_t load64(const uint8_t *p) { uint64_t x; memcpy(&x, p, 8); return x; }
static inline uint32_t load32(const uint8_t *p) { uint32_t x; memcpy(&x, p, 4); return x; }
static inline uint64_t rotl(uint64_t x, int r) { return (x << r) | (x >> (64 - r)); }
static inline uint64_t fold(uint64_t a, uint64_t b) { u128 product = (u128)a * b; return (uint64_t)product ^ (uint64_t)(product >> 64); }
static inline uint64_t finish(uint64_t h) { h ^= h >> 37; h *= M1; return h ^ (h >> 32); }
static inline uint64_t finish64(uint64_t h) { h ^= h >> 33; h *= P2; h ^= h >> 29; h *= P3; return h ^ (h >> 32); }

static inline uint64_t mix(const uint8_t *p, size_t secret, uint64_t seed)
{
    return fold(load64(p) ^ (load64(SECRET + secret) + seed), load64(p + 8) ^ (load64(SECRET + secret + 8) - seed));
}

static uint64_t xxh3_short(const uint8_t *p, size_t n, uint64_t seed)
{
    if (n == 0) return finish64(seed ^ load64(SECRET + 56) ^ load64(SECRET + 64));
    if (n <= 3) {
        uint32_t word = (uint32_t)p[0] << 16 | (uint32_t)p[n >> 1] << 24 | p[n - 1] | (uint32_t)n << 8;
        return finish64(word ^ ((uint64_t)(load32(SECRET) ^ load32(SECRET + 4)) + seed));
    }
    if (n <= 8) {
        uint64_t s = seed ^ ((uint64_t)__builtin_bswap32((uint32_t)seed) << 32);
        uint64_t h = (load32(p + n - 4) + ((uint64_t)load32(p) << 32)) ^ ((load64(SECRET + 8) ^ load64(SECRET + 16)) - s);
        h ^= rotl(h, 49) ^ rotl(h, 24);
        h *= M2;
        h ^= (h >> 35) + n;
        h *= M2;
        return h ^ (h >> 28);
    }
    uint64_t x = load64(p) ^ ((load64(SECRET + 24) ^ load64(SECRET + 32)) + seed);
    uint64_t y = load64(p + n - 8) ^ ((load64(SECRET + 40) ^ load64(SECRET + 48)) - seed);
    return finish(n + __builtin_bswap64(x) + y + fold(x, y));
}

static uint64_t xxh3_middle(const uint8_t *p, size_t n, uint64_t seed)
{
    uint64_t h = n * P1;
    if (n <= 128) {
        for (size_t i = 0; i <= (n - 1) / 32; i++) h += mix(p + 16 * i, 32 * i, seed) + mix(p + n - 16 * (i + 1), 32 * i + 16, seed);
        return finish(h);
    }
    for (size_t i = 0; i < 8; i++) h += mix(p + 16 * i, 16 * i, seed);
    h = finish(h);
    for (size_t i = 8; i < n / 16; i++) h += mix(p + 16 * i, 16 * (i - 8) + 3, seed);
    return finish(h + mix(p + n - 16, 119, seed));
}

/* The two long-input loops below do the same: whole stripes of 64 bytes, then one that ends at the last byte. */
static void stripes_plain(uint64_t *restrict acc, const uint8_t *restrict p, size_t n, const uint8_t *restrict key)
{
    size_t whole = (n - 1) / 64;
    for (size_t m = 0; m <= whole; m++) {
        const uint8_t *block = m < whole ? p + 64 * m : p + n - 64, *k = m < whole ? key + 8 * (m % 16) : key + 121;
        for (int j = 0; j < 8; j++) {
            uint64_t d = load64(block + 8 * j), x = d ^ load64(k + 8 * j);
            acc[j ^ 1] += d;
            acc[j] += (x & 0xFFFFFFFF) * (x >> 32);
        }
        if (m < whole && m % 16 == 15)
            for (int j = 0; j < 8; j++) acc[j] = (acc[j] ^ (acc[j] >> 47) ^ load64(key + 128 + 8 * j)) * Q1;
    }
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

/* 32 bytes of a stripe; stored at `to` as well, if there is one. */
__attribute__((target("avx2"))) static inline __m256i one(__m256i acc, const uint8_t *p, const uint8_t *key, uint8_t *to)
{
    __m256i d = _mm256_loadu_si256((const __m256i *)p), x = _mm256_xor_si256(d, _mm256_loadu_si256((const __m256i *)key));
    if (to) _mm256_storeu_si256((__m256i *)to, d);
    __m256i product = _mm256_mul_epu32(x, _mm256_srli_epi64(x, 32));
    return _mm256_add_epi64(acc, _mm256_add_epi64(product, _mm256_shuffle_epi32(d, _MM_SHUFFLE(1, 0, 3, 2))));
}

__attribute__((target("avx2"))) static inline __m256i scramble(__m256i acc, const uint8_t *key)
{
    __m256i prime = _mm256_set1_epi64x((long long)Q1);
    __m256i x = _mm256_xor_si256(_mm256_xor_si256(acc, _mm256_srli_epi64(acc, 47)), _mm256_loadu_si256((const __m256i *)key));
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(x, prime), _mm256_slli_epi64(high, 32));
}

/* With `to`, the input is copied there in the same pass: the bytes that are hashed are the bytes that are stored. */
__attribute__((target("avx2"), always_inline)) static inline void stripes_with(
    uint64_t *acc, const uint8_t *p, size_t n, const uint8_t *key, uint8_t *to)
{
    size_t whole = (n - 1) / 64, m = 0;
    __m256i a = _mm256_loadu_si256((const __m256i *)acc), b = _mm256_loadu_si256((const __m256i *)(acc + 4));
    for (; m + 16 <= whole; m += 16) {
        for (size_t i = 0; i < 16; i++) {
            size_t at = 64 * (m + i);
            /* Copied rows come from all over a file: the processor's own prefetching starts over at each. */
            if (to) __builtin_prefetch(p + at + 512);
            a = one(a, p + at, key + 8 * i, to ? to + at : NULL);
            b = one(b, p + at + 32, key + 8 * i + 32, to ? to + at + 32 : NULL);
        }
        a = scramble(a, key + 128);
        b = scramble(b, key + 160);
    }
    for (size_t i = 0; m < whole; m++, i++) {
        a = one(a, p + 64 * m, key + 8 * i, to ? to + 64 * m : NULL);
        b = one(b, p + 64 * m + 32, key + 8 * i + 32, to ? to + 64 * m + 32 : NULL);
    }
    a = one(a, p + n - 64, key + 121, to ? to + n - 64 : NULL);
    b = one(b, p + n - 32, key + 153, to ? to + n - 32 : NULL);
    _mm256_storeu_si256((__m256i *)acc, a);
    _mm256_storeu_si256((__m256i *)(acc + 4), b);
}

__attribute__((target("avx2"))) static void stripes_avx2(uint64_t *acc, const uint8_t *p, size_t n, const uint8_t *key, uint8_t *to)
{
    if (to) stripes_with(acc, p, n, key, to);
    else stripes_with(acc, p, n, key, NULL);
}
#endif

static uint64_t xxh3_long(const uint8_t *p, size_t n, uint64_t seed, uint8_t *to)
{
    uint8_t key[192];
    for (int i = 0; i < 24; i++) {
        uint64_t word = load64(SECRET + 8 * i) + (i % 2 ? 0 - seed : seed);
        memcpy(key + 8 * i, &word, 8);
    }
    uint64_t acc[8] = {Q3, P1, P2, P3, P4, Q2, P5, Q1};
#if defined(__x86_64__) && defined(__GNUC__)
    if (__builtin_cpu_supports("avx2")) stripes_avx2(acc, p, n, key, to);
    else
#endif
    {
        if (to) p = memcpy(to, p, n);
        stripes_plain(acc, p, n, key);
    }
    uint64_t h = n * P1;
    for (int j = 0; j < 4; j++) h += fold(acc[2 * j] ^ load64(key + 11 + 16 * j), acc[2 * j + 1] ^ load64(key + 19 + 16 * j));
    return finish(h);
}

static uint64_t xxh3(const uint8_t *p, size_t n, uint64_t seed)
{
    return n <= 16 ? xxh3_short(p, n, seed) : n <= 240 ? xxh3_middle(p, n, seed) : xxh3_long(p, n, seed, NULL);
}

/* Copies and hashes the copy. */
static uint64_t xxh3_copy(uint8_t *to, const uint8_t *p, size_t n, uint64_t seed)
{
    if (n > 240) return xxh3_long(p, n, seed, to);
    memcpy(to, p, n);
    return xxh3(to, n, seed);
}

/* Rows a thread takes at a time: enough to share the counter rarely, few enough that threads end together. */
#define MAX_STRIDE 16
#define STRIDES_A_THREAD 8
/* While a row is hashed, the start of one that comes soon is fetched: small rows at random places otherwise wait for memory. */
#define ROWS_AHEAD 2
#define BYTES_AHEAD 2048
#define LOCATE_AHEAD 16

typedef struct {
    int fd;
    const uint8_t *base; /* the mapping, or NULL: read from fd */
    size_t size;
    const int64_t *offsets, *lengths, *places;
    const uint64_t *checks;
    uint8_t *out;
    uint64_t seed;
    int64_t rows, stride;
    _Atomic int64_t next;
    _Atomic int64_t failed; /* smallest failing row, or INT64_MAX */
} Job;

/* ---- SIGBUS under a mapping ---- */

typedef struct {
    sigjmp_buf back;
    const uint8_t *low, *high;
} Guard;

static __thread Guard *volatile guard;
static pthread_mutex_t installing = PTHREAD_MUTEX_INITIALIZER;
static struct sigaction previous;
static volatile sig_atomic_t passed_on;

static void on_bus_error(int number, siginfo_t *info, void *context)
{
    (void)context;
    Guard *mine = guard;
    const uint8_t *at = info->si_addr;
    if (mine && info->si_code > 0 && at >= mine->low && at < mine->high) siglongjmp(mine->back, 1);
    /* Not ours: back to whoever had the signal, where it strikes again. If it comes back here, the system ends the process. */
    if (passed_on) signal(number, SIG_DFL);
    else sigaction(number, &previous, NULL);
    passed_on = 1;
    if (info->si_code <= 0) raise(number);
}

/* Other code may have taken the signal since the last call: look every time, and pass on to whoever had it. */
static int install_handler(void)
{
    struct sigaction current, ours = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    int ok = 1;
    pthread_mutex_lock(&installing);
    if (sigaction(SIGBUS, NULL, &current) != 0) ok = 0;
    else if (!(current.sa_flags & SA_SIGINFO) || current.sa_sigaction != on_bus_error) {
        sigemptyset(&ours.sa_mask);
        previous = current;
        passed_on = 0;
        ok = sigaction(SIGBUS, &ours, NULL) == 0;
    }
    pthread_mutex_unlock(&installing);
    return ok;
}

/* ---- rows ---- */

static void fail(Job *job, int64_t row)
{
    int64_t seen = atomic_load(&job->failed);
    while (row < seen && !atomic_compare_exchange_weak(&job->failed, &seen, row)) {}
}

static int read_row(const Job *job, int64_t row)
{
    uint8_t *target = job->out + job->places[row];
    size_t size = (size_t)job->lengths[row];
    if (job->base) return xxh3_copy(target, job->base + job->offsets[row], size, job->seed) == job->checks[row];
    for (size_t done = 0; done < size;) {
        ssize_t count = pread(job->fd, target + done, size - done, (off_t)(job->offsets[row] + (int64_t)done));
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) return 0;
        done += (size_t)count;
    }
    return xxh3(target, size, job->seed) == job->checks[row];
}

static inline void fetch(const Job *job, int64_t row)
{
    const uint8_t *from = job->base + job->offsets[row];
    int64_t size = job->lengths[row] < BYTES_AHEAD ? job->lengths[row] : BYTES_AHEAD;
    for (int64_t at = 0; at < size; at += 64) __builtin_prefetch(from + at);
}

static void work_on(Job *job, volatile int64_t *at)
{
    for (;;) {
        int64_t first = atomic_fetch_add(&job->next, job->stride);
        if (first >= job->rows) return;
        int64_t stop = first + job->stride < job->rows ? first + job->stride : job->rows;
        if (job->base)
            for (int64_t row = first; row < stop && row < first + ROWS_AHEAD; row++) fetch(job, row);
        for (int64_t row = first; row < stop; row++) {
            *at = row;
            if (job->base && row + ROWS_AHEAD < stop) fetch(job, row + ROWS_AHEAD);
            if (job->lengths[row] && !read_row(job, row)) fail(job, row);
        }
    }
}

static void *work(void *argument)
{
    Job *job = argument;
    volatile int64_t at = 0;
    if (!job->base) {
        work_on(job, &at);
        return NULL;
    }
    Guard mine = {.low = job->base, .high = job->base + job->size};
    if (sigsetjmp(mine.back, 1) == 0) {
        guard = &mine;
        work_on(job, &at);
    } else {
        fail(job, at);
    }
    guard = NULL;
    return NULL;
}

#define MAX_THREADS 64

static int fits(const Job *job, Py_ssize_t out_size)
{
    for (int64_t row = 0; row < job->rows; row++) {
        int64_t length = job->lengths[row], place = job->places[row], offset = job->offsets[row];
        if (length < 0 || offset < 0 || place < 0 || length > out_size || place > out_size - length) return 0;
        if (job->base && length && ((size_t)length > job->size || (size_t)offset > job->size - (size_t)length)) return 0;
    }
    return 1;
}

/* ---- helpers ---- */

/* Threads that are kept between calls: starting one costs as much as reading and checking 100 KB. One call uses them at a time; a call
 * that finds them in use works alone. They take no signals but their own faults, and a forked child starts its own. */
static struct {
    pthread_mutex_t in_use, lock;
    pthread_cond_t wake, done;
    Job *job;
    int started, wanted, working;
} helpers = {.in_use = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER, .done = PTHREAD_COND_INITIALIZER};

static void *help(void *nothing)
{
    (void)nothing;
    pthread_mutex_lock(&helpers.lock);
    for (;;) {
        while (!helpers.wanted) pthread_cond_wait(&helpers.wake, &helpers.lock);
        Job *job = helpers.job;
        helpers.wanted--;
        helpers.working++;
        pthread_mutex_unlock(&helpers.lock);
        work(job);
        pthread_mutex_lock(&helpers.lock);
        if (!--helpers.working) pthread_cond_signal(&helpers.done);
    }
    return NULL;
}

static void forget_helpers(void)
{
    pthread_mutex_init(&helpers.in_use, NULL);
    pthread_mutex_init(&helpers.lock, NULL);
    pthread_cond_init(&helpers.wake, NULL);
    pthread_cond_init(&helpers.done, NULL);
    helpers.job = NULL;
    helpers.started = helpers.wanted = helpers.working = 0;
}

/* Whether a thread was started that takes no signals but its own faults. */
static int start_thread(void *(*body)(void *))
{
    sigset_t all, before;
    pthread_attr_t detached;
    pthread_t thread;
    if (pthread_attr_init(&detached) != 0) return 0;
    sigfillset(&all);
    sigdelset(&all, SIGBUS);
    sigdelset(&all, SIGSEGV);
    sigdelset(&all, SIGFPE);
    sigdelset(&all, SIGILL);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int started = pthread_create(&thread, &detached, body, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&detached);
    return started;
}

/* At least `count` helpers, or as many as the system gives. */
static void start_helpers(int count)
{
    while (helpers.started < count && start_thread(help)) helpers.started++;
}

/* Rows that a thread takes at a time. */
static void share_out(Job *job, int threads)
{
    job->stride = job->rows / ((threads > 1 ? threads : 1) * STRIDES_A_THREAD);
    if (job->stride < 1) job->stride = 1;
    if (job->stride > MAX_STRIDE) job->stride = MAX_STRIDE;
}

static void run(Job *job, int threads)
{
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    share_out(job, threads);
    if (threads < 2 || pthread_mutex_trylock(&helpers.in_use) != 0) {
        work(job);
        return;
    }
    start_helpers(threads - 1);
    pthread_mutex_lock(&helpers.lock);
    helpers.job = job;
    helpers.wanted = threads - 1 < helpers.started ? threads - 1 : helpers.started;
    for (int i = 0; i < helpers.wanted; i++) pthread_cond_signal(&helpers.wake);
    pthread_mutex_unlock(&helpers.lock);
    work(job);
    pthread_mutex_lock(&helpers.lock);
    helpers.wanted = 0; /* who has not woken up by now is not needed */
    while (helpers.working) pthread_cond_wait(&helpers.done, &helpers.lock);
    pthread_mutex_unlock(&helpers.lock);
    pthread_mutex_unlock(&helpers.in_use);
}

/* ---- where payloads lie ---- */

/* Offsets, lengths and checks of the payloads of some rows, from a shard's index columns; each must lie inside one of the spans
 * [starts[i], ends[i]), which ascend and do not overlap. Values count in units of `unit` bytes from `base`. */
static PyObject *locate(PyObject *self, PyObject *args)
{
    (void)self;
    unsigned long long unit, base;
    Py_buffer locators, counts, rows, starts, ends, offsets, lengths, checks;
    if (!PyArg_ParseTuple(args, "y*y*y*y*y*KKw*w*w*", &locators, &counts, &rows, &starts, &ends, &unit, &base, &offsets, &lengths, &checks)) return NULL;
    int64_t n = rows.len / 8, spans = starts.len / 8, bad = -1, outside = 0, width = locators.len ? counts.len / (locators.len / 16) : 4;
    int ok = rows.len % 8 == 0 && locators.len % 16 == 0 && (width == 4 || width == 8) && counts.len == locators.len / 16 * width && spans > 0
             && ends.len == starts.len && offsets.len == rows.len && lengths.len == rows.len && checks.len == rows.len && unit > 0 && unit <= 1 << 20;
    const uint64_t *table = locators.buf, *low = starts.buf, *high = ends.buf;
    for (int64_t i = 0; ok && i < n && bad < 0; i++) {
        int64_t row = ((const int64_t *)rows.buf)[i];
        if (row < 0 || row >= locators.len / 16) {
            outside = 1;
            bad = row;
            break;
        }
        int64_t soon = i + LOCATE_AHEAD < n ? ((const int64_t *)rows.buf)[i + LOCATE_AHEAD] : -1;
        if (soon >= 0 && soon < locators.len / 16) {
            __builtin_prefetch(table + 2 * soon);
            __builtin_prefetch((const char *)counts.buf + width * soon);
        }
        uint64_t start = table[2 * row], size = width == 4 ? ((const uint32_t *)counts.buf)[row] : ((const uint64_t *)counts.buf)[row];
        int64_t span = 0;
        for (int64_t left = spans; left > 1;) {
            int64_t half = left / 2;
            span += low[span + half] <= start ? half : 0;
            left -= half;
        }
        if (start < low[span] || start > high[span] || size > high[span] - start) bad = i;
        ((int64_t *)offsets.buf)[i] = (int64_t)(base + start * unit);
        ((int64_t *)lengths.buf)[i] = (int64_t)(size * unit);
        ((uint64_t *)checks.buf)[i] = table[2 * row + 1];
    }
    PyBuffer_Release(&locators);
    PyBuffer_Release(&counts);
    PyBuffer_Release(&rows);
    PyBuffer_Release(&starts);
    PyBuffer_Release(&ends);
    PyBuffer_Release(&offsets);
    PyBuffer_Release(&lengths);
    PyBuffer_Release(&checks);
    if (!ok) return PyErr_Format(PyExc_ValueError, "columns, spans and results must match each other");
    if (outside) return PyErr_Format(PyExc_ValueError, "row %lld lies outside the columns", (long long)bad);
    return PyLong_FromLongLong(bad);
}

#define BUFFERS 6 /* the mapping, offsets, lengths, checks, places, out */

static void release(Py_buffer *buffers)
{
    for (int i = 0; i < BUFFERS; i++)
        if (buffers[i].obj) PyBuffer_Release(&buffers[i]);
}

/* A job from the arguments of a call; what it works on is held until `release`. 0 and an exception if they do not go together. */
static int open_job(PyObject *args, int mapped, Job *job, Py_buffer *buffers, int *threads)
{
    int fd = -1;
    unsigned long long seed;
    Py_buffer *from = buffers, *offsets = buffers + 1, *lengths = buffers + 2, *checks = buffers + 3, *places = buffers + 4, *out = buffers + 5;
    memset(buffers, 0, BUFFERS * sizeof *buffers);
    int parsed = mapped ? PyArg_ParseTuple(args, "y*Ky*y*y*y*w*i", from, &seed, offsets, lengths, checks, places, out, threads)
                        : PyArg_ParseTuple(args, "iKy*y*y*y*w*i", &fd, &seed, offsets, lengths, checks, places, out, threads);
    if (!parsed) return 0;
    Py_ssize_t bytes = offsets->len;
    *job = (Job){.fd = fd, .base = mapped ? from->buf : NULL, .size = (size_t)from->len, .offsets = offsets->buf, .lengths = lengths->buf,
                 .places = places->buf, .checks = checks->buf, .out = out->buf, .seed = seed, .rows = bytes / 8, .stride = 1, .next = 0, .failed = INT64_MAX};
    if (bytes % 8 || lengths->len != bytes || checks->len != bytes || places->len != bytes || !fits(job, out->len))
        PyErr_SetString(PyExc_ValueError, "lengths, checks and places must match offsets, and lie inside the file and the buffer");
    else if (mapped && !install_handler())
        PyErr_SetFromErrno(PyExc_OSError);
    else
        return 1;
    release(buffers);
    return 0;
}

static PyObject *failed_row(Job *job)
{
    int64_t failed = atomic_load(&job->failed);
    return PyLong_FromLongLong(failed == INT64_MAX ? -1 : failed);
}

static PyObject *read_rows(PyObject *args, int mapped)
{
    int threads;
    Job job;
    Py_buffer buffers[BUFFERS];
    if (!open_job(args, mapped, &job, buffers, &threads)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    run(&job, threads);
    Py_END_ALLOW_THREADS
    release(buffers);
    return failed_row(&job);
}

/* ---- reads that go on while the caller does something else ---- */

typedef struct Reading {
    PyObject_HEAD
    Job job;
    Py_buffer buffers[BUFFERS];
    pid_t owner; /* the process whose thread works on it */
    enum { WAITING, WORKING, DONE } state;
    struct Reading *next;
} Reading;

/* One thread of the process, kept; it takes no signals but its own faults. A forked child starts its own. */
static struct {
    pthread_mutex_t lock;
    pthread_cond_t wake, done;
    Reading *first;
    int started;
} reader = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER, .done = PTHREAD_COND_INITIALIZER};

static void *read_on(void *nothing)
{
    (void)nothing;
    pthread_mutex_lock(&reader.lock);
    for (;;) {
        while (!reader.first) pthread_cond_wait(&reader.wake, &reader.lock);
        Reading *mine = reader.first;
        reader.first = mine->next;
        mine->state = WORKING;
        pthread_mutex_unlock(&reader.lock);
        work(&mine->job);
        pthread_mutex_lock(&reader.lock);
        mine->state = DONE;
        pthread_cond_broadcast(&reader.done);
    }
    return NULL;
}

static void forget_reader(void)
{
    pthread_mutex_init(&reader.lock, NULL);
    pthread_cond_init(&reader.wake, NULL);
    pthread_cond_init(&reader.done, NULL);
    reader.first = NULL;
    reader.started = 0;
}

/* Waits until nobody works on it. What is left of one that is `wanted` is done here as well; one that has not begun is taken back. */
static void settle(Reading *mine, int wanted)
{
    int here = 0;
    if (mine->owner != getpid()) {
        /* Forked: the thread that had it is not in this process. */
        here = mine->state != DONE;
    } else {
        pthread_mutex_lock(&reader.lock);
        if (mine->state == WORKING) {
            pthread_mutex_unlock(&reader.lock);
            if (wanted) work(&mine->job);
            else atomic_store(&mine->job.next, mine->job.rows);
            pthread_mutex_lock(&reader.lock);
        }
        while (mine->state == WORKING) pthread_cond_wait(&reader.done, &reader.lock);
        if (mine->state == WAITING) {
            Reading **at = &reader.first;
            while (*at && *at != mine) at = &(*at)->next;
            if (*at) *at = mine->next;
            here = 1;
        }
        pthread_mutex_unlock(&reader.lock);
    }
    mine->state = DONE;
    if (!here || !wanted) return;
    atomic_store(&mine->job.next, 0);
    atomic_store(&mine->job.failed, INT64_MAX);
    work(&mine->job);
}

static PyObject *reading_finish(PyObject *self, PyObject *nothing)
{
    (void)nothing;
    Reading *mine = (Reading *)self;
    Py_BEGIN_ALLOW_THREADS
    settle(mine, 1);
    Py_END_ALLOW_THREADS
    return failed_row(&mine->job);
}

static void reading_free(PyObject *self)
{
    Reading *mine = (Reading *)self;
    Py_BEGIN_ALLOW_THREADS
    settle(mine, 0);
    Py_END_ALLOW_THREADS
    release(mine->buffers);
    PyObject_Free(self);
}

static PyMethodDef reading_methods[] = {
    {"finish", reading_finish, METH_NOARGS, "finish() -> first row that failed, or -1; waits until all are read"},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject reading_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "lfdata.format._native.Reading",
    .tp_basicsize = sizeof(Reading),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_doc = "Rows that are being read; their arrays are held as long as it lives.",
    .tp_dealloc = reading_free,
    .tp_methods = reading_methods,
};

static PyObject *start_mapped(PyObject *self, PyObject *args)
{
    (void)self;
    int threads;
    Reading *mine = PyObject_New(Reading, &reading_type);
    if (!mine) return NULL;
    if (!open_job(args, 1, &mine->job, mine->buffers, &threads)) {
        PyObject_Free(mine);
        return NULL;
    }
    share_out(&mine->job, 2); /* the thread, and who waits for it */
    mine->owner = getpid();
    mine->state = WAITING;
    mine->next = NULL;
    pthread_mutex_lock(&reader.lock);
    /* Without a thread it is done when it is waited for. */
    if (!reader.started) reader.started = start_thread(read_on);
    Reading **last = &reader.first;
    while (*last) last = &(*last)->next;
    *last = mine;
    pthread_cond_signal(&reader.wake);
    pthread_mutex_unlock(&reader.lock);
    return (PyObject *)mine;
}

static PyObject *read_checked(PyObject *self, PyObject *args) { (void)self; return read_rows(args, 0); }
static PyObject *read_mapped(PyObject *self, PyObject *args) { (void)self; return read_rows(args, 1); }

/* How many of some sampled pages of a mapping are in memory. */
static PyObject *resident(PyObject *self, PyObject *args)
{
    (void)self;
    Py_buffer from;
    int samples, count = 0;
    unsigned long long state;
    if (!PyArg_ParseTuple(args, "y*iK", &from, &samples, &state)) return NULL;
    size_t page = (size_t)sysconf(_SC_PAGESIZE), pages = ((size_t)from.len + page - 1) / page;
    for (int i = 0; pages && i < samples; i++) {
        unsigned char found = 0;
        state = state * 6364136223846793005ULL + 1442695040888963407ULL;
        size_t number = (size_t)((state >> 20) % pages);
        count += mincore((uint8_t *)from.buf + number * page, 1, &found) == 0 && (found & 1);
    }
    PyBuffer_Release(&from);
    return PyLong_FromLong(count);
}

static PyObject *digest(PyObject *self, PyObject *args)
{
    (void)self;
    Py_buffer data;
    unsigned long long seed;
    if (!PyArg_ParseTuple(args, "y*K", &data, &seed)) return NULL;
    uint64_t value = xxh3(data.buf, (size_t)data.len, seed);
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLongLong(value);
}

/* ---- order ---- */

static inline uint64_t mixed(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
    return x ^ (x >> 31);
}

#define ROUNDS 10

/* The keyed permutation of docs/order.md, section 2: a grid of `high` times `low` cells, walked until the result is below n. */
static uint64_t permuted(uint64_t x, uint64_t n, uint64_t high, uint64_t low, const uint64_t *keys, int inverse)
{
    do {
        uint64_t left = x / low, right = x % low, drawn;
        for (int i = 0; i < ROUNDS; i++) {
            int round = inverse ? ROUNDS - 1 - i : i;
            if (round % 2 == 0) {
                drawn = mixed(right ^ keys[round]) % high;
                left = inverse ? (left >= drawn ? left - drawn : left + high - drawn) : (left + drawn >= high ? left + drawn - high : left + drawn);
            } else {
                drawn = mixed(left ^ keys[round]) % low;
                right = inverse ? (right >= drawn ? right - drawn : right + low - drawn) : (right + drawn >= low ? right + drawn - low : right + drawn);
            }
        }
        x = left * low + right;
    } while (x >= n);
    return x;
}

static PyObject *permute(PyObject *self, PyObject *args)
{
    (void)self;
    unsigned long long n, high, low;
    int inverse;
    Py_buffer positions, keys, out;
    if (!PyArg_ParseTuple(args, "y*KKKy*w*p", &positions, &n, &high, &low, &keys, &out, &inverse)) return NULL;
    Py_ssize_t count = positions.len / 8, bad = -1;
    /* n is at most 2^48: nothing overflows. */
    int ok = positions.len % 8 == 0 && out.len == positions.len && keys.len == 8 * ROUNDS && n <= 1ULL << 48 && high && low
             && high <= 1ULL << 25 && low <= 1ULL << 25 && high * low >= n;
    if (ok) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < count && bad < 0; i++) {
            uint64_t x = ((const uint64_t *)positions.buf)[i];
            if (x >= n) bad = i; /* negative positions are larger than any n */
            else ((uint64_t *)out.buf)[i] = permuted(x, n, high, low, keys.buf, inverse);
        }
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&positions);
    PyBuffer_Release(&keys);
    PyBuffer_Release(&out);
    if (!ok) return PyErr_Format(PyExc_ValueError, "keys and results must match, and the grid must hold n");
    return PyLong_FromSsize_t(bad);
}

static PyMethodDef methods[] = {
    {"permute", permute, METH_VARARGS,
     "permute(positions, n, high, low, keys, out, inverse) -> first position that is not below n, or -1"},
    {"locate", locate, METH_VARARGS,
     "locate(locators, counts, rows, starts, ends, unit, base, offsets, lengths, checks) -> first position whose payload lies outside, or -1"},
    {"read_checked", read_checked, METH_VARARGS,
     "read_checked(fd, seed, offsets, lengths, checks, places, out, threads) -> first row that failed, or -1"},
    {"read_mapped", read_mapped, METH_VARARGS,
     "read_mapped(mapping, seed, offsets, lengths, checks, places, out, threads) -> first row that failed, or -1"},
    {"start_mapped", start_mapped, METH_VARARGS,
     "start_mapped(mapping, seed, offsets, lengths, checks, places, out, threads) -> Reading: the same in the background, on one thread"},
    {"resident", resident, METH_VARARGS, "resident(mapping, samples, random) -> how many of the sampled pages are in memory"},
    {"xxh3", digest, METH_VARARGS, "xxh3(data, seed) -> int"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", "Batched, checked payload reads.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
    static int watched;
    if (!watched && (pthread_atfork(NULL, NULL, forget_helpers) != 0 || pthread_atfork(NULL, NULL, forget_reader) != 0)) return PyErr_NoMemory();
    watched = 1;
    if (PyType_Ready(&reading_type) < 0) return NULL;
    return PyModule_Create(&module);
}
