/* A few threads that share the tasks of a computation in `kernel.c`.

   The calling thread takes part. The others, its helpers, wait for the next round of tasks: for a moment without going
   to sleep, because the rounds of an update follow each other within microseconds, then blocked. Tasks are claimed one by
   one, so a helper that gets no processor holds nobody up unless it has begun a task. Which thread computes a task must
   not matter to its result.

   The process has one group of helpers. Where two threads compute at the same time, one has the helpers and the other
   computes alone. */

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#define INLINE static inline __attribute__((always_inline))
#define MOST_THREADS 8         /* two networks of four parts each are no more tasks */
#define SPIN_NANOSECONDS 50000 /* how long anybody waits without going to sleep; waking up takes as long */

/* Compute a task. `thread` is the number of the thread that does, 0 for the calling one. */
typedef void task_function(void *context, int64_t task, int64_t thread);

/* A round of tasks in one number, which is changed as a whole: which round it is, how many threads take part, how many
   tasks it has (fewer than 4096), and the next one that nobody has claimed. */
#define TICKET(round, threads, tasks, next) ((uint64_t)(round) << 32 | (threads) << 24 | (tasks) << 12 | (next))
INLINE int64_t round_of(uint64_t ticket) { return ticket >> 32; }
INLINE int64_t threads_of(uint64_t ticket) { return ticket >> 24 & 255; }
INLINE int64_t tasks_of(uint64_t ticket) { return ticket >> 12 & 4095; }
INLINE int64_t next_of(uint64_t ticket) { return ticket & 4095; }

struct helper {
    pthread_t thread;
    pthread_cond_t called; /* somebody may have changed what it waits for */
    atomic_int sleeps;     /* it must be called; whoever calls it takes this back */
};

static struct {
    pthread_mutex_t owner;                /* held by the thread that uses the helpers, or changes their number */
    pthread_mutex_t sleep;                /* held between the decision to sleep and sleep itself */
    pthread_cond_t finished;              /* the last task of a round is done, and the calling thread sleeps */
    struct helper helpers[MOST_THREADS];  /* number 0 is the calling thread, which is none */
    int64_t num_started;                  /* helpers that exist */
    atomic_int num_threads;               /* wanted, with the calling one; helpers beyond it end */
    _Atomic uint64_t ticket;
    task_function *_Atomic function;      /* of this round */
    void *_Atomic context;
    atomic_int num_done, caller_sleeps;
} pool = {.owner = PTHREAD_MUTEX_INITIALIZER, .sleep = PTHREAD_MUTEX_INITIALIZER,
          .finished = PTHREAD_COND_INITIALIZER, .num_threads = 1};

INLINE void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb"); /* `yield` does nothing on most of them */
#endif
}

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * (int64_t)1000000000 + now.tv_nsec;
}

/* ------------------------------------------------------------------------------------------------ tasks */

/* Compute tasks of this round until none is left. */
static void take_tasks(int64_t round, int64_t thread) {
    for (;;) {
        uint64_t ticket = atomic_load(&pool.ticket);
        const int64_t task = next_of(ticket), num_tasks = tasks_of(ticket);
        if (round_of(ticket) != round || task >= num_tasks) return;
        /* They are of this round if the task can be claimed: they do not change while one is left. */
        task_function *function = atomic_load_explicit(&pool.function, memory_order_relaxed);
        void *context = atomic_load_explicit(&pool.context, memory_order_relaxed);
        if (!atomic_compare_exchange_weak(&pool.ticket, &ticket, ticket + 1)) continue;
        function(context, task, thread);
        if (atomic_fetch_add(&pool.num_done, 1) + 1 == num_tasks && atomic_load(&pool.caller_sleeps)) {
            pthread_mutex_lock(&pool.sleep);
            pthread_cond_signal(&pool.finished);
            pthread_mutex_unlock(&pool.sleep);
        }
    }
}

/* True if there is a round that this helper takes part in, other than the one that it has seen last. */
INLINE int is_called(int64_t index, int64_t seen) {
    const uint64_t ticket = atomic_load(&pool.ticket);
    return round_of(ticket) != seen && index < threads_of(ticket);
}

static void sleep_until_called(int64_t index, int64_t seen) {
    struct helper *self = pool.helpers + index;
    pthread_mutex_lock(&pool.sleep);
    for (;;) {
        /* First this, then the look at the ticket. The calling thread changes the ticket first, and then looks at this:
           so one of the two sees what the other has done. */
        atomic_store(&self->sleeps, 1);
        if (is_called(index, seen) || index >= atomic_load(&pool.num_threads)) break;
        pthread_cond_wait(&self->called, &pool.sleep);
    }
    atomic_store(&self->sleeps, 0);
    pthread_mutex_unlock(&pool.sleep);
}

static void *help(void *argument) {
    const int64_t index = (struct helper *)argument - pool.helpers;
    int64_t seen = 0, last_used = nanoseconds();
    while (index < atomic_load(&pool.num_threads)) {
        for (int i = 0; i < 32 && !is_called(index, seen); i++) relax();
        if (is_called(index, seen)) {
            seen = round_of(atomic_load(&pool.ticket));
            take_tasks(seen, index);
            last_used = nanoseconds();
        } else if (nanoseconds() - last_used > SPIN_NANOSECONDS) {
            sleep_until_called(index, seen);
            last_used = nanoseconds();
        } else sched_yield(); /* whoever else wants this core may have it: often that is the calling thread itself */
    }
    return 0;
}

/* Wait until all tasks of a round are done. */
static void await_tasks(int64_t num_tasks) {
    for (int64_t began = nanoseconds(); nanoseconds() - began < SPIN_NANOSECONDS; sched_yield())
        for (int i = 0; i < 32; i++) {
            if (atomic_load(&pool.num_done) == num_tasks) return;
            relax();
        }
    /* A helper has lost its processor within a task. It may need this one. */
    pthread_mutex_lock(&pool.sleep);
    atomic_store(&pool.caller_sleeps, 1);
    while (atomic_load(&pool.num_done) < num_tasks) pthread_cond_wait(&pool.finished, &pool.sleep);
    atomic_store(&pool.caller_sleeps, 0);
    pthread_mutex_unlock(&pool.sleep);
}

/* ------------------------------------------------------------------------------------------------ helpers */

/* A child process has the memory of its parent, but none of its helpers, and locks that nobody will open. */
static void forget_helpers(void) {
    pthread_mutex_init(&pool.owner, 0);
    pthread_mutex_init(&pool.sleep, 0);
    pthread_cond_init(&pool.finished, 0);
    pool.num_started = 0;
    atomic_store(&pool.num_threads, 1);
    atomic_store(&pool.caller_sleeps, 0);
}

/* Start helpers up to this number of threads. Where the system gives no more, those that there are have to do. */
static void start_helpers(int64_t num_threads) {
    static int is_prepared;
    if (!is_prepared) {
        is_prepared = 1;
        pthread_atfork(0, 0, forget_helpers);
    }
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before); /* new threads inherit it: signals are for Python's threads */
    while (pool.num_started + 1 < num_threads) {
        struct helper *next = pool.helpers + pool.num_started + 1;
        pthread_cond_init(&next->called, 0);
        atomic_store(&next->sleeps, 0);
        if (pthread_create(&next->thread, 0, help, next)) {
            atomic_store(&pool.num_threads, pool.num_started + 1);
            break;
        }
        pool.num_started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, 0);
}

/* Compute with so many threads from now on; helpers that are not needed end. */
void set_threads(int64_t num_threads) {
    num_threads = num_threads < 1 ? 1 : num_threads > MOST_THREADS ? MOST_THREADS : num_threads;
    pthread_mutex_lock(&pool.owner);
    pthread_mutex_lock(&pool.sleep);
    atomic_store(&pool.num_threads, num_threads);
    for (int64_t i = num_threads; i <= pool.num_started; i++) pthread_cond_signal(&pool.helpers[i].called);
    pthread_mutex_unlock(&pool.sleep);
    for (; pool.num_started >= num_threads; pool.num_started--) pthread_join(pool.helpers[pool.num_started].thread, 0);
    pthread_mutex_unlock(&pool.owner);
}

int64_t get_threads(void) { return atomic_load(&pool.num_threads); }

/* Compute tasks on up to this number of threads, and return when all are done. */
static void run_tasks(int64_t num_tasks, int64_t num_threads, task_function *function, void *context) {
    num_threads = num_threads < num_tasks ? num_threads : num_tasks;
    if (num_threads <= 1 || get_threads() <= 1 || pthread_mutex_trylock(&pool.owner)) {
        for (int64_t task = 0; task < num_tasks; task++) function(context, task, 0);
        return;
    }
    const int64_t wanted = get_threads(); /* nobody changes it now */
    num_threads = num_threads < wanted ? num_threads : wanted;
    if (pool.num_started + 1 < num_threads) start_helpers(num_threads);
    atomic_store_explicit(&pool.function, function, memory_order_relaxed);
    atomic_store_explicit(&pool.context, context, memory_order_relaxed);
    atomic_store(&pool.num_done, 0);
    /* 0 is a round that no helper has seen, but all begin with. */
    const int64_t last = round_of(atomic_load(&pool.ticket)), round = last == UINT32_MAX ? 1 : last + 1;
    atomic_store(&pool.ticket, TICKET(round, num_threads, num_tasks, 0));
    for (int64_t i = 1; i < num_threads && i <= pool.num_started; i++)
        if (atomic_exchange(&pool.helpers[i].sleeps, 0)) {
            pthread_mutex_lock(&pool.sleep);
            pthread_cond_signal(&pool.helpers[i].called);
            pthread_mutex_unlock(&pool.sleep);
        }
    take_tasks(round, 0);
    await_tasks(num_tasks);
    pthread_mutex_unlock(&pool.owner);
}
