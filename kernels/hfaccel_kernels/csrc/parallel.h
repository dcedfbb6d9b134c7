// Threads: one region over torch's own OpenMP pool.
//
// Nothing here is compiled or linked with -fopenmp. native.py takes GOMP_parallel out of the OpenMP runtime that torch
// itself is linked to (libgomp; libomp and libiomp5 export it too) and hands it over, so a second runtime, with a
// second pool fighting the first, cannot be loaded, and any C++ compiler will do. `#pragma omp` would be ignored here:
// the build makes it an error.
#pragma once

#include <atomic>
#include <memory>
#include <sched.h>
#include <stdint.h>

namespace hfa {

// Calls fn(data, tid, nthreads) on up to `nthreads` threads of the pool and returns when all have. In a forked child
// (whose pool threads do not exist) and before hfa_set_openmp: once, as (0, 1).
void run_region(void (*fn)(void*, int, int), void* data, int nthreads);

// parallel(n, [&](int tid, int nthreads) { ... })
template <class F> void parallel(int nthreads, F&& body) {
    run_region([](void* f, int tid, int n) { (*static_cast<F*>(f))(tid, n); }, &body, nthreads);
}

// Contiguous share [begin, end) of `count` items for one thread.
struct Range { int64_t begin, end; };
static inline Range share(int64_t count, int tid, int nthreads) {
    return {count * tid / nthreads, count * (tid + 1) / nthreads};
}

static inline void cpu_pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// One per region, on its caller's stack. Spins for some microseconds, then yields the core to whoever holds us up.
class Barrier {
  public:
    void wait(int nthreads) {
        if (nthreads == 1) return;
        const unsigned mine = phase_.load(std::memory_order_relaxed);
        if (count_.fetch_add(1, std::memory_order_acq_rel) == nthreads - 1) {
            count_.store(0, std::memory_order_relaxed);
            phase_.store(mine + 1, std::memory_order_release);
            return;
        }
        for (int spin = 0; phase_.load(std::memory_order_acquire) == mine; ++spin) {
            if (spin < 2000) cpu_pause();
            else sched_yield();
        }
    }

  private:
    alignas(64) std::atomic<int> count_{0};
    alignas(64) std::atomic<unsigned> phase_{0};
};

// Work that threads take piece by piece, their own share first and then what is left of others': one whose core is
// taken from it for a while holds nobody up. Between two uses of `take` by one thread all pass a barrier.
class WorkSharing {
  public:
    explicit WorkSharing(int nthreads) : next_(new Next[2 * nthreads]) {}

    // body(piece) for each of `count` pieces, by one thread each. turn: of the calls, counted from 0.
    template <class F> void take(int64_t count, int64_t turn, int tid, int nthreads, F&& body) {
        Next* next = next_.get() + turn % 2 * nthreads;
        next_[(turn + 1) % 2 * nthreads + tid].at.store(0, std::memory_order_relaxed);  // everyone is done with those
        for (int i = 0; i < nthreads; ++i) {
            const int owner = (tid + i) % nthreads;
            const Range its = share(count, owner, nthreads);
            for (;;) {
                const int64_t piece = its.begin + next[owner].at.fetch_add(1, std::memory_order_relaxed);
                if (piece >= its.end) break;
                body(piece);
            }
        }
    }

  private:
    struct alignas(64) Next { std::atomic<int64_t> at{0}; };
    std::unique_ptr<Next[]> next_;
};

}  // namespace hfa
