// Splits a range of independent work items over threads.
#pragma once

#include <cstdint>
#include <functional>

namespace laconic {

// Calls work(first, last) on up to `num_threads` contiguous parts of [0, count), one of them on the
// calling thread, and returns when all are done. `work` must not throw. Each part runs in the
// default floating-point mode (round to nearest, subnormals kept), whatever mode the caller is in.
void parallel_for(int64_t count, int64_t num_threads,
                  const std::function<void(int64_t, int64_t)>& work);

}  // namespace laconic
