#include "parallel.h"

#include <pthread.h>

#include "hfa.h"

namespace hfa {
namespace {

using ParallelFn = void (*)(void (*)(void*), void*, unsigned, unsigned);
using NumberFn = int (*)();

ParallelFn gomp_parallel = nullptr;
NumberFn thread_num = nullptr, num_threads = nullptr, in_parallel = nullptr;
bool forked = false;

struct Call {
    void (*fn)(void*, int, int);
    void* data;
};

void enter(void* p) {
    const Call* call = static_cast<const Call*>(p);
    call->fn(call->data, thread_num(), num_threads());
}

}  // namespace

void run_region(void (*fn)(void*, int, int), void* data, int nthreads) {
    if (nthreads <= 1 || forked || !gomp_parallel || in_parallel()) return fn(data, 0, 1);
    Call call{fn, data};
    gomp_parallel(enter, &call, static_cast<unsigned>(nthreads), 0);
}

}  // namespace hfa

HFA_EXPORT int hfa_abi() { return HFA_ABI; }
HFA_EXPORT int64_t hfa_sizeof_weight() { return sizeof(HfaWeight); }

// Addresses of GOMP_parallel, omp_get_thread_num, omp_get_num_threads, omp_in_parallel in torch's runtime.
HFA_EXPORT void hfa_set_openmp(void* parallel, void* thread, void* threads, void* inside) {
    hfa::thread_num = reinterpret_cast<hfa::NumberFn>(thread);
    hfa::num_threads = reinterpret_cast<hfa::NumberFn>(threads);
    hfa::in_parallel = reinterpret_cast<hfa::NumberFn>(inside);
    hfa::gomp_parallel = reinterpret_cast<hfa::ParallelFn>(parallel);
    static bool once = pthread_atfork(nullptr, nullptr, [] { hfa::forked = true; }) == 0;
    (void)once;
}

// How many threads a region that asks for `nthreads` gets; each is counted once.
HFA_EXPORT int hfa_count_threads(int nthreads) {
    std::atomic<int> seen{0};
    hfa::parallel(nthreads, [&](int, int) { seen.fetch_add(1); });
    return seen.load();
}
