// Splits a range of independent work items over threads.
#pragma once

#include <cstdint>
#include <functional>

namespace laconic {

// Calls work(first, last) on contiguous parts of [0, count) until all of it is done, on the calling
// thread and on up to num_threads - 1 others. `work` must not throw. It runs in the default
// floating-point mode (round to nearest, subnormals kept), whatever mode the caller is in.
//
// The other threads are torch's own where the main thread calls and torch computes with OpenMP;
// else they belong to a pool that grows to the largest num_threads asked for and lives as long as
// the process: starting a thread takes longer than most calls. Parts are small and handed out as
// they are finished, so a call hardly waits for a thread that is slow to wake up.
void parallel_for(int64_t count, int64_t num_threads,
                  const std::function<void(int64_t, int64_t)>& work);

}  // namespace laconic
