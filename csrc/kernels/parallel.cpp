#include "parallel.h"

#include <system_error>
#include <thread>
#include <vector>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace laconic {
namespace {

class DefaultFloatingPointMode {
#if defined(__SSE2__)
 public:
  DefaultFloatingPointMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~DefaultFloatingPointMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#else
 public:
  DefaultFloatingPointMode() {}
#endif
};

}  // namespace

void parallel_for(int64_t count, int64_t num_threads,
                  const std::function<void(int64_t, int64_t)>& work) {
  const auto run = [&](int64_t part) {
    const DefaultFloatingPointMode mode;
    work(count * part / num_threads, count * (part + 1) / num_threads);
  };
  std::vector<std::thread> threads;
  int64_t part = 1;
  try {
    for (; part < num_threads; ++part) threads.emplace_back(run, part);
  } catch (const std::system_error&) {
    // The system has no thread left to give; the calling thread does the remaining parts.
  }
  run(0);
  for (; part < num_threads; ++part) run(part);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace laconic
