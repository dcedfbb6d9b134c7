// Threads: one region over torch's own OpenMP pool.
//
// Nothing here is compiled or linked with -fopenmp. native.py takes GOMP_parallel out of the OpenMP runtime that torch
// itself is linked to (libgomp; libomp and libiomp5 export it too) and hands it over, so a second runtime, with a
// second pool fighting the first, cannot be loaded, and any C++ compiler will do. `#pragma omp` would be ignored here:
// the build makes it an error.
#pragma once

#include <atomic>
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

}  // namespace hfa
